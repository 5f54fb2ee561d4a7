"""An engine actor's pause, as operators ask for it: nothing is generated until it is resumed, and updates go on.

What becomes of requests is what becomes of them at an update (`draining`): `sync.in_flight` for those that run, `sync.new_requests`
for those that come. Whatever the engine does meanwhile (an update, a way back, a sleep), it stands still behind it. The pause lives here,
so that any controller learns of it, and ends with this process.

Not covered: the freezing for an update (`transaction`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from weightsync.errors import InternalError
from weightsync.fleet.calls import answers
from weightsync.fleet.draining import Draining
from weightsync.fleet.gate import Gate
from weightsync.fleet.watching import Watching
from weightsync.protocol import EngineState


class Pausing(Watching):
    """Attributes are those of `EngineActor`. Coroutines marked `answers` are methods of the actor."""

    _ordinal: int
    _state: EngineState
    _draining: Draining
    _gate: Gate | None
    _resting: asyncio.Lock
    _settled: asyncio.Event

    def _describe(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def _shown(self) -> EngineState:
        """What the engine does, as everybody else is told."""
        if self._silent:
            return EngineState.SILENT
        return EngineState.PAUSED if self._stands else self._state

    @property
    def _stands(self) -> bool:
        return self._state == EngineState.SERVING and self._draining.paused

    @answers
    async def pause(self) -> dict[str, Any]:
        """Generate nothing until `resume`; an update that is being applied ends first. Again is nothing new."""
        self._require_answering()
        async with self._resting:
            await self._settled.wait()
            if not self._draining.paused:
                try:
                    await self._draining.pause(self._gate)
                    await self._stand_still()
                except Exception:
                    self._draining.resume(self._gate)
                    raise
            return self._describe()

    @answers
    async def resume(self) -> dict[str, Any]:
        """Go on, if the engine serves; else it does when it serves again. One that was not paused stays as it is."""
        self._require_answering()
        async with self._resting:
            await self._settled.wait()
            # No update can begin before vLLM has been told, so that what it says to stand still comes behind this.
            self._draining.resume(self._gate)
            if self._state == EngineState.SERVING:
                await self._live().resume()
            return self._describe()

    async def _stand_still(self) -> None:
        """Freeze what runs, where the engine is paused and serves; what does not serve, or is being written, generates nothing."""
        if self._stands and not await self._live().pause():
            raise InternalError("the engine core did not confirm the pause", engine=self._ordinal)
