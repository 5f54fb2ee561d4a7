"""Where trainer and workers meet on this machine's network: a wrong address, interface or port is an error within seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync import WeightSync
from weightsync.errors import ConfigError, InternalError, ProtocolMismatch, TransportFailed
from weightsync.protocol import PROTOCOL_VERSION, BeginOrder, CommunicatorInfo, Manifest, UpdateRequest
from weightsync.transport import network, rendezvous
from weightsync.transport.communicator import Communicator
from weightsync.worker import joining

CPU = torch.device("cpu")


def meeting(host: str, port: int, world_size: int = 2) -> CommunicatorInfo:
    return CommunicatorInfo(host, port, 1, world_size, {"0": 1}, "gloo")


def test_an_address_that_nobody_has_is_said_within_seconds_and_from_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REACH_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 1.0)  # in some networks somebody answers for every address
    began = time.monotonic()
    with pytest.raises(TransportFailed) as caught:
        Communicator(meeting("10.255.255.1", 4711), 0, CPU, 20.0, 20.0)
    assert time.monotonic() - began < 3.0
    assert "no rendezvous store at 10.255.255.1:4711, tried from" in caught.value.message
    assert network.address_to("10.255.255.1") in caught.value.message and "sync.store_host" in caught.value.hint


def test_another_service_at_the_stores_address_is_not_talked_to_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    web.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(TransportFailed, match=f"no rendezvous store at 127.0.0.1:{web.getsockname()[1]}"):
            rendezvous.join_store(meeting("127.0.0.1", web.getsockname()[1]), 20.0)
        assert time.monotonic() - began < 3.0


def test_a_store_that_takes_a_connection_and_never_answers_is_left_at_the_deadline() -> None:
    """As the one of a controller that was stopped does; torch's client would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(TransportFailed, match="took a connection and did not answer within 1 s"):
            Communicator(meeting("127.0.0.1", silent.getsockname()[1]), 0, CPU, 1.0, 20.0)
        assert time.monotonic() - began < 2.5


def test_a_loopback_address_that_was_told_to_another_machine_is_pointed_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(TransportFailed) as caught:
            rendezvous.join_store(meeting("127.0.0.1", taken.getsockname()[1]), 5.0)
    assert "127.0.0.1 (lo)" in caught.value.message
    assert "127.0.0.1 leads to this machine: where the controller runs on another, set sync.store_host" in caught.value.hint


def test_a_wrong_interface_is_refused_with_those_there_are() -> None:
    wrong = r"interface: got 'eth77', want a network interface of this machine that has an address: here are .*lo \(127\.0\.0\.1"
    with pytest.raises(ConfigError, match=wrong):
        WeightSync("http://127.0.0.1:1", "token", interface="eth77")
    with pytest.raises(ConfigError, match=wrong):
        Communicator(meeting("127.0.0.1", 1), 1, CPU, 5.0, 5.0, "eth77")


def test_an_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": []})
    with pytest.raises(ConfigError, match=r"lo \(127\.0\.0\.1\), eth0 \(no address\)"):
        network.require_interface("eth0")
    network.require_interface("lo")
    network.require_interface("")


def test_interfaces_are_listed_with_their_addresses() -> None:
    assert "127.0.0.1" in network.interfaces()["lo"]
    assert network.way_to("127.0.0.1") == "127.0.0.1 (lo)"


def test_a_taken_port_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_PORT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"sync\.store_port: got {port}, want a free port of 127\.0\.0\.1 \(Address already in use\)"
        ):
            rendezvous.host_store("127.0.0.1", 5.0, port)


def test_a_port_that_comes_free_with_the_end_of_an_earlier_controller_is_taken() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    threading.Timer(0.4, taken.close).start()
    store = rendezvous.host_store("127.0.0.1", 5.0, port)
    assert store.port == port
    assert isinstance(rendezvous.join_store(meeting("127.0.0.1", port), 5.0), object)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_nobody_can_be_told_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"sync\.store_host: got '{host}', want an address of this machine that trainers"):
        rendezvous.host_store(host, 5.0)


def test_a_name_that_means_this_machine_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many hosts files give a machine's own name as 127.0.1.1: nobody else would find it there."""
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: here)
    with pytest.raises(ConfigError, match=r"sync\.store_host: got 'node-7'") as caught:
        rendezvous.host_store("node-7", 5.0)
    assert "here it is 127.0.1.1" in caught.value.hint


def test_the_store_listens_at_its_own_address_alone() -> None:
    other = next((a for held in network.interfaces().values() for a in held if ":" not in a and not a.startswith("127.")), None)
    if other is None:
        pytest.skip("this machine has loopback addresses alone")
    store = rendezvous.host_store("127.0.0.1", 5.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, store.port), timeout=2).close()
    with socket.create_connection(("127.0.0.1", store.port), timeout=2) as found:
        assert found.getpeername() == ("127.0.0.1", store.port)


