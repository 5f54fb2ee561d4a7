"""Signs of life in the store, between real processes that are killed and stopped; and what a broadcast makes of them.

Under NCCL between two GPUs: `tests/gpu/test_pulse_on_cuda.py`.
"""

from __future__ import annotations

import functools
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.fleets import wait_until
from tests.peers import Peer
from weightsync.errors import TransportFailed
from weightsync.protocol import CommunicatorInfo
from weightsync.transport import communicator, rendezvous
from weightsync.transport.pulse import Pulse

PERIOD, SILENCE = 0.1, 2.0
Meet = Callable[[int], CommunicatorInfo]


# --- what runs in the other processes ----------------------------------------------------------


def host(state: dict[str, Any]) -> int:
    state["store"] = rendezvous.host_store("127.0.0.1", 20.0)
    return int(state["store"].port)


def count(state: dict[str, Any], info: CommunicatorInfo, rank: int, watched: list[int]) -> None:
    state["pulse"] = Pulse(rendezvous.join_store(info, 5.0), rank, watched, PERIOD, SILENCE)


def silent(state: dict[str, Any]) -> list[int]:
    found: list[int] = state["pulse"].silent()
    return found


def stop(state: dict[str, Any]) -> None:
    state.pop("pulse").stop()


def join_with_a_pulse(state: dict[str, Any], info: CommunicatorInfo, rank: int) -> None:
    """As under NCCL, with gloo, which notices a death by itself, but nobody who is stopped."""
    communicator._PULSED = ("gloo",)
    communicator.Pulse = functools.partial(Pulse, period=PERIOD, silence=SILENCE)  # type: ignore[misc,assignment]
    state["communicator"] = communicator.Communicator(info, rank, torch.device("cpu"), 20.0, 60.0)


def broadcast(state: dict[str, Any], seconds: float) -> TransportFailed | None:
    try:
        state["communicator"].broadcast(torch.zeros(1 << 24), time.monotonic() + seconds)
    except TransportFailed as exc:
        return exc
    return None


# --- the tests ---------------------------------------------------------------------------------


@pytest.fixture
def meet() -> Iterator[tuple[Peer, Meet]]:
    """A process that has the store, and what makes a fresh generation for so many ranks."""
    store, generations = Peer().ready(), itertools.count(1)
    port = store.call(host)
    yield store, lambda world: CommunicatorInfo("127.0.0.1", port, next(generations), world, {"0": 1, "1": 2}, "gloo")
    store.kill()


@pytest.fixture
def three(meet: tuple[Peer, Meet]) -> Iterator[list[Peer]]:
    """A trainer that watches two workers, which watch it."""
    info, peers = meet[1](3), [Peer().ready() for _ in range(3)]
    for rank, peer in enumerate(peers):
        peer.call(count, info, rank, [0] if rank else [1, 2])
    yield peers
    for peer in peers:
        peer.kill()


def test_who_counts_is_never_silent(three: list[Peer]) -> None:
    until = time.monotonic() + 2 * SILENCE
    while time.monotonic() < until:
        assert [peer.call(silent) for peer in three] == [[], [], []]
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_who_is_killed_or_stopped_is_named_and_nobody_else(three: list[Peer], name: str) -> None:
    began = time.monotonic()
    three[1].signal(getattr(signal, name))
    wait_until(lambda: three[0].call(silent) == [1], 10 * SILENCE, "the word of it")
    assert time.monotonic() - began > SILENCE - PERIOD
    assert three[2].call(silent) == []


def test_who_goes_on_is_alive_again(three: list[Peer]) -> None:
    three[0].signal(signal.SIGSTOP)
    wait_until(lambda: three[1].call(silent) == [0] == three[2].call(silent), 10 * SILENCE, "the word of it")
    three[0].signal(signal.SIGCONT)
    wait_until(lambda: three[1].call(silent) == [] == three[2].call(silent), 10 * SILENCE, "its next sign")
    assert three[0].call(silent) == [], "what it slept through is not their silence"


def test_who_never_came_or_has_left_is_silent(meet: tuple[Peer, Meet]) -> None:
    info, here = meet[1](3), [Peer().ready() for _ in range(2)]
    try:
        for rank, peer in enumerate(here):
            peer.call(count, info, rank, [0] if rank else [1, 2])
        wait_until(lambda: here[0].call(silent) == [2], 10 * SILENCE, "the word of it")
        here[1].call(stop)
        wait_until(lambda: here[0].call(silent) == [1, 2], 10 * SILENCE, "the word of it")
    finally:
        for peer in here:
            peer.kill()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_without_the_store_nobody_is_judged(meet: tuple[Peer, Meet], three: list[Peer], name: str) -> None:
    meet[0].signal(getattr(signal, name))
    until = time.monotonic() + 2 * SILENCE
    while time.monotonic() < until:
        assert [peer.call(silent) for peer in three] == [[], [], []]
        time.sleep(0.05)


@pytest.mark.parametrize(("stopped", "said"), [(0, "the trainer (rank 0)"), (2, "engine 1 (rank 2)")])
def test_a_broadcast_ends_when_a_peer_gives_no_sign_of_life(meet: tuple[Peer, Meet], stopped: int, said: str) -> None:
    info, peers = meet[1](3), [Peer().ready() for _ in range(3)]
    try:
        for rank, peer in enumerate(peers):
            peer.start(join_with_a_pulse, info, rank)
        for peer in peers:
            peer.result()
        for peer in peers:
            peer.start(broadcast, 20.0)
        assert [peer.result() for peer in peers] == [None] * 3

        peers[stopped].signal(signal.SIGSTOP)
        others = [peer for rank, peer in enumerate(peers) if rank != stopped and (rank == 0 or stopped == 0)]
        began = time.monotonic()
        for peer in others:
            peer.start(broadcast, 20.0)
        errors = [peer.result() for peer in others]
        # Who hears of it first leaves, which gloo, unlike NCCL, tells the others at once.
        assert any(error.message.startswith(f"{said} gave no sign of life for") for error in errors)
        assert all(error.retryable for error in errors)
        assert SILENCE - PERIOD < time.monotonic() - began < 6 * SILENCE
    finally:
        for peer in peers:
            peer.kill()
