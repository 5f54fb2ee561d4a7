"""Two buckets are in flight on each side: one is packed, or looked at, while another travels; and what ends one thread ends both."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.wires import CPU, Ends, same_bits, threads
from weightsync.client.sender import Sender
from weightsync.client.source import Lazy, Offer, offer
from weightsync.errors import Aborted, DeadlineExceeded, DigestMismatch, ManifestRefused
from weightsync.transport import digest
from weightsync.transport.packing import Bucket
from weightsync.worker import receiver as receiver_module
from weightsync.worker import staging

BUCKET = 4096
SOON = 5.0


def tensors(count: int = 6) -> dict[str, torch.Tensor]:
    return {f"w{index}": torch.full((BUCKET // 4,), float(index + 1)) for index in range(count)}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until = time.monotonic() + 1
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert threads() == []


# --- the trainer's side ------------------------------------------------------------------------


class Watched(Sender):
    """Says which buckets were packed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.packed = [threading.Event() for _ in self._plan.buckets]
        self.in_thread: set[int] = set()

    def _pack(self, bucket: Bucket, window: torch.Tensor) -> Any:
        self.in_thread.add(threading.get_ident())
        packed = super()._pack(bucket, window)
        self.packed[self._plan.buckets.index(bucket)].set()
        return packed


def watched(given: Ends) -> Watched:
    assert isinstance(given.sender, Watched)
    return given.sender


