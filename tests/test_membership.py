"""Who is reached how, and by which rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_ledger import MANIFEST
from weightsync.errors import Refused
from weightsync.fleet.membership import Membership, local_workers
from weightsync.place import Place, here
from weightsync.protocol import UpdateRequest
from weightsync.sections import SyncSettings
from weightsync.transport import rendezvous

HOST, POD = "boot/1", "boot/2"
TRAINER = Place(HOST, "GPU-0")


def request(transport: str = "nccl", place: Place | None = TRAINER, socket: str = "s", trainer: str = "t") -> UpdateRequest:
    return UpdateRequest("u", trainer, 1, MANIFEST, 4096, "hash", 10.0, transport, "2.13.0", place=place, socket=socket)


def gpu(number: int, host: str = HOST, nccl_host: str = "") -> Place:
    return Place(host, f"GPU-{number}", nccl_host)


CPUS = request("gloo", Place(HOST, "cpu"))


@pytest.mark.parametrize(
    ("policy", "asked", "places", "want"),
    [
        ("auto", request(), {0: [gpu(0)]}, {0: (0,)}),
        ("auto", request(), {0: [gpu(0), gpu(1)], 1: [gpu(2), gpu(3)]}, {0: (0,)}),
        ("auto", request(), {0: [gpu(1)], 4: [gpu(2), gpu(0)]}, {4: (1,)}),
        ("auto", request(), {0: [gpu(0)], 1: [gpu(0)]}, {0: (0,), 1: (0,)}),
        ("host", request(), {0: [gpu(0)], 1: [gpu(1)]}, {0: (0,)}),  # the bucket is on the trainer's GPU
        ("auto", CPUS, {0: [Place(HOST, "cpu")]}, {}),
        ("host", CPUS, {0: [Place(HOST, "cpu")], 1: [Place(POD, "cpu")], 2: [gpu(0), gpu(1)]}, {0: (0,), 2: (0, 1)}),
        ("off", CPUS, {0: [Place(HOST, "cpu")]}, {}),
        ("host", request("gloo", Place("", "cpu")), {0: [Place("", "cpu")]}, {}),  # nobody knows which host
        ("host", request("gloo", None), {0: [Place(HOST, "cpu")]}, {}),
        ("host", request("gloo", Place(HOST, "cpu"), socket=""), {0: [Place(HOST, "cpu")]}, {}),
        ("host", CPUS, {0: [None]}, {}),
        # NCCL takes two ranks on one GPU where it is told that they are two hosts.
        ("off", request(place=Place(HOST, "GPU-0", "a")), {0: [gpu(0, nccl_host="b")]}, {}),
    ],
)
def test_who_is_handed_memory(policy: str, asked: UpdateRequest, places: Any, want: dict[int, tuple[int, ...]]) -> None:
    assert local_workers(policy, asked, places) == want


@pytest.mark.parametrize(
    ("policy", "places", "who", "hint"),
    [
        ("off", {0: [gpu(1)], 3: [gpu(2), gpu(0)]}, "the trainer and worker 1 of engine 3 are on one GPU", "Set sync.local to auto"),
        ("auto", {0: [gpu(0, POD)]}, "the trainer and worker 0 of engine 0", "one network namespace"),
        ("auto", {0: [gpu(1)], 1: [gpu(1)]}, "worker 0 of engine 0 and worker 0 of engine 1", "Give each engine a GPU"),
    ],
)
def test_two_ranks_on_one_gpu_are_refused_before_nccl_hangs_on_them(policy: str, places: Any, who: str, hint: str) -> None:
    with pytest.raises(Refused, match=who) as caught:
        local_workers(policy, request(), places)
    assert hint in caught.value.hint


def test_a_generation_lasts_while_nothing_about_its_members_changes() -> None:
    made = Membership(SyncSettings(local="host"), 99, 10)
    places: dict[int, list[Place | None]] = {0: [Place(HOST, "cpu"), None], 1: [Place(POD, "cpu")]}
    first = made.communicator(CPUS, {0: "a", 1: "b"}, places)
    assert (first.generation, first.world_size, first.members, first.local) == (11, 3, {"0": 1, "1": 2}, {"0": (0,)})
    assert (first.host, first.port, first.transport) == ("127.0.0.1", 99, "gloo")
    assert made.communicator(CPUS, {0: "a", 1: "b"}, places) == first
    changes: list[Any] = [
        (CPUS, {0: "a", 1: "c"}, places),
        (request("gloo", CPUS.place, trainer="other"), {0: "a", 1: "c"}, places),
        (request("gloo", CPUS.place, "s2", "other"), {0: "a", 1: "c"}, places),
        (request("gloo", Place(POD, "cpu"), "s2", "other"), {0: "a", 1: "c"}, places),
        (request("gloo", Place(POD, "cpu"), "s2", "other"), {1: "c"}, {1: places[1]}),
    ]
    for number, change in enumerate(changes):
        assert made.communicator(*change).generation == made.communicator(*change).generation == 12 + number
    made.renew()
    assert made.communicator(*changes[-1]).generation == 17
    assert made.communicator(*changes[-1]).world_size == 1


@given(st.dictionaries(st.integers(0, 9), st.lists(st.booleans(), min_size=1, max_size=8), max_size=6))
def test_every_worker_that_is_not_local_has_a_rank_of_its_own_and_none_is_left_over(local: dict[int, list[bool]]) -> None:
    workers = {engine: len(flags) for engine, flags in local.items()}
    reached = {engine: tuple(w for w, flag in enumerate(flags) if flag) for engine, flags in local.items()}
    first, world = rendezvous.ranks(workers, reached)
    found = [rendezvous.rank_of(first[engine], reached[engine], w) for engine, count in workers.items() for w in range(count)]
    assert sorted(rank for rank in found if rank is not None) == list(range(1, world))
    assert found.count(None) == sum(map(len, reached.values()))


def test_this_place_is_this_kernels_and_network_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "me")
    mine = here("cpu")
    assert mine == here("cpu") and mine.reaches(here("GPU-1")) and mine.nccl_host == "me"
    assert not mine.reaches(Place("elsewhere", "cpu"))
    monkeypatch.setattr("weightsync.place.Path.read_text", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError()))
    assert here("cpu").host == "" and not here("cpu").reaches(here("cpu"))
