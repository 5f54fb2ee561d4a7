"""One process of the reload matrix: one row, one mode, one engine.

`python -m benchmarks.matrix_worker JOB.json` reads a `Job` and writes what it saw
to the job's `out`, anew after each step, so that a crash loses nothing. Modes:

    cold-…       start on the weights `a` or `b`, and that is all
    stock        start on `a`; then vLLM's own `reload_weights` from disk: a, b, b under pressure, a
    weightsync   the same through our worker extension, a sender in a thread of this process, and gloo;
                 then with scratch overwritten, and last with all else that nobody owns set to zero

After each step: greedy tokens and log-probabilities, twice, and eight times more if
this engine does not repeat itself; the mean loss on fixed streams; a digest of every tensor that
the model has registered (`registered`) or otherwise reaches (`owned`), and the
addresses of the registered ones. *Under pressure* means that blocks which the
reload freed are filled with ones (NaN in every float format, -1 in every integer)
before the engine runs again, as another tenant of the allocator would.

With WEIGHTSYNC_MATRIX_HISTORY=1 the allocator keeps the Python stack of every block.

Not covered: engines in several processes; memory that no Python object holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import matrix_scratch
from weightsync.check.contents import contents, kernels
from weightsync.check.engine import OURS, Trainer, contract_report, generate, mean_loss, sealed_memory
from weightsync.worker import tiles

#: Steps of a warm engine: name, and weights that it ought to hold then.
WARM_STEPS = (("start", "a"), ("same", "a"), ("new", "b"), ("pressed", "b"), ("back", "a"))
#: One more of ours: nothing is loaded, scratch is overwritten.
REFILLED = ("refilled", "a")
#: Items of a list or a mapping, and letters of a text, that are kept of a contract's report.
_ITEMS, _LETTERS = 24, 300
_TWICE, _MORE = 2, 8
#: Under this name every process finds the weights that it starts on, where it is started.
MODEL = "model"
_NAMED = 4  # slots with an owner are told of by their counts


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
    streams: list[list[int]]
    env: dict[str, str] = field(default_factory=dict)


def weights_at_start(mode: str) -> str:
    """Which weights an engine starts on."""
    return mode.split("-")[1] if mode.startswith("cold-") else "a"


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
            self._start()
            self._note(step, weights_at_start(self.job.mode), {})
            for step, letter in () if self.job.mode.startswith("cold-") else WARM_STEPS[1:]:
                self._note(step, letter, self._update(step, letter))
            if self._trainer is not None:
                step, letter = REFILLED
                contract, pins = sealed_memory(self._llm)
                named = matrix_scratch.refill(matrix_scratch.scratch_of(self._model, contract, pins))
                self._note(step, letter, {"refilled": named | matrix_scratch.blank(matrix_scratch.unowned(contract, scratch=True))})
                self._blank()
        except Exception as exc:
            notes = "; ".join(getattr(exc, "__notes__", ()))
            self.record["error"] = f"{step}: {type(exc).__name__}: {_short(str(exc))}{f' ({notes})' if notes else ''}"
            self.record["failed_step"] = step
            print(f"{self.job.row} {self.job.mode}", self.record["error"], file=sys.stderr, flush=True)
            traceback.print_exc()
        self._write()

    def _start(self) -> None:
        import vllm

        self.record["versions"] = {"torch": torch.__version__, "vllm": vllm.__version__, "python": sys.version.split()[0]}
        if self.job.device == "cuda":
            self.record["versions"] |= {"cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()}
            if os.environ.get("WEIGHTSYNC_MATRIX_HISTORY") == "1":
                torch.cuda.memory._record_memory_history(stacks="python")
        self._write()
        ours = OURS if self.job.mode == "weightsync" else {}
        tiles.ask()
        began = time.perf_counter()
        self._llm = vllm.LLM(model=MODEL, **self.job.engine_args, **ours)
        self.record["load_seconds"] = round(time.perf_counter() - began, 2)
        self._model = self._llm.collective_rpc(lambda worker: worker.get_model())[0]
        self.record["kernels"] = kernels(self._model)
        with contextlib.suppress(ImportError, AttributeError):
            from vllm.compilation.counter import compilation_counter

            self.record["graphs"] = compilation_counter.num_cudagraph_captured
        if self.job.mode == "weightsync":
            self._trainer = Trainer(self._llm)
            self.record["seal_seconds"] = self._trainer.sealed["seconds"]
            report = contract_report(self._llm)
            self.record["contract"] = bounded(report | {"named": report["named"][:_NAMED]})

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
            details["pressed_bytes"] = matrix_scratch.press(self.job.device, self._model)
        return details

    def _note(self, step: str, letter: str, details: dict[str, Any]) -> None:
        entry = {"step": step, "weights": letter, **details}
        self.record["steps"].append(entry)
        answers = [generate(self._llm, self.job.prompts, self.job.max_tokens) for _ in range(_TWICE)]
        losses = [mean_loss(self._llm, self.job.streams) for _ in range(_TWICE)]
        if answers[0] != answers[1] or losses[0] != losses[1]:  # then two answers say little of how far apart they may be
            answers += [generate(self._llm, self.job.prompts, self.job.max_tokens) for _ in range(_MORE)]
            losses += [mean_loss(self._llm, self.job.streams) for _ in range(_MORE)]
        entry |= {"outputs": answers[0], "again": answers[1:], "losses": losses}
        entry |= contents(self._model)
        entry["complete"] = True
        self._write()

    def _blank(self) -> None:
        """Evidence, not a step: whether this engine answers as before without what nobody owns and nothing shows to be scratch."""
        contract, _ = sealed_memory(self._llm)
        left = matrix_scratch.unowned(contract, scratch=False)
        if not left:
            return
        self.record["blanked"] = {"outputs": "the process ended", "slots": {}}
        self._write()  # this is what stays when a kernel takes a zero for an address
        try:
            self.record["blanked"]["slots"] = bounded(matrix_scratch.blank(left))
            outputs = generate(self._llm, self.job.prompts, self.job.max_tokens)
            same = outputs == self.record["steps"][-1]["outputs"]
            self.record["blanked"]["outputs"] = "equal to the bit" if same else "others"
        except Exception as exc:
            self.record["blanked"]["outputs"] = f"{type(exc).__name__}: {_short(str(exc))}"

    def _write(self) -> None:
        out = Path(self.job.out)
        part = out.with_suffix(".part")
        part.write_text(json.dumps(self.record))
        part.replace(out)


def bounded(value: Any) -> Any:
    """Plain data with long lists, mappings and texts cut, and a word on how much was."""
    if isinstance(value, dict):
        kept = {str(key)[:_LETTERS]: bounded(item) for key, item in list(value.items())[:_ITEMS]}
        return kept | ({"…": f"{len(value) - _ITEMS} more"} if len(value) > _ITEMS else {})
    if isinstance(value, (list, tuple)):
        return [*map(bounded, value[:_ITEMS]), *([f"… {len(value) - _ITEMS} more"] if len(value) > _ITEMS else [])]
    return value[:_LETTERS] if isinstance(value, str) else value


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
