"""An update that is not staged: tensors pass from the receiving thread to the loader as they become whole.

Between the two wait at most `LIMIT_BYTES`, or one tensor; the thread, and with it the
trainer, stands still when the loader does. So the bytes begin to arrive while the
engine serves, and the rest when it is paused and `apply` takes them.

Not covered: a second try and a way back, which need bytes that are kept.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator

import torch

from weightsync.errors import Aborted, DeadlineExceeded, WeightSyncError
from weightsync.protocol import Manifest
from weightsync.transport.packing import Bucket, BucketPlan, Piece
from weightsync.worker.loadmap import LoadMap

#: Bytes of whole tensors that wait for the loader.
LIMIT_BYTES = 256 << 20
_LOOK_SECONDS = 0.05


class Passing:
    """Tensors on their way.

    Args:
        manifest, plan: of the update.
        device: where tensors are made whole.
        deadline: `time.monotonic()` value; neither side waits longer.
        cancelled: whether the update was ended.
        limit_bytes: see `LIMIT_BYTES`.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: BucketPlan,
        device: torch.device,
        deadline: float,
        cancelled: Callable[[], bool],
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._manifest, self._plan, self._device = manifest, plan, device
        self._deadline, self._cancelled, self._limit = deadline, cancelled, limit_bytes
        self._windows = [torch.empty(_window_bytes(plan), dtype=torch.uint8, device=device) for _ in plan.buckets[:2]]
        self._partial: dict[int, torch.Tensor] = {}
        self._whole: deque[tuple[int, torch.Tensor]] = deque()
        self._waiting_bytes = 0
        self._error: WeightSyncError | None = None
        self._drained = False
        self._changed = threading.Condition()

    @property
    def device(self) -> torch.device:
        return self._device

    # --- the receiving side: a bucket is landed in one thread while the next comes into another window ---

    def window(self, bucket: Bucket) -> torch.Tensor:
        """Where a bucket lands, shape [its bytes], uint8; the next one lands in other memory, and the one after that in the same."""
        return self._windows[bucket.start // self._plan.bucket_bytes % 2][: bucket.nbytes]

    def landed(self, bucket: Bucket) -> None:
        """Take a bucket's pieces out of the window."""
        window = self.window(bucket)
        for piece in bucket.pieces:
            if piece.tensor not in self._partial:
                nbytes = self._manifest.tensors[piece.tensor].nbytes
                self._partial[piece.tensor] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self.run(bucket, piece).copy_(window[piece.bucket_offset : piece.bucket_offset + piece.nbytes])

    def run(self, bucket: Bucket, piece: Piece) -> torch.Tensor:
        """Where a piece of a bucket that has landed is now, shape [its bytes], uint8."""
        return self._partial[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.nbytes]

    def tensor(self, index: int) -> torch.Tensor:
        """A tensor that is whole and was not handed over yet, shaped."""
        spec = self._manifest.tensors[index]
        flat = self._partial.get(index, torch.empty(0, dtype=torch.uint8, device=self._device))
        return flat.view(getattr(torch, spec.dtype)).reshape(spec.shape)

    def hand_over(self, indices: Collection[int]) -> None:
        """Give tensors whose bytes are proved to the loader; waits while too many are there.

        Raises:
            Aborted, DeadlineExceeded: nobody took them.
        """
        for index in indices:
            tensor = self.tensor(index)
            self._partial.pop(index, None)
            with self._changed:
                self._wait(lambda size=tensor.nbytes: not self._whole or self._waiting_bytes + size <= self._limit)  # type: ignore[misc]
                if self._drained:
                    continue
                self._whole.append((index, tensor))
                self._waiting_bytes += tensor.nbytes
                self._changed.notify_all()

    def drain(self) -> None:
        """Nobody takes tensors any more: what waits goes, and so does what comes."""
        with self._changed:
            self._drained, self._waiting_bytes = True, 0
            self._whole.clear()
            self._changed.notify_all()

    def fail(self, error: WeightSyncError) -> None:
        """No more will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # --- the loader ----------------------------------------------------------------------------

    def update(self, load_map: LoadMap, skipped: Collection[str]) -> Streamed:
        """What arrives, with where it goes. No name can be passed over: that takes a look at other tensors, which may be gone."""
        assert not skipped
        return Streamed(self._manifest, self, load_map)

    def take(self, index: int, *, keep: bool = False) -> torch.Tensor:
        """The next tensor, which is this one of the manifest; with `keep` it stays the next.

        Raises:
            WeightSyncError: receiving ended, with that error.
        """
        with self._changed:
            self._wait(lambda: bool(self._whole) or self._error is not None)
            if not self._whole:
                assert self._error is not None
                raise WeightSyncError.from_dict(self._error.to_dict())
            at, tensor = self._whole[0]
            assert at == index, f"tensor {at} arrived in the place of {index}"
            if not keep:
                self._whole.popleft()
                self._waiting_bytes -= tensor.nbytes
                self._changed.notify_all()
            if tensor.is_cuda:  # let go of while the loader's stream reads it, its memory must not be given to a tensor that arrives
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            return tensor

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._cancelled():
                raise Aborted("the update was ended while its tensors passed")
            if time.monotonic() > self._deadline:
                raise DeadlineExceeded("tensors stood still until the update's deadline")
            self._changed.wait(_LOOK_SECONDS)


def windows_bytes(plan: BucketPlan) -> int:
    """What `Passing` takes for buckets that land, beside the tensors."""
    return len(plan.buckets[:2]) * _window_bytes(plan)


def _window_bytes(plan: BucketPlan) -> int:
    return min(plan.bucket_bytes, plan.stream_bytes)


class Streamed:
    """What a loader is given of an update that is not staged (compare `staging.Staged`).

    Args:
        manifest: names, dtypes, shapes, in the order of the stream.
        passing: where tensors come from.
        load_map: where they go.
    """

    def __init__(self, manifest: Manifest, passing: Passing, load_map: LoadMap) -> None:
        self.manifest, self.load_map, self._passing = manifest, load_map, passing

    def wait(self) -> None:
        """Until the first tensor is there: what fails before has cost nothing.

        Raises:
            WeightSyncError: receiving ended before.
        """
        self._passing.take(0, keep=True)

    def stream(self, taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Staged.stream`."""
        for index, spec in enumerate(self.manifest.tensors):
            yield self.load_map.name(spec.name), self._passing.take(index)
            taken.append(spec.name)
