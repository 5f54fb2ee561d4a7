"""Real processes ended by real signals: what is left, what is adopted, what catches up."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fleets import Fleet, answers, engine_pid, processes_of, wait_until
from weightsync.errors import EngineDied, NoEngineReady, WeightSyncError
from weightsync.protocol import EngineState

pytestmark = pytest.mark.engine

KIND = "qwen3"
LAYER = ("model.layers.0.*",)


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _sockets() -> set[str]:
    """What vLLM's processes and engine actors leave in the folder for temporary files."""
    return {
        name
        for name in os.listdir(tempfile.gettempdir())
        if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|weightsync-\d+-[0-9a-f]+", name)
    }


def _refuses(url: str) -> bool:
    port = int(url.rsplit(":", 1)[1])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_a_killed_serve_is_adopted_and_ctrl_c_then_leaves_nothing(checkpoint: Any, tensors: Any, cold: Any, tmp_path: Path) -> None:
    segments = _shared_memory()
    first = Fleet(checkpoint(KIND, 1), tmp_path / "home").ready()
    with first.client() as sync:
        sync.sync_weights(tensors(KIND, 2), version=41)
        engine = wait_until(lambda: (e := sync.engines()[0]).retained and e, 5, "what it keeps")
    first.stop(signal.SIGKILL)
    assert first.processes(), "the fleet lives on"

    began = time.monotonic()
    second = Fleet(checkpoint(KIND, 1), tmp_path / "home").ready()
    assert time.monotonic() - began < 15, "adopting starts no engine"
    with second.client() as sync:
        assert sync.engines()[0] == engine
        assert sync.status().committed_version == 41
        assert answers(sync, 0) == cold(KIND, 2)
        assert sync.sync_weights(tensors(KIND, 1)).version == 42
        assert answers(sync, 0) == cold(KIND, 1)

    third = Fleet(checkpoint(KIND, 1), tmp_path / "home")
    assert third.stop(0) == 2 and "is served by process" in third.log.read_text()

    assert second.stop(signal.SIGINT) == 0
    assert wait_until(lambda: not second.processes(), 5, "no process is left")
    assert _refuses(second.url) and _refuses(engine.url)
    assert _shared_memory() <= segments


@pytest.mark.slow
def test_other_settings_do_not_adopt_and_stop_ends_a_left_fleet(checkpoint: Any, tmp_path: Path) -> None:
    segments = _shared_memory()
    first = Fleet(checkpoint(KIND, 1), tmp_path / "home").ready()
    first.stop(signal.SIGKILL)
    other = Fleet(checkpoint(KIND, 2), tmp_path / "home")
    assert other.process.wait(30) == 2
    assert "engine.model: the running fleet has" in other.log.read_text()
    assert first.processes(), "a refused serve must leave the fleet alone"
    stop = [sys.executable, "-m", "weightsync.cli", "stop", "--state_dir", str(tmp_path / "home")]
    assert subprocess.run(stop, capture_output=True, text=True, timeout=60).stdout.strip() == "stopped"
    assert wait_until(lambda: not first.processes(), 5, "no process is left")
    assert wait_until(lambda: _shared_memory() <= segments, 5, "no shared memory is left")


