"""How long an update of one bucket takes over a local link, step by step: the worker's memory lent and mapped, copied into, let go of.

    python -m benchmarks.local_link [--device cuda:0] [--megabytes 1024] [--count 20] [--fresh]

The worker is a process of its own. Beside it a plain copy of the same bytes on the same device,
which no link can beat. On a GPU the worker keeps its memory from update to update, as `staging.Regions` does, or makes
it anew each time (`--fresh`): the difference is what keeping it is worth. On the host it is always made anew.

Not covered: packing and digests (`benchmarks.transport` has the whole way); a worker that lends nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from typing import Any

import torch

from weightsync.protocol import CommunicatorInfo, Manifest, TensorSpec
from weightsync.transport import fanout
from weightsync.transport.link import Link
from weightsync.transport.local import Listener
from weightsync.transport.packing import BucketPlan, plan_buckets
from weightsync.worker.staging import Regions, Whole

_SECONDS = 120.0
_INFO = CommunicatorInfo("", 0, 1, 1, {}, "", local={"0": (0,)})


def measure(device: str, nbytes: int, count: int, fresh: bool = False) -> dict[str, list[float]]:
    """Seconds of each of `count` updates of one bucket.

    Args:
        device: `cpu` or a CUDA device.
        nbytes: of the bucket.
        fresh: the worker makes its memory anew for each update on a GPU too.

    Returns:
        `link`: from the beginning of the update to its end, when the worker has seen it.
        `ground`: of these, until the worker's memory is lent and mapped, its making included.
        `end`: of these, behind the copy: the memory is unmapped, and the worker says that it has seen the end.
        `copy`: of a copy on the device.
    """
    on, listener = torch.device(device), Listener()
    worker = multiprocessing.get_context("spawn").Process(
        target=_receive, args=(listener.name, listener.secret, device, nbytes, count, fresh), daemon=True
    )
    worker.start()
    channel = fanout.join(_INFO, on, listener, _SECONDS, _SECONDS)
    found: dict[str, list[float]] = {"link": [], "ground": [], "end": []}
    source = torch.zeros(nbytes, dtype=torch.uint8, device=on)
    plan = _plan(nbytes)
    try:
        for number in range(count):
            source.fill_(number % 251)
            _settle(on)
            began = time.monotonic()
            ground = channel.ground(plan, began + _SECONDS)
            mapped = time.monotonic()
            ground.window(0, plan.buckets[0]).copy_(source)
            channel.broadcast(ground.window(0, plan.buckets[0]), began + _SECONDS)
            copied = time.monotonic()
            ground.let_go()
            channel.end(began + _SECONDS)
            ended = time.monotonic()
            for what, seconds in (("link", ended - began), ("ground", mapped - began), ("end", ended - copied)):
                found[what].append(seconds)
    finally:
        channel.close()
        listener.close()
        worker.join(_SECONDS)
    if worker.exitcode != 0:
        raise RuntimeError(f"the receiving process ended with {worker.exitcode}")
    return found | {"copy": _copies(on, nbytes, count)}


def _receive(name: str, secret: str, device: str, nbytes: int, count: int, fresh: bool) -> None:
    on, plan, until = torch.device(device), _plan(nbytes), time.monotonic() + _SECONDS
    link, regions = Link(_INFO, (0, 0), name, secret, on, _SECONDS), Regions()
    for number in range(count):
        if fresh:
            regions.drop()
        whole = Whole(_manifest(nbytes), plan, regions.allocate(plan, "gpu" if on.type == "cuda" else "host", on, on))
        lent = whole.lend()
        link.lend(lent, plan, until)
        link.broadcast(whole.window(plan.buckets[0]), until)
        if link.end(until) and lent is not None:
            regions.keep(lent)
        if int(whole.data[0]) != number % 251 or int(whole.data[nbytes - 1]) != number % 251:
            raise SystemExit(2)
        del whole, lent
    link.close()


def _manifest(nbytes: int) -> Manifest:
    return Manifest((TensorSpec("w", "uint8", (nbytes,)),))


def _plan(nbytes: int) -> BucketPlan:
    return plan_buckets(_manifest(nbytes), nbytes)


def _copies(on: torch.device, nbytes: int, count: int) -> list[float]:
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=on) for _ in range(2))
    seconds = []
    for _ in range(count):
        _settle(on)
        began = time.monotonic()
        target.copy_(source)
        _settle(on)
        seconds.append(time.monotonic() - began)
    return seconds


def _settle(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    nbytes = args.megabytes << 20
    found: dict[str, Any] = {"device": args.device, "bytes": nbytes, "count": args.count}
    for what, seconds in measure(args.device, nbytes, args.count, args.fresh).items():
        middle = statistics.median(seconds[1:] or seconds)  # the first one makes and maps more than the others
        found[what] = {"median_seconds": middle, "gb_per_second": nbytes / middle / 1e9, "first_seconds": seconds[0]}
    found["share_of_copy"] = found["link"]["gb_per_second"] / found["copy"]["gb_per_second"]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
