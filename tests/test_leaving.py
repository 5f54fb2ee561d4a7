"""How a communicator is joined late, left early, and what is left of it: threads, memory, and words about who was missing."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.peers import Peer
from tests.test_communicator import BIG, CPU, close, connect, join_all, start_endless
from weightsync.client.sender import Sender
from weightsync.client.source import offer
from weightsync.errors import Aborted, TransportFailed, WeightSyncError
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.transport import rendezvous
from weightsync.transport.communicator import Communicator
from weightsync.transport.packing import plan_buckets
from weightsync.worker.joining import Joining
from weightsync.worker.receiver import Receiver

Meet = Callable[[int], CommunicatorInfo]


@pytest.fixture(scope="module")
def meet() -> Meet:
    """A fresh generation of a trainer and one worker for each of so many engines."""
    store = rendezvous.host_store("127.0.0.1", 20.0)
    generations = itertools.count(1)

    def make(engines: int) -> CommunicatorInfo:
        assert store.port  # also keeps the store
        return CommunicatorInfo("127.0.0.1", store.port, next(generations), engines + 1, {str(o): o + 1 for o in range(engines)}, "gloo")

    return make


@pytest.fixture
def four() -> Iterator[list[Peer]]:
    peers = [Peer() for _ in range(4)]
    yield [peer.ready() for peer in peers]
    for peer in peers:
        peer.kill()


# --- who it was ---------------------------------------------------------------------------------


def test_whoever_is_left_says_which_engine_died(four: list[Peer], meet: Meet) -> None:
    trainer, _, victim, _ = four
    join_all(four, meet(3))
    start_endless(trainer, [four[1], victim, four[3]], deadline_seconds=30.0)
    victim.signal(signal.SIGKILL)
    with pytest.raises(TransportFailed, match=r"engine 1 \(rank 2\) died or left") as caught:
        trainer.result(5.0)
    assert caught.value.engine == 1
    for peer in (four[1], four[3]):
        assert "engine 1 (rank 2)" in peer.result(5.0)[0].message


def test_an_engine_of_several_workers_that_are_all_gone_is_the_one_that_died(four: list[Peer], meet: Meet) -> None:
    trainer, *workers = four
    join_all(four, replace(meet(3), members={"0": 1, "7": 2}))
    start_endless(trainer, workers, deadline_seconds=30.0)
    for worker in workers:
        worker.signal(signal.SIGSTOP)  # so that none of them leaves because another has
    for victim in workers[1:]:
        victim.kill()
    with pytest.raises(TransportFailed, match=r"engine 7 \(rank 2\), engine 7 \(rank 3\) died or left") as caught:
        trainer.result(5.0)
    assert caught.value.engine == 7
    workers[0].signal(signal.SIGCONT)


def test_a_communicator_that_another_thread_closes_says_that_it_is_closed(meet: Meet) -> None:
    """It was an AttributeError, which nobody takes for the end of a broadcast."""
    info, ends = meet(1), dict[int, Communicator]()
    joins = [threading.Thread(target=lambda rank=rank: ends.update({rank: Communicator(info, rank, CPU, 10.0, 20.0)})) for rank in (0, 1)]  # type: ignore[misc]
    for join in joins:
        join.start()
    for join in joins:
        join.join(10)
    threading.Timer(0.3, ends[1].close).start()
    with pytest.raises(TransportFailed, match="the communicator is closed"):
        ends[1].broadcast(torch.zeros(1 << 20, dtype=torch.uint8), time.monotonic() + 10)
    ends[0].close()


def test_workers_say_that_it_was_the_trainer_who_died(four: list[Peer], meet: Meet) -> None:
    trainer, *workers = four
    join_all(four, meet(3))
    start_endless(trainer, workers, deadline_seconds=30.0)
    trainer.signal(signal.SIGKILL)
    for worker in workers:
        error = worker.result(5.0)[0]
        assert "the trainer (rank 0)" in error.message and error.engine is None


def test_a_rendezvous_to_which_somebody_did_not_come_names_him(four: list[Peer], meet: Meet) -> None:
    info = meet(3)
    for rank in (0, 1, 3):
        four[rank].start(connect, info, rank, 1.0)
    for rank in (0, 1, 3):
        with pytest.raises(TransportFailed, match=r"from 127\.0\.0\.1 \(lo\): engine 1 \(rank 2\) did not come; "):
            four[rank].result(5.0)


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "the trainer (rank 0)"), (1, "engine 4 (rank 1)"), (4, "engine 4 (rank 4)"), (5, "engine 9 (rank 5)")]
)
def test_a_rank_is_named_by_its_engine(rank: int, words: str) -> None:
    info = CommunicatorInfo("h", 1, 1, 7, {"9": 5, "4": 1}, "gloo")
    assert rendezvous.who(info, rank) == words
    assert rendezvous.named(info, range(7)).count("rank") == 7
    assert rendezvous.named(info, range(12)).endswith(" and 4 more")


# --- joining late, and leaving while joining ----------------------------------------------------


def join_late(state: dict[str, Any], rounds: list[tuple[CommunicatorInfo, int, float]]) -> list[float | str]:
    """Join each of these after so many seconds, all at the same time, and take part in one broadcast; what it brought."""
    got: list[float | str] = [""] * len(rounds)

    def join(number: int, info: CommunicatorInfo, rank: int, delay: float) -> None:
        time.sleep(delay)
        try:
            communicator = Communicator(info, rank, CPU, 30.0, 30.0)
            tensor = torch.full((64,), float(info.generation) if rank == 0 else 0.0)
            communicator.broadcast(tensor, time.monotonic() + 20)
            communicator.close()
            got[number] = tensor[-1].item()
        except WeightSyncError as exc:
            got[number] = str(exc)

    threads = [threading.Thread(target=join, args=(number, *one)) for number, one in enumerate(rounds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


@pytest.mark.parametrize(
    ("rounds", "delays"), [(5, (0.0, 0.1, 0.5)), pytest.param(50, (0.0, 1.0, 10.0), marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_peers_may_join_in_any_order_and_as_late_as_they_like(rounds: int, delays: tuple[float, ...], four: list[Peer], meet: Meet) -> None:
    chance, infos = random.Random(5), [meet(3) for _ in range(rounds)]
    late = [chance.choices(delays, k=4) for _ in infos]
    late[0], late[1] = [delays[2], 0.0, delays[1], 0.0], [0.0, delays[2], 0.0, delays[1]]  # the trainer last, and a worker last
    for batch in range(0, rounds, 10):
        some = range(batch, min(rounds, batch + 10))
        for rank, peer in enumerate(four):
            peer.start(join_late, [(infos[number], rank, late[number][rank]) for number in some])
        for peer in four:
            assert peer.result(60.0) == [float(infos[number].generation) for number in some]


def test_joining_is_left_when_the_update_is_aborted_and_what_comes_of_it_is_closed(meet: Meet) -> None:
    info, began = meet(1), time.monotonic()
    with pytest.raises(Aborted):
        Communicator(info, 1, CPU, 20.0, 20.0, cancelled=lambda: time.monotonic() - began > 0.3)
    assert time.monotonic() - began < 1.0
    late = Communicator(info, 0, CPU, 5.0, 5.0)  # meets the thread that was left, which closes what it made
    with pytest.raises(TransportFailed):
        late.broadcast(torch.ones(8 << 20), time.monotonic() + 10)
        late.broadcast(torch.ones(8 << 20), time.monotonic() + 10)
    assert time.monotonic() - began < 8.0


def test_a_worker_whose_update_ended_leaves_the_rendezvous(meet: Meet) -> None:
    order = order_to(meet(1), {"w": torch.ones(4)}, 20.0)
    place = Joining(CPU, 0)
    receiver = Receiver(order, 0, CPU, CPU, place.begin(order))
    receiver.start()
    time.sleep(0.2)
    began = time.monotonic()
    place.end(order)
    receiver._thread.join(5)
    assert isinstance(receiver.error, Aborted) and time.monotonic() - began < 0.6


# --- what is left -------------------------------------------------------------------------------


def order_to(info: CommunicatorInfo, tensors: dict[str, torch.Tensor], seconds: float) -> BeginOrder:
    manifest = offer(tensors).manifest
    plan = plan_buckets(manifest, 8 << 20)
    request = UpdateRequest("u", "t", 1, manifest, plan.bucket_bytes, plan.hash, seconds, "gloo", torch.__version__)
    return BeginOrder(request, info, 0, 1, 5.0)


def threads_and_megabytes(_: dict[str, Any]) -> tuple[int, float]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["Threads"]), int(fields["VmRSS"].split()[0]) / 1024


PIECES = {f"w{number}": torch.empty(8 << 20, dtype=torch.uint8) for number in range(24)}


def receive_half(state: dict[str, Any], info: CommunicatorInfo, seconds: float) -> str:
    """Receive an update whose trainer dies on the way; how that ended."""
    order = order_to(info, PIECES, seconds)
    place = Joining(CPU, 0)
    receiver = Receiver(order, 0, CPU, CPU, place.begin(order))
    receiver.start()
    receiver._thread.join(20)
    place.end(order)
    place.leave()
    receiver.discard()
    return str(receiver.error)


def send_all(state: dict[str, Any], info: CommunicatorInfo) -> None:
    """Send that update, and say so when it has begun."""
    offered, tell = offer(PIECES), iter([state["pipe"].send])
    sender = Sender(offered, plan_buckets(offered.manifest, 8 << 20), lambda *_: next(tell, lambda _: None)((False, "begun")))
    sender.send(Communicator(info, 0, CPU, 10.0, 60.0), time.monotonic() + 60, lambda: False, lambda: None)
    time.sleep(60)


@pytest.mark.parametrize("rounds", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_memory_and_threads_come_back_when_trainers_die_in_mid_broadcast(rounds: int, meet: Meet) -> None:
    """gloo keeps what was on its way, and with it all that was staged, until the deadline of that broadcast."""
    worker, deadline = Peer().ready(), 4.0
    samples = []
    for number in range(rounds + 2):
        trainer, info = Peer().ready(), meet(1)
        worker.start(receive_half, info, deadline)
        trainer.start(send_all, info)
        assert trainer.result() == "begun"
        time.sleep(0.03 + 0.011 * (number % 4))
        trainer.kill()
        assert "the trainer (rank 0) died or left" in worker.result()
        samples.append(worker.call(threads_and_megabytes)[1])
    slope = float(np.polyfit(range(rounds), samples[2:], 1)[0])
    assert slope < 2.0, f"{samples}: up to 192 MB had come each time"
    time.sleep(deadline + 0.5)
    assert worker.call(threads_and_megabytes)[0] <= 4
    worker.kill()


@pytest.mark.parametrize("rounds", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_leaving_a_broadcast_that_nobody_sends_leaves_no_thread_and_no_memory(rounds: int, meet: Meet) -> None:
    """It had waited for its deadline, far away, in a thread that held the tensor."""
    trainer, worker = Peer().ready(), Peer().ready()
    samples = []
    for _ in range(rounds + 2):
        join_all([trainer, worker], meet(1))
        assert "aborted" in worker.call(leave_at_once)
        samples.append(worker.call(threads_and_megabytes))  # while the trainer is still there
        trainer.call(close)
    assert max(threads for threads, _ in samples) <= 2, samples
    assert float(np.polyfit(range(rounds), [megabytes for _, megabytes in samples[2:]], 1)[0]) < 2.0, samples
    for peer in (trainer, worker):
        peer.kill()


def leave_at_once(state: dict[str, Any]) -> str:
    until = time.monotonic() + 0.1
    try:
        state["communicator"].broadcast(torch.ones(BIG, dtype=torch.uint8), time.monotonic() + 300, lambda: time.monotonic() > until)
    except WeightSyncError as exc:
        return str(exc)
    return "it returned"
