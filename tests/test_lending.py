"""Local links over which a worker lends the trainer the memory that it stages in: where bytes land, who waits for whom, what is left.

What holds for links in general is in `test_local`; memory of a GPU in `tests/gpu/test_local_on_cuda`.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_local import (
    BUCKET,
    CPU,
    LENT,
    MIXED,
    Stage,
    Tensors,
    bytes_of,
    device_of,
    ends,
    held,
    leave,
    meet,
    plan_of,
    receive,
    send,
    some,
    soon,
    stage,
)
from tests.test_local import request_of as request_of_stage
from weightsync.client.sender import Sender
from weightsync.client.source import Lazy, offer
from weightsync.errors import Aborted, DigestMismatch, ManifestRefused, TransportFailed, WeightSyncError
from weightsync.protocol import BeginOrder, CommunicatorInfo
from weightsync.transport import fanout, segment, wire
from weightsync.transport.packing import plan_buckets
from weightsync.worker.receiver import Receiver
from weightsync.worker.staging import Whole

__all__ = ["stage"]  # the fixture


class Run:
    """A trainer's sender and a worker's receiver with a real link between them, in threads of this process.

    Attributes:
        copied: bytes of each copy that the worker made of what arrived.
        windows: address of each bucket that the trainer told of.
    """

    def __init__(self, tensors: Any, bucket: int = BUCKET, kind: type[Sender] = Sender, keep_in: str = "") -> None:
        self.trainer, (self.link,) = meet()
        self.offer = offer(tensors)
        self.plan = plan_buckets(self.offer.manifest, bucket)
        request = request_of_stage(tensors, bucket, 20.0, ("", ""), "gloo")
        order = BeginOrder(request, self.link.info, 0, 1, 10.0, stage="host", hand_on=bool(keep_in), keep_in=keep_in)
        self.receiver = Receiver(order, 0, CPU, CPU, lambda: self.link)
        self.sender = kind(self.offer, self.plan, None)
        self.read = threading.Event()
        self.copied, self.windows = list[int](), list[int]()
        copy, post = self.link._copy, self.trainer._links.post

        def copying(tensor: torch.Tensor, source: torch.Tensor) -> None:
            self.copied.append(tensor.nbytes)
            copy(tensor, source)

        def posting(tensor: torch.Tensor, *more: Any) -> Any:
            if tensor.dtype == torch.uint8:
                self.windows += [self.lent().offset(tensor)]
            return post(tensor, *more)

        self.link._copy, self.trainer._links.post = copying, posting

    def lent(self) -> Any:
        """The trainer's mapping of the worker's memory."""
        (mapped,) = self.trainer._links._lent.values()
        return mapped

    def send(self, seconds: float = 10.0) -> None:
        self.sender.send(self.trainer, soon(seconds), lambda: False, self.read.set)

    def arrived(self) -> None:
        self.receiver._thread.join(10)
        assert self.receiver.error is None and self.receiver.ready, self.receiver.error
        for index in range(len(self.offer.manifest.tensors)):
            assert bytes_of(self.receiver.held().tensor(index)) == bytes_of(self.offer.read(index).contiguous())

    def close(self) -> None:
        self.trainer.close()
        self.link.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No mapping and no file of this process, where all is in it."""
    if "stage" in request.fixturenames:
        yield
        return
    gc.collect()
    before = held({})
    yield
    gc.collect()
    files, mapped = held({})
    assert files <= before[0] and mapped == 0


# --- where bytes land ----------------------------------------------------------------------------


def test_bytes_are_packed_into_the_workers_own_memory_and_copied_by_nobody_else() -> None:
    run = Run({"a": torch.arange(3000.0), "b": torch.ones(7, dtype=torch.int8), "c": torch.arange(900.0).reshape(30, 30).t()})
    run.receiver.start()
    run.send()
    run.arrived()
    into = run.receiver.held()
    assert isinstance(into, Whole) and into.lent is not None and into.lent.offset(into.data) == 0
    assert run.windows == [bucket.start for bucket in run.plan.buckets] and len(run.windows) > 2
    assert run.copied == [16 * len(bucket.complete) for bucket in run.plan.buckets if bucket.complete], "digests alone"
    assert run.trainer._links._ring == run.link._ring == ()
    run.close()


