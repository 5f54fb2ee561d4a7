"""Pins set and taken off, between updates; `pinning` decides whom they hold, and engines keep them (`holding`).

Not covered: pins that engines lose with their process (`roster` says so in the log).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from weightsync.errors import UpdateConflict
from weightsync.fleet import pinning
from weightsync.fleet.ledger import Ledger
from weightsync.fleet.rejoin import Rejoin
from weightsync.fleet.roster import Roster
from weightsync.sections import SyncSettings


class Pins:
    """See the module.

    Args:
        roster, ledger, rejoin, sync: the controller's.
        admitting: held while an update is admitted; no rejoin begins meanwhile either.
        refresh: asks every engine what it is.
    """

    def __init__(
        self,
        roster: Roster,
        ledger: Ledger,
        rejoin: Rejoin,
        sync: SyncSettings,
        admitting: asyncio.Lock,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._roster, self._ledger, self._rejoin, self._sync = roster, ledger, rejoin, sync
        self._admitting, self._refresh = admitting, refresh

    async def set(self, name: str, version: int, count: int) -> None:
        """Hold so many engines at a version that they serve, and leave them out of updates. The same pin again changes nothing.

        Raises:
            PinRefused: see `pinning.choose`, and an engine's own.
            UpdateConflict: an update is under way.
        """
        ledger = self._ledger
        if pinning.stands(ledger.engines.values(), name, version, count):
            return
        async with self._between_updates():
            members = [e for e in ledger.engines.values() if e.engine not in ledger.joining | ledger.leaving]
            chosen = pinning.choose(members, name, version, count, self._sync.require, ledger.committed_update)
            await self._roster.pin(chosen, name, version)

    async def take_off(self, name: str) -> None:
        """Let engines take updates again; nothing, where none bears this pin.

        Raises:
            UpdateConflict: an update is under way.
        """
        if self._ledger.engines and not pinning.bearers(self._ledger.engines.values(), name):
            return
        async with self._between_updates():
            await self._roster.unpin(pinning.bearers(self._ledger.engines.values(), name), name)

    @contextlib.asynccontextmanager
    async def _between_updates(self) -> AsyncIterator[None]:
        if self._admitting.locked():
            raise UpdateConflict("an update is being admitted, or engines are being pinned", hint="Try again in a moment")
        async with self._admitting:
            self._ledger.require_idle()
            await self._rejoin.give_way()
            await self._refresh()
            yield
