"""One engine's part in one commit: pause, apply, verify; once more if that failed; or back to the version before.

What failed behind the first write is tried once more from the staged bytes, which are
all still there. If that fails too and the workers keep the last committed update, that
one is applied and proved in the same way, and the engine goes on with the version it had.

Not covered: caches, version stamp and resume, which the engine actor does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from typing import Any, Protocol

from weightsync.codec import decode
from weightsync.errors import ApplyFailed, InternalError, VerdictNotOk
from weightsync.fleet import reports as reports_of
from weightsync.protocol import Phase, WorkerReport

logger = logging.getLogger(__name__)


class PausableEngine(Protocol):
    """What a transaction needs of an engine (`vllm_api.Engine`)."""

    async def pause(self) -> bool: ...

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]: ...


class Transaction:
    """See the module.

    Args:
        engine: the engine, which serves.
        update_id: a staged update.
        tries: how often it may be applied.
        seconds_for_all: no further try begins later than this after the pause.

    Attributes:
        phase: what is being done, or failed.
        wrote: live storage does not hold what it held before.
        seconds: by phase; `receive` is the time that the slowest worker took, before all others.
        checks: what the workers counted, summed; `second_tries`, `rolled_back` and what became of requests are ours.
        ranks: where each worker stood in the update itself.
    """

    def __init__(self, engine: PausableEngine, update_id: str, *, tries: int, seconds_for_all: float) -> None:
        self._engine, self._update_id, self._tries, self._most = engine, update_id, tries, seconds_for_all
        self.phase, self.wrote = Phase.PAUSE, False
        self.seconds: dict[str, float] = {}
        self.checks: dict[str, int] = {}
        self.ranks: dict[str, str] = {}
        self._ours: dict[str, int] = {}
        self._began = time.monotonic()

    async def drain(self, way: Awaitable[dict[str, int]]) -> None:
        """Before the pause: what becomes of requests in flight, as counts. The engine serves meanwhile, so it costs no try its time."""
        self.phase = Phase.DRAIN
        self._ours |= await way
        self.checks = dict(self._ours)
        self.seconds[Phase.DRAIN] = time.monotonic() - self._began
        self.phase, self._began = Phase.PAUSE, time.monotonic()

    async def pause(self) -> None:
        """Freeze requests in flight.

        Raises:
            InternalError: the engine core does not confirm it.
        """
        if not await self._engine.pause():
            raise InternalError("the engine core did not confirm the pause")
        self.seconds.setdefault(Phase.PAUSE, time.monotonic() - self._began)

    async def bring(self) -> None:
        """Apply and verify.

        Raises:
            WeightSyncError: a worker's. `wrote` says whether the engine can just go on.
        """
        for left in reversed(range(self._tries)):
            try:
                await self._step(Phase.APPLY, "weightsync_apply")
                await self._step(Phase.VERIFY, "weightsync_verdict")
                return
            except (ApplyFailed, VerdictNotOk) as exc:
                if not left or time.monotonic() - self._began > self._most:
                    raise
                logger.warning("update %s is tried once more from the staged bytes: %s", self._update_id, exc)
                self._ours["second_tries"] = self._ours.get("second_tries", 0) + 1
                self.checks |= self._ours

    async def roll_back(self) -> None:
        """Bring back the version before.

        Raises:
            WeightSyncError: a worker's; `wrote` stays true.
        """
        failed_in = self.phase
        await self._step(Phase.ROLLBACK, "weightsync_rollback")
        await self._step(Phase.ROLLBACK, "weightsync_verdict")
        self.phase = failed_in
        self.checks["rolled_back"] = 1

    async def _step(self, phase: Phase, method: str) -> None:
        self.phase, began = phase, time.monotonic()
        self.wrote = True  # until every worker has said that it did not
        reports = [decode(WorkerReport, report) for report in await self._engine.rpc(method, self._update_id)]
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began
        # What is verified is the new version, and not yet the engine's: caches and the stamp come behind.
        self.wrote = any(report.wrote for report in reports) or phase == Phase.VERIFY
        self.checks = reports_of.total(report.checks for report in reports) | self._ours
        if phase != Phase.ROLLBACK:
            self.ranks = reports_of.standings(reports)
        if received := [report.seconds[Phase.RECEIVE] for report in reports if Phase.RECEIVE in report.seconds]:
            self.seconds[Phase.RECEIVE] = max(received)
        if (error := reports_of.failure(reports)) is not None:
            raise error
