"""The communicator between real processes over loopback: broadcasts, and every way in which one can break."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.peers import Peer
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
    if (communicator := state.pop("communicator", None)) is not None:
        communicator.close()


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
    """Processes that take turns in the tests of this file."""

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


def start_endless(trainer: Peer, workers: list[Peer], deadline_seconds: float) -> None:
    """Let the trainer broadcast without pause; returns while one is on its way."""
    for worker in workers:
        worker.start(receive_until_it_breaks, deadline_seconds)
    trainer.start(send_without_end)
    assert trainer.result() == "sending"
    time.sleep(0.05)


def start_whole(count: int) -> list[Peer]:
    peers = [Peer(whole=True) for _ in range(count)]
    return [peer.ready() for peer in peers]


def finish(pool: Pool, peers: list[Peer]) -> None:
    for peer in peers:
        peer.call(close)
    pool.put(peers)


@contextlib.contextmanager
def rendezvous_port_of_nobody() -> Iterator[int]:
    """A port that is taken, so that nobody else gets it, and not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_every_rank_holds_the_bytes_of_rank_0(pool: Pool, meet: Meet) -> None:
    peers = pool.take(3)
    join_all(peers, meet(3))
    for peer, values in zip(peers, ([1.5, -2.0, 3.25], None, None), strict=True):
        peer.start(broadcast, values, 1)
    assert [peer.result() for peer in peers] == [[[1.5, -2.0, 3.25]]] * 3
    finish(pool, peers)


def test_twenty_broadcasts_one_after_another_keep_their_order(pool: Pool, meet: Meet) -> None:
    peers = pool.take(3)
    join_all(peers, meet(3))
    for peer, values in zip(peers, ([0.0, 10.0, 20.0], None, None), strict=True):
        peer.start(broadcast, values, 20)
    want = [[0.0 + n, 10.0 + n, 20.0 + n] for n in range(20)]
    assert [peer.result() for peer in peers] == [want] * 3
    finish(pool, peers)


def test_the_default_process_group_is_left_alone(pool: Pool, meet: Meet) -> None:
    peers = pool.take(2)
    join_all(peers, meet(2))
    assert [peer.call(default_group_is_initialised) for peer in peers] == [False, False]
    finish(pool, peers)


def test_receivers_learn_at_once_that_the_trainer_was_killed_in_mid_broadcast(pool: Pool, meet: Meet) -> None:
    # Three times, since it depends on what was on its way: gloo itself loses a death in the middle of a message.
    for _ in range(3):
        trainer, *workers = pool.take(3)
        join_all([trainer, *workers], meet(3))
        start_endless(trainer, workers, deadline_seconds=30.0)
        trainer.signal(signal.SIGKILL)
        killed = time.monotonic()
        for worker in workers:
            error, _, at = worker.result()
            assert type(error) is TransportFailed
            assert error.retryable
            assert at - killed < 2.0
        assert all(worker.answers for worker in workers)
        pool.put(workers)


def test_receivers_learn_at_once_that_the_trainer_died_between_broadcasts(pool: Pool, meet: Meet) -> None:
    trainer, *workers = pool.take(3)
    join_all([trainer, *workers], meet(3))
    for worker in workers:
        worker.start(receive_until_it_breaks, 30.0)
    time.sleep(0.2)
    trainer.signal(signal.SIGKILL)
    killed = time.monotonic()
    for worker in workers:
        error, _, at = worker.result()
        assert type(error) is TransportFailed
        assert at - killed < 2.0
    pool.put(workers)


def test_the_trainer_learns_at_once_that_a_worker_was_killed_in_mid_broadcast(pool: Pool, meet: Meet) -> None:
    trainer, victim, survivor = peers = pool.take(3)
    join_all(peers, meet(3))
    start_endless(trainer, [victim, survivor], deadline_seconds=30.0)
    victim.signal(signal.SIGKILL)
    with pytest.raises(TransportFailed):
        trainer.result(5.0)
    # The trainer left, so the other one can't go on either.
    assert type(survivor.result(5.0)[0]) is TransportFailed
    assert trainer.answers
    assert survivor.answers
    pool.put([trainer, survivor])


def test_a_trainer_that_hangs_costs_its_receivers_no_more_than_the_deadline(pool: Pool, meet: Meet) -> None:
    (trainer,), workers = pool.take(1), start_whole(2)
    join_all([trainer, *workers], meet(3))
    start_endless(trainer, workers, deadline_seconds=1.5)
    trainer.signal(signal.SIGSTOP)
    try:
        for worker in workers:
            error, took, _ = worker.result()
            assert type(error) is TransportFailed
            assert "deadline" in error.message
            assert 1.5 <= took < 2.5
        # An operation that was left must not make the process abort or hang when it ends.
        assert [worker.exit_code() for worker in workers] == [0, 0]
    finally:
        trainer.kill()


