"""An engine actor's sleep and waking, and its leaving, as callers see them; `sleeping` is what happens in the engine.

Not covered: an engine whose update is being applied: it refuses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from weightsync.errors import EngineDied, Refused, WeightSyncError
from weightsync.fleet.calls import answers
from weightsync.fleet.pausing import Pausing
from weightsync.fleet.sleeping import Sleeping
from weightsync.protocol import EngineState

_LOOK_SECONDS = 0.05
#: How long requests that were ended may take to be answered.
_ANSWERED_SECONDS = 3.0
T = TypeVar("T")


class Resting(Pausing):
    """Attributes are those of `EngineActor`. Coroutines marked `answers` are methods of the actor."""

    _reason: str
    _version: int | None
    _update_id: str | None
    _sleeping: Sleeping

    def _require_idle(self) -> None:
        raise NotImplementedError

    def _require_unpinned(self, doing: str) -> None:
        raise NotImplementedError

    def _let_go(self, why: str) -> None:
        raise NotImplementedError

    async def _end_requests(self) -> None:
        raise NotImplementedError

    @answers
    async def sleep(self, level: int) -> dict[str, Any]:
        """Give the GPU's memory back, by one of vLLM's levels; requests end. Asleep at that level already, nothing is done."""
        self._require_answering()
        async with self._resting:
            if self._state == EngineState.ASLEEP and self._sleeping.level == level:
                return self._describe()
            self._require_idle()
            if self._state == EngineState.ASLEEP:
                raise Refused(
                    f"engine {self._ordinal} is asleep at level {self._sleeping.level}", engine=self._ordinal, hint="Wake it first"
                )
            if level > 1:
                self._require_unpinned(f"level {level} drops its weights")
            engine, before = self._live(), (self._state, self._reason)
            self._state, self._reason = EngineState.ASLEEP, "asleep"
            self._draining.go_on(self._gate)
            try:
                with self._liveness.work(self._settings.engine.start_timeout_seconds):
                    await self._sleeping.prepare(engine, level)
            except Exception:
                self._state, self._reason = before
                raise
            if level > 1:
                self._version = self._update_id = None
            await self._rest(self._sleeping.fall(engine, level, before))
            return self._describe()

    @answers
    async def wake(self) -> dict[str, Any]:
        """Take the memory again. Behind level 1 it does what it did before; behind level 2 it has pending weights."""
        self._require_answering()
        async with self._resting:
            if self._state == EngineState.ASLEEP or self._reason == "sleep_failed":
                self._state, self._reason = await self._rest(self._sleeping.wake(self._live()))
                await self._stand_still()
            return self._describe()

    @answers
    async def drain(self, policy: str, seconds: float) -> int:
        """For an engine that goes: it takes no more requests and no update; those in flight end by themselves, or are ended.

        Args:
            policy: `wait` for them, at most `seconds`, or `abort` them.

        Returns:
            How many were ended.
        """
        await self._settled.wait()
        async with self._resting:
            frozen = self._draining.paused  # what runs could not end
            self._state, self._reason, until = EngineState.LEAVING, "leaving", time.monotonic() + seconds
            self._draining.go_on(self._gate)
            while policy == "wait" and not frozen and self._inside() and time.monotonic() < until:
                await asyncio.sleep(_LOOK_SECONDS)
            if ended := self._inside():
                await self._end_requests()
                until = time.monotonic() + _ANSWERED_SECONDS
                while self._inside() and time.monotonic() < until:
                    await asyncio.sleep(_LOOK_SECONDS)
            return ended

    def _inside(self) -> int:
        return len(self._gate.inside) if self._gate is not None else 0

    async def _rest(self, step: Coroutine[Any, Any, T]) -> T:
        """A step into or out of a sleep, behind whose failure nobody knows what the engine holds."""
        try:
            with self._liveness.work(self._settings.engine.start_timeout_seconds):
                return await step
        except Exception as exc:
            self._sleeping.failed()
            self._let_go("it failed to sleep, or to wake")
            self._state, self._reason, self._version = EngineState.QUARANTINED, "sleep_failed", None
            if isinstance(exc, WeightSyncError):
                exc.engine = self._ordinal
                raise
            raise EngineDied(f"{type(exc).__name__}: {exc}", engine=self._ordinal, hint="See the engine's log") from exc
