"""Weights that are staged, written into a live engine and proved, beside vLLM's own reload of them: one command, one JSON file, one table.

    python -m benchmarks.apply [--cases bf16,bf16-host,fp8,bf16-moe,fp8-moe] [--layers 36] [--moe-layers 12] [--updates 4]

For each case two engines with CUDA graphs start on random weights, each in a process of its own: one with weightsync, whose
trainer is a thread beside it, and one without. All engines start at once; then one case after the other has the GPU to itself.
An update is staged before the time is taken. `weightsync` is from there to its verdict: written, brought back to the captured storage,
and every slot of it checked; updates behind the first, which goes the general way (`first`). `stock` is `reload_weights` of the same
bytes on the same device, which checks nothing. What the model holds behind the first update, and behind the last of the same weights, is
compared to the bit (`same`). `floor` is one copy of as many bytes on the device, or from host memory that the driver
knows. `digests` is what a digest of as many bytes takes, as it is made of what is received, while bytes arrive.
Dense models have the shape of Qwen3-8B, `moe` that of Qwen3-30B-A3B, with as many layers as asked for; `fp8` is quantised by
the engine, per channel, from bf16.

Not covered: several workers; what the broadcast takes (`benchmarks.transport`).
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import io
import json
import multiprocessing
import os
import platform
import pstats
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.transport import SHAPES
from benchmarks.two_gpus import checkpoint_of, config, shapes_of
from weightsync.check.contents import contents, differing
from weightsync.transport import digest
from weightsync.transport.packing import bucket_bytes_for

#: vLLM's arguments of a case, by what its name begins with.
FORMATS: dict[str, dict[str, Any]] = {"bf16": {}, "fp8": {"quantization": "fp8_per_channel"}}
CASES = ("bf16", "bf16-host", "fp8", "bf16-moe", "fp8-moe")
_ENGINE: dict[str, dict[str, Any]] = {
    "cuda": {
        "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.15, "cudagraph_capture_sizes": [1, 2, 4],
        "kernel_config": {"enable_flashinfer_autotune": False},
    },
    "cpu": {"kv_cache_memory_bytes": 32 << 20, "enforce_eager": True, "dtype": "bfloat16"},
}  # fmt: skip
_COMMON: dict[str, Any] = {"load_format": "dummy", "max_model_len": 512, "max_num_seqs": 16, "skip_tokenizer_init": True}
_RESULTS = Path(__file__).parent / "results"


def moe(layers: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """`config.json` and tensors of Qwen3-30B-A3B, cut to so many layers."""
    hidden, expert, experts, heads, kv, head, words = 2048, 768, 128, 32, 4, 128, 151_936
    given = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": 6144, "moe_intermediate_size": expert, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "vocab_size": words, "num_experts": experts,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
        "attention_bias": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e6, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for number in range(layers):
        at = f"model.layers.{number}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (size * head, hidden) for name, size in (("q", heads), ("k", kv), ("v", kv))}
        shapes |= {f"{at}.self_attn.o_proj.weight": (hidden, heads * head), f"{at}.mlp.gate.weight": (experts, hidden)}
        shapes |= {f"{at}.{name}layernorm.weight": (hidden,) for name in ("input_", "post_attention_")}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (head,) for name in ("q", "k")}
        for index in range(experts):
            shapes |= {f"{at}.mlp.experts.{index}.{name}_proj.weight": (expert, hidden) for name in ("gate", "up")}
            shapes[f"{at}.mlp.experts.{index}.down_proj.weight"] = (hidden, expert)
    return given, shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}


def model(case: str, given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """`config.json` and tensors of a case."""
    if case.endswith("moe"):
        return moe(given.moe_layers)
    return config(given.layers, given.shape), shapes_of(given.layers, given.shape)


def weights(shapes: dict[str, tuple[int, ...]], seed: int, device: str) -> dict[str, torch.Tensor]:
    """Tensors that differ from seed to seed, as windows into one pool of random numbers: gigabytes of them take long to draw."""
    random = torch.Generator(device).manual_seed(seed)
    most = max(torch.Size(shape).numel() for shape in shapes.values())
    pool = torch.empty(most + 4096 * 64, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02, generator=random)
    step = len(pool) - most
    return {
        name: pool[(start := (index * 64 * 37 + seed) % step) : start + torch.Size(shape).numel()].view(shape)
        for index, (name, shape) in enumerate(shapes.items())
    }


# --- in an engine's process ----------------------------------------------------------------------


class Engine:
    """One engine in this process.

    Args:
        case, folder, arguments: what it runs.
        ours: with weightsync.
    """

    def __init__(self, case: str, folder: str, shapes: dict[str, tuple[int, ...]], arguments: dict[str, Any], ours: bool) -> None:
        import vllm

        from weightsync.check.engine import OURS, Trainer
        from weightsync.worker import tiles

        tiles.ask()
        self._case, self._shapes, self.versions = case, shapes, {"vllm": vllm.__version__, "torch": torch.__version__}
        self._llm: Any = vllm.LLM(model=folder, **arguments, **(OURS if ours else {}))
        self._cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._cuda else torch.device("cpu")
        self._trainer = Trainer(self._llm) if ours else None
        self.sealed = self._trainer.sealed["seconds"] if self._trainer else {}

    def ours(self, updates: int, profile: bool) -> dict[str, Any]:
        """Milliseconds of updates by weightsync, from staged to proved."""
        trainer, kinds = self._trainer, [weights(self._shapes, seed, "cpu") for seed in (1, 2)]
        assert trainer is not None
        nbytes = sum(tensor.nbytes for tensor in kinds[0].values())
        where, taken, extra, checks = ("host" if "host" in self._case else "gpu"), list[float](), list[int](), list[dict[str, int]]()
        parts: list[dict[str, float]] = []
        general: dict[str, Any] = {}
        different: dict[str, str] = {}
        for number in range(updates):
            update = trainer.stage(kinds[number % 2], where=where, bucket_bytes=bucket_bytes_for(nbytes, on_gpu=self._cuda))
            before = self._peak()
            watched = cProfile.Profile() if profile and number == 1 else None
            if watched is not None:
                watched.enable()
            seconds, report = self._timed(functools.partial(trainer.apply, update))
            if watched is not None:
                watched.disable()
                print(f"== {self._case}, update {number}: {seconds * 1e3:.1f} ms\n{_top(watched)}", file=sys.stderr, flush=True)
            extra.append(self._peak() - before)
            taken.append(seconds * 1e3)
            parts.append({name: round(report["seconds"][name] * 1e3, 2) for name in ("apply", "verify")})
            checks.append({name: count for name, count in report["checks"].items() if name in ("layers", "layers_planned", "adopted")})
            trainer.keep(update)
            if number % 2 == 0:  # the weights of the first
                held = self._llm.collective_rpc(lambda worker: contents(worker.get_model()))[0]
                general = general or held
                different = differing(general, held)
        return {
            "bytes": nbytes, "tensors": len(self._shapes), "first_ms": round(taken[0], 2), "ms": [round(one, 2) for one in taken[1:]],
            "extra_bytes": max(extra[1:], default=0), "same": not different, "different": dict(list(different.items())[:8]),
            "parts_ms": parts, "checks": checks[-1], "sealed_seconds": self.sealed,
        }  # fmt: skip

    def stock(self, updates: int) -> list[float]:
        """Milliseconds of vLLM's own reload of tensors on the device."""
        taken = []
        for number in range(updates + 1):
            tensors = weights(self._shapes, number % 2 + 1, str(self._device))
            reload = functools.partial(self._llm.collective_rpc, lambda worker, sent: worker.reload_weights(weights_iterator=iter(sent)))
            taken.append(self._timed(functools.partial(reload, args=(list(tensors.items()),)))[0] * 1e3)
        return [round(one, 2) for one in taken[1:]]

    def floor(self, nbytes: int) -> dict[str, float]:
        """Milliseconds of one copy of as many bytes, and of a digest of them."""
        into = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        source = torch.ones_like(into)
        if "host" in self._case and self._cuda:
            source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        copies = [self._timed(lambda: into.copy_(source, non_blocking=True))[0] for _ in range(5)]
        runs = into[: nbytes // 64 * 64].view(-1).split(64 << 20)

        def digests() -> None:
            batch = digest.Batch(len(runs), self._device)
            for run in runs:
                batch.add(run)
            batch.results()

        digest.prepare(self._device, ["bfloat16"])
        sums = [self._timed(digests)[0] for _ in range(3)]
        return {"floor_ms": round(min(copies) * 1e3, 2), "digest_ms": round(min(sums) * 1e3, 2)}

    def _timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        if self._cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        result = call()
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began, result

    def _peak(self) -> int:
        if not self._cuda:
            return 0
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


def _top(profile: cProfile.Profile) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(22)
    return text.getvalue()


def serve(pipe: Connection, ours: bool, case: str, folder: str, shapes: dict[str, tuple[int, ...]], arguments: dict[str, Any]) -> None:
    """Body of a process: an engine, asked over a pipe for its methods."""
    from weightsync.check.environment import ENGINE_ENV

    os.environ |= ENGINE_ENV["cuda" if torch.cuda.is_available() else "cpu"]
    try:
        engine = Engine(case, folder, shapes, arguments, ours)
        pipe.send(engine.versions)
        while (asked := pipe.recv()) is not None:
            pipe.send(getattr(engine, asked[0])(*asked[1:]))
    except Exception as exc:
        traceback.print_exc()
        pipe.send(exc)
    os._exit(0)


class Process:
    """An engine's process."""

    def __init__(self, *given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *given), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *what: Any) -> Any:
        """What a method answers; its exception is raised. Without a name: that the engine has started."""
        if what:
            self._pipe.send(what)
        said = self._pipe.recv()
        if isinstance(said, Exception):
            raise said
        return said

    def end(self) -> None:
        self._process.kill()
        self._process.join()


