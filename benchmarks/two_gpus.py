"""Whole updates of a real engine on the second GPU, from a trainer on the first, over NCCL: one command, one JSON file, one table.

    python -m benchmarks.two_gpus [--formats bf16,fp8] [--layers 36] [--updates 5] [--bucket-mb 1024]

The model has the shape of Qwen3-8B, with random weights. For each format two engines with CUDA graphs start on the second
GPU: one behind `weightsync serve`, and beside it vLLM alone with its own NCCL weight transfer (packed, its own default
buffers). The trainer has the weights of two versions and sends them in turn, to one engine and then to the other, round after
round. `fp8` is quantised by the engine, per channel, from what the trainer sends in bf16. In the end both engines answer
the same prompts: they hold the same weights.

In the first format a second trainer begins update 3, is killed when half of its bytes are sent, and the first goes on.

The rows of `benchmarks.transport` are measured in the same run, before: a bare broadcast of the same bytes is among them.

Not covered: several engines, requests while updates go on (`benchmarks.in_flight`), a network between hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import transport
from tests.fleets import PROMPTS, Fleet
from weightsync import WeightSync

#: vLLM's arguments of a format.
FORMATS: dict[str, dict[str, Any]] = {"bf16": {}, "fp8": {"quantization": "fp8_per_channel"}}
GOAL = 0.9
TOKENS = 16
_COMMON: dict[str, Any] = {
    "load_format": "dummy",
    "cudagraph_capture_sizes": [1, 2, 4],
    "kernel_config": {"enable_flashinfer_autotune": False},
    "gpu_memory_utilization": 0.15,  # what has to be free at the start: engines of all formats share the GPU
}
_SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 30, "skip_tokenizer_init": True}
_RESULTS = Path(__file__).parent / "results"
#: A trainer that stops when half of its bytes are sent.
_HALF = """
import sys, time
from benchmarks.two_gpus import weights
from weightsync import WeightSync

def hold(sent, total):
    if sent * 2 > total:
        print("half", flush=True)
        time.sleep(600)

sync = WeightSync(sys.argv[1], sys.argv[2], bucket_bytes=int(sys.argv[4]))
sync.sync_weights(weights(int(sys.argv[3]), 1), progress=hold)
"""


def config(layers: int, kind: str = "qwen3-8b") -> dict[str, Any]:
    """A `config.json`."""
    shape = transport.SHAPES[kind]
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied, "attention_bias": False, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def shapes_of(layers: int, kind: str = "qwen3-8b") -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, by name."""
    shape = transport.SHAPES[kind]
    query, pair = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = {
        "self_attn.q_proj": (query, shape.hidden), "self_attn.k_proj": (pair, shape.hidden), "self_attn.v_proj": (pair, shape.hidden),
        "self_attn.o_proj": (shape.hidden, query), "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden), "mlp.down_proj": (shape.hidden, shape.intermediate),
    }  # fmt: skip
    norms = {
        "input_layernorm": shape.hidden, "post_attention_layernorm": shape.hidden,
        "self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in linear.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": (size,) for name, size in norms.items()}
    head = {} if shape.tied else {"lm_head.weight": (shape.vocabulary, shape.hidden)}
    return shapes | {"model.norm.weight": (shape.hidden,), **head}


