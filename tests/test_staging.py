"""Where an update waits, by the memory that is free.

Not covered: memory of a real device (`tests/gpu`).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.wires import order_of
from weightsync.client.source import offer
from weightsync.errors import MemoryRefused, TransportFailed
from weightsync.transport import memory, segment
from weightsync.transport.memory import HostMemory, let_go
from weightsync.transport.packing import plan_buckets
from weightsync.worker import staging
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.receiver import Receiver

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TENSORS = {"a": torch.arange(100, dtype=torch.float32), "b": torch.ones(3, dtype=torch.uint8), "c": torch.arange(9.0).reshape(3, 3)}
OFFER = offer(TENSORS)
PLAN = plan_buckets(OFFER.manifest, 128)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes by kind of device; what would be allocated on CUDA is so on the host."""
    found = {"cpu": 1 << 20, "cuda": 1 << 20}
    monkeypatch.setattr(staging, "free_bytes", lambda device: found[device.type])
    stock = torch.empty

    def empty(*args: Any, device: torch.device = CPU, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs)
        return SimpleNamespace(device=device, numel=made.numel, data=made) if device.type == "cuda" else made

    monkeypatch.setattr(torch, "empty", empty)
    return found


def allocated(*where: Any) -> Any:
    """Memory that nobody is lent."""
    made = staging.Regions().allocate(*where, lent=False)
    return made.tensor() if isinstance(made, HostMemory) else made


@pytest.mark.parametrize(
    ("stage", "device", "cuda_free", "expected"),
    [
        ("auto", CPU, 0, "cpu"),
        ("gpu", CPU, 0, "cpu"),
        ("host", CUDA, 1 << 20, "cpu"),
        ("auto", CUDA, 2 * PLAN.stream_bytes, "cuda"),
        ("auto", CUDA, 2 * PLAN.stream_bytes - 1, "cpu"),
        ("gpu", CUDA, 2 * PLAN.stream_bytes - 1, "cuda"),
    ],
)
def test_where_an_update_waits(stage: str, device: torch.device, cuda_free: int, expected: str, free: dict[str, int]) -> None:
    free["cuda"] = cuda_free
    made = allocated(PLAN, stage, device, CPU)
    assert made.device.type == expected and made.numel() == PLAN.stream_bytes


@pytest.mark.parametrize(
    ("stage", "kind", "most"),
    [("host", "host", int(PLAN.stream_bytes / 0.8)), ("gpu", "device", int(PLAN.stream_bytes / 0.8))],
)
def test_what_would_not_fit_is_refused_with_what_is_free(stage: str, kind: str, most: int, free: dict[str, int]) -> None:
    where = {"host": "cpu", "device": "cuda"}[kind]
    free[where] = most - 1
    with pytest.raises(MemoryRefused, match=f"staging needs {PLAN.stream_bytes} bytes of {kind} memory and {most - 1} are free"):
        allocated(PLAN, stage, CUDA, CPU)
    free[where] = most + 1
    assert allocated(PLAN, stage, CUDA, CPU).numel() == PLAN.stream_bytes


def test_buckets_that_would_not_fit_where_they_land_are_refused(free: dict[str, int]) -> None:
    free["cuda"] = 150
    with pytest.raises(MemoryRefused, match="two buckets take 256 bytes of device memory and 150 are free"):
        allocated(PLAN, "host", CUDA, CUDA)
    assert allocated(PLAN, "host", CUDA, CPU).numel() == PLAN.stream_bytes, "gloo lands on the host"


def test_what_passes_has_room_for_its_windows_too(free: dict[str, int]) -> None:
    """On a GPU a bucket may be a GiB, where nothing is staged since there is no room."""
    order, needed = order_of(offer({"a": torch.ones(10_000), "b": torch.ones(5)}), 4096, "none"), 40_000 + 2 * 4096
    free["cpu"] = int(needed / 0.8) + 1
    Receiver(order, 0, CPU, CPU, lambda: pytest.fail("it has not begun"))
    free["cpu"] -= 2
    with pytest.raises(MemoryRefused, match=f"the largest tensor and two buckets take {needed} bytes of host memory"):
        Receiver(order, 0, CPU, CPU, lambda: pytest.fail("it has not begun"))


def test_what_a_trainer_may_still_write_to_is_not_taken_away_under_it() -> None:
    offered = offer({"w": torch.zeros(1 << 20, dtype=torch.uint8)})
    plan = plan_buckets(offered.manifest, 1 << 20)
    memory = segment.create(plan.stream_bytes, CPU)
    trainers = segment.attach(memory.descriptor, memory.nbytes, CPU)
    whole = staging.Whole(offered.manifest, plan, memory)
    trainers.tensor.fill_(7)
    whole.let_go()
    assert trainers.tensor.eq(7).all() and whole.data.eq(7).all()


