"""The memory that vLLM's sleep mode gives back: whether it is there, and its blocks, read and written raw.

Not covered: sleep-mode backends other than `cumem` (the engine's half refuses them).
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from vllm.device_allocator import cumem

from weightsync.storage.blocks import MemoryMap, Span

#: vLLM's name for what is allocated while the model is loaded; level 2 drops it, and keeps what is neither this nor the KV cache.
_DROPPED = "weights"


class SleepMemory:
    """vLLM's pool of this process. Without sleep mode, and on a CPU, it has nothing and is always awake."""

    @property
    def _allocations(self) -> list[Any]:
        pool = cumem.CuMemAllocator.instance
        return [] if pool is None else list(pool.pointer_to_data.values())

    def asleep(self) -> bool:
        return any(data.is_asleep for data in self._allocations)

    def weights_asleep(self) -> bool:
        return any(data.is_asleep for data in self._allocations if data.tag == _DROPPED)

    def blocks(self) -> list[Span]:
        gc.collect()  # what is garbage now goes with the sleep, and its memory with it
        dropped = [(data.handle[2], data.handle[2] + data.handle[1]) for data in self._allocations if data.tag == _DROPPED]
        if not dropped:
            return []
        torch.cuda.synchronize()
        spans = MemoryMap.from_snapshot(torch.cuda.memory_snapshot()).active()
        return [span for span in spans if any(start <= span.address < end for start, end in dropped)]

    def read(self, address: int, into: torch.Tensor) -> None:
        cumem.libcudart.cudaMemcpy(into.data_ptr(), address, into.nbytes)

    def write(self, address: int, data: torch.Tensor) -> None:
        cumem.libcudart.cudaMemcpy(address, data.data_ptr(), data.nbytes)
