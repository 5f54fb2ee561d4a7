"""Every process of a fleet killed and stopped before, in the middle of, and after the broadcast.

The call ends within its deadline and says who is gone; engines keep what they had; the next update reaches all that
live, without a restart. Real engines: `test_faults.py`, `test_lifecycle.py`.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleets import wait_until
from tests.peers import Peer
from tests.survivors import ENGINES, SILENCE, UPDATE, Survivors, commit_thrice, go, hang, say_no, slow_down, weights, writes
from tests.test_again import kill, require_sent_again, sync
from weightsync.errors import WeightSyncError

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
#: What a call may take beyond its deadline: the service's word, and telling it that the update is given up.
SLACK = 9.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivors]:
    fleet = Survivors(tmp_path_factory.mktemp("survivors"), apply_timeout_seconds=0.5)
    wait_until(lambda: "error" not in fleet.update(), 30, "a first update, behind everybody's imports")
    yield fleet
    fleet.end()


def cases() -> Iterator[Any]:
    for victim in ("trainer", "engine 2", "controller", "api"):
        for number in (KILL, STOP):
            for moment in ("before", "half", "after"):
                quick = (number == KILL and (moment == "half" or victim == "engine 2")) or (moment == "half" and victim == "trainer")
                name = f"{victim.replace(' ', '')}-{number.name}-{moment}"
                yield pytest.param(victim, number, moment, id=name, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("victim", "number", "moment"), list(cases()))
def test_whoever_dies_or_hangs_costs_one_update_and_is_named(fleet: Survivors, victim: str, number: signal.Signals, moment: str) -> None:
    assert "error" not in fleet.update()
    before, version = {ordinal: fleet.roles[f"engine {ordinal}"] for ordinal in range(ENGINES)}, fleet.version
    trainer = fleet.start(moment)
    fleet.roles[victim].signal(number)
    struck = time.monotonic()
    if victim == "trainer":
        error = ended(fleet)
        assert time.monotonic() - struck < UPDATE + SLACK
    else:
        go(trainer)
        outcome = trainer.result(UPDATE + SLACK + 5)
        assert outcome["seconds"] < UPDATE + SLACK
        error = outcome.get("error")
    require_named(victim, number, moment, error)
    living = [o for o in range(ENGINES) if victim != f"engine {o}"]
    if error is not None:
        assert [fleet.held(o)[1] for o in living] == [version] * len(living)
    follower = trainer
    if victim == "trainer":
        follower = Peer().ready()
        if number == KILL:
            fleet.replace("trainer")
            follower = fleet.roles["trainer"]
    elif victim in ("controller", "api"):
        fleet.replace(victim) if number == KILL else fleet.roles[victim].signal(signal.SIGCONT)
        wait_until(lambda: idle(fleet), 10, "the service")
    following = fleet.update(follower)
    assert "error" not in following, following["error"]
    for ordinal in living:
        want = {name: float(tensor[0]) for name, tensor in weights(fleet.version).items()}
        assert fleet.held(ordinal) == ("serving", fleet.version, want)
        assert fleet.roles[f"engine {ordinal}"] is before[ordinal] and before[ordinal].answers
    mend(fleet, victim, number, trainer, follower)


def mend(fleet: Survivors, victim: str, number: signal.Signals, trainer: Peer, follower: Peer) -> None:
    """All are back, and what was stopped ends its own call."""
    if victim == "trainer" and number == STOP:
        trainer.signal(signal.SIGCONT)
        go(trainer)
        outcome = trainer.result(UPDATE + SLACK)
        assert isinstance(outcome.get("error"), WeightSyncError)
        follower.kill()
    elif victim.startswith("engine"):
        fleet.replace(victim) if number == KILL else fleet.roles[victim].signal(signal.SIGCONT)
    wait_until(lambda: sum(e.state != "dead" for e in fleet.status().engines) == ENGINES, 10, "all engines")


def idle(fleet: Survivors) -> bool:
    try:
        status = fleet.status()
    except WeightSyncError:
        return False
    return status.update is None or status.update.state in ("committed", "aborted")


def ended(fleet: Survivors) -> WeightSyncError:
    """The error with which the service ended the update of a trainer that does not answer."""
    wait_until(lambda: fleet.status().update.state == "aborted", UPDATE + SLACK, "the abort")
    return WeightSyncError.from_dict(fleet.status().update.error)


def require_named(victim: str, number: signal.Signals, moment: str, error: WeightSyncError | None) -> None:
    """The error says who it was, wherever somebody could know."""
    if error is None:  # the bytes were out, and the update went on without it
        assert victim in ("controller", "engine 2", "api") and moment != "before"
        return
    text = f"{type(error).__name__}: {error}"
    if victim == "engine 2":
        assert "engine 2" in text, text
    elif victim == "trainer" and (number, moment) == (KILL, "half"):
        assert "the trainer (rank 0)" in text, text
    elif victim == "trainer" and moment != "after":
        assert "tensors" in text or "the trainer (rank 0)" in text, text
    elif victim == "trainer":
        assert "no commit came" in text, text
    else:
        assert "controller" in text or "service" in text or "/v1/updates" in text or "store" in text or "no update" in text, text


def test_one_that_is_killed_half_way_costs_the_others_no_call_where_they_do(fleet: Survivors) -> None:
    assert "error" not in fleet.update()
    require_sent_again(fleet, sync(fleet, kill(fleet, 2)), 2)
    fleet.replace("engine 2")
    wait_until(lambda: sum(e.state != "dead" for e in fleet.status().engines) == ENGINES, 10, "all engines")
    assert "error" not in fleet.update() and fleet.held(2)[:2] == ("serving", fleet.version)


# --- an engine whose workers hang while it answers ----------------------------------------------


@pytest.fixture
def hanging(fleet: Survivors) -> Iterator[Peer]:
    """Engine 2, which has the last update; its workers answer again behind the test."""
    assert "error" not in fleet.update()
    engine = fleet.roles["engine 2"]
    yield engine
    engine.call(hang, False)
    wait_until(lambda: fleet.status().engines[2].state == "serving", 5, "its answer")


def test_workers_that_hang_cost_one_sending_and_nothing_more_until_they_answer(fleet: Survivors, hanging: Peer) -> None:
    """Its heartbeats went on, so the next one made it healthy again, and every update failed in it anew."""
    held = fleet.version
    hanging.call(hang, True)
    require_sent_again(fleet, sync(fleet), 2)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert fleet.status().engines[2].state in ("dead", "silent")
    assert (fleet.status().engines[2].state, fleet.status().engines[2].reason, fleet.status().ready) == ("silent", "workers_silent", 3)
    for _ in range(2):
        assert "error" not in fleet.update(), "it is left out"
    hanging.call(hang, False)
    wait_until(lambda: fleet.status().engines[2].state == "serving", 5, "its answer")
    assert fleet.held(2)[:2] == ("serving", held), "it missed three"
    assert "error" not in fleet.update() and fleet.held(2)[:2] == ("serving", fleet.version)


def test_workers_that_hang_between_updates_are_found_and_cost_none(fleet: Survivors, hanging: Peer) -> None:
    hanging.call(hang, True)
    wait_until(lambda: fleet.status().engines[2].state == "silent", SILENCE + 4, "its silence")
    assert fleet.status().engines[2].version == fleet.version
    outcome = sync(fleet)
    assert "error" not in outcome, outcome["error"]
    assert [(v.engine, v.committed) for v in outcome["report"].verdicts] == [(0, True), (1, True), (2, False), (3, True)]
    error = outcome["report"].verdicts[2].error
    assert error["code"] == "workers_silent" and outcome["report"].sent_again == ()
    hanging.call(hang, False)
    wait_until(lambda: fleet.status().engines[2].state == "serving", 5, "its answer")
    assert "error" not in fleet.update() and fleet.status().ready == ENGINES


# --- a commit whose answer comes too late -------------------------------------------------------


@pytest.fixture
def slow(fleet: Survivors) -> Iterator[list[Peer]]:
    """The engines; writing takes longer in those that a test slows down."""
    engines = [fleet.roles[f"engine {ordinal}"] for ordinal in range(ENGINES)]
    assert "error" not in fleet.update()
    yield engines
    for engine in engines:
        engine.call(slow_down, 0.0)


def states(fleet: Survivors) -> Counter[tuple[str, str, int | None]]:
    return Counter((str(e.state), e.reason, e.version) for e in fleet.status().engines)


def test_a_commit_answered_too_late_counts_where_it_is_the_fleets_version(fleet: Survivors, slow: list[Peer]) -> None:
    slow[1].call(slow_down, 3.2)
    assert "error" not in fleet.update(), "three must commit, and three do"
    assert fleet.status().ready == 3
    wait_until(lambda: fleet.status().ready == ENGINES, 5, "the late answer")
    assert states(fleet) == {("serving", "", fleet.version): ENGINES}


def test_a_commit_answered_too_late_is_taken_back_where_the_fleet_went_without_it(fleet: Survivors, slow: list[Peer]) -> None:
    for engine in slow:
        engine.call(slow_down, 3.2)
    assert isinstance(fleet.update().get("error"), WeightSyncError)
    wait_until(lambda: states(fleet) == {("quarantined", "late_commit", None): ENGINES}, 6, "the late answers")
    assert [fleet.held(ordinal)[:2] for ordinal in range(ENGINES)] == [("quarantined", None)] * ENGINES, "they know it themselves"
    assert fleet.status().committed_version == fleet.version - 1
    for engine in slow:
        engine.call(slow_down, 0.0)
    fleet.version -= 1  # the trainer was told that it failed, so the number is free
    assert fleet.update().get("version") == fleet.version
    assert states(fleet) == {("serving", "", fleet.version): ENGINES}


# --- an engine that says no ---------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "half"])
def test_an_engine_that_says_no_while_the_trainer_is_in_the_broadcast_releases_it_with_its_own_words(fleet: Survivors, moment: str) -> None:
    """The refusal went to a control call; the trainer sat in a broadcast without an end."""
    trainer = fleet.start(moment)
    fleet.roles["engine 3"].call(say_no, "lm_head.bias is not of this model")
    began = time.monotonic()
    go(trainer)
    error = trainer.result()["error"]
    assert time.monotonic() - began < UPDATE
    assert (error.code, error.engine) == ("manifest_refused", 3) and "lm_head.bias is not of this model" in error.message
    assert "error" not in fleet.update()


# --- two at once, and the same again ------------------------------------------------------------


def test_of_two_trainers_at_once_one_is_told_who_is_under_way(fleet: Survivors) -> None:
    """Each had opened a group of its own, the engine kept one, and both waited for ever."""
    first, second = fleet.start("half"), Peer().ready()
    refused = fleet.update(second)["error"]
    assert (refused.code, refused.retryable) == ("update_conflict", True)
    assert f"to version {fleet.version - 1} is under way" in refused.message
    fleet.version -= 1
    go(first)
    assert first.result()["version"] == fleet.version
    assert "error" not in fleet.update(second)
    second.kill()


def test_a_trainer_that_asks_again_while_an_engine_still_writes_starts_nothing_twice(fleet: Survivors, slow: list[Peer]) -> None:
    slow[0].call(slow_down, 2.0)
    trainer = fleet.roles["trainer"]
    fleet.version += 1
    codes, version, written = trainer.call(commit_thrice, fleet.url, fleet.version, seconds=20)
    assert codes[:2] == ["deadline", "deadline"] and codes[2] == "committed"
    assert version == fleet.version and written == 1
    assert slow[0].call(writes)[-1] == 1


def test_processes_of_a_fleet_that_lost_one_end_by_themselves(tmp_path: Path) -> None:
    fleet = Survivors(tmp_path, whole=True)
    wait_until(lambda: "error" not in fleet.update(), 30, "a first update")
    trainer = fleet.start("half")
    fleet.roles["engine 2"].signal(KILL)
    go(trainer)
    assert "engine 2" in str(trainer.result(UPDATE + SLACK)["error"])
    assert [fleet.roles[name].exit_code() for name in ("trainer", "engine 0")] == [0, 0]
    fleet.end()
