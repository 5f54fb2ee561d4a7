"""vLLM's sleep levels in one worker: no update while asleep, and what a deep sleep would lose for good.

Level 1 gives the weights' memory back and keeps their bytes on the host; level 2 drops
them. The addresses stay, so a seal holds over both. What the next complete update
writes need not be kept. All else that lies in the weights' memory must be: buffers outside
the checkpoint, what kernels made once, constants that graphs read, adapters, a draft
model, frozen layers. `fall` copies it to the host, block by block of the allocator, whoever owns
it; `restore` brings it back and compares, when the worker wakes, and again before the next update is loaded.

Not covered: a sleep that nobody told this worker of: it is refused an update meanwhile, and is not known afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import torch

from weightsync.errors import Refused, VerdictNotOk
from weightsync.storage.blocks import Span
from weightsync.worker import staging

_HOST = torch.device("cpu")


class Memory(Protocol):
    """The memory that a sleep gives back (`vllm_compat.SleepMemory`)."""

    def asleep(self) -> bool:
        """Whether any of it is gone now."""

    def weights_asleep(self) -> bool:
        """Whether any is gone of the part that level 2 drops; it wakes before the KV cache."""

    def blocks(self) -> Iterable[Span]:
        """What is handed out in the part that level 2 drops."""

    def read(self, address: int, into: torch.Tensor) -> None:
        """Copy to the host, shape [bytes], uint8."""

    def write(self, address: int, data: torch.Tensor) -> None:
        """Copy from the host."""


class Sleep:
    """See the module.

    Args:
        memory: what sleeps.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._saved: dict[int, tuple[Span, torch.Tensor]] = {}
        self.deep = False  # at the level that drops weights, or about to

    def require_awake(self) -> None:
        """Refuse what needs the memory.

        Raises:
            Refused: it is asleep.
        """
        if self._memory.asleep():
            raise Refused("this engine is asleep: its memory was given back, so no update can be written", hint="Wake it first")

    def fall(self, level: int, rewritten: Collection[int]) -> dict[str, int]:
        """Get ready for a sleep that is about to come.

        Args:
            level: 1 or 2.
            rewritten: addresses of storages that the next complete update writes.

        Returns:
            What was put aside.

        Raises:
            MemoryRefused: the host has no room for it.
            Refused: it is asleep already.
        """
        self.require_awake()
        self.forget()
        if level < 2:
            return {}
        spans = [span for span in self._memory.blocks() if span.address not in rewritten]
        nbytes = sum(span.nbytes for span in spans)
        staging.require_room(nbytes, _HOST, "what a sleep of level 2 would lose takes", "")
        saved = {}
        for span in spans:
            copy = torch.empty(span.nbytes, dtype=torch.uint8)
            self._memory.read(span.address, copy)
            saved[span.address] = (span, copy)
        self._saved, self.deep = saved, True
        return {"constants": len(saved), "constant_bytes": nbytes}

    def restore(self) -> dict[str, int]:
        """Bring back what was put aside, and compare; nothing behind a light sleep.

        Raises:
            VerdictNotOk: it does not read back as it was written.
            Refused: still asleep.
        """
        if not self._saved:
            return {}
        if self._memory.weights_asleep():
            raise Refused("the memory of this engine's weights has not come back", hint="Wake it first")
        there = {span.address: span for span in self._memory.blocks()}
        wrong, count = [], 0
        for address, (span, copy) in self._saved.items():
            if there.get(address) != span:  # was garbage, and has been collected
                continue
            count += 1
            self._memory.write(address, copy)
            back = torch.empty_like(copy)
            self._memory.read(address, back)
            if not torch.equal(back, copy):
                wrong.append(f"{span.nbytes} bytes at {address:#x}")
        if wrong:
            raise VerdictNotOk(
                f"{len(wrong)} constant(s) did not come back after a sleep: {', '.join(wrong[:20])}", hint="Restart this engine"
            )
        return {"constants_restored": count}

    def forget(self) -> None:
        """An update was proved, or the sleep did not come: nothing is owed any more."""
        self._saved, self.deep = {}, False
