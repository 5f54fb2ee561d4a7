"""The real API over fleets that are made up, on a port of its own, and what their metrics say; for the page and for who asks at random.

The controller is a stand-in. Not covered: a real fleet (`test_seen_on_fleet.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.service import until
from tests.test_api import Controller
from weightsync.api import app as api
from weightsync.api.examples import CHECK, CONTRACT
from weightsync.codec import encode
from weightsync.errors import ApplyFailed, DeadlineExceeded, WeightSyncError
from weightsync.metrics import Recorder
from weightsync.place import Retained
from weightsync.protocol import EngineState, EngineStatus, EngineVerdict, FleetStatus, UpdateState, UpdateStatus

TOKEN = "right-token"
#: The phases of an update of 16 GB, seconds; `commit` has those from pause on in it.
SECONDS = {"admit": 0.03, "receive": 1.1, "pause": 0.012, "apply": 0.42, "verify": 0.16, "resume": 0.02, "commit": 0.65}
CHECKS = {"slots_weight": 412, "adopted": 12, "refreshed": 3}


@dataclass
class Fleet:
    """What a stand-in controller knows; also the book that gauges are set from (`metrics.Book`)."""

    status: FleetStatus
    updates: tuple[UpdateStatus, ...] = ()  # newest first
    more_metrics: str = ""

    @property
    def engines(self) -> dict[int, EngineStatus]:
        return {engine.engine: engine for engine in self.status.engines}

    @property
    def committed_version(self) -> int | None:
        return self.status.committed_version

    @property
    def rewinds(self) -> int:
        return self.status.rewinds

    @property
    def ready(self) -> int:
        return self.status.ready

    @property
    def current(self) -> None:
        return None

    def behind(self, engine: EngineStatus) -> int | None:
        return self.status.staleness(engine.version)

    def metrics(self) -> str:
        """As the controller would say it."""
        recorder = Recorder()
        recorder.build("0.1.0")
        for update in reversed(self.updates):
            recorder.ended(update)
        recorder.fleet(self)
        return recorder.text() + self.more_metrics


def serving(ordinal: int, version: int = 120, ago: float = 12.0) -> EngineStatus:
    return EngineStatus(
        ordinal, EngineState.SERVING, version, f"u-{version}", f"http://10.0.0.{ordinal + 1}:8000", "policy", 1, "0.33.0",
        committed_unix_seconds=time.time() - ago, slots={"weight": 399, "derived": 13}, memory={"staging": 0, "rollback": 16 << 30},
    )  # fmt: skip


def update(version: int, engines: int, ago: float, slower: float = 1.0, **more: Any) -> UpdateStatus:
    seconds = {phase: took * slower for phase, took in SECONDS.items()}
    total = seconds["admit"] + seconds["receive"] + 0.3 + seconds["commit"]
    own = {phase: took for phase, took in seconds.items() if phase not in ("admit", "commit")}
    verdicts = tuple(
        EngineVerdict(ordinal, True, version, EngineState.SERVING, 0.61 * slower, own, CHECKS if version % 3 else {"slots_weight": 412})
        for ordinal in range(engines)
    )
    now = time.time()
    known: dict[str, Any] = {"verdicts": verdicts, "seconds": seconds, "ended_unix_seconds": now - ago}
    return UpdateStatus(f"{version:032x}", version, UpdateState.COMMITTED, 399, 16_381_470_720, now - ago - total, **{**known, **more})


def fleet_of(count: int) -> Fleet:
    """So many engines that serve, behind twelve updates; before the first where there is none."""
    if not count:
        return Fleet(FleetStatus("default", None, 0, (), None))
    updates = tuple(update(version, count, 12 + 30 * (120 - version), 1 + 0.15 * (version % 4)) for version in range(120, 108, -1))
    engines = tuple(serving(ordinal) for ordinal in range(count))
    kept = replace(engines[0], retained=Retained("u-120", 120, 0, 1, "h", 16_381_470_720, "u"))
    return Fleet(FleetStatus("default", 120, count, (kept, *engines[1:]), updates[0]), updates)


def failed_fleet() -> Fleet:
    """Eight engines in as many states, behind an update that failed in one of them, one that was aborted, and under the next."""
    made = fleet_of(8)
    no_room = ApplyFailed("no room for 524288000 bytes on cuda:0", engine=3, update_id="u-121", phase="apply", hint="See its log").to_dict()
    late = DeadlineExceeded("not all bytes had arrived after 60 s: engine 5 had 17 of 399 tensors", hint="Sync again").to_dict()
    states: dict[int, dict[str, Any]] = {
        2: {"state": EngineState.SERVING, "version": 118, "pinned": "eval"},
        3: {"state": EngineState.QUARANTINED, "version": None, "reason": "apply_failed", "failed": no_room},
        4: {"state": EngineState.PAUSED, "reason": "paused", "paused": True},
        5: {"state": EngineState.DEAD, "reason": "deadline_exceeded", "version": 119, "failed": late},
        6: {"state": EngineState.PENDING, "version": None, "reason": "starting", "url": "", "workers": 0, "committed_unix_seconds": None},
        7: {"state": EngineState.ASLEEP, "version": 117, "reason": "asleep"},
    }
    engines = tuple(replace(engine, **states.get(engine.engine, {})) for engine in made.status.engines)
    before = made.updates[0]
    broken = replace(
        before,
        verdicts=tuple(
            EngineVerdict(3, False, None, EngineState.QUARANTINED, 0.4, {"pause": 0.01, "apply": 0.3}, {"faults_lost": 2}, error=no_room)
            if verdict.engine == 3 else verdict for verdict in before.verdicts
        ),
    )  # fmt: skip
    now = time.time()
    aborted = UpdateStatus("a" * 32, 121, UpdateState.ABORTED, 399, 16_381_470_720, now - 70, now - 9, {"admit": 0.03}, error=late)
    under_way = UpdateStatus("b" * 32, 121, UpdateState.RECEIVING, 399, 16_381_470_720, now - 1, None, {"admit": 0.04})
    name = "weightsync_logprob_mismatch_mean"
    series = [f'{name}{{engine="{ordinal}"}} 0.00{ordinal}4\n' for ordinal in range(3)]
    gauges = f"# HELP {name} What is to come.\n# TYPE {name} gauge\n{''.join(series)}"
    status = FleetStatus("default", 120, 2, engines, under_way, rewinds=1)
    return Fleet(status, (under_way, aborted, broken, *made.updates[1:10]), gauges)


class Answering(Controller):
    """Answers of a fleet that a test may change."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.show(fleet)

    def show(self, fleet: Fleet) -> None:
        """Be this fleet from now on."""
        self.answers |= {
            "status": encode(fleet.status),
            "updates": encode(fleet.updates),
            "metrics": fleet.metrics(),
            "contract": CONTRACT,
            "check": CHECK,
        }

    def fail(self, error: WeightSyncError) -> None:
        """Have the controller be gone."""
        self.answers |= {"status": error, "metrics": error}


@contextmanager
def served(controller: Controller, root_path: str = "", port: int = 0) -> Iterator[str]:
    """The API on this machine, in a thread, mounted below a root path; its URL, that included, without a slash at its end."""
    app: Any = api.build(controller, lambda: TOKEN, min_ready=1, max_request_bytes=1 << 16, control_seconds=5.0)
    if root_path:
        app = Starlette(routes=[Mount(root_path, app)])
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), 20)
        (bound,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{bound.getsockname()[1]}{root_path}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
