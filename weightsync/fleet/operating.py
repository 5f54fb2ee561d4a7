"""What operators have the controller do beside updates: sleep, pauses, scale, pins. Each answers with the fleet's status.

Not covered: what happens in an engine (`resting`, `pausing`, `holding`).
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from weightsync.fleet.calls import answers
from weightsync.fleet.pins import Pins
from weightsync.fleet.rejoin import Rejoin
from weightsync.fleet.scaling import Scaling
from weightsync.fleet.showing import Showing


class Operating(Showing):
    """Attributes are those of `Controller`. Coroutines marked `answers` are methods of the actor."""

    _rejoin: Rejoin
    _scaling: Scaling
    _pins: Pins

    @answers
    async def rest(self, engines: list[int], level: int, timeout_seconds: float) -> dict[str, Any]:
        """Put engines to sleep at one of vLLM's levels, or wake them (0); all when none is named. `FleetStatus`."""
        self._ledger.require_idle()
        await self._rejoin.give_way()
        return await self._shown_behind(self._roster.rest(engines, level, timeout_seconds))

    @answers
    async def pause(self, engines: list[int], timeout_seconds: float) -> dict[str, Any]:
        """Have engines generate nothing until `resume`; all that have started when none is named. `FleetStatus`.

        At any moment: one that is being written is paused when it has its verdict.
        """
        return await self._shown_behind(self._roster.halt("pause", engines, timeout_seconds))

    @answers
    async def resume(self, engines: list[int], timeout_seconds: float) -> dict[str, Any]:
        """Have engines go on, as `pause`. `FleetStatus`."""
        return await self._shown_behind(self._roster.halt("resume", engines, timeout_seconds))

    @answers
    async def scale(self, engines: int, drain: str, timeout_seconds: float) -> dict[str, Any]:
        """Bring the fleet to so many engines (`Scaling.to`). `FleetStatus`."""
        return await self._shown_behind(self._scaling.to(engines, drain, timeout_seconds))

    @answers
    async def pin(self, name: str, version: int, count: int) -> dict[str, Any]:
        """Hold engines at a version (`Pins.set`). `FleetStatus`."""
        return await self._shown_behind(self._pins.set(name, version, count))

    @answers
    async def unpin(self, name: str) -> dict[str, Any]:
        """Let the engines of a pin follow again (`Pins.take_off`). `FleetStatus`."""
        return await self._shown_behind(self._pins.take_off(name))

    async def _shown_behind(self, work: Awaitable[object]) -> dict[str, Any]:
        """Do it, have the gauges follow also where it failed in part, and answer."""
        try:
            await work
        finally:
            self._show()
        return self._status()
