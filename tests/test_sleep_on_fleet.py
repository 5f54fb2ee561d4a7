"""Sleep and wake through the API, on a real fleet with a real CPU engine whose memory only seems to go (`drowsy`).

Not covered: vLLM's own sleep (`gpu/test_sleep_on_cuda.py` runs the same steps on it).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.asleep import through_a_deep_sleep, through_a_light_sleep
from tests.fleets import Fleet, answers
from weightsync.errors import Refused, UnsupportedEngine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def drowsy(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("drowsy")
    path = os.pathsep.join([str(Path(__file__).parent / "drowsy"), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = ["--sync.retain_engines=0"]  # else it has its weights again before a test sees that it has none
    running = Fleet(checkpoint("qwen3", 1), folder / "fleet", flags=flags, env={"SLEEP_FOLDER": str(folder), "PYTHONPATH": path})
    yield running.ready()
    assert running.stop() == 0


@pytest.mark.slow
def test_an_engine_sleeps_and_wakes_at_both_levels_and_equals_a_cold_one(drowsy: Fleet, tensors: Any, cold: Any) -> None:
    with drowsy.client(bucket_bytes=60_000) as sync:
        through_a_light_sleep(drowsy, sync, lambda seed: tensors("qwen3", seed))
        said = through_a_deep_sleep(drowsy, sync, lambda seed: tensors("qwen3", seed))
        assert all(said[seed] == cold("qwen3", seed) for seed in (1, 2))
        with pytest.raises(Refused, match="no engine 7: the fleet has 1"):
            sync.sleep(1, [7])
        assert sync.wake([0]).ready == 1


def test_an_engine_on_a_cpu_says_that_it_has_no_sleep_mode_and_serves_on(fleet: Fleet, tensors: Any) -> None:
    with fleet.client() as sync:
        sync.sync_weights(tensors("qwen3", 1))
        before = answers(sync, 0)
        with pytest.raises(UnsupportedEngine, match="without vLLM's sleep mode"):
            sync.sleep(1)
        assert sync.status().ready == 2 and answers(sync, 0) == before
