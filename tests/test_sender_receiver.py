"""One update from a trainer's sender into a worker's receiver, over gloo on loopback, in two threads.

Bytes that change on their way do so between two processes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.peers import Peer
from weightsync.client.sender import Sender
from weightsync.client.source import Offer, offer
from weightsync.errors import (
    Aborted,
    BadValues,
    DigestMismatch,
    InternalError,
    ManifestRefused,
    MemoryRefused,
    TransportFailed,
    WeightSyncError,
)
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.transport import communicator as communicator_module
from weightsync.transport import rendezvous
from weightsync.transport.communicator import Communicator
from weightsync.transport.packing import Bucket, plan_buckets
from weightsync.worker import admission, loadmap, staging
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


def order_of(
    offered: Offer,
    bucket_bytes: int = BUCKET,
    timeout_seconds: float = 10.0,
    plan_hash: str | None = None,
    allow_nonfinite: bool = True,  # most tests send any bit pattern at all
) -> BeginOrder:
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
        allow_nonfinite=allow_nonfinite,
    )
    return BeginOrder(request, CommunicatorInfo("127.0.0.1", 1, 1, 2, {"0": 1}, "gloo"), 0, 1, 5.0)


class Run:
    """Sends `tensors` from this thread into a receiver; afterwards everything that can be asked of both."""

    def __init__(
        self,
        pair: Pair,
        tensors: dict[str, torch.Tensor],
        sender_class: type[Sender] = Sender,
        bucket_bytes: int = BUCKET,
        allow_nonfinite: bool = True,
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        trainer, worker = pair()
        offered = offer(tensors)
        self.names = list(tensors)
        self.progress: list[tuple[int, int]] = []
        self.events: list[str] = []
        self.error: WeightSyncError | None = None
        order = order_of(offered, bucket_bytes, allow_nonfinite=allow_nonfinite)
        self.receiver = Receiver(order, 0, CPU, CPU, lambda: worker, dtypes)
        self.receiver.start()
        sender = sender_class(
            offered, plan_buckets(offered.manifest, bucket_bytes), lambda sent, total: self.progress.append((sent, total))
        )
        post = trainer.post

        def noted(tensors: Sequence[torch.Tensor], deadline: float, cancelled: Callable[[], bool]) -> Any:
            self.events += ["bucket" if tensor.dtype == torch.uint8 else "digests" for tensor in tensors]
            return post(tensors, deadline, cancelled)

        trainer.post = noted  # type: ignore[method-assign]
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
    assert run.events == ["read", "digests"]


def test_several_updates_travel_over_one_communicator(pair: Pair) -> None:
    one = pair()
    for seed in range(3):
        tensors = {"w": random_tensor(3000, seed=seed)}
        assert_same_bits(Run(lambda: one, tensors).arrived(), tensors)


def test_staged_tensors_are_views_of_the_staging_and_go_with_it(pair: Pair) -> None:
    run = Run(pair, {"w": random_tensor(10)})
    staging = run.receiver.held().data
    assert run.receiver.held().tensor(0).data_ptr() == staging.data_ptr()
    run.receiver.discard()
    with pytest.raises(InternalError, match="let go of"):
        run.receiver.held().tensor(0)


def test_dtypes_of_different_width_share_a_bucket_and_stay_aligned(pair: Pair) -> None:
    # Laid end to end, the second would begin at byte 6 and the fourth at an odd one.
    tensors = {
        "bf16": random_tensor(3, dtype=torch.bfloat16, seed=1),
        "fp32": random_tensor(2, dtype=torch.float32, seed=2),
        "uint8": random_tensor(1, dtype=torch.uint8, seed=3),
        "fp16": random_tensor(5, dtype=torch.float16, seed=4),
    }
    run = Run(pair, tensors)
    assert len(run.receiver.plan.buckets) == 1
    arrived = run.arrived()
    assert_same_bits(arrived, tensors)
    assert all(tensor.data_ptr() % 8 == 0 for tensor in arrived.values())


def test_views_of_an_earlier_bucket_keep_their_values_while_later_ones_and_the_next_update_arrive(pair: Pair) -> None:
    # As a loader holds them that waits for the rest of its layer. What the sender's buffer is filled with
    # between two buckets must not arrive anywhere.
    one = pair()
    held: dict[str, torch.Tensor] = {}
    want = {f"w{index}": random_tensor(BUCKET // 4, seed=index) for index in range(6)}

    class Poisoning(Sender):
        def _pack(self, bucket: Bucket, window: torch.Tensor) -> Any:
            window.fill_(0xFF)
            packed = super()._pack(bucket, window)
            return packed

    class Holding(Run):
        def on_read(self) -> None:
            super().on_read()
            until = time.monotonic() + 5
            while not self.receiver.tensors and time.monotonic() < until:
                time.sleep(0.001)
            assert 0 < self.receiver.tensors < len(want)  # buckets are still to come
            held.update({name: self.receiver.held().tensor(index) for index, name in enumerate(self.names)})

    run = Holding(lambda: one, want, Poisoning)
    assert_same_bits(run.arrived(), want)
    run.receiver.discard()
    Run(lambda: one, {name: torch.full_like(tensor, -1.0) for name, tensor in want.items()}, Poisoning).arrived()
    assert_same_bits(held, want)


def test_a_router_bias_in_fp32_among_bf16_keeps_every_bit_and_in_bf16_it_is_refused(pair: Pair) -> None:
    class Twin(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(4, 8, dtype=torch.bfloat16, device="meta"))
            self.e_score_correction_bias = torch.nn.Parameter(torch.empty(4, dtype=torch.float32, device="meta"))

        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    bias = torch.tensor([1 + 2**-20, 1e-30, 3e38, -(2.0**-140)])
    assert not torch.equal(bias.bfloat16().float(), bias)
    tensors = {"weight": torch.ones(4, 8, dtype=torch.bfloat16), "e_score_correction_bias": bias}
    found = loadmap.record(Twin(), offer(tensors).manifest.tensors)
    assert found.dtypes["e_score_correction_bias"] == "float32"
    run = Run(pair, tensors, allow_nonfinite=False, dtypes=found.dtypes)
    assert_same_bits(run.arrived(), tensors)
    cast = offer(tensors | {"e_score_correction_bias": bias.bfloat16()}).manifest
    with pytest.raises(ManifestRefused, match="e_score_correction_bias is bfloat16, want float32"):
        admission.admit(cast, found, Twin, tied=False)


# --- when the parameters may change -------------------------------------------------------------


def test_everything_has_been_read_before_the_last_bucket_leaves(pair: Pair) -> None:
    run = Run(pair, mixed())
    buckets = len(run.receiver.plan.buckets)
    assert buckets > 5
    assert run.events.count("read") == 1
    # It is packed while the one before it is on its way, and not earlier: there are two buffers.
    assert run.events[run.events.index("read") :].count("bucket") == 1


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
        def _pack(self, bucket: Bucket, window: torch.Tensor) -> Any:
            packed = super()._pack(bucket, window)
            for piece in bucket.pieces:
                if piece.tensor == index and not flips:
                    window[piece.bucket_offset + piece.nbytes - 1] ^= 0x80
                    flips.append(1)
            return packed

    run = Run(pair, mixed(), Corrupting)
    assert flips
    error = run.receiver.error
    assert isinstance(error, DigestMismatch)
    assert error.names == (victim,)
    assert victim in error.message
    assert error.retryable
    assert not run.receiver.ready


def send_in_peer(state: dict[str, Any], info: CommunicatorInfo, tensors: dict[str, torch.Tensor]) -> None:
    communicator = Communicator(info, 0, CPU, 20.0, 30.0)
    offered = offer(tensors)
    Sender(offered, plan_buckets(offered.manifest, BUCKET), None).send(communicator, time.monotonic() + 20, lambda: False, lambda: None)
    communicator.close()


def receive_in_peer(
    state: dict[str, Any], info: CommunicatorInfo, tensors: dict[str, torch.Tensor], flip: tuple[int, int, int] | None
) -> tuple[bool, WeightSyncError | None]:
    """Receive; with `flip` this bucket's byte is changed by this mask as soon as it is here."""
    communicator = Communicator(info, 1, CPU, 20.0, 30.0)
    post, settle, buckets = communicator.post, communicator.settle, itertools.count()
    coming: dict[int, torch.Tensor] = {}

    def watched(tensors: Sequence[torch.Tensor], *how: Any) -> Any:
        posted = post(tensors, *how)
        coming[id(posted)] = tensors[0]
        return posted

    def flipping(posted: Any, *how: Any) -> None:
        settle(posted, *how)
        if flip is not None and next(buckets) == flip[0]:
            coming[id(posted)][flip[1]] ^= flip[2]

    communicator.post, communicator.settle = watched, flipping  # type: ignore[method-assign]
    receiver = Receiver(order_of(offer(tensors)), 0, CPU, CPU, lambda: communicator)
    receiver.start()
    receiver._thread.join(20)
    communicator.close()
    return receiver.ready, receiver.error


