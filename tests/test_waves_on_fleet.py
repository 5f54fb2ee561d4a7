"""Commits in waves in a fleet of processes: never fewer engines serve than `sync.min_available` says, whoever fails.

Not covered: vLLM and its requests (`test_draining_on_vllm.py`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleets import wait_until
from tests.survivors import ENGINES, Survivors, slow_down, states, train, weights
from weightsync.errors import WeightSyncError

SLOW = 0.4


def fleet_of(folder: Path, **sync: Any) -> Survivors:
    fleet = Survivors(folder, retain_folder=str(folder / "memory"), **sync)
    wait_until(lambda: "error" not in fleet.update(), 30, "a first update, for which nobody is taken away")
    for ordinal in range(ENGINES):
        fleet.roles[f"engine {ordinal}"].call(slow_down, SLOW)
    return fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Survivors]:
    fleet = fleet_of(tmp_path, require=1, retain_engines=1, min_available=3)
    yield fleet
    fleet.end()


def fewest(fleet: Survivors, since: float, dead: dict[int, list[tuple[float, str]]] | None = None) -> int:
    """The fewest engines that served at one time since then.

    Args:
        dead: what an engine went through that can't be asked any more.
    """
    changes: list[tuple[float, int]] = []
    for ordinal in range(ENGINES):
        known = (dead or {}).get(ordinal) or fleet.roles[f"engine {ordinal}"].call(states)
        serving = False
        for moment, state in known:
            changes.append((moment, (state == "serving") - serving))
            serving = state == "serving"
    count, least = 0, ENGINES
    for moment, change in sorted(changes):
        count += change
        least = min(least, count) if moment > since else least
    return least


def serves(fleet: Survivors, ordinal: int, version: int) -> bool:
    return fleet.held(ordinal) == ("serving", version, {name: float(tensor[0]) for name, tensor in weights(version).items()})


def verdicts(fleet: Survivors) -> dict[int, str]:
    return {v.engine: (v.error or {}).get("code", "committed") for v in fleet.status().update.verdicts}


@pytest.mark.parametrize("least", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow)])
def test_so_many_serve_all_the_time(least: int, tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, require=None, retain_engines=0, min_available=least)
    began = time.monotonic()
    outcome = fleet.update()
    assert outcome.get("version") == fleet.version, outcome
    assert fewest(fleet, began) == least
    waves = ENGINES if least == 3 else 2 if least == 2 else 1
    assert waves * SLOW <= outcome["seconds"] < waves * SLOW + 3
    assert all(serves(fleet, ordinal, fleet.version) for ordinal in range(ENGINES))
    fleet.end()


def killed_in_its_wave(fleet: Survivors, victim: int) -> tuple[dict[str, Any], dict[int, list[tuple[float, str]]]]:
    """An update in which an engine dies while it is written; what came of it, and what that engine went through."""
    engine, trainer = fleet.roles[f"engine {victim}"], fleet.roles["trainer"]
    engine.call(slow_down, 6 * SLOW)
    begun, fleet.version = len(engine.call(states)), fleet.version + 1
    trainer.start(train, fleet.url, fleet.version, "", 20.0)
    wait_until(lambda: len(engine.call(states)) > begun, 10, "its wave")
    time.sleep(SLOW / 4)
    went = engine.call(states)
    engine.signal(signal.SIGKILL)
    return trainer.result(), {victim: [*went, (time.monotonic(), "dead")]}


def test_where_one_dies_in_its_wave_those_left_serve_on_and_are_brought_up_when_it_is_back(fleet: Survivors) -> None:
    began, before = time.monotonic(), fleet.version
    outcome, dead = killed_in_its_wave(fleet, 1)
    assert outcome.get("version") == fleet.version, "one must commit, and one did"
    assert verdicts(fleet) == {0: "committed", 1: "engine_died", 2: "held_back", 3: "held_back"}
    assert [serves(fleet, ordinal, before) for ordinal in (2, 3)] == [True, True]
    assert fewest(fleet, began, dead) == 3
    held = next(v for v in fleet.status().update.verdicts if v.engine == 3)
    error = WeightSyncError.from_dict(held.error)
    assert f"goes on with version {before}" in error.message and "sync.min_available keeps 3 serving" in error.message
    with pytest.raises(AssertionError):
        wait_until(lambda: fleet.status().ready > 1, 1.5, "nothing: none of those that serve can be taken away")
    assert "held_back_engines_total 2.0" in metrics(fleet)
    fleet.replace("engine 1")
    wait_until(lambda: fleet.status().ready == ENGINES, 20, "all on the fleet's version, with no word of the trainer's")
    assert all(serves(fleet, ordinal, fleet.version) for ordinal in range(ENGINES))
    back = next(moment for moment, state in fleet.roles["engine 1"].call(states) if state == "serving")
    assert fewest(fleet, back) == 3, "they were taken one by one"


@pytest.mark.slow
def test_a_version_that_waves_brought_to_too_few_is_brought_to_no_more(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, require=3, retain_engines=1, min_available=3)
    before = fleet.version
    outcome, _ = killed_in_its_wave(fleet, 1)
    assert (outcome["error"].code, outcome["error"].engine) == ("engine_died", 1), "the cause, not what followed from it"
    fleet.replace("engine 1")
    wait_until(lambda: fleet.status().engines[1].state == "pending", 10, "the one that died")
    with pytest.raises(AssertionError):
        wait_until(lambda: fleet.status().ready > 1, 1.5, "nothing")
    assert [serves(fleet, ordinal, before) for ordinal in (2, 3)] == [True, True]
    assert "rejoins_total{" not in metrics(fleet)
    began, fleet.version = time.monotonic(), fleet.version - 1  # the trainer was told that it failed, so the number is free
    assert fleet.update().get("version") == before + 1
    assert fewest(fleet, began) == 3 and fleet.status().ready == ENGINES
    fleet.end()


def test_an_update_that_nobody_can_be_taken_away_for_is_refused_before_a_byte(fleet: Survivors) -> None:
    fleet.roles["engine 1"].kill()
    wait_until(lambda: fleet.status().engines[1].state == "dead", 10, "the death")
    refused = fleet.update()["error"]
    assert (refused.code, refused.retryable, refused.phase) == ("no_engine_ready", True, "admit")
    assert "3 engine(s) serve (0, 2, 3), and sync.min_available keeps 3 serving" in refused.message
    assert 'weightsync_refused_updates_total{reason="no_engine_ready"}' in metrics(fleet)


def metrics(fleet: Survivors) -> str:
    import httpx

    return httpx.get(f"{fleet.url}/metrics").text
