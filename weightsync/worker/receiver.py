"""The thread that receives one update into staging while the engine serves.

Bytes land in host memory beside the live weights, in the layout of the bucket
plan's stream, so every tensor is whole and in place when its last bucket is in.
Its digest is compared then, and in the same read its values are looked at: NaN, infinity,
and what the dtype it is loaded into can't hold fail the update when all tensors are in,
so that the trainer is told of every one. Nothing here touches the model.

Not covered: staging in GPU memory, and applying while bytes still arrive.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

import psutil
import torch

from weightsync.errors import BadValues, DigestMismatch, InternalError, MemoryRefused, TransportFailed, WeightSyncError
from weightsync.protocol import BeginOrder, Phase
from weightsync.transport import digest, finite
from weightsync.transport.communicator import Communicator
from weightsync.transport.packing import Bucket, BucketPlan, plan_buckets

#: Share of the free host memory that one staged update may take.
_MEMORY_SHARE = 0.8
#: As many tensors with values that are refused are described; the others are counted.
_SHOWN = 20


class Receiver:
    """Receives one update.

    Args:
        order: what to receive and where to meet.
        rank: this worker's rank within its engine.
        device: where the transport lands buckets: the worker's CUDA device under NCCL, from where they are moved
            to the host, and the CPU under gloo.
        connect: returns the communicator of the order's generation, making it if need be.
        dtypes: of what tensors are loaded into, by the tensor's name, where that can differ from what is sent.

    Raises:
        MemoryRefused: the stream does not fit beside what the host holds.
        WeightSyncError: the trainer computed another bucket plan.
    """

    def __init__(
        self,
        order: BeginOrder,
        rank: int,
        device: torch.device,
        connect: Callable[[], Communicator],
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        self.order, self.rank, self._device, self._connect, self._dtypes = order, rank, device, connect, dtypes or {}
        request = order.request
        self.plan: BucketPlan = plan_buckets(request.manifest, request.bucket_bytes)
        if self.plan.hash != request.plan_hash:
            raise InternalError("trainer and worker computed different bucket plans", hint="Install the same weightsync on both sides")
        free = psutil.virtual_memory().available
        if self.plan.stream_bytes > free * _MEMORY_SHARE:
            raise MemoryRefused(
                f"staging needs {self.plan.stream_bytes} bytes of host memory and {free} are free",
                hint="Give the engine's host more memory, or run fewer engines on it",
            )
        self.staging: torch.Tensor | None = torch.empty(self.plan.stream_bytes, dtype=torch.uint8)
        self.error: WeightSyncError | None = None
        self.staged = False
        self.digests: dict[int, digest.Digest] = {}
        self._bad: dict[str, str] = {}  # tensors whose values are refused, with counts
        self.tensors = 0
        self.nbytes = 0
        self.seconds: dict[str, float] = {}
        self._deadline = time.monotonic() + request.timeout_seconds
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weightsync-receive-{request.update_id[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Make the thread end soon; does not wait for it."""
        self._cancelled.set()

    def discard(self) -> None:
        """Cancel and let the staged bytes go."""
        self.cancel()
        self.staging = None

    def tensor(self, index: int) -> torch.Tensor:
        """The staged tensor at this index of the manifest, shaped; a view of the staging memory."""
        assert self.staging is not None, "staging was discarded"
        spec = self.order.request.manifest.tensors[index]
        start = self.plan.offsets[index]
        flat = self.staging[start : start + spec.nbytes].view(getattr(torch, spec.dtype))
        return flat.reshape(spec.shape)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            communicator = self._connect()
            self.seconds["connect"] = time.monotonic() - began
            with self._side_stream():
                self._receive(communicator)
            self.staged = True
        except WeightSyncError as exc:
            # Without its traceback, whose frames would hold the staged bytes for as long as somebody keeps the error.
            self.error = WeightSyncError.from_dict(exc.to_dict())
        except Exception as exc:  # a thread's exception would vanish; it must reach the trainer
            self.error = InternalError(f"receiving failed: {type(exc).__name__}: {exc}")
        finally:
            self.seconds["receive"] = time.monotonic() - began - self.seconds.get("connect", 0.0)

    def _side_stream(self) -> contextlib.AbstractContextManager[object]:
        # Copies of the received bytes must not queue behind the engine's own work.
        return torch.cuda.stream(torch.cuda.Stream(self._device)) if self._device.type == "cuda" else contextlib.nullcontext()

    def _receive(self, communicator: Communicator) -> None:
        staging = self.staging
        if staging is None:
            raise TransportFailed("the update was discarded before its first byte")
        on_host = self._device.type == "cpu"
        landing = (
            None if on_host else torch.empty(min(self.plan.bucket_bytes, self.plan.stream_bytes), dtype=torch.uint8, device=self._device)
        )
        for bucket in self.plan.buckets:
            window = staging[bucket.start : bucket.start + bucket.nbytes]
            if bucket.nbytes:
                target = window if landing is None else landing[: bucket.nbytes]
                communicator.broadcast(target, self._deadline, self._cancelled.is_set)
                if landing is not None:
                    window.copy_(target)
            self.nbytes += sum(piece.nbytes for piece in bucket.pieces)
            if bucket.complete:
                self._check(bucket, communicator)

    def _check(self, bucket: Bucket, communicator: Communicator) -> None:
        """Receive the digests behind a bucket and compare; behind the last one refuse bad values."""
        packed = torch.empty((len(bucket.complete), 2), dtype=torch.int64, device=communicator.device)
        communicator.broadcast(packed, self._deadline, self._cancelled.is_set)
        specs = self.order.request.manifest.tensors
        wrong = []
        for index, sent in zip(bucket.complete, digest.unpack(packed.cpu()), strict=True):
            name, tensor = specs[index].name, self.tensor(index)
            peak = self._peak(index)
            if digest.digest_tensor(tensor, peak) != sent:
                wrong.append(name)
            elif peak is not None and peak.refused:
                self._bad[name] = peak.describe(tensor) if len(self._bad) < _SHOWN else ""
            self.digests[index] = sent
        if wrong:
            raise DigestMismatch(
                f"{len(wrong)} tensor(s) arrived with other bytes than were sent: {', '.join(wrong[:20])}",
                hint="Sync again; if it comes back, suspect the network or memory",
                names=wrong,
            )
        self.tensors += len(bucket.complete)
        if self._bad and bucket is self.plan.buckets[-1]:
            shown = ", ".join(f"{name} ({counts})" for name, counts in self._bad.items() if counts)
            more = f" and {len(self._bad) - _SHOWN} more" if len(self._bad) > _SHOWN else ""
            raise BadValues(
                f"{len(self._bad)} tensor(s) hold values that an engine must not get: {shown}{more}",
                hint="Find the step that made them; allow_nonfinite=True lets such an update through",
                phase=str(Phase.RECEIVE),
                names=list(self._bad),
            )

    def _peak(self, index: int) -> finite.Peak | None:
        """What looks at a tensor's values while its digest is made; None where any are right."""
        request = self.order.request
        spec = request.manifest.tensors[index]
        if request.allow_nonfinite or not finite.watched(spec.dtype):
            return None
        return finite.Peak(spec.dtype, self._dtypes.get(spec.name, ""))
