"""Many rectangles of bytes copied on one CUDA device by one launch.

A table, on the device, says which rectangle each program works on, where it lies and where it goes. Rows are cut into chunks;
a program copies every n-th chunk of its rectangle. Loads and stores are as wide as the addresses of a rectangle allow: those of
one width share a launch.

Imported on CUDA hosts only, for it needs Triton; `plan` is who calls it.

Not covered: bytes that overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from weightsync.storage.plan import Run

#: Words of a chunk; a power of two.
_CHUNK = 1024
_WARPS = 4
#: Programs per multiprocessor, as far as there are chunks.
_PROGRAMS = 24
_FIELDS = 9
#: Bytes of a word, and what addresses and strides are multiples of.
_WIDTHS = ((8, 16), (8, 8), (4, 4), (2, 2), (1, 1))


@triton.jit(do_not_specialize_on_alignment=["table", "programs", "data"])
def _copy_kernel(
    table: tl.tensor,
    programs: tl.tensor,
    data: tl.tensor,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """A program's first chunk is its number among those of its run, which are `step`; a row has `blocks` chunks and `width` words."""
    run = table + tl.load(programs + tl.program_id(0)) * FIELDS
    program = tl.program_id(0) - tl.load(run).to(tl.int32)
    step, chunks, blocks = tl.load(run + 1).to(tl.int32), tl.load(run + 2).to(tl.int32), tl.load(run + 3).to(tl.int32)
    width = tl.load(run + 4)
    source, there = data + tl.load(run + 5), tl.load(run + 7).to(tl.pointer_type(tl.uint8))
    source_stride, there_stride = tl.load(run + 6), tl.load(run + 8)
    within = tl.arange(0, CHUNK)
    for chunk in range(program, chunks, step):
        row = (chunk // blocks).to(tl.int64)
        first = (chunk % blocks).to(tl.int64) * CHUNK
        begin = tl.multiple_of(source + row * source_stride + first * WORD, ALIGNED)
        target = tl.multiple_of(there + row * there_stride + first * WORD, ALIGNED)
        if WORD == 8:
            taken, given = begin.to(tl.pointer_type(tl.uint64)) + within, target.to(tl.pointer_type(tl.uint64)) + within
        elif WORD == 4:
            taken, given = begin.to(tl.pointer_type(tl.uint32)) + within, target.to(tl.pointer_type(tl.uint32)) + within
        elif WORD == 2:
            taken, given = begin.to(tl.pointer_type(tl.uint16)) + within, target.to(tl.pointer_type(tl.uint16)) + within
        else:
            taken, given = begin + within, target + within
        if first + CHUNK <= width:
            tl.store(given, tl.load(taken))
        else:
            inside = within < width - first
            tl.store(given, tl.load(taken, mask=inside), mask=inside)


class Launch:
    """Copies out of streams whose tensors all lie as in the one before, or elsewhere: the table is made anew then.

    Args:
        copies: runs, with the memory that each is written into, shape [bytes], uint8.
    """

    def __init__(self, copies: Sequence[tuple[Run, torch.Tensor]]) -> None:
        self._device = copies[0][1].device
        self._runs = copies
        self._at: tuple[int, ...] = ()
        self._aligned_for = -1
        self._groups: list[tuple[int, int, int, torch.Tensor, torch.Tensor]] = []  # word, alignment, programs, whose they are, table

    def __call__(self, data: torch.Tensor, offsets: Sequence[int]) -> None:
        """See `Plan.execute`."""
        at, aligned = tuple(offsets), math.gcd(data.data_ptr(), 16)
        if (at, aligned) != (self._at, self._aligned_for):
            self._groups = self._tables(at, aligned)
            self._at, self._aligned_for = at, aligned
        with torch.cuda.device_of(data):  # Triton launches on the current one
            for word, alignment, count, programs, table in self._groups:
                _copy_kernel[(count,)](table, programs, data, WORD=word, ALIGNED=alignment, CHUNK=_CHUNK, FIELDS=_FIELDS, num_warps=_WARPS)

    def prepare(self, data: torch.Tensor, offsets: Sequence[int]) -> None:
        """Compile what such a stream takes, by launches over a run of no rows."""
        for word, alignment in {(word, alignment) for word, alignment, *_ in self._tables(tuple(offsets), math.gcd(data.data_ptr(), 16))}:
            compile_for(data.device, word, alignment)

    def _tables(self, offsets: tuple[int, ...], aligned: int) -> list[tuple[int, int, int, torch.Tensor, torch.Tensor]]:
        groups: dict[tuple[int, int], list[list[int]]] = {}
        for run, into in self._runs:
            source, there = offsets[run.tensor] + run.source, into.data_ptr() + run.into
            strides = (run.source_stride, run.into_stride) if run.rows > 1 else ()
            common = math.gcd(aligned, source, there, *strides)
            word, alignment = next(pair for pair in _WIDTHS if common % pair[1] == 0 and run.width % pair[0] == 0)
            blocks = -(-run.width // (word * _CHUNK))
            entry = [0, 0, run.rows * blocks, blocks, run.width // word, source, run.source_stride, there, run.into_stride]
            groups.setdefault((word, alignment), []).append(entry)
        return [(word, alignment, *self._table(entries)) for (word, alignment), entries in groups.items()]

    def _table(self, entries: list[list[int]]) -> tuple[int, torch.Tensor, torch.Tensor]:
        """How many programs there are, which run each works on, and the table with its share of them; int64, on the device."""
        table = torch.tensor(entries, dtype=torch.int64)
        chunks = table[:, 2]
        depth = -(-int(chunks.sum()) // (_PROGRAMS * _multiprocessors(self._device)))
        table[:, 1] = -(-chunks // depth)
        table[:, 0] = table[:, 1].cumsum(0) - table[:, 1]
        programs = torch.arange(len(entries)).repeat_interleave(table[:, 1])
        return len(programs), programs.to(self._device), table.view(-1).to(self._device)


def compile_for(device: torch.device, word: int = 8, alignment: int = 16) -> None:
    """Have the kernel ready for one width."""
    idle = torch.zeros(_FIELDS + 1, dtype=torch.int64, device=device)
    idle[3] = 1  # chunks in a row, of which there is none
    with torch.cuda.device_of(idle):
        _copy_kernel[(1,)](
            idle, idle[_FIELDS:], idle.view(torch.uint8), WORD=word, ALIGNED=alignment, CHUNK=_CHUNK, FIELDS=_FIELDS, num_warps=_WARPS
        )


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
