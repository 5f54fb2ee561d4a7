"""Processes that tests drive from outside: real ones, that can be killed and stopped.

`Peer` runs functions of the test module in a process of its own, one after the
other, each with that process's `state` dict as its first argument.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from weightsync.check.environment import ENGINE_ENV
from weightsync.errors import WeightSyncError

# Forked from a process that has loaded what takes long and done nothing with it, so that tests don't wait for that every time.
_QUICK = multiprocessing.get_context("forkserver")
_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "hypothesis",
    "pytest",
    "weightsync.api.app",
    "weightsync.client.sync",
    "weightsync.fleet.controller",
    "weightsync.fleet.engine_actor",
    "weightsync.worker.receiver",
]
_QUICK.set_forkserver_preload(_PRELOAD)
# Its own interpreter from first to last: a forked one leaves by os._exit, without what a script does when it ends.
_WHOLE = multiprocessing.get_context("spawn")


class Peer:
    """One process.

    Args:
        whole: an interpreter of its own, for tests of how the process ends; takes seconds to start.
    """

    def __init__(self, *, whole: bool = False) -> None:
        context: Any = _WHOLE if whole else _QUICK
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._ready = False

    def ready(self, seconds: float = 60.0) -> Peer:
        """Wait until it takes calls."""
        if not self._ready:
            self.result(seconds)
            self._ready = True
        return self

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(state, *args)` there; `result` has the answer."""
        self._pipe.send((function, args))

    def result(self, seconds: float = 20.0) -> Any:
        """The next answer, or what the function raised."""
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer from process {self.process.pid} within {seconds} s")
        raised, value = self._pipe.recv()
        if raised:
            raise value
        return value

    def call(self, function: Callable[..., Any], *args: Any, seconds: float = 20.0) -> Any:
        self.start(function, *args)
        return self.result(seconds)

    @property
    def answers(self) -> bool:
        """Whether it still takes calls, as a process does that has not been harmed."""
        return self.process.is_alive() and bool(self.call(_pid) == self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def exit_code(self, seconds: float = 15.0) -> int | None:
        """Let it end by itself, as a script does behind its last line; None when it has not ended in time."""
        self._pipe.close()
        self.process.join(seconds)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


@contextlib.contextmanager
def engine_process() -> Iterator[Peer]:
    """A process that may host a CPU engine; killed in the end."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENGINE_ENV["cpu"].items():
            environment.setenv(name, value)
        peer = Peer(whole=True).ready()
    try:
        yield peer
    finally:
        peer.kill()


def _pid(_: dict[str, Any]) -> int:
    return os.getpid()


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    state: dict[str, Any] = {"pipe": pipe}
    pipe.send((False, None))
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (False, function(state, *args))
        except WeightSyncError as exc:
            answer = (True, exc)
        except BaseException:
            answer = (True, RuntimeError(traceback.format_exc()))
        pipe.send(answer)
