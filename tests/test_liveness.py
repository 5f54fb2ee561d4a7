"""Workers that don't answer: when that is silence and when it is not, in an event loop of its own, with short times.

What an engine, the fleet's book and the API make of it: `test_silence.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from weightsync import config
from weightsync.fleet.liveness import Liveness, commit_seconds

#: Silence that is borne, seconds; so questions come every 30 ms, and looks every 10.
MOST = 0.12


class Workers:
    """Answer what they are asked, in order, unless they hang."""

    def __init__(self, silence_seconds: float = MOST) -> None:
        self.answering = asyncio.Event()
        self.answering.set()
        self.turns: list[bool] = []  # when silence began (True) and ended
        self.asked = self.waiting = self.most_at_once = 0
        self.fails = False
        self.liveness = Liveness(silence_seconds, self.ask, self.turns.append)

    async def ask(self, number: int) -> None:
        self.asked += 1
        await self.call()
        if self.fails:
            raise RuntimeError("the extension is another one")

    async def call(self) -> str:
        self.waiting += 1
        self.most_at_once = max(self.most_at_once, self.waiting)
        await self.answering.wait()
        self.waiting -= 1
        return "said"

    def hang(self) -> None:
        self.answering.clear()

    @contextlib.contextmanager
    def watched(self) -> Iterator[Liveness]:
        watch = asyncio.create_task(self.liveness.watch())
        try:
            yield self.liveness
        finally:
            watch.cancel()


async def until(condition: Callable[[], bool], seconds: float = 3.0) -> float:
    """Wait for it; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come about"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def run(scenario: Callable[[Workers], Awaitable[None]], silence_seconds: float = MOST) -> Workers:
    async def whole() -> Workers:
        workers = Workers(silence_seconds)
        with workers.watched():
            await asyncio.wait_for(scenario(workers), 10)
        return workers

    return asyncio.run(whole())


def test_workers_that_answer_are_asked_again_and_again_and_are_never_silent() -> None:
    async def scenario(workers: Workers) -> None:
        await until(lambda: workers.asked >= 4)
        assert workers.liveness.seconds < MOST

    assert run(scenario).turns == []


def test_workers_that_hang_are_silent_until_they_answer_and_have_one_question_to_answer() -> None:
    async def scenario(workers: Workers) -> None:
        await until(lambda: workers.asked == 2)
        workers.hang()
        assert await until(lambda: workers.liveness.silent) > MOST / 2
        await asyncio.sleep(MOST)
        assert workers.liveness.question is not None and workers.liveness.seconds >= MOST
        workers.answering.set()
        await until(lambda: not workers.liveness.silent)
        asked = workers.asked
        await until(lambda: workers.asked > asked + 1)

    workers = run(scenario)
    assert (workers.turns, workers.most_at_once) == ([True, False], 1)


def test_who_answers_something_else_need_not_be_asked() -> None:
    async def scenario(workers: Workers) -> None:
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            assert await workers.liveness.answer(workers.call(), 1.0) == "said"
            await asyncio.sleep(0.002)

    assert run(scenario, silence_seconds=1.2).asked == 0


def test_workers_that_are_at_work_are_not_asked_and_what_was_asked_behind_it_waits_with_it() -> None:
    """A load map, an apply, a sleep: the core waits for that, and so does whoever asks meanwhile."""

    async def scenario(workers: Workers) -> None:
        with workers.liveness.work(60.0):
            asked = workers.asked
            workers.hang()
            with pytest.raises(TimeoutError):
                await workers.liveness.answer(workers.call(), MOST / 2)  # as a new controller asks, which does not know
            await asyncio.sleep(2 * MOST)
            assert not workers.liveness.silent and workers.asked == asked
            workers.answering.set()
        await until(lambda: workers.asked > asked)

    assert run(scenario).turns == []


def test_what_was_asked_before_the_work_began_is_not_excused_by_it() -> None:
    async def scenario(workers: Workers) -> None:
        workers.hang()
        await until(lambda: workers.liveness.question is not None)
        with workers.liveness.work(60.0):
            await until(lambda: workers.liveness.silent)

    assert run(scenario).turns[:1] == [True]


def test_work_that_takes_longer_than_it_may_is_silence_until_it_ends() -> None:
    async def scenario(workers: Workers) -> None:
        with workers.liveness.work(MOST):
            await until(lambda: workers.liveness.silent)
            assert workers.liveness.seconds >= MOST
        assert not workers.liveness.silent and workers.liveness.seconds < MOST

    assert run(scenario).turns == [True, False]


@pytest.mark.parametrize("silence_seconds", [MOST, 0.0])
def test_a_call_that_is_not_answered_in_time_is_silence_at_once_until_it_is(silence_seconds: float) -> None:
    async def scenario(workers: Workers) -> None:
        workers.hang()
        with pytest.raises(TimeoutError):
            await workers.liveness.answer(workers.call(), 0.05)
        assert workers.liveness.silent
        await asyncio.sleep(0.05)
        assert workers.liveness.silent, "nothing but an answer ends it"
        workers.answering.set()
        await until(lambda: not workers.liveness.silent)

    workers = run(scenario, silence_seconds)
    assert workers.turns == [True, False] and (silence_seconds or workers.asked == 0)


def test_what_nobody_waits_for_is_owed_and_is_no_silence() -> None:
    async def scenario(workers: Workers) -> None:
        workers.hang()
        workers.liveness.owe(workers.call(), float("inf"))
        await asyncio.sleep(MOST)
        workers.liveness.look()
        assert not workers.liveness.silent and workers.liveness.seconds > MOST / 2

    run(scenario, silence_seconds=0.0)


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    """A node that was frozen, or an event loop that was kept: the answer may be there, unread."""

    async def scenario(workers: Workers) -> None:
        workers.hang()
        await until(lambda: workers.liveness.question is not None)
        time.sleep(3 * MOST)
        await asyncio.sleep(0.015)  # a look
        assert not workers.liveness.silent
        workers.answering.set()
        await until(lambda: workers.liveness.question is None)

    assert run(scenario).turns == []


def test_a_question_that_fails_was_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(workers: Workers) -> None:
        workers.fails = True
        await until(lambda: workers.asked > 3)

    assert run(scenario).turns == []
    assert "workers were asked for a sign of life: RuntimeError: the extension is another one" in caplog.text


def test_a_call_that_fails_says_so_to_who_made_it() -> None:
    async def broken() -> None:
        raise RuntimeError("the core has died")

    async def scenario(workers: Workers) -> None:
        with pytest.raises(RuntimeError, match="the core has died"):
            await workers.liveness.answer(broken(), 1.0)
        assert not workers.liveness.silent

    run(scenario)


@pytest.mark.parametrize(
    ("more", "seconds"),
    [({}, 360.0), ({"sync.stage": "none"}, 400.0), ({"sync.in_flight": "wait", "sync.drain_timeout_seconds": 7}, 367.0)],
)
def test_a_commit_may_take_as_long_as_all_that_it_consists_of(more: dict[str, object], seconds: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert commit_seconds(config.load({"engine.model": tmp_path, **more}).sync, 40.0) == seconds
