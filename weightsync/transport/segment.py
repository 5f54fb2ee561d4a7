"""A run of memory that several processes map: host memory or a GPU's, handed over as a file descriptor.

On the host a memfd, sealed so that nobody can cut it short under a reader. On a GPU an
allocation of the driver's virtual memory management, exported as a descriptor. Either way
the kernel or the driver counts who holds it: a segment whose maker was killed stays readable
for those who mapped it, and goes when the last of them lets go.

Memory is unmapped when the last tensor on it is gone, not by `close` under somebody's hands; `Segment.gone` says whether it was.
What a GPU does there meanwhile is waited for, by its stream where that is known (`close(settled=True)`), else by the whole device.

Not covered: GPUs that aren't the maker's own; ordering between streams, which is the caller's.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import TransportFailed
from weightsync.transport.driver import DriverError, calls, context_of, value

_HINT = "Send smaller buckets (bucket_bytes), or set sync.local to off"


class Descriptor:
    """A file descriptor that is closed when nobody holds it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class Segment:
    """One segment, in a process that made it or mapped it.

    Args:
        tensor: shape [at least the bytes asked for], uint8, on the segment's memory.
        descriptor: what another process maps it by; None where it was mapped.
        holder: what the tensors on it keep alive, and nothing else does.
        mapping: of a GPU's memory.
    """

    def __init__(self, tensor: torch.Tensor, descriptor: Descriptor | None, holder: Any, mapping: _Mapping | None = None) -> None:
        self._held: tuple[torch.Tensor, Descriptor | None, _Mapping | None] | None = (tensor, descriptor, mapping)
        self._holder = weakref.ref(holder)
        self.nbytes = int(tensor.numel())
        self.address = int(tensor.data_ptr())

    @property
    def tensor(self) -> torch.Tensor:
        """All of it.

        Raises:
            TransportFailed: it was closed.
        """
        return self._open()[0]

    @property
    def descriptor(self) -> Descriptor:
        """What another process maps it by; open for as long as somebody holds it."""
        descriptor = self._open()[1]
        assert descriptor is not None, "a segment that was mapped is not handed on"
        return descriptor

    @property
    def gone(self) -> bool:
        """Whether nobody holds a tensor on it any more, so that this process can't touch it."""
        return self._holder() is None

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Where in this segment a contiguous tensor begins; None if it lies elsewhere."""
        first = tensor.data_ptr() - self.address
        return first if 0 <= first and first + tensor.nbytes <= self.nbytes else None

    def take_pages(self) -> None:
        """Have a host segment's memory there now, on this process's account: who writes first would be charged, and wait, page by page.

        Raises:
            TransportFailed: there is not so much.
        """
        descriptor = self.descriptor.number
        try:
            os.posix_fallocate(descriptor, 0, self.nbytes)
        except OSError as exc:
            raise TransportFailed(f"a shared segment of {self.nbytes} bytes finds no memory: {exc}", hint=_HINT) from exc

    def spare(self) -> Spare | None:
        """What the next one on a GPU may be made of; None for host memory."""
        _, descriptor, mapping = self._open()
        return None if mapping is None or descriptor is None else Spare(mapping, descriptor, self._holder)

    def close(self, settled: bool = False) -> None:
        """Let go; tensors that somebody holds stay valid. Can be called twice, and by any thread.

        Args:
            settled: a GPU has done all that this process asked of it there, so that unmapping need not wait for the whole device.
        """
        held, self._held = self._held, None
        if held is not None and held[2] is not None:
            held[2].settled = settled

    def _open(self) -> tuple[torch.Tensor, Descriptor | None, _Mapping | None]:
        held = self._held
        if held is None:
            raise TransportFailed("a shared segment was closed", hint="Sync again: new ones are made")
        return held


def create(nbytes: int, device: torch.device) -> Segment:
    """Make a segment of at least `nbytes`, zeros on the host, undefined on a GPU.

    Raises:
        TransportFailed: there is not so much memory, or it can't be shared here.
        ConfigError: cuda-bindings is not installed.
    """
    try:
        return _on_device(nbytes, device) if device.type == "cuda" else _on_host(nbytes)
    except (OSError, DriverError) as exc:
        raise TransportFailed(f"no shared segment of {nbytes} bytes on {device}: {exc}", hint=_HINT) from exc


def of_file(path: Path, tensor: torch.Tensor) -> Segment:
    """A segment of a file in shared memory that this process has mapped already, as `tensor`.

    Raises:
        TransportFailed: it is not there any more.
    """
    try:
        descriptor = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        raise TransportFailed(f"{path} can't be shared: {exc}", hint=_HINT) from exc
    return Segment(tensor, descriptor, tensor)


def attach(descriptor: Descriptor, nbytes: int, device: torch.device) -> Segment:
    """Map a segment that another process made.

    Args:
        nbytes: its size, as the maker's `Segment.nbytes` says.

    Raises:
        TransportFailed: it is smaller, could be cut short under its readers, or can't be mapped here.
        ConfigError: cuda-bindings is not installed.
    """
    try:
        if device.type == "cuda":
            driver = calls()
            with context_of(device):
                handle = value(driver, driver.cuMemImportFromShareableHandle(descriptor.number, _handle_type(driver)))
                return _lent(_Mapping(driver, handle, nbytes, device.index or 0), device, None)
        have = os.fstat(descriptor.number)
        if have.st_size < nbytes or not _keeps_its_size(descriptor, have):
            raise TransportFailed(f"a segment of {have.st_size} bytes was handed over, and {nbytes} that nobody can cut short are wanted")
        return _mapped(descriptor, nbytes, None)
    except (OSError, ValueError, DriverError) as exc:
        raise TransportFailed(f"a shared segment of {nbytes} bytes can't be mapped on {device}: {exc}", hint=_HINT) from exc


def _keeps_its_size(descriptor: Descriptor, have: os.stat_result) -> bool:
    """Sealed; or a file, which can't be, of this user or root: its folder says who else may come to it."""
    if have.st_nlink and stat.S_ISREG(have.st_mode):
        return have.st_uid in (os.geteuid(), 0)
    return bool(fcntl.fcntl(descriptor.number, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def _on_host(nbytes: int) -> Segment:
    descriptor = Descriptor(os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(descriptor.number, nbytes)
    fcntl.fcntl(descriptor.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return _mapped(descriptor, nbytes, descriptor)


def _mapped(descriptor: Descriptor, nbytes: int, own: Descriptor | None) -> Segment:
    memory = mmap.mmap(descriptor.number, nbytes)
    return Segment(torch.frombuffer(memory, dtype=torch.uint8), own, memory)


# --- CUDA ----------------------------------------------------------------------------------------


class _Mapping:
    """Memory of the driver's, mapped here; given back with the last tensor on it. Owns `handle` from the first line.

    Attributes:
        settled: the device has done all that this process asked of it there.
    """

    def __init__(self, driver: Any, handle: Any, size: int, device: int) -> None:
        self._driver, self.size, self.device, self._mapped = driver, size, device, False
        self.handle, self.address, self.settled = handle, 0, False
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.address = int(value(driver, driver.cuMemAddressReserve(size, 0, 0, 0)))
        value(driver, driver.cuMemMap(self.address, size, 0, handle, 0))
        self._mapped = True
        value(driver, driver.cuMemSetAccess(self.address, size, [access], 1))

    def __del__(self) -> None:
        driver = self._driver
        # Unmapping does not wait for what still reads. At the end of a process the driver may be gone before.
        with contextlib.suppress(Exception):
            if not self.settled:
                torch.cuda.synchronize(self.device)
        with contextlib.suppress(Exception), context_of(torch.device("cuda", self.device)):
            if self._mapped:
                driver.cuMemUnmap(self.address, self.size)
            if self.address:
                driver.cuMemAddressFree(self.address, self.size)
            driver.cuMemRelease(self.handle)


class _Loan:
    """What the tensors of one segment hold of a mapping: when it goes, nobody has one any more."""

    def __init__(self, mapping: _Mapping) -> None:
        self._mapping = mapping

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._mapping.size,), "typestr": "|u1", "data": (self._mapping.address, False), "version": 3}


class Spare:
    """The memory of a segment on a GPU, held for the next one.

    Attributes:
        nbytes: of it.
    """

    def __init__(self, mapping: _Mapping, descriptor: Descriptor, holder: weakref.ref[Any]) -> None:
        self._mapping, self._descriptor, self._holder, self.nbytes = mapping, descriptor, holder, mapping.size

    def segment(self) -> Segment | None:
        """Another segment on it, undefined bytes; None while somebody still holds a tensor of the one before."""
        if self._holder() is not None:
            return None
        made = _lent(self._mapping, torch.device("cuda", self._mapping.device), self._descriptor)
        self._holder = made._holder
        return made


def _on_device(nbytes: int, device: torch.device) -> Segment:
    driver, index = calls(), device.index or 0
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = _handle_type(driver)
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = index
    with context_of(device):
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(value(driver, driver.cuMemGetAllocationGranularity(wanted, least)))
        size = -(-nbytes // unit) * unit
        mapping = _Mapping(driver, value(driver, driver.cuMemCreate(size, wanted, 0)), size, index)
        number = value(driver, driver.cuMemExportToShareableHandle(mapping.handle, _handle_type(driver), 0))
        return _lent(mapping, device, Descriptor(int(number)))


def _lent(mapping: _Mapping, device: torch.device, descriptor: Descriptor | None) -> Segment:
    loan = _Loan(mapping)
    return Segment(torch.as_tensor(loan, device=device), descriptor, loan, mapping)


def _handle_type(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
