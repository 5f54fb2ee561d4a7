"""Decisions of `/readyz`, pure.

`/livez` needs no decision: a process that answers is alive. Reasons are codes
without names, addresses or text, since health needs no token.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.protocol import EngineState, FleetStatus

#: What engines do that serve nothing, and not just for an update.
_OUT = (
    EngineState.PENDING,
    EngineState.PAUSED,
    EngineState.ASLEEP,
    EngineState.LEAVING,
    EngineState.QUARANTINED,
    EngineState.SILENT,
    EngineState.DEAD,
)


@dataclass(frozen=True)
class Readiness:
    """Whether requests should come here.

    Attributes:
        ready: enough engines serve the committed version.
        reasons: codes of why not; with `ready`, of what is not as it should be.
        engines: per ordinal, its state.
    """

    ready: bool
    reasons: tuple[str, ...]
    engines: dict[str, str]


def readiness(status: FleetStatus, min_ready: int) -> Readiness:
    """Judge a fleet.

    Args:
        min_ready: engines that must serve the committed version.
    """
    reasons = []
    if status.committed_version is None:
        reasons.append("no_committed_version")
    if status.ready < min_ready:
        reasons.append("too_few_engines_ready")
    for state in _OUT:
        if any(e.state == state for e in status.engines):
            reasons.append(f"engine_{state}")
    if any(e.state == EngineState.SERVING and not e.pinned and e.version != status.committed_version for e in status.engines):
        reasons.append("engine_behind")
    ready = status.committed_version is not None and status.ready >= min_ready
    return Readiness(ready, tuple(reasons), {str(e.engine): str(e.state) for e in status.engines})
