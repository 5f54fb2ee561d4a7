"""Start Ray, the controller and the engines, or find those that are there; and take them down.

Ray runs as processes of its own (a driver's death would take a cluster that it
started with `ray.init`), with token authentication. What was started is written
to `<state_dir>/<fleet>/fleet.json`, so that the next `serve` finds a fleet that
a killed one left.

Ray is imported only inside functions: it reads its token when it is imported,
and `Cluster` must have set that before.

Not covered: placement groups, and starting Ray on other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
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
from typing import IO, Any

from pydantic import SecretStr

from weightsync import config
from weightsync.errors import ConfigError, InternalError, ServiceUnreachable, WeightSyncError
from weightsync.fleet.scratch import clear_shelves

logger = logging.getLogger(__name__)

#: Settings that live actors and their Ray were started with, as (section, keys); a fleet can only be adopted with the same.
_FIXED: dict[str, tuple[str, ...]] = {
    "engine": (),
    "ray": (),
    "api": ("host", "max_request_bytes"),
    "sync": ("caches", "stage", "rollback", "verify_stored", "local", "retain_folder", "in_flight", "new_requests"),
}
_STOP_SECONDS = 20.0
_GRACE_SECONDS = 5.0


class Cluster:
    """One fleet's processes, from the side of `serve`.

    Args:
        settings: the service's settings; a token is made and kept when they have none.

    Raises:
        ConfigError: another `serve` runs this fleet, or the running fleet has other settings.
    """

    def __init__(self, settings: config.Settings) -> None:
        self.home = settings.home
        self.token_file = self.home / "token"
        try:
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _take_lock(self.home)
            token = settings.api.token.get_secret_value() if settings.api.token else _kept_secret(self.token_file)
            if settings.api.token:
                _write_secret(self.token_file, token)
        except OSError as exc:
            raise ConfigError(f"state_dir: got '{settings.state_dir}', want a folder to write in ({exc})") from None
        self.token = token
        self.settings = settings.model_copy(update={"api": settings.api.model_copy(update={"token": SecretStr(token)})})
        self._controller: Any = None
        self._engines: dict[int, Any] = {}
        self._ray_process: subprocess.Popen[bytes] | None = None
        self._joining: asyncio.Task[None] | None = None
        self._owned = False  # Ray was started or adopted here, so it is ours to end
        self._temp = Path("/tmp") / f"weightsync-{hashlib.sha256(str(self.home.resolve()).encode()).hexdigest()[:10]}"
        apart = "Ray's session_latest/logs on each node (in /tmp/ray, or its --temp-dir)"
        #: Where controller and engines log, in words.
        self.logs = apart if settings.ray.address else f"{self._temp}/session_latest/logs"

    # --- up ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring everything up; returns when every engine can take an update. May be cancelled; then call `stop`."""
        self._joining = asyncio.create_task(asyncio.to_thread(self._join_ray))
        await asyncio.shield(self._joining)
        await self._start_actors()

    def _join_ray(self) -> None:
        state = _state(self.home)
        address = self.settings.ray.address
        if not address:
            if state and _alive(state["ray_pid"], state["temp_dir"]):
                self._require_same(state)
                self._owned = True
                address = _address(Path(state["temp_dir"]), lambda: _alive(state["ray_pid"], state["temp_dir"]))
                logger.info("adopting the fleet at %s", address)
            else:
                address = self._start_ray()
        os.environ.update(_ray_environment())
        if not self.settings.ray.address:
            os.environ.update(_ray_token(self.home))
        import ray

        try:
            ray.init(address=address, namespace=self.settings.namespace, log_to_driver=False, configure_logging=False)
        except ConnectionError as exc:
            raise ServiceUnreachable(f"no Ray cluster answers at {address}: {exc}", hint="Check ray.address and its token") from None

    def _start_ray(self) -> str:
        shutil.rmtree(self._temp, ignore_errors=True)
        self._temp.mkdir(mode=0o700)
        cpus = self.settings.ray.num_cpus or int(self.settings.engine.count * self.settings.engine.cpus) + 2
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0", "--disable-usage-stats",
            f"--num-cpus={cpus}", f"--object-store-memory={self.settings.ray.object_store_bytes}",
            "--include-dashboard=false", f"--ray-client-server-port={_free_port()}", f"--temp-dir={self._temp}",
        ]  # fmt: skip
        log = self.home / "ray.log"
        with log.open("wb") as out:
            # A session of its own: Ctrl-C in serve's terminal must not reach Ray before the engines have ended.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, **_ray_environment(), **_ray_token(self.home)},
            )  # fmt: skip
        self._ray_process, self._owned = process, True
        # Before Ray is up: whoever comes after a kill at any moment must find it.
        state = {"ray_pid": process.pid, "temp_dir": str(self._temp), "settings": _fixed(self.settings)}
        _write_secret(self.home / "fleet.json", json.dumps(state))
        try:
            return _address(self._temp, lambda: process.poll() is None)
        except InternalError as exc:
            raise InternalError(f"{exc.message}: {_tail(log)}", hint=f"See {log}") from None

    async def _start_actors(self) -> None:
        import ray

        from weightsync.fleet import controller, placement
        from weightsync.fleet.calls import call

        gpus = placement.engine_options(self.settings, 0)["num_gpus"]
        placement.require_gpus(self.settings.engine, gpus, ray.nodes(), may_grow=bool(self.settings.ray.address))
        for complaint in placement.beyond_reach(self.settings, ray.nodes()):
            logger.warning(complaint)
        timeout, namespace = self.settings.engine.start_timeout_seconds, self.settings.namespace
        names = {entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == namespace}
        there = sorted(int(name.removeprefix("engine-")) for name in names if name.startswith("engine-"))
        # The controller comes when all engines are made: where there is one, the fleet is whole, and may have been scaled.
        for ordinal in there if there and controller.NAME in names else range(self.settings.engine.count):
            try:
                self._engines[ordinal] = ray.get_actor(f"engine-{ordinal}", self.settings.namespace)
            except ValueError:
                self._engines[ordinal] = placement.create(self.settings, ordinal)
        # A controller that an earlier serve left may have other settings of updates; it rebuilds itself from the engines.
        with contextlib.suppress(ValueError):
            old = ray.get_actor(controller.NAME, self.settings.namespace)
            ray.kill(old)
            await _until_gone(controller.NAME, self.settings.namespace)
        self._controller = controller.create(self.settings)
        try:
            starts = [call(handle.start, timeout_seconds=timeout, engine=ordinal) for ordinal, handle in self._engines.items()]
            await asyncio.gather(*starts)
            await call(self._controller.start, timeout_seconds=timeout)
        except WeightSyncError as exc:
            exc.hint = exc.hint or f"See the logs: {self.logs}"
            raise

    async def ask(self, method: str, *args: Any, timeout_seconds: float) -> Any:
        """Call a method of the controller."""
        from weightsync.fleet.calls import call

        return await call(getattr(self._controller, method), *args, timeout_seconds=timeout_seconds)

    # --- down ----------------------------------------------------------------------------------

    async def stop(self, keep_logs: bool = False) -> None:
        """Take down engines, controller, and Ray if it was started or adopted here; with its logs, unless they are to be kept."""
        try:
            if self._joining is not None:
                # Its thread can't be cancelled, and half a Ray can't be ended; it takes a few seconds.
                await asyncio.wait([self._joining])
                if self._joining.exception() is None:
                    await _stop_actors(self.settings.namespace)
        finally:  # where actors can't be told to end, they end with Ray
            if self._owned:
                await asyncio.to_thread(end_ray, self.home, self._ray_process, keep_logs)
            self._lock.close()

    # --- what is kept --------------------------------------------------------------------------

    def _require_same(self, state: dict[str, Any]) -> None:
        wanted, running = _fixed(self.settings), state["settings"]
        differ = [
            f"{section}.{key}: the running fleet has {running[section].get(key)!r}, asked for {value!r}"
            for section in _FIXED
            for key, value in wanted[section].items()
            if running[section].get(key) != value
        ]
        if wanted["token"] != running["token"]:
            differ.append("api.token: the running engines have another one")
        if differ:
            raise ConfigError("; ".join(differ), hint="Use the same settings, or end the fleet with `weightsync stop` first")


