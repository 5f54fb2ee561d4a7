"""Whether an engine's workers answer: they are asked for a sign of life again and again, and what they owe is counted.

The question goes the way of every call to the workers, through vLLM's core, which passes it on between two model
steps. So an answer takes as long as the steps before it, and workers that hang (a stopped process, a kernel that never
ends) give none. It is asked only when no other call was answered meanwhile, and one at a time.

Workers come to what they are asked in order. What is asked behind an update's own work, or a sleep, waits for that, and such time
does not count, up to what the work may take. Nor does time in which this process itself stood still. Workers are silent while
they owe an answer for longer than it may take, and no longer: one that comes late ends the silence.

Not covered: ending workers that never answer again; threads of workers (receiving has deadlines of its own).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weightsync.sections import SyncSettings

logger = logging.getLogger(__name__)

#: How often workers are asked: this, or as often within the silence that is borne, whichever is shorter. vLLM's workers spin for a second
#: behind each call before they sleep, which idle ones would do for a fifth of the time if they were asked every 5 s.
_PERIOD_SECONDS, _QUESTIONS = 15.0, 4
#: Likewise how often it is looked.
_LOOK_SECONDS, _LOOKS = 1.0, 12

T = TypeVar("T")


@dataclass(eq=False)
class _Wait:
    """A call that was made and not answered, or work that was begun and has not ended.

    Attributes:
        most: seconds that it may take.
        number: in the order of beginning.
        waited: seconds, those that count.
        seen: when they were counted last, by `time.monotonic()`.
    """

    most: float
    number: int
    waited: float = 0.0
    seen: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return self.waited >= self.most


class Liveness:
    """Of one engine's workers.

    Args:
        silence_seconds: how long they may owe an answer to the question; with 0 it is never asked, and calls count alone.
        ask: puts the question, of this number, to all workers; returns when all have answered.
        changed: told when silence begins and when it ends.

    Attributes:
        silent: see the module.
        question: number of the one that is not answered; None while there is none.
    """

    def __init__(
        self, silence_seconds: float, ask: Callable[[int], Coroutine[Any, Any, object]], changed: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._most, self._ask, self._changed = silence_seconds, ask, changed
        self._period = min(_PERIOD_SECONDS, silence_seconds / _QUESTIONS)
        self._look_seconds = min(_LOOK_SECONDS, silence_seconds / _LOOKS or _LOOK_SECONDS)
        self._numbers = itertools.count(1)
        self._calls: dict[asyncio.Future[Any], _Wait] = {}
        self._works: set[_Wait] = set()
        self._heard = time.monotonic()  # when an answer came last
        self.silent = False
        self.question: int | None = None

    @property
    def seconds(self) -> float:
        """How long an answer is owed, of all the longest."""
        return max((wait.waited for wait in (*self._calls.values(), *filter(lambda work: work.over, self._works))), default=0.0)

    async def watch(self) -> None:
        """Look, and ask, until cancelled."""
        while True:
            await asyncio.sleep(self._look_seconds)
            self.look()

    def look(self) -> None:
        """Count, and ask if it is time."""
        now = time.monotonic()
        for wait in (*self._works, *self._calls.values()):
            if not self._stands(wait):
                wait.waited += min(now - wait.seen, 2 * self._look_seconds)
            wait.seen = now
        self._judge()
        free = self.question is None and not self.silent and not self._works
        if self._period and free and now - self._heard >= self._period:
            self.question = next(self._numbers)
            self.owe(self._sign(self.question), self._most)

    async def _sign(self, number: int) -> None:
        try:
            await self._ask(number)
        except Exception as exc:  # an answer of a kind; where vLLM died that shows by itself
            logger.warning("workers were asked for a sign of life: %s: %s", type(exc).__name__, exc)
        finally:
            self.question = None

    async def answer(self, call: Coroutine[Any, Any, T], seconds: float) -> T:
        """What workers answer to a short call.

        Raises:
            TimeoutError: not in time. They owe it still, and are silent until it comes.
        """
        task = self.owe(call, seconds)
        if not (await asyncio.wait({task}, timeout=seconds))[0]:
            wait = self._calls[task]
            if not self._stands(wait):
                wait.waited = max(wait.waited, wait.most)
            self._judge()
            raise TimeoutError
        return task.result()

    def owe(self, call: Coroutine[Any, Any, T], seconds: float) -> asyncio.Task[T]:
        """Make a call that nobody need wait for."""
        task = asyncio.get_running_loop().create_task(call)
        self._calls[task] = _Wait(seconds, next(self._numbers))
        task.add_done_callback(self._answered)
        return task

    def _answered(self, task: asyncio.Task[Any]) -> None:
        del self._calls[task]
        if not task.cancelled():
            task.exception()  # whoever waits has it; maybe nobody does
            self._heard = time.monotonic()
        self._judge()

    @contextlib.contextmanager
    def work(self, seconds: float) -> Iterator[None]:
        """Workers have something else to do meanwhile, for as long as this at most."""
        wait = _Wait(seconds, next(self._numbers))
        self._works.add(wait)
        try:
            yield
        finally:
            self._works.discard(wait)
            self._heard = time.monotonic()
            self._judge()

    def _stands(self, wait: _Wait) -> bool:
        """Whether its time does not count now: workers come to it behind work that may take as long as it has."""
        return any(work.number < wait.number and not work.over for work in self._works)

    def _judge(self) -> None:
        silent = any(wait.over for wait in (*self._works, *self._calls.values()))
        if silent != self.silent:
            self.silent = silent
            self._changed(silent)


def commit_seconds(sync: SyncSettings, timeout_seconds: float) -> float:
    """How long an engine may take for a commit, from the call to its verdict.

    Args:
        timeout_seconds: the update's own deadline, in which what is not staged arrives.
    """
    most = sync.apply_timeout_seconds + 2 * sync.control_timeout_seconds
    most += timeout_seconds if sync.stage == "none" else 0
    return most + (sync.drain_timeout_seconds if sync.in_flight == "wait" else 0)
