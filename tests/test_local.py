"""Local links between real processes: updates by shared memory, alone and beside gloo, and every way in which one can break.

The trainer's sender and the workers' receiving code are the real ones; engines are not part of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import local_link
from tests.peers import Peer
from weightsync.client.sender import Sender
from weightsync.client.source import offer
from weightsync.errors import Aborted, TransportFailed, WeightSyncError
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.transport import fanout, rendezvous, wire
from weightsync.transport.communicator import Communicator
from weightsync.transport.link import Link
from weightsync.transport.local import Listener
from weightsync.transport.packing import BucketPlan, plan_buckets
from weightsync.worker.joining import Joining
from weightsync.worker.receiver import Receiver
from weightsync.worker.staging import Regions, Whole
from weightsync.worker.streaming import Passing

CPU = torch.device("cpu")
BUCKET = 4096

Tensors = dict[str, torch.Tensor]


# --- what runs in the other processes ----------------------------------------------------------


def listen(state: dict[str, Any]) -> tuple[str, str]:
    if "listener" not in state:
        state["listener"] = Listener()
    return state["listener"].name, state["listener"].secret


def device_of(info: CommunicatorInfo) -> torch.device:
    return torch.device("cuda:0") if info.transport == "nccl" else CPU


def request_of(tensors: Tensors, bucket: int, seconds: float, reach: tuple[str, str], transport: str) -> UpdateRequest:
    manifest = offer(tensors).manifest
    plan = plan_buckets(manifest, bucket)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if transport == "nccl" else ""
    about = {"nccl_version": nccl, "allow_nonfinite": True, "socket": reach[0], "secret": reach[1]}
    return UpdateRequest("u", "trainer", 1, manifest, bucket, plan.hash, seconds, transport, torch.__version__, **about)


def send(state: dict[str, Any], info: CommunicatorInfo, tensors: Tensors, bucket: int, hold: bool = False, seconds: float = 20.0) -> None:
    """One update, as a trainer sends it; with `hold` it says so behind the first bucket and stays there."""
    channel = state.get("channel")
    if channel is None or not channel.open or channel.info != info:
        if channel is not None:
            channel.close()
        channel = state["channel"] = fanout.join(info, device_of(info), state["listener"], 10.0, 60.0)

    def progress(sent: int, total: int) -> None:
        if hold:
            state["pipe"].send((False, "holds"))
            time.sleep(600)

    offered = offer({name: tensor.to(device_of(info)) for name, tensor in tensors.items()})
    sender = Sender(offered, plan_buckets(offered.manifest, bucket), progress)
    sender.send(channel, time.monotonic() + seconds, lambda: False, lambda: None)


def receive(state: dict[str, Any], order: BeginOrder, rank: int) -> dict[str, bytes]:
    """One update, as a worker receives it; what arrived."""
    device = device_of(order.communicator)
    joining = state.setdefault("joining", Joining(device, rank))
    regions = state.setdefault("regions", Regions())
    receiver = Receiver(order, rank, device, device, joining.begin(order), regions=regions)
    into, taken = receiver.held(), None
    receiver.start()
    if isinstance(into, Passing):  # as a loader takes them
        with contextlib.suppress(WeightSyncError):
            taken = [bytes_of(into.take(index)) for index in range(len(order.request.manifest.tensors))]
    while receiver._thread.is_alive():
        receiver._thread.join(0.01)
    if receiver.error is not None:
        joining.end(order)
        joining.leave()
        raise receiver.error
    state["landed"] = isinstance(into, Whole) and into.lent is not None
    names = [spec.name for spec in order.request.manifest.tensors]
    return {name: bytes_of(into.tensor(index)) if taken is None else taken[index] for index, name in enumerate(names)}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def receive_timed(state: dict[str, Any], order: BeginOrder, rank: int) -> tuple[WeightSyncError, float]:
    """An update that breaks: why, and when that was known."""
    try:
        receive(state, order, rank)
    except WeightSyncError as exc:
        return exc, time.monotonic()
    raise AssertionError("the update arrived")


def warm(_: dict[str, Any]) -> None:
    """What CUDA does first in a process takes seconds."""
    torch.zeros(1, device="cuda:0")


def fork_a_child(state: dict[str, Any]) -> int:
    """A child that holds whatever this process has open, as a data loader's does."""
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    return pid


