"""A digest of 128 bits per tensor, in one read of its bytes.

The bytes are read as little-endian 64-bit words `w[k]` (the tail padded with
zeros). Each word is mixed within itself, multiplied by a coefficient that
depends on its position, and summed modulo 2**64, twice with independent
coefficients:

    digest[h] = sum_k  m[h][k // BLOCK] * t[h][k % BLOCK] * mix(w[k])

So the digest changes when two elements, rows, shards or tensors change places
(the coefficients differ), and digests of slices of one tensor add up to the
digest of the whole, which is what buckets and shards need. Against accident,
not against an adversary: the coefficients are public.

Whoever else wants to see the words (`finite.Peak`) is shown each run of them while it
lies in the cache, so that both take one read of the memory.

Not covered: a fused GPU kernel; on CUDA tensors the same sums run as ordinary torch
operations, over many blocks at once and waiting for the device once per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

#: Words per coefficient block. 512 KiB of words stay in a core's own cache.
BLOCK = 1 << 16
#: Blocks that a CUDA device takes at once: 32 MiB, for there a launch costs more than memory.
_CUDA_BLOCKS = 64
_MASK64 = (1 << 64) - 1

Digest = tuple[int, int]
ZERO: Digest = (0, 0)

#: Is shown each run of words (shape [n], int64), with a tensor of the same shape that it may overwrite.
Watcher = Callable[[torch.Tensor, torch.Tensor], None]


def digest_bytes(data: torch.Tensor, offset: int = 0, watcher: Watcher | None = None) -> Digest:
    """Digest of a run of bytes that begins `offset` bytes into its tensor.

    Args:
        data: shape [n], dtype uint8, contiguous, any device.
        offset: bytes; a multiple of 8.
        watcher: is shown every word once, the last one filled up with zeros.

    Returns:
        Two unsigned 64-bit integers. `add` joins the digests of slices.

    Raises:
        ValueError: wrong dtype or shape, or an offset that splits a word.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"want contiguous uint8 of one dimension, got {data.dtype} {tuple(data.shape)}")
    if offset % 8:
        raise ValueError(f"offset {offset} splits an 8-byte word")
    total = ZERO
    whole = data.numel() // 8 * 8
    if whole:
        body = data[:whole]
        # A view as int64 needs an aligned start; a slice of somebody's storage may lack it.
        words = body.view(torch.int64) if body.data_ptr() % 8 == 0 and body.storage_offset() % 8 == 0 else body.clone().view(torch.int64)
        total = _digest_words(words, offset // 8, watcher)
    if whole < data.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - whole] = data[whole:]
        total = add(total, _digest_words(tail.view(torch.int64), (offset + whole) // 8, watcher))
    return total


def digest_tensor(tensor: torch.Tensor, watcher: Watcher | None = None) -> Digest:
    """Digest of a whole tensor of any dtype and layout (its elements in row-major order)."""
    return digest_bytes(as_bytes(tensor), 0, watcher)


def add(left: Digest, right: Digest) -> Digest:
    """Digest of a tensor from the digests of two disjoint parts of it."""
    return ((left[0] + right[0]) & _MASK64, (left[1] + right[1]) & _MASK64)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as bytes, shape [nbytes]; a view when the tensor is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element counts as contiguous with any stride
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def pack(digests: list[Digest]) -> torch.Tensor:
    """Digests as a tensor that can be broadcast, shape [n, 2], int64."""
    return torch.tensor([[_signed(half) for half in digest] for digest in digests], dtype=torch.int64).reshape(-1, 2)


def unpack(packed: torch.Tensor) -> list[Digest]:
    """The reverse of `pack`."""
    return [(int(a) & _MASK64, int(b) & _MASK64) for a, b in packed.tolist()]


def to_hex(digest: Digest) -> str:
    """32 hexadecimal digits, for messages."""
    return f"{digest[0]:016x}{digest[1]:016x}"


def _digest_words(words: torch.Tensor, first: int, watcher: Watcher | None) -> Digest:
    table = _table(str(words.device))
    sums = _Dots() if words.device.type == "cpu" else _Products(words.device)
    at = 0
    scratch = torch.empty(min(BLOCK * sums.blocks, words.numel()), dtype=torch.int64, device=words.device)
    while at < words.numel():
        block, column = divmod(first + at, BLOCK)
        left = words.numel() - at
        width = min(BLOCK - column, left)  # of one block; a whole one may be the first of several
        blocks = min(sums.blocks, left // BLOCK) if width == BLOCK else 1
        run = words[at : at + blocks * width]
        mixed = scratch[: run.numel()]
        if watcher is not None:
            watcher(run, mixed)
        # The upper half folded into the lower one: else a change in the top bits alone
        # meets an even difference of coefficients and can vanish modulo 2**64.
        torch.bitwise_right_shift(run, 32, out=mixed)
        mixed.bitwise_and_(0xFFFFFFFF).bitwise_xor_(run)
        sums.add(mixed.view(blocks, width), table[:, column : column + width], block)
        at += run.numel()
    return sums.total


class _Dots:
    """The sums on a CPU, block by block."""

    blocks = 1

    def __init__(self) -> None:
        self.total = ZERO

    def add(self, mixed: torch.Tensor, table: torch.Tensor, block: int) -> None:
        """Add `mixed`, shape [1, n], words of this block; `table` has their coefficients, shape [2, n]."""
        # `dot` is one pass, and wraps modulo 2**64.
        low, high = (int(torch.dot(mixed[0], row)) * _block_factor(block, half) for half, row in enumerate(table))
        self.total = add(self.total, (low & _MASK64, high & _MASK64))


class _Products:
    """The same sums on a device that has no integer `dot`: many blocks at once, and nothing waits before `total` is asked for."""

    blocks = _CUDA_BLOCKS

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, mixed: torch.Tensor, table: torch.Tensor, block: int) -> None:
        """Add `mixed`, shape [blocks, n], words of this block and those behind it."""
        factors = _block_factors(block, len(mixed), str(mixed.device))
        for half, row in enumerate(table):
            self._sums[half] += ((mixed * row).sum(1) * factors[half]).sum()

    @property
    def total(self) -> Digest:
        low, high = self._sums.tolist()
        return (low & _MASK64, high & _MASK64)


@functools.cache
def _table(device: str) -> torch.Tensor:
    """Coefficients, shape [2, BLOCK], int64: splitmix64 of the position, made odd."""
    rows = [[_signed(_splitmix64((half << 32) + k) | 1) for k in range(BLOCK)] for half in range(2)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=1 << 12)
def _block_factors(block: int, count: int, device: str) -> torch.Tensor:
    """Factors of this block and those behind it, shape [2, count], int64."""
    rows = [[_signed(_block_factor(block + k, half)) for k in range(count)] for half in range(2)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=1 << 16)
def _block_factor(block: int, half: int) -> int:
    return _splitmix64((1 << 40) + (half << 36) + block) | 1


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
