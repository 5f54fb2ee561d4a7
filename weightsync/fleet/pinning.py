"""Whom a pin holds: engines that stay at a version, and out of updates, until they are unpinned. Pure.

The pin itself is kept by the engine (`holding`); everybody else reads it from what the engine says of itself.

Not covered: a pin that outlives its engine's process.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from weightsync.errors import PinRefused
from weightsync.protocol import GONE, EngineState, EngineStatus

#: What a pin may be called.
NAME = r"[A-Za-z0-9._-]{1,64}"


def bearers(engines: Iterable[EngineStatus], name: str) -> list[int]:
    """Engines that a pin of this name holds."""
    return sorted(e.engine for e in engines if e.pinned and e.pinned == name)


def stands(engines: Collection[EngineStatus], name: str, version: int, count: int) -> bool:
    """Whether a pin is there already, just as it is asked for.

    Raises:
        PinRefused: the name or the count is none, or the name holds another version, or more engines.
    """
    if not re.fullmatch(NAME, name):
        raise PinRefused(f"pin {name[:80]!r}: want 1 to 64 ASCII letters, digits, '.', '_' or '-'")
    if count < 1:
        raise PinRefused(f"pin {name!r} of {count} engines: want 1 or more")
    held = [e for e in engines if e.pinned == name]
    if other := next((e for e in held if e.version != version), None):
        raise PinRefused(
            f"pin {name!r} holds version {other.version} on engine {other.engine}, and is asked for at version {version}",
            hint="Unpin it first, or take another name",
            engine=other.engine,
        )
    if len(held) > count:
        raise PinRefused(f"pin {name!r} holds {len(held)} engines, and is asked for {count}", hint="Unpin it first, or take another name")
    return len(held) == count


def choose(
    engines: Collection[EngineStatus], name: str, version: int, count: int, require: int | None, update_id: str | None
) -> tuple[int, ...]:
    """Engines to pin, so that as many as asked for hold this version under this name; none if they do.

    All hold the same weights: a number may have been given twice, by an update that failed or a rewind. Those that
    keep bytes for others come last, since they will be asked for them.

    Args:
        engines: the whole fleet.
        require: `sync.require`.
        update_id: that brought the fleet's committed version; preferred among those of that number.

    Raises:
        PinRefused: too few serve it, or too few would be left for updates; or see `stands`.
    """
    if stands(engines, name, version, count):
        return ()
    held = [e for e in engines if e.pinned == name]
    able = [e for e in engines if not e.pinned and e.state == EngineState.SERVING and e.version == version]
    if able:
        like = held[0] if held else max(able, key=lambda e: (e.update_id == update_id, e.rewinds, e.engine))
        able = [e for e in able if (e.rewinds, e.update_id) == (like.rewinds, like.update_id)]
    missing = count - len(held)
    if len(able) < missing:
        raise PinRefused(
            f"{missing} engine(s) are to be pinned as {name!r} at version {version}, and {len(able)} serve it unpinned: {_held(engines)}",
            hint="Pin what engines serve now, before the next update",
        )
    able.sort(key=lambda e: (e.retained is not None, -e.engine))
    chosen = tuple(sorted(e.engine for e in able[:missing]))
    left = sum(not e.pinned and e.state not in GONE and e.engine not in chosen for e in engines)
    wanted = max(1, min(require or 1, len(engines)))
    if left < wanted:
        why = "" if require is None else " (sync.require)"
        raise PinRefused(
            f"pin {name!r} of {count} engine(s) would leave {left} for updates, which take {wanted}{why}: {_held(engines)}",
            hint="Pin fewer engines, unpin others, or start more",
        )
    return chosen


def _held(engines: Iterable[EngineStatus]) -> str:
    return ", ".join(f"engine {e.engine} {_holds(e)}" for e in sorted(engines, key=lambda e: e.engine)) or "there are no engines"


def _holds(engine: EngineStatus) -> str:
    what = f"is {engine.state}" if engine.state != EngineState.SERVING else "serves"
    version = "no version" if engine.version is None else f"version {engine.version}"
    return f"{what} with {version}" + (f", pinned as {engine.pinned!r}" if engine.pinned else "")
