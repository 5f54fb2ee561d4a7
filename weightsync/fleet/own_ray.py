"""The Ray that `serve` starts for a fleet of its own: its processes, its token, its end, and what is written of it.

Ray runs as processes of its own (a driver's death would take a cluster that it started with `ray.init`), with token
authentication. `<state_dir>/<fleet>/fleet.json` tells of it, so that the next `serve` finds a fleet that one before has left.

Imports no Ray, which reads its token when it is imported.
Not covered: a Ray that was there before (`ray.address`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightsync import config
from weightsync.errors import InternalError
from weightsync.fleet.fixed import fixed
from weightsync.fleet.scratch import clear_shelves

_STOP_SECONDS = 20.0
_GRACE_SECONDS = 5.0


def start(settings: config.Settings, home: Path, temp_dir: Path) -> subprocess.Popen[bytes]:
    """Start it, and write that down at once: whoever comes after a kill at any moment must find it.

    Args:
        settings: with the token.
        home: `<state_dir>/<fleet>`.
        temp_dir: its folder, which is made anew.
    """
    shutil.rmtree(temp_dir, ignore_errors=True)
    temp_dir.mkdir(mode=0o700)
    cpus = settings.ray.num_cpus or int(settings.engine.count * settings.engine.cpus) + 2
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0", "--disable-usage-stats",
        f"--num-cpus={cpus}", f"--object-store-memory={settings.ray.object_store_bytes}",
        "--include-dashboard=false", f"--ray-client-server-port={_free_port()}", f"--temp-dir={temp_dir}",
    ]  # fmt: skip
    with (home / "ray.log").open("wb") as out:
        # A session of its own: Ctrl-C in serve's terminal must not reach Ray before the engines have ended.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            env={**os.environ, **environment(), **token(home)},
        )  # fmt: skip
    state = {"ray_pid": process.pid, "temp_dir": str(temp_dir), "settings": fixed(settings)}
    write_secret(home / "fleet.json", json.dumps(state))
    return process


def started(process: subprocess.Popen[bytes], home: Path, temp_dir: Path) -> str:
    """Wait until it is up; its address.

    Raises:
        InternalError: it has ended, and the last that it said.
    """
    try:
        return address(temp_dir, lambda: process.poll() is None)
    except InternalError as exc:
        log = home / "ray.log"
        raise InternalError(f"{exc.message}: {_tail(log)}", hint=f"See {log}") from None


def state_of(home: Path) -> dict[str, Any] | None:
    """What is written of it; None if nothing is, or nothing that can be read."""
    try:
        return dict(json.loads((home / "fleet.json").read_text()))
    except (OSError, ValueError):
        return None


def address(temp_dir: Path, alive: Callable[[], bool]) -> str:
    """Where a Ray that was started with this folder can be joined; waits while it comes up."""
    where = temp_dir / "ray_current_cluster"
    deadline = time.monotonic() + 60
    while not (where.is_file() and where.read_text().strip()):
        if not alive() or time.monotonic() > deadline:
            raise InternalError("Ray did not start")
        time.sleep(0.05)
    return where.read_text().strip()


def token(home: Path) -> dict[str, str]:
    """Variables by which it asks for a token, and is told it."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": kept_secret(home / "ray_token")}


def environment() -> dict[str, str]:
    """Variables of every process that is part of a Ray with engines."""
    # Ray's handler of failure signals takes SIGTERM from ours and aborts, and its record of calls grows.
    ours = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    return {**ours, "RAY_task_events_report_interval_ms": "0"}


def end(home: Path, process: subprocess.Popen[bytes] | None = None, keep_logs: bool = False) -> bool:
    """End the Ray that a fleet's folder tells of, and every process under it; whether there was one.

    Args:
        home: `<state_dir>/<fleet>`.
        process: the Ray process, if it is a child of this one (it must be reaped).
        keep_logs: until the next fleet of this folder starts.
    """
    state = state_of(home)
    if state is None:
        if process is None:
            return False
        state = {"ray_pid": process.pid, "temp_dir": str(process.args).partition("--temp-dir=")[2].rstrip("']")}
    pid, temp_dir = int(state["ray_pid"]), str(state["temp_dir"])
    was_alive = lives(state)
    deadline = time.monotonic() + _STOP_SECONDS
    if was_alive:
        os.kill(pid, signal.SIGTERM)
        while lives(state) and time.monotonic() < deadline:
            if process is not None:
                process.poll()
            time.sleep(0.05)
    if was_alive or process is not None:
        # Engines follow their actors by themselves, and clean their shared memory up when they are let.
        grace = time.monotonic() + _GRACE_SECONDS
        while _session(pid) and time.monotonic() < grace:
            time.sleep(0.05)
        for left in _session(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
    if process is not None:
        process.wait()
    if not keep_logs:
        shutil.rmtree(temp_dir, ignore_errors=True)
    if "settings" in state:
        clear_shelves(Path(state["settings"]["sync"]["retain_folder"]), home)
    (home / "fleet.json").unlink(missing_ok=True)
    return was_alive


def kept_secret(path: Path) -> str:
    """The secret in a file, made when there is none."""
    if not path.is_file():
        write_secret(path, secrets.token_hex(32))
    return path.read_text().strip()


def write_secret(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        stream.write(text)


def lives(state: dict[str, Any]) -> bool:
    """Whether what is written down lives: the Ray that was started with this folder, not a stranger that got its number."""
    try:
        return str(state["temp_dir"]).encode() in Path(f"/proc/{state['ray_pid']}/cmdline").read_bytes()
    except OSError:
        return False


def _session(leader: int) -> list[int]:
    """Processes whose session is `leader`'s."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] != "Z" and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _tail(path: Path, lines: int = 5) -> str:
    return " | ".join(path.read_text(errors="replace").splitlines()[-lines:])