def test_ipv6_alone_is_enough() -> None:
    try:
        store = rendezvous.host_store("::1", 5.0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    info = meeting("::1", store.port)
    made: list[Communicator] = []
    thread = threading.Thread(target=lambda: made.append(Communicator(info, 1, CPU, 10.0, 10.0)))
    thread.start()
    made.append(Communicator(info, 0, CPU, 10.0, 10.0))
    thread.join()
    got = torch.zeros(3)
    trainer, worker = sorted(made, key=lambda c: c.rank)
    thread = threading.Thread(target=lambda: worker.broadcast(got, time.monotonic() + 5))
    thread.start()
    trainer.broadcast(torch.ones(3), time.monotonic() + 5)
    thread.join()
    assert got.tolist() == [1.0] * 3
    for communicator in made:
        communicator.close()


def test_an_ipv6_address_that_nobody_has_is_said_with_its_brackets() -> None:
    with pytest.raises(TransportFailed, match=r"no rendezvous store at \[2001:db8::1\]:4711, tried from"):
        Communicator(meeting("2001:db8::1", 4711), 0, CPU, 2.0, 2.0)


# --- the other side's versions ------------------------------------------------------------------

GOOD: dict[str, Any] = {"torch_version": torch.__version__, "protocol_version": PROTOCOL_VERSION, "nccl_version": "2.28.9"}


def asked(transport: str, **theirs: Any) -> UpdateRequest:
    return UpdateRequest("u", "t", 1, Manifest(()), 4096, "h", 10.0, transport, **{**GOOD, **theirs})


@pytest.mark.parametrize(
    ("transport", "theirs", "words"),
    [
        ("gloo", {"protocol_version": 99}, f"the trainer has protocol 99, the engine {PROTOCOL_VERSION}"),
        ("gloo", {"torch_version": "1.12.0"}, "the trainer has torch 1.12, the engine 2."),
        ("nccl", {"torch_version": "1.12.0"}, "the trainer has torch 1.12, the engine 2."),
        ("nccl", {"nccl_version": "2.28.8"}, "the trainer has NCCL 2.28.8, the engine 2.28.9"),
        ("nccl", {"nccl_version": ""}, "the trainer has NCCL unknown, the engine 2.28.9"),
        ("nccl", {"nccl_version": "2.27.5", "torch_version": "1.12.0"}, "and NCCL 2.27.5, the engine 2.28.9"),
    ],
)
def test_a_worker_that_can_not_talk_to_the_trainer_says_both_versions(
    transport: str, theirs: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)))
    order = SimpleNamespace(request=asked(transport, **theirs))
    place = joining.Joining(CPU, 0)
    with pytest.raises(ProtocolMismatch) as caught:
        place.begin(order)  # type: ignore[arg-type]
    assert words in caught.value.message and caught.value.update_id == "u" and not caught.value.retryable


def test_a_build_and_a_patch_of_torch_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)))
    minor = ".".join(torch.__version__.split(".")[:2])
    for version in (f"{minor}.7+cu130", f"{minor}.0a0"):
        joining.require_same_versions(asked("nccl", torch_version=version))
        joining.require_same_versions(dataclasses.replace(asked("gloo", torch_version=version), nccl_version=""))


# --- ranks --------------------------------------------------------------------------------------


def test_two_engines_of_four_workers_each_have_ranks_1_to_8_and_nobody_elses() -> None:
    """Offsets that were computed for each engine by itself gave two workers one rank."""
    first, world = rendezvous.ranks({0: 4, 1: 4}, {})
    info = CommunicatorInfo("h", 1, 1, world, {str(o): rank for o, rank in first.items()}, "gloo")
    orders = [BeginOrder(asked("gloo"), info, ordinal, first[ordinal], 1.0) for ordinal in (0, 1)]
    assert [joining.place(order, rank) for order in orders for rank in range(4)] == list(range(1, 9))


@pytest.mark.parametrize(("counted", "engine", "there"), [({0: 2, 1: 4}, 0, 4), ({0: 4, 1: 2}, 1, 4), ({0: 1}, 0, 2)])
def test_a_world_of_another_size_than_there_are_workers_is_refused_before_anybody_meets(
    counted: dict[int, int], engine: int, there: int
) -> None:
    first, world = rendezvous.ranks(counted, {})
    info = CommunicatorInfo("10.255.255.1", 1, 1, world, {str(o): rank for o, rank in first.items()}, "gloo")
    order = BeginOrder(asked("gloo"), info, engine, first[engine], 20.0)
    taken = []
    for rank in range(there):
        try:
            taken.append(joining.place(order, rank))
        except InternalError as refused:
            assert f"worker {rank} of engine {engine} would be rank {first[engine] + rank} of {world}" in refused.message
    assert len(taken) == counted[engine]
    began = time.monotonic()
    with pytest.raises(InternalError):
        joining.Joining(CPU, there - 1).begin(order)()
    assert time.monotonic() - began < 0.5, "nobody was looked for"


# --- calls that have no deadline ----------------------------------------------------------------


def test_every_call_to_an_actor_goes_through_the_one_that_has_a_deadline() -> None:
    """`.remote` gives an answer that is waited for as long as it takes; `fleet/calls.py` bounds it. Creating an actor waits for nothing."""
    import ast

    found = set()
    root = Path(joining.__file__).resolve().parent.parent
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            creates = isinstance(node, ast.Call) and ast.unparse(node).startswith("ray.remote(")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote" and not creates:
                found.add(str(file.relative_to(root)))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("ray.get", "ray.wait"):
                found.add(f"{file.relative_to(root)}: {ast.unparse(node)}")
    assert found == {"fleet/calls.py"}
