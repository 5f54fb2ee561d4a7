"""What the fleet knows of versions, engines and updates. Pure: no clock, no I/O.

An update goes admitted → receiving → staged → applying → committed, or aborted
from any of them. One is under way at a time. Versions only rise; a version whose
update did not reach `require` engines may be tried again, and a trainer that says
`rewind` takes the fleet back. Engines say how many rewinds lie before the version
they hold, so that one that missed a rewind does not lift the fleet again.

An update with a scope builds on the committed version. Engines that do not serve the
very update which brought that version are left out, and need a complete update: the
call fails, or goes on without them, by `require`. Engines that are pinned are in the
book and in nothing else: no update is for them, and none waits for them.

Not covered: who is pinned (`pinning`), and who is written when (`waves`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weightsync.errors import (
    BaseRefused,
    EngineDied,
    NoEngineReady,
    Refused,
    UpdateConflict,
    VersionRefused,
    WeightSyncError,
    WorkersSilent,
)
from weightsync.fleet.left_out import WHOLE, absent, lost, other_base
from weightsync.fleet.record import Update as Update
from weightsync.fleet.waves import require_room
from weightsync.protocol import GONE, HOLDING, EngineState, EngineStatus, EngineVerdict, UpdateRequest, UpdateState

#: Reason of an engine that serves nothing since its commit was answered too late.
LATE = "late_commit"
#: What is said of one that an update was lost with, while it gives no reason itself.
LOST = "lost"


class Ledger:
    """The fleet's book.

    Args:
        require: engines that must commit for an update to count; all that are not pinned when None.
        history: how many ended updates are kept.
        min_available: engines that must go on serving while an update is written.
    """

    def __init__(self, require: int | None, history: int, min_available: int = 0) -> None:
        self._require, self._history, self._min_available = require, history, min_available
        self.engines: dict[int, EngineStatus] = {}
        self.committed_version: int | None = None
        self.committed_update: str | None = None  # that brought it
        self.rewinds = 0  # how often the fleet has gone back
        self._incomplete = False  # the committed version has not reached `require` engines
        self.joining: set[int] = set()  # were added, and have not served what is committed yet
        self.leaving: set[int] = set()  # are about to go
        self._followed = False  # an engine that follows updates has been seen to hold it
        self._rightly: dict[int, str | None] = {}  # engines, and an update that they hold whatever its verdicts say: handed on, or pinned
        self._updates: OrderedDict[str, Update] = OrderedDict()
        self._steps: deque[tuple[tuple[int, int], str | None]] = deque(maxlen=history)  # what was committed one after the other

    @property
    def require(self) -> int:
        members = len([e for e in self._following if e.engine not in self.joining])
        return members if self._require is None else min(self._require, members)

    @property
    def _following(self) -> list[EngineStatus]:
        """Engines that updates are for: neither pinned nor about to go."""
        return [e for e in self.engines.values() if not e.pinned and e.engine not in self.leaving]

    @property
    def current(self) -> Update | None:
        """The update under way."""
        last = next(reversed(self._updates.values()), None)
        return last if last is not None and not last.state.final else None

    def require_idle(self, update_id: str | None = None) -> None:
        """Raise `UpdateConflict` where an update is under way, on behalf of another one if that is named."""
        if (busy := self.current) is not None:
            about = f"update {busy.request.update_id} to version {busy.request.version} is under way ({busy.state})"
            hint = f"Wait for it to end, or abort it (`weightsync abort {busy.request.update_id}`)"
            raise UpdateConflict(about, hint=hint, update_id=update_id)

    @property
    def ready(self) -> int:
        """Engines that serve the committed version; one that missed a rewind, or has that number from another update, does not."""
        return len(self.holders)

    @property
    def holders(self) -> list[EngineStatus]:
        """Those engines."""
        return [e for e in self._following if self._holds(e) and e.state == EngineState.SERVING]

    def _holds(self, engine: EngineStatus) -> bool:
        """Whether an engine serves, or would if it were not paused, what the update brought that the committed version is of."""
        held = engine.version is not None and _rank(engine) == self._reached and engine.update_id == self.committed_update
        return held and engine.state in HOLDING

    @property
    def states(self) -> dict[int, EngineState]:
        """What engines do that stay and follow."""
        return {e.engine: e.state for e in self.engines.values() if e.engine not in self.leaving and not e.pinned}

    @property
    def _reached(self) -> tuple[int, int]:
        return self.rewinds, -1 if self.committed_version is None else self.committed_version

    def see(self, status: EngineStatus) -> None:
        """Take in what an engine says of itself; a fleet version is learned from engines that hold one."""
        if status.pinned:
            self._rightly[status.engine] = status.update_id
        if self.came_late(status):
            status = replace(status, state=EngineState.QUARANTINED, version=None, reason=LATE, retained=None)
        if (known := self.engines.get(status.engine)) is not None:
            status = replace(status, failed=_failed(known, status))
        self.engines[status.engine] = status
        if status.version is not None and _rank(status) > self._reached:
            self._reach(status.rewinds, status.version, status.update_id)
        # Before the first version an engine is there when it has started.
        if self._holds(status) or (self.committed_version is None and status.workers):
            self.joining.discard(status.engine)
        self._followed |= status.version is not None and not status.pinned and _rank(status) == self._reached
        kept = status.retained
        # All that held it may have been restarted, with the controller; what a pinned engine holds may be long ago.
        if kept is not None and not self._followed and (kept.rewinds, kept.version) > self._reached:
            self._reach(kept.rewinds, kept.version, kept.update_id)

    def note_pause(self, status: EngineStatus) -> None:
        """Take in of what an engine says just whether it is paused."""
        if (known := self.engines.get(status.engine)) is not None:
            self.engines[status.engine] = replace(known, paused=status.paused)

    def _reach(self, rewinds: int, version: int, update_id: str | None) -> None:
        """The fleet has committed this."""
        if self._steps and self._steps[-1][0] == (rewinds, version):
            self._steps.pop()  # the same version, once more
        self.rewinds, self.committed_version, self.committed_update = rewinds, version, update_id
        self._steps.append((self._reached, update_id))

    def behind(self, engine: EngineStatus) -> int | None:
        """How many updates the fleet has committed since the one that an engine holds, as far as this controller has seen them.

        None for an engine that holds no version.
        """
        if engine.version is None:
            return None
        held = _rank(engine)
        return sum(step > held or (step == held and update_id != engine.update_id) for step, update_id in self._steps)

    def behind_version(self, version: int) -> int:
        """How many updates were committed since the last one that brought this version, as far as this controller has seen them.

        0 for what lies above all of them: an engine of a first wave has it before it counts.
        """
        versions = [step[1] for step, _ in self._steps]
        if version in versions:
            return versions[::-1].index(version)
        return sum(step > version for step in versions)

    def came_late(self, status: EngineStatus) -> bool:
        """Whether an engine serves what an update brought that had ended without it, and not what the fleet's version is.

        A commit that got no answer in time may succeed in the engine afterwards. Its trainer was told that it failed, and may
        have sent other weights under that number since.
        """
        update = self._updates.get(status.update_id or "")
        if update is None or not update.state.final or status.state not in HOLDING:
            return False
        told = any(verdict.engine == status.engine and verdict.committed for verdict in update.verdicts)
        told = told or self._rightly.get(status.engine) == status.update_id
        return not told and status.update_id != self.committed_update

    def lose(self, engine: int, reason: str) -> None:
        """An engine can't be reached; one that was never seen counts too."""
        unseen = EngineStatus(engine, EngineState.DEAD, None, None, url="", model="", workers=0, vllm_version="")
        self.engines[engine] = replace(self.engines.get(engine, unseen), state=EngineState.DEAD, reason=reason)

    def blame(self, engine: int, error: WeightSyncError) -> None:
        """An engine has been put out of service for what it committed to before."""
        if (known := self.engines.get(engine)) is not None:
            self.engines[engine] = replace(known, failed=error.to_dict())

    def lacking(self) -> dict[int, str]:
        """Engines that could hold what the fleet has committed and do not, and the update that brought it to those that do.

        None while the committed version has not reached enough engines: its trainer was told that it failed.
        """
        if self._incomplete or self.committed_update is None:
            return {}
        states = EngineState.PENDING, EngineState.QUARANTINED, *HOLDING
        there = [e for e in self._following if e.workers and e.state in states]
        return {e.engine: self.committed_update for e in there if not self._holds(e)}

    def giver(self) -> int | None:
        """An engine that keeps what the fleet has committed; one that serves it rather than one that has yet to."""
        there = [e for e in self.engines.values() if e.state != EngineState.DEAD and e.retained is not None]
        keepers = [e for e in there if e.retained is not None and e.retained.update_id == self.committed_update]
        return min(keepers, key=lambda e: (e.state != EngineState.SERVING, e.engine)).engine if keepers else None

    def rejoined(self, verdict: EngineVerdict, update_id: str, rewinds: int) -> None:
        """Enter how an engine came out of an update that another one had handed on to it."""
        if verdict.committed:
            self._rightly[verdict.engine] = update_id
        self._enter(verdict, update_id, rewinds)

    def join(self, engine: int) -> None:
        """An engine is added; no update waits for it before it serves what the others do."""
        self.joining.add(engine)
        self.engines[engine] = EngineStatus(engine, EngineState.PENDING, None, None, "", "", 0, "", reason="starting")

    def forget(self, engine: int) -> None:
        """An engine is gone for good."""
        self.engines.pop(engine, None)
        self.joining.discard(engine)
        self.leaving.discard(engine)

    def get(self, update_id: str) -> Update | None:
        return self._updates.get(update_id)

    def list(self) -> Sequence[Update]:
        """All updates that are remembered, newest first."""
        return list(reversed(self._updates.values()))

    def repeated(self, request: UpdateRequest) -> Update | None:
        """The update under way that this request asks for once more; None for a new one.

        Raises:
            Refused: the update of this id has ended, or was another request.
        """
        known = self._updates.get(request.update_id)
        if known is None:
            return None
        if known.state.final:
            raise Refused(f"update {request.update_id} has ended ({known.state})", hint="Begin a new one under a new id")
        if known.request != request:
            raise Refused(
                f"update {request.update_id} to version {known.request.version} is under way, and this is another request of that id",
                hint="Give every update an id of its own",
            )
        return known

    def admit(self, request: UpdateRequest, now: float) -> Update:
        """Enter a new update.

        Raises:
            Refused: this one has ended.
            UpdateConflict: another one is under way.
            VersionRefused: the version does not rise.
            EngineDied, NoEngineReady: fewer engines than `require` can take part, or be taken out of service.
            BaseRefused: it has a scope, and fewer engines than `require` hold what it builds on.
        """
        self.repeated(request)
        self.require_idle(request.update_id)
        floor = self.committed_version
        back = floor is not None and (request.version < floor or (request.version == floor and not self._incomplete))
        if floor is not None and back and not request.rewind:
            raise VersionRefused(
                f"version {request.version} does not rise: the fleet has committed version {floor}",
                hint=f"Use a version of {floor + 1} or more. A restarted trainer goes on from the fleet's version, or says rewind=True",
                update_id=request.update_id,
            )
        update = Update(request, self._able(request), now, rewinds=self.rewinds + back)
        if request.partial:
            self._build_on_base(update)
        known = {*update.engines, *(verdict.engine for verdict in update.left_out)}
        others = [engine for o, engine in sorted(self.engines.items()) if o not in known and not engine.pinned]
        update.left_out += tuple(lost(engine) if engine.engine in request.without else absent(engine) for engine in others)
        require_room(update.engines, self.states, self._min_available, self.require)
        self._updates[request.update_id] = update
        return update

    def _able(self, request: UpdateRequest) -> tuple[int, ...]:
        """Engines that can take an update now.

        Raises:
            EngineDied, NoEngineReady: as in `admit`.
        """
        # An engine without workers is on its way up, and not there yet. One that was lost in a broadcast may answer all the same.
        gone = [e for e in self._following if e.state in GONE or not e.workers or e.engine in request.without]
        asleep = [e for e in self._following if e.state == EngineState.ASLEEP and e not in gone]
        able = tuple(sorted({e.engine for e in self._following} - {e.engine for e in (*gone, *asleep)}))
        # No update is under way here: what an engine still applies was given up, and it refuses another until it ends, if it ever does.
        free = tuple(ordinal for ordinal in able if self.engines[ordinal].state != EngineState.UPDATING)
        if len(free) >= max(self.require, 1):
            able = free
        if not able and not asleep:
            raise NoEngineReady("the fleet has no engine that answers", hint="See `weightsync status`", update_id=request.update_id)
        short = f"{self.require} must commit and {len(able)} can. Nothing was changed"
        if len(able) < self.require and gone:
            silent = all(e.state == EngineState.SILENT for e in gone)
            kind, what = (WorkersSilent, "silent") if silent else (EngineDied, "dead or starting")
            raise kind(
                f"{len(gone)} engine(s) are {what}: {', '.join(f'{e.engine} ({e.reason or LOST})' for e in gone)}; {short}",
                hint="Wait until it has restarted or answers, start `weightsync serve` again, or set sync.require to a smaller number",
                engine=gone[0].engine,
                update_id=request.update_id,
            )
        if len(able) < self.require or not able:
            raise NoEngineReady(
                f"{len(asleep)} engine(s) are asleep: {', '.join(str(e.engine) for e in asleep)}; {short}",
                hint="Wake them first (WeightSync.wake, POST /v1/wake)",
                engine=asleep[0].engine,
                update_id=request.update_id,
            )
        return able

    def _build_on_base(self, update: Update) -> None:
        """Give a partial update its base, and leave out engines that hold another.

        Raises:
            BaseRefused: the fleet has none, or another than the trainer says; or too few engines hold it.
        """
        request, base = update.request, self.committed_version
        wanted = base if request.base_version is None else request.base_version
        if base is None or wanted != base:
            holds = "no committed version" if base is None else f"version {base}"
            said = "a committed version" if wanted is None else f"version {wanted}"
            raise BaseRefused(f"the update builds on {said}, and the fleet holds {holds}", hint=WHOLE, update_id=request.update_id)
        holders, others = list[int](), dict[int, BaseRefused]()
        for engine in (self.engines[ordinal] for ordinal in update.engines):
            if self._holds(engine):
                holders.append(engine.engine)
                continue
            others[engine.engine] = other_base(engine, base, self.committed_update)
        if len(holders) < max(self.require, 1):
            message = (
                f"{'; '.join(e.message for e in others.values())}. {self.require} must commit and {len(holders)} can. Nothing was changed"
            )
            raise BaseRefused(message, hint=WHOLE, engine=next(iter(others)), update_id=request.update_id)
        update.engines, update.base_version, update.base_update = tuple(holders), base, self.committed_update or ""
        update.left_out = tuple(
            EngineVerdict(ordinal, False, self.engines[ordinal].version, self.engines[ordinal].state, error=error.to_dict())
            for ordinal, error in others.items()
        )

    def abort(self, update: Update, error: WeightSyncError, now: float) -> None:
        """End an update before any engine was told to apply."""
        update.move(UpdateState.ABORTED)
        update.ended, update.error = now, error.to_dict()
        update.forget_manifest()
        self._trim()

    def conclude(self, update: Update, verdicts: Sequence[EngineVerdict], now: float) -> bool:
        """Enter the verdicts of all engines; says whether enough committed."""
        update.verdicts = tuple(sorted((*verdicts, *update.left_out), key=lambda v: v.engine))
        committed = sum(v.committed for v in verdicts)
        enough = committed >= self.require
        # An engine that came back during the update may have brought a higher version with it.
        if committed and (update.rewinds, update.request.version) >= self._reached:
            self._reach(update.rewinds, update.request.version, update.request.update_id)
            self._incomplete, self._followed = not enough, True
        for verdict in verdicts:
            self._enter(verdict, update.request.update_id, update.rewinds)
        update.move(UpdateState.COMMITTED if enough else UpdateState.ABORTED)
        update.ended = now
        update.forget_manifest()
        self._trim()
        return enough

    def _enter(self, verdict: EngineVerdict, update_id: str, rewinds: int) -> None:
        before = self.engines.get(verdict.engine)
        if before is not None:
            self.engines[verdict.engine] = replace(
                before,
                state=verdict.state,
                version=verdict.version,
                rewinds=rewinds if verdict.committed else before.rewinds,
                update_id=update_id if verdict.committed else before.update_id,
                reason=str((verdict.error or {}).get("code", "")),
                failed=verdict.error,
            )

    def _trim(self) -> None:
        while len(self._updates) > self._history:
            self._updates.popitem(last=False)


def _failed(known: EngineStatus, now: EngineStatus) -> dict[str, Any] | None:
    """How an engine's last update failed: the book knows, also when the engine serves on, or has restarted since.

    One that serves what it was said to have failed at had answered too late.
    """
    late = now.state in HOLDING and (known.failed or {}).get("update_id") == now.update_id
    return None if late else known.failed


def _rank(engine: EngineStatus) -> tuple[int, int]:
    """What orders versions over rewinds."""
    return engine.rewinds, -1 if engine.version is None else engine.version
