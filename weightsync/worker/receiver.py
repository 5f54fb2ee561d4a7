"""The thread that receives one update, into staging while the engine serves.

Bytes land in memory beside the live weights (see `staging`), in the layout of the
bucket plan's stream, so every tensor is whole and in place when its last bucket is in;
or, without staging, each tensor in memory of its own, until the loader takes it (see
`streaming`). A tensor's digest is compared when it is whole, and in the same read its
values are looked at: NaN, infinity, and what the dtype it is loaded into can't hold fail
the update, where bytes are staged when all tensors are in, so that the trainer is told
of every one. Nothing here touches the model.

A second thread looks at a bucket while the next arrives, which lands in other memory and was
asked for before this one was here, so that the transport need not wait for us between them;
what has been looked at is handed on before the next but one is asked for.

Not covered: what becomes of the tensors.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.errors import BadValues, DigestMismatch, InternalError, ManifestRefused, TransportFailed, WeightSyncError
from weightsync.protocol import BeginOrder, Phase
from weightsync.transport import digest, finite, retained
from weightsync.transport.beside import Beside, Job, now, on_stream, settle
from weightsync.transport.channel import Channel, parts
from weightsync.transport.link import Link
from weightsync.transport.packing import Bucket, BucketPlan, Piece, plan_buckets
from weightsync.worker import staging, streaming

#: A bucket that is there, and the job that looks at it.
_Checked = tuple[Bucket, Job[None]]
#: As many tensors with values that are refused are described; the others are counted.
_SHOWN = 20


@dataclass(frozen=True)
class _Coming:
    """A bucket on its way: where it lands, and the digests of the tensors that it completes."""

    bucket: Bucket
    target: torch.Tensor
    digests: torch.Tensor
    posted: Any


class Receiver:
    """Receives one update.

    Args:
        order: what to receive and where to meet.
        rank: this worker's rank within its engine.
        device: the worker's.
        landing: where the transport puts buckets: the worker's CUDA device under NCCL, the CPU under gloo. Where bytes
            are staged elsewhere, they are moved bucket by bucket.
        connect: returns the communicator of the order's generation, making it if need be.
        dtypes: of what tensors are loaded into, by the tensor's name, where that can differ from what is sent.
        unused: tensors, by their index in the manifest, that need not be kept once they are proved.
        regions: memory of earlier updates.

    Raises:
        MemoryRefused: the stream would not fit where it is to be staged.
        WeightSyncError: the trainer computed another bucket plan.
    """

    def __init__(
        self,
        order: BeginOrder,
        rank: int,
        device: torch.device,
        landing: torch.device,
        connect: Callable[[], Channel],
        dtypes: Mapping[str, str] | None = None,
        unused: Collection[int] = (),
        regions: staging.Regions | None = None,
    ) -> None:
        self.order, self.rank, self._device, self._landing, self._connect = order, rank, device, landing, connect
        self._dtypes = dtypes or {}
        self._regions = regions or staging.Regions()
        request = order.request
        try:
            self.plan: BucketPlan = plan_buckets(request.manifest, request.bucket_bytes)
        except ValueError as exc:
            raise ManifestRefused(str(exc), hint="Send larger buckets") from None
        if self.plan.hash != request.plan_hash:
            raise InternalError("trainer and worker computed different bucket plans", hint="Install the same weightsync on both sides")
        self._deadline = time.monotonic() + request.timeout_seconds
        self._cancelled = threading.Event()
        self.into: staging.Whole | streaming.Passing | None = self._make(unused)
        # Where copies go on a stream of their own, so as not to queue behind the engine's work; memory that it had before is free then.
        self._busy = device if landing.type == "cpu" else landing
        self._allocated = now(self._busy)
        self.error: WeightSyncError | None = None
        self.draining = False  # what still comes goes by
        self.ready = False  # to be applied: all is there, or, without staging, it begins to come
        self.digests: dict[int, digest.Digest] = {}
        self._partial: dict[int, digest.Digest] = {}  # of tensors of which more is to come
        self._peaks: dict[int, finite.Peak | None] = {}
        self._bad: dict[str, str] = {}  # tensors whose values are refused, with counts
        self.tensors = 0
        self.nbytes = 0
        self.seconds: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name=f"weightsync-receive-{request.update_id[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Make the thread end soon; does not wait for it."""
        self._cancelled.set()

    def discard(self) -> None:
        """Cancel and let the bytes go."""
        self.cancel()
        self.into = None

    def drain(self) -> None:
        """Let go by what is still to come: other engines get it by the same broadcasts, and may go on."""
        self.draining = True
        if isinstance(self.into, streaming.Passing):
            self.into.drain()
        if not self._thread.is_alive():
            self.into = None

    def held(self) -> staging.Whole | streaming.Passing:
        """Where the bytes are.

        Raises:
            InternalError: they were let go of.
        """
        if self.into is None:
            raise InternalError("the bytes of this update were let go of", update_id=self.order.request.update_id)
        return self.into

    def _make(self, unused: Collection[int]) -> staging.Whole | streaming.Passing:
        order, manifest = self.order, self.order.request.manifest
        if order.stage == "none":
            self._regions.drop()
            largest = max((spec.nbytes for spec in manifest.tensors), default=0)
            needed = largest + streaming.windows_bytes(self.plan)
            hint = "Send smaller buckets (bucket_bytes) or the tensor in parts, or give the KV cache less"
            staging.require_room(needed, self._landing, "the largest tensor and two buckets take", hint)
            return streaming.Passing(manifest, self.plan, self._landing, self._deadline, self._cancelled.is_set)
        # What is kept when it is committed had better be on the host from the start: copying it there takes time.
        stage = "host" if order.retain and order.stage == "auto" else order.stage
        spared = sum(manifest.tensors[index].nbytes for index in unused)
        lent = self.rank in order.communicator.local.get(str(order.engine), ())
        memory = self._regions.allocate(self.plan, stage, self._device, self._landing, spared, lent)
        return staging.Whole(manifest, self.plan, memory, unused)

    def _run(self) -> None:
        began = time.monotonic()
        into = self.into
        try:
            communicator = self._connect()
            self.seconds["connect"] = time.monotonic() - began
            if isinstance(into, staging.Whole):
                self._take_pages(into)
            into = self.into
            if into is None:
                raise TransportFailed("the update was discarded before its first byte")
            self.ready = isinstance(into, streaming.Passing)
            self._receive(communicator, into)
            self.ready = True
        except WeightSyncError as exc:
            self._fail(exc)
        except Exception as exc:  # a thread's exception would vanish; it must reach the trainer
            self._fail(InternalError(f"receiving failed: {type(exc).__name__}: {exc}"))
        finally:
            if self.draining:
                self.into = None
            if self.error is not None and isinstance(into, staging.Whole):
                into.let_go()
            self.seconds["receive"] = time.monotonic() - began - self.seconds.get("connect", 0.0)

    def _take_pages(self, into: staging.Whole) -> None:
        """Have the host's memory there, where bytes go to that: seconds for many gigabytes, in which everybody has met already."""
        # A partial update is taken over into what is kept, when it counts.
        folder = None if self.order.request.partial else retained.folder_of(self.order, self.rank)
        if folder is not None and into.device.type == "cpu":
            memory, file = folder.memory(self.order.request.update_id, self.plan.stream_bytes, self._cancelled.is_set)
            self._regions.forget(into.move(memory, folder.path / file))
        into.show(self._device)

    def _fail(self, error: WeightSyncError) -> None:
        # Without its traceback, whose frames would hold the bytes for as long as somebody keeps the error.
        self.error = WeightSyncError.from_dict(error.to_dict())
        if self.into is not None:
            self.into.fail(self.error)

    def _receive(self, communicator: Channel, into: staging.Whole | streaming.Passing) -> None:
        """Receive every bucket with its digests, in this thread; look at each in another, while the next comes."""
        buckets, device = self.plan.buckets, self._busy
        name = f"weightsync-check-{self.order.request.update_id[:8]}"
        with (
            on_stream(device, self._allocated),
            Beside(name, device, self._allocated, self._deadline, self._cancelled.is_set) as checking,
        ):
            landings = self._landings(into)
            settle(device)
            link = communicator if isinstance(communicator, Link) and buckets else None
            lent = into.lend() if link is not None and isinstance(into, staging.Whole) else None
            if link is not None:
                link.lend(lent, self.plan, self._deadline, checking.ended)
            checked: _Checked | None = None
            coming: _Coming | None = None
            for number, bucket in enumerate(buckets):
                # This one lands where the one before the last did.
                self._finish(checked, checking, into)
                target = landings[number % len(landings)][: bucket.nbytes] if landings else into.window(bucket)
                # Not zeros, which fresh memory holds and which are the digest of zeros: what was never delivered would be taken for proved.
                digests = torch.full((len(bucket.complete), 2), -1, dtype=torch.int64, device=communicator.device)
                posted = communicator.post(parts(target, digests), self._deadline, checking.ended)
                checked = self._arrive(coming, communicator, checking, into)
                coming = _Coming(bucket, target, digests, posted)
            self._finish(checked, checking, into)
            checked = self._arrive(coming, communicator, checking, into)
            if link is not None and link.end(self._deadline, checking.ended) and lent is not None:
                self._regions.keep(lent)
            self._finish(checked, checking, into)

    def _arrive(
        self, coming: _Coming | None, communicator: Channel, checking: Beside, into: staging.Whole | streaming.Passing
    ) -> _Checked | None:
        """Wait for a bucket and its digests, and have it looked at."""
        if coming is None:
            return None
        communicator.settle(coming.posted, self._deadline, checking.ended)
        self.nbytes += sum(piece.nbytes for piece in coming.bucket.pieces)
        look = functools.partial(self._check, coming.bucket, coming.target, coming.digests, into)
        return coming.bucket, checking.submit(look)

    def _landings(self, into: staging.Whole | streaming.Passing) -> list[torch.Tensor]:
        """Memory in which buckets land that are then moved; none where they land in their place."""
        if self._landing.type == into.device.type:
            return []
        most = min(self.plan.bucket_bytes, self.plan.stream_bytes)
        return [torch.empty(most, dtype=torch.uint8, device=self._landing) for _ in self.plan.buckets[:2]]

    def _finish(self, checked: _Checked | None, checking: Beside, into: staging.Whole | streaming.Passing) -> None:
        """Wait until a bucket has been looked at, and hand over what it made whole."""
        if checked is not None:
            bucket, job = checked
            checking.result(job)
            into.hand_over(bucket.complete)

    # --- the checking thread -------------------------------------------------------------------

    def _check(self, bucket: Bucket, arrived: torch.Tensor, digests: torch.Tensor, into: staging.Whole | streaming.Passing) -> None:
        """Put a bucket in its place and compare digests; refuse bad values, where bytes are staged behind the last bucket."""
        window = into.window(bucket)
        moved = window.data_ptr() != arrived.data_ptr()
        if moved and arrived.is_cuda:  # looked at where it landed, and moved meanwhile: a CPU takes many times as long for that
            look = self._begin(bucket, arrived.device, lambda piece: arrived[piece.bucket_offset : piece.bucket_offset + piece.nbytes])
            window.copy_(arrived)
            into.landed(bucket)
        else:
            if moved:
                window.copy_(arrived)
            into.landed(bucket)
            look = self._begin(bucket, window.device, lambda piece: into.run(bucket, piece))
        for piece, part in zip(bucket.pieces, look.results(), strict=True):
            self._partial[piece.tensor] = digest.add(self._partial[piece.tensor], part)
        specs = self.order.request.manifest.tensors
        wrong = []
        for index, sent in zip(bucket.complete, digest.unpack(digests.cpu()), strict=True):
            name, peak = specs[index].name, self._peaks.pop(index, None)
            if self._partial.pop(index, digest.ZERO) != sent:
                wrong.append(name)
            elif peak is not None and peak.refused:
                self._bad[name] = peak.describe(into.tensor(index)) if len(self._bad) < _SHOWN else ""
            self.digests[index] = sent
        if wrong:
            raise DigestMismatch(
                f"{len(wrong)} tensor(s) arrived with other bytes than were sent: {', '.join(wrong[:20])}",
                hint="Sync again; if it comes back, suspect the network or memory",
                names=wrong,
            )
        self.tensors += len(bucket.complete)
        if self._bad and (isinstance(into, streaming.Passing) or bucket is self.plan.buckets[-1]):
            shown = ", ".join(f"{name} ({counts})" for name, counts in self._bad.items() if counts)
            more = f" and {len(self._bad) - _SHOWN} more" if len(self._bad) > _SHOWN else ""
            raise BadValues(
                f"{len(self._bad)} tensor(s) hold values that an engine must not get: {shown}{more}",
                hint="Find the step that made them; allow_nonfinite=True lets such an update through",
                phase=str(Phase.RECEIVE),
                names=list(self._bad),
            )

    def _begin(self, bucket: Bucket, device: torch.device, run: Callable[[Piece], torch.Tensor]) -> digest.Batch:
        """Begin with the digests of a bucket's pieces and the largest of their values.

        Args:
            run: a piece's bytes, on `device`.
        """
        batch = digest.Batch(len(bucket.pieces), device)
        for piece in bucket.pieces:
            if piece.tensor not in self._partial:
                self._partial[piece.tensor], self._peaks[piece.tensor] = digest.ZERO, self._peak(piece.tensor)
            batch.add(run(piece), piece.tensor_offset, self._peaks[piece.tensor])
        batch.start()
        return batch

    def _peak(self, index: int) -> finite.Peak | None:
        """What looks at a tensor's values while its digest is made; None where any are right."""
        request = self.order.request
        spec = request.manifest.tensors[index]
        if request.allow_nonfinite or not finite.watched(spec.dtype):
            return None
        return finite.Peak(spec.dtype, self._dtypes.get(spec.name, ""))
