"""A real fleet grows and shrinks while a trainer syncs and requests run."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fleets import Fleet, answers, wait_until
from weightsync.cli import main
from weightsync.errors import Refused, WeightSyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3"


def test_a_fleet_grows_and_shrinks_while_training_goes_on(checkpoint: Any, tensors: Any, cold: Any, tmp_path: Path, capsys: Any) -> None:
    segments = set(os.listdir("/dev/shm"))
    fleet = Fleet(checkpoint(KIND, 1), tmp_path / "home").ready()
    try:
        with fleet.client() as sync:
            sync.sync_weights(tensors(KIND, 1))
            assert main(["scale", "2", "--url", fleet.url, "--token-file", str(tmp_path / "home/default/token")]) == 0
            assert "1 of 2 engines ready" in capsys.readouterr().out
            # No update waits for an engine that is on its way, and none fails of it.
            updates = 0
            while not sync.engines()[1].workers:
                assert sync.sync_weights(tensors(KIND, 1)).verdicts[0].committed
                updates += 1
                time.sleep(0.2)
            assert updates > 3
            # Nobody syncs now: it gets its weights from the other.
            wait_until(lambda: sync.status().ready == 2, 30, "the new engine's weights")
            assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 1)
            assert len(sync.sync_weights(tensors(KIND, 2)).verdicts) == 2

            # Whoever comes later finds it so: the fleet's own memory of it is its engines.
            controller = next(pid for pid, name in fleet.processes().items() if name.startswith("ray::Controller"))
            os.kill(controller, signal.SIGKILL)
            wait_until(lambda: _ready(sync) == 2, 30, "a new controller")
            with pytest.raises(Refused, match=r"body\.engines: Input should be greater"):
                sync.scale(0)

            ended: list[Any] = []
            stream = threading.Thread(target=lambda: ended.append(sync.generate([1, 2, 3], max_tokens=300, engine=1, ignore_eos=True)))
            stream.start()
            time.sleep(0.5)
            assert stream.is_alive()
            after = sync.scale(1)
            stream.join(30)
            assert [engine.engine for engine in after.engines] == [0] and len(ended[0].token_ids) == 300, "its requests ended by themselves"
            assert [v.engine for v in sync.sync_weights(tensors(KIND, 1)).verdicts] == [0]
            assert answers(sync, 0) == cold(KIND, 1)
            os.kill(next(pid for pid, name in fleet.processes().items() if name.startswith("ray::Controller")), signal.SIGKILL)
            wait_until(lambda: _ready(sync) == 1, 30, "a new controller")
            assert len(sync.engines()) == 1 and 'engine="1"' not in fleet.get("/metrics").text
    finally:
        assert fleet.stop() == 0
    assert wait_until(lambda: set(os.listdir("/dev/shm")) <= segments, 5, "no shared memory is left")


def _ready(sync: Any) -> int | None:
    try:
        return int(sync.status().ready)
    except WeightSyncError:
        return None