def test_a_staged_update_gives_its_tensors_and_leaves_out_what_is_skipped() -> None:
    data = torch.zeros(PLAN.stream_bytes, dtype=torch.uint8)
    whole = staging.Whole(OFFER.manifest, PLAN, data)
    for index, tensor in enumerate(TENSORS.values()):
        whole.tensor(index).copy_(tensor)
    taken: list[str] = []
    staged = whole.update(LoadMap({}), ["b"])
    found = dict(staged.stream(taken))
    assert list(found) == ["a", "c"] and taken == ["a", "b", "c"]
    assert all(torch.equal(found[name], TENSORS[name]) for name in found)
    assert staged.on_host() is staged


MEGABYTE = 1 << 20
#: Together more than the allocator ever takes from memory that it has already.
BIG = {"mine": torch.full((MEGABYTE,), 1, dtype=torch.uint8), "theirs": torch.full((16 * MEGABYTE,), 2, dtype=torch.uint8),
       "more": torch.full((24 * MEGABYTE,), 3, dtype=torch.uint8), "last": torch.full((5,), 4, dtype=torch.uint8)}  # fmt: skip


def resident(data: torch.Tensor) -> int:
    """Bytes of a tensor's memory that are there, in whole pages."""
    first = data.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(data.data_ptr() + data.nbytes - first) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), found) == 0
    return sum(page & 1 for page in found) * mmap.PAGESIZE


