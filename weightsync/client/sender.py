"""The sending side of one update: pack a bucket, broadcast it, broadcast its digests.

Runs in a thread of the trainer's process. A parameter is read only while its
bucket is packed; when the last is packed they may change again.

Not covered: reading the parameters on the GPU while they are already changing
(wait for `tensors_read`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weightsync.client.source import Offer
from weightsync.transport import digest
from weightsync.transport.fanout import Channel
from weightsync.transport.packing import Bucket, BucketPlan

#: Called after each bucket with (bytes sent, bytes in all).
Progress = Callable[[int, int], None]


class Sender:
    """Sends one offer.

    Args:
        offer: manifest and tensors.
        plan: the bucket plan that the workers computed too.
        progress: called behind each bucket, in the sending thread.
    """

    def __init__(self, offer: Offer, plan: BucketPlan, progress: Progress | None) -> None:
        self._offer, self._plan, self._progress = offer, plan, progress
        self._partial: dict[int, digest.Digest] = {}
        self.seconds = {"pack": 0.0, "broadcast": 0.0}

    def send(self, communicator: Channel, deadline: float, cancelled: Callable[[], bool], on_read: Callable[[], None]) -> None:
        """Send everything.

        Args:
            deadline: `time.monotonic()` value.
            cancelled: asked while waiting.
            on_read: called once, when every tensor has been read.

        Raises:
            TransportFailed, Aborted: see `Communicator.broadcast`.
        """
        plan = self._plan
        (buffer,) = communicator.buffers(1, min(plan.bucket_bytes, plan.stream_bytes))
        total = self._offer.manifest.nbytes
        sent = 0
        for number, bucket in enumerate(plan.buckets):
            start = time.monotonic()
            self._pack(bucket, buffer)
            digests = digest.pack([self._partial.pop(index, digest.ZERO) for index in bucket.complete])
            if number == len(plan.buckets) - 1:
                on_read()
            packed = time.monotonic()
            if bucket.nbytes:
                communicator.broadcast(buffer[: bucket.nbytes], deadline, cancelled)
            if bucket.complete:
                communicator.broadcast(digests.to(communicator.device), deadline, cancelled)
            self.seconds["pack"] += packed - start
            self.seconds["broadcast"] += time.monotonic() - packed
            sent += sum(piece.nbytes for piece in bucket.pieces)
            if self._progress is not None:
                self._progress(sent, total)
        if not plan.buckets:
            on_read()

    def _pack(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Copy a bucket's pieces into the buffer and add up their digests."""
        for piece in bucket.pieces:
            # A tensor that is not contiguous is copied once per bucket it touches; such are rare and small.
            source = digest.as_bytes(self._offer.tensors[piece.tensor])[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
            target = buffer[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
            target.copy_(source)
            part = digest.digest_bytes(target, piece.tensor_offset)
            self._partial[piece.tensor] = digest.add(self._partial.get(piece.tensor, digest.ZERO), part)
