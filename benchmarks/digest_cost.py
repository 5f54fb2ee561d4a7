"""What the digest costs, alone and with the look at values: one command, one JSON file.

    python -m benchmarks.digest_cost [--mib N] [--device cpu|cuda]

In one thread, as the receiver runs it; the fastest of several rounds in which all ways take turns,
since what else a machine does can only add. Beside it what a second read would cost: torch's own
`isfinite`, and the same maximum over magnitudes, each over the whole tensor.

More ways: the torch operations that stand in where the kernel or the compiled loop can't run, a bare read (`sum` over the words),
and a copy on the device, whose bytes are counted once though each is read and written; digest, values and copy in one, as a bucket
is packed. And a bucket of many small tensors. On a CUDA device each way is started several times over the tensor before it is
waited for, as the receiver does with the tensors of a bucket.

Not covered: the broadcast that goes on meanwhile and takes its share of the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from weightsync.transport import digest, finite

DTYPES = ("bfloat16", "float32", "float16", "float8_e4m3fn")
REPEATS = 9
#: How often a CUDA device goes over the tensor before it is waited for.
PASSES = 8
#: A bucket of small tensors: how many, and bytes of one.
SMALL = (512, 64 << 10)
_RESULTS = Path(__file__).parent / "results"


@contextlib.contextmanager
def operations(device: torch.device) -> Iterator[None]:
    """The kernel or the loop out of the way, as where it can't run."""
    terms, most = (digest._products, digest._CUDA_BLOCKS) if device.type == "cuda" else (digest._dots, 1)
    stand_in = functools.partial(digest._by_operations, terms, most)
    with mock.patch.object(digest, "_adder", lambda device: stand_in):
        yield


def digests(tensors: list[torch.Tensor], dtype: str = "", into: torch.Tensor | None = None) -> bool:
    """As `worker/receiver.py` takes them; with a `dtype` the values are looked at as well, with `into` they are copied too."""
    batch = digest.Batch(len(tensors), tensors[0].device)
    peaks = [finite.Peak(dtype) if dtype else None for _ in tensors]
    for tensor, peak in zip(tensors, peaks, strict=True):
        batch.add(digest.as_bytes(tensor), 0, peak, None if into is None else digest.as_bytes(into))
    batch.results()
    return any(peak is not None and peak.refused for peak in peaks)


def values_alone(tensor: torch.Tensor, dtype: str) -> bool:
    peak = finite.Peak(dtype)
    words = tensor.view(torch.int64)
    peak(words, torch.empty_like(words))
    return peak.refused


def ways_of(tensor: torch.Tensor, dtype: str, passes: int) -> dict[str, Callable[[], Any]]:
    """What is compared, each going `passes` times over the tensor."""
    many = [tensor] * passes
    ways: dict[str, Callable[[], Any]] = {
        "digest": lambda: digests(many),
        "digest_and_values": lambda: digests(many, dtype),
        "values_alone": lambda: [values_alone(t, dtype) for t in many],
    }
    if not dtype.startswith("float8"):  # torch has no isfinite for these
        ways["isfinite"] = lambda: [bool(torch.isfinite(t).all()) for t in many]
    words = tensor.view(torch.int64)
    ways["read"] = lambda: [words.sum() for _ in many][-1].item()
    room = torch.empty_like(tensor)
    ways["copy"] = lambda: [room.copy_(t) for t in many][-1].view(torch.uint8)[0].item()
    ways["digest_values_and_copy"] = lambda: digests(many, dtype, room)
    ways |= {
        f"{way}_by_operations": operations(tensor.device)(ways[way]) for way in ("digest", "digest_and_values", "digest_values_and_copy")
    }
    if tensor.device.type == "cuda":
        ways["digest_and_values_one_call"] = lambda: [digests([t], dtype) for t in many]
    return ways


def measure(mib: int, device: torch.device) -> dict[str, dict[str, float]]:
    """GB/s by dtype and by what is done."""
    result = {}
    passes = PASSES if device.type == "cuda" else 1
    for dtype in DTYPES:
        tensor = torch.randn((mib << 20) // getattr(torch, dtype).itemsize, device=device).to(getattr(torch, dtype))
        took = _fastest(ways_of(tensor, dtype, passes))
        result[dtype] = {way: round(passes * tensor.nbytes / seconds / 1e9, 2) for way, seconds in took.items()}
    return result


def measure_small(device: torch.device) -> dict[str, float]:
    """Microseconds per tensor in a bucket of small ones."""
    count, nbytes = SMALL
    tensors = list(torch.randn(count, nbytes // 2, device=device).bfloat16())
    ways: dict[str, Callable[[], Any]] = {"batch": lambda: digests(tensors, "bfloat16")}
    ways["one_by_one"] = lambda: [digests([tensor], "bfloat16") for tensor in tensors]
    if device.type == "cuda":
        ways["batch_by_operations"] = operations(device)(ways["batch"])
    return {way: round(seconds / count * 1e6, 1) for way, seconds in _fastest(ways).items()}


def _fastest(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    rounds = [{way: _seconds(call) for way, call in ways.items()} for _ in range(1 + REPEATS)][1:]
    return {way: min(took[way] for took in rounds) for way in ways}


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()  # ends with a number on the host, so a device is done as well
    return time.perf_counter() - began


def main() -> int:
    """Measure, write the file, print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, help="size of the tensor; 256 on a CPU, 2048 on a CUDA device")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    mib = given.mib or (2048 if given.device == "cuda" else 256)
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    speeds, small = measure(mib, device), measure_small(device)
    result = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or platform.machine(),
        "mib": mib, "repeats": REPEATS, "cores": os.cpu_count(), "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "fused": digest._adder(device) is digest._by_kernel if given.device == "cuda" else digest._loop_runs(),
        "gigabytes_per_second": speeds,
        "small_tensors": {"count": SMALL[0], "bytes": SMALL[1], "microseconds_each": small},
    }  # fmt: skip
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"digest-cost-{given.device}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