def received(unused: list[int]) -> tuple[staging.Whole, int]:
    """An update that came bucket by bucket, and the most bytes that it held meanwhile."""
    manifest = offer(BIG).manifest
    plan = plan_buckets(manifest, MEGABYTE // 2)
    spared = sum(manifest.tensors[index].nbytes for index in unused)
    data = allocated(plan, "host", CPU, CPU, spared)
    let_go(data)  # the process may have had this memory before
    whole = staging.Whole(manifest, plan, data, unused)
    most = 0
    for bucket in plan.buckets:
        window = whole.window(bucket)
        for piece in bucket.pieces:
            run = list(BIG.values())[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.nbytes]
            window[piece.bucket_offset : piece.bucket_offset + piece.nbytes].copy_(run)
        whole.landed(bucket)
        assert all(torch.equal(whole.tensor(index), list(BIG.values())[index]) for index in bucket.complete)
        most = max(most, resident(whole.data))
        whole.hand_over(bucket.complete)
    return whole, most


def test_what_a_worker_does_not_need_is_proved_and_then_given_back() -> None:
    whole, most = received([1, 2])
    total = sum(t.nbytes for t in BIG.values())
    assert resident(whole.data) <= MEGABYTE + 4 * mmap.PAGESIZE and most < total - 2 * MEGABYTE
    taken: list[str] = []
    staged = whole.update(LoadMap({}), ())
    found = dict(staged.stream(taken))
    assert list(found) == ["mine", "last"] and taken == list(BIG)
    assert all(torch.equal(found[name], BIG[name]) for name in found)
    assert resident(received([])[0].data) >= total


def test_memory_that_is_not_kept_is_not_asked_for(free: dict[str, int]) -> None:
    plan = plan_buckets(offer(BIG).manifest, MEGABYTE // 2)
    spared, buckets = 8 * MEGABYTE, MEGABYTE  # one is looked at while the next arrives
    free["cpu"] = int((plan.stream_bytes - spared + buckets) / 0.8) + 1
    assert allocated(plan, "host", CPU, CPU, spared).numel() == plan.stream_bytes
    free["cpu"] -= 2
    with pytest.raises(MemoryRefused, match=f"staging needs {plan.stream_bytes - spared + buckets} bytes of host"):
        allocated(plan, "host", CPU, CPU, spared)
    free["cuda"] = int(plan.stream_bytes / 0.8) - 1
    with pytest.raises(MemoryRefused, match=f"staging needs {plan.stream_bytes} bytes of device"):
        allocated(plan, "gpu", CUDA, CPU, spared)


class OnDevice:
    """Stands for bytes on a device."""

    device = CUDA

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.numel = data, data.numel

    def __getitem__(self, run: slice) -> torch.Tensor:
        return self.data[run]


def test_what_is_kept_of_a_device_is_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "small_pages", let_go)  # the process may have had this memory before
    staged = received([1, 2])[0].update(LoadMap({}), ())
    kept = dataclasses.replace(staged, data=OnDevice(staged.data)).on_host()
    assert resident(kept.data) <= MEGABYTE + 4 * mmap.PAGESIZE
    found = dict(kept.stream([]))
    assert list(found) == ["mine", "last"] and all(torch.equal(found[name], BIG[name]) for name in found)


# --- memory that a trainer is lent -----------------------------------------------------------------


class Lent:
    """Stands for a segment on a GPU, and for its memory that is kept: `user` is whether somebody holds a tensor on it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device, self.user = nbytes, device, False

    def spare(self) -> Lent:
        return self

    def segment(self) -> Lent | None:
        return None if self.user else self


@pytest.fixture
def made(free: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> list[Lent]:
    """What was made anew, of memory enough."""
    found: list[Lent] = []

    def create(nbytes: int, device: torch.device) -> Lent:
        found.append(Lent(nbytes, device))
        return found[-1]

    monkeypatch.setattr(staging, "create", create)
    free["cuda"] = free["cpu"] = 10 * PLAN.stream_bytes
    return found


def test_memory_of_a_gpu_is_lent_again_without_asking_what_is_free(made: list[Lent], free: dict[str, int]) -> None:
    regions: Any = staging.Regions()
    first = regions.allocate(PLAN, "auto", CUDA, CUDA)
    assert made == [first] and first.device is CUDA and first.nbytes == PLAN.stream_bytes
    regions.keep(first)
    free["cuda"] = 0
    assert regions.allocate(PLAN, "auto", CUDA, CUDA) is first and made == [first]
    with pytest.raises(MemoryRefused):  # it was not given back: whoever has it may not have let go of it
        regions.allocate(PLAN, "gpu", CUDA, CUDA)


@pytest.mark.parametrize("why", ["dropped", "used", "small", "host", "landing"])
def test_memory_is_made_anew_where_what_is_kept_can_not_be_taken(why: str, made: list[Lent]) -> None:
    regions: Any = staging.Regions()
    first = regions.allocate(PLAN, "gpu", CUDA, CUDA)
    regions.keep(first)
    if why == "dropped":
        regions.drop()
    first.user = why == "used"
    first.nbytes -= why == "small"
    second = regions.allocate(PLAN, "host" if why == "host" else "gpu", CUDA, CPU if why == "landing" else CUDA)
    assert second is not first and regions._spare is None
    assert len(made) == (1 if why in ("host", "landing") else 2), "where buckets do not land there is nothing to lend"


@pytest.mark.parametrize(("stage", "device", "landing", "spared", "lent"), [
    ("host", CPU, CPU, 0, True), ("host", CPU, CPU, 8, False), ("host", CUDA, CUDA, 0, False),
    ("gpu", CUDA, CUDA, 8, True), ("gpu", CUDA, CPU, 0, False), ("host", CUDA, CPU, 0, True),
])  # fmt: skip
def test_who_lends(stage: str, device: torch.device, landing: torch.device, spared: int, lent: bool, made: list[Lent]) -> None:
    """Where a stream lies where buckets land, and none of it goes back while the trainer writes."""
    found: Any = staging.Regions().allocate(PLAN, stage, device, landing, spared)
    assert (made == [found]) is lent


def test_memory_that_can_not_be_shared_is_refused_with_what_to_set(free: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def create(nbytes: int, device: torch.device) -> Any:
        raise TransportFailed("the CUDA driver says CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(staging, "create", create)
    with pytest.raises(MemoryRefused, match="bytes that a trainer can map: the CUDA driver says") as caught:
        staging.Regions().allocate(PLAN, "gpu", CUDA, CUDA)
    assert "sync.stage" in caught.value.hint and "sync.local" in caught.value.hint


# --- memory of the host that a GPU's driver knows ----------------------------------------------------


class Driver:
    """Stands for the CUDA driver: what it knows of the host's memory, address to size."""

    CU_MEMHOSTREGISTER_PORTABLE = 1
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.refuses = False

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        if self.refuses:
            return (2,)
        assert flags == 1 and not any(at < address + size and address < at + known for at, known in self.known.items())
        (ctypes.c_char * size).from_address(address)[size - 1] = b"\0"  # it is mapped
        self.known[address] = size
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        del self.known[address]
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(memory, "calls", lambda: made)
    monkeypatch.setattr(memory, "context_of", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


def test_the_driver_forgets_host_memory_before_it_goes_and_not_while_a_tensor_lies_on_it(driver: Driver, tmp_path: Path) -> None:
    file = tmp_path / "stream"
    file.write_bytes(bytes(9_000))
    for where in (None, file):
        host = HostMemory(9_000, where)
        assert host.free and not host.shown
        tensor = host.tensor()
        host.show(CUDA)
        host.show(CUDA)
        assert driver.known == {tensor.data_ptr(): 9_000} and host.shown and not host.free
        part = tensor[100:200].view(torch.int32)
        part.fill_(7)
        del host, tensor
        assert len(driver.known) == 1 and part.eq(7).all(), "a view of it is still there"
        del part
        assert driver.known == {}
    assert file.read_bytes()[100:104] == b"\7\0\0\0"


def test_host_memory_is_as_good_without_a_driver_that_takes_it(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.refuses = True
    host = HostMemory(5_000)
    host.show(CUDA)
    assert not host.shown and "5000 bytes of host memory are copied to and from cuda by a slow way" in caplog.text
    assert host.tensor().sum() == 0
    host.show(CPU)
    HostMemory(0).show(CUDA)
    assert HostMemory(0).tensor().shape == (0,) and driver.known == {}


def test_host_memory_of_a_cuda_engine_stays_for_the_next_update(driver: Driver, free: dict[str, int]) -> None:
    regions: Any = staging.Regions()

    def stage(lent: bool = False) -> staging.Whole:
        whole = staging.Whole(OFFER.manifest, PLAN, regions.allocate(PLAN, "host", CUDA, CUDA, 0, lent))
        whole.show(CUDA)
        return whole

    whole = stage()
    first = whole.data.data_ptr()
    whole.data.fill_(7)
    whole.let_go()
    assert whole.data.eq(7).all(), "the driver's copies would go elsewhere"
    assert list(driver.known) == [first]
    del whole
    free["cpu"] = 0
    whole = stage()
    assert whole.data.data_ptr() == first and list(driver.known) == [first]
    free["cuda"] = 2 * 128 - 1
    kept = whole.update(LoadMap({}), [])
    del whole
    free["cpu"], free["cuda"] = 1 << 20, 1 << 20
    second = stage()  # what is kept to come back to is not written over
    assert second.data.data_ptr() != first and len(driver.known) == 2
    del kept
    third = stage()
    assert third.data.data_ptr() == first and len(driver.known) == 2, "two are enough, turn by turn"
    del second, third
    free["cuda"] = 2 * 128 - 1
    with pytest.raises(MemoryRefused, match="two buckets take"):
        stage()
    regions.drop()
    assert driver.known == {}


@pytest.mark.parametrize("why", ["small", "gpu", "lent"])
def test_host_memory_that_the_next_update_does_not_take_goes(why: str, driver: Driver, made: list[Lent]) -> None:
    regions: Any = staging.Regions()
    plan = plan_buckets(offer({"a": torch.zeros(4)}).manifest, 128) if why == "small" else PLAN
    host = regions.allocate(plan, "host", CUDA, CUDA, 0, False)
    host.show(CUDA)
    del host
    assert len(driver.known) == 1
    taken = regions.allocate(PLAN, "host" if why == "small" else "gpu", CUDA, CUDA, 0, why == "lent")
    assert driver.known == {} and taken is not None


def test_host_memory_of_an_engine_without_a_gpu_stays_as_well(free: dict[str, int]) -> None:
    regions = staging.Regions()
    first = staging.Whole(OFFER.manifest, PLAN, regions.allocate(PLAN, "auto", CPU, CPU, 0, False))
    address = first.data.data_ptr()
    first.let_go()
    posted = first.data[:8]  # as a broadcast holds it that was left in the middle of a message
    del first
    assert regions.nbytes == 0
    second = staging.Whole(OFFER.manifest, PLAN, regions.allocate(PLAN, "auto", CPU, CPU, 0, False))
    assert second.data.data_ptr() != address
    del second, posted
    third = staging.Whole(OFFER.manifest, PLAN, regions.allocate(PLAN, "auto", CPU, CPU, 0, False))
    assert third.data.data_ptr() == address


def test_host_memory_is_not_kept_beside_the_file_that_an_update_comes_to_lie_in(tmp_path: Path, free: dict[str, int]) -> None:
    regions = staging.Regions()
    whole = staging.Whole(OFFER.manifest, PLAN, regions.allocate(PLAN, "auto", CPU, CPU, 0, False))
    file = tmp_path / "stream"
    file.write_bytes(bytes(PLAN.stream_bytes))
    regions.forget(whole.move(None, file))
    assert regions._host, "there was no room for the file"
    regions.forget(whole.move(HostMemory(PLAN.stream_bytes, file), file))
    assert regions._host == [] and regions.nbytes == 0


def test_what_a_trainer_was_lent_is_not_taken_away_under_it() -> None:
    lent = segment.create(PLAN.stream_bytes, CPU)
    whole = staging.Whole(OFFER.manifest, PLAN, lent)
    whole.lend()
    whole.data.fill_(7)
    whole.let_go()
    assert int(whole.data[-1]) == 7
    data = torch.full((1 << 24,), 7, dtype=torch.uint8)
    staging.Whole(OFFER.manifest, PLAN, data).let_go()
    assert int(data[1 << 23]) == 0


def test_memory_that_is_kept_for_the_next_update_is_counted_while_nobody_uses_it() -> None:
    regions = staging.Regions()
    regions._host = [HostMemory(64), HostMemory(128)]
    update = regions._host[0].tensor()
    assert regions.nbytes == 128
    del update
    assert regions.nbytes == 192
    regions.drop()
    assert regions.nbytes == 0
