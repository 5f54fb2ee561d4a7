"""What the fleet knows of versions, engines and updates. Pure: no clock, no I/O.

An update goes admitted → receiving → staged → applying → committed, or aborted
from any of them. One is under way at a time. Versions only rise; a version whose
update did not reach `require` engines may be tried again, and a trainer that says
`rewind` takes the fleet back. Engines say how many rewinds lie before the version
they hold, so that one that missed a rewind does not lift the fleet again.

Not covered: pinned engines, waves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weightsync.errors import EngineDied, NoEngineReady, Refused, UpdateConflict, VersionRefused, WeightSyncError
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
        self._brought_by: str | None = None  # the update that brought it
        self.rewinds = 0  # how often the fleet has gone back
        self._incomplete = False  # the committed version has not reached `require` engines
        self._updates: OrderedDict[str, Update] = OrderedDict()

    @property
    def require(self) -> int:
        return len(self.engines) if self._require is None else min(self._require, len(self.engines))

    @property
    def current(self) -> Update | None:
        """The update under way."""
        last = next(reversed(self._updates.values()), None)
        return last if last is not None and not last.state.final else None

    @property
    def ready(self) -> int:
        """Engines that serve the committed version; one that missed a rewind does not, whatever its number."""
        return sum(e.state == EngineState.SERVING and e.version is not None and _rank(e) == self._reached for e in self.engines.values())

    @property
    def _reached(self) -> tuple[int, int]:
        return self.rewinds, -1 if self.committed_version is None else self.committed_version

    def see(self, status: EngineStatus) -> None:
        """Take in what an engine says of itself; a fleet version is learned from engines that hold one."""
        if self.came_late(status):
            status = replace(status, state=EngineState.QUARANTINED, version=None, reason=LATE)
        self.engines[status.engine] = status
        if status.version is not None and _rank(status) > self._reached:
            self.rewinds, self.committed_version, self._brought_by = status.rewinds, status.version, status.update_id

    def came_late(self, status: EngineStatus) -> bool:
        """Whether an engine serves what an update brought that had ended without it, and not what the fleet's version is.

        A commit that got no answer in time may succeed in the engine afterwards. Its trainer was told that it failed, and may
        have sent other weights under that number since.
        """
        update = self._updates.get(status.update_id or "")
        if update is None or not update.state.final or status.state != EngineState.SERVING:
            return False
        told = any(verdict.engine == status.engine and verdict.committed for verdict in update.verdicts)
        return not told and status.update_id != self._brought_by

    def lose(self, engine: int, reason: str) -> None:
        """An engine can't be reached; one that was never seen counts too."""
        unseen = EngineStatus(engine, EngineState.DEAD, None, None, url="", model="", workers=0, vllm_version="")
        self.engines[engine] = replace(self.engines.get(engine, unseen), state=EngineState.DEAD, reason=reason)

    def forget(self, engine: int) -> None:
        self.engines.pop(engine, None)

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
        # An engine without workers is on its way up, and not there yet.
        unable = [e for e in self.engines.values() if e.state == EngineState.DEAD or not e.workers]
        able = tuple(sorted(set(self.engines) - {e.engine for e in unable}))
        if not able:
            raise NoEngineReady("the fleet has no engine that answers", hint="See `weightsync status`", update_id=request.update_id)
        if len(able) < self.require:
            raise EngineDied(
                f"{len(unable)} engine(s) are dead or starting: {', '.join(f'{e.engine} ({e.reason})' for e in unable)}; "
                f"{self.require} must commit and {len(able)} can. Nothing was changed",
                hint="Wait until it has restarted, start `weightsync serve` again, or set sync.require to a smaller number",
                engine=unable[0].engine if unable else None,
                update_id=request.update_id,
            )
        update = Update(request, able, now, rewinds=self.rewinds + back)
        self._updates[request.update_id] = update
        return update

    def abort(self, update: Update, error: WeightSyncError, now: float) -> None:
        """End an update before any engine was told to apply."""
        update.move(UpdateState.ABORTED)
        update.ended, update.error = now, error.to_dict()
        update.forget_manifest()
        self._trim()

    def conclude(self, update: Update, verdicts: Sequence[EngineVerdict], now: float) -> bool:
        """Enter the verdicts of all engines; says whether enough committed."""
        update.verdicts = tuple(sorted(verdicts, key=lambda v: v.engine))
        committed = sum(v.committed for v in verdicts)
        enough = committed >= self.require
        # An engine that came back during the update may have brought a higher version with it.
        if committed and (update.rewinds, update.request.version) >= self._reached:
            self.rewinds, self.committed_version, self._incomplete = update.rewinds, update.request.version, not enough
            self._brought_by = update.request.update_id
        for verdict in verdicts:
            before = self.engines.get(verdict.engine)
            if before is not None:
                self.engines[verdict.engine] = replace(
                    before,
                    state=verdict.state,
                    version=verdict.version,
                    rewinds=update.rewinds if verdict.committed else before.rewinds,
                    update_id=update.request.update_id if verdict.committed else before.update_id,
                    reason=str((verdict.error or {}).get("code", "")),
                )
        update.move(UpdateState.COMMITTED if enough else UpdateState.ABORTED)
        update.ended = now
        update.forget_manifest()
        self._trim()
        return enough

    def _trim(self) -> None:
        while len(self._updates) > self._history:
            self._updates.popitem(last=False)


def _rank(engine: EngineStatus) -> tuple[int, int]:
    """What orders versions over rewinds."""
    return engine.rewinds, -1 if engine.version is None else engine.version