def leave(state: dict[str, Any]) -> None:
    if (channel := state.pop("channel", None)) is not None:
        channel.close()
    if (joining := state.pop("joining", None)) is not None:
        joining.leave()
    if (regions := state.pop("regions", None)) is not None:
        regions.drop()


def held(state: dict[str, Any]) -> tuple[int, int]:
    """Open files, and bytes of shared segments that are mapped."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weightsync" in line]
    ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return len(os.listdir("/proc/self/fd")), sum(last - first for first, last in ends)


# --- fixtures ----------------------------------------------------------------------------------


class Stage:
    """A trainer and its workers, each in a process of its own: as many local ones as are asked for, and the rest over gloo.

    Where `stages` is `auto` the local ones lend the trainer the memory that they stage in; where it is `none` they copy out of its ring.
    With several, they take turns.
    """

    _store = None
    _generations = itertools.count(1)

    def __init__(self, local: int, remote: int = 0, transport: str = "gloo", stages: tuple[str, ...] = ("auto",)) -> None:
        if Stage._store is None:
            Stage._store = rendezvous.host_store("127.0.0.1", 20.0)
        self.local, self.remote, self.transport, self.stages = local, remote, transport, stages
        self.trainer, *self.workers = [self._peer() for _ in range(1 + local + remote)]
        for peer in (self.trainer, *self.workers):
            peer.ready()
        #: How long an update may take; the first on a GPU also compiles.
        self.patience = 20.0 if transport == "gloo" else 90.0
        if transport == "nccl":
            for peer in (self.trainer, *self.workers):
                peer.call(warm, seconds=60)
        self.renew()

    def _peer(self) -> Peer:
        return Peer(whole=self.transport == "nccl")  # CUDA takes no forked processes

    def renew(self) -> None:
        """Another generation, as the controller makes behind what failed."""
        assert Stage._store is not None
        locals_ = {"0": tuple(range(self.local))} if self.local else {}
        self.info = CommunicatorInfo(
            "127.0.0.1", Stage._store.port, next(Stage._generations), 1 + self.remote, {"0": 1}, self.transport, local=locals_
        )
        self.reach = self.trainer.call(listen)

    def order(self, tensors: Tensors, bucket: int, seconds: float = 20.0, rank: int = 0) -> BeginOrder:
        stage = self.stages[rank % len(self.stages)]
        return BeginOrder(request_of(tensors, bucket, seconds, self.reach, self.transport), self.info, 0, 1, 10.0, stage=stage)

    def begin(self, tensors: Tensors, bucket: int = BUCKET, hold: bool = False, seconds: float = 0.0, timed: bool = False) -> None:
        seconds = seconds or self.patience
        for rank, worker in enumerate(self.workers):
            worker.start(receive_timed if timed else receive, self.order(tensors, bucket, seconds, rank), rank)
        self.trainer.start(send, self.info, tensors, bucket, hold, seconds)

    def update(self, tensors: Tensors, bucket: int = BUCKET) -> None:
        """One that must arrive, to the bit, at everybody."""
        self.begin(tensors, bucket)
        self.trainer.result(self.patience)
        want = {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
        for worker in self.workers:
            assert worker.result(self.patience) == want

    def hold(self, seconds: float = 0.0) -> None:
        """An update that stands behind its first bucket."""
        self.begin(some(6), hold=True, seconds=seconds, timed=True)
        assert self.trainer.result(self.patience) == "holds"

    def replace_trainer(self) -> None:
        self.trainer.kill()
        self.trainer = self._peer().ready()
        self.renew()

    def end(self) -> None:
        for peer in (self.trainer, *self.workers):
            peer.kill()


@pytest.fixture
def stage() -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(local: int, remote: int = 0, stages: tuple[str, ...] = ("auto",)) -> Stage:
        made.append(Stage(local, remote, stages=stages))
        return made[-1]

    yield make
    for one in made:
        one.end()


LENT, RING, MIXED = ("auto",), ("none",), ("auto", "none")
ways = pytest.mark.parametrize("way", [LENT, RING, MIXED], ids=["lent", "ring", "one of each"])


@pytest.fixture(scope="module")
def _two() -> Iterator[Stage]:
    made = Stage(2)
    yield made
    made.end()


@pytest.fixture
def two(_two: Stage) -> Stage:
    """Two local workers that lend, for tests that leave everybody as they were."""
    _two.stages = LENT
    return _two


def some(count: int, seed: int = 0, nbytes: int = BUCKET) -> Tensors:
    """So many tensors of any bits, each as large as a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator) for n in range(count)}


