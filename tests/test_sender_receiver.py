"""One update from a trainer's sender into a worker's receiver, over gloo on loopback, in two threads."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from weightsync.client.sender import Sender
from weightsync.client.source import Offer, offer
from weightsync.errors import Aborted, DigestMismatch, InternalError, MemoryRefused, TransportFailed, WeightSyncError
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.transport import communicator as communicator_module
from weightsync.transport.communicator import Communicator
from weightsync.transport.packing import Bucket, plan_buckets
from weightsync.worker import staging
from weightsync.worker.receiver import Receiver

CPU = torch.device("cpu")
BUCKET = 4096

Pair = Callable[[], tuple[Communicator, Communicator]]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Any bit pattern at all, NaNs included."""
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).reshape(shape)


def mixed() -> dict[str, torch.Tensor]:
    base = random_tensor(70, 50, dtype=torch.bfloat16, seed=1)
    return {
        "small": random_tensor(3, dtype=torch.bfloat16, seed=2),
        "byte": random_tensor(1, dtype=torch.uint8, seed=3),
        "nothing": torch.empty(0, 7),
        "scalar": torch.tensor(float("nan")),
        "over many buckets": random_tensor(100, 77, seed=4),
        "transposed": base.t(),
        "every other": base[::2, 1::3],
        "expanded": random_tensor(1, 600, seed=5).expand(9, 600),
        "fp8": random_tensor(65, dtype=torch.uint8, seed=6).view(torch.float8_e4m3fn),
        "wide": random_tensor(11, dtype=torch.float64, seed=7),
        "nothing at the end": torch.empty(0, dtype=torch.int8),
    }


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Makes a communicator of a trainer and a worker, of which nobody else is part."""
    store = dist.HashStore()
    generations = itertools.count(1)
    made: list[Communicator] = []

    def make() -> tuple[Communicator, Communicator]:
        info = CommunicatorInfo("127.0.0.1", 1, next(generations), 2, {"0": 1}, "gloo")
        worker: list[Communicator] = []
        thread = threading.Thread(target=lambda: worker.append(Communicator(info, 1, CPU, 10.0, 30.0)))
        thread.start()
        trainer = Communicator(info, 0, CPU, 10.0, 30.0)
        thread.join()
        made.extend((trainer, *worker))
        return trainer, worker[0]

    with pytest.MonkeyPatch.context() as patch:
        # Both sides are in this process. torch's TCP client would ask the name server about each address it connects to.
        patch.setattr(communicator_module, "join_store", lambda info, _: dist.PrefixStore(str(info.generation), store))
        yield make
    for communicator in made:
        communicator.close()


def order_of(offered: Offer, bucket_bytes: int = BUCKET, timeout_seconds: float = 10.0, plan_hash: str | None = None) -> BeginOrder:
    plan = plan_buckets(offered.manifest, bucket_bytes)
    request = UpdateRequest(
        "u-1",
        "trainer",
        1,
        offered.manifest,
        bucket_bytes,
        plan.hash if plan_hash is None else plan_hash,
        timeout_seconds,
        "gloo",
        "2.13.0",
    )
    return BeginOrder(request, CommunicatorInfo("127.0.0.1", 1, 1, 2, {"0": 1}, "gloo"), 0, 1, 5.0)


class Run:
    """Sends `tensors` from this thread into a receiver; afterwards everything that can be asked of both."""

    def __init__(
        self, pair: Pair, tensors: dict[str, torch.Tensor], sender_class: type[Sender] = Sender, bucket_bytes: int = BUCKET
    ) -> None:
        trainer, worker = pair()
        offered = offer(tensors)
        self.names = list(tensors)
        self.progress: list[tuple[int, int]] = []
        self.events: list[str] = []
        self.error: WeightSyncError | None = None
        self.receiver = Receiver(order_of(offered, bucket_bytes), 0, CPU, CPU, lambda: worker)
        self.receiver.start()
        sender = sender_class(
            offered, plan_buckets(offered.manifest, bucket_bytes), lambda sent, total: self.progress.append((sent, total))
        )
        broadcast = trainer.broadcast

        def noted(tensor: torch.Tensor, deadline: float, cancelled: Callable[[], bool]) -> None:
            self.events.append("broadcast")
            broadcast(tensor, deadline, cancelled)

        trainer.broadcast = noted  # type: ignore[method-assign]
        try:
            # In the service the controller sees that the receiver failed and ends the update.
            sender.send(trainer, time.monotonic() + 10, lambda: self.receiver.error is not None, self.on_read)
        except WeightSyncError as exc:
            self.error = exc
        self.receiver._thread.join(10)
        assert not self.receiver._thread.is_alive()

    def on_read(self) -> None:
        self.events.append("read")

    def arrived(self) -> dict[str, torch.Tensor]:
        assert self.error is None
        assert self.receiver.error is None
        assert self.receiver.ready
        return {name: self.receiver.held().tensor(index) for index, name in enumerate(self.names)}


def assert_same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        flat = tensor.contiguous().reshape(-1)
        if flat.numel():
            assert torch.equal(got[name].reshape(-1).view(torch.uint8), flat.view(torch.uint8)), name


# --- what arrives ------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [BUCKET, 10_000, 1 << 20])
def test_every_bit_arrives(pair: Pair, bucket_bytes: int) -> None:
    tensors = mixed()
    run = Run(pair, tensors, bucket_bytes=bucket_bytes)
    assert_same_bits(run.arrived(), tensors)
    assert run.receiver.tensors == len(tensors)
    assert run.receiver.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert run.receiver.seconds["receive"] > 0


def test_tensors_without_a_byte_arrive(pair: Pair) -> None:
    tensors = {"a": torch.empty(0, 3), "b": torch.empty(2, 0, dtype=torch.int8)}
    run = Run(pair, tensors)
    assert_same_bits(run.arrived(), tensors)
    assert run.events == ["read", "broadcast"]


def test_several_updates_travel_over_one_communicator(pair: Pair) -> None:
    one = pair()
    for seed in range(3):
        tensors = {"w": random_tensor(3000, seed=seed)}
        assert_same_bits(Run(lambda: one, tensors).arrived(), tensors)


def test_staged_tensors_are_views_of_the_staging_and_go_with_it(pair: Pair) -> None:
    run = Run(pair, {"w": random_tensor(10)})
    staging = run.receiver.held().data
    assert staging is not None
    assert run.receiver.held().tensor(0).data_ptr() == staging.data_ptr()
    run.receiver.discard()
    with pytest.raises(InternalError, match="let go of"):
        run.receiver.held().tensor(0)


# --- when the parameters may change -------------------------------------------------------------


def test_everything_has_been_read_before_the_last_bucket_leaves(pair: Pair) -> None:
    run = Run(pair, mixed())
    buckets = len(run.receiver.plan.buckets)
    assert buckets > 5
    assert run.events.count("read") == 1
    # Behind it come only the last bucket and its digests.
    assert run.events[run.events.index("read") :] == ["read", "broadcast", "broadcast"]


def test_parameters_that_change_once_they_are_read_do_not_change_what_arrives(pair: Pair) -> None:
    tensors = {name: tensor.clone() for name, tensor in mixed().items()}
    want = {name: tensor.clone() for name, tensor in tensors.items()}

    class Changing(Run):
        def on_read(self) -> None:
            super().on_read()
            for tensor in tensors.values():
                tensor.reshape(-1).view(torch.uint8).fill_(0xAB) if tensor.numel() else None

    run = Changing(pair, tensors)
    assert not torch.equal(tensors["wide"], want["wide"])
    assert_same_bits(run.arrived(), want)


def test_progress_rises_and_ends_at_the_total(pair: Pair) -> None:
    tensors = mixed()
    run = Run(pair, tensors)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert len(run.progress) == len(run.receiver.plan.buckets)
    assert {of for _, of in run.progress} == {total}
    sent = [count for count, _ in run.progress]
    assert sent == sorted(sent)
    assert sent[-1] == total
    assert sent[0] > 0


# --- what must not be accepted ------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["small", "over many buckets", "transposed", "wide"])
def test_a_bit_that_flips_on_its_way_is_found_and_its_tensor_named(pair: Pair, victim: str) -> None:
    index = list(mixed()).index(victim)
    flips: list[int] = []

    class Corrupting(Sender):
        def _pack(self, bucket: Bucket, buffer: torch.Tensor) -> None:
            super()._pack(bucket, buffer)
            for piece in bucket.pieces:
                if piece.tensor == index and not flips:
                    buffer[piece.bucket_offset + piece.nbytes - 1] ^= 0x80
                    flips.append(1)

    run = Run(pair, mixed(), Corrupting)
    assert flips
    error = run.receiver.error
    assert isinstance(error, DigestMismatch)
    assert error.names == (victim,)
    assert victim in error.message
    assert error.retryable
    assert not run.receiver.ready


def test_two_tensors_in_each_others_place_are_both_found(pair: Pair) -> None:
    class Swapping(Sender):
        def _pack(self, bucket: Bucket, buffer: torch.Tensor) -> None:
            super()._pack(bucket, buffer)
            first, second = bucket.pieces[:2]
            a = buffer[first.bucket_offset : first.bucket_offset + first.nbytes]
            b = buffer[second.bucket_offset : second.bucket_offset + second.nbytes]
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)

    run = Run(pair, {"q": random_tensor(64, seed=1), "k": random_tensor(64, seed=2)}, Swapping)
    assert isinstance(run.receiver.error, DigestMismatch)
    assert run.receiver.error.names == ("q", "k")


def test_a_tensor_that_changes_while_it_is_read_is_not_staged_as_something_it_never_was(pair: Pair) -> None:
    # Its buckets then belong to two states; the digest follows what was sent, so it arrives as sent.
    # What must hold: the receiver has exactly the bytes whose digest it was told.
    tensor = torch.zeros(5000)

    class Racing(Sender):
        def _pack(self, bucket: Bucket, buffer: torch.Tensor) -> None:
            super()._pack(bucket, buffer)
            tensor.add_(1)

    run = Run(pair, {"w": tensor}, Racing)
    arrived = run.arrived()["w"]
    assert sorted(set(arrived.tolist())) == [float(n) for n in range(len(run.receiver.plan.buckets))]


@pytest.mark.parametrize(("free", "fits"), [(0, False), (49_999, False), (50_001, True)])
def test_an_update_that_does_not_fit_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch, free: int, fits: bool) -> None:
    monkeypatch.setattr(staging.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=free))
    order = order_of(offer({"w": torch.zeros(10_000)}))
    assert plan_buckets(order.request.manifest, BUCKET).stream_bytes == 40_000
    if fits:
        Receiver(order, 0, CPU, CPU, lambda: pytest.fail("must not connect yet"))
    else:
        with pytest.raises(MemoryRefused, match=rf"40000 bytes of host memory and {free} are free"):
            Receiver(order, 0, CPU, CPU, lambda: pytest.fail("must not connect yet"))


def test_a_trainer_with_another_bucket_plan_is_refused() -> None:
    with pytest.raises(InternalError, match="different bucket plans"):
        Receiver(order_of(offer({"w": torch.zeros(3)}), plan_hash="0" * 64), 0, CPU, CPU, lambda: pytest.fail("must not connect"))


# --- ends --------------------------------------------------------------------------------------


def waiting_receiver(pair: Pair, timeout_seconds: float) -> tuple[Receiver, Communicator]:
    trainer, worker = pair()
    receiver = Receiver(order_of(offer({"w": torch.zeros(3)}), timeout_seconds=timeout_seconds), 0, CPU, CPU, lambda: worker)
    receiver.start()
    return receiver, trainer


def ended(receiver: Receiver) -> WeightSyncError:
    receiver._thread.join(5)
    assert not receiver._thread.is_alive()
    assert not receiver.ready
    assert receiver.error is not None
    return receiver.error


@pytest.mark.parametrize("end", [Receiver.cancel, Receiver.discard])
def test_a_receiver_that_is_cancelled_ends_soon(pair: Pair, end: Callable[[Receiver], None]) -> None:
    receiver, _ = waiting_receiver(pair, 30.0)
    time.sleep(0.1)
    began = time.monotonic()
    end(receiver)
    assert isinstance(ended(receiver), Aborted)
    assert time.monotonic() - began < 0.6


def test_a_receiver_that_is_sent_nothing_ends_at_the_updates_deadline(pair: Pair) -> None:
    began = time.monotonic()
    receiver, _ = waiting_receiver(pair, 0.4)
    assert isinstance(ended(receiver), TransportFailed)
    assert time.monotonic() - began < 1.4


def test_a_receiver_whose_trainer_leaves_ends_at_once(pair: Pair) -> None:
    receiver, trainer = waiting_receiver(pair, 30.0)
    began = time.monotonic()
    trainer.close()
    assert isinstance(ended(receiver), TransportFailed)
    assert time.monotonic() - began < 2.0


def test_a_failed_receivers_error_does_not_hold_the_staged_bytes(pair: Pair) -> None:
    receiver, trainer = waiting_receiver(pair, 30.0)
    staged = weakref.ref(receiver.held().data)
    trainer.close()
    assert isinstance(ended(receiver), TransportFailed)
    receiver.discard()
    gc.collect()
    assert staged() is None


def test_a_receiver_reports_why_it_could_not_connect() -> None:
    def refused() -> Communicator:
        raise TransportFailed("nobody came")

    def broken() -> Communicator:
        raise RuntimeError("a bug")

    for connect, words in ((refused, "nobody came"), (broken, "RuntimeError: a bug")):
        receiver = Receiver(order_of(offer({"w": torch.zeros(3)})), 0, CPU, CPU, connect)
        receiver.start()
        assert words in ended(receiver).message


def test_a_sender_whose_receiver_left_raises(pair: Pair) -> None:
    trainer, worker = pair()
    worker.close()
    offered = offer({"w": torch.zeros(1 << 20)})
    sender = Sender(offered, plan_buckets(offered.manifest, 1 << 16), None)
    began = time.monotonic()
    with pytest.raises(TransportFailed):
        sender.send(trainer, time.monotonic() + 20, lambda: False, lambda: None)
    assert time.monotonic() - began < 3.0
    assert not trainer.open


def test_a_sender_that_is_cancelled_raises(pair: Pair) -> None:
    trainer, _ = pair()
    offered = offer({"w": torch.zeros(1 << 20)})
    sender = Sender(offered, plan_buckets(offered.manifest, 1 << 16), None)
    stop_at = time.monotonic() + 0.2
    with pytest.raises(Aborted):
        sender.send(trainer, time.monotonic() + 20, lambda: time.monotonic() > stop_at, lambda: None)
    assert time.monotonic() - stop_at < 0.6
