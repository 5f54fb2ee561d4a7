"""An update's way from a trainer to a worker, beside a bare broadcast of the same bytes: one command, one JSON file, one table.

    python -m benchmarks.transport [--transport gloo|nccl|local] [--shape qwen3-0.6b] [--gigabytes 1] [--bucket-mb 16,64]

Two processes on this machine. In every round all ways take turns, so that what else the machine does meets each of
them; a round is for one bucket size, and rounds of all sizes take turns too. `bare` is `torch.distributed.broadcast`
from memory that lies ready into memory that lies ready, in pieces of a bucket's size, and `bare, whole` in one piece; for
`local`, where both processes map one memory, both are a copy on the device inside one process.
Then the service's own sender and communicator: `packed` into a worker that lets buckets go, `staged` into the
service's receiver, `digests` with both sides' digests, `all` with the look at values as well, which is what an update does.
With `local` the receiver lends the trainer the memory that it stages in, and `packed` is the way of a worker that lends nothing.
What an update makes is made while it is timed: the receiver with its memory, and what maps that. As in an engine, memory of a GPU
comes from where the last update has left it, torch's allocator or for `local` the worker's (`staging.Regions`); `--fresh` has
that one made anew.

NCCL takes two GPUs. `--one-gpu` puts both processes on one, for a look at whether it works: its rate says nothing. `local`
takes the first GPU where there is one, and host memory else.

Not covered: several workers; a network between hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weightsync.client.sender import Sender
from weightsync.client.source import Offer, offer
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.transport import digest
from weightsync.transport.channel import Outlet, parts, send_all
from weightsync.transport.communicator import Communicator
from weightsync.transport.fanout import join
from weightsync.transport.link import Link
from weightsync.transport.local import Listener
from weightsync.transport.packing import plan_buckets
from weightsync.transport.rendezvous import host_store
from weightsync.worker.receiver import Receiver
from weightsync.worker.staging import Regions

WAYS = ("bare", "bare, whole", "packed", "staged", "digests", "all")
#: Which way must reach which share of `bare` in the same pieces.
GOALS = {"gloo": ("all", 0.6), "nccl": ("all", 0.9), "local": ("staged", 0.9)}
_SECONDS = 120.0
_RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Shape:
    """A dense Qwen3: what is scaled is how many layers it has, and how many words."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    tied: bool
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936

    def tensors(self, gigabytes: float) -> list[tuple[int, ...]]:
        """Shapes of about so many bytes of bf16, in the order of a checkpoint."""
        qkv, wide = (self.heads * self.head_dim, self.kv_heads * self.head_dim), (self.intermediate, self.hidden)
        small = [(self.hidden,), (self.hidden,), (self.head_dim,), (self.head_dim,)]
        layer = [(qkv[0], self.hidden), (qkv[1], self.hidden), (qkv[1], self.hidden), (self.hidden, qkv[0]), wide, wide, wide[::-1], *small]
        embeddings = 1 if self.tied else 2
        elements = self.layers * sum(map(_count, layer)) + embeddings * self.vocabulary * self.hidden
        share = gigabytes * 1e9 / 2 / elements
        table = (max(1, int(self.vocabulary * share)), self.hidden)
        return [table] * embeddings + layer * max(1, round(self.layers * share)) + [(self.hidden,)]


SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": Shape(4096, 12288, 36, 32, tied=False),
}


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _copies(runs: Sequence[Any], sums: torch.Tensor) -> None:
    """What is left of adding up digests where nobody adds."""
    for data, _, _, _, into in runs:
        if into is not None:
            into.copy_(data)


