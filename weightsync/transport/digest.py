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

Not covered: finiteness of the values, and a fused GPU kernel; on CUDA tensors
the same sums run as ordinary torch operations.
"""

from __future__ import annotations

import functools

import torch

#: Words per coefficient block. 512 KiB of words stay in a core's own cache.
BLOCK = 1 << 16
_MASK64 = (1 << 64) - 1

Digest = tuple[int, int]
ZERO: Digest = (0, 0)


def digest_bytes(data: torch.Tensor, offset: int = 0) -> Digest:
    """Digest of a run of bytes that begins `offset` bytes into its tensor.

    Args:
        data: shape [n], dtype uint8, contiguous, any device.
        offset: bytes; a multiple of 8.

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
        total = _digest_words(words, offset // 8)
    if whole < data.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - whole] = data[whole:]
        total = add(total, _digest_words(tail.view(torch.int64), (offset + whole) // 8))
    return total


def digest_tensor(tensor: torch.Tensor) -> Digest:
    """Digest of a whole tensor of any dtype and layout (its elements in row-major order)."""
    return digest_bytes(as_bytes(tensor))


def add(left: Digest, right: Digest) -> Digest:
    """Digest of a tensor from the digests of two disjoint parts of it."""
    return ((left[0] + right[0]) & _MASK64, (left[1] + right[1]) & _MASK64)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as bytes, shape [nbytes]; a view when the tensor is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
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


def _digest_words(words: torch.Tensor, first: int) -> Digest:
    table = _table(str(words.device))
    low = high = 0
    at = 0
    scratch = torch.empty(min(BLOCK, words.numel()), dtype=torch.int64, device=words.device)
    while at < words.numel():
        block, column = divmod(first + at, BLOCK)
        run = words[at : at + BLOCK - column]
        mixed = scratch[: run.numel()]
        # The upper half folded into the lower one: else a change in the top bits alone
        # meets an even difference of coefficients and can vanish modulo 2**64.
        torch.bitwise_right_shift(run, 32, out=mixed)
        mixed.bitwise_and_(0xFFFFFFFF).bitwise_xor_(run)
        low += _dot(mixed, table[0][column : column + run.numel()]) * _block_factor(block, 0)
        high += _dot(mixed, table[1][column : column + run.numel()]) * _block_factor(block, 1)
        at += run.numel()
    return (low & _MASK64, high & _MASK64)


def _dot(left: torch.Tensor, right: torch.Tensor) -> int:
    if left.device.type == "cpu":
        return int(torch.dot(left, right))  # one pass; wraps modulo 2**64
    return int((left * right).sum())  # CUDA has no integer dot


@functools.cache
def _table(device: str) -> torch.Tensor:
    """Coefficients, shape [2, BLOCK], int64: splitmix64 of the position, made odd."""
    rows = [[_signed(_splitmix64((half << 32) + k) | 1) for k in range(BLOCK)] for half in range(2)]
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
