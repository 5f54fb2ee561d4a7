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
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

#: Steps of a warm engine: name, and weights that it ought to hold then.
WARM_STEPS = (("start", "a"), ("same", "a"), ("new", "b"), ("pressed", "b"), ("back", "a"))
#: Parts of owners' paths that hold no weights and change as the engine runs, and why.
SCRATCH = {"kv_cache": "the KV cache", "workspace": "scratch and locks of kernels"}
_DEADLINE_SECONDS = 120.0
_BUCKET_BYTES = 16 << 20
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


class Trainer:
    """Sends updates to the engine of the same process, as a trainer would.

    Args:
        llm: an engine with the worker extension.
    """

    def __init__(self, llm: Any) -> None:
        from weightsync.protocol import CommunicatorInfo
        from weightsync.transport.rendezvous import host_store

        self._llm = llm
        self._store = host_store("127.0.0.1", _DEADLINE_SECONDS)
        self._info = CommunicatorInfo("127.0.0.1", self._store.port, 1, 2, {"0": 1}, "gloo")
        self._communicator: Any = None
        self._version = 0
        self._require(self._call("describe"), "none")

    def sync(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """One update, to its verdict.

        Returns:
            The worker's last report.

        Raises:
            RuntimeError: the worker or the sender failed.
        """
        from weightsync.client.source import offer
        from weightsync.codec import encode
        from weightsync.protocol import BeginOrder, UpdateRequest
        from weightsync.transport.packing import plan_buckets

        self._version += 1
        update, offered = f"u-{self._version}", offer(tensors)
        plan = plan_buckets(offered.manifest, _BUCKET_BYTES)
        request = UpdateRequest(
            update, "trainer", self._version, offered.manifest, _BUCKET_BYTES, plan.hash, _DEADLINE_SECONDS, "gloo", torch.__version__
        )
        order = BeginOrder(request, self._info, 0, 1, _DEADLINE_SECONDS)
        self._require(self._call("begin", encode(order)), "receiving", "staged")
        sent: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: sent.append(self._send(offered, plan)), daemon=True)
        thread.start()
        report = self._call("poll")
        while report["state"] == "receiving":
            if sent and sent[0] is not None:
                raise RuntimeError(f"sending failed: {sent[0]}")
            time.sleep(0.01)
            report = self._call("poll")
        thread.join(_DEADLINE_SECONDS)
        self._require(report, "staged")
        self._require(self._call("apply", update), "applied")
        return self._require(self._call("verdict", update), "verified")

    def _send(self, offered: Any, plan: Any) -> BaseException | None:
        from weightsync.client.sender import Sender
        from weightsync.transport.communicator import Communicator

        try:
            if self._communicator is None:
                self._communicator = Communicator(self._info, 0, torch.device("cpu"), _DEADLINE_SECONDS, _DEADLINE_SECONDS)
            deadline = time.monotonic() + _DEADLINE_SECONDS
            Sender(offered, plan, None).send(self._communicator, deadline, lambda: False, lambda: None)
        except Exception as exc:
            return exc
        return None

    def _call(self, name: str, *args: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._llm.collective_rpc(f"weightsync_{name}", args=args)[0]
        return answer

    def _require(self, report: dict[str, Any], *states: str) -> dict[str, Any]:
        if report["state"] not in states or report["error"]:
            error = report["error"] or {}
            checks = {key: count for key, count in report["checks"].items() if count}
            raise RuntimeError(f"{error.get('code', report['state'])}: {error.get('message', 'no error')} (checks: {checks})")
        return report


def generate(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Greedy continuations, one prompt at a time: the size of a batch may pick other kernels."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    tokens, logprobs = [], []
    for prompt in prompts:
        output = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)[0].outputs[0]
        tokens.append([int(token) for token in output.token_ids])
        logprobs.append([float(at[token].logprob) for at, token in zip(output.logprobs, output.token_ids, strict=True)])
    return {"tokens": tokens, "logprobs": logprobs}


def contents(model: torch.nn.Module) -> dict[str, Any]:
    """Digests and addresses of what a model holds."""
    from weightsync.storage.owners import walk

    registered = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found = walk(model, "model")
    names = {f"model.{name}" for name in registered}
    others = {path: tensor for path, tensor in found.tensors.items() if path not in names}
    scratch = {path: tensor for path, tensor in others.items() if any(part in path for part in SCRATCH)}
    return {
        "registered": {name: fingerprint(tensor) for name, tensor in registered.items()},
        "owned": {path: fingerprint(tensor) for path, tensor in others.items() if path not in scratch},
        "scratch": {path: tensor.nbytes for path, tensor in scratch.items()},
        "scalars": {path: repr(value) for path, value in found.scalars.items()},
        "addresses": {name: tensor.data_ptr() for name, tensor in registered.items()},
        "truncated": list(found.truncated),
    }


def fingerprint(tensor: torch.Tensor) -> str:
    """Dtype, shape and digest of the elements."""
    from weightsync.transport.digest import digest_tensor, to_hex

    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return f"{kind}:{tensor.device.type}"
    return f"{kind}:{to_hex(digest_tensor(tensor))}"


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


def kernels(model: torch.nn.Module) -> list[str]:
    """Classes of quantisation methods, schemes and kernels in a model, for the record."""
    names = set()
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        for value in (method, getattr(layer, "scheme", None), getattr(layer, "impl", None)):
            for part in (value, getattr(value, "kernel", None), getattr(getattr(value, "moe_kernel", None), "fused_experts", None)):
                if part is not None and not isinstance(part, torch.nn.Module):
                    names.add(type(part).__name__)
    return sorted(names - {"function", "method", "NoneType", "UnquantizedEmbeddingMethod"})


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
        ours: dict[str, Any] = {}
        if self.job.mode == "weightsync":
            extension = "weightsync.worker.extension.WeightSyncExtension"
            ours = {"worker_extension_cls": extension, "weight_transfer_config": {"backend": "weightsync"}}
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