def test_what_is_kept_for_other_engines_is_packed_straight_into_its_file(tmp_path: Path) -> None:
    run = Run(some(5), keep_in=str(tmp_path / "kept"))
    run.receiver.start()
    run.send()
    run.arrived()
    into = run.receiver.held()
    assert isinstance(into, Whole) and into.lent is not None
    (file,) = (tmp_path / "kept").iterdir()
    assert os.fstat(into.lent.descriptor.number).st_ino == file.stat().st_ino
    assert file.read_bytes() == bytes_of(into.data) and into._file == file.name
    assert run.windows and run.copied == [16] * 5
    run.close()


def test_an_update_without_a_byte_is_kept_too(tmp_path: Path) -> None:
    run = Run({"none": torch.zeros(0, 3)}, keep_in=str(tmp_path / "kept"))
    run.receiver.start()
    run.send()
    run.arrived()
    run.close()


def test_everything_is_packed_though_the_worker_has_taken_nothing_yet_and_the_end_waits_for_it() -> None:
    trainer, (link,) = meet()
    offered = offer(some(6))
    plan, read = plan_buckets(offered.manifest, BUCKET), threading.Event()
    memory = segment.create(plan.stream_bytes, CPU)
    link.lend(memory, plan, soon())
    raised, thread = ends(lambda: Sender(offered, plan, None).send(trainer, soon(), lambda: False, read.set))
    assert read.wait(3), "the parameters may change again"
    assert bytes_of(memory.tensor[: plan.stream_bytes]) == b"".join(bytes_of(offered.read(index)) for index in range(6))
    for bucket in plan.buckets:
        link.broadcast(memory.tensor[bucket.start : bucket.start + bucket.nbytes], soon())
        link.broadcast(torch.zeros(1, 2, dtype=torch.int64), soon())
        assert thread.is_alive()
    assert link.end(soon()), "the trainer has let go of the memory by then"
    thread.join(3)
    assert not raised and not thread.is_alive()
    trainer.close()
    link.close()


def test_of_several_that_lend_each_has_all_in_its_own_memory_and_who_lends_nothing_gets_it_from_the_ring() -> None:
    trainer, links = meet(members=((0, 0), (0, 1), (0, 2)))
    plan = plan_of(1024, 256)
    memories = [segment.create(1024, CPU), segment.create(1024, CPU), None]
    for link, memory in zip(links, memories, strict=True):
        link.lend(memory, plan, soon())
    ground = trainer.ground(plan, soon())
    want = torch.randint(0, 256, (1024,), dtype=torch.uint8)
    taken = torch.zeros(1024, dtype=torch.uint8)
    for number, bucket in enumerate(plan.buckets):
        run = slice(bucket.start, bucket.start + bucket.nbytes)
        ground.window(number, bucket).copy_(want[run])
        raised, thread = ends(lambda at=number, one=bucket: trainer.broadcast(ground.window(at, one), soon()))  # type: ignore[misc]
        for link, memory in zip(links, memories, strict=True):
            link.broadcast(taken[run] if memory is None else memory.tensor[run], soon())
        thread.join(3)
        assert not raised
    assert torch.equal(taken, want) and all(torch.equal(one.tensor, want) for one in memories if one is not None)
    assert len(trainer._links._ring) == 2
    trainer.close()
    for link in links:
        link.close()


def test_who_copies_out_of_the_ring_gets_every_bucket_though_another_was_posted_behind_it() -> None:
    trainer, (lends, copies) = meet(members=((0, 0), (0, 1)))
    plan, memory = plan_of(1024, 256), segment.create(1024, CPU)
    lends.lend(memory, plan, soon())
    copies.lend(None, plan, soon())
    ground, want, taken = (
        trainer.ground(plan, soon()),
        torch.randint(0, 256, (1024,), dtype=torch.uint8),
        torch.zeros(1024, dtype=torch.uint8),
    )

    def send() -> None:
        before: Any = None
        for number, bucket in enumerate(plan.buckets):
            ground.window(number, bucket).copy_(want[bucket.start : bucket.start + bucket.nbytes])
            posted = trainer.post([ground.window(number, bucket)], soon())
            if before is not None:
                trainer.settle(before, soon())
            before = posted
        trainer.settle(before, soon())

    raised, thread = ends(send)
    time.sleep(0.1)  # two are posted by now
    for bucket in plan.buckets:
        run = slice(bucket.start, bucket.start + bucket.nbytes)
        copies.broadcast(taken[run], soon())
        lends.broadcast(memory.tensor[run], soon())
    thread.join(3)
    assert not raised and torch.equal(taken, want) and torch.equal(memory.tensor, want)