def drawn(sizes: list[int], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for n, size in enumerate(sizes)}


# --- what arrives ------------------------------------------------------------------------------


@settings(max_examples=90, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    way=st.sampled_from([LENT, RING, MIXED]),
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    bucket=st.sampled_from([4096, 4160, 10_000, 1 << 20]),
    seed=st.integers(0, 9),
)
def test_every_bit_arrives_at_everybody_over_one_link(two: Stage, way: tuple[str, ...], sizes: list[int], bucket: int, seed: int) -> None:
    two.stages = way
    two.update(drawn(sizes, seed), bucket)


@ways
def test_more_digests_than_a_message_holds_arrive(two: Stage, way: tuple[str, ...]) -> None:
    two.stages = way
    two.update({f"w{n}": torch.full((1,), n % 251, dtype=torch.uint8) for n in range(3000)}, 1 << 20)


def test_a_trainer_that_comes_again_finds_the_same_workers(two: Stage) -> None:
    two.update(some(3))
    two.trainer.call(leave)
    two.renew()
    two.update(some(3, seed=1))


@pytest.mark.parametrize("way", [LENT, RING], ids=["lent", "ring"])
def test_one_update_goes_to_a_local_worker_and_by_gloo_to_two_others(stage: Callable[..., Stage], way: tuple[str, ...]) -> None:
    mixed = stage(1, 2, way)
    for seed in range(3):
        mixed.update(some(3, seed))
    assert [peer.call(held)[1] > 0 for peer in (mixed.trainer, mixed.workers[0])] == [way is RING] * 2
    assert mixed.workers[1].call(held)[1] == mixed.workers[2].call(held)[1] == 0


def test_the_ring_is_kept_between_updates_and_nothing_is_left_behind(two: Stage) -> None:
    two.stages = RING
    peers = (two.trainer, *two.workers)
    for peer in peers:
        peer.call(leave)
    two.renew()
    before = [peer.call(held) for peer in peers]
    two.update(some(3))
    first = [peer.call(held) for peer in peers]
    assert all(mapped > 0 for _, mapped in first)
    for seed in range(50):
        two.update(some(3, seed))
    assert [peer.call(held) for peer in peers] == first
    two.update(some(3, nbytes=3 * BUCKET), 3 * BUCKET)  # no longer fits: larger ones in the old ones' place
    assert [files for files, _ in (peer.call(held) for peer in peers)] == [files for files, _ in first]
    assert [mapped for _, mapped in (peer.call(held) for peer in peers)] == [3 * mapped for _, mapped in first]
    for peer in peers:
        peer.call(leave)
    assert [peer.call(held) for peer in peers] == before
    two.renew()


@ways
def test_fifty_links_leave_nothing_behind(two: Stage, way: tuple[str, ...]) -> None:
    two.stages = way
    two.update(some(1))
    before = [peer.call(held) for peer in (two.trainer, *two.workers)]
    for seed in range(50):
        two.renew()
        two.update(some(1, seed))
    assert [peer.call(held) for peer in (two.trainer, *two.workers)] == before


# --- who dies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("orphan", "way"),
    [(False, LENT), (False, RING), (True, LENT)],
    ids=["lent", "ring", "with a child that holds its sockets"],
)
def test_workers_learn_at_once_that_the_trainer_was_killed_and_take_the_next_ones_update(
    stage: Callable[..., Stage], orphan: bool, way: tuple[str, ...]
) -> None:
    two = stage(2, stages=way)
    child = 0
    if orphan:
        two.update(some(2))
        child = two.trainer.call(fork_a_child)
    two.hold()
    two.trainer.signal(signal.SIGKILL)
    killed = time.monotonic()
    for worker in two.workers:
        error, at = worker.result()
        assert type(error) is TransportFailed and error.retryable
        assert "the trainer is gone" in error.message
        assert at - killed < 3.0
    if child:
        os.kill(child, signal.SIGKILL)
    two.replace_trainer()
    two.update(some(3))


