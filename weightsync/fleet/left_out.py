"""What is said of engines that an update goes on without. Pure.

Not covered: engines that no wave came to (`waves`).
"""

from __future__ import annotations

from weightsync.errors import BaseRefused, EngineDied, NoEngineReady, UpdateConflict, WorkersSilent
from weightsync.protocol import EngineState, EngineStatus, EngineVerdict

WHOLE = "Send a complete update, without a scope; an adapter with the weights that it lies on"


def other_base(engine: EngineStatus, version: int | None, update_id: str | None) -> BaseRefused:
    """What to say of an engine that does not hold what an update builds on."""
    holds = "no version" if engine.version is None else f"version {engine.version} (update {engine.update_id})"
    return BaseRefused(
        f"engine {engine.engine} is {engine.state} with {holds}, and the update builds on version {version} (update {update_id})",
        hint=WHOLE,
        engine=engine.engine,
    )


def absent(engine: EngineStatus) -> EngineVerdict:
    """Of an engine that an update goes on without."""
    kinds = {EngineState.ASLEEP: NoEngineReady, EngineState.UPDATING: UpdateConflict, EngineState.SILENT: WorkersSilent}
    error = kinds.get(engine.state, EngineDied)(
        f"engine {engine.engine} was {engine.state} ({engine.reason}) when the update began, and took no part",
        hint="It takes part again when it answers, is awake, and applies nothing",
        engine=engine.engine,
    )
    return EngineVerdict(engine.engine, False, engine.version, engine.state, error=error.to_dict())


def lost(engine: EngineStatus) -> EngineVerdict:
    """Of an engine without which an update is sent again."""
    error = EngineDied(
        f"engine {engine.engine} was lost while these weights were sent, and took no part when they were sent again; it is {engine.state}",
        hint="It gets the version from an engine that keeps it, or the next one",
        engine=engine.engine,
    )
    return EngineVerdict(engine.engine, False, engine.version, engine.state, error=error.to_dict())
