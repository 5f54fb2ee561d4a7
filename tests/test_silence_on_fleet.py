"""Two real engines, of which a vLLM worker, and then an engine core, is stopped (SIGSTOP) while the engine's actor answers.

Not covered: a kernel that never ends, which looks the same from outside (a GPU).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fleets import PROMPTS, Fleet, answers, engine_pid, wait_until
from tests.test_metrics import samples
from weightsync import WeightSync
from weightsync.errors import NoEngineReady, WeightSyncError
from weightsync.protocol import EngineState, EngineStatus

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3"
SILENCE, CONTROL = 6.0, 4.0


@pytest.fixture(scope="module")
def two(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = ["--sync.require=1", f"--engine.silence_seconds={SILENCE}", f"--sync.control_timeout_seconds={CONTROL}"]
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("silence"), 2, [*flags, "--engine.max_model_len=2048"]).ready()
    yield running
    assert running.stop() == 0


@pytest.fixture
def sync(two: Fleet, tensors: Any) -> Iterator[WeightSync]:
    with two.client(bucket_bytes=60_000) as client:
        client.sync_weights(tensors(KIND, 1))
        wait_until(lambda: client.status().ready == 2, 30, "both engines")
        yield client


def core_of(fleet: Fleet, ordinal: int) -> psutil.Process:
    """vLLM's engine core, and under it the worker; by descent, since they can't always change what `ps` shows."""
    (core,) = _children(psutil.Process(engine_pid(fleet, ordinal)))
    return core


def _children(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if "resource_tracker" not in " ".join(child.cmdline())]


def of(sync: WeightSync, ordinal: int) -> EngineStatus:
    return sync.status().engines[ordinal]


def test_of_two_workers_the_one_is_named_that_does_not_answer(checkpoint: Any, tensors: Any, tmp_path: Path) -> None:
    flags = ["--engine.tensor_parallel_size=2", "--engine.silence_seconds=3"]
    fleet = Fleet(checkpoint(KIND, 1), tmp_path / "fleet", flags=flags).ready()
    try:
        with fleet.client(bucket_bytes=60_000) as sync:
            sync.sync_weights(tensors(KIND, 1))
            named = []
            for worker in _children(core_of(fleet, 0)):
                time.sleep(1)  # it is idle: a step would keep the other one in its collective
                worker.suspend()
                try:
                    wait_until(lambda: of(sync, 0).state == EngineState.SILENT, 15, "its silence")
                    named.append(of(sync, 0).silent_workers)
                    with pytest.raises(WeightSyncError, match="no engine that answers"):
                        sync.sync_weights(tensors(KIND, 2))
                finally:
                    worker.resume()
                wait_until(lambda: sync.status().ready == 1, 10, "its answer")
            assert sorted(named) == [(0,), (1,)]
            assert sync.sync_weights(tensors(KIND, 2)).verdicts[0].committed
    finally:
        assert fleet.stop() == 0


def require_back(sync: WeightSync, ordinal: int, version: int, want: Any) -> None:
    """It serves the committed version, from the engine that keeps it, with no restart and no trainer."""
    wait_until(lambda: sync.status().ready == 2, 30, "that the engine is back")
    engine = of(sync, ordinal)
    assert (engine.state, engine.reason, engine.version, engine.silent_workers) == (EngineState.SERVING, "", version, ())
    assert answers(sync, ordinal) == want


def test_a_stopped_worker_takes_its_engine_out_until_it_goes_on(
    two: Fleet, sync: WeightSync, tensors: Any, cold: Any, tmp_path: Path
) -> None:
    core = core_of(two, 1)
    (worker,) = _children(core)
    url, headers = f"{of(sync, 1).url}/inference/v1/generate", {"authorization": f"Bearer {two.token}"}
    body = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 2000, "ignore_eos": True}, "model": "policy"}
    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(httpx.post, url, json=body, headers=headers, timeout=120)
        time.sleep(0.3)
        began = time.monotonic()
        worker.suspend()
        try:
            wait_until(lambda: of(sync, 1).state == EngineState.SILENT, SILENCE + 10, "its silence")
            noticed = time.monotonic() - began
            assert noticed > SILENCE - 1
            assert (of(sync, 1).reason, sync.status().ready) == ("workers_silent", 1)
            for refused in (runs.result(30), httpx.post(url, json=body, headers=headers, timeout=5)):
                error = WeightSyncError.from_dict(refused.json()["error"])
                assert refused.status_code == 503 and error.retryable and "workers_silent" in error.message
            assert {sync.generate(PROMPTS[0], max_tokens=2).engine for _ in range(4)} == {0}
            with pytest.raises(NoEngineReady, match="1 silent"):
                sync.generate(PROMPTS[0], engine=1)
            ready = two.get("/readyz")
            assert (ready.status_code, ready.json()["reasons"], ready.json()["engines"]["1"]) == (200, ["engine_silent"], "silent")
            found = samples(httpx.get(f"{two.url}/metrics", timeout=10).text)
            assert found['weightsync_engine_silence_seconds{engine="1"}'] >= SILENCE and found['weightsync_engines{state="silent"}'] == 1
            assert [group["labels"]["__meta_weightsync_ready"] for group in two.get("/v1/targets").json()] == ["true", "false"]
            assert "engine 1: its workers do not answer, for" in shown(two, tmp_path)

            began = time.monotonic()
            report = sync.sync_weights(tensors(KIND, 2))
            took = time.monotonic() - began
            assert [(v.engine, v.committed) for v in report.verdicts] == [(0, True), (1, False)] and report.sent_again == ()
            assert (report.verdicts[1].error or {})["code"] == "workers_silent" and took < CONTROL
            assert answers(sync, 0) == cold(KIND, 2)
        finally:
            worker.resume()
    require_back(sync, 1, report.version, cold(KIND, 2))
    assert core.is_running() and worker.is_running()
    assert all(v.committed for v in sync.sync_weights(tensors(KIND, 1)).verdicts)
    print(f"silent after {noticed:.1f} s; the other engine's update took {took:.2f} s")


def test_a_core_that_stops_just_before_an_update_costs_one_sending_and_stays_out(
    two: Fleet, sync: WeightSync, tensors: Any, cold: Any
) -> None:
    core = core_of(two, 0)
    core.suspend()
    try:
        report = sync.sync_weights(tensors(KIND, 2))
        assert [(v.engine, v.committed) for v in report.verdicts] == [(0, False), (1, True)]
        assert [sent.engine for sent in report.sent_again] == [0]
        until = time.monotonic() + 4
        while time.monotonic() < until:
            assert of(sync, 0).state in (EngineState.DEAD, EngineState.SILENT), "its heartbeats go on"
            time.sleep(0.1)
        assert (of(sync, 0).state, of(sync, 0).reason) == (EngineState.SILENT, "workers_silent")
        report = sync.sync_weights(tensors(KIND, 1))
        assert [v.committed for v in report.verdicts] == [False, True] and report.sent_again == ()
    finally:
        core.resume()
    require_back(sync, 0, report.version, cold(KIND, 1))
    assert core.is_running()


def shown(fleet: Fleet, folder: Path) -> str:
    """What `weightsync status` prints of a fleet of which not every engine serves."""
    file = folder / "token"
    file.write_text(fleet.token)
    line = [sys.executable, "-m", "weightsync.cli", "status", "--url", fleet.url, "--token-file", str(file)]
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 3, done.stderr
    return done.stdout
