"""How long a bucket takes over a local link: from packed, in shared memory, to received, in a worker's own memory.

    python -m benchmarks.local_link [--device cuda:0] [--megabytes 1024] [--count 20]

The worker is a process of its own. Beside it a plain copy of the same bytes on the same device,
which no link can beat.

Not covered: packing and digests (`benchmarks.transport` has the whole way).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from typing import Any

import torch

from weightsync.protocol import CommunicatorInfo
from weightsync.transport import fanout
from weightsync.transport.link import Link
from weightsync.transport.local import Listener

_SECONDS = 120.0
_INFO = CommunicatorInfo("", 0, 1, 1, {}, "", local={"0": (0,)})


def measure(device: str, nbytes: int, count: int) -> dict[str, list[float]]:
    """Seconds of each of `count` buckets.

    Args:
        device: `cpu` or a CUDA device.
        nbytes: of one bucket.

    Returns:
        `link`: from the call that says that a bucket is packed to its return, when the worker has copied it.
        `copy`: of a copy on the device.
    """
    on, listener = torch.device(device), Listener()
    worker = multiprocessing.get_context("spawn").Process(
        target=_receive, args=(listener.name, listener.secret, device, nbytes, count), daemon=True
    )
    worker.start()
    channel = fanout.join(_INFO, on, listener, _SECONDS, _SECONDS)
    link = []
    try:
        buffers = channel.buffers(2, nbytes)
        for number in range(count):
            bucket = buffers[number % 2].fill_(number % 251)
            _settle(on)
            began = time.monotonic()
            channel.broadcast(bucket, began + _SECONDS)
            link.append(time.monotonic() - began)
    finally:
        channel.close()
        listener.close()
        worker.join(_SECONDS)
    if worker.exitcode != 0:
        raise RuntimeError(f"the receiving process ended with {worker.exitcode}")
    return {"link": link, "copy": _copies(on, nbytes, count)}


def _receive(name: str, secret: str, device: str, nbytes: int, count: int) -> None:
    link = Link(_INFO, (0, 0), name, secret, torch.device(device), _SECONDS)
    target = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for number in range(count):
        link.broadcast(target, time.monotonic() + _SECONDS)
        if int(target[0]) != number % 251 or int(target[-1]) != number % 251:
            raise SystemExit(2)
    link.close()


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
    args = parser.parse_args()
    nbytes = args.megabytes << 20
    found: dict[str, Any] = {"device": args.device, "bytes": nbytes, "count": args.count}
    for what, seconds in measure(args.device, nbytes, args.count).items():
        middle = statistics.median(seconds[1:] or seconds)  # the first one maps the segments
        found[what] = {"median_seconds": middle, "gb_per_second": nbytes / middle / 1e9, "first_seconds": seconds[0]}
    found["share_of_copy"] = found["link"]["gb_per_second"] / found["copy"]["gb_per_second"]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