@pytest.mark.slow
def test_a_fleet_outlives_its_serve_where_it_shall_and_only_the_same_settings_adopt_it(
    checkpoint: Any, tensors: Any, cold: Any, tmp_path: Path
) -> None:
    """On a Ray that was there before other settings took the engines over, and nobody was told."""
    leave = "--leave_fleet=true"
    first = Fleet(checkpoint(KIND, 1), tmp_path / "home", flags=[leave]).ready()
    with first.client() as sync:
        sync.sync_weights(tensors(KIND, 2), version=41)
        engine = sync.engines()[0]
    assert first.stop(signal.SIGTERM) == 0
    assert not _refuses(engine.url), "the engine serves on"

    # By its address it is a Ray that was there before: another folder, which knows nothing of this fleet.
    logs = first.logs.parent.parent
    address = (logs / "ray_current_cluster").read_text().strip()
    own = first.home / "default"
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": (own / "ray_token").read_text().strip(), "WEIGHTSYNC_API__TOKEN": first.token}
    there = [f"--ray.address={address}", leave]
    other = Fleet(checkpoint(KIND, 1), tmp_path / "apart", flags=[*there, "--sync.caches=retain"], env=env)
    assert other.process.wait(60) == 2
    assert "sync.caches: the running fleet has 'reset', asked for 'retain' (engine 0)" in other.log.read_text()
    assert not _refuses(engine.url), "a refused serve must leave the fleet alone"

    second = Fleet(checkpoint(KIND, 1), tmp_path / "apart", flags=there, env=env).ready()
    with second.client() as sync:
        assert (sync.status().committed_version, sync.engines()[0].update_id) == (41, engine.update_id)
    assert second.stop(signal.SIGTERM) == 0

    third = Fleet(checkpoint(KIND, 1), tmp_path / "home").ready()
    with third.client() as sync:
        assert sync.sync_weights(tensors(KIND, 1)).version == 42
        assert answers(sync, 0) == cold(KIND, 1)
    assert third.stop(signal.SIGTERM) == 0
    assert wait_until(lambda: not third.processes(), 5, "no process is left")


@pytest.mark.slow
def test_a_start_that_failed_leaves_the_logs_that_it_names_and_no_process(checkpoint: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint(KIND, 1), broken)
    (broken / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "qwen3"}')
    fleet = Fleet(broken, tmp_path / "home")
    try:
        said, _ = fleet.process.communicate(timeout=120)
        assert fleet.process.returncode == 1
        assert said == f"weightsync starting; controller and engines log to {fleet.logs}\n"
        assert any("NoSuchModel" in file.read_text(errors="replace") for file in fleet.logs.glob("worker-*"))
        assert wait_until(lambda: not fleet.processes(), 5, "no process is left")
    finally:
        shutil.rmtree(fleet.logs.parent.parent, ignore_errors=True)


@pytest.mark.slow
def test_signals_during_start_leave_nothing(checkpoint: Any, tmp_path: Path) -> None:
    segments = _shared_memory()
    for number, wait_for in ((signal.SIGTERM, "ray.log"), (signal.SIGINT, "fleet.json")):
        fleet = Fleet(checkpoint(KIND, 1), tmp_path / f"home-{number}")
        wait_until((tmp_path / f"home-{number}" / "default" / wait_for).exists, 60, wait_for)
        assert fleet.stop(number) == 0
        assert wait_until(lambda f=fleet: not f.processes(), 10, "no process is left")
    assert wait_until(lambda: _shared_memory() <= segments, 5, "no shared memory is left")