def test_the_next_bucket_is_packed_while_one_travels_and_goes_into_another_buffer() -> None:
    want = tensors()
    ends = Ends(want, BUCKET, kind=Watched)
    sender, number = watched(ends), iter(range(100))
    ahead: list[int] = []

    def travels(tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.uint8:
            return
        at = next(number)
        if at + 1 < len(sender.packed):
            assert sender.packed[at + 1].wait(SOON), "the next one is packed when this one has gone"
        time.sleep(0.02)  # whoever goes on writing does it now, before these bytes are read
        ahead.append(sum(event.is_set() for event in sender.packed) - at)

    ends.trainer.before = travels
    ends.receive()
    ends.send()
    assert ahead == [2] * (len(want) - 1) + [1], "one is packed ahead, and no more: there are two buffers"
    assert all(map(same_bits, ends.arrived(), want.values()))
    assert len(sender.in_thread) == 1 and threading.get_ident() not in sender.in_thread


def test_everything_has_been_read_while_the_bucket_before_the_last_still_travels() -> None:
    ends = Ends(tensors(), BUCKET, kind=Watched)
    seen, number = [], iter(range(100))

    def travels(tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.uint8:
            at = next(number)
            seen.append(ends.read.wait(SOON) if at == 4 else ends.read.is_set())

    ends.trainer.before = travels
    ends.send()
    assert seen == [False] * 4 + [True, True]


class Gathered(Offer):
    """Makes each tensor when it is read, as one that is gathered from shards."""

    def __init__(self, source: dict[str, torch.Tensor], reading: Callable[[int], None] = lambda index: None) -> None:
        vars(self).update(vars(offer(source)))
        self.made: list[Any] = []
        self.reading = reading

    def read(self, index: int) -> torch.Tensor:
        self.reading(index)
        alive = [number for number, ref in self.made if ref() is not None]
        assert not alive, f"tensors {alive} are still held while {index} is read"
        tensor = super().read(index).clone()
        self.made.append((index, weakref.ref(tensor)))
        return tensor


def test_each_tensor_is_read_once_in_order_in_one_thread_and_let_go_of_before_the_next() -> None:
    want = tensors(2) | {"large": torch.arange(9000.0), "none": torch.empty(0, 3), "turned": torch.arange(6000.0).reshape(60, 100).t()}
    want |= {"last": torch.ones(3), "nothing": torch.empty(0)}
    seen: list[tuple[int, int]] = []
    offered = Gathered(want, lambda index: seen.append((index, threading.get_ident())))
    ends = Ends(offered, BUCKET)
    ends.receive()
    ends.send()
    assert [index for index, _ in seen] == list(range(len(want))), "those without elements too: other ranks have a part in it"
    assert len({thread for _, thread in seen}) == 1
    assert all(map(same_bits, ends.arrived(), want.values()))
    assert ends.sender.seconds["export"] > 0


def test_a_tensor_that_is_not_contiguous_is_made_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turned, made = torch.arange(8000.0).reshape(80, 100).t(), []
    stock = digest.as_bytes
    monkeypatch.setattr(digest, "as_bytes", lambda tensor: made.append(tensor.shape) or stock(tensor))  # type: ignore[func-returns-value]
    ends = Ends({"turned": turned}, BUCKET)
    ends.send()
    assert len(ends.plan.buckets) > 5 and made == [turned.shape]


@pytest.mark.parametrize("now", [torch.zeros(9, dtype=torch.bfloat16), torch.zeros(3, 3), torch.zeros(8)])
def test_a_tensor_that_is_not_what_was_offered_ends_the_update(now: torch.Tensor) -> None:
    offered = offer({"first": torch.ones(5000), "router.bias": Lazy(torch.float32, (9,), lambda: now)})
    ends = Ends(offered, BUCKET)
    with pytest.raises(ManifestRefused, match=r"'router.bias' was offered as float32 \(9,\)"):
        ends.send()
    assert not ends.read.is_set()


def failing_at(index: int, error: Exception) -> Gathered:
    def reading(at: int) -> None:
        if at == index:
            raise error

    return Gathered(tensors(), reading)


def until_cancelled() -> Callable[..., None]:
    """A broadcast whose peer hangs."""

    def travel(tensor: torch.Tensor, deadline: float, cancelled: Callable[[], bool]) -> None:
        until = time.monotonic() + SOON
        while not cancelled():
            assert time.monotonic() < until, "nobody ended this"
            time.sleep(0.01)
        raise Aborted("the update was aborted while bytes were on their way")

    return travel


def test_an_error_while_a_tensor_is_read_ends_the_update_though_a_bucket_is_on_its_way_to_peers_that_hang() -> None:
    error = RuntimeError("a peer of the gather is gone")
    ends = Ends(failing_at(1, error), BUCKET)
    ends.trainer.travel = until_cancelled()  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        ends.send()
    assert caught.value is error and time.monotonic() - began < 1
    assert not ends.read.is_set()


def test_a_progress_callback_that_raises_ends_the_update_before_more_is_read() -> None:
    class Enough(Exception):
        pass

    def progress(sent: int, total: int) -> None:
        raise Enough

    seen: list[int] = []
    ends = Ends(Gathered(tensors(), seen.append), BUCKET)
    ends.sender = Sender(ends.offer, ends.plan, progress)
    with pytest.raises(Enough):
        ends.send()
    assert max(seen) <= 1 and not ends.read.is_set()


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_read_that_hangs_is_left_at_the_deadline_or_when_the_update_is_cancelled(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.transport.beside._LEAVE_SECONDS", 0.2)
    go_on = threading.Event()
    ends = Ends(Gathered(tensors(), lambda index: go_on.wait(SOON) if index == 2 else None), BUCKET)  # type: ignore[arg-type, func-returns-value]
    began = time.monotonic()
    if how == "cancelled":
        with pytest.raises(Aborted):
            ends.send(cancelled=lambda: time.monotonic() - began > 0.2)
    else:
        with pytest.raises(DeadlineExceeded):
            ends.send(seconds=0.2)
    assert time.monotonic() - began < 1
    go_on.set()  # its thread ends when the call does: see the fixture


# --- the worker's side -------------------------------------------------------------------------


def test_a_bucket_is_looked_at_while_the_next_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    want = tensors()
    ends = Ends(want, BUCKET)
    arriving = [threading.Event() for _ in want]
    number, stock = iter(range(100)), Receiver_check

    def begins(tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.uint8:
            arriving[next(number)].set()

    def check(self: Any, bucket: Bucket, *more: Any) -> None:
        at = ends.plan.buckets.index(bucket)
        assert at + 1 == len(arriving) or arriving[at + 1].wait(SOON), "the next one begins when this one has been looked at"
        assert not any(event.is_set() for event in arriving[at + 2 :]), "its memory may be that of this one"
        stock(self, bucket, *more)

    monkeypatch.setattr(receiver_module.Receiver, "_check", check)
    ends.worker.before = begins
    ends.receive()
    ends.send()
    assert all(map(same_bits, ends.arrived(), want.values()))


Receiver_check = receiver_module.Receiver._check


@pytest.mark.parametrize("stage", ["none", "moved"])
def test_memory_in_which_buckets_land_is_not_written_over_while_one_is_looked_at(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if stage == "moved":  # staged on another kind of device than buckets land on
        monkeypatch.setattr(staging.Whole, "device", property(lambda self: torch.device("meta")))
    want = tensors()
    ends = Ends(want, BUCKET, "none" if stage == "none" else "host")
    landed: set[int] = set()

    def poison(tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.uint8:
            landed.add(tensor.data_ptr())
            tensor.fill_(0xFF)

    def slow(self: Any, *args: Any) -> None:
        time.sleep(0.03)  # the next bucket is here meanwhile
        Receiver_check(self, *args)

    monkeypatch.setattr(receiver_module.Receiver, "_check", slow)
    ends.worker.before = poison
    ends.send()
    ends.receive()
    assert all(map(same_bits, ends.arrived(), want.values()))
    assert len(landed) == 2


class Spoiling(Sender):
    """A bit of the second bucket changes behind its digest."""

    def _pack(self, bucket: Bucket, window: torch.Tensor) -> Any:
        packed = super()._pack(bucket, window)
        if bucket is self._plan.buckets[1]:
            window[7] ^= 1
        return packed


@pytest.mark.parametrize("stage", ["host", "none"])
def test_bytes_that_are_wrong_end_the_receiver_while_it_waits_for_more(stage: str) -> None:
    ends = Ends(tensors(), BUCKET, stage, kind=Spoiling)
    stuck = threading.Event()
    number = iter(range(100))

    def stop(tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.uint8 and next(number) == 2:
            stuck.wait(SOON)

    ends.trainer.before = stop
    sending = threading.Thread(target=ends.send)
    sending.start()
    began = time.monotonic()
    receiver = ends.receive()
    receiver._thread.join(2)
    assert not receiver._thread.is_alive() and time.monotonic() - began < 2
    assert isinstance(receiver.error, DigestMismatch) and receiver.error.names == ("w1",)
    if stage == "none":
        into: Any = receiver.held()
        assert [into.take(0).view(-1)[0].item() for _ in range(1)] == [1.0], "what was proved before it is still handed over"
        with pytest.raises(DigestMismatch):
            into.take(1)
    stuck.set()
    sending.join(5)
    assert not sending.is_alive()


def test_a_tensor_that_is_not_staged_is_handed_over_behind_its_check_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(tensors(3), BUCKET, "none")
    checking, go_on = threading.Event(), threading.Event()

    def check(self: Any, *args: Any) -> None:
        checking.set()
        assert go_on.wait(SOON)
        Receiver_check(self, *args)

    monkeypatch.setattr(receiver_module.Receiver, "_check", check)
    ends.send()
    receiver = ends.receive()
    into: Any = receiver.held()
    assert checking.wait(SOON)
    time.sleep(0.1)
    assert not into._whole
    go_on.set()
    assert all(map(same_bits, ends.arrived(), tensors(3).values()))


def test_a_receiver_that_is_cancelled_while_it_looks_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(tensors(1), BUCKET)
    looking = threading.Event()

    def check(self: Any, *args: Any) -> None:
        looking.set()
        time.sleep(0.4)

    monkeypatch.setattr(receiver_module.Receiver, "_check", check)
    ends.send()
    receiver = ends.receive()
    assert looking.wait(SOON)
    receiver.cancel()
    receiver._thread.join(2)
    assert isinstance(receiver.error, Aborted) and not receiver.ready
    assert receiver.into is not None and receiver._busy == CPU