def checkpoint_of(folder: Path, settings: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A checkpoint of zeros that takes no room on the disk: engines start on random weights, and read names and shapes here."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    header, end = {}, 0
    for name, size in shapes.items():
        begin, end = end, end + 2 * torch.Size(size).numel()
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def weights(layers: int, seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors on the first GPU, equal for equal seeds."""
    random, made = torch.Generator("cuda:0").manual_seed(seed), {}
    for name, size in shapes_of(layers).items():
        values = torch.empty(size, dtype=torch.bfloat16, device="cuda:0")
        made[name] = values.fill_(1.0) if len(size) == 1 else values.normal_(0.0, 0.02, generator=random)
    return made


# --- vLLM alone ----------------------------------------------------------------------------------


def stock_engine(ours: Connection, folder: str, arguments: dict[str, Any]) -> None:
    """Body of a process: vLLM on the second GPU, asked over a pipe for `collective_rpc` and for answers."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.inputs import TokensPrompt

    llm = LLM(model=folder, weight_transfer_config=WeightTransferConfig(backend="nccl"), **arguments)
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    ours.send("ready")
    while (asked := ours.recv()) is not None:
        name, given = asked
        try:
            if name == "answers":
                # One by one, as the other engine is asked: what a kernel adds up depends on how many requests it has.
                said = [llm.generate(TokensPrompt(prompt_token_ids=prompt), greedy, use_tqdm=False) for prompt in PROMPTS]
                ours.send([list(one[0].outputs[0].token_ids) for one in said])
            else:
                llm.collective_rpc(name, args=given)
                torch.cuda.synchronize()
                ours.send(None)
        except Exception as exc:
            ours.send(exc)


class Stock:
    """vLLM's own way, as of 0.33: the engine's process, and the trainer's end of its transfer, which takes this for its client."""

    def __init__(self, folder: Path, arguments: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=stock_engine, args=(theirs, str(folder), arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._current: dict[str, torch.Tensor] = {}
        self._trainer: Any = None

    def ready(self) -> None:
        """Wait for the engine, and join it."""
        assert self._ours.recv() == "ready"

    def update(self, tensors: dict[str, torch.Tensor]) -> float:
        """Seconds of one update."""
        self._current = tensors
        if self._trainer is None:
            self._trainer = self._join()
        torch.cuda.synchronize(0)
        began = time.monotonic()
        self._trainer.send_weights()
        return time.monotonic() - began

    def answers(self) -> Any:
        return self._ask("answers")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._ours.send(None)
        self._process.join(20)
        self._process.kill()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._ask("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._ask("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish_weight_update")

    def _ask(self, name: str, *given: Any) -> Any:
        self._ours.send((name, given))
        said = self._ours.recv()
        if isinstance(said, Exception):
            raise said
        return said

    def _join(self) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        stock = self

        class Source(WeightSource):  # type: ignore[misc]
            @functools.cached_property
            def metadata(self) -> list[Any]:
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stock._current.items()]

            def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
                return iter(stock._current.items())

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.cuda.set_device(0)
        given = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=port, world_size=2)
        return NCCLTrainerWeightTransferEngine.trainer_init(given, client=self, source=Source())


# --- weightsync ----------------------------------------------------------------------------------


def serve(folder: Path, home: Path, extra: dict[str, Any]) -> Fleet:
    """A fleet of one engine on the second GPU."""
    second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    flags = [
        "--engine.device=cuda", "--engine.gpus=1", f"--engine.extra={json.dumps({**_COMMON, **extra})}",
        f"--engine.kv_cache_memory_bytes={_SIZES['kv_cache_memory_bytes']}", "--engine.start_timeout_seconds=500",
    ]  # fmt: skip
    root = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]))
    return Fleet(folder, home, flags=flags, env={"CUDA_VISIBLE_DEVICES": second, "PYTHONPATH": root})


def answers(sync: WeightSync) -> list[list[int]]:
    return [list(sync.generate(prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True).token_ids) for prompt in PROMPTS]


