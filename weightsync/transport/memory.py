"""Host memory for many bytes: in huge pages, where the system gives them to who asks; given back in part; known to a GPU's driver.

The first touch of a page costs a fault. In pages of 4 KiB that was five times the cost of the
copy into them (2 against 11 GB/s in a virtual machine), as often as an update is staged.

What a GPU copies to or from page by page, through a buffer of the driver's, it copies several times as fast when the
driver knows the pages: `HostMemory.show`.

Not covered: which memory stays between updates.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import ConfigError
from weightsync.transport.driver import DriverError, calls, context_of, value

logger = logging.getLogger(__name__)


class _Pages(mmap.mmap):
    """Mapped memory, which the driver is told to forget before it goes."""

    shown: tuple[Any, int, torch.device] | None = None

    def __del__(self) -> None:
        if self.shown is None:
            return
        driver, address, device = self.shown
        with contextlib.suppress(Exception):  # at the end of a process the driver may be gone before
            torch.cuda.synchronize(device)  # copies that somebody has asked for
            with context_of(device):
                driver.cuMemHostUnregister(address)


class HostMemory:
    """Memory of the host, of this process or of a file, that tensors lie on; it goes with the last of them and of these.

    Attributes:
        nbytes: of it.
    """

    def __init__(self, nbytes: int, file: Path | None = None) -> None:
        """
        Args:
            file: of at least so many bytes; it is mapped. Without one the memory is zeros that nobody has touched.

        Raises:
            OSError, ValueError: it can't be mapped.
        """
        self.nbytes = nbytes
        size = max(1, nbytes)  # nothing can't be mapped
        if file is None or not nbytes:
            self._pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            with file.open("r+b") as stream:
                self._pages = _Pages(stream.fileno(), size)
        self._views: list[weakref.ref[memoryview]] = []

    def tensor(self) -> torch.Tensor:
        """All of it, shape [nbytes], uint8."""
        view = memoryview(self._pages)
        self._views = [ref for ref in self._views if ref() is not None] + [weakref.ref(view)]
        return torch.frombuffer(view, dtype=torch.uint8)[: self.nbytes]

    @property
    def free(self) -> bool:
        """Whether nobody holds a tensor on it any more."""
        return all(ref() is None for ref in self._views)

    @property
    def shown(self) -> bool:
        """Whether a GPU's driver knows it. Its pages must not be let go of then."""
        return self._pages.shown is not None

    def show(self, device: torch.device) -> None:
        """Have a GPU's copies reach it by themselves, to the end of it. A wish: where the driver refuses, they go as before.

        Its pages are taken, which for gigabytes that nobody has touched lasts seconds.
        """
        if self.shown or device.type != "cuda" or not self.nbytes:
            return
        address = torch.frombuffer(self._pages, dtype=torch.uint8).data_ptr()
        try:
            driver = calls()
            with context_of(device):
                value(driver, driver.cuMemHostRegister(address, len(self._pages), driver.CU_MEMHOSTREGISTER_PORTABLE))
        except (ConfigError, DriverError) as exc:
            logger.warning("%d bytes of host memory are copied to and from %s by a slow way: %s", self.nbytes, device, exc)
            return
        self._pages.shown = driver, address, device


def huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask that a CPU tensor which nobody has touched comes in huge pages; returns it. A wish: what refuses it is no error."""
    _advise(tensor, mmap.MADV_HUGEPAGE)
    return tensor


def small_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The reverse, for what will be let go of in part: in a huge page the system brings that back beside what is kept."""
    _advise(tensor, mmap.MADV_NOHUGEPAGE)
    return tensor


def let_go(tensor: torch.Tensor) -> torch.Tensor:
    """Give the whole pages of a CPU tensor back to the system; what is read there afterwards is zeros. A wish, too."""
    _advise(tensor, mmap.MADV_DONTNEED)
    _advise(tensor, mmap.MADV_REMOVE)  # a file's in shared memory; other memory has nothing to remove
    return tensor


def _advise(tensor: torch.Tensor, advice: int) -> None:
    if tensor.device.type == "cpu":
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE
        if pages > 0:
            _madvise()(first, pages * mmap.PAGESIZE, advice)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call