def _address(temp_dir: Path, alive: Callable[[], bool]) -> str:
    """Where a Ray that was started with this folder can be joined; waits while it comes up."""
    where = temp_dir / "ray_current_cluster"
    deadline = time.monotonic() + 60
    while not (where.is_file() and where.read_text().strip()):
        if not alive() or time.monotonic() > deadline:
            raise InternalError("Ray did not start")
        time.sleep(0.05)
    return where.read_text().strip()


def _ray_token(home: Path) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _kept_secret(home / "ray_token")}


async def _stop_actors(namespace: str) -> None:
    """End every actor of a fleet, engines in order (they end vLLM's processes), and leave Ray."""
    import ray

    from weightsync.fleet.calls import call

    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == namespace]
    handles = {name: ray.get_actor(name, namespace) for name in names}
    engines = [handle for name, handle in handles.items() if name.startswith("engine-")]
    stops = (call(handle.stop, timeout_seconds=_STOP_SECONDS) for handle in engines)
    for result in await asyncio.gather(*stops, return_exceptions=True):
        if isinstance(result, BaseException):
            logger.warning("an engine did not end by itself: %s", result)
    for handle in handles.values():
        with contextlib.suppress(Exception):
            ray.kill(handle)
    ray.shutdown()


def end_ray(home: Path, process: subprocess.Popen[bytes] | None = None, keep_logs: bool = False) -> bool:
    """End the Ray that a fleet's folder tells of, and every process under it; whether there was one.

    Args:
        home: `<state_dir>/<fleet>`.
        process: the Ray process, if it is a child of this one (it must be reaped).
        keep_logs: until the next fleet of this folder starts.
    """
    state = _state(home)
    if state is None:
        if process is None:
            return False
        state = {"ray_pid": process.pid, "temp_dir": str(process.args).partition("--temp-dir=")[2].rstrip("']")}
    pid, temp_dir = int(state["ray_pid"]), str(state["temp_dir"])
    was_alive = _alive(pid, temp_dir)
    deadline = time.monotonic() + _STOP_SECONDS
    if was_alive:
        os.kill(pid, signal.SIGTERM)
        while _alive(pid, temp_dir) and time.monotonic() < deadline:
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


