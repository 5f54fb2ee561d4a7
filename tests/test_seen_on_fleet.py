"""What operators see of two real engines, and do with them: metrics by engine, contracts, pauses from the command line.

Not covered: pauses under other policies than the default (`test_pausing.py`).
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fleets import PROMPTS, Fleet, answers, engine_pid, order_fault, wait_until
from tests.test_metrics import require_promtool_content, samples
from weightsync import WeightSync
from weightsync.client import Lazy
from weightsync.codec import decode
from weightsync.errors import NoEngineReady, Refused, WeightSyncError
from weightsync.protocol import ContractAnswer, EngineState

pytestmark = pytest.mark.engine

KIND = "qwen3"


@pytest.fixture(scope="module")
def sync(fleet: Fleet, tensors: Any) -> Iterator[WeightSync]:
    with fleet.client(bucket_bytes=60_000) as client:
        client.sync_weights(tensors(KIND, 1))
        yield client


def scraped(fleet: Fleet) -> dict[str, float]:
    return samples(httpx.get(f"{fleet.url}/metrics", timeout=10).text)


def test_metrics_tell_each_engines_own(fleet: Fleet, sync: WeightSync, tensors: Any) -> None:
    before = time.time()
    sync.sync_weights(tensors(KIND, 1))
    wait_until(lambda: all((e.committed_unix_seconds or 0) > before for e in sync.engines()), 10, "the next heartbeat")
    nbytes = sum(tensor.nbytes for tensor in tensors(KIND, 1).values())
    found = scraped(fleet)
    assert found["weightsync_last_broadcast_bytes"] == nbytes and found["weightsync_last_broadcast_bytes_per_second"] > 0
    for ordinal in (0, 1):
        mine = f'engine="{ordinal}"'
        assert found[f"weightsync_engine_staleness_updates{{{mine}}}"] == 0
        assert 0 <= found[f"weightsync_engine_staleness_seconds{{{mine}}}"] < 60
        assert found[f'weightsync_contract_slots{{class="weight",{mine}}}'] > 10
        assert found[f'weightsync_drift_slots_total{{{mine},what="lost"}}'] == 0
        for phase in ("receive", "apply", "verify", "resume"):
            assert found[f'weightsync_engine_phase_seconds_sum{{{mine},phase="{phase}"}}'] > 0
        # One of them keeps it for others as well; that one comes back to it from there.
        kept = found[f"weightsync_rollback_bytes{{{mine}}}"] + found[f"weightsync_retained_bytes{{{mine}}}"]
        assert nbytes <= kept < 2 * nbytes
        # What is staged on the host next comes to lie where the update before this one did, or in a file that is made then.
        assert found[f"weightsync_staging_bytes{{{mine}}}"] in (0, kept)
    assert sync.status().engines[0].slots["weight"] == found['weightsync_contract_slots{class="weight",engine="0"}']


#: Asks until its input ends, a tenth of a second after each answer; prints the seconds that each answer took.
ASK = """
import http.client, select, sys, time
while True:
    began = time.monotonic()
    asked = http.client.HTTPConnection(sys.argv[1], timeout=10)
    asked.request("GET", "/livez")
    assert asked.getresponse().read() == b'{"status":"alive"}'
    asked.close()
    print(time.monotonic() - began, flush=True)
    if select.select([sys.stdin], [], [], 0.1)[0]:
        break
