"""Which engine a rollout goes to, by what the service says and when it is asked.

Not covered: what engines answer (`test_api.py`, and the tests with fleets).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_ledger import engine
from weightsync.client.rollouts import Rollouts
from weightsync.errors import NoEngineReady
from weightsync.protocol import EngineState, EngineStatus


def rollouts(*says: tuple[EngineStatus, ...]) -> tuple[Rollouts, list[tuple[EngineStatus, ...]]]:
    """Rollouts, and what the service has left to say; the last it says again and again."""
    left = list(says)
    answer: dict[str, Any] = {"choices": [{"token_ids": [1], "finish_reason": "length"}]}
    http = SimpleNamespace(request=lambda *_: answer)
    return Rollouts(http, lambda: left.pop(0) if len(left) > 1 else left[0]), left  # type: ignore[arg-type]


def test_an_engine_that_came_back_is_found_where_an_older_list_has_it_dead() -> None:
    """Behind a cut link one call failed for an engine that served again."""
    cut, back = (engine(0, 4), engine(1, 3, EngineState.DEAD)), (engine(0, 4), engine(1, 3))
    asking, left = rollouts(cut, back)
    assert asking.generate([1], {}, 1.0, None).engine == 0 and len(left) == 1, "the list is kept"
    assert asking.generate([1], {}, 1.0, 1).engine == 1
    assert {asking.generate([1], {}, 1.0, None).engine for _ in range(4)} == {0, 1}


def test_none_is_said_to_serve_by_a_list_that_was_asked_for_just_now() -> None:
    asking, _ = rollouts((engine(0, 4),), (engine(0, 4, EngineState.QUARANTINED),))
    assert asking.generate([1], {}, 1.0, None).engine == 0
    with pytest.raises(NoEngineReady, match="no engine serves as engine 1: 0 quarantined"):
        asking.generate([1], {}, 1.0, 1)
