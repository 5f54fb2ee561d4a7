"""A fleet under updates, requests and kills for as long as is asked for: one command, one JSON file, and an exit status.

    python -m benchmarks.soak [--minutes 60] [--seed 1] [--out FILE] [--folder FOLDER]

`weightsync serve` as a process with two CPU engines of a tiny checkpoint (`sync.require=1`), a trainer as a process that
updates all the time, threads that ask all the time (`soak_load`), and kills, scaling and a rejoin in rounds (`soak_actions`), each waited
for until all engines serve again what the fleet holds. Between rounds lies a calm time, in which memory can be seen to grow or not.

It fails when a request is lost, or fails though nothing was done to who should answer it; when an update fails though nothing
was done to anybody; when an engine's version falls, or one does not come back; when memory, files or threads of a process grow with
updates; and when anything is left behind in the end. Everything else is counted. SIGTERM ends it early, with its results.

Not covered: GPUs, several machines, and weights that are wrong though everybody says that they are right (`tests/test_survivors.py`,
`tests/test_failure_table.py`), but for a comparison of the engines' answers in the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_flight import Trainer
from benchmarks.soak_actions import ACTIONS, Blow
from benchmarks.soak_load import Load, Request
from benchmarks.soak_watch import Before, Watch, strays
from tests import checkpoints
from tests.fleets import Fleet, answers
from weightsync.errors import UpdateConflict
from weightsync.protocol import EngineState

ENGINES = 2
#: What a process may grow by with every update, by what is fitted.
GOALS = {"mb_per_update": 0.1, "files_per_update": 0.02, "threads_per_update": 0.02}
_RECOVERY_SECONDS = 180.0
#: For a trainer to end: an update's deadline, and some more.
_TRAINER_SECONDS = 90.0
#: A status may be some updates old when a blow falls.
_FURTHER = 3
_QUIET_SECONDS = (2.0, 6.0)
_SHARE_OF_CALM = 0.1
_RESULTS = Path(__file__).parent / "results"


class Soak:
    """One run; the `Site` of actions.

    Args:
        folder: for checkpoints, state and logs.
        seed: of the order of actions and of who is hit.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._chance, self._folder = random.Random(seed), folder
        self._weights = tuple(checkpoints.build("qwen3", folder / f"checkpoint-{seed}", seed) for seed in (1, 2))
        self.before = Before()
        self.faults: list[str] = []
        self.blows: list[Blow] = []
        self._trainers: list[Trainer] = []
        self._over = threading.Event()
        try:
            self._serve(0)
            self._port = int(self.fleet.url.rsplit(":", 1)[1])
            self._train()
            self.watch = Watch(lambda: self.fleet, lambda: self._trainers[-1].process.pid, lambda: self.committed)
            self.wait(lambda: self.committed >= 1, 60, "a first update")
            self.load = Load(self.fleet.url, self.fleet.token, ENGINES, lambda: self.watch.status)
        except BaseException:
            for trainer in self._trainers:
                trainer.kill()
            self.fleet.stop()
            raise

    def _serve(self, port: int) -> None:
        flags = ["--sync.require=1", f"--api.port={port}"]
        root = str(Path(__file__).resolve().parent.parent)
        self.fleet = Fleet(self._weights[0], self._folder / "fleet", ENGINES, flags, {"PYTHONPATH": root})
        self.fleet.ready()

    def _train(self) -> None:
        self._trainers.append(Trainer(self.fleet, *self._weights))

    @property
    def updates(self) -> list[dict[str, Any]]:
        """Of all trainers, in order."""
        return [update for trainer in self._trainers for update in list(trainer.updates)]

    @property
    def committed(self) -> int:
        return sum("code" not in update for update in self.updates)

    # --- what actions use -----------------------------------------------------------------------

    def choose(self, engines: list[int]) -> int:
        return self._chance.choice(engines)

    def kill_serve(self) -> None:
        self.fleet.stop(signal.SIGKILL)
        self._serve(self._port)

    def kill_trainer(self) -> None:
        self._trainers[-1].kill()
        self._train()

    def end_trainer(self) -> None:
        if (code := self._ended_trainer()) != 0:
            self.faults.append(f"a trainer that was told to end did so with {code}; see its log")

    def _ended_trainer(self) -> int | str:
        """Let the trainer end its update; its exit status. One that does not end says to its log where it stands, and is killed."""
        trainer = self._trainers[-1]
        try:
            return trainer.close(_TRAINER_SECONDS)
        except subprocess.TimeoutExpired:
            trainer.process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            trainer.kill()
            return f"a kill after {_TRAINER_SECONDS:.0f} s"

    def start_trainer(self) -> None:
        self._train()

    def scale(self, engines: int) -> None:
        def done() -> bool:
            try:
                return bool(sync.scale(engines))
            except UpdateConflict:  # it may take longer to end than the service waits
                return False

        with self.fleet.client() as sync:
            self.wait(done, _RECOVERY_SECONDS, f"scaling to {engines} engines")

    # --- the run --------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Rounds of actions with calm before each, until the time is up or SIGTERM comes."""
        signal.signal(signal.SIGTERM, lambda *_: self._over.set())
        timer = threading.Timer(seconds, self._over.set)
        timer.daemon = True
        timer.start()
        order = list(ACTIONS)
        while not self._over.wait(seconds * _SHARE_OF_CALM):
            for action in order:
                if self._over.is_set():
                    break
                held = self._held()
                blow = action(self)
                self.blows.append(blow)
                self._recover(blow, held + _FURTHER)
                self._over.wait(self._chance.uniform(*_QUIET_SECONDS))
            self._chance.shuffle(order)
        self._end()

    def _held(self) -> int:
        status = self.watch.status
        return -1 if status is None or status.committed_version is None else status.committed_version

    def _recover(self, blow: Blow, version: int) -> None:
        """Wait until every engine serves at least this version."""
        if self.wait(lambda: self._all_serve(version), _RECOVERY_SECONDS, f"recovery from {blow.action} at engines {sorted(blow.engines)}"):
            blow.until = time.monotonic()
            if left := strays(self.fleet):
                time.sleep(2.0)  # they end with their actor, not before it
                left = sorted(set(left) & set(strays(self.fleet)))
            blow.notes += left
            self.faults += [f"behind {blow.action} vLLM's process {one} is left" for one in left]

    def _all_serve(self, version: int) -> bool:
        status = self.watch.status
        able = (EngineState.SERVING, EngineState.UPDATING)
        there = status is not None and len(status.engines) == ENGINES
        return status is not None and there and all(e.state in able and (e.version or -1) >= version for e in status.engines)

    def wait(self, condition: Any, seconds: float, what: str) -> bool:
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                self.faults.append(f"{what} did not come about in {seconds:.0f} s; last seen: {self.watch.status}")
                return False
            time.sleep(0.1)
        return True

    def _end(self) -> None:
        """Stop asking, then training; engines must hold what the fleet holds, and answer alike."""
        self.load.close()
        self.segments = self.before.segments()
        if (code := self._ended_trainer()) != 0:
            self.faults.append(f"the trainer ended with {code}; see its log")
        self.watch.close()
        with self.fleet.client() as sync:
            status = sync.status()
            held = {e.engine: (str(e.state), e.version) for e in status.engines}
            if any(one != ("serving", status.committed_version) for one in held.values()):
                self.faults.append(f"in the end the fleet holds {status.committed_version} and engines hold {held}")
            elif answers(sync, 0) != answers(sync, 1):
                self.faults.append("in the end engines of one version answer differently")

    def close(self) -> None:
        """End everything, and see what is left; Ray's logs, which end with it, are kept beside the others."""
        self._trainers[-1].process.kill()
        self.watch.close()
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(self.fleet.logs, self._folder / "logs", dirs_exist_ok=True)
        if (code := self.fleet.stop()) != 0:
            self.faults.append(f"serve ended with {code}")
        self.faults += [f"left behind: {left}" for left in self.before.left(self.fleet)]

    # --- what came of it ------------------------------------------------------------------------

    def _explained(self, request: Request) -> bool:
        """Whether something was done to who should have answered."""
        if request.result == "lost":
            return False
        blows = [blow for blow in self.blows if blow.covers(request.began, request.ended)]
        if request.engine is None:  # any engine will do: it fails only when nobody says where they are
            return any(blow.service for blow in blows)
        return any(request.engine in blow.engines for blow in blows)

    def told(self) -> dict[str, Any]:
        """The results, with everything that was wrong in `faults`."""
        failed = [one for one in self.load.account.requests if one.result != "answered"]
        unexplained = [one for one in failed if not self._explained(one)]
        errors = [update for update in self.updates if "code" in update]
        bad = [u for u in errors if not any(blow.updates and blow.covers(u["began"], u["ended"]) for blow in self.blows)]
        lives = sorted((life.fitted() for life in self.watch.lives.values()), key=lambda one: -one["updates"])
        faults = [*self.faults, *self.watch.faults, *self.load.account.faults]
        faults += [f"request {asdict(one)} though nothing was done to who should answer it" for one in unexplained[:20]]
        faults += [f"update {one} though nothing was done to anybody" for one in bad[:20]]
        for life in lives:
            faults += [f"{life['role']} grows: {key} {life[key]}" for key, goal in GOALS.items() if (life.get(key) or 0.0) > goal]
        codes = Counter((u["code"], u["retryable"]) for u in errors)
        return {
            "requests": {**self.load.account.summed(), "unexplained": len(unexplained)},
            "updates": {
                "committed": self.committed, "sent_again": sum(len(u.get("lost", ())) for u in self.updates),
                "seconds": _spread(self.updates), "failed": len(errors), "unexplained": len(bad),
                "errors": [_error(update, self.blows) for update in errors][:100],
                "codes": [{"code": code, "retryable": again, "count": count} for (code, again), count in sorted(codes.items())],
            },
            "actions": {name: _done(name, self.blows) for name in sorted({blow.action for blow in self.blows})},
            "blows": [_blow(blow) for blow in self.blows],
            "processes": lives,
            "segments_in_the_end": self.segments,
            "goals": GOALS,
            "faults": faults,
        }  # fmt: skip


