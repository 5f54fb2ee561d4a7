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
from typing import Protocol

from benchmarks.soak_watch import Watch


class Site(Protocol):
    """What actions may use; `soak.Soak` is the real one."""

    watch: Watch

    def choose(self, engines: list[int]) -> int:
        """One of these, by chance."""

    def kill_serve(self) -> None:
        """And start it again, which adopts the fleet."""

    def kill_trainer(self) -> None:
        """And start another."""


@dataclass
class Blow:
    """One action, done.

    Attributes:
        at, until: `time.monotonic()` before it, and when every engine served again what the fleet holds; None before.
        engines: whose requests may fail meanwhile.
        service: the service may be away meanwhile.
    """

    action: str
    at: float
    engines: frozenset[int] = frozenset()
    service: bool = False
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


#: In the order of the first round; a short soak comes no further than its time.
ACTIONS: tuple[Callable[[Site], Blow], ...] = (
    kill_controller,
    kill_engine_core,
    kill_serve,
    kill_trainer,
    kill_engine_actor,
    kill_engine_worker,
)


def _kill_engine(site: Site, name: str, part: str) -> Blow:
    status = site.watch.status
    ordinal = site.choose([engine.engine for engine in status.engines] if status else [0])
    blow = Blow(name, time.monotonic(), frozenset({ordinal}))
    _kill(site, f"engine-{ordinal}{part}")
    return blow


def _kill(site: Site, role: str) -> None:
    """SIGKILL to the first process of a role.

    Raises:
        LookupError: there is none.
    """
    found = site.watch.processes(role)
    if not found:
        raise LookupError(f"no process is {role}")
    os.kill(found[0], signal.SIGKILL)
