"""What the digest costs, alone and with the look at values: one command, one JSON file.

    python -m benchmarks.digest_cost [--mib 256] [--device cpu|cuda]

In one thread, as the receiver runs it; the fastest of several rounds in which all ways take turns,
since what else a machine does can only add. Beside it what a second read would cost: torch's own
`isfinite`, and the same maximum over magnitudes, each over the whole tensor.

Not covered: the broadcast that goes on meanwhile and takes its share of the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weightsync.transport import digest, finite

DTYPES = ("bfloat16", "float32", "float16", "float8_e4m3fn")
REPEATS = 9
_RESULTS = Path(__file__).parent / "results"


def digest_and_values(tensor: torch.Tensor, dtype: str) -> bool:
    """As `worker/receiver.py` does it."""
    peak = finite.Peak(dtype)
    digest.digest_tensor(tensor, peak)
    return peak.refused


def values_alone(tensor: torch.Tensor, dtype: str) -> bool:
    peak = finite.Peak(dtype)
    words = tensor.view(torch.int64)
    peak(words, torch.empty_like(words))
    return peak.refused


def measure(mib: int, device: torch.device) -> dict[str, dict[str, float]]:
    """GB/s by dtype and by what is done."""
    result = {}
    for dtype in DTYPES:
        tensor = torch.randn((mib << 20) // getattr(torch, dtype).itemsize, device=device).to(getattr(torch, dtype))
        ways: dict[str, Callable[[], Any]] = {
            "digest": lambda t=tensor: digest.digest_tensor(t),
            "digest_and_values": lambda t=tensor, d=dtype: digest_and_values(t, d),
            "values_alone": lambda t=tensor, d=dtype: values_alone(t, d),
        }
        if not dtype.startswith("float8"):  # torch has no isfinite for these
            ways["isfinite"] = lambda t=tensor: bool(torch.isfinite(t).all())
        rounds = [{way: _seconds(call) for way, call in ways.items()} for _ in range(1 + REPEATS)][1:]
        result[dtype] = {way: round(tensor.nbytes / min(took[way] for took in rounds) / 1e9, 2) for way in ways}
    return result


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()  # ends with a number on the host, so a device is done as well
    return time.perf_counter() - began


def main() -> int:
    """Measure, write the file, print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    speeds = measure(given.mib, torch.device(given.device))
    result = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or platform.machine(),
        "mib": given.mib, "repeats": REPEATS, "cores": os.cpu_count(), "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "versions": {"python": platform.python_version(), "torch": torch.__version__}, "gigabytes_per_second": speeds,
    }  # fmt: skip
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"digest-cost-{given.device}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
