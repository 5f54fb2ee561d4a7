"""Which engines are written next: the plan of waves alone.

Fleets that keep to it: `test_waves_on_fleet.py`, `test_draining_on_vllm.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_ledger import engine, request
from weightsync.errors import NoEngineReady, WeightSyncError
from weightsync.fleet.ledger import Ledger
from weightsync.fleet.waves import States, held_back, next_wave, reachable, require_room
from weightsync.protocol import EngineState

S, P, Q, U, D, X = (EngineState(s) for s in ("serving", "pending", "quarantined", "updating", "dead", "asleep"))


def fleet_of(*states: EngineState | None) -> dict[int, EngineState | None]:
    return dict(enumerate(states))


@pytest.mark.parametrize(
    ("left", "states", "least", "wave"),
    [
        ((0, 1, 2, 3), fleet_of(S, S, S, S), 0, (0, 1, 2, 3)),
        ((0, 1, 2, 3), fleet_of(S, S, S, S), 3, (0,)),
        ((0, 1, 2, 3), fleet_of(S, S, S, S), 2, (0, 1)),
        ((0, 1, 2, 3), fleet_of(S, S, S, S), 1, (0, 1, 2)),
        ((1, 2, 3), fleet_of(S, S, S, S), 3, (1,)),
        ((3,), fleet_of(S, S, S, S), 1, (3,)),
        # One failed in its wave: there is one place less, or none.
        ((2, 3), fleet_of(S, Q, S, S), 2, (2,)),
        ((2, 3), fleet_of(S, Q, S, S), 3, ()),
        ((2, 3), fleet_of(S, D, S, S), 3, ()),
        ((2, 3), fleet_of(S, U, S, S), 3, ()),
        # What serves nothing needs no place, and is not counted on.
        ((0, 1, 2, 3), fleet_of(P, P, P, P), 3, (0, 1, 2, 3)),
        ((0, 1, 2, 3), fleet_of(S, P, S, Q), 2, (1, 3)),
        ((0, 1, 2, 3), fleet_of(S, P, S, S), 2, (1, 0)),
        ((0, 2, 3), fleet_of(S, D, S, S), 3, ()),
        ((0, 1, 2), fleet_of(S, D, S), 1, (1, 0)),
        # Engines that do not take part serve, or don't.
        ((0,), fleet_of(S, S), 1, (0,)),
        ((0,), fleet_of(S, X), 1, ()),
        # Who does not answer may serve: not counted on, taken last, and only where there is a place.
        ((0, 1), fleet_of(None, S, S), 2, ()),
        ((0, 1, 2), fleet_of(None, S, S), 1, (1,)),
        ((0, 1), fleet_of(None, S, S), 0, (0, 1)),
        ((0,), fleet_of(None, S, S), 1, (0,)),
        ((5,), fleet_of(S, S), 1, (5,)),
        ((), fleet_of(S, S), 1, ()),
    ],
)
def test_the_next_wave(left: tuple[int, ...], states: States, least: int, wave: tuple[int, ...]) -> None:
    assert next_wave(left, states, least) == wave


@pytest.mark.parametrize(
    ("engines", "states", "least", "can"),
    [
        ((0, 1), fleet_of(S, S), 1, (0, 1)),
        ((0,), fleet_of(S, D), 1, ()),
        ((0, 1), fleet_of(S, P), 1, (0, 1)),  # the one that waits for its first weights serves when it has them
        ((0, 1, 2), fleet_of(S, S, P), 3, (2,)),
        ((0, 1, 2), fleet_of(P, P, P), 2, (0, 1, 2)),
        ((0,), fleet_of(P, D, D), 2, (0,)),
        ((0,), fleet_of(S, S, D), 2, ()),
        ((0,), fleet_of(S, D, D), 0, (0,)),
        ((0, 1), fleet_of(S, None, S), 2, ()),
    ],
)
def test_what_waves_can_come_to(engines: tuple[int, ...], states: States, least: int, can: tuple[int, ...]) -> None:
    assert reachable(engines, states, least) == can


@given(st.lists(st.sampled_from([S, P, Q, D, X, None]), min_size=1, max_size=8), st.integers(1, 8), st.data())
def test_no_wave_leaves_fewer_than_the_minimum_whatever_fails(states: list[Any], least: int, data: Any) -> None:
    fleet = fleet_of(*states)
    left = [ordinal for ordinal, state in fleet.items() if state != X]
    while wave := next_wave(left, fleet, least):
        assert set(wave) <= set(left) and len(set(wave)) == len(wave)
        staying = sum(state == S for ordinal, state in fleet.items() if ordinal not in wave)
        assert staying >= least or not any(fleet[ordinal] in (S, None) for ordinal in wave)
        for ordinal in wave:
            fleet[ordinal] = data.draw(st.sampled_from([S, Q, D, None]))
        left = [ordinal for ordinal in left if ordinal not in wave]
    assert not left or sum(state == S for state in fleet.values()) <= least, "one could have been taken"


@given(st.lists(st.sampled_from([S, P, Q, D]), min_size=1, max_size=8), st.integers(0, 8))
def test_without_failures_waves_come_to_what_was_reachable_and_to_nothing_else(states: list[Any], least: int) -> None:
    fleet, left = fleet_of(*states), list(range(len(states)))
    can = reachable(left, fleet, least)
    while wave := next_wave(left, fleet, least):
        fleet |= dict.fromkeys(wave, S)
        left = [ordinal for ordinal in left if ordinal not in wave]
    assert sorted({*range(len(states))} - {*left}) == sorted(can)


# --- what is said -------------------------------------------------------------------------------


def test_an_engine_that_was_held_back_says_why_and_what_it_serves() -> None:
    verdict = held_back(engine(2, 7), fleet_of(Q, S, S), 2)
    error = WeightSyncError.from_dict(verdict.error or {})
    assert (verdict.engine, verdict.committed, verdict.version, verdict.state) == (2, False, 7, S)
    assert (error.code, error.engine, error.retryable) == ("held_back", 2, True)
    assert error.message == (
        "engine 2 was not taken out of service for the update and goes on with version 7: "
        "2 engine(s) serve (1, 2), and sync.min_available keeps 2 serving"
    )


def test_an_update_that_no_serving_engine_could_be_taken_for_is_refused() -> None:
    with pytest.raises(NoEngineReady) as caught:
        require_room((0, 2), fleet_of(S, D, S), 2, 2)
    assert caught.value.message == (
        "2 engine(s) serve (0, 2), and sync.min_available keeps 2 serving, so engines 0, 2 can't be written: "
        "2 must commit and 0 can. Nothing was changed"
    )
    assert caught.value.retryable and "sync.min_available" in caught.value.hint


def ledger_of(require: int | None, *states: EngineState) -> Ledger:
    ledger = Ledger(require, 10, min_available=len(states) - 1)
    for ordinal, state in enumerate(states):
        ledger.see(engine(ordinal, 3 if state == S else None, state))
    return ledger


@pytest.mark.parametrize(
    ("require", "states", "admitted"),
    [
        (None, (P, P), True),  # a first update
        (None, (S, S), True),
        (None, (S, Q), True),  # the one in quarantine serves when it is written
        (1, (S, D), False),
        (1, (S, X), False),
        (1, (Q, D), True),  # nobody serves who could be missed
        (1, (S, P, D), True),  # one can be written, and one must
        (2, (S, P, D), False),
    ],
)
def test_admission(require: int | None, states: tuple[EngineState, ...], admitted: bool) -> None:
    ledger = ledger_of(require, *states)
    if admitted:
        assert ledger.admit(request("u", 4), 0.0).engines
    else:
        with pytest.raises(NoEngineReady, match=r"sync\.min_available"):
            ledger.admit(request("u", 4), 0.0)
        assert ledger.current is None and ledger.get("u") is None, "nothing was entered"
