"""A run of memory that several processes map: host memory or a GPU's, handed over as a file descriptor.

On the host a memfd, sealed so that nobody can cut it short under a reader. On a GPU an
allocation of the driver's virtual memory management, exported as a descriptor. Either way
the kernel or the driver counts who holds it: a segment whose maker was killed stays readable
for those who mapped it, and goes when the last of them lets go.

Memory is unmapped when the last tensor on it is gone, not by `close` under somebody's hands.

Not covered: GPUs that aren't the maker's own; ordering between streams, which is the caller's.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Any

import torch

from weightsync.errors import ConfigError, TransportFailed

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
    """

    def __init__(self, tensor: torch.Tensor, descriptor: Descriptor | None) -> None:
        self._held: tuple[torch.Tensor, Descriptor | None] | None = (tensor, descriptor)
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

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Where in this segment a contiguous tensor begins; None if it lies elsewhere."""
        first = tensor.data_ptr() - self.address
        return first if 0 <= first and first + tensor.nbytes <= self.nbytes else None

    def close(self) -> None:
        """Let go; tensors that somebody holds stay valid. Can be called twice, and by any thread."""
        self._held = None

    def _open(self) -> tuple[torch.Tensor, Descriptor | None]:
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
    except (OSError, _DriverError) as exc:
        raise TransportFailed(f"no shared segment of {nbytes} bytes on {device}: {exc}", hint=_HINT) from exc


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
            driver = _driver()
            with torch.cuda.device(device):
                torch.cuda.synchronize()  # makes the device's context this thread's
                handle = _value(driver, driver.cuMemImportFromShareableHandle(descriptor.number, _handle_type(driver)))
                return Segment(_tensor_on(_Mapping(driver, handle, nbytes, device.index or 0), device), None)
        have = os.fstat(descriptor.number).st_size
        if have < nbytes or not fcntl.fcntl(descriptor.number, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransportFailed(f"a segment of {have} bytes was handed over, and {nbytes} that nobody can cut short are wanted")
        return Segment(_mapped(descriptor, nbytes), None)
    except (OSError, ValueError, _DriverError) as exc:
        raise TransportFailed(f"a shared segment of {nbytes} bytes can't be mapped on {device}: {exc}", hint=_HINT) from exc


def _on_host(nbytes: int) -> Segment:
    descriptor = Descriptor(os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(descriptor.number, nbytes)
    fcntl.fcntl(descriptor.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return Segment(_mapped(descriptor, nbytes), descriptor)


def _mapped(descriptor: Descriptor, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor.number, nbytes), dtype=torch.uint8)


# --- CUDA ----------------------------------------------------------------------------------------


class _DriverError(Exception):
    pass


class _Mapping:
    """Memory of the driver's, mapped here; given back with the last tensor on it. Owns `handle` from the first line."""

    def __init__(self, driver: Any, handle: Any, size: int, device: int) -> None:
        self._driver, self._size, self._device, self._mapped = driver, size, device, False
        self._handle, self._address = handle, None
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._address = _value(driver, driver.cuMemAddressReserve(size, 0, 0, 0))
        _value(driver, driver.cuMemMap(self._address, size, 0, handle, 0))
        self._mapped = True
        _value(driver, driver.cuMemSetAccess(self._address, size, [access], 1))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (int(self._address or 0), False), "version": 3}

    def __del__(self) -> None:
        driver = self._driver
        # Unmapping does not wait for what still reads. At the end of a process the driver may be gone before.
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(self._device)
        with contextlib.suppress(Exception):
            if self._mapped:
                driver.cuMemUnmap(self._address, self._size)
            if self._address is not None:
                driver.cuMemAddressFree(self._address, self._size)
            driver.cuMemRelease(self._handle)


def _on_device(nbytes: int, device: torch.device) -> Segment:
    driver, index = _driver(), device.index or 0
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = _handle_type(driver)
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = index
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context this thread's
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(_value(driver, driver.cuMemGetAllocationGranularity(wanted, least)))
        size = -(-nbytes // unit) * unit
        mapping = _Mapping(driver, _value(driver, driver.cuMemCreate(size, wanted, 0)), size, index)
        number = _value(driver, driver.cuMemExportToShareableHandle(mapping._handle, _handle_type(driver), 0))
        return Segment(_tensor_on(mapping, device), Descriptor(int(number)))


def _tensor_on(mapping: _Mapping, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(mapping, device=device)  # holds the mapping


def _handle_type(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _value(driver: Any, answer: tuple[Any, ...]) -> Any:
    """What a call of the driver gave back besides its code."""
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise _DriverError(f"the CUDA driver says {getattr(code, 'name', code)}")
    return values[0] if values else None


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise ConfigError(
            "memory of a GPU can't be shared: cuda-bindings is not installed",
            hint="Install cuda-bindings, which torch's CUDA builds come with, or set sync.local to off",
        ) from None
    return driver