def test_workers_learn_at_once_that_the_trainer_left_though_a_child_of_it_holds_its_sockets(stage: Callable[..., Stage]) -> None:
    two = stage(2)
    two.update(some(2))
    child = two.trainer.call(fork_a_child)
    order = two.order(some(2), BUCKET)
    for rank, worker in enumerate(two.workers):
        worker.start(receive_timed, order, rank)
    two.trainer.call(leave)
    left = time.monotonic()
    for worker in two.workers:
        error, at = worker.result()
        assert type(error) is TransportFailed and "the trainer is gone" in error.message
        assert at - left < 3.0
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("way", [LENT, RING], ids=["lent", "ring"])
def test_a_trainer_that_hangs_costs_its_workers_no_more_than_the_deadline(stage: Callable[..., Stage], way: tuple[str, ...]) -> None:
    two = stage(2, stages=way)
    began = time.monotonic()
    two.hold(seconds=2.0)
    two.trainer.signal(signal.SIGSTOP)
    for worker in two.workers:
        error, at = worker.result()
        assert type(error) is TransportFailed and "deadline" in error.message
        assert 1.9 < at - began < 6
    two.replace_trainer()
    two.update(some(3))


@pytest.mark.parametrize(("victim", "remote"), [(0, 0), (1, 0), (0, 2), (2, 2)], ids=["first", "second", "local of mixed", "gloo of mixed"])
def test_the_trainer_and_the_others_learn_at_once_that_a_worker_was_killed(stage: Callable[..., Stage], victim: int, remote: int) -> None:
    some_stage = stage(1, remote) if remote else stage(2)
    some_stage.update(some(1))
    tensors = some(2, nbytes=32 << 20)
    order = some_stage.order(tensors, 1 << 20, 30.0)
    for rank, worker in enumerate(some_stage.workers):
        if rank != victim:
            worker.start(receive_timed, order, rank)
    some_stage.trainer.start(send, some_stage.info, tensors, 1 << 20, False, 30.0)
    time.sleep(0.3)  # everybody waits for the victim, which takes nothing
    killed = time.monotonic()
    some_stage.workers[victim].signal(signal.SIGKILL)
    with pytest.raises(TransportFailed) as caught:
        some_stage.trainer.result()
    assert time.monotonic() - killed < 3.0
    if victim < some_stage.local:
        assert f"worker {victim} of engine 0 is gone" in caught.value.message and caught.value.engine == 0
    for rank, worker in enumerate(some_stage.workers):
        if rank != victim:
            error, at = worker.result()
            assert type(error) is TransportFailed
            assert at - killed < 3.0
    assert some_stage.trainer.answers


@pytest.mark.parametrize(("remote", "hanging"), [(0, 0), (1, 2)], ids=["local", "gloo"])
def test_a_death_is_seen_at_once_while_another_worker_hangs(stage: Callable[..., Stage], remote: int, hanging: int) -> None:
    peers = stage(2, remote)
    peers.update(some(1))
    peers.workers[hanging].signal(signal.SIGSTOP)
    peers.trainer.start(send, peers.info, some(3, nbytes=32 << 20), 64 << 20, False, 30.0)
    time.sleep(0.3)
    killed = time.monotonic()
    peers.workers[1].signal(signal.SIGKILL)
    with pytest.raises(TransportFailed, match="worker 1 of engine 0 is gone"):
        peers.trainer.result()
    assert time.monotonic() - killed < 3.0


def test_a_worker_that_hangs_costs_the_trainer_no_more_than_the_deadline(stage: Callable[..., Stage]) -> None:
    two = stage(2)
    two.update(some(1))
    two.workers[1].signal(signal.SIGSTOP)
    order = two.order(some(3), BUCKET, 30.0)
    two.workers[0].start(receive_timed, order, 0)
    began = time.monotonic()
    two.trainer.start(send, two.info, some(3), BUCKET, False, 1.5)
    with pytest.raises(TransportFailed, match=r"worker 1 of engine 0 did not answer before the deadline"):
        two.trainer.result()
    assert 1.4 < time.monotonic() - began < 5
    assert type(two.workers[0].result()[0]) is TransportFailed


# --- in one process: who is let in, and who leaves ------------------------------------------------


