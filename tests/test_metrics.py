"""What the controller's metrics say of updates and engines, and that they neither fail an update nor wait for one.

The controller is the real one, over engines that are made up. Not covered: a scrape over HTTP (`test_api.py`), and a
fleet's own numbers (`test_main_job.py`).
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_fd_to_metric_families
from prometheus_client.samples import Sample

from tests.test_controller import Roster, begin, drive
from tests.test_engine_update import Engine
from tests.test_ledger import apply, engine, fleet, request
from tests.workers import weights, without_vllm
from weightsync.codec import encode
from weightsync.errors import DigestMismatch, WeightSyncError
from weightsync.fleet.compared import BASELINE_COMMITS, Baselines
from weightsync.fleet.controller import Controller
from weightsync.fleet.ledger import Update
from weightsync.fleet.reports import Inventory
from weightsync.metrics import Recorder
from weightsync.protocol import (
    EngineState,
    EngineStatus,
    EngineVerdict,
    Manifest,
    Mismatch,
    Observation,
    ProbeReport,
    Retained,
    TensorSpec,
    UpdateState,
    UpdateStatus,
)

KEPT = Retained("u1", 1, 0, 4096, "h", 68, "u1.bytes")
CHECKS = {"adopted": 3, "refreshed": 2, "faults_lost": 1, "slots_weight": 40, "second_tries": 1}


def verdict(ordinal: int, version: int, **more: Any) -> EngineVerdict:
    seconds = {"receive": 0.5, "pause": 0.01, "apply": 0.2, "verify": 0.1, "resume": 0.01}
    return EngineVerdict(ordinal, True, version, EngineState.SERVING, 0.3, seconds, dict(CHECKS), **more)


def samples(text: str) -> dict[str, float]:
    """Every series by its name and labels, as Prometheus names it."""
    found: dict[str, float] = {}
    for family in text_fd_to_metric_families(iter(text.splitlines(keepends=True))):
        for sample in family.samples:
            key = _key(sample)
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def _key(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name


async def scraped(controller: Controller) -> dict[str, float]:
    return samples((await controller.metrics())["value"])


async def one_update(controller: Controller, version: int) -> Any:
    assert "value" in await controller.begin(begin(f"u{version}", version))
    return (await controller.commit(f"u{version}", 5.0))["value"]


class Fleet(Roster):
    """Engines that say of themselves what the test gives them to say, and commit what they are told."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(controller)
        self.say: dict[int, EngineStatus] = {0: engine(0), 1: engine(1)}

    async def refresh(self, *, waited_for: bool = False) -> None:
        for status in self.say.values():
            self._ledger.see(status)

    async def commit(self, update: Update, ordinal: int) -> EngineVerdict:
        version, update_id = update.request.version, update.request.update_id
        slots = {"weight": 40, "scratch": 2}
        memory = {"staging": 0, "rollback": 4096}
        self.say[ordinal] = replace(
            self.say[ordinal],
            state=EngineState.SERVING,
            version=version,
            update_id=update_id,
            committed_unix_seconds=time.time() - 7,
            slots=slots,
            memory=memory,
            retained=KEPT if ordinal == 0 else None,
        )
        return verdict(ordinal, version)


def fleet_of(controller: Controller) -> Fleet:
    made = Fleet(controller)
    controller._roster = made  # type: ignore[assignment]
    return made


# --- what they say ------------------------------------------------------------------------------


