"""The communicator between real processes over loopback: broadcasts, and every way in which one can break."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peers import Peer

from weightsync.errors import Aborted, ConfigError, TransportFailed, WeightSyncError
from weightsync.protocol import CommunicatorInfo
from weightsync.transport import rendezvous
from weightsync.transport.communicator import Communicator

CPU = torch.device("cpu")
#: Large enough that a signal sent to a process that broadcasts without pause falls into the middle of one.
BIG = 32 << 20

Meet = Callable[[int], CommunicatorInfo]


# --- what runs in the other processes ----------------------------------------------------------


def connect(state: dict[str, Any], info: CommunicatorInfo, rank: int, seconds: float = 20.0) -> None:
    state["communicator"] = Communicator(info, rank, CPU, seconds, 60.0)


def close(state: dict[str, Any]) -> None:
    state.pop("communicator").close()


def broadcast(state: dict[str, Any], values: list[float] | None, count: int) -> list[list[float]]:
    """`count` broadcasts; the sender adds one to its values before each further one. What was in the tensor after each."""
    tensor = torch.zeros(3) if values is None else torch.tensor(values)
    seen = []
    for number in range(count):
        if values is not None and number:
            tensor += 1
        state["communicator"].broadcast(tensor, time.monotonic() + 20)
        seen.append(tensor.tolist())
    return seen


def send_without_end(state: dict[str, Any]) -> None:
    tensor = torch.ones(BIG, dtype=torch.uint8)
    for number in itertools.count():
        state["communicator"].broadcast(tensor, time.monotonic() + 60)
        if number == 1:
            state["pipe"].send((False, "sending"))


def receive_until_it_breaks(state: dict[str, Any], deadline_seconds: float) -> tuple[WeightSyncError, float, float]:
    """What the last broadcast raised, how long that one took, and when it raised; its deadline is `deadline_seconds`."""
    tensor = torch.zeros(BIG, dtype=torch.uint8)
    while True:
        began = time.monotonic()
        try:
            state["communicator"].broadcast(tensor, began + deadline_seconds)
        except WeightSyncError as exc:
            assert not state["communicator"].open
            return exc, time.monotonic() - began, time.monotonic()


def receive_cancelled(state: dict[str, Any], after_seconds: float) -> tuple[WeightSyncError, float]:
    """Wait for a broadcast that nobody sends and cancel it; how long after the cancellation it raised."""
    cancel_at = time.monotonic() + after_seconds
    try:
        state["communicator"].broadcast(torch.zeros(8), time.monotonic() + 30, lambda: time.monotonic() >= cancel_at)
    except WeightSyncError as exc:
        return exc, time.monotonic() - cancel_at
    raise AssertionError("the broadcast returned")


def default_group_is_initialised(_: dict[str, Any]) -> bool:
    return dist.is_initialized()


# --- fixtures ----------------------------------------------------------------------------------


class Pool:
    """Processes that take turns in the tests of this file: torch takes seconds to load."""

    def __init__(self) -> None:
        self._idle: list[Peer] = []

    def take(self, count: int) -> list[Peer]:
        taken = [self._idle.pop() if self._idle else Peer() for _ in range(count)]
        return [peer.ready() for peer in taken]

    def put(self, peers: list[Peer]) -> None:
        self._idle += [peer for peer in peers if peer.process.is_alive()]

    def end(self) -> None:
        for peer in self._idle:
            peer.kill()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def meet() -> Meet:
    """Makes a fresh generation for so many ranks; the store lives here, as it does in the controller."""
    store = rendezvous.host_store("127.0.0.1", 20.0)
    generations = itertools.count(1)

    def make(world_size: int) -> CommunicatorInfo:
        assert store.port  # also keeps the store
        return CommunicatorInfo("127.0.0.1", store.port, next(generations), world_size, {"0": 1}, "gloo")

    return make


def join_all(peers: list[Peer], info: CommunicatorInfo) -> None:
    for rank, peer in enumerate(peers):
        peer.start(connect, info, rank)
    for peer in peers:
        peer.result()


def x_time(pool: Pool, meet: Meet) -> None:
    t=time.monotonic()
    peers = pool.take(3)
    print("spawn", time.monotonic()-t)
    t=time.monotonic()
    join_all(peers, meet(3))
    print("join", time.monotonic()-t)
    for p, v in zip(peers, ([1.,2.,3.],None,None)): p.start(broadcast, v, 20)
    print([p.result()[-1] for p in peers])
    print([p.call(default_group_is_initialised) for p in peers])
    t=time.monotonic()
    for p in peers: p.start(close)
    for p in peers: p.result()
    print("close", time.monotonic()-t)
    for sig in (signal.SIGKILL, signal.SIGSTOP):
        join_all(peers, meet(3))
        trainer, *workers = peers
        for w in workers: w.start(receive_until_it_breaks, 2.0)
        trainer.start(send_without_end)
        print(trainer.result())
        time.sleep(0.05)
        trainer.signal(sig)
        t=time.monotonic()
        for w in workers:
            e,took,at=w.result()
            print(sig, repr(e), str(e), "took",took,"after signal", at-t)
        print([w.answers for w in workers])
        t=time.monotonic()
        print("exit", [w.exit_code() for w in workers], time.monotonic()-t)
        trainer.kill()
        peers = pool.take(3)
    join_all(peers, meet(3))
    trainer, *workers = peers
    workers[0].start(receive_cancelled, 0.3)
    print("cancel", workers[0].result())
    t=time.monotonic()
    print("exit", [w.exit_code() for w in peers], time.monotonic()-t)
    

if __name__ == "__main__":
    store = rendezvous.host_store("127.0.0.1", 20.0)
    generations = itertools.count(1)
    def make(world_size):
        return CommunicatorInfo("127.0.0.1", store.port, next(generations), world_size, {"0": 1}, "gloo")
    pool=Pool()
    x_time(pool, make)
    pool.end()
