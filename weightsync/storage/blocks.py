"""The allocator's blocks: where each lies, whether it was there when loading ended, and what asked for it.

Memory that a graph reads and nobody owns may hold something made from weights, or be
a workspace of a library. What tells the two apart is when it was handed out: before
the model's loading had ended, or after it, by the engine's own runs, which make
nothing from weights. `Loaded` remembers the blocks of that moment.

Not covered: a block that was freed after loading and handed out again with the same
address, the same size, asked for to the byte and in the same pool. Only a history that
torch recorded meanwhile tells it from one that was kept; without it, it counts as kept.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

#: Frames of an allocation that are worth showing.
MAX_FRAMES = 4
_TORCH = os.path.dirname(torch.__file__) + os.sep


class Age(StrEnum):
    """When a block was handed out."""

    LOADED = "loaded"  # before loading had ended: may hold what was made from weights
    LATER = "later"  # after it
    UNKNOWN = "unknown"  # nobody noted when loading ended, or the block is free now


@dataclass(frozen=True)
class Span:
    """One block of the allocator. `frames` are torch's own dictionaries, there only while it records a history."""

    address: int
    nbytes: int
    requested_bytes: int
    pool_id: tuple[int, int]
    device: int
    active: bool
    frames: tuple[Mapping[str, Any], ...] = field(default=(), compare=False, repr=False)


class MemoryMap:
    """The allocator's blocks by address.

    Attributes:
        overlaps: blocks that begin inside the one before, which the allocator never makes.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.address)
        self._starts = [span.address for span in self._spans]
        pairs = zip(self._spans, self._spans[1:], strict=False)
        self.overlaps = sum(one.address + one.nbytes > other.address for one, other in pairs)

    @staticmethod
    def from_snapshot(segments: Sequence[Mapping[str, Any]]) -> MemoryMap:
        """From `torch.cuda.memory_snapshot()`; a torch that gives blocks no address lays them end to end."""
        spans = []
        for segment in segments:
            address = int(segment["address"])
            first, second = segment.get("segment_pool_id", (0, 0))
            pool, device = (int(first), int(second)), int(segment.get("device", -1))
            for block in segment["blocks"]:
                address, nbytes = int(block.get("address", address)), int(block["size"])
                requested, active = int(block.get("requested_size", nbytes)), block["state"] != "inactive"
                spans.append(Span(address, nbytes, requested, pool, device, active, tuple(block.get("frames") or ())))
                address += nbytes
        return MemoryMap(spans)

    def find(self, address: int) -> Span | None:
        """The block in which `address` lies; one past its end belongs to the next."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        span = self._spans[at]
        return span if address < span.address + span.nbytes else None

    def active(self) -> list[Span]:
        """The blocks that are handed out."""
        return [span for span in self._spans if span.active]


class Loaded:
    """What was handed out when loading had ended.

    Args:
        memory: the blocks of that moment.
        unix_us: that moment, microseconds, on the clock of the allocator's history.
    """

    def __init__(self, memory: MemoryMap, unix_us: int) -> None:
        # Compared as a whole: a block that lives keeps its size, what was asked for, and its pool.
        self._blocks = {span.address: span for span in memory.active()}
        self.unix_us = unix_us

    def age(self, span: Span, handed_out: Mapping[int, int]) -> Age:
        """When a block was handed out.

        Args:
            span: the block as it is now.
            handed_out: address to the last time, in microseconds, at which torch's history saw it handed out.
        """
        if not span.active:
            return Age.UNKNOWN
        if self._blocks.get(span.address) != span or handed_out.get(span.address, 0) > self.unix_us:
            return Age.LATER
        return Age.LOADED


def last_handed_out(traces: Iterable[Iterable[Mapping[str, Any]]]) -> dict[int, int]:
    """Address to the last time at which it was handed out, from `device_traces` of torch's snapshot."""
    out: dict[int, int] = {}
    for trace in traces:
        for entry in trace:
            if entry.get("action") == "alloc" and "time_us" in entry:
                address = int(entry["addr"])
                out[address] = max(out.get(address, 0), int(entry["time_us"]))
    return out


def where(frames: Iterable[Mapping[str, Any]]) -> str:
    """What asked for a block: Python's frames, innermost first, those outside of torch before torch's own."""
    ours: list[str] = []
    torchs: list[str] = []
    for frame in frames:
        name = str(frame.get("filename", ""))
        if name.endswith(".py"):
            line = f"{name.rpartition('site-packages/')[2]}:{frame.get('line', 0)} {frame.get('name', '')}".rstrip()
            (torchs if name.startswith(_TORCH) else ours).append(line)
    return " < ".join((ours + torchs)[:MAX_FRAMES])