def killed_half_way(fleet: Fleet, layers: int, bucket_bytes: int) -> dict[str, Any]:
    """What becomes of an update whose trainer is killed when half of its bytes are sent."""
    command = [sys.executable, "-c", _HALF, fleet.url, fleet.token, str(layers), str(bucket_bytes)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    if trainer.stdout.readline().strip() != "half":
        raise RuntimeError("the trainer that was to be killed did not come to the middle of its update")
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    killed = time.monotonic()
    update = fleet.get("/v1/updates").json()[0]["update_id"]
    while (status := fleet.get(f"/v1/updates/{update}").json())["state"] != "aborted":
        if time.monotonic() - killed > 60:
            raise RuntimeError(f"the update of a trainer that was killed is not aborted after a minute: {status}")
        time.sleep(0.02)
    return {"aborted_after_seconds": round(time.monotonic() - killed, 2), "error": status["error"]["message"]}


# --- the run -------------------------------------------------------------------------------------


@contextlib.contextmanager
def keeping(row: dict[str, Any]) -> Iterator[None]:
    """One format that fails is told of in its row; the others are measured."""
    try:
        yield
    except Exception as exc:
        traceback.print_exc()
        row["failed"] = f"{type(exc).__name__}: {exc}"[:600]


def started(fleet: Fleet, stock: Stock) -> dict[str, Any]:
    """A row in which nothing is, or why an engine did not start."""
    row: dict[str, Any] = {}
    with keeping(row):
        fleet.ready(550)
        stock.ready()
    return row


def measure(fleet: Fleet, stock: Stock, versions: list[dict[str, torch.Tensor]], given: argparse.Namespace, kill: bool) -> dict[str, Any]:
    """One format: updates of both engines in turn."""
    ours: list[dict[str, Any]] = []
    theirs: list[float] = []
    found: dict[str, Any] = {}
    bucket_bytes = given.bucket_mb << 20
    with fleet.client(bucket_bytes=bucket_bytes, timeout_seconds=120.0) as sync:
        for number in range(given.updates):
            if kill and number == 2:
                found["killed"] = killed_half_way(fleet, given.layers, bucket_bytes)
            report = sync.sync_weights(versions[number % 2])
            seconds = {name: round(taken, 4) for name, taken in report.seconds.items()}
            ours.append({"seconds": seconds, "pause_seconds": round(report.pause_seconds, 4), "checks": report.verdicts[0].checks})
            theirs.append(round(stock.update(versions[number % 2]), 4))
        found["same_answers"] = answers(sync) == stock.answers()
        found["versions"] = [engine.version for engine in sync.engines()]
    # The first of each makes groups, maps and caches.
    steady = statistics.median(one["seconds"]["total"] for one in ours[1:])
    nbytes = sum(tensor.nbytes for tensor in versions[0].values())
    return {
        **found, "bytes": nbytes, "tensors": len(versions[0]), "weightsync": ours, "stock_seconds": theirs,
        "median_seconds": {"weightsync": steady, "stock": statistics.median(theirs[1:])},
        "gigabytes_per_second_of_the_broadcast": round(nbytes / min(one["seconds"]["broadcast"] for one in ours) / 1e9, 1),
    }  # fmt: skip


def table(formats: dict[str, Any]) -> str:
    """For reading."""
    lines = ["| format | update | pause | broadcast | apply | verify | vLLM's own transfer | same answers |", "|---|" + "---|" * 7]
    for name, row in formats.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed'].splitlines()[0]} |" + " |" * 6)
            continue
        steady = row["weightsync"][1:]

        def middle(key: str, of: list[dict[str, Any]] = steady) -> str:
            return f"{1e3 * statistics.median(one['seconds'].get(key, 0.0) for one in of):.0f} ms"

        pause = f"{1e3 * statistics.median(one['pause_seconds'] for one in steady):.0f} ms"
        stock = f"{1e3 * row['median_seconds']['stock']:.0f} ms"
        lines.append(
            f"| {name} | {middle('total')} | {pause} | {middle('broadcast')} | {middle('apply')} | {middle('verify')} | {stock} | "
            f"{'yes' if row['same_answers'] else 'no'} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, write the file, print the tables; the exit status says whether the broadcast reached its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=_RESULTS / "two-gpus.json")
    given = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("two CUDA devices are needed")
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as running:
        folder = Path(made)
        model = checkpoint_of(folder / "model", config(given.layers), shapes_of(given.layers))
        fleets = {name: serve(model, folder / name, FORMATS[name]) for name in given.formats}
        stocks = {name: Stock(model, {**_SIZES, **_COMMON, **FORMATS[name]}) for name in given.formats}
        for fleet in fleets.values():
            running.callback(fleet.stop)
        for stock in stocks.values():
            running.callback(stock.close)
        versions = [weights(given.layers, seed) for seed in (1, 2)]
        formats: dict[str, Any] = {name: started(fleets[name], stocks[name]) for name in given.formats}
        # When engines have started and nobody asks them, they leave the GPUs and the cores alone.
        gigabytes = sum(tensor.nbytes for tensor in versions[0].values()) / 1e9
        size = ["--shape=qwen3-8b", f"--gigabytes={gigabytes}", f"--bucket-mb=256,{given.bucket_mb}"]
        asked = transport.options(["--transport=nccl", "--repeats=5", *size])
        rows, facts = transport.measure(asked)
        transport.shares(rows)
        print(transport.table(rows), flush=True)
        for number, name in enumerate(name for name in given.formats if not formats[name]):
            with keeping(formats[name]):
                formats[name] |= measure(fleets[name], stocks[name], versions, given, kill=number == 0)
    print(table(formats))
    import vllm

    reached = max(row["of_bare"] for row in rows if row["way"] == "all")
    result = {
        **facts, "model": "Qwen3-8B's shape", "layers": given.layers, "bucket_mb": given.bucket_mb, "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "vllm": vllm.__version__},
        "goal": {"of_bare": GOAL, "reached": reached >= GOAL}, "transport": rows, "formats": formats,
    }  # fmt: skip
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if reached >= GOAL and not any("failed" in row for row in formats.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