def test_an_update_is_told_in_seconds_bytes_and_drift(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Roster) -> None:
        engines = fleet_of(controller)
        assert (await one_update(controller, 1))["state"] == "committed"
        await engines.refresh()
        found = await scraped(controller)
        assert found['weightsync_updates_total{outcome="committed"}'] == 1
        assert (found["weightsync_sent_bytes_total"], found["weightsync_last_broadcast_bytes"]) == (8, 8)
        assert found["weightsync_last_broadcast_bytes_per_second"] == 16, "8 bytes in the half second of the slowest engine"
        assert found["weightsync_publish_lag_seconds_count"] == 1 and 0 < found["weightsync_publish_lag_seconds_sum"] < 5
        assert found['weightsync_update_phase_seconds_sum{phase="apply"}'] == pytest.approx(0.2)
        for ordinal in (0, 1):
            mine = f'engine="{ordinal}"'
            assert found[f'weightsync_engine_phase_seconds_sum{{{mine},phase="receive"}}'] == pytest.approx(0.5)
            assert found[f"weightsync_engine_pause_seconds_sum{{{mine}}}"] == pytest.approx(0.3)
            assert found[f"weightsync_engine_version{{{mine}}}"] == 1
            assert found[f"weightsync_engine_staleness_updates{{{mine}}}"] == 0
            assert 7 <= found[f"weightsync_engine_staleness_seconds{{{mine}}}"] < 12
            drift = {what: found[f'weightsync_drift_slots_total{{{mine},what="{what}"}}'] for what in ("adopted", "refreshed", "lost")}
            assert drift == {"adopted": 3, "refreshed": 2, "lost": 1}
            assert found[f'weightsync_drift_slots_total{{{mine},what="anonymous"}}'] == 0
            assert found[f'weightsync_contract_slots{{class="weight",{mine}}}'] == 40
            assert found[f"weightsync_rollback_bytes{{{mine}}}"] == 4096
            assert found[f"weightsync_staging_bytes{{{mine}}}"] == 0
            assert found[f"weightsync_retained_bytes{{{mine}}}"] == (68 if ordinal == 0 else 0)

    drive(tmp_path, scenario)


def test_counters_only_rise_over_an_engines_restart_and_gauges_of_one_that_left_go(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Roster) -> None:
        engines, before = fleet_of(controller), dict[str, float]()

        async def look() -> dict[str, float]:
            await engines.refresh()
            found = await scraped(controller)
            kinds = ("_total", "_count", "_sum", "_bucket")
            rising = {key: value for key, value in found.items() if key.partition("{")[0].endswith(kinds)}
            assert all(rising.get(key, -1) >= value for key, value in before.items()), "a counter fell, or is gone"
            before.update(rising)
            return found

        await one_update(controller, 1)
        await look()
        engines.say[1] = replace(engines.say[1], state=EngineState.SILENT, silence_seconds=61.5)
        found = await look()
        silence = [found[f'weightsync_engine_silence_seconds{{engine="{ordinal}"}}'] for ordinal in (0, 1)]
        assert silence == [0, 61.5] and found['weightsync_engines{state="silent"}'] == found["weightsync_ready_engines"] == 1
        engines.say[1] = engine(1)  # its process is a new one, which has counted nothing
        found = await look()
        assert found['weightsync_engine_version{engine="1"}'] == -1 and found['weightsync_engines{state="pending"}'] == 1
        gone = [key for key in found if 'engine="1"' in key and "staleness" in key]
        assert gone == [], "it holds nothing that could be stale"
        await one_update(controller, 2)
        assert (await look())['weightsync_drift_slots_total{engine="1",what="adopted"}'] == 6
        del engines.say[1]
        controller._ledger.forget(1)
        found = await look()
        left = {key.partition("{")[0] for key in found if 'engine="1"' in key}
        counters = {"weightsync_drift_slots_total", "weightsync_probes_total"}
        counters |= {f"weightsync_engine_{kind}_seconds_{part}" for kind in ("phase", "pause") for part in ("count", "sum", "bucket")}
        assert {name for name in left if not name.endswith("_created")} == counters

    drive(tmp_path, scenario)


def test_an_engine_that_missed_updates_is_behind_by_as_many_whatever_their_numbers() -> None:
    ledger = fleet(2, require=1)
    held = {}
    for number, version in enumerate((10, 20, 50)):
        update = ledger.admit(request(f"u{number}", version), 0.0)
        apply(ledger, update, True, True)
        held[version] = ledger.engines[0]
    assert [ledger.behind(held[version]) for version in (10, 20, 50)] == [2, 1, 0]
    assert ledger.behind(engine(1)) is None
    back = ledger.admit(replace(request("back", 20), rewind=True), 0.0)
    apply(ledger, back, True, True)
    assert ledger.behind(held[50]) == 1, "what lies before a rewind is behind it, though its number is higher"
    assert ledger.behind(held[20]) == 2 and ledger.behind(ledger.engines[0]) == 0


