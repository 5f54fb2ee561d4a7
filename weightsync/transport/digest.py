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

Who looks at the values (`finite.Peak`) is shown each run of words while it lies in the
cache, so that both take one read of the memory. On a CUDA device one kernel does both, and copies the bytes where
they are to go (`fused`), and so does a compiled loop on a CPU (`compiled`); where these can't run, the same sums run as torch operations.

Not covered: tensors of one batch on several devices.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable

import torch

from weightsync.transport.finite import Peak, watched

logger = logging.getLogger(__name__)

#: Words per coefficient block. 512 KiB of words stay in a core's own cache.
BLOCK = 1 << 16
#: Bytes of a run that has the compiled loop made, for which Numba has to be imported and to compile: a second or two. Then all take it.
_COMPILED_BYTES = 1 << 20
#: Blocks that torch operations on a CUDA device take at once: 32 MiB, for there a launch costs more than memory.
_CUDA_BLOCKS = 64
_MASK64 = (1 << 64) - 1

Digest = tuple[int, int]
ZERO: Digest = (0, 0)


class Batch:
    """Digests of several runs of bytes on one device, with one wait for all of them.

    On a CUDA device `add` only notes what is to be done, and `start` asks the device for all of it at once, on the current stream:
    the bytes have to stay as they are until `results`.

    Args:
        count: how many runs will be added, at most.
        device: where their bytes lie.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._sums = torch.zeros((count, 3), dtype=torch.int64, device=device)  # two, and the largest magnitude's bits
        self._peaks: list[Peak | None] = []
        self._noted: list[_Run] = []

    def add(self, data: torch.Tensor, offset: int = 0, peak: Peak | None = None, into: torch.Tensor | None = None) -> None:
        """Add a run of bytes that begins `offset` bytes into its tensor.

        Args:
            data: shape [n], dtype uint8, contiguous, at any address.
            offset: bytes; a multiple of 8.
            peak: looks at the values in the same read.
            into: the like, where the bytes are copied to in the same read. With it the bytes may lie on another device, from where
                they are copied at once.

        Raises:
            ValueError: wrong dtype, shape or device, or an offset that splits a word.
        """
        if into is not None and (into.dtype, into.shape, into.is_contiguous()) != (data.dtype, data.shape, True):
            raise ValueError(f"copies of {tuple(data.shape)} bytes go into the like, got {into.dtype} {tuple(into.shape)}")
        if into is not None and data.device != into.device:
            data, into = into.copy_(data), None
        if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
            raise ValueError(f"want contiguous uint8 of one dimension, got {data.dtype} {tuple(data.shape)}")
        if data.device != self._sums.device:
            raise ValueError(f"this batch is on {self._sums.device}, the bytes are on {data.device}")
        if offset % 8:
            raise ValueError(f"offset {offset} splits an 8-byte word")
        if data.numel():
            self._noted.append((data, offset // 8, len(self._peaks), peak, into))
        self._peaks.append(peak)
        if data.device.type == "cpu":  # while the bytes may be in its cache
            self.start()

    def start(self) -> None:
        """Begin with what was added so far; waits for nothing."""
        noted, self._noted = self._noted, []
        if noted:
            _adder(self._sums.device)(noted, self._sums)

    def results(self) -> list[Digest]:
        """The digests in the order of `add`; every peak knows its answer then. Waits for the device, once."""
        self.start()
        rows = self._sums[: len(self._peaks)].tolist()
        for (_, _, top), peak in zip(rows, self._peaks, strict=True):
            if peak is not None:
                peak.saw(top)
        return [(low & _MASK64, high & _MASK64) for low, high, _ in rows]


def prepare(device: torch.device, dtypes: Iterable[str]) -> None:
    """Have a device get ready for tensors of these dtypes: on CUDA the first of each has to wait for a compiler."""
    for dtype in sorted(set(dtypes)):
        digest_bytes(torch.zeros(8, dtype=torch.uint8, device=device), 0, Peak(dtype) if watched(dtype) else None)


def digest_bytes(data: torch.Tensor, offset: int = 0, peak: Peak | None = None) -> Digest:
    """Digest of one run of bytes; see `Batch.add`.

    Returns:
        Two unsigned 64-bit integers. `add` joins the digests of slices.
    """
    batch = Batch(1, data.device)
    batch.add(data, offset, peak)
    return batch.results()[0]


def digest_tensor(tensor: torch.Tensor, peak: Peak | None = None) -> Digest:
    """Digest of a whole tensor of any dtype and layout (its elements in row-major order)."""
    return digest_bytes(as_bytes(tensor), 0, peak)


def add(left: Digest, right: Digest) -> Digest:
    """Digest of a tensor from the digests of two disjoint parts of it."""
    return ((left[0] + right[0]) & _MASK64, (left[1] + right[1]) & _MASK64)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as bytes, shape [nbytes]; a view when the tensor is contiguous."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = (tensor.detach() if tensor.requires_grad else tensor).resolve_neg().contiguous().view(-1)
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # a single element counts as contiguous with any stride
    return flat.view(torch.uint8)


def pack(digests: list[Digest]) -> torch.Tensor:
    """Digests as a tensor that can be broadcast, shape [n, 2], int64."""
    return torch.tensor([[_signed(half) for half in digest] for digest in digests], dtype=torch.int64).reshape(-1, 2)


def unpack(packed: torch.Tensor) -> list[Digest]:
    """The reverse of `pack`."""
    return [(int(a) & _MASK64, int(b) & _MASK64) for a, b in packed.tolist()]


def to_hex(digest: Digest) -> str:
    """32 hexadecimal digits, for messages."""
    return f"{digest[0]:016x}{digest[1]:016x}"


#: Bytes, the number of their first word, which row of sums is theirs, who looks at them, and where they are copied to.
_Run = tuple[torch.Tensor, int, int, Peak | None, torch.Tensor | None]
#: Adds runs to their rows of sums, shape [rows, 3], and copies them.
_Adder = Callable[[list[_Run], torch.Tensor], None]
#: Adds mixed words, shape [blocks, n], to `sums`; `table` has their coefficients, shape [2, n], and `block` is the first one's number.
_Terms = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]


@functools.cache
def _adder(device: torch.device) -> _Adder:
    """How runs are added up on a device."""
    if device.type == "cpu":
        return _on_cpu
    try:
        _prove_kernel(device)
    except Exception as exc:  # no Triton, none for this device, no C compiler for it: whatever it is, there is another way
        logger.warning(
            "digests on %s run as torch operations, several times slower than one kernel: %s: %s", device, type(exc).__name__, exc
        )
        return functools.partial(_by_operations, _products, _CUDA_BLOCKS)
    return _by_kernel


def _prove_kernel(device: torch.device) -> None:
    """See that sums and copies are those of a CPU: of few bytes, and of some that are read and written by vectors of either width."""
    samples = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in (77, 20_000, 20_003)]
    firsts, copies = (5, 5, 0), [torch.zeros_like(sample, device=device) for sample in samples]
    sums = torch.zeros((len(samples), 3), dtype=torch.int64, device=device)
    runs = zip(samples, firsts, copies, strict=True)
    _by_kernel([(sample.to(device), first, row, Peak("bfloat16"), copy) for row, (sample, first, copy) in enumerate(runs)], sums)
    if unpack(sums[:, :2]) != [digest_bytes(sample, first * 8) for sample, first in zip(samples, firsts, strict=True)]:
        raise ArithmeticError("its sums are not those of a CPU")
    if not all(torch.equal(copy.cpu(), sample) for copy, sample in zip(copies, samples, strict=True)):
        raise ArithmeticError("its copies are not what was read")


def _by_kernel(runs: list[_Run], sums: torch.Tensor) -> None:
    from weightsync.transport import fused  # needs Triton

    formats: dict[tuple[int, int], list[fused.Run]] = {}
    for data, first, row, peak, into in runs:
        formats.setdefault((0, 0) if peak is None else (peak.bits, peak.sign_bits), []).append((data, first, row, into))
    for (bits, sign), alike in formats.items():
        fused.add(alike, BLOCK, sums, bits, sign)


def _on_cpu(runs: list[_Run], sums: torch.Tensor) -> None:
    for run in runs:
        worth_it = run[0].numel() >= _COMPILED_BYTES or _loop_runs.cache_info().currsize  # it is there already
        if worth_it and _aligned(run[0]) and (run[4] is None or _aligned(run[4])) and _loop_runs():
            _by_loop(run, sums)
        else:
            _by_operations(_dots, 1, [run], sums)


@functools.cache
def _loop_runs() -> bool:
    """Whether there is a compiled loop whose sums, maximum and copies are those of torch operations, here over the border of two blocks."""
    sample = torch.arange(20_003, dtype=torch.int64).to(torch.uint8) & 0xBF  # so that the largest magnitude is not the largest there is
    sums, copies, peak = torch.zeros((2, 3), dtype=torch.int64), [torch.zeros_like(sample) for _ in range(2)], Peak("bfloat16")
    runs: list[_Run] = [(sample, BLOCK - 100, row, peak, copies[row]) for row in range(2)]
    _by_operations(_dots, 1, runs[:1], sums)
    try:
        _by_loop(runs[1], sums)
    except ImportError:
        logger.info("digests on the CPU run as torch operations, at a third of the speed: Numba is not installed")
        return False
    except Exception as exc:  # a compiler that fails, whatever the reason: there is another way
        logger.warning("digests on the CPU run as torch operations, at a third of the speed: %s: %s", type(exc).__name__, exc)
        return False
    sums[0, 2] = peak.top  # which the loop does not call
    right = torch.equal(*sums) and torch.equal(*copies)
    if not right:
        logger.warning("digests on the CPU run as torch operations, at a third of the speed: the compiled loop finds something else")
    return right


def _by_loop(run: _Run, sums: torch.Tensor) -> None:
    from weightsync.transport import compiled  # needs Numba

    data, first, row, peak, into = run
    whole = data.numel() // 8 * 8
    words, there = data[:whole].view(torch.int64), None if into is None else into[:whole].view(torch.int64)
    bits, mask = (0, 0) if peak is None else (peak.bits, peak.word_mask)
    compiled.add(words, there, first, _table("cpu"), bits, mask, sums[row])
    if whole < data.numel():
        _by_operations(_dots, 1, [(data[whole:], first + whole // 8, row, peak, None if into is None else into[whole:])], sums)


def _aligned(data: torch.Tensor) -> bool:
    """Whether bytes can be viewed as words; a slice of somebody's storage may lack it."""
    return data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0


