"""What operators have the controller do beside updates: sleep, pauses, scale, pins. Each answers with the fleet's status.

Not covered: what happens in an engine (`resting`, `pausing`, `holding`).
"""

from __future__ import annotations

from typing import Any, Literal

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
        try:
            await self._rejoin.give_way()
            await self._roster.rest(engines, level, timeout_seconds)
        finally:
            self._show()
        return self._status()

    @answers
    async def pause(self, engines: list[int], timeout_seconds: float) -> dict[str, Any]:
        """Have engines generate nothing until `resume`; all that have started when none is named. `FleetStatus`.

        At any moment: one that is being written is paused when it has its verdict.
        """
        return await self._halt("pause", engines, timeout_seconds)

    @answers
    async def resume(self, engines: list[int], timeout_seconds: float) -> dict[str, Any]:
        """Have engines go on, as `pause`. `FleetStatus`."""
        return await self._halt("resume", engines, timeout_seconds)

    async def _halt(self, order: Literal["pause", "resume"], engines: list[int], timeout_seconds: float) -> dict[str, Any]:
        try:
            await self._roster.halt(order, engines, timeout_seconds)
        finally:
            self._show()
        return self._status()

    @answers
    async def scale(self, engines: int, drain: str, timeout_seconds: float) -> dict[str, Any]:
        """Bring the fleet to so many engines (`Scaling.to`). `FleetStatus`."""
        try:
            await self._scaling.to(engines, drain, timeout_seconds)
        finally:
            self._show()
        return self._status()

    @answers
    async def pin(self, name: str, version: int, count: int) -> dict[str, Any]:
        """Hold engines at a version (`Pins.set`). `FleetStatus`."""
        await self._pins.set(name, version, count)
        self._show()
        return self._status()

    @answers
    async def unpin(self, name: str) -> dict[str, Any]:
        """Let the engines of a pin follow again (`Pins.take_off`). `FleetStatus`."""
        await self._pins.take_off(name)
        self._show()
        return self._status()