def test_a_version_that_came_twice_is_one_step_and_who_has_the_first_of_them_is_behind() -> None:
    ledger = fleet(2, require=2)
    apply(ledger, ledger.admit(request("first", 1), 0.0), True, False)
    first = ledger.engines[0]
    ledger.see(replace(engine(1), reason=""))
    apply(ledger, ledger.admit(request("second", 1), 0.0), True, True)
    assert [ledger.behind(first), ledger.behind(ledger.engines[0])] == [1, 0]
    apply(ledger, ledger.admit(request("third", 2), 0.0), True, True)
    assert ledger.behind(first) == 2


@pytest.mark.parametrize("where", ["update", "verdict", "rejoin", "rejoin's verdict"])
def test_bytes_that_were_not_sent_are_counted_once_wherever_they_show(where: str) -> None:
    recorder, error = Recorder(), DigestMismatch("1 tensor differs")
    failed = EngineVerdict(1, False, None, EngineState.QUARANTINED, error=error.to_dict())
    status = UpdateStatus("u", 1, UpdateState.ABORTED, 1, 8, 0.0, 1.0, verdicts=(verdict(0, 1), failed))
    if where == "update":
        recorder.ended(replace(status, error=error.to_dict()))
    elif where == "verdict":
        recorder.ended(status)
    else:
        recorder.rejoined("failed", **({"error": error} if where == "rejoin" else {"verdict": failed}))
    recorder.refused(WeightSyncError("no"))
    assert samples(recorder.text())["weightsync_digest_mismatches_total"] == 1


# --- that they are in nobody's way ---------------------------------------------------------------


def test_a_fault_in_metrics_fails_no_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(controller: Controller, _: Roster) -> None:
        fleet_of(controller)
        for name, value in vars(controller._recorder).items():
            if name.startswith("_") and name not in ("_registry", "_known"):
                setattr(controller._recorder, name, None if not isinstance(value, tuple) else (None,))
        assert (await one_update(controller, 1))["state"] == "committed"
        assert (await controller.begin({}))["error"]["code"] == "manifest_refused"
        controller._ledger.behind = None  # type: ignore[assignment,method-assign]
        controller._show()
        assert "value" in await controller.metrics()

    drive(tmp_path, scenario)
    assert "a metric could not be recorded in ended" in caplog.text and "a metric could not be recorded in fleet" in caplog.text


def test_metrics_answer_while_an_update_is_received_and_applied(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Roster) -> None:
        engines, goes_on = fleet_of(controller), asyncio.Event()
        stock = engines.commit

        async def commit(update: Update, ordinal: int) -> EngineVerdict:
            await goes_on.wait()
            return await stock(update, ordinal)

        engines.commit = commit  # type: ignore[method-assign]
        assert "value" in await controller.begin(begin())
        assert (await asyncio.wait_for(scraped(controller), 1.0))["weightsync_update_in_progress"] == 1
        applied = asyncio.create_task(controller.commit("u1", 5.0))
        while (await controller.update("u1"))["value"]["state"] != "applying":
            await asyncio.sleep(0.005)
        found = await asyncio.wait_for(scraped(controller), 1.0)
        assert found["weightsync_update_in_progress"] == 1 and found["weightsync_committed_version"] == -1
        goes_on.set()
        await applied
        assert (await scraped(controller))["weightsync_update_in_progress"] == 0

    drive(tmp_path, scenario)


def test_metrics_answer_while_a_request_of_very_many_tensors_is_read(tmp_path: Path) -> None:
    manifest = Manifest(tuple(TensorSpec(f"model.layers.{n}.weight", "bfloat16", (64, 64)) for n in range(30_000)))
    plain = begin() | {"manifest": encode(manifest)}

    async def scenario(controller: Controller, _: Roster) -> None:
        engines = fleet_of(controller)
        await controller.start()
        stock, was_read = engines.refresh, asyncio.Event()

        async def refresh(*, waited_for: bool = False) -> None:
            was_read.set()
            await stock()

        engines.refresh = refresh  # type: ignore[method-assign]
        admission, answered = asyncio.create_task(controller.begin(plain)), 0
        while not was_read.is_set():
            assert "value" in await controller.metrics()
            answered += 1
            await asyncio.sleep(0)
        assert answered > 5, "one, if it is read at one go"
        assert "value" in await admission

    drive(tmp_path, scenario)


# --- where the numbers of an engine come from ----------------------------------------------------


