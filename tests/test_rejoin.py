"""Engines that come later get the committed version from one that keeps it, in a fleet of processes whose trainer is gone.

Not covered: vLLM and Ray (`test_rejoin_on_fleet.py`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleets import wait_until
from tests.survivors import ENGINES, Survivors, hold_sending, slow_down, spoil, weights
from weightsync.protocol import EngineState

KILL = signal.SIGKILL


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Survivors]:
    fleet = Survivors(tmp_path, retain_engines=1, retain_folder=str(tmp_path / "memory"))
    wait_until(lambda: "error" not in fleet.update(), 30, "a first update, behind everybody's imports")
    yield fleet
    fleet.end()


def kept(fleet: Survivors) -> dict[int, str]:
    return {e.engine: e.retained.update_id for e in fleet.status().engines if e.retained is not None}


def serves(fleet: Survivors, ordinal: int) -> bool:
    want = {name: float(tensor[0]) for name, tensor in weights(fleet.version).items()}
    return fleet.held(ordinal) == ("serving", fleet.version, want)


def without_trainer(fleet: Survivors) -> None:
    wait_until(lambda: list(kept(fleet)) == [0], 5, "what engine 0 keeps")
    fleet.roles["trainer"].kill()


@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.slow)], ids=["another", "the-one-that-keeps"])
def test_an_engine_that_was_killed_gets_the_committed_version_with_the_trainer_gone(fleet: Survivors, victim: int) -> None:
    without_trainer(fleet)
    fleet.replace(f"engine {victim}")
    assert fleet.held(victim)[:2] == ("pending", None)
    wait_until(lambda: serves(fleet, victim), 10, "its weights")
    wait_until(lambda: fleet.status().ready == ENGINES, 3, "the fleet")
    update = {e.update_id for e in fleet.status().engines}
    assert len(update) == 1, "it holds the trainer's update, on which a partial one may build"
    fleet.replace("trainer")
    assert "error" not in fleet.update()
    assert all(serves(fleet, ordinal) for ordinal in range(ENGINES))


@pytest.mark.slow
def test_a_fleet_of_which_every_process_was_killed_comes_back_to_its_version(fleet: Survivors) -> None:
    without_trainer(fleet)
    names = ["controller", *(f"engine {ordinal}" for ordinal in range(ENGINES))]
    for name in names:
        fleet.roles[name].kill()
    for name in names:
        fleet.replace(name)
    wait_until(lambda: fleet.status().ready == ENGINES, 20, "all weights")
    assert fleet.status().committed_version == fleet.version and all(serves(fleet, ordinal) for ordinal in range(ENGINES))


def test_the_trainer_goes_first(fleet: Survivors) -> None:
    wait_until(lambda: list(kept(fleet)) == [0], 5, "what engine 0 keeps")
    fleet.roles["engine 0"].call(hold_sending, 60.0)
    fleet.replace("engine 2")
    wait_until(lambda: any(update.startswith("rejoin-") for update in _receiving(fleet)), 10, "a rejoin that has begun")
    done = fleet.update()
    assert "error" not in done and done["seconds"] < 5
    assert all(serves(fleet, ordinal) for ordinal in range(ENGINES))
    assert 'weightsync_rejoins_total{outcome="gave_way"} 1.0' in _metrics(fleet)


def _receiving(fleet: Survivors) -> list[str]:
    receiver = fleet.roles["engine 2"].call(_update_of)
    return [receiver] if receiver else []


def _update_of(state: dict[str, Any]) -> str:
    receiver = state["actor"]._engine.worker._receiver
    return receiver.order.request.update_id if receiver is not None else ""


def _metrics(fleet: Survivors) -> str:
    import httpx

    return httpx.get(f"{fleet.url}/metrics").text


@pytest.mark.slow
def test_bytes_that_changed_while_they_were_kept_reach_no_engine(fleet: Survivors) -> None:
    without_trainer(fleet)
    fleet.roles["engine 0"].call(spoil)
    fleet.replace("engine 2")
    wait_until(lambda: 'weightsync_rejoins_total{outcome="failed"} 1.0' in _metrics(fleet), 10, "a rejoin that failed")
    assert fleet.held(2) == ("pending", None, {})
    fleet.replace("trainer")
    assert "error" not in fleet.update()
    assert serves(fleet, 2)


@pytest.mark.slow
def test_a_version_that_too_few_engines_reached_is_handed_to_none(fleet: Survivors) -> None:
    for ordinal in range(ENGINES)[1:]:
        fleet.roles[f"engine {ordinal}"].call(slow_down, 30.0)
    assert "error" in fleet.update()
    wait_until(lambda: fleet.status().engines[0].version == fleet.version, 5, "engine 0 alone")
    for ordinal in range(ENGINES)[1:]:
        fleet.replace(f"engine {ordinal}")
    wait_until(lambda: all(e.state != EngineState.DEAD for e in fleet.status().engines), 10, "all engines")
    with pytest.raises(AssertionError):
        wait_until(lambda: fleet.status().ready > 1, 2, "nothing")
    assert "weightsync_rejoins_total{" not in _metrics(fleet)


@pytest.mark.slow
def test_where_nothing_is_kept_an_engine_waits_for_the_next_update(tmp_path: Path) -> None:
    fleet = Survivors(tmp_path)
    wait_until(lambda: "error" not in fleet.update(), 30, "a first update")
    fleet.replace("engine 2")
    with pytest.raises(AssertionError):
        wait_until(lambda: fleet.held(2)[0] == "serving", 3, "nothing")
    assert kept(fleet) == {}
    assert "error" not in fleet.update()
    assert serves(fleet, 2)
    fleet.end()
