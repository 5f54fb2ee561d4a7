"""Start Ray, the controller and the engines, or find those that are there; and take them down, or leave them.

Ray is imported only inside functions: it reads its token when it is imported,
and `Cluster` must have set that before.

Not covered: placement groups, and starting Ray on other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import subprocess
from pathlib import Path
from typing import IO, Any

from pydantic import SecretStr

from weightsync import config
from weightsync.errors import ConfigError, InternalError, ServiceUnreachable, WeightSyncError
from weightsync.fleet import own_ray
from weightsync.fleet.fixed import differences, fixed

logger = logging.getLogger(__name__)

_STOP_SECONDS = 20.0


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
            token = settings.api.token.get_secret_value() if settings.api.token else own_ray.kept_secret(self.token_file)
            if settings.api.token:
                own_ray.write_secret(self.token_file, token)
        except OSError as exc:
            raise ConfigError(f"state_dir: got '{settings.state_dir}', want a folder to write in ({exc})") from None
        self.token = token
        self.settings = settings.model_copy(update={"api": settings.api.model_copy(update={"token": SecretStr(token)})})
        self._controller: Any = None
        self._engines: dict[int, Any] = {}
        self._ray_process: subprocess.Popen[bytes] | None = None
        self._joining: asyncio.Task[None] | None = None
        self._owned = False  # Ray was started or adopted here, so it is ours to end
        self._foreign = False  # engines are there that other settings have started: they are not ours to end
        self._up = False  # engines were there before, or have started
        self._temp = Path("/tmp") / f"weightsync-{hashlib.sha256(str(self.home.resolve()).encode()).hexdigest()[:10]}"
        apart = "Ray's session_latest/logs on each node (in /tmp/ray, or its --temp-dir)"
        #: Where controller and engines log, in words.
        self.logs = apart if settings.ray.address else f"{self._temp}/session_latest/logs"

    # --- up ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring everything up; returns when every engine can take an update. May be cancelled; then call `stop`."""
        self._joining = asyncio.create_task(asyncio.to_thread(self._join_ray))
        await asyncio.shield(self._joining)
        await self._find_engines()
        await self._start_actors()
        self._up = True

    def _join_ray(self) -> None:
        address = self.settings.ray.address
        os.environ.update(own_ray.environment())
        if not address:
            address = self._own_address()
            os.environ.update(own_ray.token(self.home))
        import ray

        try:
            ray.init(address=address, namespace=self.settings.namespace, log_to_driver=False, configure_logging=False)
        except ConnectionError as exc:
            raise ServiceUnreachable(f"no Ray cluster answers at {address}: {exc}", hint="Check ray.address and its token") from None

    def _own_address(self) -> str:
        """Of the Ray that an earlier `serve` has left, or else of a new one."""
        state = own_ray.state_of(self.home)
        if state is None or not own_ray.lives(state):
            self._ray_process, self._owned = own_ray.start(self.settings, self.home, self._temp), True
            return own_ray.started(self._ray_process, self.home, self._temp)
        if differ := differences(fixed(self.settings), state["settings"]):
            raise ConfigError("; ".join(differ), hint="Use the same settings, or end the fleet with `weightsync stop` first")
        self._owned = True
        address = own_ray.address(Path(state["temp_dir"]), lambda: own_ray.lives(state))
        logger.info("adopting the fleet at %s", address)
        return address

    async def _find_engines(self) -> None:
        import ray

        from weightsync.fleet import adopting

        for name in _actors(self.settings.namespace):
            if name.startswith("engine-"):
                with contextlib.suppress(ValueError):  # it went meanwhile
                    self._engines[int(name.removeprefix("engine-"))] = ray.get_actor(name, self.settings.namespace)
        try:
            await adopting.require_same(self._engines, self.settings)
        except ConfigError:
            self._foreign = True
            raise
        self._up = bool(self._engines)

    async def _start_actors(self) -> None:
        import ray

        from weightsync.fleet import controller, placement
        from weightsync.fleet.calls import call

        gpus = placement.engine_options(self.settings, 0)["num_gpus"]
        placement.require_gpus(self.settings.engine, gpus, ray.nodes(), may_grow=bool(self.settings.ray.address))
        for complaint in placement.beyond_reach(self.settings, ray.nodes()):
            logger.warning(complaint)
        # The controller comes when all engines are made: where there is one, the fleet is whole, and may have been scaled.
        whole = self._engines and controller.NAME in _actors(self.settings.namespace)
        for ordinal in () if whole else range(self.settings.engine.count):
            if ordinal not in self._engines:
                self._engines[ordinal] = placement.create(self.settings, ordinal)
        # A controller that an earlier serve left may have other settings of updates; it rebuilds itself from the engines.
        with contextlib.suppress(ValueError):
            old = ray.get_actor(controller.NAME, self.settings.namespace)
            ray.kill(old)
            await _until_gone(controller.NAME, self.settings.namespace)
        self._controller = controller.create(self.settings)
        timeout = self.settings.engine.start_timeout_seconds
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

    async def stop(self, failed: bool = False) -> None:
        """Take down engines, controller, and Ray if it was started or adopted here, with its logs; or leave all of it (`leave_fleet`).

        Args:
            failed: `serve` did. Logs stay, and what had not come up is not left.
        """
        leave = self._foreign or (self.settings.leave_fleet and (self._up or not failed))
        try:
            if self._joining is not None:
                # Its thread can't be cancelled, and half a Ray can't be ended; it takes a few seconds.
                await asyncio.wait([self._joining])
                if self._joining.exception() is None:
                    await (_leave_ray() if leave else _stop_actors(self.settings.namespace))
        finally:  # where actors can't be told to end, they end with Ray
            if self._owned and not leave:
                await asyncio.to_thread(own_ray.end, self.home, self._ray_process, failed)
            self._lock.close()