def test_an_engine_says_what_its_workers_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    made = Engine(tmp_path)
    before = time.time()

    def status() -> dict[str, Any]:
        return dict(made.actor._describe()["status"])

    assert status()["committed_unix_seconds"] is None and status()["memory"] == {}
    for worker in made.workers:
        worker.begin(weights(1))
    made.core.running = False  # else the stand-in takes the question for a write
    assert "value" in asyncio.run(made.actor.poll())
    assert status()["memory"] == {"staging": 256, "rollback": 0}, "two workers, each with two tensors in 64 bytes"
    assert made.update(1)["committed"]
    assert status()["memory"] == {"staging": 0, "rollback": 256}
    assert before <= status()["committed_unix_seconds"] <= time.time()


def test_slots_are_those_of_the_last_call_that_told_of_them() -> None:
    inventory = Inventory()
    inventory.note([{"checks": {"slots_weight": 3, "slots_scratch": 0, "slots_possibly_derived": 1, "graphs": 2}, "memory": {}}] * 2)
    assert (inventory.slots, inventory.memory) == ({"weight": 6, "scratch": 0}, {})
    inventory.note([{"checks": {"slots_weight": 2, "addresses": 7}, "memory": {}}] * 2)
    assert inventory.slots == {"weight": 4, "scratch": 0}, "a verdict leaves out what it has none of"
    inventory.note([{"checks": {}, "memory": {"staging": 5, "rollback": 1}}, {"checks": {}, "memory": {"staging": 6, "rollback": 0}}])
    assert (inventory.slots, inventory.memory) == ({"weight": 4, "scratch": 0}, {"staging": 11, "rollback": 1})
    inventory.note([{"rank": 0, "contract": None}])
    inventory.note([])
    assert (inventory.slots, inventory.memory) == ({"weight": 4, "scratch": 0}, {"staging": 11, "rollback": 1})


# --- names ----------------------------------------------------------------------------------------


def full_text() -> str:
    """Metrics of a fleet that has seen everything."""
    recorder, ledger = Recorder(), fleet(2, require=1)
    recorder.build("1.2.3")
    update = ledger.admit(request("an-update", 1), 0.0)
    apply(ledger, update, True, True)
    for ordinal in (0, 1):
        more = {"slots": {"weight": 3}, "memory": {"staging": 1}, "committed_unix_seconds": 1.0, "retained": KEPT}
        ledger.see(replace(ledger.engines[ordinal], **more))  # type: ignore[arg-type]
    status = replace(update.status, verdicts=(verdict(0, 1), verdict(1, 1)), seconds={"apply": 1.0})
    recorder.ended(status)
    recorder.rejoined("committed", verdict(1, 1))
    recorder.refused(DigestMismatch("x", update_id="an-update", names=["layers.0.weight"]))
    recorder.fleet(ledger)
    mean, limits = Mismatch(1, "3+", 10, 0.5, -0.5, 0.1, 2.0), Baselines()
    for _ in range(BASELINE_COMMITS):
        limits.judge([0, 1], {"engines": {0: 0.01, 1: 0.01}, "graphs": {0: 0.02}})
    recorder.observed(Observation((mean,), ()))
    recorder.probed(1, "scored")
    recorder.probed(seconds=0.02)
    recorder.mismatch([mean], limits, ProbeReport(1))
    return recorder.text()


LABELS = {
    "engine", "state", "outcome", "reason", "phase", "what", "class", "version", "protocol", "le", "behind", "estimator", "against"
}  # fmt: skip


def test_names_and_labels_keep_to_the_rules() -> None:
    text = full_text()
    for family in text_fd_to_metric_families(iter(text.splitlines(keepends=True))):
        assert re.fullmatch(r"weightsync_[a-z_]+", family.name) and family.documentation.endswith(".")
        assert not re.search(r"_(ms|millis|kb|mb|gb|percent|total|count|sum|bucket)$", family.name), "base units, no type"
        for sample in family.samples:
            assert set(sample.labels) <= LABELS
            assert re.fullmatch(r"\d+", sample.labels.get("engine", "0")), "an ordinal, never an address"
    assert "an-update" not in text and "layers.0" not in text


def require_promtool_content(text: str) -> None:
    """That Prometheus's own tool has nothing against a text of metrics; the test is skipped where the tool is not."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian has it in the package prometheus)")
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_promtool_has_nothing_against_them() -> None:
    require_promtool_content(full_text())
