"""The sending side of one update: pack a bucket, broadcast it, broadcast its digests.

Runs in two threads of the trainer's process: while a bucket is broadcast from one buffer,
the next is packed into another, and posted behind it, so that the transport need not wait
for us between them. Tensors are read in the packing thread, each once, in
the manifest's order; one is let go of when its last piece is packed, so that of tensors
that are gathered to be read there is one at a time. When the last is packed they may change
again.

Not covered: reading the parameters on the GPU while they are already changing
(wait for `tensors_read`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from weightsync.client.source import Offer
from weightsync.errors import ManifestRefused
from weightsync.transport import digest
from weightsync.transport.beside import Beside, now, on_stream, settle
from weightsync.transport.channel import Channel, parts
from weightsync.transport.packing import Bucket, BucketPlan

#: Called after each bucket with (bytes sent, bytes in all).
Progress = Callable[[int, int], None]
#: One is broadcast while the next is packed, and waits for its turn.
_BUFFERS = 2


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
        #: By step. Packing and broadcasting go on at the same time; `export` is what reading tensors takes of the packing thread.
        self.seconds = {"export": 0.0, "pack": 0.0, "broadcast": 0.0}

    def send(self, communicator: Channel, deadline: float, cancelled: Callable[[], bool], on_read: Callable[[], None]) -> None:
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
        plan, device = self._plan, self._offer.device
        if not plan.buckets:
            on_read()
            return
        with (
            on_stream(device, self._offered),
            Beside("weightsync-pack", device, self._offered, deadline, cancelled) as packing,
        ):
            buffers = communicator.buffers(min(_BUFFERS, len(plan.buckets)), max(1, min(plan.bucket_bytes, plan.stream_bytes)))
            settle(device)
            job = packing.submit(functools.partial(self._fill, plan.buckets[0], buffers[0], on_read))
            before: tuple[Bucket, Any] | None = None
            for number, bucket in enumerate(plan.buckets):
                buffer, digests = buffers[number % len(buffers)], packing.result(job)
                began = time.monotonic()
                posted = communicator.post(parts(buffer[: bucket.nbytes], digests.to(communicator.device)), deadline, packing.ended)
                self._settle(communicator, before, deadline, packing)
                self.seconds["broadcast"] += time.monotonic() - began
                before = bucket, posted
                if number + 1 < len(plan.buckets):
                    # The bucket before this one is there: its buffer is free.
                    other = buffers[(number + 1) % len(buffers)]
                    job = packing.submit(functools.partial(self._fill, plan.buckets[number + 1], other, on_read))
            began = time.monotonic()
            self._settle(communicator, before, deadline, packing)
            self.seconds["broadcast"] += time.monotonic() - began

    def _settle(self, communicator: Channel, before: tuple[Bucket, Any] | None, deadline: float, packing: Beside) -> None:
        """Wait until a bucket is there, and say so."""
        if before is not None:
            bucket, posted = before
            communicator.settle(posted, deadline, packing.ended)
            self._sent += sum(piece.nbytes for piece in bucket.pieces)
            if self._progress is not None:
                self._progress(self._sent, self._offer.manifest.nbytes)

    # --- the packing thread --------------------------------------------------------------------

    def _fill(self, bucket: Bucket, buffer: torch.Tensor, on_read: Callable[[], None]) -> torch.Tensor:
        """Pack a bucket; returns what is broadcast behind it."""
        began, before = time.monotonic(), self.seconds["export"]
        self._pack(bucket, buffer)
        digests = digest.pack([self._partial.pop(index, digest.ZERO) for index in bucket.complete])
        if bucket is self._plan.buckets[-1]:
            self._read_up_to(len(self._offer.manifest.tensors))  # tensors without elements
            settle(self._offer.device)
            on_read()
        self.seconds["pack"] += time.monotonic() - began - (self.seconds["export"] - before)
        return digests

    def _pack(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Copy a bucket's pieces into the buffer and add up their digests; zeros between them, where there would be anything at all."""
        batch, free = digest.Batch(len(bucket.pieces), buffer.device), 0
        for piece in bucket.pieces:
            if free < piece.bucket_offset:
                buffer[free : piece.bucket_offset].zero_()
            end, free = piece.tensor_offset + piece.nbytes, piece.bucket_offset + piece.nbytes
            target = buffer[piece.bucket_offset : free]
            target.copy_(self._bytes(piece.tensor)[piece.tensor_offset : end])
            if end == self._offer.manifest.tensors[piece.tensor].nbytes:
                self._current = None
            batch.add(target, piece.tensor_offset)
        buffer[free : bucket.nbytes].zero_()
        for piece, part in zip(bucket.pieces, batch.results(), strict=True):
            self._partial[piece.tensor] = digest.add(self._partial.get(piece.tensor, digest.ZERO), part)

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
        if str(tensor.dtype) != f"torch.{spec.dtype}" or tuple(tensor.shape) != spec.shape:
            raise ManifestRefused(
                f"{spec.name!r} was offered as {spec.dtype} {spec.shape} and is {tensor.dtype} {tuple(tensor.shape)} now",
                hint="Change the model's tensors between updates only",
                names=[spec.name],
            )
        self._read += 1
        return digest.as_bytes(tensor)
