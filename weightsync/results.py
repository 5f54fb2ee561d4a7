"""What the client gives to its user: reports of syncs, what a restarted trainer finds, completions with the versions that sampled them.

Not covered: errors (`weightsync.errors`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weightsync.protocol import EngineStatus, EngineVerdict, ProbeReport


@dataclass(frozen=True)
class SentAgain:
    """An engine was lost while an update was sent, and the same call sent the bytes again to those that were left.

    Attributes:
        update_id: of the update that was lost with it, which nobody has written.
        engine: ordinal of the engine that was lost.
        error: what that update ended with, `WeightSyncError.to_dict()`.
        seconds: that it cost.
    """

    update_id: str
    engine: int
    error: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class SyncReport:
    """What `sync_weights()` returns.

    Attributes:
        version: the version the fleet serves now.
        nbytes, tensors: what was sent, by the last sending.
        seconds: wall time by phase; `total` is the whole call.
        pause_seconds: the longest time any engine generated nothing.
        verdicts: one per engine of the fleet; those that took no part say why.
        sent_again: what was sent before and lost with an engine; empty when all went well at once.
        probe: what engines' answers to fixed prompts said behind the commit; None when it was off, or had not ended by then.
    """

    update_id: str
    version: int
    nbytes: int
    tensors: int
    seconds: dict[str, float]
    pause_seconds: float
    verdicts: tuple[EngineVerdict, ...]
    sent_again: tuple[SentAgain, ...] = ()
    probe: ProbeReport | None = None


@dataclass(frozen=True)
class Attachment:
    """What `attach_run()` found.

    Attributes:
        step: the trainer's.
        committed_version: the fleet's; None before its first.
        engines: what each is and holds.
        behind: ordinals of engines that follow updates and do not serve `step`; pinned ones don't follow.
        needed: the committed version is not `step`, or an engine is behind.
        rewind: bringing the fleet to `step` takes `rewind=True`, since that version does not rise.
        advice: what to do, in words; empty when nothing is needed.
    """

    step: int
    committed_version: int | None
    engines: tuple[EngineStatus, ...]
    behind: tuple[int, ...]
    needed: bool
    rewind: bool
    advice: str

    @property
    def versions(self) -> dict[int, int | None]:
        """What each engine holds, by ordinal."""
        return {e.engine: e.version for e in self.engines}


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens `[start, end)` were sampled from weights `version`."""

    version: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Generation:
    """One completion.

    Attributes:
        token_ids: sampled tokens.
        logprobs: log-probability of each sampled token, nats.
        versions: which weights sampled which tokens.
        engine: ordinal of the engine that answered.
        finish_reason: `length`, `stop` or `abort`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    engine: int
    finish_reason: str

    @property
    def version(self) -> int | None:
        """The weights that sampled the first token; see `versions` when an update fell in between."""
        return self.versions[0].version if self.versions else None
