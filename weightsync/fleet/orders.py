"""What the controller has engines do beside updates, as a part of `Roster`: sleep, pauses, pins, probes; and what it asks one engine for.

All that are meant are told at once. When all have answered the first failure is raised; those that did as they were told stay so.

Not covered: when any of it may be asked for (`operating`, `pins`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from weightsync.codec import decode
from weightsync.errors import PinRefused, Refused, WeightSyncError
from weightsync.fleet.calls import call
from weightsync.fleet.ledger import Ledger
from weightsync.mismatch import ProbeAnswer
from weightsync.protocol import EngineCheck, WorkerCheck
from weightsync.sections import SyncSettings


class Orders:
    """Attributes are those of `Roster`."""

    _ledger: Ledger
    _sync: SyncSettings
    ordinals: set[int]

    def handle(self, ordinal: int) -> Any:
        raise NotImplementedError

    async def _take_in(self, status: dict[str, Any]) -> None:
        raise NotImplementedError

    async def rest(self, engines: Sequence[int], level: int, timeout_seconds: float) -> None:
        """Put engines to sleep at a level, or wake them (0), all at once; every engine when none is named.

        Raises:
            Refused: there is no engine of such an ordinal.
            PinRefused: a pinned one would lose its weights; none has fallen asleep.
            WeightSyncError: the first engine's that failed, when all have answered.
        """
        self._require_there(engines)
        chosen = dict.fromkeys(engines or sorted(self.ordinals))
        pinned = [e for ordinal, e in self._ledger.engines.items() if ordinal in chosen and e.pinned]
        if level > 1 and pinned:
            about = ", ".join(f"engine {e.engine} as {e.pinned!r} at version {e.version}" for e in pinned)
            hint = "Unpin them first, sleep at level 1, or name other engines"
            raise PinRefused(f"level {level} drops weights, and pinned are: {about}", hint=hint, engine=pinned[0].engine)
        method, args = ("sleep", (level,)) if level else ("wake", ())
        await self._tell(chosen, method, *args, seconds=timeout_seconds)

    async def halt(self, order: Literal["pause", "resume"], engines: Sequence[int], timeout_seconds: float) -> None:
        """Pause engines or let them go on; every engine that has started when none is named.

        Raises:
            Refused: there is no engine of such an ordinal.
            WeightSyncError: the first engine's that failed, when all have answered.
        """
        self._require_there(engines)
        await self._tell(dict.fromkeys(engines or self._started()), order, seconds=timeout_seconds)

    async def contract(self, ordinal: int) -> list[dict[str, Any]]:
        """What every worker of an engine says of its storage contract, by rank: plain `ContractAnswer`s.

        Raises:
            Refused: there is no engine of this ordinal.
            WeightSyncError: it does not answer, or is being written.
        """
        self._require_there([ordinal])
        answers = await call(self.handle(ordinal).contract, timeout_seconds=self._sync.control_timeout_seconds, engine=ordinal)
        return list(answers)

    async def probe(self, ordinal: int, update_id: str, seconds: float) -> ProbeAnswer:
        """How an engine scores the fixed prompts with what an update brought.

        Raises:
            WeightSyncError: it does not answer.
            ValueError: its answer is none.
        """
        most = seconds + self._sync.control_timeout_seconds
        return decode(ProbeAnswer, await call(self.handle(ordinal).probe, update_id, seconds, timeout_seconds=most, engine=ordinal))

    async def retire(self, ordinal: int, update_id: str, reason: str) -> None:
        """Have an engine serve nothing until it gets an update, if it serves this one.

        Raises:
            WeightSyncError: it does not answer.
        """
        seconds = self._sync.control_timeout_seconds
        answer = await call(self.handle(ordinal).retire, update_id, reason, timeout_seconds=seconds, engine=ordinal)
        await self._take_in(answer["status"])

    async def check(self, engines: Sequence[int], timeout_seconds: float) -> tuple[EngineCheck, ...]:
        """Have every worker read its live storage again, all engines at once; all that have started when none is named.

        Raises:
            Refused: there is no engine of such an ordinal. What one can't do is said in its place.
        """
        self._require_there(engines)

        async def one(ordinal: int) -> EngineCheck:
            most, known = timeout_seconds + self._sync.control_timeout_seconds, self._ledger.engines.get(ordinal)
            version = known.version if known else None
            try:
                found = await call(self.handle(ordinal).check, timeout_seconds, timeout_seconds=most, engine=ordinal)
            except WeightSyncError as exc:
                return EngineCheck(ordinal, version, False, error=exc.to_dict())
            workers = tuple(decode(WorkerCheck, worker) for worker in found)
            return EngineCheck(ordinal, version, all(worker.ok for worker in workers), workers)

        return tuple(await asyncio.gather(*map(one, dict.fromkeys(engines or self._started()))))

    def _started(self) -> list[int]:
        return [o for o in sorted(self.ordinals) if (known := self._ledger.engines.get(o)) is None or known.workers]

    async def pin(self, engines: Sequence[int], name: str, version: int) -> None:
        """Have engines keep a version that they serve; all of them, or none.

        Raises:
            WeightSyncError: the first engine's that failed, when all have answered.
        """
        seconds = self._sync.control_timeout_seconds
        try:
            await self._tell(engines, "pin", name, version, seconds=seconds)
        except WeightSyncError:
            with contextlib.suppress(WeightSyncError):
                await self._tell(engines, "unpin", name, seconds=seconds)
            raise

    async def unpin(self, engines: Sequence[int], name: str) -> None:
        """Have engines take updates again. Raises as `pin` does; those that answered are unpinned all the same."""
        await self._tell(engines, "unpin", name, seconds=self._sync.control_timeout_seconds)

    def _require_there(self, engines: Iterable[int]) -> None:
        if unknown := sorted(set(engines) - self.ordinals):
            raise Refused(f"no engine {unknown[0]}: the fleet has {len(self.ordinals)}: {', '.join(map(str, sorted(self.ordinals)))}")

    async def _tell(self, engines: Iterable[int], method: str, *args: Any, seconds: float) -> None:
        async def one(ordinal: int) -> None:
            answer = await call(getattr(self.handle(ordinal), method), *args, timeout_seconds=seconds, engine=ordinal)
            await self._take_in(answer["status"])

        for failed in await asyncio.gather(*map(one, engines), return_exceptions=True):
            if failed is not None:
                raise failed
