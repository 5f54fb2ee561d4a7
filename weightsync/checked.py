"""What a check of live engines found, as plain data, for the API and the command line. Re-exported by `protocol`.

Standard library only. Lists are bounded and say how many entries they leave out.

Not covered: how a check goes about it (`worker.rereading`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorkerCheck:
    """What one worker read of its own live storage. Never an exception: an RPC must not raise.

    Attributes:
        rank: the worker's rank within its engine.
        update_id: the update that it was proved to hold, and that the bytes are compared with.
        done: nothing is left to read. A worker reads a little in each call, so that requests go on between.
        equal: tensors whose bytes have the digest that they were sent with.
        unchanged: tensors and parameters that are kept in another form than was sent, and are as the last check of this update found them.
        first_seen: the like, read for the first time since the update: the next check can compare them.
        unreadable: tensors of which this worker has nothing that could be read, as they lie inside kernels or in other workers.
        differs: names or paths whose bytes are not what they were; the first 20.
        faults: slots of the storage contract that don't lie where they were sealed, one line each; the first 20.
        left_out: how many entries the two lists leave out.
        slots: slots of the contract that were looked up.
        nbytes: read.
        seconds: that the worker spent on it.
        error: `WeightSyncError.to_dict()`, where it could not be checked.
    """

    rank: int
    update_id: str = ""
    done: bool = False
    equal: int = 0
    unchanged: int = 0
    first_seen: int = 0
    unreadable: int = 0
    differs: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    left_out: int = 0
    slots: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    error: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether it was checked to the end, and nothing stands against it."""
        return self.done and self.error is None and not self.differs and not self.faults


@dataclass(frozen=True)
class EngineCheck:
    """One engine's workers.

    Attributes:
        engine: ordinal.
        version: that it holds, as the fleet knows; None if none.
        ok: every worker was checked, and nothing stands against any.
        error: why it could not be checked, `WeightSyncError.to_dict()`.
    """

    engine: int
    version: int | None
    ok: bool
    workers: tuple[WorkerCheck, ...] = ()
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class FleetCheck:
    """The engines that were meant.

    Attributes:
        ok: of every one of them; False where there was none.
    """

    committed_version: int | None
    ok: bool
    engines: tuple[EngineCheck, ...] = field(default_factory=tuple)