# --- the run -------------------------------------------------------------------------------------


def measure(case: str, ours: Process, stock: Process, given: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    found = ours.ask("ours", given.updates, given.profile)
    floor = ours.ask("floor", found["bytes"])
    theirs = stock.ask("stock", given.updates - 1)
    middle = statistics.median(found["ms"])
    return {
        "case": case, "layers": given.moe_layers if case.endswith("moe") else given.layers, "date": time.strftime("%Y-%m-%d"),
        "bytes": found["bytes"], "floor_ms": floor["floor_ms"], "stock_ms": statistics.median(theirs),
        "weightsync_ms": round(middle, 2), "digests": floor["digest_ms"],
        "extra_bytes": found["extra_bytes"], "first_ms": found["first_ms"], "times_stock": round(statistics.median(theirs) / middle, 1),
        "each_ms": found["ms"], "each_stock_ms": theirs, "parts_ms": found["parts_ms"], "checks": found["checks"],
        "tensors": found["tensors"], "same": found["same"], "different": found["different"], "sealed_seconds": found["sealed_seconds"],
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """For reading."""
    lines = [
        "| case | GB | floor | vLLM's reload | weightsync, proved | of them apply, verify | first update | same |",
        "|---|" + "---|" * 7,
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['case']} | failed: {row['failed']} |" + " |" * 6)
            continue
        parts = row["parts_ms"][-1]
        ours = f"{row['weightsync_ms']:.1f} ms ({row['times_stock']} x)"
        lines.append(
            f"| {row['case']} | {row['bytes'] / 1e9:.1f} | {row['floor_ms']:.1f} ms | {row['stock_ms']:.0f} ms | {ours} | "
            f"{parts['apply']:.1f}, {parts['verify']:.1f} ms | {row['first_ms']:.0f} ms | {'yes' if row['same'] else 'no'} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, write the file, print the table; the exit status says whether every case was measured, and right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b", help="of dense cases")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--moe-layers", type=int, default=12)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="print where Python spends its time in the second update")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "cpu"
    out = given.out or _RESULTS / f"apply-{'h200' if 'H200' in device else device.replace(' ', '-').lower()}.json"
    out.parent.mkdir(exist_ok=True)
    # Rows of other cases stay: each was measured side by side.
    kept = [row for row in json.loads(out.read_text())["rows"] if row["case"] not in given.cases] if out.is_file() else []
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {"python": platform.python_version()}
    with tempfile.TemporaryDirectory() as made:
        running: dict[str, list[Process]] = {}
        for case in given.cases:
            settings, shapes = model(case, given)
            folder = checkpoint_of(Path(made) / case, settings, shapes)
            arguments = {**_COMMON, **_ENGINE["cuda" if cuda else "cpu"], **FORMATS[case.partition("-")[0]]}
            running[case] = [Process(ours, case, str(folder), shapes, arguments) for ours in (True, False)]
        for case, processes in running.items():
            try:
                for process in processes:
                    versions |= process.ask()
            except Exception as exc:
                rows.append({"case": case, "failed": f"{type(exc).__name__}: {exc}"[:300]})
        for case, processes in running.items():
            if not any(row["case"] == case for row in rows):
                try:
                    rows.append(measure(case, *processes, given))
                except Exception as exc:
                    rows.append({"case": case, "failed": f"{type(exc).__name__}: {exc}"[:300]})
            for process in processes:
                process.end()
            print(table(rows), flush=True)
            result = {
                "device": device, "cores": os.cpu_count(), "versions": versions,
                "rows": sorted(kept + rows, key=lambda row: str(row["case"])),
            }  # fmt: skip
            out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row.get("same") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