def _spread(updates: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Median and longest seconds of the updates that committed, by phase."""
    found = [update["seconds"] for update in updates if "seconds" in update]
    phases = sorted({phase for seconds in found for phase in seconds})
    of = {phase: [seconds[phase] for seconds in found if phase in seconds] for phase in phases}
    return {phase: [round(statistics.median(took), 3), round(max(took), 3)] for phase, took in of.items()}


def _error(update: dict[str, Any], blows: list[Blow]) -> dict[str, Any]:
    """An update that failed: with what, how long it took, and behind which blow."""
    behind = next((blow.action for blow in reversed(blows) if blow.covers(update["began"], update["ended"])), None)
    told = {key: update[key] for key in ("code", "retryable", "message")}
    return {**told, "seconds": round(update["ended"] - update["began"], 1), "behind": behind}


def _blow(blow: Blow) -> dict[str, Any]:
    took = None if blow.until is None else round(blow.until - blow.at, 1)
    return {"action": blow.action, "engines": sorted(blow.engines), "recovered_seconds": took, "notes": blow.notes}


def _done(action: str, blows: list[Blow]) -> dict[str, int]:
    """How often it was done, and how often all engines served again behind it."""
    found = [blow for blow in blows if blow.action == action]
    return {"done": len(found), "recovered": sum(blow.until is not None for blow in found)}


def table(result: dict[str, Any]) -> str:
    """The results, for reading."""
    requests, updates = result["requests"], result["updates"]
    lines = [
        f"requests: {', '.join(f'{requests[key]} {key}' for key in ('sent', 'answered', 'retryable', 'failed', 'lost', 'unexplained'))}",
        f"updates: {updates['committed']} committed ({updates['sent_again']} times sent again), "
        f"{updates['failed']} failed ({updates['unexplained']} unexplained)",
        "actions: " + ", ".join(f"{name} {count['recovered']} of {count['done']}" for name, count in result["actions"].items()),
    ]
    lines += [f"{blow['action']} {blow['engines']}: {blow['recovered_seconds']} s {'; '.join(blow['notes'])}" for blow in result["blows"]]
    lines += [
        f"{life['role']}: {life['mb_per_update']} MB per update over {life['updates']}"
        for life in result["processes"]
        if life["mb_per_update"]
    ]
    return "\n".join([*lines, *(f"FAULT: {fault}" for fault in result["faults"])])


def main() -> int:
    """Run, write the file, print the summary; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=_RESULTS / "soak-cpu.json")
    parser.add_argument("--folder", type=Path, help="kept, for logs; a temporary one when not given")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        soak = Soak(folder, given.seed)
        began = time.monotonic()
        try:
            soak.run(given.minutes * 60)
        finally:
            soak.close()
    result = {
        "device": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "minutes": round((time.monotonic() - began) / 60, 1), "seed": given.seed, "engines": ENGINES, **soak.told(),
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