def test_the_ring_goes_when_everybody_lends_and_comes_again_for_who_does_not() -> None:
    trainer, (link,) = meet()
    plan, memory = plan_of(1024, 256), segment.create(1024, CPU)

    def update(lent: Any) -> None:
        link.lend(lent, plan, soon())
        ground = trainer.ground(plan, soon())
        assert ground.ahead == (2 if lent is None else 4)
        for number, bucket in enumerate(plan.buckets):
            ground.window(number, bucket).fill_(number + 1)
            raised, thread = ends(lambda at=number, one=bucket: trainer.broadcast(ground.window(at, one), soon()))  # type: ignore[misc]
            target = memory.tensor[bucket.start : bucket.start + bucket.nbytes]
            link.broadcast(target, soon())
            thread.join(3)
            assert not raised and int(target[-1]) == number + 1
        ground.let_go()
        raised, thread = ends(lambda: trainer.end(soon()))
        assert link.end(soon())
        thread.join(3)
        assert not raised

    for lent in (None, memory, None, memory, memory):
        memory.tensor.zero_()
        update(lent)
        assert bool(trainer._links._ring) == bool(link._ring) == (lent is None)
    trainer.close()
    link.close()


def test_who_lends_once_is_handed_the_ring_again_that_another_has_kept_in_use() -> None:
    trainer, (lends, copies) = meet(members=((0, 0), (0, 1)))
    plan, memory = plan_of(1024, 256), segment.create(1024, CPU)
    taken = [torch.zeros(1024, dtype=torch.uint8) for _ in range(2)]
    for turn, lent in enumerate((None, memory, None)):
        for link, mine in ((lends, lent), (copies, None)):
            link.lend(mine, plan, soon())
        ground = trainer.ground(plan, soon())
        targets = [taken[0] if lent is None else memory.tensor, taken[1]]
        for number, bucket in enumerate(plan.buckets):
            run = slice(bucket.start, bucket.start + bucket.nbytes)
            ground.window(number, bucket).fill_(10 * turn + number)
            raised, thread = ends(lambda at=number, one=bucket, on=ground: trainer.broadcast(on.window(at, one), soon()))  # type: ignore[misc]
            for link, target in zip((lends, copies), targets, strict=True):
                link.broadcast(target[run], soon())
                assert target[run].unique().tolist() == [10 * turn + number]
            thread.join(3)
            assert not raised
        ground.let_go()
        raised, thread = ends(lambda: trainer.end(soon()))
        assert lends.end(soon()) and copies.end(soon())
        thread.join(3)
        assert not raised
    trainer.close()
    lends.close()
    copies.close()


def test_what_is_mapped_while_another_thread_closes_the_links_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, (link,) = meet()
    plan, memory, attach = plan_of(1024, 256), segment.create(1024, CPU), segment.attach

    def slowly(*how: Any) -> segment.Segment:
        made = attach(*how)
        closing = threading.Thread(target=trainer.close)
        closing.start()
        closing.join(3)
        return made

    monkeypatch.setattr(segment, "attach", slowly)
    link.lend(memory, plan, soon())
    with pytest.raises(TransportFailed, match="the link is closed"):
        trainer.ground(plan, soon())
    assert not trainer._links._lent
    link.close()


