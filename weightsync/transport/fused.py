"""The digest and the largest magnitude of a run of bytes on a CUDA device: one kernel, one read.

The sums are those of `digest`, bit for bit, reordered so that a word costs two multiplications:

    digest[h] = sum_c  t[h][c] * sum_b  m[h][b] * mix(w[b, c])

Words stand in rows of a block's length; a program takes some neighbouring columns `c` through
several rows `b` and multiplies by `t` once, at its end. Both coefficients are computed in registers,
as a table would be twice as many bytes to read as the words themselves. Integer sums and maxima
are the same in any order, so programs add theirs up atomically.

For the maximum an element's bits are shifted to the top of a word, its sign out of it: what is left
below are neighbours, which decide only between equals and are shifted out at the end.

Imported on CUDA hosts only, for it needs Triton; `digest` is who calls it.

Not covered: many small tensors in one launch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

#: Words of a row that one program takes; a power of two.
_COLUMNS = 1024
_WARPS = 4
#: Programs per multiprocessor, as far as there are rows: several rounds, so that none stands idle for long at the end.
_PROGRAMS = 24


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
def _larger(top: tl.tensor, words: tl.tensor, BITS: tl.constexpr, SIGN: tl.constexpr) -> tl.tensor:
    """The maximum so far with that of these words, each at the top of its integer."""
    if BITS == 64:
        top = tl.maximum(top, words << SIGN)
    elif BITS:
        low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
        for lane in tl.static_range(32 // BITS):
            top = tl.maximum(top, tl.maximum(low << (32 - BITS * (lane + 1) + SIGN), high << (32 - BITS * (lane + 1) + SIGN)))
    return top


# Lengths and places differ from tensor to tensor: with a variant for every kind of number, updates would wait for the compiler.
@triton.jit(
    do_not_specialize=["column", "block", "rows", "stop", "group", "groups", "step"],
    do_not_specialize_on_alignment=["data", "out"],
)
def _digest_kernel(
    data: tl.tensor,
    out: tl.tensor,
    column: tl.tensor,
    block: tl.tensor,
    rows: tl.tensor,
    stop: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    step: tl.tensor,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    SIGN: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Add one run to `out`: two sums and a maximum.

    Its first word is word `column` of row 0, which is block `block`; it ends `stop` bytes into the last row. Program
    `p` takes the columns of group `group + p % groups` in every `step`-th row from `p // groups` on.
    """
    program = tl.program_id(0)
    start = (group + program % groups) * COLUMNS
    places = start + tl.arange(0, COLUMNS)
    low = tl.zeros([COLUMNS], dtype=tl.uint64)
    high = tl.zeros([COLUMNS], dtype=tl.uint64)
    top = tl.zeros([COLUMNS], dtype=tl.uint64 if BITS == 64 else tl.uint32)
    for row in range(program // groups, rows, step):
        first = tl.where(row == 0, column, 0)
        behind = tl.where(row == rows - 1, stop, BLOCK * 8)
        number = tl.full([], 0, tl.int64) + row  # 64 bits: a tensor may have more than 2**31 bytes
        begin = data + (number * BLOCK - column) * 8
        if ALIGNED > 1 and ((start >= first) & ((start + COLUMNS) * 8 <= behind)):
            words = tl.load(tl.multiple_of(begin, ALIGNED).to(tl.pointer_type(tl.uint64)) + places)
        else:
            words = _padded(begin, places, first, behind)
        top = _larger(top, words, BITS, SIGN)
        words ^= words >> 32
        low += words * _splitmix64(number + block + (1 << 40))
        high += words * _splitmix64(number + block + (1 << 40) + (1 << 36))
    at = places.to(tl.int64)
    tl.atomic_add(out, tl.sum((low * _splitmix64(at)).to(tl.int64, bitcast=True)), sem="relaxed")
    tl.atomic_add(out + 1, tl.sum((high * _splitmix64(at + (1 << 32))).to(tl.int64, bitcast=True)), sem="relaxed")
    if BITS:
        most = tl.max(top) >> ((64 if BITS == 64 else 32) - BITS + SIGN)
        tl.atomic_max(out + 2, most.to(tl.int64), sem="relaxed")


def add(data: torch.Tensor, first: int, block: int, out: torch.Tensor, bits: int, sign: int) -> None:
    """Start the kernel over a run of bytes; waits for nothing.

    Args:
        data: shape [n], dtype uint8, contiguous, n at least 1; at any address.
        first: number of its first word within its tensor.
        block: words in a block.
        out: shape [3], dtype int64, on the same device. The sums are added to the first two; the third is raised to
            the largest magnitude's bits.
        bits: of an element; 0 when nobody asks for the maximum.
        sign: of these the upper ones that are no magnitude.
    """
    number, column = divmod(first, block)
    end = column * 8 + data.numel()  # bytes, from the first row's start
    rows = -(-end // (block * 8))
    stop = end - (rows - 1) * block * 8
    group = column // _COLUMNS if rows == 1 else 0
    groups = -(-(stop if rows == 1 else block * 8) // (_COLUMNS * 8)) - group
    depth = -(-rows * groups // (_PROGRAMS * _multiprocessors(data.device)))
    step = -(-rows // depth)
    aligned = next(size for size in (16, 8, 1) if (data.data_ptr() - column * 8) % size == 0)
    with torch.cuda.device_of(data):  # Triton launches on the current one
        _digest_kernel[(groups * step,)](
            data, out, column, number, rows, stop, group, groups, step,
            BLOCK=block, COLUMNS=_COLUMNS, BITS=bits, SIGN=sign, ALIGNED=aligned, num_warps=_WARPS,
        )  # fmt: skip


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