def meet(generation: int = 7, members: tuple[tuple[int, int], ...] = ((0, 0),), listener: Listener | None = None) -> Any:
    """A trainer's and its workers' ends."""
    listener = listener or Listener()
    info = CommunicatorInfo("h", 1, generation, 1, {"0": 1}, "gloo", {"0": tuple(w for _, w in members)})
    links: list[Link] = []

    def join(member: tuple[int, int]) -> None:
        links.append(Link(info, member, listener.name, listener.secret, CPU, 5.0))

    threads = [threading.Thread(target=join, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    trainer = fanout.join(info, CPU, listener, 5.0, 5.0)
    for thread in threads:
        thread.join()
    return trainer, links


@pytest.mark.parametrize("others", [True, False], ids=["who have it", "who hang"])
def test_a_broadcast_to_others_is_ended_before_memory_is_let_go_of(others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's memory goes when that has done all it was asked for, which it never has while NCCL waits for who died."""
    listener, store = Listener(), rendezvous.host_store("127.0.0.1", 20.0)
    info = CommunicatorInfo("127.0.0.1", store.port, 1, 2, {"0": 1}, "gloo", {"0": (0,)})
    made: dict[str, Any] = {}
    joins = [
        threading.Thread(target=lambda: made.update(link=Link(info, (0, 0), listener.name, listener.secret, CPU, 5.0))),
        threading.Thread(target=lambda: made.update(other=Communicator(info, 1, CPU, 5.0, 20.0))),
    ]
    for join in joins:
        join.start()
    trainer = fanout.join(info, CPU, listener, 5.0, 20.0)
    for join in joins:
        join.join()
    (window,) = begin(trainer, [made["link"]], 256)
    stands = list[bool]()
    for name in ("_unmap", "_drop_ring"):
        let_go = getattr(trainer._links, name)
        monkeypatch.setattr(trainer._links, name, lambda go=let_go: stands.append(trainer._group.open) or go())
    posted = trainer.post([window], soon())
    made["link"].close()
    if others:
        made["other"].broadcast(torch.zeros(256, dtype=torch.uint8), soon())
    with pytest.raises(TransportFailed, match="worker 0 of engine 0"):
        trainer.settle(posted, soon())
    assert stands and not any(stands)
    made["other"].close()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def begin(trainer: Any, links: Any, nbytes: int, bucket: int = 1 << 30) -> list[torch.Tensor]:
    """An update of so many bytes to workers that lend nothing: its windows."""
    plan = plan_of(nbytes, bucket)
    for link in links:
        link.lend(None, plan, soon())
    ground = trainer.ground(plan, soon())
    return [ground.window(number, one) for number, one in enumerate(plan.buckets)]


def plan_of(nbytes: int, bucket: int = 1 << 30) -> BucketPlan:
    return plan_buckets(offer({"w": torch.zeros(nbytes, dtype=torch.uint8)}).manifest, bucket)


@contextlib.contextmanager
def accepting(listener: Listener, seconds: float, generation: int = 7) -> Iterator[list[BaseException]]:
    """A trainer that waits for worker 0 of engine 0 meanwhile; what it raised."""
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            listener.accept(generation, [(0, 0)], CPU, soon(seconds)).close()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    yield raised
    thread.join(10)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"secret": "no"}, "the secret is not this trainer's"),
        ({"generation": 6}, "generation 6 is over, this is 7"),
        ({"member": (0, 1)}, "worker 1 of engine 0 is not waited for"),
        ({"member": ([], {})}, "worker -1 of engine -1 is not waited for"),
    ],
)
def test_who_is_not_waited_for_is_sent_away_and_who_is_comes_in_all_the_same(wrong: dict[str, Any], words: str) -> None:
    listener = Listener()
    right = {"generation": 7, "member": (0, 0), "secret": listener.secret}

    def come(generation: int, member: Any, secret: str) -> Link:
        return Link(CommunicatorInfo("h", 1, generation, 1, {}, "gloo"), member, listener.name, secret, CPU, 5.0)

    with accepting(listener, 5.0) as raised:
        with pytest.raises(TransportFailed, match=words):
            come(**(right | wrong))
        come(**right).close()
    assert not raised


def test_somebody_who_comes_and_says_nothing_holds_nobody_up() -> None:
    listener = Listener()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"\0{listener.name}")
        with accepting(listener, 5.0) as raised:
            began = time.monotonic()
            Link(CommunicatorInfo("h", 1, 7, 1, {}, "gloo"), (0, 0), listener.name, listener.secret, CPU, 5.0).close()
            assert time.monotonic() - began < 1.0
    assert not raised


def test_another_users_process_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    monkeypatch.setattr(wire, "peer_of", lambda connected: (os.getpid(), os.geteuid() + 1))
    with pytest.raises(TransportFailed, match=rf"the trainer runs as user {os.geteuid() + 1}, this process as user {os.geteuid()}"):
        Link(CommunicatorInfo("h", 1, 7, 1, {}, "gloo"), (0, 0), listener.name, listener.secret, CPU, 1.0)
    with pytest.raises(TransportFailed, match="worker 0 of engine 0 did not come"):
        listener.accept(7, [(0, 0)], CPU, soon(0.2))


