"""What a trainer that starts again finds: whether the fleet serves its step, and what to do if not. Pure.

Versions are taken for steps: that two weights of one number are the same is the trainer's word.

Not covered: bringing the weights (`sync`).
"""

from __future__ import annotations

from weightsync.errors import ConfigError
from weightsync.protocol import HOLDING, MAX_VERSION, EngineState, FleetStatus
from weightsync.results import Attachment


def attachment(status: FleetStatus, step: int) -> Attachment:
    """Compare a fleet with a trainer's step.

    Raises:
        ConfigError: no version can be this step.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_VERSION:
        raise ConfigError(f"step: got {step!r}, want 0 to {MAX_VERSION}")
    committed, here = status.committed_version, (step, status.rewinds)
    hold = {e.engine for e in status.engines if e.state in HOLDING and (e.version, e.rewinds) == here}
    behind = tuple(e.engine for e in status.engines if not e.pinned and e.engine not in hold)
    needed = committed != step or bool(behind)
    return Attachment(
        step=step,
        committed_version=committed,
        engines=status.engines,
        behind=behind,
        needed=needed,
        rewind=needed and committed is not None and committed >= step,
        advice=_advice(status, step, behind),
    )


def _advice(status: FleetStatus, step: int, behind: tuple[int, ...]) -> str:
    committed = status.committed_version
    if committed is not None and committed > step:
        back = f"sync_weights(…, version={step}, rewind=True) takes it back"
        return f"The fleet has committed version {committed}, above step {step}: {back}; else versions go on from {committed + 1}"
    if committed != step:
        holds = "no version" if committed is None else f"version {committed}"
        return f"The fleet has committed {holds}: sync_weights(…, version={step}) brings it to step {step}"
    if not behind:
        return ""
    those = ", ".join(map(str, behind))
    bring = f"sync_weights(…, version={step}, rewind=True)"
    kept = {e.engine: e.retained for e in status.engines if e.retained and e.state != EngineState.DEAD}
    keepers = [engine for engine, its in kept.items() if (its.version, its.rewinds) == (step, status.rewinds)]
    if not keepers:  # sync.retain_engines is 0, or nothing is staged
        how = f"no engine keeps it for them, so they get it with {bring}, or a later version with the next sync"
    else:
        how = f"they get it by themselves from engine {keepers[0]}, which keeps it, with the next version, or with {bring}"
    return f"The fleet has committed step {step}, and engine(s) {those} do not serve it: {how}"
