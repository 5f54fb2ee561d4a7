"""A trainer in a process of its own that brings two checkpoints in turns, as fast as it can or at an interval.

    python -m benchmarks.trainer URL TOKEN_FILE CHECKPOINT_OF_EVEN_VERSIONS CHECKPOINT_OF_ODD_ONES [--every SECONDS]

Each update is told on standard output as a line of JSON: `began` and `ended` (`time.monotonic()`, which all processes of
a machine share), `version`, and what became of it: `pause` and `seconds` by phase, and the ordinals of `engines` that committed and of
those `lost` in a broadcast, or the `code` of the error, whether it can be tried again (`retryable`) and its `message`. It ends when its
standard input does.

Not covered: training.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from weightsync import WeightSync
from weightsync.errors import WeightSyncError

#: Before another try, seconds.
_PATIENCE = 0.2
_UPDATE_SECONDS = 60.0
#: Several buckets for a tiny checkpoint, and not so many that waiting for one process after the other is all that is seen.
_BUCKET_BYTES = 400_000


def update(sync: WeightSync, weights: tuple[Any, Any]) -> dict[str, Any]:
    """Bring one version above the fleet's; what became of it."""
    told: dict[str, Any] = {"began": time.monotonic(), "version": None}
    try:
        told["version"] = (sync.status().committed_version or 0) + 1
        report = sync.sync_weights(weights[told["version"] % 2], told["version"])
        seconds = {phase: round(took, 4) for phase, took in report.seconds.items()}
        told |= {"pause": report.pause_seconds, "seconds": seconds, "engines": [v.engine for v in report.verdicts if v.committed]}
        told["lost"] = [sent.engine for sent in report.sent_again]
    except WeightSyncError as exc:
        told |= {"code": exc.code, "retryable": exc.retryable, "message": str(exc)}
    return told | {"ended": time.monotonic()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("token_file", type=Path)
    parser.add_argument("checkpoints", type=Path, nargs=2)
    parser.add_argument("--every", type=float, default=0.0, help="seconds from the begin of an update to the next one's")
    given = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # where its threads stand, for one that does not end
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    even, odd = (load_file(folder / "model.safetensors") for folder in given.checkpoints)
    token = given.token_file.read_text().strip()
    with WeightSync(given.url, token, bucket_bytes=_BUCKET_BYTES, timeout_seconds=_UPDATE_SECONDS) as sync:
        while not over.is_set():
            told = update(sync, (even, odd))
            print(json.dumps(told), flush=True)
            over.wait(_PATIENCE if "code" in told else max(0.0, told["began"] + given.every - time.monotonic()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
