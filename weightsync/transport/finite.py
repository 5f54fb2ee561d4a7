"""Values that an engine must not get: NaN, infinity, and more than the dtype holds into which it loads them.

The bits of a floating point number without its sign rise with its magnitude, and
infinity and NaN come behind the largest number. So one integer maximum over the
magnitudes' bits tells whether a tensor holds any such value, in every dtype, also in
those for which torch has no `isfinite`; and the smallest magnitude that would round
to infinity in a narrower dtype is just a lower bound for the same comparison.

`Peak` takes that maximum from the runs of words that the digest has in the cache, or is told it by the kernel that takes both.
Values are counted, in a further read, only in a tensor that is refused.

Not covered: what happens to a value behind the loader (scales that a kernel folds
into weights, activations that overflow).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

#: Elements that are counted at once.
_COUNT_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class _Format:
    """How a dtype writes its numbers.

    Attributes:
        view: integer dtype of the same width in which magnitudes are never negative.
        first: bits of the smallest magnitude that is no finite number.
        infinite: whether that one is infinity; else it is a NaN.
    """

    view: torch.dtype
    first: int
    infinite: bool = True

    @property
    def mask(self) -> int:
        """The bits of one element without its sign."""
        return int(torch.iinfo(self.view).max)

    @property
    def word_mask(self) -> int:
        """The same for all elements of a 64-bit word, as a signed number."""
        bits = torch.iinfo(self.view).bits
        word = sum(self.mask << at for at in range(0, 64, bits))
        return word - (1 << 64) if word >> 63 else word


_FORMATS = {
    "float64": _Format(torch.int64, 0x7FF0_0000_0000_0000),
    "float32": _Format(torch.int32, 0x7F80_0000),
    "bfloat16": _Format(torch.int16, 0x7F80),
    "float16": _Format(torch.int16, 0x7C00),
    "float8_e5m2": _Format(torch.int8, 0x7C),
    "float8_e4m3fn": _Format(torch.int8, 0x7F, infinite=False),
    "float8_e8m0fnu": _Format(torch.uint8, 0xFF, infinite=False),  # an exponent alone, without a sign
}


class Peak:
    """The largest magnitude of one tensor, from the words that it is called with or from what it is told.

    Args:
        dtype: what the tensor is sent as; a key of `protocol.DTYPE_BYTES` that `watched` knows.
        target: dtype of what it is loaded into; as it is sent when empty, or when that holds no floats.
    """

    def __init__(self, dtype: str, target: str = "") -> None:
        self._format, self._target = _FORMATS[dtype], target
        self._limit = _limit(dtype, target) if target in _FORMATS else self._format.first
        self._top: torch.Tensor | None = None
        self._told = 0

    @property
    def bits(self) -> int:
        """Of one element."""
        return int(torch.iinfo(self._format.view).bits)

    @property
    def sign_bits(self) -> int:
        """How many of these, the upper ones, are no magnitude."""
        return self.bits - self._format.mask.bit_length()

    @property
    def word_mask(self) -> int:
        """The magnitudes' bits of all elements of a 64-bit word, as a signed number."""
        return self._format.word_mask

    def saw(self, top: int) -> None:
        """Take note of the largest magnitude's bits that somebody else has found in a run of words."""
        self._told = max(self._told, top)

    def __call__(self, words: torch.Tensor, scratch: torch.Tensor) -> None:
        """Look at a run of words.

        Args:
            words: shape [n], dtype int64; elements laid one behind the other, filled up with zeros.
            scratch: as `words`; overwritten.
        """
        magnitudes = torch.bitwise_and(words, self._format.word_mask, out=scratch)
        top = magnitudes.view(self._format.view).amax()
        self._top = top if self._top is None else torch.maximum(self._top, top)

    @property
    def top(self) -> int:
        """The largest magnitude's bits so far. On CUDA tensors waits for the device."""
        return max(self._told, 0 if self._top is None else int(self._top))

    @property
    def refused(self) -> bool:
        """Whether a value was among them that an engine must not get. Waits as `top`."""
        return self.top >= self._limit

    def describe(self, tensor: torch.Tensor) -> str:
        """How many such values a tensor holds, of each kind; for messages."""
        flat = tensor.detach().reshape(-1).view(self._format.view)
        nan = infinite = beyond = 0
        for part in flat.split(_COUNT_ELEMENTS):
            magnitude = part & self._format.mask
            finite_beyond = int(((magnitude >= self._limit) & (magnitude < self._format.first)).sum())
            first = int((magnitude == self._format.first).sum()) if self._format.infinite else 0
            nan += int((magnitude >= self._format.first).sum()) - first
            infinite, beyond = infinite + first, beyond + finite_beyond
        counts = [f"{nan} NaN"] * (nan > 0) + [f"{infinite} infinite"] * (infinite > 0)
        if beyond:
            counts.append(f"{beyond} beyond {torch.finfo(getattr(torch, self._target)).max:g}, the most that {self._target} holds")
        return f"{', '.join(counts)} of {flat.numel()}"


def watched(dtype: str) -> bool:
    """Whether a dtype has values that are no finite numbers."""
    return dtype in _FORMATS


@functools.cache
def _limit(source: str, target: str) -> int:
    """Bits of the smallest magnitude that is not finite any more when torch has converted it."""
    low, high = 0, _FORMATS[source].first
    while low < high:
        middle = (low + high) // 2
        number = torch.tensor([middle], dtype=_FORMATS[source].view, device="cpu").view(getattr(torch, source))
        bits = int(number.to(getattr(torch, target)).view(_FORMATS[target].view)) & _FORMATS[target].mask
        low, high = (low, middle) if bits >= _FORMATS[target].first else (middle + 1, high)
    return low
