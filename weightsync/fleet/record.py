"""One update's record in the fleet's book. Pure: no clock, no I/O.

Not covered: which update may follow which (`ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weightsync.protocol import (
    Admission,
    CommunicatorInfo,
    EngineVerdict,
    Manifest,
    ProbeReport,
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
    probe: ProbeReport | None = None
    trace: str = ""  # `traceparent` of its trainer's span
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
            probe=self.probe,
        )

    @property
    def admission(self) -> Admission:
        assert self.communicator is not None
        return Admission(self.request.update_id, self.request.version, self.communicator, self.engines, self.staged)
