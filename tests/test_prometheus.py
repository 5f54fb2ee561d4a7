"""A real Prometheus scrapes a real service for a minute, while it is updated and an engine is killed and comes back.

Not covered: rules and dashboards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleets import Fleet, engine_pid, wait_until
from weightsync.errors import WeightSyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3"
SECONDS = 60.0
COUNTERS = '{__name__=~"weightsync_.+_(total|count|sum|bucket)"}'


class Prometheus:
    """One that scrapes this service every second."""

    def __init__(self, folder: Path, target: str) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            pytest.skip("prometheus is not installed (Debian has it in the package prometheus)")
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        folder.mkdir()
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            f"scrape_configs: [{{job_name: weightsync, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        self._url, self.log = f"http://{address}/api/v1/query", folder / "log"
        command = [
            binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}",
            f"--web.console.templates={folder}", f"--web.console.libraries={folder}",
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Every series of an instant query: labels, value."""
        answer = httpx.get(self._url, params={"query": query}, timeout=10).json()
        assert answer["status"] == "success", answer
        return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]


@contextlib.contextmanager
def scraping(folder: Path, url: str) -> Iterator[Prometheus]:
    prometheus = Prometheus(folder, url.removeprefix("http://"))
    try:
        yield prometheus
    finally:
        prometheus.process.terminate()
        prometheus.process.wait(20)


def require_phases_in_logs(fleet: Fleet, update_id: str) -> None:
    """Of the last update: lines of JSON by the controller, and by the engine with its ordinal."""
    text = "".join(log.read_text(errors="replace") for log in fleet.logs.glob("worker-*.err"))
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"time"')]
    phases = {(line.get("engine"), line["phase"]) for line in lines if line.get("update_id") == update_id and "phase" in line}
    assert {(None, "admit"), (None, "receive"), (None, "commit"), (0, "apply"), (0, "verify"), (0, "resume")} <= phases


def test_every_scrape_of_a_minute_succeeds_and_no_counter_falls(checkpoint: Any, tensors: Any, tmp_path: Path) -> None:
    fleet = Fleet(checkpoint(KIND, 1), tmp_path / "home", 1, ["--log=json"]).ready()
    try:
        with scraping(tmp_path / "prometheus", fleet.url) as prometheus, fleet.client(bucket_bytes=60_000) as sync:
            weights = tensors(KIND, 1), tensors(KIND, 2)
            sync.sync_weights(weights[0])
            began, killed, committed, failed = time.monotonic(), False, 1, 0
            while time.monotonic() - began < SECONDS:
                if not killed and time.monotonic() - began > SECONDS / 3:
                    os.kill(engine_pid(fleet, 0), signal.SIGKILL)
                    killed = True
                try:
                    sync.sync_weights(weights[committed % 2], timeout_seconds=20)
                    committed += 1
                except WeightSyncError:
                    failed += 1
                time.sleep(0.2)
            wait_until(lambda: sync.status().ready == 1, 90, "the engine's coming back")
            sync.sync_weights(weights[0])
            time.sleep(2.5)  # for the last scrape
            window = f"[{int(time.monotonic() - began) + 5}s]"
            assert [value for _, value in prometheus.ask(f"min_over_time(up{window})")] == [1], "a scrape failed"
            ((_, scrapes),) = prometheus.ask(f"count_over_time(up{window})")
            assert scrapes >= 0.8 * SECONDS
            resets = prometheus.ask(f"resets({COUNTERS}{window})")
            assert len(resets) > 100 and [labels for labels, count in resets if count] == []
            ((_, counted),) = prometheus.ask('weightsync_updates_total{outcome="committed"}')
            assert counted >= committed + 1 > 5 and failed > 0
            ((_, deaths),) = prometheus.ask(f'max_over_time(weightsync_engines{{state="dead"}}{window})')
            assert deaths == 1, "the scrapes saw it dead"
            assert prometheus.ask('weightsync_engine_version{engine="0"}')[0][1] == sync.status().committed_version
            require_phases_in_logs(fleet, sync.engines()[0].update_id or "")
    finally:
        assert fleet.stop() == 0
