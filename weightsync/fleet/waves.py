"""Which engines are written next, so that enough go on serving meanwhile (`sync.min_available`). Pure.

An engine that does not serve needs no place. Of those that serve as many are taken as there are above the
minimum, and they are counted anew before each wave: one that failed in its wave serves no more, and one
that served nothing before may. An engine that does not answer is not counted on, and taken only where a serving
one could be.

Not covered: how a wave is written (`roster`), and requests of the engines that are taken (`draining`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.errors import HeldBack, NoEngineReady
from weightsync.protocol import EngineState, EngineStatus, EngineVerdict

#: What engines do now, by ordinal; None for one that does not answer.
States = Mapping[int, EngineState | None]


def serving(states: States) -> tuple[int, ...]:
    """Engines that serve, by ordinal."""
    return tuple(sorted(ordinal for ordinal, state in states.items() if state == EngineState.SERVING))


def next_wave(left: Sequence[int], states: States, min_available: int) -> tuple[int, ...]:
    """Engines to write now; none when no further one may be taken away.

    Args:
        left: engines of the update that have not been written, in the order of their turn.
        states: of the whole fleet, now.
        min_available: so many must go on serving; 0 takes all at once.
    """
    if not min_available:
        return tuple(left)
    places = max(0, len(serving(states)) - min_available)
    taken = [ordinal for ordinal in left if states.get(ordinal) == EngineState.SERVING]
    taken += [ordinal for ordinal in left if states.get(ordinal) is None]
    return (*_idle(left, states), *taken[:places])


def reachable(engines: Sequence[int], states: States, min_available: int) -> tuple[int, ...]:
    """Those of an update's engines that waves can come to if none fails: what is idle now serves when it has been written."""
    idle = _idle(engines, states)
    return tuple(engines) if not min_available or len({*idle, *serving(states)}) > min_available else idle


def require_room(engines: Sequence[int], states: States, min_available: int, require: int) -> None:
    """That an update can reach as many engines as must commit.

    Args:
        engines: that take part.
        require: how many must commit.

    Raises:
        NoEngineReady: too few serve for one to be taken away.
    """
    can = reachable(engines, states, min_available)
    if len(can) < max(require, 1):
        raise NoEngineReady(
            f"{_standing(serving(states), min_available)}, so engines {_list(set(engines) - set(can))} can't be written: "
            f"{require} must commit and {len(can)} can. Nothing was changed",
            hint="Wait until more engines serve (see `weightsync status`), or set sync.min_available to a smaller number",
        )


def held_back(engine: EngineStatus, states: States, min_available: int) -> EngineVerdict:
    """The verdict of an engine that no wave came to; it goes on as it was.

    Args:
        states: of the whole fleet, when that was decided.
    """
    holds = f"goes on with version {engine.version}" if engine.state == EngineState.SERVING else f"is {engine.state}"
    error = HeldBack(
        f"engine {engine.engine} was not taken out of service for the update and {holds}: {_standing(serving(states), min_available)}",
        hint="It is brought up to the fleet's version when more engines serve; see the verdicts of those that failed",
        engine=engine.engine,
    )
    return EngineVerdict(engine.engine, False, engine.version, engine.state, error=error.to_dict())


def _idle(engines: Sequence[int], states: States) -> tuple[int, ...]:
    return tuple(ordinal for ordinal in engines if states.get(ordinal) not in (EngineState.SERVING, None))


def _standing(now: Sequence[int], min_available: int) -> str:
    return f"{len(now)} engine(s) serve ({_list(now) or 'none'}), and sync.min_available keeps {min_available} serving"


def _list(ordinals: Sequence[int] | set[int]) -> str:
    return ", ".join(map(str, sorted(ordinals)))