def test_a_trainer_that_is_not_there_is_said_at_once_with_what_to_set() -> None:
    listener = Listener()
    listener.close()
    began = time.monotonic()
    with pytest.raises(TransportFailed, match="another network namespace") as caught:
        Link(CommunicatorInfo("h", 1, 7, 1, {}, "gloo"), (0, 0), listener.name, listener.secret, CPU, 20.0)
    assert time.monotonic() - began < 1.0
    assert "sync.local" in caught.value.hint


def test_a_trainer_that_leaves_before_it_lets_anybody_in_is_said_at_once() -> None:
    listener = Listener()
    raised, thread = ends(lambda: Link(CommunicatorInfo("h", 1, 7, 1, {}, "gloo"), (0, 0), listener.name, listener.secret, CPU, 20.0))
    time.sleep(0.2)
    listener.close()
    thread.join(3)
    assert [type(exc) for exc in raised] == [TransportFailed]


def test_workers_that_do_not_come_are_named_at_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(TransportFailed, match=r"worker 0 of engine 1, worker 2 of engine 3 did not come .*generation 9"):
        Listener().accept(9, [(3, 2), (1, 0)], CPU, soon(0.3))
    assert 0.3 <= time.monotonic() - began < 1.0


def test_joining_can_be_cancelled_on_both_sides() -> None:
    listener, began = Listener(), time.monotonic()
    with pytest.raises(Aborted):
        listener.accept(7, [(0, 0)], CPU, soon(), lambda: True)
    with pytest.raises(Aborted):
        Link(
            CommunicatorInfo("h", 1, 7, 1, {}, "gloo"), (0, 0), listener.name, listener.secret, CPU, 5.0,
            cancelled=lambda: time.monotonic() > began + 0.2,
        )  # fmt: skip
    assert time.monotonic() - began < 0.6


def test_a_worker_that_still_joins_leaves_when_its_update_has_ended() -> None:
    listener = Listener()
    info = CommunicatorInfo("h", 1, 7, 1, {"0": 1}, "gloo", {"0": (0,)})
    order = BeginOrder(request_of(some(1), BUCKET, 20.0, (listener.name, listener.secret), "gloo"), info, 0, 1, 20.0)
    joining = Joining(CPU, 0)
    raised, thread = ends(joining.begin(order))
    time.sleep(0.1)
    joining.end(order)
    thread.join(2)
    assert [type(exc) for exc in raised] == [Aborted]


