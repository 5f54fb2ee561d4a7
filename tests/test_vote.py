"""Two workers of one model decide together; each is a process, and they meet as vLLM's do.

Not covered: what they decide about (`test_recapture.py`), more than one engine core.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import json, sys
from vllm.distributed import parallel_state
from weightsync.worker.vllm_compat.vote import together
rank, store = int(sys.argv[1]), sys.argv[2]
parallel_state.init_distributed_environment(2, rank, f"file://{store}", rank, backend="gloo")

def part(says):
    if says == "raises":
        raise ValueError(f"worker {rank}")
    if says == "dies":
        import os
        os._exit(1)
    return says == "wants"

for line in sys.stdin:
    try:
        print(json.dumps(together(lambda: part(json.loads(line)[rank]))), flush=True)
    except Exception as exc:
        print(json.dumps(f"{type(exc).__name__}: {str(exc)[:20]}"), flush=True)
"""


def decided(rounds: list[tuple[str, str]], folder: Path) -> list[list[object]]:
    """What each worker makes of each round."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(folder / "store")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    told = "".join(json.dumps(one) + "\n" for one in rounds)
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(told)
        worker.stdin.flush()
    said = [worker.communicate(timeout=110)[0] for worker in workers]
    return [[json.loads(line) for line in out.splitlines() if line[:1] in '"tf'] for out in said]


@pytest.mark.slow
def test_a_step_is_made_by_all_when_one_wants_it_and_by_none_when_one_failed(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    other = "ApplyFailed: another worker of th"
    rounds = {
        ("wants", "not"): (True, True),
        ("not", "wants"): (True, True),
        ("not", "not"): (False, False),
        ("wants", "wants"): (True, True),
        ("raises", "wants"): ("ValueError: worker 0", other),
        ("wants", "raises"): (other, "ValueError: worker 1"),
        ("raises", "raises"): ("ValueError: worker 0", "ValueError: worker 1"),
    }
    first, second = decided([*rounds, ("not", "wants"), ("wants", "dies")], tmp_path)
    assert list(zip(first, second, strict=False)) == [*rounds.values(), (True, True)]
    (left,) = first[len(rounds) + 1 :]
    assert str(left).startswith("RuntimeError"), "one that dies does not keep the other waiting"
