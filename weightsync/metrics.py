"""Every metric by name, and the recorder that an actor holds.

An own registry per recorder (nothing global), base units, no tensor name or
update id in a label; `engine` is an ordinal. A fault in recording is logged and
never reaches an update.

Not covered: metrics of vLLM itself, and of the trainer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weightsync.errors import HeldBack, WeightSyncError
from weightsync.protocol import PROTOCOL_VERSION, EngineState, EngineStatus, UpdateState, UpdateStatus

logger = logging.getLogger(__name__)

_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


def _never_fails(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("a metric could not be recorded in %s", method.__name__)

    return guarded


class Recorder:
    """The controller's metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        new: dict[str, Any] = {"registry": self._registry}
        self._build = Gauge("weightsync_build_info", "Constant 1.", ["version", "protocol"], **new)
        self._updates = Counter("weightsync_updates", "Updates that ended.", ["outcome"], **new)
        self._refused = Counter("weightsync_refused_updates", "Updates refused before any byte moved.", ["reason"], **new)
        self._phase = Histogram(
            "weightsync_update_phase_seconds", "Time of each phase of committed updates.", ["phase"], buckets=_SECONDS_BUCKETS, **new
        )
        self._pause = Histogram(
            "weightsync_engine_pause_seconds", "Time an engine generated nothing for an update.", buckets=_SECONDS_BUCKETS, **new
        )
        self._tries = Counter(
            "weightsync_second_tries", "Applies that an engine tried once more, and how the engine came out.", ["outcome"], **new
        )
        self._rollbacks = Counter("weightsync_rollbacks", "Engines that an update failed in and that went back to their version.", **new)
        self._held_back = Counter("weightsync_held_back_engines", "Engines not written, since too few others would have served.", **new)
        self._in_flight = Counter(
            "weightsync_requests_at_commit", "Requests in flight that an engine ended, or kept behind its deadline.", ["outcome"], **new
        )
        self._rejoins = Counter(
            "weightsync_rejoins", "Engines brought to the committed version by another one, and how it ended.", ["outcome"], **new
        )
        self._retained = Gauge("weightsync_retained_bytes", "Host memory that an engine keeps for such.", ["engine"], **new)
        self._bytes = Counter("weightsync_sent_bytes", "Bytes of the tensors of committed updates.", **new)
        self._committed = Gauge("weightsync_committed_version", "Version the fleet has committed; -1 before the first.", **new)
        self._rewinds = Gauge("weightsync_rewinds", "How often the fleet has gone back to an earlier version.", **new)
        self._version = Gauge("weightsync_engine_version", "Version an engine holds; -1 if none.", ["engine"], **new)
        self._states = Gauge("weightsync_engines", "Engines by state.", ["state"], **new)
        self._ready = Gauge("weightsync_ready_engines", "Engines that serve the committed version; pinned ones don't count.", **new)
        self._pinned = Gauge("weightsync_pinned_engines", "Engines that are held at a version and left out of updates.", **new)
        self._in_progress = Gauge("weightsync_update_in_progress", "1 while an update is under way.", **new)
        self._last = Gauge("weightsync_last_commit_timestamp_seconds", "Unix time of the last commit; 0 before the first.", **new)
        self._committed.set(-1)
        self._shown: set[str] = set()  # engines with gauges of their own

    @_never_fails
    def build(self, version: str) -> None:
        self._build.labels(version, str(PROTOCOL_VERSION)).set(1)

    @_never_fails
    def refused(self, error: WeightSyncError) -> None:
        self._refused.labels(error.code).inc()

    @_never_fails
    def rejoined(self, outcome: str) -> None:
        """Count an engine that got its weights from another: `committed`, `failed`, or `gave_way` to a trainer."""
        self._rejoins.labels(outcome).inc()

    @_never_fails
    def ended(self, update: UpdateStatus) -> None:
        """Count an update that committed or aborted."""
        self._updates.labels(str(update.state)).inc()
        for verdict in update.verdicts:
            if verdict.committed:
                self._pause.observe(verdict.pause_seconds)
            if tries := verdict.checks.get("second_tries", 0):
                self._tries.labels("committed" if verdict.committed else "failed").inc(tries)
            self._held_back.inc((verdict.error or {}).get("code") == HeldBack.code)
            for outcome in ("ended", "kept"):
                self._in_flight.labels(outcome).inc(verdict.checks.get(f"requests_{outcome}", 0))
            self._rollbacks.inc(verdict.checks.get("rolled_back", 0))
        if update.state == UpdateState.COMMITTED:
            self._bytes.inc(update.nbytes)
            self._last.set(update.ended_unix_seconds or 0)
            for phase, seconds in update.seconds.items():
                self._phase.labels(phase).observe(seconds)

    @_never_fails
    def fleet(self, engines: Iterable[EngineStatus], committed: int | None, rewinds: int, ready: int, in_progress: bool) -> None:
        """Set the gauges from the ledger."""
        engines = list(engines)
        for gone in self._shown - {str(engine.engine) for engine in engines}:
            self._version.remove(gone)
            self._retained.remove(gone)
        self._shown = {str(engine.engine) for engine in engines}
        self._committed.set(-1 if committed is None else committed)
        self._rewinds.set(rewinds)
        self._ready.set(ready)
        self._pinned.set(sum(bool(e.pinned) for e in engines))
        self._in_progress.set(int(in_progress))
        for state in EngineState:
            self._states.labels(str(state)).set(sum(e.state == state for e in engines))
        for engine in engines:
            self._version.labels(str(engine.engine)).set(-1 if engine.version is None else engine.version)
            self._retained.labels(str(engine.engine)).set(engine.retained.nbytes if engine.retained else 0)

    def text(self) -> str:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry).decode()
