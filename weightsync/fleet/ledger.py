"""What the fleet knows of versions, engines and updates. Pure: no clock, no I/O.

An update goes admitted → receiving → staged → applying → committed, or aborted
from any of them. One is under way at a time. Versions only rise; a version whose
update did not reach `require` engines may be tried again, and a trainer that says
`rewind` takes the fleet back. Engines say how many rewinds lie before the version
they hold, so that one that missed a rewind does not lift the fleet again.

An update with a scope builds on the committed version. Engines that do not serve the
very update which brought that version are left out, and need a complete update: the
call fails, or goes on without them, by `require`.

Not covered: pinned engines, waves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weightsync.errors import BaseRefused, EngineDied, NoEngineReady, Refused, UpdateConflict, VersionRefused, WeightSyncError
from weightsync.protocol import (
    Admission,
    CommunicatorInfo,
    EngineState,
    EngineStatus,
    EngineVerdict,
    Manifest,
    UpdateRequest,
    UpdateState,
    UpdateStatus,
)

#: From where an update may go where.
_NEXT: Mapping[UpdateState, frozenset[UpdateState]] = {
    UpdateState.ADMITTED: frozenset({UpdateState.RECEIVING, UpdateState.ABORTED}),
    UpdateState.RECEIVING: frozenset({UpdateState.STAGED, UpdateState.ABORTED}),
    UpdateState.STAGED: frozenset({UpdateState.APPLYING, UpdateState.ABORTED}),
    UpdateState.APPLYING: frozenset({UpdateState.COMMITTED, UpdateState.ABORTED}),
    UpdateState.COMMITTED: frozenset(),
    UpdateState.ABORTED: frozenset(),
}
_WHOLE = "Send a complete update, without a scope"
#: Reason of an engine that serves nothing since its commit was answered too late.
LATE = "late_commit"


@dataclass
class Update:
    """One update's record; `status` is its public form."""

    request: UpdateRequest
    engines: tuple[int, ...]
    began: float
    state: UpdateState = UpdateState.ADMITTED
    ended: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    verdicts: tuple[EngineVerdict, ...] = ()
    error: dict[str, Any] | None = None
    communicator: CommunicatorInfo | None = None
    staged: bool = True
    rewinds: int = 0  # of the fleet, once this one has committed
    base_version: int | None = None  # what it builds on, with a scope
    base_update: str = ""
    left_out: tuple[EngineVerdict, ...] = ()  # engines that could not take part, or hold another base

    def __post_init__(self) -> None:
        self._tensors, self._nbytes = len(self.request.manifest.tensors), self.request.manifest.nbytes

    def forget_manifest(self) -> None:
        """Let the manifest go when the update has ended: 35 MB at 100,000 tensors, for every update that is remembered."""
        self.request = replace(self.request, manifest=Manifest(()))

    def move(self, state: UpdateState) -> None:
        """Go on to `state`; a step that the table above does not have is a bug of the caller."""
        assert state in _NEXT[self.state], f"update {self.request.update_id}: {self.state} → {state}"
        self.state = state

    @property
    def status(self) -> UpdateStatus:
        return UpdateStatus(
            update_id=self.request.update_id,
            version=self.request.version,
            state=self.state,
            tensors=self._tensors,
            nbytes=self._nbytes,
            began_unix_seconds=self.began,
            ended_unix_seconds=self.ended,
            seconds=dict(self.seconds),
            verdicts=self.verdicts,
            error=self.error,
            rewind=self.request.rewind,
        )

    @property
    def admission(self) -> Admission:
        assert self.communicator is not None
        return Admission(self.request.update_id, self.request.version, self.communicator, self.engines, self.staged)