@pytest.mark.parametrize("way", [LENT, MIXED], ids=["two", "one beside one that does not"])
def test_workers_that_lend_keep_nothing_mapped_between_updates(stage: Callable[..., Stage], way: tuple[str, ...]) -> None:
    two = stage(2, stages=way)
    two.update(some(3))
    peers = (two.trainer, *two.workers)
    before = [peer.call(held) for peer in peers]
    for seed in range(20):
        two.update(some(3, seed))
        assert [peer.call(landed) for peer in two.workers] == [kind == "auto" for kind in (way * 2)[:2]]
    assert [peer.call(held) for peer in peers] == before
    assert way is MIXED or [mapped for _, mapped in before] == [0, 0, 0]


def landed(state: dict[str, Any]) -> bool:
    return bool(state["landed"])


# --- what does not fit together ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["plan", "size", "device"])
def test_a_worker_that_lends_something_else_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, (link,) = meet()
    plan = plan_of(9000)
    memory = segment.create(100 if what == "size" else 9000, CPU)
    if what == "device":
        link._landing = torch.device("meta")
    link.lend(memory, plan_of(9000, 4096) if what == "plan" else plan, soon())
    words = {"plan": f"where plan {plan.hash} is due", "size": "lends 100 bytes on cpu, 9024 on cpu", "device": "lends 9000 bytes on meta"}
    with pytest.raises(TransportFailed, match=words[what]):
        trainer.ground(plan, soon())
    assert not trainer.open
    link.close()


def test_a_trainer_that_wrote_elsewhere_is_not_believed() -> None:
    trainer, (link,) = meet()
    plan, memory = plan_of(1024, 256), segment.create(1024, CPU)
    link.lend(memory, plan, soon())
    ground = trainer.ground(plan, soon())
    trainer.broadcast(ground.window(1, plan.buckets[1]), soon())
    with pytest.raises(TransportFailed, match="the trainer wrote at 256 of what it was lent, where nothing is due"):
        link.broadcast(memory.tensor[:256], soon())
    with pytest.raises(TransportFailed, match="worker 0 of engine 0: the trainer wrote at 256"):
        for _ in range(2):  # the second cannot be told any more
            trainer.broadcast(ground.window(0, plan.buckets[0]), soon())
            time.sleep(0.1)
    ground.let_go()


def test_an_update_that_ends_early_is_no_update() -> None:
    trainer, (link,) = meet()
    plan, memory = plan_of(1024, 256), segment.create(1024, CPU)
    link.lend(memory, plan, soon())
    trainer.ground(plan, soon()).let_go()
    raised, thread = ends(lambda: trainer.end(soon()))
    with pytest.raises(TransportFailed, match="can't be taken: KeyError"):
        link.broadcast(memory.tensor[:256], soon())
    thread.join(3)
    assert len(raised) == 1 and "can't be taken" in str(raised[0])


def test_what_somebody_in_the_trainer_still_holds_is_not_said_to_be_let_go_of() -> None:
    trainer, (link,) = meet()
    plan, memory = plan_of(1024, 256), segment.create(1024, CPU)
    link.lend(memory, plan, soon())
    ground = trainer.ground(plan, soon())
    view = ground.window(0, plan.buckets[0])
    ground.let_go()
    raised, thread = ends(lambda: trainer.end(soon()))
    assert link.end(soon()) is False
    thread.join(3)
    assert not raised and link.open and trainer.open
    del view
    trainer.close()
    link.close()


@pytest.mark.parametrize("holds", [False, True])
def test_memory_is_kept_for_the_next_update_only_where_the_trainer_has_let_go_of_it(holds: bool) -> None:
    run, kept, views = Run(some(3)), list[Any](), list[torch.Tensor]()
    run.receiver._regions.keep = kept.append  # type: ignore[method-assign]
    run.sender._progress = lambda *_: views.append(run.lent().tensor) if holds else None
    run.receiver.start()
    run.send()
    run.arrived()
    assert len(kept) == (not holds) and bool(views) == holds
    views.clear()
    kept.clear()
    run.close()


# --- who dies, hangs, or gives up ------------------------------------------------------------------


def receive_and(state: dict[str, Any], order: BeginOrder, rank: int, number: signal.Signals) -> Any:
    """An update in whose second bucket this process sends itself a signal."""
    stock, count = Receiver._check, iter(range(1000))

    def check(self: Any, *args: Any) -> None:
        if next(count) == 1:
            os.kill(os.getpid(), number)
        stock(self, *args)

    Receiver._check = check  # type: ignore[method-assign]
    try:
        return receive(state, order, rank)
    finally:
        Receiver._check = stock  # type: ignore[method-assign]


