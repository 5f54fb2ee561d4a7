"""Which settings a fleet that is adopted must have been started with, and a fleet's end where its actors can't be told of it.

Not covered: adopting a running fleet, and ending one (`test_lifecycle.py`).
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsync import config
from weightsync.fleet import cluster, engine_actor, own_ray, watching
from weightsync.fleet.fixed import FIXED, fixed

OTHERS: dict[str, Any] = {
    "sync.caches": "retain", "sync.stage": "host", "sync.rollback": "host", "sync.verify_stored": True, "sync.local": "host",
    "sync.retain_folder": "/tmp",
}  # fmt: skip


@pytest.mark.parametrize("key", OTHERS)
def test_what_engines_were_started_with_can_not_be_another_when_a_fleet_is_adopted(key: str, tmp_path: Path) -> None:
    """An adopted fleet went on without what its new `serve` had asked for, and nobody was told."""
    (tmp_path / "config.json").write_text("{}")
    usual, other = (config.load({"engine.model": str(tmp_path), **more}) for more in ({}, {key: OTHERS[key]}))
    assert fixed(usual)["sync"] != fixed(other)["sync"]


def test_no_setting_that_an_engine_reads_is_forgotten() -> None:
    parts = (Path(module.__file__).read_text() for module in (engine_actor, watching))
    read = set(re.findall(r"_settings\.sync\.(\w+)", "".join(parts)))
    assert read - set(FIXED["sync"]) == {"apply_timeout_seconds", "control_timeout_seconds"}


def test_ray_ends_also_where_actors_can_not_be_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    one = cluster.Cluster(config.load({"engine.model": str(tmp_path), "state_dir": str(tmp_path)}))
    ended: list[Path] = []

    async def stop_actors(namespace: str) -> None:
        raise ConnectionError("Ray's directory is gone")

    async def run() -> None:
        one._joining, one._owned = asyncio.create_task(asyncio.sleep(0)), True
        await one.stop()

    monkeypatch.setattr(cluster, "_stop_actors", stop_actors)
    monkeypatch.setattr(own_ray, "end", lambda home, process, keep_logs: ended.append(home))
    with pytest.raises(ConnectionError):
        asyncio.run(run())
    assert ended == [one.home]
    cluster.Cluster(one.settings)._lock.close()  # and the next serve may begin


@pytest.mark.parametrize(
    ("leave", "up", "foreign", "failed", "left"),
    [
        (False, True, False, False, False),
        (True, False, False, False, True),
        (True, False, False, True, False),  # a start that failed: what it has begun is of no use
        (True, True, False, True, True),  # those that were there, or have come up, serve on
        (False, False, True, True, True),  # other settings have started them: another's
    ],
)
def test_a_fleet_is_left_where_it_shall_outlive_its_serve_and_where_it_is_anothers(
    leave: bool, up: bool, foreign: bool, failed: bool, left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    one = cluster.Cluster(config.load({"engine.model": str(tmp_path), "state_dir": str(tmp_path), "leave_fleet": leave}))
    ended: list[str] = []

    async def stop_actors(namespace: str) -> None:
        ended.append(namespace)

    async def run() -> None:
        one._joining, one._owned, one._up, one._foreign = asyncio.create_task(asyncio.sleep(0)), True, up, foreign
        await one.stop(failed)

    monkeypatch.setattr(cluster, "_stop_actors", stop_actors)
    monkeypatch.setattr(own_ray, "end", lambda home, process, keep_logs: ended.append("Ray"))
    asyncio.run(run())
    assert ended == ([] if left else ["weightsync-default", "Ray"])
    cluster.Cluster(one.settings)._lock.close()


@pytest.mark.parametrize("keep", [False, True])
def test_logs_go_with_the_fleet_and_stay_when_it_failed(keep: bool, tmp_path: Path) -> None:
    """`serve` told whom a start had failed to see the logs, and took them away."""
    (tmp_path / "config.json").write_text("{}")
    one = cluster.Cluster(config.load({"engine.model": str(tmp_path), "state_dir": str(tmp_path)}))
    logs = Path(one.logs)
    logs.mkdir(parents=True)
    (logs / "worker.err").write_text("no such kernel")
    command = [sys.executable, "-c", "import time; time.sleep(60)", f"--temp-dir={one._temp}"]
    one._ray_process, one._owned = subprocess.Popen(command, start_new_session=True), True
    state = {"ray_pid": one._ray_process.pid, "temp_dir": str(one._temp), "settings": fixed(one.settings)}
    (one.home / "fleet.json").write_text(json.dumps(state))
    asyncio.run(one.stop(failed=keep))
    assert one._ray_process.returncode == -signal.SIGTERM and logs.is_dir() == keep
    shutil.rmtree(one._temp, ignore_errors=True)


def test_of_a_cluster_that_was_there_the_logs_are_rays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    one = cluster.Cluster(config.load({"engine.model": str(tmp_path), "state_dir": str(tmp_path), "ray.address": "10.0.0.1:6379"}))
    assert "on each node" in one.logs and str(one._temp) not in one.logs
