"""Shared segments: what another maps is what was made, and memory goes when nobody holds it. The CUDA half on a made-up driver."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.errors import ConfigError, TransportFailed
from weightsync.transport import segment
from weightsync.transport.segment import Descriptor

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


def files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def memfd(nbytes: int, seals: int) -> Descriptor:
    descriptor = Descriptor(os.memfd_create("test", os.MFD_ALLOW_SEALING))
    os.ftruncate(descriptor.number, nbytes)
    fcntl.fcntl(descriptor.number, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_both_see_one_memory() -> None:
    made = segment.create(10_000, CPU)
    mapped = segment.attach(made.descriptor, made.nbytes, CPU)
    assert made.tensor.data_ptr() != mapped.tensor.data_ptr()
    made.tensor[9_999] = 5
    assert mapped.tensor[9_999] == 5 and int(mapped.tensor.sum()) == 5


def test_memory_and_files_go_when_nobody_holds_them_and_not_before() -> None:
    before = files()
    made = segment.create(1 << 20, CPU)
    mapped = segment.attach(made.descriptor, made.nbytes, CPU)
    view = mapped.tensor[5:10]
    made.tensor[5] = 9
    for one in (made, mapped):
        one.close()
        one.close()
        with pytest.raises(TransportFailed, match="closed"):
            one.tensor  # noqa: B018
    assert view.tolist() == [9, 0, 0, 0, 0]
    del view
    assert files() == before


def test_a_segment_that_its_maker_could_cut_short_is_not_read() -> None:
    for descriptor, words in ((memfd(4096, 0), "nobody can cut short"), (memfd(100, fcntl.F_SEAL_SHRINK), "a segment of 100 bytes")):
        with pytest.raises(TransportFailed, match=words):
            segment.attach(descriptor, 4096, CPU)
    made = segment.create(4096, CPU)
    with pytest.raises(OSError):
        os.ftruncate(made.descriptor.number, 100)


def test_a_file_of_this_user_is_shared_as_it_is(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"weightsync-test-{os.getpid()}"
    try:
        path.write_bytes(bytes(8192))
        tensor = torch.from_file(str(path), shared=True, size=8192, dtype=torch.uint8)
        before, made = files(), segment.of_file(path, tensor)
        mapped = segment.attach(made.descriptor, made.nbytes, CPU)
        mapped.tensor[8191] = 5
        assert tensor[8191] == 5 and made.tensor.data_ptr() == tensor.data_ptr()
        with pytest.raises(TransportFailed, match="a segment of 8192 bytes was handed over, and 8193"):
            segment.attach(made.descriptor, 8193, CPU)
    finally:
        path.unlink()
    with pytest.raises(TransportFailed, match="can't be shared"):
        segment.of_file(path, tensor)
    made.close()
    mapped.close()
    assert files() == before


def test_another_users_file_is_not_mapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(4096))
    descriptor = Descriptor(os.open(path, os.O_RDWR))
    segment.attach(descriptor, 4096, CPU)
    os.chown(path, 4321, -1) if not os.geteuid() else monkeypatch.setattr(segment.os, "geteuid", lambda: 4321)
    with pytest.raises(TransportFailed, match="nobody can cut short"):
        segment.attach(descriptor, 4096, CPU)


def test_it_is_told_when_no_tensor_is_left_on_it() -> None:
    made = segment.create(4096, CPU)
    mapped = segment.attach(made.descriptor, made.nbytes, CPU)
    view = mapped.tensor[5:]
    assert not mapped.gone
    mapped.close()
    assert not mapped.gone, "somebody could still write through the view"
    del view
    assert mapped.gone and not made.gone


def test_pages_are_there_before_anybody_writes() -> None:
    made = segment.create(4 << 20, CPU)
    assert os.fstat(made.descriptor.number).st_blocks == 0
    made.take_pages()
    assert os.fstat(made.descriptor.number).st_blocks * 512 == 4 << 20
    assert made.spare() is None, "memory of the host is not kept"


def test_more_than_there_is_or_something_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportFailed, match="no shared segment of 4611686018427387904 bytes on cpu"):
        segment.create(1 << 62, CPU)
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(TransportFailed, match=r"can't be mapped on cpu|of 0 bytes"):
        segment.attach(Descriptor(read), 4096, CPU)


def test_where_a_tensor_lies() -> None:
    made = segment.create(1000, CPU)
    assert made.offset(made.tensor[64:72].view(torch.int64)) == 64
    assert made.offset(made.tensor) == 0
    assert made.offset(torch.zeros(4)) is None


# --- CUDA ----------------------------------------------------------------------------------------


class Driver:
    """As much of `cuda.bindings.driver` as is called; memory is counted by who holds it. `fails` names a call."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, fails: str = "") -> None:
        self.fails, self.handles, self.reserved, self.mapped = fails, list[int](), dict[int, int](), dict[int, int]()
        self.accessed: list[int] = []

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        return (SimpleNamespace(name=f"{name}_FAILED"),) if self.fails == name else (0, *values)

    def cuMemGetAllocationGranularity(self, prop: Any, _: Any) -> tuple[Any, ...]:
        assert (prop.type, prop.requestedHandleTypes, prop.location.type, prop.location.id) == (1, 1, 1, 0)
        return self._answer("granularity", 1 << 21)

    def cuMemCreate(self, size: int, *_: Any) -> tuple[Any, ...]:
        assert size % (1 << 21) == 0
        return self._handle("create")

    def cuMemImportFromShareableHandle(self, number: int, _: Any) -> tuple[Any, ...]:
        os.fstat(number)
        return self._handle("import")

    def _handle(self, name: str) -> tuple[Any, ...]:
        if self.fails != name:
            self.handles.append(len(self.handles))
        return self._answer(name, len(self.handles) - 1)

    def cuMemExportToShareableHandle(self, *_: Any) -> tuple[Any, ...]:
        return self._answer("export", os.memfd_create("driver") if self.fails != "export" else -1)

    def cuMemAddressReserve(self, size: int, *_: Any) -> tuple[Any, ...]:
        if self.fails != "reserve":
            self.reserved[1 << 30] = size
        return self._answer("reserve", 1 << 30)

    def cuMemMap(self, address: int, size: int, *_: Any) -> tuple[Any, ...]:
        if self.fails != "map":
            self.mapped[address] = size
        return self._answer("map")

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        assert count == len(access) == 1 and access[0].flags == 3 and self.mapped[address] == size
        self.accessed.append(address)
        return self._answer("access")

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.mapped.pop(address) == size
        return (0,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        assert not self.mapped, "an address range is given back mapped"
        assert self.reserved.pop(address) == size
        return (0,)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        self.handles.remove(handle)
        return (0,)


class Held:
    """Stands for a tensor on a GPU, and holds its memory as that does."""

    def __init__(self, mapping: Any, device: torch.device) -> None:
        shape = mapping.__cuda_array_interface__
        assert device == CUDA and shape["version"] == 3 and shape["typestr"] == "|u1"
        self._mapping, self._size, self._at = mapping, shape["shape"][0], shape["data"][0]

    def numel(self) -> int:
        return int(self._size)

    def data_ptr(self) -> int:
        return int(self._at)


@pytest.fixture
def waits() -> list[Any]:
    """Waits for the whole device."""
    return []


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch, waits: list[Any]) -> Iterator[Any]:
    asked: list[Any] = []

    def make(fails: str = "") -> Driver:
        driver = Driver(fails)
        monkeypatch.setattr(segment, "calls", lambda: driver)
        return driver

    monkeypatch.setattr(segment.torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(segment.torch.cuda, "synchronize", lambda *a: waits.append(a))
    monkeypatch.setattr(segment.torch.cuda, "current_stream", lambda device: SimpleNamespace(query=lambda: asked.append(device)))
    monkeypatch.setattr(segment.torch, "as_tensor", lambda mapping, device: Held(mapping, device))
    yield make
    assert asked, "the driver was called in a thread without a context"


def test_memory_of_a_gpu_is_made_handed_over_mapped_and_given_back(driven: Any, waits: list[Any]) -> None:
    before, driver = files(), driven()
    made = segment.create(5 << 20, CUDA)
    assert made.nbytes == 6 << 20 and made.address == 1 << 30
    other = driven()
    mapped = segment.attach(made.descriptor, made.nbytes, CUDA)
    assert other.mapped == driver.mapped == {1 << 30: 6 << 20} and other.accessed == driver.accessed == [1 << 30]
    assert not waits, "the device may be busy with an engine, or a trainer"
    view = mapped.tensor
    made.close(settled=True)
    assert not waits and made.gone
    mapped.close()
    assert not driver.mapped and not driver.reserved and not driver.handles
    assert other.mapped and not mapped.gone, "somebody still holds a tensor on it"
    del view
    assert len(waits) == 1 and mapped.gone, "nobody has said that the device is done with it"
    assert not other.mapped and not other.reserved and not other.handles
    assert files() == before


def test_memory_of_a_gpu_is_taken_for_the_next_segment_when_nobody_holds_a_tensor_of_the_one_before(driven: Any) -> None:
    before, driver = files(), driven()
    made = segment.create(5 << 20, CUDA)
    view, spare = made.tensor, made.spare()
    assert spare is not None and spare.nbytes == 6 << 20
    made.close()
    assert spare.segment() is None and driver.mapped
    del view
    again = spare.segment()
    assert again is not None and (again.nbytes, again.address) == (6 << 20, 1 << 30) and len(driver.handles) == 1
    assert os.fstat(again.descriptor.number) and spare.segment() is None
    again.close()
    assert spare.segment() is not None and driver.mapped
    del spare
    assert not driver.mapped and not driver.reserved and not driver.handles
    assert files() == before


@pytest.mark.parametrize("fails", ["granularity", "create", "export", "import", "reserve", "map", "access"])
def test_what_the_driver_refuses_is_said_and_leaves_nothing_behind(driven: Any, fails: str) -> None:
    before = files()
    driver = driven(fails)
    with pytest.raises(TransportFailed, match=f"the CUDA driver says {fails}_FAILED"):
        if fails == "import":
            segment.attach(memfd(1 << 21, 0), 1 << 21, CUDA)
        else:
            segment.create(1 << 20, CUDA)
    assert files() == before
    assert not driver.mapped and not driver.reserved and not driver.handles


def test_without_cuda_bindings_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match="cuda-bindings is not installed"):
        segment.create(4096, CUDA)
