"""Which engine a completion is asked of, by what the service says, and when it is asked again. Engines are made up.

Real ones: `test_draining_on_vllm.py`, `test_faults.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_ledger import engine
from weightsync.client.rollouts import Rollouts
from weightsync.errors import EngineDied, EngineUpdating, NoEngineReady, ServiceUnreachable, WeightSyncError
from weightsync.protocol import EngineState, EngineStatus
from weightsync.results import Generation


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


ANSWER = {"choices": [{"token_ids": [1], "weight_versions": [], "finish_reason": "length"}]}
UPDATING = EngineUpdating("it is being updated", hint="in a moment")


class Engines:
    """Two engines that serve; each answers with the next of its script, and well when that is used up."""

    def __init__(self, *scripts: list[WeightSyncError]) -> None:
        self.scripts, self.asked = list(scripts), list[int]()
        self.rollouts = Rollouts(self, lambda: tuple(replace(engine(o, 4), url=f"http://{o}") for o in range(len(scripts))))  # type: ignore[arg-type]

    def request(self, method: str, url: str, body: Any, timeout_seconds: float) -> Any:
        ordinal = int(url.removeprefix("http://")[0])
        self.asked.append(ordinal)
        if self.scripts[ordinal]:
            raise WeightSyncError.from_dict(self.scripts[ordinal].pop(0).to_dict())
        return ANSWER

    def generate(self, only: int | None = None, seconds: float = 5.0) -> Generation:
        return self.rollouts.generate([1, 2], {}, seconds, only)


def test_another_engine_is_asked_at_once_when_one_is_being_updated() -> None:
    engines, began = Engines([UPDATING], []), time.monotonic()
    assert (engines.generate().engine, engines.asked) == (1, [0, 1])
    assert time.monotonic() - began < 0.04, "nothing to wait for"


@pytest.mark.parametrize("only", [None, 1])
def test_engines_that_are_being_updated_are_asked_again_in_a_moment(only: int | None) -> None:
    engines, began = Engines([UPDATING] * 3, [UPDATING] * 3), time.monotonic()
    assert engines.generate(only).finish_reason == "length"
    assert 0.05 + 0.1 <= time.monotonic() - began < 1.5
    assert len(engines.asked) == (7 if only is None else 4)


@pytest.mark.parametrize(("other", "kind"), [(ServiceUnreachable("gone"), NoEngineReady), (NoEngineReady("pending"), NoEngineReady)])
def test_one_that_is_gone_or_out_is_not_asked_again_with_them(other: WeightSyncError, kind: Callable[..., Any]) -> None:
    engines = Engines([UPDATING, UPDATING], [other])
    assert engines.generate().engine == 0
    assert engines.asked.count(1) == 1
    with pytest.raises(NoEngineReady) as caught:
        Engines([other], [other]).generate()
    assert type(caught.value) is kind


def test_a_prompt_under_which_an_engine_died_is_passed_on_once() -> None:
    died = EngineDied("vLLM of engine 0 died while it had this request", engine=0)
    engines = Engines([died], [], [])
    assert (engines.generate().engine, engines.asked) == (2, [0, 2])
    engines = Engines([died], [], [EngineDied("of engine 2", engine=2)])
    with pytest.raises(EngineDied, match="of engine 2") as caught:
        engines.generate()
    assert engines.asked == [0, 2] and caught.value.engine == 2
    engines = Engines([died], [])
    with pytest.raises(EngineDied):
        engines.generate(0)
    assert engines.asked == [0]


@pytest.mark.parametrize("only", [None, 0])
def test_waiting_ends_with_the_deadline_and_says_that_they_are_being_updated(only: int | None) -> None:
    engines, began = Engines([UPDATING] * 99, [UPDATING] * 99), time.monotonic()
    with pytest.raises(EngineUpdating) as caught:
        engines.generate(only, seconds=0.4)
    assert time.monotonic() - began < 0.4
    assert caught.value.retryable and caught.value.engine in (0, 1) and caught.value.hint == "in a moment"


def test_an_engine_that_has_started_anew_is_asked_under_its_new_address() -> None:
    """A list from before had its old one, where nothing listens any more."""
    asked: list[str] = []

    def request(method: str, url: str, body: Any, timeout_seconds: float) -> Any:
        asked.append(url)
        if url.startswith("http://old"):
            raise ServiceUnreachable("no service answers at http://old")
        return ANSWER

    lists = [(replace(engine(0, 4), url="http://old"),), (replace(engine(0, 4), url="http://new"),)]
    rollouts = Rollouts(SimpleNamespace(request=request), lambda: lists.pop(0) if len(lists) > 1 else lists[0])  # type: ignore[arg-type]
    assert rollouts.generate([1], {}, 1.0, 0).engine == 0
    assert [url.split("/")[2] for url in asked] == ["old", "new"]
    gone = Rollouts(SimpleNamespace(request=request), lambda: (replace(engine(0, 4), url="http://old"),))  # type: ignore[arg-type]
    with pytest.raises(EngineDied):
        gone.generate([1], {}, 1.0, 0)
