"""Digests and largest magnitudes of runs of bytes on a CPU, and their copies elsewhere: one compiled loop, one read.

The sums are those of `digest`, bit for bit. torch has no operation for them, so that they take six passes there, and one more for a
copy; here a piece is copied, added up and looked at while it lies in a core's first cache. The loop runs in the thread that asks,
without Python's lock.

For the maximum an element's bits are shifted to the top of a word, as `fused` does it.

Imported where Numba is, which vLLM brings; `digest` is who calls it.

Not covered: several cores for one run. Those beside this one send, receive and compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

#: Words that are copied, added up and looked at together: 16 KiB.
_PIECE = 2048


def _compiled(function: Any) -> Any:
    """Compiled at the first call, and kept on disk for the next process where there is a place for that."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither this folder nor the user's can be written to
        return njit(nogil=True)(function)


@_compiled
def _splitmix64(x: Any) -> Any:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@_compiled
def _run(words: Any, into: Any, copies: bool, first: int, table: Any, bits: int, mask: Any) -> Any:
    """Two sums, and the largest magnitude at the top of a word; `into` is `words` where nothing is copied."""
    size, block = words.size, table.shape[1]
    low, high, top = np.uint64(0), np.uint64(0), np.uint64(0)
    at = 0
    while at < size:
        number, column = (first + at) // block, (first + at) % block
        width = min(_PIECE, block - column, size - at)
        # Slices, whose indices need no check of their sign: else it is no loop of vectors.
        piece, low_table, high_table = into[at : at + width], table[0, column : column + width], table[1, column : column + width]
        if copies:
            piece[:] = words[at : at + width]
        one, other = np.uint64(0), np.uint64(0)
        for k in range(width):
            mixed = piece[k] ^ (piece[k] >> np.uint64(32))
            one += mixed * low_table[k]
            other += mixed * high_table[k]
        low += one * _splitmix64(np.uint64(number + (1 << 40)))
        high += other * _splitmix64(np.uint64(number + (1 << 40) + (1 << 36)))
        if bits:
            for shift in range(0, 64, bits):
                for k in range(width):
                    top = max(top, (piece[k] & mask) << np.uint64(shift))
        at += width
    return low, high, top


def add(words: torch.Tensor, into: torch.Tensor | None, first: int, table: torch.Tensor, bits: int, mask: int, sums: torch.Tensor) -> None:
    """Add one run to its row, and copy it.

    Args:
        words: shape [n], int64.
        into: the like, none of it in `words`; None for no copy.
        first: number of the first word within its tensor.
        table: coefficients within a block, shape [2, words of a block], int64.
        bits: of an element; 0 when nobody asks for the maximum.
        mask: a word's bits that are magnitudes, as a signed number.
        sums: shape [3], int64. The run's sums are added to the first two; the third is raised to the largest magnitude's bits.
    """
    read = words.numpy().view(np.uint64)
    copy = read if into is None else into.numpy().view(np.uint64)
    unsigned = np.uint64(mask & 0xFFFF_FFFF_FFFF_FFFF)
    low, high, top = _run(read, copy, into is not None, first, table.numpy().view(np.uint64), bits, unsigned)
    row = sums.numpy().view(np.uint64)
    row[:2] += np.array([low, high], np.uint64)
    if bits:
        row[2] = max(int(row[2]), int(top) >> (64 - bits))
