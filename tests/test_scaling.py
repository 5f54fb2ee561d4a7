"""Which engines go, and which count while they come.

Not covered: engines (`test_scale_on_fleet.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_ledger import apply, engine, fleet, request
from tests.test_roster import Handle, never, roster_of, says
from weightsync.codec import encode
from weightsync.errors import EngineDied, NoEngineReady
from weightsync.fleet.ledger import Ledger
from weightsync.fleet.scaling import leaving
from weightsync.protocol import EngineState, EngineStatus, Retained

KEPT = Retained("u1", 1, 0, 4096, "h", 68, "u1.bytes")


def serving(ordinal: int, keeps: bool = False) -> EngineStatus:
    return replace(engine(ordinal, 1), update_id="u1", retained=KEPT if keeps else None)


TABLE: list[tuple[list[EngineStatus], set[int], int, tuple[int, ...]]] = [
    ([serving(0, keeps=True), serving(1), serving(2)], {0, 1, 2}, 1, (2,)),
    ([serving(0), serving(1), serving(2, keeps=True)], {0, 1, 2}, 1, (1,)),
    ([serving(0), serving(1), serving(2, keeps=True)], {0, 1, 2}, 2, (0, 1)),
    ([serving(0, keeps=True), engine(1), serving(2)], {0, 1, 2}, 1, (1,)),
    ([serving(0), engine(1, 1, EngineState.DEAD), engine(2, None, EngineState.QUARANTINED)], {0, 1, 2}, 2, (1, 2)),
    ([serving(0)], {0, 4}, 1, (4,)),  # one that nobody has seen
    ([engine(0, 1, EngineState.UPDATING), engine(1, None, EngineState.PENDING)], {0, 1}, 1, (1,)),
]


@pytest.mark.parametrize(("engines", "there", "count", "go"), TABLE)
def test_those_go_that_are_missed_least(engines: list[EngineStatus], there: set[int], count: int, go: tuple[int, ...]) -> None:
    assert leaving(engines, there, count) == go


def with_version(engines: int = 2) -> Ledger:
    ledger = fleet(engines)
    assert apply(ledger, ledger.admit(request("u1", 1), 0.0), *[True] * engines)
    return ledger


def test_an_added_engine_is_waited_for_when_it_serves_what_the_others_do_and_not_before() -> None:
    ledger = with_version()
    ledger.join(2)
    assert (ledger.require, ledger.ready) == (2, 2)
    assert apply(ledger, ledger.admit(request("u2", 2), 0.0), True, True), "it has no workers yet"
    ledger.see(engine(2))
    update = ledger.admit(request("u3", 3), 0.0)
    assert update.engines == (0, 1, 2) and apply(ledger, update, True, True, False), "it takes part, and may fail"
    assert ledger.require == 2
    ledger.see(replace(engine(2, 3), update_id="u3"))
    assert (ledger.require, ledger.ready) == (3, 3)
    ledger.lose(2, "engine_died")
    with pytest.raises(EngineDied):
        ledger.admit(request("u4", 4), 0.0)


def test_before_the_first_version_an_added_engine_counts_when_it_has_started() -> None:
    ledger = fleet(1)
    ledger.join(1)
    assert ledger.require == 1
    ledger.see(engine(1))
    assert ledger.require == 2


def test_an_engine_that_goes_takes_no_update_and_is_not_waited_for() -> None:
    ledger = with_version()
    ledger.leaving = {1}
    assert (ledger.require, ledger.ready) == (1, 1)
    assert ledger.admit(request("u2", 2), 0.0).engines == (0,)
    ledger.forget(1)
    assert ledger.leaving == set() and list(ledger.engines) == [0]
    alone = with_version(1)
    alone.leaving = {0}
    with pytest.raises(NoEngineReady):
        alone.admit(request("u2", 2), 0.0)


def test_an_engine_that_goes_is_brought_to_nothing() -> None:
    ledger = with_version()
    ledger.see(engine(1))
    assert list(ledger.lacking()) == [1]
    ledger.leaving = {1}
    assert ledger.lacking() == {}


def test_nobody_waits_for_the_answer_of_an_engine_that_has_no_place_yet(tmp_path: Path) -> None:
    good = says({"incarnation": "0-1", "places": [], "status": encode(engine(0, 3))})
    roster, ledger = roster_of(tmp_path, Handle(describe=good))

    async def ask() -> None:
        ledger.join(1)
        roster.add(1, Handle(describe=never))
        for _ in range(3):
            await asyncio.wait_for(roster.refresh(), 0.5)
        assert len(roster._starting) == 1
        roster._starting[1].cancel()

    asyncio.run(ask())
    assert ledger.engines[0].state == EngineState.SERVING


def test_what_an_engine_that_was_taken_away_says_late_is_not_heard(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slowly(*_: object) -> object:
        await release.wait()
        return {"value": {"incarnation": "0-1", "places": [], "status": encode(engine(0, 3))}}

    roster, ledger = roster_of(tmp_path, Handle(describe=slowly))
    ledger.forget(0)

    async def ask() -> None:
        asked = asyncio.create_task(roster.refresh())
        await asyncio.sleep(0.05)
        roster.remove(0)
        release.set()
        await asked

    asyncio.run(ask())
    assert ledger.engines == {}
