"""A worker's end of a link to a trainer on its own host: what a `Communicator` is to the others.

See `links` for how bytes travel. An update is `lend`, all that the trainer sends posted and settled, `end`.

Not covered: handing on what arrives.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence

import torch

from weightsync.errors import TransportFailed, WeightSyncError
from weightsync.protocol import CommunicatorInfo
from weightsync.transport import segment
from weightsync.transport.channel import Channel
from weightsync.transport.packing import BucketPlan
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
        landing: where buckets arrive: a CUDA device if the trainer's are on that device.
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
        landing: torch.device,
        connect_seconds: float,
        cancelled: Cancelled = never,
    ) -> None:
        self.info, self._landing = info, landing
        #: Where digests are wanted: they come as messages.
        self.device = torch.device("cpu")
        self._ring: tuple[Segment, ...] = ()
        self._lent: Segment | None = None
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

    def lend(self, memory: Segment | None, plan: BucketPlan, deadline: float, cancelled: Cancelled = never) -> None:
        """Begin an update. Raises as `settle`.

        Args:
            memory: for all of the stream, which the trainer may write until `end`; on the landing device, and nobody still uses it.
                None to copy buckets out of the trainer's.
            plan: of the update.
        """
        with self._failing() as wire:
            self._lent = memory
            if memory is None:
                wire.tell(deadline, cancelled, plan=plan.hash)
            else:
                self._drop_ring()  # the trainer lets go of it too, if nobody else needs it; who needs it again is handed it again
                wire.tell(deadline, cancelled, [memory.descriptor], plan=plan.hash, lends=memory.nbytes, device=self._landing.type)

    def end(self, deadline: float, cancelled: Cancelled = never) -> bool:
        """Hear that the update is over, and say so. Raises as `settle`.

        Returns:
            Whether the trainer has let go of what was lent: it can't write there any more.
        """
        with self._failing() as wire:
            said, _ = wire.hear(deadline, cancelled)
            if "over" not in said:
                raise TransportFailed(f"the trainer said {said} where the update's end was due", hint=SAME)
            self._lent = None
            wire.tell(deadline, cancelled, over=said["over"])
            return bool(said.get("unmapped"))

    def post(self, tensors: Sequence[torch.Tensor], deadline: float, cancelled: Cancelled = never) -> Sequence[torch.Tensor]:
        """Nothing has to be begun: `settle` takes what the trainer says is there."""
        return tensors

    def settle(self, posted: Sequence[torch.Tensor], deadline: float, cancelled: Cancelled = never) -> None:
        with self._failing() as wire:
            for tensor in posted:
                self._take(wire, tensor, deadline, cancelled)

    def close(self) -> None:
        """Leave, and let the segments go."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self._lent = None
        self._drop_ring()

    def _take(self, wire: Wire, tensor: torch.Tensor, deadline: float, cancelled: Cancelled) -> None:
        said, descriptors = wire.hear(deadline, cancelled)
        if "segments" in said:
            self._drop_ring()
            if said["device"] != self._landing.type:
                raise TransportFailed(f"the trainer's buckets are on {said['device']}, this worker takes them on {self._landing.type}")
            pairs = zip(descriptors, said["segments"], strict=True)
            self._ring = tuple(segment.attach(descriptor, int(nbytes), self._landing) for descriptor, nbytes in pairs)
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
        if "landed" in said:
            lent = self._lent
            if lent is None or lent.offset(tensor) != said["landed"]:
                raise TransportFailed(f"the trainer wrote at {said['landed']} of what it was lent, where nothing is due", hint=SAME)
            return
        start = int(said["offset"])
        self._copy(tensor, self._ring[int(said["slot"])].tensor[start : start + tensor.nbytes])
        wire.tell(deadline, cancelled, done=said["number"])

    def _copy(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        tensor.copy_(source.view(tensor.dtype).view(tensor.shape))
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()

    def _drop_ring(self) -> None:
        ring, self._ring = self._ring, ()
        for held in ring:
            held.close()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[Wire]:
        """The wire; an error is told to the trainer, and closes the link."""
        wire = self._wire
        try:
            if wire is None:
                raise closed()
            yield wire
        except WeightSyncError as exc:
            self._fail(wire, exc)
            raise
        except (RuntimeError, KeyError, TypeError, ValueError, IndexError) as exc:
            error = TransportFailed(f"what the trainer sent can't be taken: {type(exc).__name__}: {exc}", hint=SAME)
            self._fail(wire, error)
            raise error from exc

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
