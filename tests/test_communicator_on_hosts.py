"""The communicator between hosts of their own: by addresses that are not loopback, and over a link that is cut.

Not covered: a whole fleet (`test_two_hosts.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import hosts
from tests.peers import Peer
from tests.test_communicator import broadcast, close, receive_until_it_breaks
from weightsync.errors import TransportFailed
from weightsync.protocol import CommunicatorInfo
from weightsync.transport import rendezvous
from weightsync.transport.communicator import Communicator

CPU = torch.device("cpu")
#: Who is where: the trainer is rank 0, engine 0 is on the host of the store.
RANKS = {"c": 0, "a": 1, "b": 2}


def open_store(state: dict[str, Any], host: str) -> int:
    state["store"] = rendezvous.host_store(host, 20.0)
    return int(state["store"].port)


def connect(state: dict[str, Any], info: CommunicatorInfo, rank: int, interface: str, seconds: float = 20.0) -> None:
    state["communicator"] = Communicator(info, rank, CPU, seconds, 60.0, interface)


class Hosts:
    """A process on each host, and the store on the first."""

    def __init__(self, network: hosts.Network) -> None:
        self.network, self._generations = network, itertools.count(1)
        self.peers = {host: Peer().ready() for host in RANKS}
        for host, peer in self.peers.items():
            peer.call(hosts.enter, network.namespace(host))
        self._port = self.peers["a"].call(open_store, network.address("a"))

    def meeting(self, of: str) -> CommunicatorInfo:
        members = {"0": 1, "1": 2} if "b" in of else {"0": 1}
        return CommunicatorInfo(self.network.address("a"), self._port, next(self._generations), len(of), members, "gloo")

    def all(self, of: str, function: Any, *args: Any) -> dict[str, Any]:
        """What a function answers that these hosts call at the same time, each with its rank in place of `RANKS`."""
        for host in of:
            self.peers[host].start(function, *(RANKS[host] if arg is RANKS else arg for arg in args))
        return {host: self.peers[host].result(30) for host in of}

    def exchange(self, of: str, interface: str = "") -> None:
        """Meet and broadcast once."""
        self.all(of, connect, self.meeting(of), RANKS, interface)
        for host in of:
            self.peers[host].start(broadcast, [1.0, 2.0, 3.0] if host == "c" else None, 1)
        assert [self.peers[host].result(30) for host in of] == [[[1.0, 2.0, 3.0]]] * len(of)

    def close(self, of: str = "abc") -> None:
        self.all(of, close)


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    if why := hosts.why_not():
        pytest.skip(why)
    with hosts.Network("abc") as network:
        made = Hosts(network)
        yield made
        for peer in made.peers.values():
            peer.kill()


@pytest.mark.parametrize("interface", ["", "eth0"])
def test_hosts_meet_and_broadcast_by_their_own_addresses(three: Hosts, interface: str) -> None:
    three.exchange("cab", interface)
    three.close()


def test_a_cut_link_ends_a_broadcast_at_its_deadline_and_the_others_meet_again_at_once(three: Hosts) -> None:
    three.all("cab", connect, three.meeting("cab"), RANKS, "")
    for host in "abc":
        three.peers[host].start(receive_until_it_breaks, 1.5)  # the first of them sends
    time.sleep(0.4)
    three.network.cut("b")
    try:
        ended = {host: three.peers[host].result(10) for host in "abc"}
        assert all(isinstance(error, TransportFailed) and took < 3.5 for error, took, _ in ended.values()), ended
        began = time.monotonic()
        three.exchange("ca")
        three.close("ca")
        assert time.monotonic() - began < 3.0
    finally:
        three.network.mend("b")
    three.exchange("cab")
    three.close()


def test_a_host_that_is_cut_off_is_named_by_those_who_wait_for_it(three: Hosts) -> None:
    three.network.cut("b")
    try:
        began, meeting = time.monotonic(), three.meeting("cab")
        for host in "ca":
            three.peers[host].start(connect, meeting, RANKS[host], "", 1.5)
        for host in "ca":
            with pytest.raises(TransportFailed, match=r"engine 1 \(rank 2\) did not come") as caught:
                three.peers[host].result(10)
            assert three.network.address(host) in caught.value.message, "from where it was tried"
        assert time.monotonic() - began < 5.0
    finally:
        three.network.mend("b")
    three.exchange("cab")
    three.close()
