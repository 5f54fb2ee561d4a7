"""A worker's end of a link to a trainer on its own host: what a `Communicator` is to the others.

See `local` for how bytes travel.

Not covered: handing on what arrives: each worker of a host copies for itself.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch

from weightsync.errors import TransportFailed, WeightSyncError
from weightsync.protocol import CommunicatorInfo
from weightsync.transport import segment
from weightsync.transport.channel import Channel
from weightsync.transport.segment import Segment
from weightsync.transport.wire import SAME, Cancelled, Wire, closed, never

#: Engine's ordinal, and worker's rank within it.
Member = tuple[int, int]


class Link(Channel):
    """A worker's end. What `Communicator` is to the others.

    Args:
        info: what was agreed on; with the generation.
        member: this worker.
        name, secret: of the trainer's `Listener`.
        device: where what arrives is wanted: a CUDA device if the trainer's buckets are on that device.
        connect_seconds: deadline of joining.
        cancelled: asked while waiting.

    Raises:
        TransportFailed: the trainer is gone, can't be reached, or has sent this worker away.
        Aborted: `cancelled()` said so.
    """

    def __init__(
        self,
        info: CommunicatorInfo,
        member: Member,
        name: str,
        secret: str,
        device: torch.device,
        connect_seconds: float,
        cancelled: Cancelled = never,
    ) -> None:
        self.info, self.device = info, device
        self._ring: tuple[Segment, ...] = ()
        self._wire: Wire | None = _reach(name)
        deadline = time.monotonic() + connect_seconds
        try:
            self._wire.tell(deadline, cancelled, engine=member[0], worker=member[1], generation=info.generation, secret=secret)
            answer, _ = self._wire.hear(deadline, cancelled)
        except BaseException:
            self.close()
            raise
        if not answer.get("welcome"):
            self.close()
            raise TransportFailed(f"the trainer sent this worker away: {answer.get('failed', answer)}", hint="Sync again")

    @property
    def open(self) -> bool:
        return self._wire is not None

    def buffers(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """Memory of its own: a worker shares nothing."""
        return [torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]

    def post(self, tensors: Sequence[torch.Tensor], deadline: float, cancelled: Cancelled = never) -> Sequence[torch.Tensor]:
        """Nothing has to be begun: `settle` takes what the trainer says is there."""
        return tensors

    def settle(self, posted: Sequence[torch.Tensor], deadline: float, cancelled: Cancelled = never) -> None:
        wire = self._wire
        try:
            if wire is None:
                raise closed()
            for tensor in posted:
                self._take(wire, tensor, deadline, cancelled)
        except WeightSyncError as exc:
            self._fail(wire, exc)
            raise
        except (RuntimeError, KeyError, TypeError, ValueError, IndexError) as exc:
            error = TransportFailed(f"what the trainer sent can't be taken: {type(exc).__name__}: {exc}", hint=SAME)
            self._fail(wire, error)
            raise error from exc

    def close(self) -> None:
        """Leave, and let the segments go."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self._drop()

    def _take(self, wire: Wire, tensor: torch.Tensor, deadline: float, cancelled: Cancelled) -> None:
        said, descriptors = wire.hear(deadline, cancelled)
        if "segments" in said:
            self._drop()
            if said["device"] != self.device.type:
                raise TransportFailed(f"the trainer's buckets are on {said['device']}, this worker takes them on {self.device.type}")
            pairs = zip(descriptors, said["segments"], strict=True)
            self._ring = tuple(segment.attach(descriptor, int(nbytes), self.device) for descriptor, nbytes in pairs)
            said, _ = wire.hear(deadline, cancelled)
        if "inline" in said:
            _require(tensor, int(said["inline"]))
            data = bytearray()
            while len(data) < tensor.nbytes:
                data += wire.receive(deadline, cancelled)[0]
            if data:
                self._copy(tensor, torch.frombuffer(data, dtype=torch.uint8))
            return
        _require(tensor, int(said["nbytes"]))
        start = int(said["offset"])
        self._copy(tensor, self._ring[int(said["slot"])].tensor[start : start + tensor.nbytes])
        wire.tell(deadline, cancelled, done=said["number"])

    def _copy(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        tensor.copy_(source.view(tensor.dtype).view(tensor.shape))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _drop(self) -> None:
        ring, self._ring = self._ring, ()
        for held in ring:
            held.close()

    def _fail(self, wire: Wire | None, error: WeightSyncError) -> None:
        if wire is not None:
            wire.part(error.message, error.hint)
        self.close()


def _reach(name: str) -> Wire:
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connecting.setblocking(False)
        connecting.connect(f"\0{name}")
    except OSError as exc:
        connecting.close()
        raise TransportFailed(
            f"the trainer's local socket {name} can't be reached: {exc.strerror}. It has left, or is in another network namespace",
            hint="Sync again; if it comes back, run both in one network namespace (one pod, the host's network), or set sync.local to off",
        ) from exc
    return Wire(connecting, "the trainer")


def _require(tensor: torch.Tensor, nbytes: int) -> None:
    if tensor.nbytes != nbytes:
        raise TransportFailed(f"the trainer sent {nbytes} bytes where {tensor.nbytes} are due", hint=SAME)
