"""What is done to a fleet in a soak: a list of functions.

An action takes the `Site` and returns a `Blow`, which says whose requests may fail until all engines serve again. Another action is
another function in `ACTIONS`.

Not covered: machines and networks that fail.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.soak_watch import Watch
from weightsync.protocol import EngineState

#: For an engine to come, or to go; and how long one that was added takes part.
COME_SECONDS, _SERVES_SECONDS = 180.0, 5.0


class Site(Protocol):
    """What actions may use; `soak.Soak` is the real one."""

    watch: Watch

    def choose(self, engines: list[int]) -> int:
        """One of these, by chance."""

    def kill_serve(self) -> None:
        """And start it again, which adopts the fleet."""

    def kill_trainer(self) -> None:
        """And start another."""

    def end_trainer(self) -> None:
        """Let it end its update; nobody syncs then."""

    def start_trainer(self) -> None: ...

    def scale(self, engines: int) -> None:
        """Tell the service how many there shall be."""

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> bool:
        """Until it is true; that it did not come about is a fault, and False."""


@dataclass
class Blow:
    """One action, done.

    Attributes:
        at, until: `time.monotonic()` before it, and when every engine served again what the fleet holds; None before.
        engines: whose requests may fail meanwhile.
        service: the service may be away meanwhile.
        updates: updates may fail meanwhile.
    """

    action: str
    at: float
    engines: frozenset[int] = frozenset()
    service: bool = False
    updates: bool = True
    until: float | None = None
    notes: list[str] = field(default_factory=list)

    def covers(self, began: float, ended: float) -> bool:
        return self.at <= ended and (self.until is None or began <= self.until)


def kill_trainer(site: Site) -> Blow:
    blow = Blow("kill_trainer", time.monotonic())
    site.kill_trainer()
    return blow


def kill_controller(site: Site) -> Blow:
    blow = Blow("kill_controller", time.monotonic(), service=True)
    _kill(site, "controller")
    return blow


def kill_serve(site: Site) -> Blow:
    blow = Blow("kill_serve", time.monotonic(), service=True)
    site.kill_serve()
    return blow


def kill_engine_core(site: Site) -> Blow:
    return _kill_engine(site, "kill_engine_core", " core")


def kill_engine_worker(site: Site) -> Blow:
    return _kill_engine(site, "kill_engine_worker", " worker")


def kill_engine_actor(site: Site) -> Blow:
    return _kill_engine(site, "kill_engine_actor", "")


def rejoin(site: Site) -> Blow:
    """An engine's core is killed while nobody syncs: the engine gets the committed version from the one that keeps it."""
    site.end_trainer()
    try:
        found: list[int | None] = []
        site.wait(lambda: found.append(_held_by_all(site)) or found[-1] is not None, COME_SECONDS, "one version on all engines")
        blow, committed = _kill_engine(site, "rejoin", " core", updates=False), found[-1]
        (ordinal,) = blow.engines
        site.wait(lambda: not _holds(site, ordinal, committed), COME_SECONDS, f"the death of engine {ordinal}")
        if site.wait(lambda: _holds(site, ordinal, committed), COME_SECONDS, f"version {committed} on engine {ordinal} without a trainer"):
            blow.notes.append(f"version {committed} again after {time.monotonic() - blow.at:.1f} s, without a trainer")
    finally:
        site.start_trainer()
    return blow


def scale(site: Site) -> Blow:
    """An engine is added, gets the weights, serves, and is drained again, while training goes on: nothing fails meanwhile."""
    status = site.watch.status
    there = {engine.engine for engine in status.engines} if status else {0}
    blow = Blow("scale", time.monotonic(), frozenset({max(there) + 1}), updates=False)
    (ordinal,) = blow.engines
    site.scale(len(there) + 1)
    if site.wait(lambda: _serves(site, ordinal), COME_SECONDS, f"engine {ordinal}, which was added"):
        blow.notes.append(f"engine {ordinal} served after {time.monotonic() - blow.at:.1f} s")
    time.sleep(_SERVES_SECONDS)
    began = time.monotonic()
    site.scale(len(there))
    blow.notes.append(f"it was gone after {time.monotonic() - began:.1f} s")
    site.wait(lambda: _engines(site) == there, COME_SECONDS, f"the fleet of before, {sorted(there)}")
    return blow


#: In the order of the first round; a short soak comes no further than its time.
ACTIONS: tuple[Callable[[Site], Blow], ...] = (
    kill_controller,
    rejoin,
    scale,
    kill_engine_core,
    kill_serve,
    kill_trainer,
    kill_engine_actor,
    kill_engine_worker,
)


def _kill_engine(site: Site, name: str, part: str, *, updates: bool = True) -> Blow:
    status = site.watch.status
    ordinal = site.choose([engine.engine for engine in status.engines] if status else [0])
    blow = Blow(name, time.monotonic(), frozenset({ordinal}), updates=updates)
    _kill(site, f"engine-{ordinal}{part}")
    return blow


def _engines(site: Site) -> set[int] | None:
    status = site.watch.status
    return None if status is None else {engine.engine for engine in status.engines}


def _holds(site: Site, ordinal: int, version: int | None) -> bool:
    """Whether an engine serves this version, as far as the service says."""
    status = site.watch.status
    return status is not None and any((e.engine, e.state, e.version) == (ordinal, EngineState.SERVING, version) for e in status.engines)


def _held_by_all(site: Site) -> int | None:
    """The committed version, when all engines serve it and one of them keeps it for others."""
    status = site.watch.status
    if status is None or status.ready != len(status.engines):
        return None
    kept = any(e.retained is not None and e.retained.update_id == e.update_id for e in status.engines)
    return status.committed_version if kept else None


def _serves(site: Site, ordinal: int) -> bool:
    status = site.watch.status
    able = (EngineState.SERVING, EngineState.UPDATING)
    return status is not None and any(e.engine == ordinal and e.state in able and e.version is not None for e in status.engines)


def _kill(site: Site, role: str) -> None:
    """SIGKILL to the first process of a role.

    Raises:
        LookupError: there is none.
    """
    found = site.watch.processes(role)
    if not found:
        raise LookupError(f"no process is {role}")
    os.kill(found[0], signal.SIGKILL)