def test_a_byte_that_changes_between_two_processes_is_found_and_its_tensor_named() -> None:
    tensors = {"first": random_tensor(8, seed=1), "middle": random_tensor(2 * BUCKET // 4, seed=2), "last": random_tensor(40, seed=3)}
    store = rendezvous.host_store("127.0.0.1", 20.0)
    trainer, worker = Peer().ready(), Peer().ready()
    cases: list[tuple[tuple[int, int, int] | None, str]] = [
        (None, ""),
        ((0, 31, 0x01), "first"),
        ((1, 17, 0x80), "middle"),
        ((2, 64 + 159, 0x10), "last"),
    ]
    try:
        for generation, (flip, name) in enumerate(cases, 1):
            info = CommunicatorInfo("127.0.0.1", store.port, generation, 2, {"0": 1}, "gloo")
            trainer.start(send_in_peer, info, tensors)
            staged, error = worker.call(receive_in_peer, info, tensors, flip)
            # A receiver that fails leaves; the trainer then has bytes that nobody takes.
            with contextlib.suppress(TransportFailed):
                trainer.result()
            if flip is None:
                assert staged and error is None
            else:
                assert isinstance(error, DigestMismatch) and not staged
                assert error.names == (name,) and name in error.message
    finally:
        trainer.kill()
        worker.kill()


def poisoned() -> dict[str, torch.Tensor]:
    tensors = {f"w{index}": torch.randn(700, generator=torch.Generator().manual_seed(index)) for index in range(8)}
    tensors["w1"][[3, 600]] = float("nan")
    tensors["w4"][699] = float("-inf")
    tensors["w7"] = torch.tensor([1.0, float("inf"), float("nan")], dtype=torch.bfloat16)
    return tensors


def test_nan_and_infinity_are_refused_by_name_with_their_counts(pair: Pair) -> None:
    run = Run(pair, poisoned(), allow_nonfinite=False)
    error = run.receiver.error
    assert isinstance(error, BadValues)
    assert error.names == ("w1", "w4", "w7")
    assert "3 tensor(s)" in error.message
    assert "w1 (2 NaN of 700), w4 (1 infinite of 700), w7 (1 NaN, 1 infinite of 3)" in error.message
    assert not error.retryable and "allow_nonfinite" in error.hint
    assert not run.receiver.ready
    # The trainer's side has sent everything, so that its call learns of all of them from the engine.
    assert run.error is None
    assert len(run.progress) == len(run.receiver.plan.buckets) > 3


def test_nan_and_infinity_pass_when_they_are_allowed(pair: Pair) -> None:
    assert_same_bits(Run(pair, poisoned(), allow_nonfinite=True).arrived(), poisoned())


def test_integers_with_the_bits_of_nan_pass(pair: Pair) -> None:
    tensors = {dtype: torch.full((40,), -1, dtype=torch.int64).to(getattr(torch, dtype)) for dtype in ("int64", "int32", "int8", "uint8")}
    assert_same_bits(Run(pair, tensors, allow_nonfinite=False).arrived(), tensors)


def test_bytes_that_changed_on_their_way_are_not_taken_for_bad_values(pair: Pair) -> None:
    class Corrupting(Sender):
        def _pack(self, bucket: Bucket, window: torch.Tensor) -> Any:
            packed = super()._pack(bucket, window)
            window[:4] = 0xFF  # a NaN
            return packed

    run = Run(pair, {"w": torch.ones(5)}, Corrupting, allow_nonfinite=False)
    assert isinstance(run.receiver.error, DigestMismatch)


def test_of_many_bad_tensors_20_are_named_and_all_are_counted(pair: Pair) -> None:
    run = Run(pair, {f"w{index}.": torch.tensor([float("nan")]) for index in range(50)}, allow_nonfinite=False)
    error = run.receiver.error
    assert isinstance(error, BadValues)
    assert error.names == tuple(f"w{index}." for index in range(20))
    assert "50 tensor(s)" in error.message and "w19. (1 NaN of 1) and 30 more" in error.message and "w20." not in error.message


def test_a_value_that_the_engines_dtype_cannot_hold_is_refused_by_name(pair: Pair) -> None:
    tensors = {
        "gate.weight": torch.tensor([1.0, 70_000.0, -3.0], dtype=torch.bfloat16),
        "up.weight": torch.tensor([1.0, 65_280.0], dtype=torch.bfloat16),
        "gate.e_score_correction_bias": torch.tensor([70_000.0]),  # stays fp32 in an fp16 engine
    }
    dtypes = {"gate.weight": "float16", "up.weight": "float16", "gate.e_score_correction_bias": "float32"}
    error = Run(pair, tensors, allow_nonfinite=False, dtypes=dtypes).receiver.error
    assert isinstance(error, BadValues)
    assert error.names == ("gate.weight",)
    assert "gate.weight (1 beyond 65504, the most that float16 holds of 3)" in error.message
    assert_same_bits(Run(pair, tensors, allow_nonfinite=True, dtypes=dtypes).arrived(), tensors)
    assert_same_bits(Run(pair, tensors, allow_nonfinite=False, dtypes=dict.fromkeys(tensors, "bfloat16")).arrived(), tensors)


def test_two_tensors_in_each_others_place_are_both_found(pair: Pair) -> None:
    class Swapping(Sender):
        def _pack(self, bucket: Bucket, window: torch.Tensor) -> Any:
            packed = super()._pack(bucket, window)
            first, second = bucket.pieces[:2]
            a = window[first.bucket_offset : first.bucket_offset + first.nbytes]
            b = window[second.bucket_offset : second.bucket_offset + second.nbytes]
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
            return packed

    run = Run(pair, {"q": random_tensor(64, seed=1), "k": random_tensor(64, seed=2)}, Swapping)
    assert isinstance(run.receiver.error, DigestMismatch)
    assert run.receiver.error.names == ("q", "k")


def test_a_tensor_that_changes_while_it_is_read_is_not_staged_as_something_it_never_was(pair: Pair) -> None:
    # Its buckets then belong to two states; the digest follows what was sent, so it arrives as sent.
    # What must hold: the receiver has exactly the bytes whose digest it was told.
    tensor = torch.zeros(5000)

    class Racing(Sender):
        def _pack(self, bucket: Bucket, window: torch.Tensor) -> Any:
            packed = super()._pack(bucket, window)
            tensor.add_(1)
            return packed

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


def test_a_plan_of_too_many_buckets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_of(offer({"w": torch.zeros(100_000)}), 4096)
    monkeypatch.setattr("weightsync.transport.packing.MAX_BUCKETS", 10)
    with pytest.raises(ManifestRefused, match="more than 10 buckets; want 40064 or more"):
        Receiver(order, 0, CPU, CPU, lambda: pytest.fail("must not connect"))


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
