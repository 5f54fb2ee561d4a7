"""NCCL between two GPUs, where a death breaks no connection: who waits learns of it by the signs of life. Needs two GPUs, no vLLM."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.peers import Peer
from weightsync.errors import TransportFailed, WeightSyncError
from weightsync.protocol import CommunicatorInfo
from weightsync.transport import pulse, rendezvous
from weightsync.transport.communicator import Communicator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]

BIG = 512 << 20


def connect(state: dict[str, Any], info: CommunicatorInfo, rank: int) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    state["device"] = torch.device("cuda", rank)
    torch.cuda.set_device(rank)
    state["communicator"] = Communicator(info, rank, state["device"], 60.0, 120.0)


def once(state: dict[str, Any], value: int) -> int:
    tensor = torch.full((BIG,), value, dtype=torch.uint8, device=state["device"])
    state["communicator"].broadcast(tensor, time.monotonic() + 60)
    return int(tensor[-1])


def without_end(state: dict[str, Any]) -> tuple[WeightSyncError, float]:
    """What ended it, and when."""
    tensor = torch.ones(BIG, dtype=torch.uint8, device=state["device"])
    for number in itertools.count():
        if number == 2:
            state["pipe"].send((False, "under way"))
        try:
            state["communicator"].broadcast(tensor, time.monotonic() + 120)
        except WeightSyncError as exc:
            return exc, time.monotonic()
    raise AssertionError


def works(state: dict[str, Any]) -> bool:
    """Whether this process still uses its GPU."""
    ones = torch.ones(256, 256, device=state["device"])
    return bool((ones @ ones).eq(256).all())


@pytest.fixture
def two() -> Iterator[list[Peer]]:
    peers = [Peer(whole=True).ready() for _ in range(2)]
    yield peers
    for peer in peers:
        peer.kill()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("who", [0, 1])
def test_who_is_killed_or_stopped_in_mid_broadcast_is_named_and_the_other_goes_on(who: int, name: str, two: list[Peer]) -> None:
    store = rendezvous.host_store("127.0.0.1", 20.0)
    infos = [CommunicatorInfo("127.0.0.1", store.port, generation, 2, {"0": 1}, "nccl") for generation in (1, 2)]
    for rank, peer in enumerate(two):
        peer.start(connect, infos[0], rank)
    for peer in two:
        peer.result(60)
    for peer in two:
        peer.start(without_end)
    for peer in two:
        assert peer.result(60) == "under way"
    two[who].signal(getattr(signal, name))
    stopped = time.monotonic()
    error, ended = two[1 - who].result(60)
    assert type(error) is TransportFailed and ("the trainer (rank 0)", "engine 0 (rank 1)")[who] in error.message
    assert ended - stopped < pulse.SILENCE + 5
    print(name, who, f"{ended - stopped:.1f} s", error.message)
    assert two[1 - who].call(works)

    two[who].kill()
    two[who] = Peer(whole=True).ready()
    for rank, peer in enumerate(two):
        peer.start(connect, infos[1], rank)
    for peer in two:
        peer.result(60)
    for peer in two:
        peer.start(once, 7 if peer is two[0] else 0)
    assert [peer.result(60) for peer in two] == [7, 7]
