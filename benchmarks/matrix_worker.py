"""One process of the reload matrix: one row, one mode, one engine.

`python -m benchmarks.matrix_worker JOB.json` reads a `Job` and writes what it saw
to the job's `out`, anew after each step, so that a crash loses nothing. Modes:

    cold-…       start on the weights `a` or `b`, and that is all
    stock        start on `a`; then vLLM's own `reload_weights` from disk: a, b, b under pressure, a
    weightsync   the same through our worker extension, a sender in a thread of this process, and gloo

After each step: greedy tokens and log-probabilities, a digest of every tensor that
the model has registered (`registered`) or otherwise reaches (`owned`), and the
addresses of the registered ones. *Under pressure* means that blocks which the
reload freed are filled with ones (NaN in every float format, -1 in every integer)
before the engine runs again, as another tenant of the allocator would.

Not covered: engines in several processes; memory that no Python object holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightsync.check.contents import contents, kernels
from weightsync.check.engine import OURS, Trainer, generate

#: Steps of a warm engine: name, and weights that it ought to hold then.
WARM_STEPS = (("start", "a"), ("same", "a"), ("new", "b"), ("pressed", "b"), ("back", "a"))
_SMALL_BLOCK = 1 << 20  # torch serves requests up to this size from segments of their own


@dataclass(frozen=True)
class Job:
    """What a process is to do; see the module."""

    row: str
    mode: str
    device: str
    folders: dict[str, str]
    engine_args: dict[str, Any]
    prompts: list[list[int]]
    max_tokens: int
    out: str
    env: dict[str, str] = field(default_factory=dict)


def press(device: str, model: torch.nn.Module) -> int:
    """Fill memory that the process has freed and not given back with ones; bytes filled."""
    if device == "cpu":
        # The C heap keeps no list that can be read: many blocks of the sizes that tensors of this model have.
        sizes = sorted({tensor.nbytes for tensor in model.state_dict().values() if 0 < tensor.nbytes <= 8 << 20})
        held = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes for _ in range(16)]
        return sum(tensor.nbytes for tensor in held)
    torch.cuda.synchronize()
    held = []
    for _ in range(4):  # what is left of a block after a smaller request was served from it is found the next time
        blocks = [
            (segment["stream"], block["size"], segment["segment_type"] == "small")
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)  # not the graphs' own pool
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
        for stream, size, small in sorted(blocks, reverse=True):
            with torch.cuda.stream(torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()):
                for part in [_SMALL_BLOCK] * (size // _SMALL_BLOCK) + [size % _SMALL_BLOCK] if small else [size]:
                    if part and (small or part > _SMALL_BLOCK):
                        held.append(torch.full((part,), 255, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return sum(tensor.nbytes for tensor in held)


class Run:
    """One engine and its record.

    Args:
        job: what to do.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.record: dict[str, Any] = {"row": job.row, "mode": job.mode, "steps": [], "error": None, "versions": {}}
        self._llm: Any = None
        self._model: Any = None
        self._trainer: Trainer | None = None

    def run(self) -> None:
        """All steps, until one fails; what failed is in the record."""
        step = "start"
        try:
            letter = self.job.mode.split("-")[1] if self.job.mode.startswith("cold-") else "a"
            self._start(letter)
            self._note(step, letter, {})
            for step, letter in () if self.job.mode.startswith("cold-") else WARM_STEPS[1:]:
                self._note(step, letter, self._update(step, letter))
        except Exception as exc:
            self.record["error"] = f"{step}: {type(exc).__name__}: {_short(str(exc))}"
            self.record["failed_step"] = step
            print(f"{self.job.row} {self.job.mode}", self.record["error"], file=sys.stderr, flush=True)
            import traceback

            traceback.print_exc()
        self._write()

    def _start(self, letter: str) -> None:
        import vllm

        self.record["versions"] = {"torch": torch.__version__, "vllm": vllm.__version__, "python": sys.version.split()[0]}
        if self.job.device == "cuda":
            self.record["versions"] |= {"cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()}
        self._write()
        ours = OURS if self.job.mode == "weightsync" else {}
        began = time.perf_counter()
        self._llm = vllm.LLM(model=self.job.folders[letter], **self.job.engine_args, **ours)
        self.record["load_seconds"] = round(time.perf_counter() - began, 2)
        self._model = self._llm.collective_rpc(lambda worker: worker.get_model())[0]
        self.record["kernels"] = kernels(self._model)
        with contextlib.suppress(ImportError, AttributeError):
            from vllm.compilation.counter import compilation_counter

            self.record["graphs"] = compilation_counter.num_cudagraph_captured
        if self.job.mode == "weightsync":
            self._trainer = Trainer(self._llm)

    def _update(self, step: str, letter: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        folder, details = self.job.folders[letter], {}
        if self._trainer is not None:
            report = self._trainer.sync(load_file(Path(folder) / "model.safetensors"))
            details = {"seconds": report["seconds"], "checks": report["checks"]}
        else:
            began = time.perf_counter()
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            if self.job.device == "cuda":
                torch.cuda.synchronize()
            details = {"seconds": {"apply": time.perf_counter() - began}, "checks": {}}
        if step == "pressed":
            details["pressed_bytes"] = press(self.job.device, self._model)
        return details

    def _note(self, step: str, letter: str, details: dict[str, Any]) -> None:
        entry = {"step": step, "weights": letter, **details}
        self.record["steps"].append(entry)
        entry["outputs"] = generate(self._llm, self.job.prompts, self.job.max_tokens)
        entry |= contents(self._model)
        entry["complete"] = True
        self._write()

    def _write(self) -> None:
        out = Path(self.job.out)
        part = out.with_suffix(".part")
        part.write_text(json.dumps(self.record))
        part.replace(out)


def _short(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[:3])[:600]


def main() -> None:
    """Do the job that the only argument names."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Run(job).run()
    sys.stdout.flush()
    os._exit(0)  # vLLM's and gloo's threads can hold up an ordinary exit


def dump(job: Job, path: Path) -> None:
    """Write a job to where a process is to read it."""
    path.write_text(json.dumps(asdict(job)))


if __name__ == "__main__":
    main()