@pytest.mark.slow
def test_dead_engines_and_controllers_come_back(checkpoint: Any, tensors: Any, cold: Any, tmp_path: Path) -> None:
    segments, sockets = _shared_memory(), _sockets()
    fleet = Fleet(checkpoint(KIND, 1), tmp_path / "home", engines=2).ready()
    try:
        with fleet.client() as sync:
            version = sync.sync_weights(tensors(KIND, 1)).version
            pid = engine_pid(fleet, 1)
            os.kill(pid, signal.SIGKILL)
            # At once: the update is refused by name, before anything changed.
            with pytest.raises(WeightSyncError) as caught:
                sync.sync_weights(tensors(KIND, 2))
            assert isinstance(caught.value, EngineDied) and caught.value.engine == 1 and caught.value.hint
            assert answers(sync, 0) == cold(KIND, 1)
            assert sync.status().committed_version == version
            # It restarts by itself, and serves nothing until it has got the committed version from the other.
            pending = wait_until(lambda: (e := sync.engines()[1]).state == EngineState.PENDING and e, 90, "the restart")
            assert pending.version is None
            with pytest.raises(NoEngineReady):
                sync.generate([1, 2], engine=1)
            assert "engine_pending" in fleet.get("/readyz").json()["reasons"]
            back = wait_until(lambda: (e := sync.engines()[1]).state == EngineState.SERVING and e, 90, "its weights")
            assert (back.version, back.update_id) == (version, sync.engines()[0].update_id)
            assert answers(sync, 1) == cold(KIND, 1)
            sync.sync_weights(tensors(KIND, 2))
            assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 2)

            # The one that keeps the bytes, those of a partial update among them, gets them back itself: they lie in shared memory.
            version = sync.sync_weights(tensors(KIND, 1), scope=LAYER).version
            said = answers(sync, 1)
            assert said not in (cold(KIND, 1), cold(KIND, 2))
            kept = wait_until(lambda: (k := sync.engines()[0].retained) and k.version == version and k, 5, "what is kept")
            assert kept.nbytes >= sum(tensor.nbytes for tensor in tensors(KIND, 2).values())
            os.kill(engine_pid(fleet, 0), signal.SIGKILL)
            wait_until(lambda: sync.engines()[0].state != EngineState.SERVING, 20, "its death")
            wait_until(lambda: sync.status().ready == 2, 90, "its weights")
            assert answers(sync, 0) == said

            controller = next(p for p, c in fleet.processes().items() if c.startswith("ray::Controller"))
            os.kill(controller, signal.SIGKILL)
            status = wait_until(lambda: _status(sync), 30, "a new controller")
            assert status.committed_version == version and status.ready == 2
            sync.sync_weights(tensors(KIND, 1))
            assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 1)
    finally:
        assert fleet.stop() == 0
    # Not even what the engine that was killed had made.
    assert wait_until(lambda: _shared_memory() <= segments and _sockets() <= sockets, 5, "nothing is left")


def _status(sync: Any) -> Any:
    try:
        status = sync.status()
    except WeightSyncError:
        return None
    return status if status.ready == 2 else None


def test_serve_with_a_bad_setting_says_which_key(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightsync.cli", "serve", "--engine.model", str(tmp_path), "--engine.count", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout
    assert f"engine.model: got '{tmp_path}', want a folder that holds config.json" in done.stderr
    assert "engine.count: got 'none', want a valid integer" in done.stderr


def test_serve_that_cannot_write_its_state_says_so(checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "weightsync.cli", "serve", f"--engine.model={checkpoint(KIND, 1)}", "--api.port=0"]
    done = subprocess.run([*command, f"--state_dir={tmp_path / 'file'}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"state_dir: got '{tmp_path / 'file'}', want a folder to write in" in done.stderr


@pytest.mark.slow
def test_demo_of_three_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightsync.cli", "demo", "--steps", "3", "--engines", "1", "--json", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["ok"] is True and result["cold_equal"] is True and result["steps"] == 3 and result["engines"] == 1
    assert len(result["reward"]) == 3 and result["max_logprob_gap"] < 0.1
    assert [u["version"] for u in result["updates"]] == sorted({u["version"] for u in result["updates"]})
    assert all(u["bytes"] > 1_000_000 and u["pause_seconds"] > 0 for u in result["updates"])
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000


@pytest.mark.slow
def test_ctrl_c_during_the_demo_leaves_nothing(tmp_path: Path) -> None:
    segments = _shared_memory()
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "weightsync.cli", "demo", "--steps", "50", "--engines", "1", "--plain", "--out", str(out)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    assert demo.stdout is not None
    line = next(line for line in demo.stdout if line.startswith("step 1 "))  # in the middle of training
    assert "reward" in line
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=60)
    assert demo.returncode not in (0, None)
    assert wait_until(lambda: not processes_of(str(out)), 10, "no process is left")
    assert wait_until(lambda: _shared_memory() <= segments, 5, "no shared memory is left")
