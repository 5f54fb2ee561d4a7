"""What a controller shows: the fleet's status, updates, metrics, all at once whatever update is under way; and an engine's contract.
And what it is told of trainers' samples, which it shows with the rest.

Not covered: what an engine's own process shows of itself (`engine_actor`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from weightsync.codec import decode, encode
from weightsync.config import Settings
from weightsync.errors import SamplesRefused
from weightsync.fleet.calls import answers
from weightsync.fleet.ledger import Ledger, Update
from weightsync.fleet.observed import Observed
from weightsync.fleet.probing import Probing
from weightsync.fleet.roster import Roster
from weightsync.metrics import Recorder
from weightsync.mismatch import Tallies
from weightsync.protocol import FleetCheck, FleetStatus

logger = logging.getLogger(__name__)


class Showing:
    """Attributes are those of `Controller`. Coroutines marked `answers` are methods of the actor."""

    _settings: Settings
    _ledger: Ledger
    _roster: Roster
    _recorder: Recorder
    _probing: Probing
    _observed: Observed
    _heart: asyncio.Task[None] | None

    async def _refresh(self, *, waited_for: bool = False) -> None:
        raise NotImplementedError

    def _known(self, update_id: str) -> Update:
        raise NotImplementedError

    def _status(self) -> dict[str, Any]:
        ledger = self._ledger
        last = next(iter(ledger.list()), None)
        status = FleetStatus(
            fleet=self._settings.fleet,
            committed_version=ledger.committed_version,
            ready=ledger.ready,
            engines=tuple(ledger.engines[ordinal] for ordinal in sorted(ledger.engines)),
            update=last.status if last else None,
            rewinds=ledger.rewinds,
            observed=self._observed.means(ledger.engines),
            probe=self._probing.last,
        )
        return dict(encode(status))

    def _show(self) -> None:
        """Set the gauges from the book as it is now."""
        self._probing.keep(self._ledger.engines)
        self._recorder.fleet(self._ledger)
        self._recorder.mismatch(self._observed.means(self._ledger.engines), self._probing.limits, self._probing.last)

    @answers
    async def status(self) -> dict[str, Any]:
        """`FleetStatus`."""
        if self._heart is None:
            await self._refresh()
        return self._status()

    @answers
    async def updates(self, limit: int) -> list[dict[str, Any]]:
        """`UpdateStatus` of the updates that are remembered, newest first; so many at most."""
        return [encode(update.status) for update in self._ledger.list()[:limit]]

    @answers
    async def update(self, update_id: str) -> dict[str, Any]:
        """One `UpdateStatus`."""
        return dict(encode(self._known(update_id).status))

    @answers
    async def contract(self, ordinal: int) -> dict[str, Any]:
        """What an engine's workers have sealed, and what became of it: `ContractAnswer` by rank."""
        return {"engine": ordinal, "workers": await self._roster.contract(ordinal)}

    @answers
    async def observe(self, data: Any) -> dict[str, Any]:
        """Take in what a trainer's samples say of engines (`Tallies`); an `Observation`.

        Raises:
            SamplesRefused: it is none; nothing was counted.
        """
        try:
            tallies = decode(Tallies, data).tallies
        except (ValueError, OverflowError) as exc:
            raise SamplesRefused(f"the sums are not valid: {exc}", hint="Use WeightSync.observe") from None
        if self._heart is None:
            await self._refresh()
        told = self._observed.take(tallies, self._ledger.engines, self._ledger.behind_version)
        for engine in told.named:
            logger.warning("engine %d stands out among those that a trainer's samples are of: %s", engine, told.engines)
        self._recorder.observed(told)
        return dict(encode(told))

    async def check(self, engines: list[int], timeout_seconds: float) -> dict[str, Any]:
        """Have engines read their live storage again, while they serve (`Orders.check`). `FleetCheck`."""
        found = await self._roster.check(engines, timeout_seconds)
        return dict(encode(FleetCheck(self._ledger.committed_version, bool(found) and all(engine.ok for engine in found), found)))

    @answers
    async def metrics(self) -> str:
        """Prometheus text, with the ages of now."""
        self._show()
        return self._recorder.text()