def ends(call: Callable[[], Any]) -> tuple[list[BaseException], threading.Thread]:
    """Run it in a thread; what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return raised, thread


@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_cancelling_leaves_a_wait_within_half_a_second_and_the_other_side_is_told(side: str) -> None:
    trainer, (link,) = meet()
    (bucket,) = begin(trainer, [link], 64)
    at = time.monotonic() + 0.2
    call = (lambda: trainer.broadcast(bucket, soon(), lambda: time.monotonic() > at)) if side == "trainer" else (
        lambda: link.broadcast(torch.zeros(64, dtype=torch.uint8), soon(), lambda: time.monotonic() > at)
    )  # fmt: skip
    with pytest.raises(Aborted):
        call()
    assert time.monotonic() - at < 0.5
    assert not (trainer if side == "trainer" else link).open
    with pytest.raises(TransportFailed):
        if side == "trainer":  # the first bucket was told of and lies there; nothing comes behind it
            for _ in range(2):
                link.broadcast(torch.zeros(64, dtype=torch.uint8), soon())
        else:
            trainer.broadcast(bucket, soon())


@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_closing_from_another_thread_ends_a_wait_at_once(side: str) -> None:
    trainer, (link,) = meet()
    (bucket,) = begin(trainer, [link], 64)
    waiting = (lambda: trainer.broadcast(bucket, soon())) if side == "trainer" else (lambda: link.broadcast(bucket.clone(), soon()))
    raised, thread = ends(waiting)
    time.sleep(0.1)
    began = time.monotonic()
    (trainer if side == "trainer" else link).close()
    thread.join(5)
    assert time.monotonic() - began < 0.5
    assert [type(exc) for exc in raised] == [TransportFailed]
    trainer.close()
    link.close()


@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_closing_at_any_moment_breaks_nothing_but_the_link(side: str) -> None:
    for number in range(20):
        trainer, (link,) = meet()
        (bucket,) = begin(trainer, [link], 1 << 20)
        target = torch.zeros(1 << 20, dtype=torch.uint8)

        def sends(trainer: Any = trainer, bucket: Any = bucket) -> None:
            while True:
                trainer.broadcast(bucket, soon())

        def takes(link: Any = link, target: Any = target) -> None:
            while True:
                link.broadcast(target, soon())

        sending, taking = ends(sends), ends(takes)
        time.sleep(0.003 * number)
        (trainer if side == "trainer" else link).close()
        for raised, thread in (sending, taking):
            thread.join(5)
            assert [type(exc) for exc in raised] == [TransportFailed], raised
        assert int(bucket.sum()) == int(target.sum()) == 0  # still there for who holds them


def test_a_bucket_in_a_segment_is_not_copied_to_be_sent_and_others_go_as_messages() -> None:
    trainer, links = meet(members=((0, 0), (0, 1)))
    first, second = begin(trainer, links, 256, 128)
    assert first.data_ptr() != second.data_ptr()
    assert [b.data_ptr() for b in begin(trainer, links, 128, 64)] == [first.data_ptr(), second.data_ptr()]
    second[10:30] = 7
    outside = torch.arange(50_000, dtype=torch.int64).reshape(100, 500)
    for sent in (second[10:30], outside, torch.tensor(3.5), torch.empty(0, 3)):
        targets = [torch.full_like(sent, 1) for _ in links]
        # All at once: the trainer sends to who came first to its end, and that may be either.
        under_way = [ends(lambda sent=sent: trainer.broadcast(sent, soon()))]  # type: ignore[misc]
        under_way += [ends(lambda link=link, to=to: link.broadcast(to, soon())) for link, to in zip(links, targets, strict=True)]  # type: ignore[misc]
        for raised, thread in under_way:
            thread.join(6)
            assert not raised and not thread.is_alive()
        assert all(torch.equal(target, sent) for target in targets)
    trainer.close()
    for link in links:
        assert link.open
        link.close()


def test_a_last_word_is_heard_though_its_speaker_has_left_by_then() -> None:
    """It may arrive between a look that finds nothing and the next question whether anybody is gone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening, speaking = wire.Wire(ours, "it"), wire.Wire(theirs, "we")
    look = listening._look

    def and_then_it_speaks_and_leaves(events: int, seconds: float) -> tuple[bool, bool]:
        if theirs.fileno() >= 0:
            speaking.tell(soon(), wire.never, done=1)
            seen = look(events, seconds)
            speaking.close()
            return seen
        return look(events, seconds)

    listening._look = and_then_it_speaks_and_leaves  # type: ignore[method-assign]
    assert listening.hear(soon(), lambda: listening.gone)[0] == {"done": 1}
    with pytest.raises(TransportFailed, match="it is gone"):
        listening.hear(soon(), wire.never)


def test_a_worker_that_expects_something_else_tells_the_trainer_why() -> None:
    trainer, (link,) = meet()
    (bucket,) = begin(trainer, [link], 64)
    raised, thread = ends(lambda: trainer.broadcast(bucket, soon()))
    with pytest.raises(TransportFailed, match="sent 64 bytes where 65 are due"):
        link.broadcast(torch.zeros(65, dtype=torch.uint8), soon())
    thread.join(5)
    assert [str(exc) for exc in raised] == ["worker 0 of engine 0: the trainer sent 64 bytes where 65 are due. " + wire.SAME]
    assert not trainer.open and not link.open
    with pytest.raises(TransportFailed, match="closed"):
        trainer.broadcast(bucket, soon())


def test_a_trainer_without_a_socket_can_not_join_local_workers() -> None:
    with pytest.raises(TransportFailed, match="no local socket"):
        fanout.join(CommunicatorInfo("h", 1, 7, 1, {}, "gloo", {"0": (0,)}), CPU, None, 1.0, 1.0)


def test_the_benchmark_measures_a_bucket_over_a_link_beside_a_copy() -> None:
    found = local_link.measure("cpu", 1 << 20, 3)
    assert set(found) == {"link", "ground", "end", "copy"} and all(len(seconds) == 3 and min(seconds) > 0 for seconds in found.values())
