"""Sender and receiver on CUDA tensors, each with two threads and two streams: what they read, write and take. Needs one GPU, no vLLM."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.test_overlap import Gathered
from tests.wires import Wire, order_of, same_bits
from weightsync.client.sender import Sender
from weightsync.client.source import offer
from weightsync.transport import digest
from weightsync.transport.packing import plan_buckets
from weightsync.worker import staging
from weightsync.worker.receiver import Receiver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BUCKET = 128 << 20
LARGEST = 3 * BUCKET + 4096
#: The digest's own, and what the allocator rounds up by; less than a bucket.
SCRATCH = 112 << 20
CPU = torch.device("cpu")


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def weights(fill: float | None = None) -> dict[str, torch.Tensor]:
    """Some 900 MiB."""
    shapes = {f"small{index}": (1000, 1100) for index in range(20)} | {"large": (LARGEST // 4,), "again": (LARGEST // 4,), "last": (7,)}
    tensors = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    tensors["turned"] = torch.randn(3000, 1000, device="cuda").t()
    return tensors if fill is None else {name: torch.full_like(tensor, fill) for name, tensor in tensors.items()}


class Hosted(Wire):
    """Buckets travel by host memory, in order behind the stream of the thread that sends or receives, as behind NCCL's `_wait`."""

    def travel(self, tensor: torch.Tensor, deadline: float, cancelled: Callable[[], bool]) -> None:
        super().travel(tensor, deadline, cancelled)
        torch.cuda.current_stream().synchronize()


def sent(tensors: Any, on_read: Callable[[], None] = lambda: None) -> queue.Queue[torch.Tensor]:
    """All that the sender broadcasts."""
    offered = offer(tensors) if isinstance(tensors, dict) else tensors
    through: queue.Queue[torch.Tensor] = queue.Queue()
    sender = Sender(offered, plan_buckets(offered.manifest, BUCKET), None)
    sender.send(Hosted(through, 0, device()), time.monotonic() + 60, lambda: False, on_read)  # type: ignore[arg-type]
    return through


def receiver_of(
    tensors: dict[str, torch.Tensor],
    through: queue.Queue[torch.Tensor],
    stage: str,
    landing: torch.device,
    regions: staging.Regions | None = None,
) -> Receiver:
    wire = Hosted(through, 1, landing)
    order = order_of(offer(tensors), BUCKET, stage, 60.0, allow_nonfinite=True)
    receiver = Receiver(order, 0, device(), landing, lambda: wire, regions=regions)  # type: ignore[arg-type, return-value]
    receiver.start()
    return receiver


def busy() -> None:
    """Give the current stream some 50 ms of work."""
    torch.cuda._sleep(100_000_000)


def test_values_that_are_still_being_computed_when_they_are_offered_are_the_ones_that_are_sent() -> None:
    """As a trainer publishes behind an optimiser's step that the device has not done yet."""
    tensors, want = weights(0.0), weights()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        for name, tensor in tensors.items():
            tensor.copy_(want[name])
        through = sent(tensors)
    receiver = receiver_of(tensors, through, "host", CPU)
    receiver._thread.join(60)
    assert receiver.error is None
    assert all(same_bits(receiver.held().tensor(index), tensor) for index, tensor in enumerate(want.values()))


def test_tensors_that_change_once_they_are_read_do_not_change_what_arrives() -> None:
    tensors = weights()
    want = {name: tensor.clone() for name, tensor in tensors.items()}

    def change() -> None:
        for tensor in tensors.values():
            tensor.fill_(-1.0)
        torch.cuda.synchronize()

    through = sent(tensors, change)
    receiver = receiver_of(tensors, through, "gpu", device())
    receiver._thread.join(60)
    assert receiver.error is None
    assert all(same_bits(receiver.held().tensor(index), tensor) for index, tensor in enumerate(want.values()))


@pytest.mark.parametrize(("stage", "lands_on_host"), [("gpu", False), ("gpu", True), ("host", False), ("host", True)])
def test_every_bit_arrives_wherever_buckets_land_while_the_engine_is_busy(stage: str, lands_on_host: bool) -> None:
    tensors = weights()
    through = sent(tensors)
    busy()  # on the engine's stream, which has memory that is given to the receiver now
    receiver = receiver_of(tensors, through, stage, CPU if lands_on_host else device())
    receiver._thread.join(60)
    assert receiver.error is None
    assert all(same_bits(receiver.held().tensor(index), tensor) for index, tensor in enumerate(tensors.values()))


