"""What a soak looks at while it runs: which process is what, its memory and files, versions of engines, and what is left in the end.

Memory is what a process has for itself, resident less shared. A slope is fitted by least squares over the updates that
were committed in a process's own life, its first ones left out.

Not covered: memory of a GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from tests.fleets import Fleet
from weightsync.errors import WeightSyncError
from weightsync.protocol import FleetStatus

#: Updates of a process's life that a fit leaves out, and how many it needs.
WARM_UP, ENOUGH = 30, 60
#: A few connections come and go with requests: for files and threads it needs more.
ENOUGH_TO_COUNT = 200
_LOOK_SECONDS, _SAMPLE_SECONDS = 0.3, 2.0
_MB = 1e6


def roles(fleet: Fleet, status: FleetStatus | None) -> dict[int, str]:
    """Processes of a fleet that live long, by what they are; an engine that has no address yet is not told apart."""
    found = {fleet.process.pid: "serve"}
    ports = {int(e.url.rsplit(":", 1)[1]): e.engine for e in status.engines if e.url} if status else {}
    for pid in fleet.processes():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            title = " ".join(process.cmdline())
            if title.startswith("ray::Controller"):
                found[pid] = "controller"
            elif title.startswith("ray::EngineActor"):
                listening = {c.laddr.port for c in process.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}
                for ordinal in sorted({ports[port] for port in listening & set(ports)}):
                    found |= {pid: f"engine-{ordinal}", **_vllm(process, ordinal)}
            elif (name := re.search(r"/(gcs_server|raylet)\b", title)) is not None:
                found[pid] = name[1]
    return found


def _vllm(actor: psutil.Process, ordinal: int) -> dict[int, str]:
    """vLLM's processes below an engine's actor: the core, and its workers."""
    found = {}
    for core in filter(_runs, actor.children()):
        found[core.pid] = f"engine-{ordinal} core"
        found |= {worker.pid: f"engine-{ordinal} worker" for worker in filter(_runs, core.children())}
    return found


def _runs(process: psutil.Process) -> bool:
    """Whether it is one of vLLM's, and not a helper of Python's multiprocessing."""
    return "resource_tracker" not in " ".join(process.cmdline())


def strays(fleet: Fleet) -> list[str]:
    """vLLM's processes of a fleet that have lost their engine's actor."""
    found = []
    for pid, command in fleet.processes().items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            above = [*process.parents()]
            ours = "multiprocessing" in command or command.startswith("VLLM")
            if ours and process.status() != psutil.STATUS_ZOMBIE and not any("ray::EngineActor" in " ".join(p.cmdline()) for p in above):
                found.append(f"{pid} {command[:80]}")
    return found


@dataclass
class Life:
    """One process: its samples are (updates committed so far, MB, files, threads)."""

    role: str
    pid: int
    samples: list[tuple[int, float, int, int]] = field(default_factory=list)

    def fitted(self) -> dict[str, Any]:
        """Its slopes per update, None where it did not see enough of them."""
        first = self.samples[0][0]
        late = [sample for sample in self.samples if sample[0] >= first + WARM_UP]
        told: dict[str, Any] = {"role": self.role, "pid": self.pid, "updates": self.samples[-1][0] - first}
        told |= {"mb": [round(self.samples[0][1], 1), round(self.samples[-1][1], 1)], "mb_per_update": None}
        told |= {"files": [self.samples[0][2], self.samples[-1][2]], "threads": [self.samples[0][3], self.samples[-1][3]]}
        span = late[-1][0] - late[0][0] if len(late) > 4 else 0
        for key, at, enough in (
            ("mb_per_update", 1, ENOUGH), ("files_per_update", 2, ENOUGH_TO_COUNT), ("threads_per_update", 3, ENOUGH_TO_COUNT),
        ):  # fmt: skip
            if span >= enough:
                told[key] = round(slope([(sample[0], sample[at]) for sample in late]), 5)
        return told


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line through (x, y) that is least squares away from them."""
    x, y = torch.tensor(points, dtype=torch.float64).T
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())


class Watch:
    """A thread that looks at a fleet until `close`.

    Args:
        fleet: returns the `serve` that runs now.
        trainer: returns the trainer's process that runs now.
        updates: how many updates have been committed.

    Attributes:
        status: the last that the service told; None while it tells nothing.
        faults: versions of an engine that fell, and what kept this from looking.
    """

    def __init__(self, fleet: Callable[[], Fleet], trainer: Callable[[], int], updates: Callable[[], int]) -> None:
        self._fleet, self._trainer, self._updates = fleet, trainer, updates
        self.status: FleetStatus | None = None
        self.faults: list[str] = []
        self.lives: dict[tuple[int, str], Life] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)

    def processes(self, role: str) -> list[int]:
        """Process ids that have this role now."""
        return sorted(pid for pid, found in roles(self._fleet(), self.status).items() if found == role)

    def _run(self) -> None:
        sampled = 0.0
        while not self._over.wait(_LOOK_SECONDS):
            try:
                self._look()
                if time.monotonic() - sampled > _SAMPLE_SECONDS:
                    self._sample()
                    sampled = time.monotonic()
            except Exception as exc:
                self.faults.append(f"the watch could not look: {exc!r}")

    def _look(self) -> None:
        fleet = self._fleet()
        try:
            with fleet.client() as client:
                self.status = client.status()
        except WeightSyncError:
            self.status = None
            return
        for engine in self.status.engines:
            if engine.version is None:
                continue
            now, before = (engine.rewinds, engine.version), self._versions.get(engine.engine, (0, -1))
            if now < before:
                self.faults.append(f"engine {engine.engine} went from version {before[1]} to {now[1]}")
            self._versions[engine.engine] = now

    def _sample(self) -> None:
        updates = self._updates()
        for pid, role in {**roles(self._fleet(), self.status), self._trainer(): "trainer"}.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                memory = process.memory_info()
                life = self.lives.setdefault((pid, role), Life(role, pid))
                life.samples.append((updates, (memory.rss - memory.shared) / _MB, process.num_fds(), process.num_threads()))


class Before:
    """What of shared memory and temporary files there was before a fleet."""

    def __init__(self) -> None:
        self._there = _leftovers()

    def left(self, fleet: Fleet, seconds: float = 10.0) -> list[str]:
        """What a fleet has left, when it had some seconds to go."""
        until = time.monotonic() + seconds
        while True:
            processes = [f"process {pid} {command[:80]}" for pid, command in fleet.processes().items()]
            found = processes + sorted(_leftovers() - self._there)
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.2)

    def segments(self) -> int:
        """How many files of shared memory there are more now."""
        return len([path for path in _leftovers() - self._there if path.startswith("/dev/shm/")])


def _leftovers() -> set[str]:
    """Shared memory, and what vLLM's processes, engine actors and Ray leave among temporary files."""
    folder = tempfile.gettempdir()
    ours = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|weightsync-\d+-[0-9a-f]+|weightsync-[0-9a-f]{10}")
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} | {
        f"{folder}/{name}" for name in os.listdir(folder) if ours.fullmatch(name)
    }
