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
from weightsync.errors import ManifestRefused
from weightsync.transport import digest
from weightsync.transport.communicator import Communicator
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
        self._read = 0  # tensors so far
        self._current: torch.Tensor | None = None  # bytes of the one that was read last
        #: By step; `export` is what reading tensors takes.
        self.seconds = {"export": 0.0, "pack": 0.0, "broadcast": 0.0}

    def send(self, communicator: Communicator, deadline: float, cancelled: Callable[[], bool], on_read: Callable[[], None]) -> None:
        """Send everything.

        Args:
            deadline: `time.monotonic()` value.
            cancelled: asked while waiting.
            on_read: called once, when every tensor has been read.

        Raises:
            TransportFailed, Aborted: see `Communicator.broadcast`.
        """
        plan = self._plan
        buffer = torch.zeros(min(plan.bucket_bytes, plan.stream_bytes), dtype=torch.uint8, device=self._offer.device)
        total = self._offer.manifest.nbytes
        sent = 0
        for number, bucket in enumerate(plan.buckets):
            start, before = time.monotonic(), self.seconds["export"]
            self._pack(bucket, buffer)
            digests = digest.pack([self._partial.pop(index, digest.ZERO) for index in bucket.complete])
            if number == len(plan.buckets) - 1:
                self._read_up_to(len(self._offer.manifest.tensors))  # tensors without elements
                on_read()
            packed = time.monotonic()
            if bucket.nbytes:
                communicator.broadcast(buffer[: bucket.nbytes], deadline, cancelled)
            if bucket.complete:
                communicator.broadcast(digests.to(communicator.device), deadline, cancelled)
            self.seconds["pack"] += packed - start - (self.seconds["export"] - before)
            self.seconds["broadcast"] += time.monotonic() - packed
            sent += sum(piece.nbytes for piece in bucket.pieces)
            if self._progress is not None:
                self._progress(sent, total)
        if not plan.buckets:
            on_read()

    def _pack(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Copy a bucket's pieces into the buffer and add up their digests."""
        for piece in bucket.pieces:
            end = piece.tensor_offset + piece.nbytes
            target = buffer[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
            target.copy_(self._bytes(piece.tensor)[piece.tensor_offset : end])
            if end == self._offer.manifest.tensors[piece.tensor].nbytes:
                self._current = None
            part = digest.digest_bytes(target, piece.tensor_offset)
            self._partial[piece.tensor] = digest.add(self._partial.get(piece.tensor, digest.ZERO), part)

    def _bytes(self, index: int) -> torch.Tensor:
        """The bytes of a tensor, of which this is the first piece or one behind it."""
        self._read_up_to(index + 1)
        assert self._current is not None, "its last piece was packed"
        return self._current

    def _read_up_to(self, count: int) -> None:
        """Read so many tensors in all: each is asked for, also where it has no elements, since other ranks may have a part in it."""
        while self._read < count:
            began, spec = time.monotonic(), self._offer.manifest.tensors[self._read]
            tensor = self._offer.read(self._read)
            if str(tensor.dtype) != f"torch.{spec.dtype}" or tuple(tensor.shape) != spec.shape:
                raise ManifestRefused(
                    f"{spec.name!r} was offered as {spec.dtype} {spec.shape} and is {tensor.dtype} {tuple(tensor.shape)} now",
                    hint="Change the model's tensors between updates only",
                    names=[spec.name],
                )
            self._current = digest.as_bytes(tensor)
            self._read += 1
            self.seconds["export"] += time.monotonic() - began
