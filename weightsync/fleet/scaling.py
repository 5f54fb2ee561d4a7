"""Engines added and taken away while training goes on.

An added engine counts when it first serves what the fleet has committed: until then no
update waits for it. It gets its weights from another engine (`rejoin`), or by the next
update. One that goes takes part in no further update, lets its requests end, and is ended.
Which ones go is decided by `leaving`, which is pure. Pinned engines stay.

Not covered: a controller that restarts while engines are starting: it counts them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any

import ray

from weightsync.config import Settings
from weightsync.errors import ConfigError, Refused, UpdateConflict, WeightSyncError
from weightsync.fleet import placement
from weightsync.fleet.calls import call
from weightsync.fleet.ledger import Ledger
from weightsync.fleet.roster import Roster
from weightsync.protocol import EngineState, EngineStatus

logger = logging.getLogger(__name__)

MOST = 1024
_LOOK_SECONDS = 0.05
_STOP_SECONDS = 20.0


class Scaling:
    """See the module.

    Args:
        settings: the fleet's.
        roster, ledger: the controller's.
    """

    def __init__(self, settings: Settings, roster: Roster, ledger: Ledger) -> None:
        self._settings, self._roster, self._ledger = settings, roster, ledger
        self._lock = asyncio.Lock()

    async def to(self, engines: int, drain: str, seconds: float) -> None:
        """Bring the fleet to so many engines; returns when those that go are gone, and those that come are starting.

        Args:
            drain: `wait` lets the requests of engines that go end first; `abort` ends them with a retryable error.
            seconds: how long an engine may take to drain; then its requests are ended.

        Raises:
            Refused: fewer than `sync.require`, or not more than `sync.min_available`, beside those that are pinned; or more than fit.
            UpdateConflict: the fleet is being scaled, or an update does not end.
        """
        if self._lock.locked():
            raise UpdateConflict("the fleet is being scaled", hint="Try again in a moment")
        async with self._lock:
            self._require_sensible(engines)
            there = self._roster.ordinals
            if engines > len(there):
                self._add(engines - len(there))
            elif engines < len(there):
                gone = leaving(self._ledger.engines.values(), there, len(there) - engines)
                await self._take_away(gone, drain, seconds)

    def _require_sensible(self, engines: int) -> None:
        sync, pinned = self._settings.sync, sum(bool(e.pinned) for e in self._ledger.engines.values())
        least = max(1, sync.require or 1, sync.min_available + 1) + pinned
        if not least <= engines <= MOST:
            why = (
                f", as sync.require is {sync.require or 'not given'} and sync.min_available {sync.min_available}"
                if least > pinned + 1
                else ""
            )
            why += f", as {pinned} are pinned" if pinned else ""
            raise Refused(f"engines: got {engines}, want {least} to {MOST}{why}")
        wanted = self._settings.engine.model_copy(update={"count": engines})
        try:
            gpus = placement.engine_options(self._settings, 0)["num_gpus"]
            placement.require_gpus(wanted, gpus, ray.nodes(), may_grow=bool(self._settings.ray.address))
        except ConfigError as exc:
            raise Refused(exc.message, hint=exc.hint) from None

    def _add(self, count: int) -> None:
        free = (ordinal for ordinal in range(MOST) if ordinal not in self._roster.ordinals)
        for ordinal in [next(free) for _ in range(count)]:
            self._ledger.join(ordinal)
            self._roster.add(ordinal, placement.create(self._settings, ordinal))
            logger.warning("engine %d is added", ordinal)

    async def _take_away(self, ordinals: tuple[int, ...], drain: str, seconds: float) -> None:
        self._ledger.leaving |= set(ordinals)
        try:
            until = time.monotonic() + self._settings.sync.control_timeout_seconds
            while (update := self._ledger.current) is not None and set(ordinals) & set(update.engines):
                if time.monotonic() > until:
                    hint = f"Wait for it to end, or abort it (`weightsync abort {update.request.update_id}`)"
                    raise UpdateConflict(f"update {update.request.update_id} is under way", hint=hint)
                await asyncio.sleep(_LOOK_SECONDS)
        except WeightSyncError:
            self._ledger.leaving -= set(ordinals)
            raise
        await asyncio.gather(*(self._end(ordinal, drain, seconds) for ordinal in ordinals))

    async def _end(self, ordinal: int, drain: str, seconds: float) -> None:
        handle = self._roster.remove(ordinal)
        if handle is not None:
            for method, args, most in ((handle.drain, (drain, seconds), seconds + _STOP_SECONDS), (handle.stop, (), _STOP_SECONDS)):
                try:
                    await call(method, *args, timeout_seconds=most, engine=ordinal)
                except WeightSyncError as exc:
                    logger.warning("engine %d did not end by itself: %s", ordinal, exc)
            with contextlib.suppress(Exception):
                await asyncio.to_thread(ray.kill, handle)
        self._ledger.forget(ordinal)
        logger.warning("engine %d is gone", ordinal)


def leaving(engines: Iterable[EngineStatus], there: Iterable[int], count: int) -> tuple[int, ...]:
    """Which engines go, pinned ones never: those that serve nothing first, those that keep bytes for others last, of equals the highest.

    Args:
        engines: as far as they are known.
        there: ordinals of all.
        count: how many go.
    """
    known = {engine.engine: engine for engine in engines}

    def worth(ordinal: int) -> tuple[Any, ...]:
        engine = known.get(ordinal)
        serves = engine is not None and engine.state in (EngineState.SERVING, EngineState.UPDATING)
        return serves, engine is not None and engine.retained is not None, -ordinal

    free = (ordinal for ordinal in there if ordinal not in known or not known[ordinal].pinned)
    return tuple(sorted(sorted(free, key=worth)[:count]))