async def stop_left_fleet(home: Path) -> bool:
    """End a fleet that a killed `serve` left; whether there was one.

    Args:
        home: `<state_dir>/<fleet>`.

    Raises:
        ConfigError: a `serve` still runs it.
    """
    if not home.is_dir():
        return False
    with _take_lock(home):
        state = _state(home)
        if state is not None and _alive(int(state["ray_pid"]), str(state["temp_dir"])):
            os.environ.update(_ray_environment() | _ray_token(home))
            import ray

            namespace = config.namespace_of(home.name)
            try:
                address = _address(Path(state["temp_dir"]), lambda: _alive(int(state["ray_pid"]), str(state["temp_dir"])))
                ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
                await _stop_actors(namespace)
            except (ConnectionError, RuntimeError, InternalError) as exc:
                logger.warning("its Ray does not answer and is ended as it is: %s", exc)
        return await asyncio.to_thread(end_ray, home)


def _take_lock(home: Path) -> IO[str]:
    lock = (home / "serve.lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(
            f"fleet: {home.name!r} is served by process {holder} already", hint="Stop that one, or give another --fleet"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _state(home: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((home / "fleet.json").read_text()))
    except (OSError, ValueError):
        return None


def _fixed(settings: config.Settings) -> dict[str, Any]:
    data = config.dump(settings)
    token = hashlib.sha256(str(data["api"]["token"]).encode()).hexdigest()
    del data["engine"]["count"]  # a fleet may have been scaled
    fixed = {section: {key: data[section][key] for key in keys or data[section]} for section, keys in _FIXED.items()}
    return {**fixed, "token": token}


def _kept_secret(path: Path) -> str:
    """The secret in a file, made when there is none."""
    if not path.is_file():
        _write_secret(path, secrets.token_hex(32))
    return path.read_text().strip()


def _write_secret(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        stream.write(text)


def _ray_environment() -> dict[str, str]:
    # Ray's handler of failure signals takes SIGTERM from ours and aborts, and its record of calls grows.
    ours = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    return {**ours, "RAY_task_events_report_interval_ms": "0"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _alive(pid: int, temp_dir: str) -> bool:
    """Whether `pid` is the Ray that was started with this folder, not a stranger that got its number."""
    try:
        return temp_dir.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
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


def _tail(path: Path, lines: int = 5) -> str:
    return " | ".join(path.read_text(errors="replace").splitlines()[-lines:])


async def _until_gone(name: str, namespace: str) -> None:
    import ray

    for _ in range(200):
        try:
            ray.get_actor(name, namespace)
        except ValueError:
            return
        await asyncio.sleep(0.05)
    raise InternalError(f"actor {name} did not end")
