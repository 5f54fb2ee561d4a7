"""The sending side of one update: pack a bucket, broadcast it, broadcast its digests.

Runs in two threads of the trainer's process: while a bucket is broadcast, those behind it are
packed, as far ahead as there is memory for (`transport.ground`): one where two buffers take turns, all of
them where they lie in a worker's own memory. On CUDA the packing thread only asks the device for copies; the
broadcasting one waits for those of its bucket. A bucket is posted behind the one that travels, so that
the transport need not wait for us between them. Tensors are read in the packing thread, each once, in
the manifest's order; one is let go of when its last piece is packed, so that of tensors
that are gathered to be read there is one at a time, and on CUDA small ones, which are copied together.
When the last is packed they may change again.

An error carries none of the memory that was packed into: a worker's would stay mapped for as long as somebody keeps the error.

Not covered: reading the parameters on the GPU while they are already changing
(wait for `tensors_read`); a read that never returns keeps the memory of its bucket mapped.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from weightsync.client.source import Offer
from weightsync.errors import ManifestRefused
from weightsync.transport import digest
from weightsync.transport.beside import Beside, Job, now, on_stream, settle
from weightsync.transport.channel import Outlet, parts, send_all
from weightsync.transport.ground import Ground
from weightsync.transport.packing import Bucket, BucketPlan

#: Called after each bucket with (bytes sent, bytes in all).
Progress = Callable[[int, int], None]
#: On CUDA a bucket is copied by one launch, for which its tensors have to be there; of those made to be read so many bytes are held.
_MOST_WAITING = 16 << 20


class Sender:
    """Sends one offer; made in the thread that owns its tensors, which on CUDA are read behind what that thread has asked for.

    Args:
        offer: manifest and tensors.
        plan: the bucket plan that the workers computed too.
        progress: called behind each bucket, in the sending thread.
    """

    def __init__(self, offer: Offer, plan: BucketPlan, progress: Progress | None) -> None:
        self._offer, self._plan, self._progress = offer, plan, progress
        self._partial: dict[int, digest.Digest] = {}
        self._offered = now(offer.device)
        self._read = 0  # tensors so far
        self._sent = 0  # bytes that are there
        self._current: torch.Tensor | None = None  # bytes of the one that was read last
        self._made = False  # whether they were made to be read
        self._packing: Beside | None = None
        #: By step. `ground`: until there is memory to pack into. `export` and `pack`: of the packing thread, to read tensors and to copy
        #: them, or on CUDA to ask for that. `await_pack`, `broadcast`: of the other one. `settle`: until local workers have seen all.
        self.seconds = {"ground": 0.0, "export": 0.0, "pack": 0.0, "await_pack": 0.0, "broadcast": 0.0, "settle": 0.0}

    def send(self, outlet: Outlet, deadline: float, cancelled: Callable[[], bool], on_read: Callable[[], None]) -> None:
        """Send everything.

        Args:
            deadline: `time.monotonic()` value.
            cancelled: asked while waiting.
            on_read: called once, when every tensor has been read, in the packing thread.

        Raises:
            TransportFailed, Aborted: see `Channel.post`.
            ManifestRefused: a tensor is not what was offered.
            DeadlineExceeded: tensors could not be read in time.
        """
        if not self._plan.buckets:
            on_read()
            return
        try:
            with on_stream(self._offer.device, self._offered):
                began = time.monotonic()
                ground = outlet.ground(self._plan, deadline, cancelled)
                settle(self._offer.device)
                self.seconds["ground"] = time.monotonic() - began
                try:
                    self._send_buckets(outlet, ground, deadline, cancelled, on_read)
                finally:
                    ground.let_go()
                began = time.monotonic()
                outlet.end(deadline, cancelled)
                self.seconds["settle"] = time.monotonic() - began
        except BaseException as exc:
            _clear(exc)
            raise

    def reads(self) -> bool:
        """Whether a thread may still be in a read, also one that was left behind there."""
        return self._packing is not None and self._packing.alive

    def _send_buckets(
        self, outlet: Outlet, ground: Ground, deadline: float, cancelled: Callable[[], bool], on_read: Callable[[], None]
    ) -> None:
        began, device = time.monotonic(), self._offer.device
        self._packing = Beside("weightsync-pack", device, self._offered, deadline, cancelled)
        try:
            with self._packing as packing:
                send_all(outlet, self._packed(outlet, ground, packing, on_read), deadline, packing.ended, self._arrived)
        finally:
            self.seconds["broadcast"] = time.monotonic() - began - self.seconds["await_pack"]

    def _packed(self, outlet: Outlet, ground: Ground, packing: Beside, on_read: Callable[[], None]) -> Iterator[list[torch.Tensor]]:
        """What is posted of each bucket, when it is packed; those behind it are packed meanwhile."""
        buckets, jobs = self._plan.buckets, deque[Job[digest.Batch]]()
        for number, bucket in enumerate(buckets):
            began = time.monotonic()
            # Where buffers take turns: all but the last bucket are settled, and their buffers free.
            for ahead in range(number + len(jobs), min(max(number - 1, 0) + ground.ahead, len(buckets))):
                jobs.append(packing.submit(functools.partial(self._fill, ahead, ground, on_read)))
            digests = self._digests(bucket, packing.result(jobs.popleft()))
            self.seconds["await_pack"] += time.monotonic() - began
            yield parts(ground.window(number, bucket), digests.to(outlet.device))

    def _arrived(self, number: int) -> None:
        self._sent += sum(piece.nbytes for piece in self._plan.buckets[number].pieces)
        if self._progress is not None:
            self._progress(self._sent, self._offer.manifest.nbytes)

    def _digests(self, bucket: Bucket, batch: digest.Batch) -> torch.Tensor:
        """What is broadcast behind a bucket that has been packed."""
        for piece, part in zip(bucket.pieces, batch.results(), strict=True):
            self._partial[piece.tensor] = digest.add(self._partial.get(piece.tensor, digest.ZERO), part)
        return digest.pack([self._partial.pop(index, digest.ZERO) for index in bucket.complete])

    # --- the packing thread --------------------------------------------------------------------

    def _fill(self, number: int, ground: Ground, on_read: Callable[[], None]) -> digest.Batch:
        """Pack the bucket of this number."""
        bucket = self._plan.buckets[number]
        began, before = time.monotonic(), self.seconds["export"]
        packed = self._pack(bucket, ground.window(number, bucket))
        if bucket is self._plan.buckets[-1]:
            self._read_up_to(len(self._offer.manifest.tensors))  # tensors without elements
            settle(self._offer.device)
            on_read()
        self.seconds["pack"] += time.monotonic() - began - (self.seconds["export"] - before)
        return packed

    def _pack(self, bucket: Bucket, window: torch.Tensor) -> digest.Batch:
        """Copy a bucket's pieces into its window, and begin to add up their digests; zeros where there would be anything at all.

        Args:
            window: shape [the bucket's bytes], uint8.
        """
        batch, waiting = digest.Batch(len(bucket.pieces), window.device), 0
        for piece, target in zip(bucket.pieces, _targets(bucket, window), strict=True):
            source = self._bytes(piece.tensor)
            end = piece.tensor_offset + piece.nbytes
            if piece.nbytes < source.numel():
                source = source[piece.tensor_offset : end]
            if end == self._offer.manifest.tensors[piece.tensor].nbytes:
                self._current = None
            batch.add(source, piece.tensor_offset, into=target)
            waiting += self._offer.manifest.tensors[piece.tensor].nbytes if self._made else 0  # a piece holds its whole tensor
            del source  # before the next is read
            if waiting >= _MOST_WAITING:
                batch.start()
                waiting = 0
        batch.start()
        return batch

    def _bytes(self, index: int) -> torch.Tensor:
        """The bytes of a tensor, of which this is the first piece or one behind it."""
        self._read_up_to(index + 1)
        assert self._current is not None, "its last piece was packed"
        return self._current

    def _read_up_to(self, count: int) -> None:
        """Read so many tensors in all: each is asked for, also where it has no elements, since other ranks may have a part in it."""
        while self._read < count:
            self._current = None
            began = time.monotonic()
            self._current = self._read_next()
            self.seconds["export"] += time.monotonic() - began

    def _read_next(self) -> torch.Tensor:
        spec, tensor = self._offer.manifest.tensors[self._read], self._offer.read(self._read)
        if tensor.dtype is not getattr(torch, spec.dtype) or tensor.shape != spec.shape:
            raise ManifestRefused(
                f"{spec.name!r} was offered as {spec.dtype} {spec.shape} and is {tensor.dtype} {tuple(tensor.shape)} now",
                hint="Change the model's tensors between updates only",
                names=[spec.name],
            )
        data = digest.as_bytes(tensor)
        self._made = not self._offer.resident(self._read) or data.data_ptr() != tensor.data_ptr()
        self._read += 1
        return data


def _targets(bucket: Bucket, window: torch.Tensor) -> list[torch.Tensor]:
    """Where its pieces go; the gaps between them and behind the last are set to zero."""
    sizes, free = [], 0
    for piece in bucket.pieces:
        sizes += [piece.bucket_offset - free, piece.nbytes]
        free = piece.bucket_offset + piece.nbytes
    runs = window.split_with_sizes([*sizes, bucket.nbytes - free])
    for gap in runs[::2]:
        if gap.numel():
            gap.zero_()
    return list(runs[1::2])


def _clear(error: BaseException | None) -> None:
    """Have an error's frames of this package hold nothing, and those of what led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = error.__traceback__
        while frames is not None:
            if str(frames.tb_frame.f_globals.get("__name__")).startswith("weightsync."):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frames.tb_frame.clear()
            frames = frames.tb_next
        error = error.__cause__ or error.__context__
