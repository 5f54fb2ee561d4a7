"""Digests and largest magnitudes of many runs of bytes on a CUDA device, and their copies elsewhere: one kernel, one read.

The sums are those of `digest`, bit for bit, reordered so that a word costs two multiplications:

    digest[h] = sum_c  t[h][c] * sum_b  m[h][b] * mix(w[b, c])

Words stand in rows of a block's length; a program takes some neighbouring columns `c` through
several rows `b` and multiplies by `t` once, at its end. Both coefficients are computed in registers,
as a table would be twice as many bytes to read as the words themselves. Integer sums and maxima
are the same in any order, so programs add theirs up atomically. A table, copied to the device, says which
run each program works on and where that lies: a bucket of a hundred tensors takes one launch, not a hundred.

For the maximum an element's bits are shifted to the top of a word, its sign out of it: what is left
below are neighbours, which decide only between equals and are shifted out at the end.

Imported on CUDA hosts only, for it needs Triton; `digest` is who calls it.

Not covered: runs of several element formats in one launch; each format takes one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

#: Words of a row that one program takes; a power of two.
_COLUMNS = 1024
_WARPS = 4
#: Programs per multiprocessor, as far as there are rows: several rounds, so that none stands idle for long at the end.
_PROGRAMS = 24
#: Numbers of a run in the table.
_FIELDS = 11

#: Bytes (shape [n], uint8, contiguous, n at least 1, at any address), the number of their first word within their tensor, which row
#: of sums is theirs, and where they are copied to (the like; None for nowhere).
Run = tuple[torch.Tensor, int, int, torch.Tensor | None]


@triton.jit
def _splitmix64(x: tl.tensor) -> tl.tensor:
    x = x.to(tl.uint64) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)) | 1


@triton.jit
def _padded(row: tl.tensor, places: tl.tensor, first: tl.tensor, stop: tl.tensor) -> tl.tensor:
    """Words from single bytes, zeros where the run has none; at any address."""
    words = tl.zeros_like(places).to(tl.uint64)
    for at in range(8):
        byte = places * 8 + at
        value = tl.load(row + byte, mask=(byte >= first * 8) & (byte < stop), other=0)
        words |= value.to(tl.uint64) << (8 * at)
    return words


@triton.jit
def _copied(there: tl.tensor, row: tl.tensor, places: tl.tensor, first: tl.tensor, stop: tl.tensor) -> None:
    """Copy byte by byte what `_padded` reads."""
    for at in range(8):
        byte = places * 8 + at
        inside = (byte >= first * 8) & (byte < stop)
        tl.store(there + byte, tl.load(row + byte, mask=inside, other=0), mask=inside)


@triton.jit
def _larger(top: tl.tensor, words: tl.tensor, BITS: tl.constexpr, SIGN: tl.constexpr) -> tl.tensor:
    """The maximum so far with that of these words, each at the top of its integer."""
    if BITS == 64:
        top = tl.maximum(top, words << SIGN)
    elif BITS:
        low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
        for lane in tl.static_range(32 // BITS):
            top = tl.maximum(top, tl.maximum(low << (32 - BITS * (lane + 1) + SIGN), high << (32 - BITS * (lane + 1) + SIGN)))
    return top


@triton.jit(do_not_specialize_on_alignment=["table", "runs", "out"])
def _digest_kernel(
    table: tl.tensor,
    runs: tl.tensor,
    out: tl.tensor,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr,
    BITS: tl.constexpr,
    SIGN: tl.constexpr,
    ALIGNED: tl.constexpr,
    COPIES: tl.constexpr,
) -> None:
    """Add runs to their rows of `out`: two sums and a maximum each; and copy them.

    A run's first word is word `column` of row 0, which is block `block`; it ends `stop` bytes into the last row. Its
    `p`-th program takes the columns of group `group + p % groups` in every `step`-th row from `p // groups` on.
    """
    run = table + tl.load(runs + tl.program_id(0)) * FIELDS
    program = tl.program_id(0) - tl.load(run + 1).to(tl.int32)
    sums = out + tl.load(run + 2) * 3
    column, block = tl.load(run + 3).to(tl.int32), tl.load(run + 4)
    rows, stop = tl.load(run + 5).to(tl.int32), tl.load(run + 6).to(tl.int32)
    group, groups, step = tl.load(run + 7).to(tl.int32), tl.load(run + 8).to(tl.int32), tl.load(run + 9).to(tl.int32)
    data = tl.load(run).to(tl.pointer_type(tl.uint8))
    into = tl.load(run + 10).to(tl.pointer_type(tl.uint8))
    start = (group + program % groups) * COLUMNS
    places = start + tl.arange(0, COLUMNS)
    low = tl.zeros([COLUMNS], dtype=tl.uint64)
    high = tl.zeros([COLUMNS], dtype=tl.uint64)
    top = tl.zeros([COLUMNS], dtype=tl.uint64 if BITS == 64 else tl.uint32)
    for row in range(program // groups, rows, step):
        first = tl.where(row == 0, column, 0)
        behind = tl.where(row == rows - 1, stop, BLOCK * 8)
        number = tl.full([], 0, tl.int64) + row  # 64 bits: a tensor may have more than 2**31 bytes
        begin, there = data + (number * BLOCK - column) * 8, into + (number * BLOCK - column) * 8
        if ALIGNED > 1 and ((start >= first) & ((start + COLUMNS) * 8 <= behind)):
            words = tl.load(tl.multiple_of(begin, ALIGNED).to(tl.pointer_type(tl.uint64)) + places)
            if COPIES:
                tl.store(tl.multiple_of(there, ALIGNED).to(tl.pointer_type(tl.uint64)) + places, words)
        else:
            words = _padded(begin, places, first, behind)
            if COPIES:
                _copied(there, begin, places, first, behind)
        top = _larger(top, words, BITS, SIGN)
        words ^= words >> 32
        low += words * _splitmix64(number + block + (1 << 40))
        high += words * _splitmix64(number + block + (1 << 40) + (1 << 36))
    at = places.to(tl.int64)
    tl.atomic_add(sums, tl.sum((low * _splitmix64(at)).to(tl.int64, bitcast=True)), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum((high * _splitmix64(at + (1 << 32))).to(tl.int64, bitcast=True)), sem="relaxed")
    if BITS:
        most = tl.max(top) >> ((64 if BITS == 64 else 32) - BITS + SIGN)
        tl.atomic_max(sums + 2, most.to(tl.int64), sem="relaxed")


def add(runs: Sequence[Run], block: int, out: torch.Tensor, bits: int, sign: int) -> None:
    """Start the kernel over runs of bytes; waits for nothing.

    Args:
        runs: at least one, all on the device of `out`; their bytes stay as they are until the kernel has run, and none is another's copy.
        block: words in a block.
        out: shape [rows, 3], dtype int64. A run's sums are added to the first two of its row; the third is raised to
            the largest magnitude's bits.
        bits: of an element; 0 when nobody asks for the maximum.
        sign: of these the upper ones that are no magnitude.
    """
    alike: dict[tuple[int, bool], list[list[int]]] = {}
    for data, first, row, into in runs:
        there = 0 if into is None else int(into.data_ptr())
        aligned, entry = _entry(int(data.data_ptr()), int(data.numel()), first, row, there, block)
        alike.setdefault((aligned, into is not None), []).append(entry)
    with torch.cuda.device_of(out):  # Triton launches on the current one
        for (aligned, copies), entries in alike.items():
            table, programs = _table(entries, _PROGRAMS * _multiprocessors(out.device))
            count = len(programs)
            numbers = torch.cat([programs, table.view(-1)]).to(out.device, non_blocking=True)
            _digest_kernel[(count,)](
                numbers[count:], numbers, out,
                BLOCK=block, COLUMNS=_COLUMNS, FIELDS=_FIELDS, BITS=bits, SIGN=sign, ALIGNED=aligned, COPIES=copies,
                num_warps=_WARPS,
            )  # fmt: skip


def _entry(address: int, nbytes: int, first: int, row: int, there: int, block: int) -> tuple[int, list[int]]:
    """A run's alignment, its copy's too, and its line of the table but for its programs: how many rows they share out between them."""
    number, column = divmod(first, block)
    end = column * 8 + nbytes  # from the first row's start
    rows = -(-end // (block * 8))
    stop = end - (rows - 1) * block * 8
    group = column // _COLUMNS if rows == 1 else 0
    groups = -(-(stop if rows == 1 else block * 8) // (_COLUMNS * 8)) - group
    aligned = next(size for size in (16, 8, 1) if (address - column * 8) % size == 0 and (not there or (there - column * 8) % size == 0))
    return aligned, [address, 0, row, column, number, rows, stop, group, groups, 0, there]


def _table(entries: list[list[int]], programs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Share about so many programs out among runs.

    Returns:
        The table, shape [runs, `_FIELDS`], and which run each program works on, shape [programs]; int64, on the host.
    """
    table = torch.tensor(entries, dtype=torch.int64)
    rows, groups = table[:, 5], table[:, 8]
    depth = -(-int((rows * groups).sum()) // programs)
    table[:, 9] = -(-rows // depth)
    of_each = groups * table[:, 9]
    table[:, 1] = of_each.cumsum(0) - of_each
    return table, torch.arange(len(entries)).repeat_interleave(of_each)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
