"""An update as copies: bytes of its stream to bytes of captured storage, worked out once, and done at once for every update like it.

A load map says which elements of which tensor a loader copies where. Where a layer keeps what is loaded as it is, that is all there
is to an update of it: no loader, no processing, and no Python for each tensor. A copy becomes *runs*, rectangles of bytes: rows of a
width, at a stride of their own on each side. On a CUDA device all runs whose bytes lie on it take one launch (`copying`).

Not covered: which layers may be copied (`worker.planned`); elements that are converted or computed on their way.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

#: Elements of memory: first element, shape, stride.
View = tuple[int, tuple[int, ...], tuple[int, ...]]
#: A copy that falls into more rectangles than this had better be left to its loader.
MOST_RUNS = 256


@dataclass(frozen=True)
class Run:
    """A rectangle of bytes.

    Attributes:
        tensor: index in the manifest of what is copied.
        source, source_stride: its first byte within that tensor; bytes from one row to the next.
        into, into_stride: the like, within the storage that is written.
        rows, width: how many rows, of so many bytes.
    """

    tensor: int
    source: int
    source_stride: int
    into: int
    into_stride: int
    rows: int
    width: int


def runs_of(tensor: int, source: View, into: View, itemsize: int) -> list[Run] | None:
    """The runs of a copy of elements as they are; None where it falls into too many.

    Args:
        tensor: index of the source.
        source, into: of one shape.
        itemsize: bytes of an element.
    """
    start, shape, steps = source
    begin, _, strides = into
    axes = [axis for axis in zip(shape, steps, strides, strict=True) if axis[0] != 1]
    if any(size == 0 for size, _, _ in axes):
        return []
    merged: list[tuple[int, int, int]] = []
    for size, step, stride in axes:  # outermost first; neighbours that both sides run through without a gap are one
        if merged and merged[-1][1:] == (step * size, stride * size):
            merged[-1] = (merged[-1][0] * size, step, stride)
        else:
            merged.append((size, step, stride))
    width = 1
    if merged and merged[-1][1:] == (1, 1):
        width = merged.pop()[0]
    rows, row_step, row_stride = max(merged, default=(1, 0, 0))
    if merged:
        merged.remove((rows, row_step, row_stride))
    if torch.Size([size for size, _, _ in merged]).numel() > MOST_RUNS:
        return None
    found = []
    for place in itertools.product(*(range(size) for size, _, _ in merged)):
        away = sum(at * step for at, (_, step, _) in zip(place, merged, strict=True))
        there = sum(at * stride for at, (_, _, stride) in zip(place, merged, strict=True))
        first, target = (start + away) * itemsize, (begin + there) * itemsize
        found.append(Run(tensor, first, row_step * itemsize, target, row_stride * itemsize, rows, width * itemsize))
    return found


class Plan:
    """Copies of one manifest's tensors into one model's storage.

    Args:
        copies: runs, and the memory that each is written into, shape [bytes], uint8, which stays alive as long as this.

    Attributes:
        nbytes: that are copied.
        memory: that is written, each once.
    """

    def __init__(self, copies: Sequence[tuple[Run, torch.Tensor]]) -> None:
        self._copies = list(copies)
        self.memory = list({into.data_ptr(): into for _, into in self._copies}.values())
        self.nbytes = sum(run.rows * run.width for run, _ in self._copies)
        self._targets = [into.as_strided((run.rows, run.width), (run.into_stride, 1), run.into) for run, into in self._copies]
        self._kernel: Any = None

    def __len__(self) -> int:
        return len(self._copies)

    def execute(self, data: torch.Tensor, offsets: Sequence[int]) -> None:
        """Copy. On a CUDA device it is asked for, on the current stream; the bytes have to stay until that has been done.

        Args:
            data: the stream, shape [bytes], uint8, on the device or on the host.
            offsets: first byte of each tensor in it.
        """
        if not self._copies:
            return
        if data.is_cuda and (copier := self._launches()) is not None:
            copier(data, offsets)
            return
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_copy_(self._targets, self._sources(data, offsets), non_blocking=True)

    def prepare(self, data: torch.Tensor, offsets: Sequence[int]) -> None:
        """Have a CUDA device get ready for streams like this one: the first has to wait for a compiler. Copies nothing."""
        if self._copies and data.is_cuda and (copier := self._launches()) is not None:
            copier.prepare(data, offsets)

    def _sources(self, data: torch.Tensor, offsets: Sequence[int]) -> list[torch.Tensor]:
        return [data.as_strided((run.rows, run.width), (run.source_stride, 1), offsets[run.tensor] + run.source) for run, _ in self._copies]

    def _launches(self) -> Any:
        """One launch for all; None where that can't be had, which is said once."""
        if self._kernel is None:
            try:
                from weightsync.storage import copying  # needs Triton

                self._kernel = copying.Launch(self._copies)
            except Exception as exc:  # no Triton, none for this device: there is another way
                logger.warning("updates are copied tensor by tensor: %s: %s", type(exc).__name__, exc)
                self._kernel = False
        return self._kernel or None


def prepare(device: torch.device) -> None:
    """Have a CUDA device get ready for plans of whole rows: the first launch has to wait for a compiler."""
    if device.type == "cuda":
        try:
            from weightsync.storage import copying

            copying.compile_for(device)
        except Exception as exc:  # said when there is a plan
            logger.debug("%s: %s", type(exc).__name__, exc)