"""


def test_health_answers_within_a_second_all_through_a_long_update(fleet: Fleet, sync: WeightSync, tensors: Any) -> None:
    def slowly(tensor: Any) -> Any:
        time.sleep(0.05)
        return tensor

    lazy = {n: Lazy(t.dtype, t.shape, functools.partial(slowly, t), t.device) for n, t in tensors(KIND, 1).items()}
    # A process of its own: a thread of the trainer's would measure how busy the trainer is.
    asking = subprocess.Popen(
        [sys.executable, "-c", ASK, fleet.url.removeprefix("http://")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert asking.stdout is not None
    try:
        asking.stdout.readline()
        report = sync.sync_weights(lazy)
    finally:
        printed, _ = asking.communicate(timeout=20)
    took = [float(line) for line in printed.split()]
    assert asking.returncode == 0 and report.seconds["total"] > 1
    assert len(took) > 3 and max(took) < 1.0


def test_a_worker_sleeps_behind_a_call_and_leaves_its_core_to_others(fleet: Fleet, sync: WeightSync) -> None:
    workers = [psutil.Process(pid) for pid, command in fleet.processes().items() if "VLLM::Worker" in command]
    workers = workers or [_worker(engine_pid(fleet, ordinal)) for ordinal in (0, 1)]  # where processes can't name themselves
    sync.check()
    before = [sum(worker.cpu_times()[:2]) for worker in workers]
    time.sleep(1.0)
    took = [sum(worker.cpu_times()[:2]) - one for worker, one in zip(workers, before, strict=True)]
    assert len(took) == 2 and max(took) < 0.25, took


def _worker(actor: int) -> psutil.Process:
    """An engine's only worker, by descent."""
    for _ in range(2):
        (child,) = [one for one in psutil.Process(actor).children() if "resource_tracker" not in " ".join(one.cmdline())]
        actor = child.pid
    return psutil.Process(actor)


def test_the_page_is_there_without_the_token(fleet: Fleet, sync: WeightSync) -> None:
    page = httpx.get(fleet.url)
    assert page.status_code == 200 and page.headers["content-security-policy"] and fleet.token not in page.text


def test_promtool_has_nothing_against_what_a_fleet_says(fleet: Fleet, sync: WeightSync) -> None:
    require_promtool_content(httpx.get(f"{fleet.url}/metrics", timeout=10).text)


def test_a_contract_is_told_worker_by_worker(fleet: Fleet, sync: WeightSync) -> None:
    told = fleet.get("/v1/engines/1/contract").json()
    (worker,) = [decode(ContractAnswer, one) for one in told["workers"]]
    assert told["engine"] == 1 and worker.error is None and worker.contract is not None
    assert worker.contract.slots == sync.engines()[1].slots and worker.contract.checks >= 1 and worker.contract.faults == ()
    refused = fleet.get("/v1/engines/7/contract")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "refused")
    assert fleet.get("/v1/engines/0/contract", token="wrong").status_code == 401