def test_what_is_staged_on_the_host_lies_where_the_gpu_copies_by_itself_and_so_does_the_next() -> None:
    regions, addresses = staging.Regions(), set()
    for _ in range(3):
        tensors = weights()
        receiver = receiver_of(tensors, sent(tensors), "host", device(), regions)
        receiver._thread.join(60)
        assert receiver.error is None
        staged: Any = receiver.held()
        assert staged.data.is_pinned()
        assert all(same_bits(staged.tensor(index), tensor) for index, tensor in enumerate(tensors.values()))
        addresses.add(staged.data.data_ptr())
        del staged
        receiver.discard()
    assert len(addresses) == 1
    kept = regions._host[0].tensor()
    regions.drop()
    assert kept.is_pinned(), "the driver knows it for as long as somebody holds it"


def test_what_torch_keeps_of_an_update_counts_as_free_for_the_next() -> None:
    torch.cuda.empty_cache()
    before = staging.free_bytes(device())
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert before - (1 << 30) - (64 << 20) <= staging.free_bytes(device()) <= before - (1 << 30) + (64 << 20)
    del held
    assert torch.cuda.memory_reserved() >= 1 << 30
    assert abs(staging.free_bytes(device()) - before) <= 64 << 20


def test_memory_of_a_tensor_that_a_loader_has_let_go_of_is_not_written_while_its_stream_reads_it() -> None:
    tensors = {f"w{index}": torch.full((8 << 20,), float(index), device="cuda") for index in range(30)}
    receiver = receiver_of(tensors, sent(tensors), "none", device())
    into: Any = receiver.held()
    taken = []
    for index in range(len(tensors)):
        tensor = into.take(index)
        torch.cuda._sleep(20_000_000)  # the copy out of it comes late
        taken.append(tensor.clone())
        del tensor
    receiver._thread.join(60)
    assert receiver.error is None
    assert all(same_bits(got, want) for got, want in zip(taken, tensors.values(), strict=True))


def grown(work: Callable[[], Any]) -> int:
    """The most device memory that something takes, beside what there was."""
    digest.digest_tensor(torch.ones(9, device="cuda"))  # its table stays
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", ["resident", "gathered"])
def test_a_trainer_takes_two_buckets_and_the_largest_tensor(kind: str) -> None:
    tensors = weights()
    del tensors["turned"]
    source = Gathered(tensors) if kind == "gathered" else tensors
    largest = LARGEST if kind == "gathered" else 0
    took = grown(lambda: sent(source))
    assert 2 * BUCKET + largest <= took <= 2 * BUCKET + largest + SCRATCH


@pytest.mark.parametrize(
    ("stage", "lands_on_host", "buckets", "staged"), [("gpu", False, 0, 1), ("gpu", True, 0, 1), ("host", False, 2, 0)]
)
def test_a_worker_takes_what_it_stages_on_the_gpu_and_two_buckets_where_they_are_moved_to_the_host(
    stage: str, lands_on_host: bool, buckets: int, staged: int
) -> None:
    tensors = weights()
    through = sent(tensors)
    held: list[Receiver] = []

    def receive() -> None:
        held.append(receiver_of(tensors, through, stage, CPU if lands_on_host else device()))
        held[0]._thread.join(60)

    took = grown(receive)
    assert held[0].error is None
    least = buckets * BUCKET + staged * held[0].plan.stream_bytes
    assert least <= took <= least + SCRATCH


def test_what_ends_an_update_leaves_no_thread_and_no_memory() -> None:
    tensors = weights()

    class Enough(Exception):
        pass

    def update() -> None:
        offered = offer(tensors)

        def progress(sent: int, total: int) -> None:
            raise Enough

        sender = Sender(offered, plan_buckets(offered.manifest, BUCKET), progress)
        with pytest.raises(Enough):
            sender.send(Hosted(queue.Queue(), 0, device()), time.monotonic() + 60, lambda: False, lambda: None)  # type: ignore[arg-type]

    update()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    update()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert not [thread for thread in threading.enumerate() if thread.name == "weightsync-pack"]