class Side:
    """One of the two processes.

    Args:
        rank: 0 is the trainer.
        given: the command's options.
        info: where the service's communicator meets.
    """

    def __init__(self, rank: int, given: argparse.Namespace, info: CommunicatorInfo) -> None:
        self.rank, self._info, self._local = rank, info, given.transport == "local"
        nccl = given.transport == "nccl"
        cuda = nccl or (self._local and torch.cuda.is_available())
        self.device = torch.device("cuda", 0 if given.one_gpu or self._local else rank) if cuda else torch.device("cpu")
        store = dist.PrefixStore("bare", dist.TCPStore(info.host, info.port, is_master=False))
        backend = "nccl" if nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=2, device_id=self.device if nccl else None)
        self._nccl = nccl
        self.communicator: Any = self._link(store) if self._local else Communicator(info, rank, self.device, _SECONDS, _SECONDS)
        shapes = SHAPES[given.shape].tensors(given.gigabytes)
        values = torch.randn(sum(map(_count, shapes)), device=self.device, dtype=torch.bfloat16)
        parts = values.split([_count(shape) for shape in shapes])
        # The tensors of the model are views of what `bare` sends.
        self.offer: Offer = offer((f"t{index}", part.view(shape)) for index, (part, shape) in enumerate(zip(parts, shapes, strict=True)))
        self.nbytes, self.flat = values.nbytes, values.view(torch.uint8)
        self.regions = Regions()
        self._fresh = given.fresh
        self.parts: dict[str, float] = {}  # seconds by part, of the service's update that was timed last

    def _link(self, store: dist.Store) -> Link | Outlet:
        if self.rank == 1:
            return Link(self._info, (0, 0), store.get("name").decode(), store.get("secret").decode(), self.device, _SECONDS)
        listener = Listener()
        store.set("name", listener.name)
        store.set("secret", listener.secret)
        return join(self._info, self.device, listener, _SECONDS, _SECONDS)

    def time(self, way: str, bucket_bytes: int) -> tuple[float, float, float]:
        """One way, once: when it began and ended here, and the seconds of CPU that this process used."""
        with self._prepared(way, bucket_bytes) as go:
            self._meet()
            began, used = time.monotonic(), time.process_time()
            go()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return began, time.monotonic(), time.process_time() - used

    def _meet(self) -> None:
        dist.barrier(device_ids=[self.device.index] if self._nccl else None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _prepared(self, way: str, bucket_bytes: int) -> Iterator[Callable[[], None]]:
        if way.startswith("bare"):
            size = self.nbytes if way == "bare, whole" else bucket_bytes
            ready = torch.ones_like(self.flat) if self._local and self.rank == 0 else None
            yield lambda: self._bare(size, ready)
            return
        blind = way in ("packed", "staged")
        with patch.object(digest, "_adder", lambda device: _copies) if blind else contextlib.nullcontext():
            if self.rank == 0:
                yield lambda: self._send(bucket_bytes)
            elif way == "packed":
                yield lambda: self._let_go(bucket_bytes)
            else:
                yield lambda: self._receive(bucket_bytes, way != "all")
        if self._local and way == "packed":  # a fleet does not change between the two: the next way is not to be charged for unmapping
            (self.communicator if self.rank else self.communicator._links)._drop_ring()

    def _bare(self, size: int, ready: torch.Tensor | None) -> None:
        if ready is not None:
            for piece, target in zip(self.flat.split(size), ready.split(size), strict=True):
                target.copy_(piece)
        elif not self._local:
            for piece in self.flat.split(size):
                dist.broadcast(piece, 0)

    def _send(self, bucket_bytes: int) -> None:
        sender = Sender(self.offer, plan_buckets(self.offer.manifest, bucket_bytes), None)
        sender.send(self.communicator, time.monotonic() + _SECONDS, lambda: False, lambda: None)
        self.parts = sender.seconds

    def _let_go(self, bucket_bytes: int) -> None:
        """Receive into the same memory over and over."""
        until, channel = time.monotonic() + _SECONDS, self.communicator
        plan = plan_buckets(self.offer.manifest, bucket_bytes)
        if isinstance(channel, Link):
            channel.lend(None, plan, until)
        digests = (torch.empty(len(bucket.complete), 2, dtype=torch.int64, device=channel.device) for bucket in plan.buckets)
        send_all(channel, (parts(self.flat[: bucket.nbytes], one) for bucket, one in zip(plan.buckets, digests, strict=True)), until)
        if isinstance(channel, Link):
            channel.end(until)

    def _receive(self, bucket_bytes: int, allow_nonfinite: bool) -> None:
        plan = plan_buckets(self.offer.manifest, bucket_bytes)
        request = UpdateRequest(
            "u", "t", 1, self.offer.manifest, plan.bucket_bytes, plan.hash, _SECONDS,
            self.offer.transport, torch.__version__, allow_nonfinite=allow_nonfinite,
        )  # fmt: skip
        stage = "gpu" if self.device.type == "cuda" else "host"
        order = BeginOrder(request, self._info, 0, 1, _SECONDS, stage=stage)
        if self._fresh:
            self.regions.drop()
        receiver = Receiver(order, 0, self.device, self.device, lambda: self.communicator, regions=self.regions)
        receiver.start()
        receiver._thread.join(_SECONDS)
        assert receiver.ready and receiver.error is None, receiver.error
        self.parts = receiver.seconds
        receiver.discard()


def run(rank: int, given: argparse.Namespace, info: CommunicatorInfo, results: Any) -> None:
    """Body of a process."""
    if given.transport == "nccl" and given.one_gpu:
        os.environ |= {"NCCL_HOSTID": f"process-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if given.threads:
        torch.set_num_threads(given.threads)
    side = Side(rank, given, info)
    taken: dict[tuple[int, str], list[Any]] = {}
    for number in range(given.warm_up + given.repeats):
        for mb in given.bucket_mb:
            for way in WAYS:
                one = side.time(way, mb << 20)
                if number >= given.warm_up:
                    taken.setdefault((mb, way), []).append((*one, dict(side.parts)))
    name = torch.cuda.get_device_name(side.device) if side.device.type == "cuda" else platform.processor() or platform.machine()
    results.put((rank, taken, side.nbytes, len(side.offer.manifest.tensors), name, torch.get_num_threads()))
    side.communicator.close()
    dist.destroy_process_group()


def measure(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of the table, and what was sent on what."""
    store = host_store("127.0.0.1", _SECONDS)
    local = given.transport == "local"
    members: dict[str, Any] = {"local": {"0": (0,)}} if local else {}
    info = CommunicatorInfo(
        "127.0.0.1", store.port, 1, 1 if local else 2, {} if local else {"0": 1}, "" if local else given.transport, **members
    )
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=run, args=(rank, given, info, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    threading.Thread(target=_watch, args=(processes, results), daemon=True).start()
    found = [results.get() for _ in processes]
    if None in found:
        raise SystemExit("a process ended before it had measured")
    found.sort()
    for process in processes:
        process.join(_SECONDS)
    (_, trainer, nbytes, tensors, name, threads), worker = found[0], found[1][1]
    rows = []
    for (mb, way), ones in trainer.items():
        others = worker[mb, way]
        rates = [nbytes / (max(one[1], other[1]) - one[0]) / 1e9 for one, other in zip(ones, others, strict=True)]
        row = {"bucket_mb": mb, "way": way, "gigabytes_per_second": _spread(rates)}
        row["cpu_seconds"] = [round(statistics.median(one[2] for one in side), 3) for side in (ones, others)]
        if way == "all":
            row["seconds"] = {"trainer": ones[-1][3], "worker": others[-1][3]}
        rows.append(row)
    return rows, {"device": name, "bytes": nbytes, "tensors": tensors, "threads": threads}


def _watch(processes: list[Any], results: Any) -> None:
    for process in processes:
        process.join()
        if process.exitcode:
            results.put(None)


def _spread(rates: list[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    found = {"median": statistics.median(rates), "quarter": low, "three_quarters": high, "best": max(rates)}
    return {name: round(rate, 3) for name, rate in found.items()}


def shares(rows: list[dict[str, Any]]) -> None:
    """Write into each row what it is of `bare` in the same pieces: medians, and the best ones, in which a busy machine has less say."""
    bare = {row["bucket_mb"]: row["gigabytes_per_second"] for row in rows if row["way"] == "bare"}
    for row in rows:
        for key, which in (("of_bare", "median"), ("best_of_bare", "best")):
            row[key] = round(row["gigabytes_per_second"][which] / bare[row["bucket_mb"]][which], 2)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, for reading."""
    lines = ["| bucket | way | GB/s | middle half | best | of bare | best of best | CPU s: trainer, worker |", "|---|" + "---|" * 7]
    for row in rows:
        rate, cpu = row["gigabytes_per_second"], row["cpu_seconds"]
        rates = f"{rate['median']:.2f} | {rate['quarter']:.2f} to {rate['three_quarters']:.2f} | {rate['best']:.2f}"
        of_bare = f"{row['of_bare']:.0%} | {row['best_of_bare']:.0%}"
        lines.append(f"| {row['bucket_mb']} MiB | {row['way']} | {rates} | {of_bare} | {cpu[0]:.2f}, {cpu[1]:.2f} |")
    return "\n".join(lines)


def options(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What `measure` takes, from a command line; this process's own when None."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--transport", choices=sorted(GOALS), default="gloo")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--bucket-mb", type=lambda text: [int(part) for part in text.split(",")], default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="torch's threads in each process; 0 leaves them")
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="local: a worker's memory is made anew for each update")
    return parser.parse_args(given)


def main() -> int:
    """Measure, write the file, print the table; the exit status says whether the goal was reached with one of the bucket sizes."""
    given = options()
    before = os.getloadavg()[0]
    rows, facts = measure(given)
    shares(rows)
    way, share = GOALS[given.transport]
    reached = max(row["of_bare"] for row in rows if row["way"] == way) >= share
    result = {
        **facts, "transport": given.transport, "shape": given.shape, "one_gpu": given.one_gpu, "fresh": given.fresh,
        "repeats": given.repeats, "cores": os.cpu_count(), "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "goal": {"way": way, "of_bare": share, "reached": reached}, "rows": rows,
    }  # fmt: skip
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"transport-{given.transport}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(table(rows))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
