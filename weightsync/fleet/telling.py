"""What an engine actor has its workers tell when it is asked: how an update stands, the contract, a check of live storage.

And what it tells of an update to log and trace. Not covered: what the actor tells of itself (`EngineActor.describe`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import Any

from weightsync import logs, tracing
from weightsync.codec import decode
from weightsync.errors import DeadlineExceeded
from weightsync.fleet.calls import answers
from weightsync.protocol import EngineVerdict, Phase, WorkerCheck

#: The phases of a commit in one engine, in their order.
_OF_A_COMMIT = (Phase.DRAIN, Phase.PAUSE, Phase.APPLY, Phase.VERIFY, Phase.ROLLBACK, Phase.RESUME)
#: Between two calls of a check, so that an engine that has requests takes some steps.
_REST_SECONDS = 0.01


logger = logging.getLogger(__name__)


class Telling:
    """Attributes are those of `EngineActor`. Coroutines marked `answers` are methods of the actor."""

    _ordinal: int
    _trace: str

    def _tell_of(self, update_id: str, version: int, verdict: EngineVerdict) -> None:
        """Log and trace this engine's part in an update; the phases of a commit follow one another."""
        code = (verdict.error or {}).get("code", "")
        logs.phases(logger, update_id, version, verdict.seconds, code or "committed", self._trace, self._ordinal)
        at = ended = time.time()
        spans = []
        for phase in reversed(_OF_A_COMMIT):
            if (took := verdict.seconds.get(phase)) is not None:
                spans.append((str(phase), at - took, at))
                at -= took
        about = {"update_id": update_id, "version": version, "engine": self._ordinal}
        tracing.record("weightsync engine", self._trace, at, ended, spans[::-1], about, code)

    def _require_idle(self) -> None:
        raise NotImplementedError

    async def _workers_say(self, method: str, *args: Any) -> list[dict[str, Any]]:
        raise NotImplementedError

    @functools.cached_property
    def _one_check(self) -> asyncio.Lock:
        return asyncio.Lock()

    @answers
    async def poll(self) -> list[dict[str, Any]]:
        """Every worker's report, by rank."""
        return await self._workers_say("weightsync_poll")

    @answers
    async def contract(self) -> list[dict[str, Any]]:
        """Every worker's storage contract, by rank; not while an update is being applied, which keeps the workers."""
        self._require_idle()
        return await self._workers_say("weightsync_contract")

    @answers
    async def check(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """Have every worker read its live storage again, a little at a time while requests go on; plain `WorkerCheck`s, by rank.

        Raises:
            UpdateConflict: an update is being applied, or was meanwhile.
            DeadlineExceeded: not all was read in time.
        """
        until, anew = time.monotonic() + timeout_seconds, True
        async with self._one_check:
            while True:
                self._require_idle()
                found = await self._workers_say("weightsync_check", anew)
                checks, anew = [decode(WorkerCheck, one) for one in found], False
                if all(check.done or check.error for check in checks):
                    return found
                if time.monotonic() > until:
                    read = min(check.nbytes for check in checks)
                    raise DeadlineExceeded(
                        f"a worker of engine {self._ordinal} had read {read} bytes after {timeout_seconds:.0f} s",
                        hint="Give it longer, or check fewer engines at once",
                        engine=self._ordinal,
                    )
                await asyncio.sleep(_REST_SECONDS)