def receive_timed(state: dict[str, Any], order: BeginOrder, rank: int) -> tuple[WeightSyncError | None, int]:
    """Why an update broke, if it did, and what of it is still mapped."""
    error = None
    try:
        receive(state, order, rank)
    except WeightSyncError as exc:
        error = exc.with_traceback(None)  # whose frames here hold the receiver
    return error, held(state)[1]


def send_and_keep_the_error(state: dict[str, Any], info: CommunicatorInfo, tensors: Tensors, seconds: float) -> tuple[str, float, int]:
    """Why an update could not be sent, when that was known, and what is still mapped though the error is kept."""
    try:
        send(state, info, tensors, BUCKET, False, seconds)
    except WeightSyncError as exc:
        state["error"] = exc
        return str(exc), time.monotonic(), held(state)[1]
    raise AssertionError("the update was sent")


@pytest.mark.parametrize(("remote", "number"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (2, signal.SIGKILL)])
def test_a_worker_that_dies_or_hangs_half_way_is_named_and_the_others_take_the_next_update(
    stage: Callable[..., Stage],
    remote: int,
    number: signal.Signals,
) -> None:
    two = stage(1, remote) if remote else stage(2)
    two.update(some(1))
    tensors, seconds = some(40), 2.0 if number == signal.SIGSTOP else 20.0
    two.workers[0].start(receive_and, two.order(tensors, BUCKET, seconds), 0, number)
    for rank, worker in enumerate(two.workers[1:], 1):
        worker.start(receive_timed, two.order(tensors, BUCKET, seconds), rank)
    began = time.monotonic()
    two.trainer.start(send_and_keep_the_error, two.info, tensors, seconds)
    said, at, mapped = two.trainer.result()
    words = "worker 0 of engine 0 did not answer before the deadline" if number == signal.SIGSTOP else "worker 0 of engine 0 is gone"
    assert words in said and mapped == 0
    assert at - began < (4.0 if number == signal.SIGSTOP else 3.0)
    for worker in two.workers[1:]:
        error, mapped = worker.result()
        assert mapped == 0 and (error is None or type(error) is TransportFailed), "it may have been told of all of it by then"
    two.workers[0].kill()
    two.workers[0] = two._peer().ready()
    two.renew()
    two.update(some(3))


def test_the_bytes_of_a_worker_stay_its_own_when_the_trainer_dies_half_way(stage: Callable[..., Stage]) -> None:
    two = stage(2)
    two.trainer.start(send, two.info, some(6), BUCKET, True, 20.0)
    for rank, worker in enumerate(two.workers):
        worker.start(receive_timed, two.order(some(6), BUCKET), rank)
    assert two.trainer.result() == "holds"
    two.trainer.signal(signal.SIGKILL)
    for worker in two.workers:
        error, mapped = worker.result()
        assert "the trainer is gone" in error.message and mapped == 0
        assert worker.answers
    two.replace_trainer()
    two.update(some(6, seed=1))


def send_until_aborted(state: dict[str, Any], info: CommunicatorInfo, tensors: Tensors) -> tuple[str, int]:
    """An update that is given up behind its second bucket; its error is kept."""
    channel = state["channel"] = fanout.join(info, device_of(info), state["listener"], 10.0, 60.0)
    offered, seen = offer(tensors), list[int]()
    sender = Sender(offered, plan_buckets(offered.manifest, BUCKET), lambda sent, total: seen.append(sent))
    try:
        sender.send(channel, soon(20.0), lambda: len(seen) > 1, lambda: None)
    except Aborted as exc:
        state["error"] = exc
        channel.close()  # as `WeightSync` does
    return type(state["error"]).__name__, held(state)[1]


