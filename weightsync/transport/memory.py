"""Host memory that is soon there, and soon gone: in huge pages, where the system gives them to who asks; and given back in part.

The first touch of a page costs a fault. In pages of 4 KiB that was five times the cost of the
copy into them (2 against 11 GB/s in a virtual machine), as often as an update is staged.

Not covered: memory that stays between updates, pinned memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch


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