class Ledger:
    """The fleet's book.

    Args:
        require: engines that must commit for an update to count; all of the fleet when None.
        history: how many ended updates are kept.
    """

    def __init__(self, require: int | None, history: int) -> None:
        self._require, self._history = require, history
        self.engines: dict[int, EngineStatus] = {}
        self.committed_version: int | None = None
        self._committed_update: str | None = None  # that brought it
        self.rewinds = 0  # how often the fleet has gone back
        self._incomplete = False  # the committed version has not reached `require` engines
        self.joining: set[int] = set()  # were added, and have not served what is committed yet
        self.leaving: set[int] = set()  # are about to go
        self._rejoined: dict[int, str] = {}  # engines, and the update that another one handed on to them
        self._updates: OrderedDict[str, Update] = OrderedDict()

    @property
    def require(self) -> int:
        members = len(self.engines.keys() - self.joining - self.leaving)
        return members if self._require is None else min(self._require, members)

    @property
    def current(self) -> Update | None:
        """The update under way."""
        last = next(reversed(self._updates.values()), None)
        return last if last is not None and not last.state.final else None

    @property
    def ready(self) -> int:
        """Engines that serve the committed version; one that missed a rewind, or has that number from another update, does not."""
        return sum(self._holds(e) for e in self.engines.values() if e.engine not in self.leaving)

    def _holds(self, engine: EngineStatus) -> bool:
        """Whether an engine serves what the update brought that the committed version is of."""
        held = engine.version is not None and _rank(engine) == self._reached and engine.update_id == self._committed_update
        return held and engine.state == EngineState.SERVING

    @property
    def _reached(self) -> tuple[int, int]:
        return self.rewinds, -1 if self.committed_version is None else self.committed_version

    def see(self, status: EngineStatus) -> None:
        """Take in what an engine says of itself; a fleet version is learned from engines that hold one."""
        if self.came_late(status):
            status = replace(status, state=EngineState.QUARANTINED, version=None, reason=LATE)
        self.engines[status.engine] = status
        if status.version is not None and _rank(status) > self._reached:
            self.rewinds, self.committed_version, self._committed_update = status.rewinds, status.version, status.update_id
        # Before the first version an engine is there when it has started.
        if self._holds(status) or (self.committed_version is None and status.workers):
            self.joining.discard(status.engine)
        kept = status.retained
        if kept is not None and self.committed_version is None:  # all that held it may have been restarted, with the controller
            self.rewinds, self.committed_version, self._committed_update = kept.rewinds, kept.version, kept.update_id

    def came_late(self, status: EngineStatus) -> bool:
        """Whether an engine serves what an update brought that had ended without it, and not what the fleet's version is.

        A commit that got no answer in time may succeed in the engine afterwards. Its trainer was told that it failed, and may
        have sent other weights under that number since.
        """
        update = self._updates.get(status.update_id or "")
        if update is None or not update.state.final or status.state != EngineState.SERVING:
            return False
        told = any(verdict.engine == status.engine and verdict.committed for verdict in update.verdicts)
        told = told or self._rejoined.get(status.engine) == status.update_id
        return not told and status.update_id != self._committed_update

    def lose(self, engine: int, reason: str) -> None:
        """An engine can't be reached; one that was never seen counts too."""
        unseen = EngineStatus(engine, EngineState.DEAD, None, None, url="", model="", workers=0, vllm_version="")
        self.engines[engine] = replace(self.engines.get(engine, unseen), state=EngineState.DEAD, reason=reason)

    def lacking(self) -> dict[int, str]:
        """Engines that could hold what the fleet has committed and do not, and the update that brought it to those that do.

        None while the committed version has not reached enough engines: its trainer was told that it failed.
        """
        if self._incomplete or self._committed_update is None:
            return {}
        states = EngineState.PENDING, EngineState.QUARANTINED, EngineState.SERVING
        there = [e for e in self.engines.values() if e.workers and e.state in states and e.engine not in self.leaving]
        return {e.engine: self._committed_update for e in there if not self._holds(e)}

    def giver(self) -> int | None:
        """An engine that keeps what the fleet has committed; one that serves it rather than one that has yet to."""
        there = [e for e in self.engines.values() if e.state != EngineState.DEAD and e.retained is not None]
        keepers = [e for e in there if e.retained is not None and e.retained.update_id == self._committed_update]
        return min(keepers, key=lambda e: (e.state != EngineState.SERVING, e.engine)).engine if keepers else None

    def rejoined(self, verdict: EngineVerdict, update_id: str, rewinds: int) -> None:
        """Enter how an engine came out of an update that another one had handed on to it."""
        if verdict.committed:
            self._rejoined[verdict.engine] = update_id
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
            EngineDied, NoEngineReady: fewer engines than `require` can take part.
            BaseRefused: it has a scope, and fewer engines than `require` hold what it builds on.
        """
        self.repeated(request)
        busy = self.current
        if busy is not None:
            raise UpdateConflict(
                f"update {busy.request.update_id} to version {busy.request.version} is under way ({busy.state})",
                hint="Wait for it to end, or abort it",
                update_id=request.update_id,
            )
        floor = self.committed_version
        back = floor is not None and (request.version < floor or (request.version == floor and not self._incomplete))
        if floor is not None and back and not request.rewind:
            raise VersionRefused(
                f"version {request.version} does not rise: the fleet has committed version {floor}",
                hint=f"Use a version of {floor + 1} or more. A restarted trainer goes on from the fleet's version, or says rewind=True",
                update_id=request.update_id,
            )
        update = Update(request, self._able(request), now, rewinds=self.rewinds + back)
        if request.scope:
            self._build_on_base(update)
        known = {*update.engines, *(verdict.engine for verdict in update.left_out)}
        update.left_out += tuple(_absent(engine) for ordinal, engine in sorted(self.engines.items()) if ordinal not in known)
        self._updates[request.update_id] = update
        return update

    def _able(self, request: UpdateRequest) -> tuple[int, ...]:
        """Engines that can take an update now.

        Raises:
            EngineDied, NoEngineReady: as in `admit`.
        """
        # An engine without workers is on its way up, and not there yet.
        gone = [e for e in self.engines.values() if e.state == EngineState.DEAD or not e.workers]
        asleep = [e for e in self.engines.values() if e.state == EngineState.ASLEEP and e not in gone]
        able = tuple(sorted(set(self.engines) - self.leaving - {e.engine for e in (*gone, *asleep)}))
        # No update is under way here: what an engine still applies was given up, and it refuses another until it ends, if it ever does.
        free = tuple(ordinal for ordinal in able if self.engines[ordinal].state != EngineState.UPDATING)
        if len(free) >= max(self.require, 1):
            able = free
        if not able and not asleep:
            raise NoEngineReady("the fleet has no engine that answers", hint="See `weightsync status`", update_id=request.update_id)
        short = f"{self.require} must commit and {len(able)} can. Nothing was changed"
        if len(able) < self.require and gone:
            raise EngineDied(
                f"{len(gone)} engine(s) are dead or starting: {', '.join(f'{e.engine} ({e.reason})' for e in gone)}; {short}",
                hint="Wait until it has restarted, start `weightsync serve` again, or set sync.require to a smaller number",
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
        """Give an update with a scope its base, and leave out engines that hold another.

        Raises:
            BaseRefused: the fleet has none, or another than the trainer says; or too few engines hold it.
        """
        request, base = update.request, self.committed_version
        wanted = base if request.base_version is None else request.base_version
        if base is None or wanted != base:
            holds = "no committed version" if base is None else f"version {base}"
            said = "a committed version" if wanted is None else f"version {wanted}"
            raise BaseRefused(f"the update builds on {said}, and the fleet holds {holds}", hint=_WHOLE, update_id=request.update_id)
        holders, others = list[int](), dict[int, BaseRefused]()
        for engine in (self.engines[ordinal] for ordinal in update.engines):
            if self._holds(engine):
                holders.append(engine.engine)
                continue
            others[engine.engine] = other_base(engine, base, self._committed_update)
        if len(holders) < max(self.require, 1):
            message = (
                f"{'; '.join(e.message for e in others.values())}. {self.require} must commit and {len(holders)} can. Nothing was changed"
            )
            raise BaseRefused(message, hint=_WHOLE, engine=next(iter(others)), update_id=request.update_id)
        update.engines, update.base_version, update.base_update = tuple(holders), base, self._committed_update or ""
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
            self.rewinds, self.committed_version, self._incomplete = update.rewinds, update.request.version, not enough
            self._committed_update = update.request.update_id
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
            )

    def _trim(self) -> None:
        while len(self._updates) > self._history:
            self._updates.popitem(last=False)


def other_base(engine: EngineStatus, version: int | None, update_id: str | None) -> BaseRefused:
    """What to say of an engine that does not hold what an update builds on."""
    holds = "no version" if engine.version is None else f"version {engine.version} (update {engine.update_id})"
    return BaseRefused(
        f"engine {engine.engine} is {engine.state} with {holds}, and the update builds on version {version} (update {update_id})",
        hint=_WHOLE,
        engine=engine.engine,
    )


def _absent(engine: EngineStatus) -> EngineVerdict:
    """Of an engine that an update goes on without."""
    kind = {EngineState.ASLEEP: NoEngineReady, EngineState.UPDATING: UpdateConflict}.get(engine.state, EngineDied)
    error = kind(
        f"engine {engine.engine} was {engine.state} ({engine.reason}) when the update began, and took no part",
        hint="It takes part again when it answers, is awake, and applies nothing",
        engine=engine.engine,
    )
    return EngineVerdict(engine.engine, False, engine.version, engine.state, error=error.to_dict())


def _rank(engine: EngineStatus) -> tuple[int, int]:
    """What orders versions over rewinds."""
    return engine.rewinds, -1 if engine.version is None else engine.version
