"""A stand-in for a captured CUDA graph, on a CPU.

Like a graph it keeps addresses and no references: capture notes where each tensor
lies, replay reads the bytes that are there now. Where a graph would read memory that
was given back, and crash or return somebody else's values, the stand-in says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync.storage.pins import Read


class ReadsFreedMemory(Exception):
    """The replay would read memory that nobody holds any more."""


class StandinGraph:
    """Captures tensors by address.

    Args:
        reads: name to contiguous tensor; what a kernel of the graph is given. Numbers are passed by value.
    """

    def __init__(self, reads: Mapping[str, torch.Tensor | float]) -> None:
        self._scalars = {name: value for name, value in reads.items() if not isinstance(value, torch.Tensor)}
        self._tensors: dict[str, tuple[int, int, torch.dtype, torch.Size, StorageWeakRef]] = {}
        for name, tensor in reads.items():
            if isinstance(tensor, torch.Tensor):
                assert tensor.is_contiguous()
                alive = StorageWeakRef(tensor.untyped_storage())
                self._tensors[name] = (tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.shape, alive)

    def replay(self) -> dict[str, torch.Tensor | float]:
        """What the kernels see now, as copies.

        Raises:
            ReadsFreedMemory: names what lies in memory that was given back.
        """
        freed = [name for name, captured in self._tensors.items() if captured[4].expired()]
        if freed:
            raise ReadsFreedMemory(", ".join(freed))
        out: dict[str, torch.Tensor | float] = dict(self._scalars)
        for name, (address, nbytes, dtype, shape, _) in self._tensors.items():
            raw = bytearray(ctypes.string_at(address, nbytes))
            out[name] = torch.frombuffer(raw, dtype=dtype).reshape(shape)
        return out

    def census(self) -> list[Read]:
        """The addresses that the kernels were given."""
        return [Read(address, nbytes, f"kernel_of_{name}") for name, (address, nbytes, *_) in self._tensors.items()]
