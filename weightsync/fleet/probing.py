"""The controller's part in the probe behind a commit: it has engines score fixed prompts, and holds their answers against each other.

A commit waits for it a moment. An engine whose seats are all taken may answer later: what is found then is shown,
and acted on, all the same. Whatever goes wrong with the probe is logged, and fails no update. One behind a rejoin is not waited for.

With `quarantine` an engine at fault goes out of service, as one whose proof failed: it gets its weights again, once, from an engine that
keeps them, and where it is named again it waits for the next update.

Not covered: what makes an answer wrong (`compared`), and how prompts are scored (`scores`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weightsync.errors import VerdictNotOk, WeightSyncError
from weightsync.fleet.compared import Baselines, apart, from_most
from weightsync.fleet.ledger import Ledger, Update
from weightsync.fleet.rejoin import Rejoin
from weightsync.fleet.roster import Roster
from weightsync.mismatch import ProbeAnswer, ProbeReport
from weightsync.protocol import EngineState, EngineVerdict
from weightsync.sections import SyncSettings

logger = logging.getLogger(__name__)

#: How long a commit waits for the probe, and how long engines may take for it, seconds.
_WAITED_SECONDS, _MOST_SECONDS = 0.5, 10.0


class Probing:
    """See the module.

    Args:
        roster, ledger, rejoin, sync: the controller's.
        counted: told of each engine how its probe ended, as a code, and of each probe how long it took, seconds.

    Attributes:
        limits: what engines were off by, and may be.
        last: what was found last; None before the first.
    """

    def __init__(self, roster: Roster, ledger: Ledger, rejoin: Rejoin, sync: SyncSettings, counted: Callable[..., None]) -> None:
        self._roster, self._ledger, self._rejoin, self._sync, self._counted = roster, ledger, rejoin, sync, counted
        self.limits = Baselines()
        self.last: ProbeReport | None = None
        self._serial = 0  # of the last probe that has begun
        self._tasks: set[asyncio.Task[None]] = set()
        self._next: asyncio.Task[None] | None = None  # behind a rejoin, and not begun yet
        self._named: dict[int, str] = {}  # engines that were put out of service, and the update they held then

    async def behind(self, update: Update, verdicts: Sequence[EngineVerdict]) -> list[EngineVerdict]:
        """Probe what an update has committed to, before the update counts; the verdicts, by the probe too where it is to quarantine."""
        ordinals = [v.engine for v in verdicts if v.committed and v.state == EngineState.SERVING]
        if self._sync.probe == "off" or not ordinals:
            return list(verdicts)
        update_id, version, began = update.request.update_id, update.request.version, time.monotonic()
        probe = asyncio.create_task(self._probe(update_id, version, ordinals))
        done, _ = await asyncio.wait({probe}, timeout=_WAITED_SECONDS)
        update.seconds["probe"] = time.monotonic() - began
        if not done:
            self._keep(self._late(probe, update_id, update))
            return list(verdicts)
        update.probe = probe.result()
        retired = await self._retire(update_id, update.probe)
        return [_failed(v, retired[v.engine]) if v.engine in retired else v for v in verdicts]

    def look(self) -> None:
        """Engines have come to the committed version by themselves: probe all that serve it, soon."""
        if self._sync.probe != "off" and (self._next is None or self._next.done()):
            self._next = self._keep(self._look())

    async def _look(self) -> None:
        await asyncio.sleep(0)  # others of the same rejoin are being entered
        self._next = None
        update_id, version = self._ledger.committed_update, self._ledger.committed_version
        if update_id is not None and version is not None:
            ordinals = [engine.engine for engine in self._ledger.holders]
            await self._late(asyncio.create_task(self._probe(update_id, version, ordinals)), update_id)

    async def _late(self, probe: asyncio.Task[ProbeReport], update_id: str, update: Update | None = None) -> None:
        """Act on what is found when nobody waits for it any more."""
        report = await probe
        if update is not None:
            update.probe = report
        for ordinal, error in (await self._retire(update_id, report)).items():
            self._ledger.blame(ordinal, error)

    async def _probe(self, update_id: str, version: int, ordinals: Sequence[int]) -> ProbeReport:
        """What there is to say of these engines, which hold one update; never raises."""
        began = time.monotonic()
        self._serial = serial = self._serial + 1
        try:
            found = await asyncio.gather(*(self._ask(ordinal, update_id) for ordinal in ordinals))
            if serial != self._serial:  # some engine took its time; what it was then off by is no longer of interest
                return ProbeReport(version, skipped={str(ordinal): "overtaken: another probe has begun" for ordinal in ordinals})
            report = self._compare(version, dict(zip(ordinals, found, strict=True)))
        except Exception as exc:
            logger.exception("the probe of update %s failed", update_id)
            report = ProbeReport(version, said=(f"the probe failed: {type(exc).__name__}: {exc}"[:300],))
        self.last = replace(report, seconds=time.monotonic() - began)
        self._counted(seconds=self.last.seconds)
        for said in report.said:
            logger.warning("behind update %s, version %d: %s", update_id, version, said)
        return self.last

    async def _ask(self, ordinal: int, update_id: str) -> ProbeAnswer:
        try:
            answer = await self._roster.probe(ordinal, update_id, _MOST_SECONDS)
        except WeightSyncError as exc:
            answer = ProbeAnswer(skipped=exc.code, why=exc.message[:300])
        except Exception as exc:  # an answer that can't be read
            answer = ProbeAnswer(skipped="failed", why=f"{type(exc).__name__}: {exc}"[:300])
        self._counted(ordinal, answer.skipped or "scored")
        return answer

    def _compare(self, version: int, answers: dict[int, ProbeAnswer]) -> ProbeReport:
        there = {ordinal: answer for ordinal, answer in answers.items() if not answer.skipped}
        engines = from_most({ordinal: answer.scores for ordinal, answer in there.items()})
        graphs = {ordinal: apart(answer.captured, answer.uncaptured) for ordinal, answer in there.items() if answer.captured}
        named, said = self.limits.judge(there, {"engines": engines, "graphs": graphs})
        return ProbeReport(
            version=version,
            engines={str(ordinal): value for ordinal, value in engines.items()},
            graphs={str(ordinal): value for ordinal, value in graphs.items()},
            named=tuple(sorted(named)),
            said=tuple(said),
            skipped={str(ordinal): f"{a.skipped}: {a.why}" for ordinal, a in answers.items() if a.skipped},
            no_graphs="" if graphs else next((a.no_graphs for a in there.values()), ""),
        )

    async def _retire(self, update_id: str, report: ProbeReport) -> dict[int, VerdictNotOk]:
        """Where it is to quarantine, have engines at fault serve nothing; those that do as they are told, and why."""
        retired: dict[int, VerdictNotOk] = {}
        for ordinal in report.named if self._sync.probe == "quarantine" else ():
            about = f"the probe names engine {ordinal}: {'; '.join(report.said)}"
            error = VerdictNotOk(about, hint="Sync again", engine=ordinal, phase="probe", update_id=update_id)
            with suppress(WeightSyncError):  # one that does not answer is found so by its heartbeat
                await self._roster.retire(ordinal, update_id, error.code)
                retired[ordinal] = error
                if self._named.get(ordinal) == update_id:
                    self._rejoin.hold(ordinal, update_id)
                self._named[ordinal] = update_id
        return retired

    def keep(self, engines: Collection[int]) -> None:
        """Drop what is known of other engines than these: they have left."""
        self.limits.forget({ordinal for ordinal, _ in self.limits.last}.difference(engines))

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # a task that nobody holds can be collected while it runs
        task.add_done_callback(self._tasks.discard)
        return task


def _failed(verdict: EngineVerdict, error: VerdictNotOk) -> EngineVerdict:
    return replace(verdict, committed=False, version=None, state=EngineState.QUARANTINED, error=error.to_dict())
