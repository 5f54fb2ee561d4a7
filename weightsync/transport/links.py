"""A trainer's ends of the links of one generation.

Each update begins with a word of every worker (`ground`). One that stages in memory that can
be shared lends it: the trainer maps it, packs buckets straight into their windows of it, and
says when one is there: one copy for each byte, and nobody waits for anybody before the end
of the update. Where several lend, the first one's is packed into, and the others get copies on
the device. Who lends nothing copies buckets out of a ring of shared segments, which the trainer packs
into, or where somebody lends copies into, and says when it has; the ring is kept from update to update.
What does not lie in such memory, digests above all, goes as messages.

What was lent belongs to one update alone. The trainer unmaps it at the end of the update, before it says
that this is the end, or when the links are closed: a worker may then take it for something else (`staging.Regions`).

Copies on a GPU are complete on both sides before a message says so.

Not covered: a trainer that hangs and lives keeps what it has mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weightsync.errors import Aborted, TransportFailed
from weightsync.transport import segment
from weightsync.transport.channel import closed_on_error
from weightsync.transport.ground import Ground, all_of, in_turns, turns_of
from weightsync.transport.packing import BucketPlan
from weightsync.transport.segment import Segment
from weightsync.transport.wire import MAX_BYTES, SAME, Cancelled, Wire, closed, never

#: A segment is at least so large, bytes.
_LEAST_BYTES = 4096


class Links:
    """See the module.

    Args:
        wires: to the workers.
        device: where buckets are packed.
    """

    def __init__(self, wires: list[Wire], device: torch.device) -> None:
        self._wires: list[Wire] | None = wires
        self._device = device
        self._lent: dict[Wire, Segment] = {}  # of those who lend, while an update goes on
        self._ring: tuple[Segment, ...] = ()
        self._knows: set[Wire] = set()  # have been handed the ring
        self._number = 0
        #: Called before memory is let go of: a GPU's is waited for there, for as long as a broadcast out of it stands still.
        self.before_letting_go: Callable[[], None] = lambda: None

    @property
    def open(self) -> bool:
        """Whether they can still be used."""
        return self._wires is not None

    @property
    def gone(self) -> bool:
        """Whether a worker has left, or these were closed."""
        wires = self._wires
        return wires is None or any(wire.gone for wire in wires)

    def ground(self, plan: BucketPlan, deadline: float, cancelled: Cancelled) -> Ground:
        """Begin an update: hear of every worker what it lends, and map that.

        Raises:
            TransportFailed: a worker is gone, the deadline passed, or there is no memory to share. The links are closed, as whenever
                this raises.
            Aborted: `cancelled()` said so.
        """
        with closed_on_error(self):
            wires = self._open()
            self._unmap()
            for wire in wires:
                said, descriptors = self._hear(wire, deadline, cancelled)
                if said.get("plan") != plan.hash:
                    raise TransportFailed(f"{wire.peer} began with {said} where plan {plan.hash} is due", hint=SAME)
                if descriptors:
                    self._knows.discard(wire)  # who lends lets go of the ring
                    self._lent[wire] = _map(wire, said, descriptors[0], plan, self._device)
            count, nbytes = turns_of(plan)
            first = next(iter(self._lent.values()), None)
            buffers: list[torch.Tensor] = []
            if len(self._lent) == len(wires):
                self._drop_ring()
            else:
                buffers = self._slots(count, nbytes)
            if not self.open:  # another thread closed these meanwhile
                raise closed()
            return in_turns(buffers) if first is None else all_of(plan, first.tensor)

    def post(self, tensor: torch.Tensor, deadline: float, cancelled: Cancelled) -> int | None:
        """Tell every worker of bytes that are there; returns what `settle` waits for, None if nothing has to be waited for.

        Raises:
            TransportFailed, Aborted: as `ground`.
        """
        with closed_on_error(self):
            wires, lent = self._open(), list(self._lent.values())
            at = lent[0].offset(tensor) if lent else None
            turn = self._number % max(1, len(self._ring))  # the one in this slot before has been settled, as with buffers that take turns
            if at is not None:
                self._copy_to(tensor, at, lent[1:], turn)
            offsets = [(slot, held.offset(tensor)) for slot, held in enumerate(self._ring)]
            slot, offset = (turn, 0) if at is not None else next((found for found in offsets if found[1] is not None), (0, None))
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            if at is None and offset is None:
                self._send_inline(wires, tensor, deadline, cancelled)
                return None
            self._number += 1
            for wire in wires:
                if wire in self._lent:
                    self._tell(wire, deadline, cancelled, number=self._number, landed=at, nbytes=tensor.nbytes)
                else:
                    self._hand_over(wire, deadline, cancelled)
                    self._tell(wire, deadline, cancelled, number=self._number, slot=slot, offset=offset, nbytes=tensor.nbytes)
            return self._number

    def settle(self, number: int | None, deadline: float, cancelled: Cancelled) -> None:
        """Wait until every worker that copies has what `post` told of. Raises as it does."""
        with closed_on_error(self):
            for wire in self._open() if number is not None else ():
                if wire not in self._lent:
                    self._expect(wire, "done", number, deadline, cancelled)

    def end(self, deadline: float, cancelled: Cancelled) -> None:
        """Let go of what was lent, say that the update is over, and wait until every worker has seen it to its end. Raises as `post`."""
        with closed_on_error(self):
            wires, unmapped = self._open(), self._unmap(settled=True)
            for wire in wires:
                self._tell(wire, deadline, cancelled, over=self._number, unmapped=unmapped)
            for wire in wires:
                self._expect(wire, "over", self._number, deadline, cancelled)

    def blame(self) -> TransportFailed:
        """What the first worker that has left said at last, or that it left."""
        for wire in self._wires or ():
            if wire.gone:
                try:
                    while "failed" not in (said := wire.hear(0.0, never)[0]):
                        pass
                    return _failed(wire, said)
                except TransportFailed:
                    return wire.left()
        return closed()

    def close(self) -> None:
        """Leave, and let the segments go. Can be called twice, and by any thread."""
        wires, self._wires = self._wires, None
        for wire in wires or ():
            wire.close()
        self.before_letting_go()
        self._unmap()
        self._drop_ring()

    # --- memory ------------------------------------------------------------------------------------

    def _slots(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """So many segments of the ring, the ones there are while they do."""
        ring = self._ring
        if len(ring) < count or any(held.nbytes < nbytes for held in ring):
            self._drop_ring()
            self._ring = ring = tuple(segment.create(max(nbytes, _LEAST_BYTES), self._device) for _ in range(count))
        return [held.tensor[:nbytes] for held in ring[:count]]

    def _copy_to(self, tensor: torch.Tensor, at: int, others: list[Segment], turn: int) -> None:
        """Copy a bucket out of the memory that it was packed into: to the others that lend, and into the ring's `turn` for others."""
        for other in others:
            other.tensor[at : at + tensor.nbytes].copy_(tensor)
        for held in self._ring[turn : turn + 1]:
            held.tensor[: tensor.nbytes].copy_(tensor)

    def _unmap(self, settled: bool = False) -> bool:
        """Let go of what was lent; whether it is no longer mapped here."""
        lent, self._lent = self._lent, {}
        for held in lent.values():
            held.close(settled)
        return all(held.gone for held in lent.values())

    def _drop_ring(self) -> None:
        ring, self._ring = self._ring, ()
        self._knows.clear()
        for held in ring:
            held.close()

    # --- messages ----------------------------------------------------------------------------------

    def _open(self) -> list[Wire]:
        wires = self._wires
        if wires is None:
            raise closed()
        return wires

    def _hand_over(self, wire: Wire, deadline: float, cancelled: Cancelled) -> None:
        if wire not in self._knows:
            ring = self._ring
            sizes, descriptors = [held.nbytes for held in ring], [held.descriptor for held in ring]
            with self._blaming(wire):
                wire.tell(deadline, cancelled, descriptors, segments=sizes, device=self._device.type)
            self._knows.add(wire)

    def _send_inline(self, wires: list[Wire], tensor: torch.Tensor, deadline: float, cancelled: Cancelled) -> None:
        held = tensor.cpu()
        data = ctypes.string_at(held.data_ptr(), held.nbytes)
        for wire in wires:
            self._tell(wire, deadline, cancelled, inline=len(data))
            for start in range(0, len(data), MAX_BYTES):
                with self._blaming(wire):
                    wire.send(data[start : start + MAX_BYTES], deadline, cancelled)

    def _tell(self, wire: Wire, deadline: float, cancelled: Cancelled, **fields: Any) -> None:
        with self._blaming(wire):
            wire.tell(deadline, cancelled, **fields)

    def _hear(self, wire: Wire, deadline: float, cancelled: Cancelled) -> tuple[dict[str, Any], list[segment.Descriptor]]:
        """What a worker says next, unless another one leaves meanwhile."""
        try:
            said, descriptors = wire.hear(deadline, lambda: cancelled() or self.gone)
        except Aborted:
            if cancelled():
                raise
            raise self.blame() from None
        if "failed" in said:
            raise _failed(wire, said)
        return said, descriptors

    def _expect(self, wire: Wire, word: str, number: int | None, deadline: float, cancelled: Cancelled) -> None:
        said, _ = self._hear(wire, deadline, cancelled)
        if said.get(word) != number:
            raise TransportFailed(f"{wire.peer} said {said} where {word} {number} was due", hint=SAME)

    @contextlib.contextmanager
    def _blaming(self, wire: Wire) -> Iterator[None]:
        """A worker that can't be told any more may have said why before it left."""
        try:
            yield
        except TransportFailed:
            if wire.gone:
                raise self.blame() from None
            raise


def _map(wire: Wire, said: dict[str, Any], descriptor: segment.Descriptor, plan: BucketPlan, device: torch.device) -> Segment:
    nbytes = said.get("lends")
    if not isinstance(nbytes, int) or nbytes < plan.stream_bytes or said.get("device") != device.type:
        raise TransportFailed(
            f"{wire.peer} lends {nbytes} bytes on {said.get('device')}, {plan.stream_bytes} on {device.type} are wanted", hint=SAME
        )
    return segment.attach(descriptor, nbytes, device)


def _failed(wire: Wire, said: dict[str, Any]) -> TransportFailed:
    return TransportFailed(f"{wire.peer}: {said['failed']}", hint=str(said.get("hint", "")))
