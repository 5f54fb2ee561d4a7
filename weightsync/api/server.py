"""`weightsync serve`: bring the fleet up, answer HTTP, take down what was started.

SIGINT and SIGTERM end everything in order. A kill, or with `leave_fleet` these signals too, leaves the fleet running,
and the next `serve` adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from weightsync import config, logs
from weightsync.api import app as api
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.fleet import placement
from weightsync.fleet.cluster import Cluster
from weightsync.fleet.gate import http_settings
from weightsync.transport import network

logger = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `serve` below has its own handlers, which also end the fleet


async def serve(settings: config.Settings) -> int:
    """Run until a signal; the exit code: 0, 1 when something failed, 2 for wrong settings.

    Prints where controller and engines log, and `weightsync ready url=… token_file=…` when
    every engine can take an update, on standard output.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    logs.install(settings.log)
    sock = _listen(settings)
    cluster = Cluster(settings)
    print(f"weightsync starting; controller and engines log to {cluster.logs}", flush=True)
    code = 1  # unless it ends as it should
    try:
        starting = asyncio.create_task(cluster.start())
        if not await _first(starting, stop):
            starting.cancel()
            await asyncio.wait([starting])
            code = 0
            return code
        application = api.build(
            cluster,
            token=lambda: cluster.token,
            min_ready=settings.api.min_ready,
            max_request_bytes=settings.api.max_request_bytes,
            control_seconds=settings.sync.control_timeout_seconds,
        )
        server = _Server(http_settings(application, grace_seconds=2))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        host, port = sock.getsockname()[:2]
        url = f"http://{network.shown(placement.own_address(host), port)}"
        print(f"weightsync ready url={url} token_file={cluster.token_file}", flush=True)
        await _first(serving, stop)
        server.should_exit = True
        await serving
        code = 0
    except WeightSyncError as exc:
        print(f"weightsync: {exc}", file=sys.stderr, flush=True)
        code = 2 if isinstance(exc, ConfigError) else 1
    finally:
        sock.close()
        await cluster.stop(failed=bool(code))
    return code


async def _first(task: asyncio.Task[None], stop: asyncio.Event) -> bool:
    """Wait for the task or the signal; whether the task came first. Raises what the task raised."""
    waiter = asyncio.create_task(stop.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        task.result()
        return True
    return False


def _listen(settings: config.Settings) -> socket.socket:
    # Before the engines start: a taken port should show at once, not after a minute.
    try:
        return socket.create_server((settings.api.host, settings.api.port))
    except OSError as exc:
        raise ConfigError(
            f"api.port: got {settings.api.host}:{settings.api.port}, want a free port of this machine ({exc.strerror})"
        ) from None
