"""Every metric by name, and the recorder that the controller holds.

An own registry per recorder (nothing global), base units, no tensor name or
update id in a label; `engine` is an ordinal. A fault in recording is logged and
never reaches an update.

Gauges of an engine go with it. Counters are the controller's own, so they go on over restarts
of an engine, and stay when it has left: one of that ordinal that comes later goes on with them.
A new controller begins at zero.

Not covered: metrics of vLLM itself, and of the trainer.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weightsync.errors import DigestMismatch, HeldBack, WeightSyncError
from weightsync.protocol import (
    PROTOCOL_VERSION,
    EngineState,
    EngineStatus,
    EngineVerdict,
    Mismatch,
    Observation,
    Phase,
    ProbeReport,
    UpdateState,
    UpdateStatus,
)

logger = logging.getLogger(__name__)

_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
#: Where there is one for each engine and phase: 64 engines are some 6,000 series.
_FEW_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)
#: What became of slots in an update, and the count in a verdict's `checks` that says so.
_DRIFT = {
    "adopted": "adopted",
    "refreshed": "refreshed",
    **{fault: f"faults_{fault}" for fault in ("lost", "anonymous", "moved", "changed_layout", "scalar")},
}


class Limits(Protocol):
    """What engines were off by when they were probed last, and may be, nats (`fleet.compared.Baselines`)."""

    @property
    def last(self) -> Mapping[tuple[int, Any], float]: ...

    def baseline(self, engine: int, against: Any) -> float | None: ...

    def limit(self, engine: int, against: Any) -> float: ...


class Book(Protocol):
    """What gauges are set from (`fleet.ledger.Ledger`)."""

    engines: dict[int, EngineStatus]
    committed_version: int | None
    rewinds: int

    @property
    def ready(self) -> int: ...

    @property
    def current(self) -> Any: ...

    def behind(self, engine: EngineStatus) -> int | None: ...


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
        self._known: set[int] = set()  # engines whose counters are there
        self._make_counters(registry=self._registry)
        self._make_gauges(registry=self._registry)
        self._make_engine_gauges(registry=self._registry)

    def _make_counters(self, **new: Any) -> None:
        self._updates = Counter("weightsync_updates", "Updates that ended.", ["outcome"], **new)
        self._refused = Counter("weightsync_refused_updates", "Updates refused before any byte moved.", ["reason"], **new)
        self._phase = Histogram(
            "weightsync_update_phase_seconds", "Time of each phase of committed updates.", ["phase"], buckets=_SECONDS_BUCKETS, **new
        )
        self._lag = Histogram(
            "weightsync_publish_lag_seconds", "From a trainer's begin to the commit of its update.", buckets=_SECONDS_BUCKETS, **new
        )
        self._engine_phase = Histogram(
            "weightsync_engine_phase_seconds", "Time of phases in engines that committed.", ["engine", "phase"], buckets=_FEW_BUCKETS, **new
        )
        self._pause = Histogram(
            "weightsync_engine_pause_seconds", "Time an engine generated nothing for an update.", ["engine"], buckets=_FEW_BUCKETS, **new
        )
        self._drift = Counter(
            "weightsync_drift_slots",
            "Slots of a storage contract that updates have moved, and what became of them.",
            ["engine", "what"],
            **new,
        )
        self._mismatches = Counter("weightsync_digest_mismatches", "Updates that ended as an engine got bytes that were not sent.", **new)
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
        self._bytes = Counter("weightsync_sent_bytes", "Bytes of the tensors of committed updates.", **new)
        self._seen = Counter("weightsync_observed_tokens", "Sampled tokens that trainers have told of.", ["engine", "behind"], **new)
        self._probes = Counter("weightsync_probes", "Probes of an engine behind commits, and how they ended.", ["engine", "outcome"], **new)
        self._probe = Histogram("weightsync_probe_seconds", "Time of a probe, of all engines at once.", buckets=_SECONDS_BUCKETS, **new)

    def _make_gauges(self, **new: Any) -> None:
        self._build = Gauge("weightsync_build_info", "Constant 1.", ["version", "protocol"], **new)
        self._committed = Gauge("weightsync_committed_version", "Version the fleet has committed; -1 before the first.", **new)
        self._rewinds = Gauge("weightsync_rewinds", "How often the fleet has gone back to an earlier version.", **new)
        self._states = Gauge("weightsync_engines", "Engines by state.", ["state"], **new)
        self._ready = Gauge("weightsync_ready_engines", "Engines that serve the committed version; pinned ones don't count.", **new)
        self._pinned = Gauge("weightsync_pinned_engines", "Engines that are held at a version and left out of updates.", **new)
        self._in_progress = Gauge("weightsync_update_in_progress", "1 while an update is under way.", **new)
        self._last = Gauge("weightsync_last_commit_timestamp_seconds", "Unix time of the last commit; 0 before the first.", **new)
        self._last_bytes = Gauge("weightsync_last_broadcast_bytes", "Bytes of the tensors of the last committed update.", **new)
        self._last_rate = Gauge(
            "weightsync_last_broadcast_bytes_per_second", "Those bytes by the time that the slowest engine took to receive them.", **new
        )
        self._committed.set(-1)
        for outcome in (UpdateState.COMMITTED, UpdateState.ABORTED):
            self._updates.labels(str(outcome))  # from 0 on, so that the first one shows as a rise

    def _make_engine_gauges(self, **new: Any) -> None:
        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"weightsync_{name}", about, ["engine", *labels], **new)

        self._workers = gauge("engine_workers", "vLLM workers of an engine; 0 while it starts.")
        self._version = gauge("engine_version", "Version an engine holds; -1 if none.")
        self._behind = gauge("engine_staleness_updates", "Updates committed since the one that an engine holds; left out if it holds none.")
        self._age = gauge("engine_staleness_seconds", "Time since an engine committed last; left out before its first.")
        self._silence = gauge("engine_silence_seconds", "Time that an engine's workers have owed an answer; 0 if none is owed.")
        self._slots = gauge("contract_slots", "Slots of an engine's storage contract, by class.", "class")
        self._retained = gauge("retained_bytes", "Host memory that an engine keeps for engines that come later.")
        self._staging = gauge("staging_bytes", "Memory in which an engine holds an update beside its weights, or keeps for the next.")
        self._rollback = gauge("rollback_bytes", "Host memory of the update that an engine comes back to; 0 if it is the retained one.")
        self._difference = gauge(
            "observed_difference_nats", "Mean |log p_trainer - log p_rollout| of an engine's tokens of late.", "behind"
        )
        self._kl = gauge("observed_kl_nats", "Mean of an estimator of KL(rollout || trainer) on the same tokens.", "behind", "estimator")
        self._off = gauge("probe_difference_nats", "How far an engine's answers to fixed prompts were off in the last probe.", "against")
        self._baseline = gauge("probe_baseline_nats", "How far they were off in its first commits; left out before those.", "against")
        self._limit = gauge("probe_limit_nats", "How far they may be off.", "against")
        self._named = gauge("probe_named", "1 if the last probe found the fault in this engine, 0 if it probed it and did not.")
        self._of_engines = (
            self._workers, self._version, self._behind, self._age, self._silence, self._slots,
            self._retained, self._staging, self._rollback,
        )  # fmt: skip

    @_never_fails
    def build(self, version: str) -> None:
        self._build.labels(version, str(PROTOCOL_VERSION)).set(1)

    @_never_fails
    def refused(self, error: WeightSyncError) -> None:
        self._refused.labels(error.code).inc()

    @_never_fails
    def rejoined(self, outcome: str, verdict: EngineVerdict | None = None, error: WeightSyncError | None = None) -> None:
        """Count an engine that got its weights from another: `committed`, `failed`, or `gave_way` to a trainer.

        Args:
            verdict: how it came out, if it got so far.
            error: what ended it before.
        """
        self._rejoins.labels(outcome).inc()
        self._mismatches.inc(_differed(error.to_dict() if error else None, verdict))
        if verdict is not None:
            self._verdict(verdict)

    @_never_fails
    def ended(self, update: UpdateStatus) -> None:
        """Count an update that committed or aborted."""
        self._updates.labels(str(update.state)).inc()
        self._mismatches.inc(_differed(update.error, *update.verdicts))
        for verdict in update.verdicts:
            self._verdict(verdict)
        if update.state == UpdateState.COMMITTED:
            self._committed_one(update)

    def _committed_one(self, update: UpdateStatus) -> None:
        ended = update.ended_unix_seconds or 0
        self._bytes.inc(update.nbytes)
        self._last.set(ended)
        self._lag.observe(max(0.0, ended - update.began_unix_seconds))
        for phase, seconds in update.seconds.items():
            self._phase.labels(phase).observe(seconds)
        self._last_bytes.set(update.nbytes)
        # The workers' own time, where they told it: the controller's has their meeting in it, and its looks every so often.
        received = [v.seconds[Phase.RECEIVE] for v in update.verdicts if v.committed and Phase.RECEIVE in v.seconds]
        if seconds := max(received, default=update.seconds.get(Phase.RECEIVE, 0.0)):
            self._last_rate.set(update.nbytes / seconds)

    def _verdict(self, verdict: EngineVerdict) -> None:
        engine, checks = str(verdict.engine), verdict.checks
        if verdict.committed:
            self._pause.labels(engine).observe(verdict.pause_seconds)
            for phase, seconds in verdict.seconds.items():
                self._engine_phase.labels(engine, phase).observe(seconds)
        for what, count in _DRIFT.items():
            self._drift.labels(engine, what).inc(checks.get(count, 0))
        if tries := checks.get("second_tries", 0):
            self._tries.labels("committed" if verdict.committed else "failed").inc(tries)
        self._held_back.inc((verdict.error or {}).get("code") == HeldBack.code)
        for outcome in ("ended", "kept"):
            self._in_flight.labels(outcome).inc(checks.get(f"requests_{outcome}", 0))
        self._rollbacks.inc(checks.get("rolled_back", 0))

    @_never_fails
    def fleet(self, book: Book) -> None:
        """Set the gauges from the ledger."""
        engines = list(book.engines.values())
        self._committed.set(-1 if book.committed_version is None else book.committed_version)
        self._rewinds.set(book.rewinds)
        self._ready.set(book.ready)
        self._pinned.set(sum(bool(e.pinned) for e in engines))
        self._in_progress.set(int(book.current is not None))
        for state in EngineState:
            self._states.labels(str(state)).set(sum(e.state == state for e in engines))
        for gauge in self._of_engines:
            gauge.clear()
        for engine in engines:
            self._engine(engine, book.behind(engine))

    def _engine(self, engine: EngineStatus, behind: int | None) -> None:
        ordinal = str(engine.engine)
        if engine.engine not in self._known:
            self._known.add(engine.engine)
            for what in _DRIFT:
                self._drift.labels(ordinal, what)  # from 0 on, so that the first one shows as a rise
        self._workers.labels(ordinal).set(engine.workers)
        self._version.labels(ordinal).set(-1 if engine.version is None else engine.version)
        if behind is not None:
            self._behind.labels(ordinal).set(behind)
        if engine.committed_unix_seconds is not None:
            self._age.labels(ordinal).set(max(0.0, time.time() - engine.committed_unix_seconds))
        self._silence.labels(ordinal).set(engine.silence_seconds)
        for kind, count in engine.slots.items():
            self._slots.labels(ordinal, kind).set(count)
        self._retained.labels(ordinal).set(engine.retained.nbytes if engine.retained else 0)
        self._staging.labels(ordinal).set(engine.memory.get("staging", 0))
        self._rollback.labels(ordinal).set(engine.memory.get("rollback", 0))

    @_never_fails
    def observed(self, told: Observation) -> None:
        """Count what a trainer has told."""
        for mean in told.engines:
            self._seen.labels(str(mean.engine), mean.behind).inc(mean.tokens)

    @_never_fails
    def probed(self, engine: int | None = None, outcome: str = "", seconds: float | None = None) -> None:
        """Count how the probe of an engine ended, as a code; or how long a probe took."""
        if engine is not None:
            self._probes.labels(str(engine), outcome).inc()
        if seconds is not None:
            self._probe.observe(seconds)

    @_never_fails
    def mismatch(self, observed: Sequence[Mismatch], limits: Limits, probe: ProbeReport | None) -> None:
        """Set the gauges of trainers' samples and of the last probe."""
        for gauge in (self._difference, self._kl, self._off, self._baseline, self._limit, self._named):
            gauge.clear()
        for mean in observed:
            self._difference.labels(str(mean.engine), mean.behind).set(mean.difference)
            self._kl.labels(str(mean.engine), mean.behind, "k1").set(mean.k1)
            self._kl.labels(str(mean.engine), mean.behind, "k3").set(mean.k3)
        for (engine, against), value in limits.last.items():
            self._off.labels(str(engine), against).set(value)
            self._limit.labels(str(engine), against).set(limits.limit(engine, against))
            if (baseline := limits.baseline(engine, against)) is not None:
                self._baseline.labels(str(engine), against).set(baseline)
            if probe is not None:
                self._named.labels(str(engine)).set(engine in probe.named)

    def text(self) -> str:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry).decode()


def _differed(error: dict[str, Any] | None, *verdicts: EngineVerdict | None) -> bool:
    """Whether an update, or an engine's part in it, ended since bytes arrived that were not sent."""
    errors = [error, *(verdict.error for verdict in verdicts if verdict is not None)]
    return any(error["code"] == DigestMismatch.code for error in errors if error is not None)