def test_a_check_reads_live_weights_while_they_serve_and_names_the_one_that_is_not_what_it_was(
    fleet: Fleet, sync: WeightSync, tensors: Any, fault: Path, tmp_path: Path
) -> None:
    sync.sync_weights(tensors(KIND, 2))
    first = sync.check()
    assert first.ok and first.committed_version == sync.status().committed_version
    for engine in first.engines:
        (worker,) = engine.workers
        assert worker.equal > 3 and worker.slots > 10 and worker.nbytes > 0
        found = worker.equal + worker.first_seen + worker.unreadable
        assert found > 0 and worker.unchanged == 0
    again = sync.check([1]).engines[0].workers[0]
    assert (again.first_seen, again.unchanged) == (0, first.engines[1].workers[0].first_seen)
    order_fault(fault, 1, "check", at=-2)  # the last norm
    try:
        token = tmp_path / "token"
        token.write_text(fleet.token)
        line = [sys.executable, "-m", "weightsync.cli", "check", "--engine", "0", "--url", fleet.url, "--token-file", str(token)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "engine 0, worker 0: model.norm.weight is not what it was" in done.stdout, done
        answered = fleet.post("/v1/check", {}).json()
        assert [(e["ok"], e["workers"][0]["differs"]) for e in answered["engines"]] == [(False, ["model.norm.weight"]), (True, [])]
    finally:
        sync.sync_weights(tensors(KIND, 1))
    assert sync.check().ok, "an update has brought it back"
    with pytest.raises(Refused, match="no engine 9"):
        sync.check([9])


def test_a_paused_engine_generates_nothing_takes_updates_and_goes_on_with_the_newest(
    fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any, tmp_path: Path
) -> None:
    def command(*words: str) -> str:
        file = tmp_path / "token"
        file.write_text(fleet.token)
        line = [sys.executable, "-m", "weightsync.cli", *words, "--url", fleet.url, "--token-file", str(file)]
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    assert command("pause", "0") == "paused: engine 0"
    status = sync.status()
    assert ([e.state for e in status.engines], status.ready) == ([EngineState.PAUSED, EngineState.SERVING], 1)
    with pytest.raises(NoEngineReady, match="0 paused"):
        sync.generate(PROMPTS[0], engine=0)
    assert sync.generate(PROMPTS[0], max_tokens=2).engine == 1

    waits: list[Any] = []
    body = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 4, "temperature": 0.0}, "model": "policy"}
    url, headers = f"{status.engines[0].url}/inference/v1/generate", {"authorization": f"Bearer {fleet.token}"}
    asked = threading.Thread(target=lambda: waits.append(httpx.post(url, json=body, headers=headers, timeout=120)))
    asked.start()
    for seed in (2, 1, 2):
        report = sync.sync_weights(tensors(KIND, seed))
        assert [(v.committed, v.state) for v in report.verdicts] == [(True, EngineState.PAUSED), (True, EngineState.SERVING)]
    assert scraped(fleet)['weightsync_engines{state="paused"}'] == 1
    assert fleet.get("/readyz").json()["reasons"] == ["engine_paused"]
    assert fleet.get("/v1/engines/0/contract").status_code == 200
    assert waits == []

    with pytest.raises(Refused, match="no engine 9"):
        sync.pause([9])
    assert command("resume") == "no engine is paused"
    asked.join(60)
    assert waits[0].status_code == 200 and len(waits[0].json()["choices"][0]["token_ids"]) == 4
    assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 2), "and nothing that it computed before is left"
    assert sync.sync_weights(tensors(KIND, 1)).verdicts[0].state == EngineState.SERVING


@pytest.mark.slow
def test_a_pause_outlives_the_controller_and_counters_outlive_the_engine(checkpoint: Any, tensors: Any, tmp_path: Path) -> None:
    fleet = Fleet(checkpoint(KIND, 1), tmp_path / "home").ready()
    try:
        with fleet.client(bucket_bytes=60_000) as sync:
            sync.sync_weights(tensors(KIND, 1))
            sync.pause()
            os.kill(next(pid for pid, name in fleet.processes().items() if name.startswith("ray::Controller")), signal.SIGKILL)
            wait_until(lambda: states(sync) == ["paused"], 30, "a new controller that has learned of it")
            assert sync.sync_weights(tensors(KIND, 2)).verdicts[0].state == EngineState.PAUSED
            before = scraped(fleet)
            os.kill(engine_pid(fleet, 0), signal.SIGKILL)
            wait_until(lambda: states(sync) == ["dead"], 20, "its death")
            wait_until(lambda: sync.status().ready == 1, 90, "its weights, which it had kept")
            assert not sync.engines()[0].paused, "a pause ends with the process that kept it"
            after = scraped(fleet)
            rising = {key for key in before if key.partition("{")[0].endswith(("_total", "_count", "_sum", "_bucket"))}
            assert {key for key in rising if after.get(key, -1) < before[key]} == set()
            assert after['weightsync_engine_pause_seconds_count{engine="0"}'] == 2, "the update, and its coming back"
            assert "was paused and has restarted" in "".join(log.read_text(errors="replace") for log in fleet.logs.glob("worker-*.err"))
    finally:
        assert fleet.stop() == 0


def states(sync: WeightSync) -> list[str] | None:
    try:
        return [str(engine.state) for engine in sync.engines()]
    except WeightSyncError:
        return None