@pytest.mark.parametrize("deadline_seconds", [0.0005, 0.0512, 0.1004, 0.2])
def test_a_deadline_holds_whatever_is_left_of_it_at_the_last_look(pool: Pool, meet: Meet, deadline_seconds: float) -> None:
    # torch counts whole milliseconds and takes the 0 that a remainder is rounded to for no timeout at all.
    peers = pool.take(2)
    join_all(peers, meet(2))
    peers[1].start(receive_until_it_breaks, deadline_seconds)
    error, took, _ = peers[1].result(5.0)
    assert type(error) is TransportFailed
    assert took < deadline_seconds + 0.8
    finish(pool, peers)


def test_cancelling_leaves_a_broadcast_within_half_a_second(pool: Pool, meet: Meet) -> None:
    (trainer,), (worker,) = pool.take(1), start_whole(1)
    join_all([trainer, worker], meet(2))
    error, late = worker.call(receive_cancelled, 0.3)
    assert type(error) is Aborted
    assert late < 0.5
    assert worker.answers
    # Its operation is still pending; ending now must not abort the process.
    assert worker.exit_code() == 0
    finish(pool, [trainer])


def test_a_process_that_ends_after_closing_exits_with_0(meet: Meet) -> None:
    peers = start_whole(2)
    join_all(peers, meet(2))
    for peer, values in zip(peers, ([1.0, 2.0, 3.0], None), strict=True):
        peer.start(broadcast, values, 1)
    for peer in peers:
        peer.result()
    for peer in peers:
        peer.call(close)
    assert [peer.exit_code() for peer in peers] == [0, 0]


def test_a_process_that_ends_after_its_trainer_was_killed_exits_with_0(pool: Pool, meet: Meet) -> None:
    (trainer,), (worker,) = pool.take(1), start_whole(1)
    join_all([trainer, worker], meet(2))
    start_endless(trainer, [worker], deadline_seconds=30.0)
    trainer.signal(signal.SIGKILL)
    assert type(worker.result()[0]) is TransportFailed
    assert worker.exit_code() == 0


def test_the_rendezvous_ends_at_its_deadline_when_nobody_else_comes(pool: Pool, meet: Meet) -> None:
    (peer,) = pool.take(1)
    began = time.monotonic()
    with pytest.raises(TransportFailed, match="rank 1 of 3") as caught:
        peer.call(connect, meet(3), 1, 1.0)
    assert 0.9 <= time.monotonic() - began < 2.5
    assert caught.value.retryable
    assert peer.answers
    pool.put([peer])


def test_a_stale_generation_meets_nobody_of_the_new_one(pool: Pool, meet: Meet) -> None:
    stale, fresh, late = pool.take(3)
    old, new = meet(2), meet(2)
    stale.start(connect, old, 1, 1.0)
    fresh.start(connect, new, 0, 10.0)
    with pytest.raises(TransportFailed, match=f"generation {old.generation}"):
        stale.result()
    late.call(connect, new, 1)
    fresh.result()
    finish(pool, [fresh, late])
    pool.put([stale])


def test_no_store_at_the_address_is_said_at_once() -> None:
    with rendezvous_port_of_nobody() as port:
        began = time.monotonic()
        with pytest.raises(TransportFailed, match=f"127.0.0.1:{port}"):
            rendezvous.join_store(CommunicatorInfo("127.0.0.1", port, 1, 2, {"0": 1}, "gloo"), 20.0)
        assert time.monotonic() - began < 2.0


def test_a_store_host_that_is_not_of_this_machine_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"sync\.store_host: got '192\.0\.2\.1'"):
        rendezvous.host_store("192.0.2.1", 0.5)


def test_a_closed_communicator_refuses_and_can_be_closed_again(meet: Meet) -> None:
    alone = Communicator(meet(1), 0, CPU, 5.0, 5.0)
    assert alone.open
    alone.close()
    alone.close()
    assert not alone.open
    with pytest.raises(TransportFailed, match="closed"):
        alone.broadcast(torch.zeros(1), time.monotonic() + 1)


def test_nccl_without_a_gpu_is_a_configuration_error(meet: Meet) -> None:
    with pytest.raises(ConfigError, match="nccl"):
        Communicator(dataclasses.replace(meet(1), transport="nccl"), 0, CPU, 2.0, 2.0)


# --- ranks -------------------------------------------------------------------------------------


def test_each_worker_has_a_rank_of_its_own_behind_the_trainer() -> None:
    workers = {1: 4, 0: 4}
    first, world_size = rendezvous.ranks(workers, {})
    assert world_size == 9
    assert sorted(first[engine] + i for engine, count in workers.items() for i in range(count)) == list(range(1, 9))
    assert first == {0: 1, 1: 5}


def test_ranks_do_not_depend_on_the_order_of_the_engines() -> None:
    assert rendezvous.ranks({7: 2, 3: 1, 5: 3}, {}) == rendezvous.ranks({3: 1, 5: 3, 7: 2}, {}) == ({3: 1, 5: 2, 7: 5}, 7)


@pytest.mark.parametrize("count", [0, -1])
def test_an_engine_without_workers_has_no_rank(count: int) -> None:
    with pytest.raises(ValueError, match="engine 1"):
        rendezvous.ranks({0: 1, 1: count}, {})