def _actors(namespace: str) -> list[str]:
    """Names of a fleet's actors."""
    import ray

    return sorted(entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == namespace)


async def _leave_ray() -> None:
    import ray

    await asyncio.to_thread(ray.shutdown)


async def _stop_actors(namespace: str) -> None:
    """End every actor of a fleet, engines in order (they end vLLM's processes), and leave Ray."""
    import ray

    from weightsync.fleet.calls import call

    handles = {name: ray.get_actor(name, namespace) for name in _actors(namespace)}
    engines = [handle for name, handle in handles.items() if name.startswith("engine-")]
    stops = (call(handle.stop, timeout_seconds=_STOP_SECONDS) for handle in engines)
    for result in await asyncio.gather(*stops, return_exceptions=True):
        if isinstance(result, BaseException):
            logger.warning("an engine did not end by itself: %s", result)
    for handle in handles.values():
        with contextlib.suppress(Exception):
            ray.kill(handle)
    ray.shutdown()


async def stop_left_fleet(home: Path) -> bool:
    """End a fleet that an earlier `serve` left; whether there was one.

    Args:
        home: `<state_dir>/<fleet>`.

    Raises:
        ConfigError: a `serve` still runs it.
    """
    if not home.is_dir():
        return False
    with _take_lock(home):
        state = own_ray.state_of(home)
        if state is not None and own_ray.lives(state):
            os.environ.update(own_ray.environment() | own_ray.token(home))
            import ray

            namespace = config.namespace_of(home.name)
            try:
                address = own_ray.address(Path(state["temp_dir"]), lambda: own_ray.lives(state))
                ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
                await _stop_actors(namespace)
            except (ConnectionError, RuntimeError, InternalError) as exc:
                logger.warning("its Ray does not answer and is ended as it is: %s", exc)
        return await asyncio.to_thread(own_ray.end, home)


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


async def _until_gone(name: str, namespace: str) -> None:
    import ray

    for _ in range(200):
        try:
            ray.get_actor(name, namespace)
        except ValueError:
            return
        await asyncio.sleep(0.05)
    raise InternalError(f"actor {name} did not end")