def _by_operations(terms: _Terms, most: int, runs: list[_Run], sums: torch.Tensor) -> None:
    for data, first, row, peak, into in runs:
        if into is not None:
            data = into.copy_(data)
        whole = data.numel() // 8 * 8
        if whole:
            body = data[:whole]
            _add_words(terms, most, (body if _aligned(body) else body.clone()).view(torch.int64), first, sums[row], peak)
        if whole < data.numel():
            tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
            tail[: data.numel() - whole] = data[whole:]
            _add_words(terms, most, tail.view(torch.int64), first + whole // 8, sums[row], peak)


def _add_words(terms: _Terms, most: int, words: torch.Tensor, first: int, sums: torch.Tensor, peak: Peak | None) -> None:
    table = _table(str(words.device))
    at = 0
    scratch = torch.empty(min(BLOCK * most, words.numel()), dtype=torch.int64, device=words.device)
    while at < words.numel():
        block, column = divmod(first + at, BLOCK)
        left = words.numel() - at
        width = min(BLOCK - column, left)  # of one block; a whole one may be the first of several
        blocks = min(most, left // BLOCK) if width == BLOCK else 1
        run = words[at : at + blocks * width]
        mixed = scratch[: run.numel()]
        if peak is not None:
            peak(run, mixed)
        # The upper half folded into the lower one: else a change in the top bits alone
        # meets an even difference of coefficients and can vanish modulo 2**64.
        torch.bitwise_right_shift(run, 32, out=mixed)
        mixed.bitwise_and_(0xFFFFFFFF).bitwise_xor_(run)
        terms(mixed.view(blocks, width), table[:, column : column + width], block, sums)
        at += run.numel()


def _dots(mixed: torch.Tensor, table: torch.Tensor, block: int, sums: torch.Tensor) -> None:
    """A block at once: `dot` is one pass, and wraps modulo 2**64."""
    for half, row in enumerate(table):
        sums[half] += torch.dot(mixed[0], row) * _signed(_block_factor(block, half))


def _products(mixed: torch.Tensor, table: torch.Tensor, block: int, sums: torch.Tensor) -> None:
    """Many blocks at once, where integers have no `dot`; nothing waits for the device."""
    factors = _block_factors(block, len(mixed), str(mixed.device))
    for half, row in enumerate(table):
        sums[half] += ((mixed * row).sum(1) * factors[half]).sum()


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