def test_an_update_that_is_aborted_half_way_leaves_nothing_and_the_next_one_arrives(stage: Callable[..., Stage]) -> None:
    two = stage(2)
    before = [peer.call(held_for_good, seconds=60) for peer in (two.trainer, *two.workers)]
    for seed in range(5):
        two.renew()
        for rank, worker in enumerate(two.workers):
            worker.start(receive_timed, two.order(some(9), BUCKET), rank)
        two.trainer.start(send_until_aborted, two.info, some(9))
        assert two.trainer.result() == ("Aborted", 0)
        for worker in two.workers:
            error, mapped = worker.result()
            assert type(error) is TransportFailed and mapped == 0
        two.renew()
        two.update(some(3, seed))
    for peer in (two.trainer, *two.workers):
        peer.call(leave)
    assert [peer.call(held_for_good, seconds=60) for peer in (two.trainer, *two.workers)] == before


def held_for_good(state: dict[str, Any]) -> tuple[int, int]:
    """`held`, when all is collected that nobody has any more: memory goes at once, sockets of what failed may wait for that."""
    state.pop("error", None)
    gc.collect()
    return held(state)


def test_an_error_of_the_trainer_keeps_nothing_of_the_workers_memory_mapped() -> None:
    def wrong() -> torch.Tensor:
        return torch.zeros(3)

    run = Run(some(3) | {"wrong": Lazy(torch.float32, (9,), wrong)})
    run.receiver.start()
    kept: list[BaseException] = []
    with pytest.raises(ManifestRefused) as caught:
        run.send()
    kept.append(caught.value)
    mapped = run.lent()
    run.trainer.close()
    assert mapped.gone, "the error's frames hold it"
    run.receiver._thread.join(5)
    assert isinstance(run.receiver.error, TransportFailed) and kept
    run.close()


class Flipping(Sender):
    """A bit of the second bucket changes behind its digest."""

    def _pack(self, bucket: Any, window: torch.Tensor) -> Any:
        packed = super()._pack(bucket, window)
        if bucket is self._plan.buckets[1]:
            window[7] ^= 1
        return packed


def test_wrong_bytes_are_found_in_the_memory_that_was_lent() -> None:
    run = Run(some(6), kind=Flipping)
    run.receiver.start()
    raised, thread = ends(run.send)
    run.receiver._thread.join(5)
    assert isinstance(run.receiver.error, DigestMismatch) and run.receiver.error.names == ("w1",)
    assert run.link.open, "the service ends the update"
    run.link.close()
    thread.join(5)
    assert [type(exc) for exc in raised] == [TransportFailed]
    run.close()


@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_the_end_of_an_update_can_be_cancelled_and_has_a_deadline(side: str) -> None:
    for how in ("cancelled", "deadline", "closed"):
        trainer, (link,) = meet()
        plan = plan_of(1024)
        link.lend(None, plan, soon())
        trainer.ground(plan, soon()).let_go()
        end, began = (trainer if side == "trainer" else link).end, time.monotonic()
        error: Any = Aborted if how == "cancelled" else TransportFailed
        if how == "closed":
            threading.Timer(0.2, (link if side == "trainer" else trainer).close).start()
        with pytest.raises(error):
            end(
                soon(0.2 if how == "deadline" else 5.0),
                (lambda at=began: time.monotonic() > at + 0.2) if how == "cancelled" else wire.never,
            )
        assert time.monotonic() - began < 1.0
        assert not (trainer if side == "trainer" else link).open
        trainer.close()
        link.close()


def test_a_worker_that_never_begins_costs_the_deadline_and_one_that_leaves_does_not() -> None:
    trainer, (link, other) = meet(members=((0, 0), (0, 1)))
    raised, thread = ends(lambda: trainer.ground(plan_of(64), soon(0.3)))
    thread.join(3)
    assert "did not answer before the deadline" in str(raised[0])
    trainer, links = meet(members=((0, 0), (0, 1)))
    began = time.monotonic()
    raised, thread = ends(lambda: trainer.ground(plan_of(64), soon(5.0)))
    time.sleep(0.1)
    links[1].close()
    thread.join(3)
    assert "worker 1 of engine 0 is gone" in str(raised[0]) or "worker 0 of engine 0 is gone" in str(raised[0])
    assert time.monotonic() - began < 1.0
    for one in (link, other, *links):
        one.close()
