"""From a trainer to workers on its own host, by memory that both have mapped: the trainer's side.

The trainer packs a bucket into a shared segment, says so to every worker, and each copies
it out and says that it has. Segments are handed over once and kept between updates while a
bucket fits. What does not lie in a segment, digests above all, goes as messages.

A `Listener` is the trainer's, for its life; its name and secret travel in the request, which
is authenticated. `Links` are the trainer's ends of one generation; `link.Link` is a worker's. Copies
on a GPU are complete on both sides before a message says so.

Whatever fails closes the links: workers learn of it at once, and everybody meets anew.

Not covered: a peer that hangs but lives is noticed at the deadline only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import secrets
import socket
import time
from collections.abc import Collection, Iterator
from typing import Any

import torch

from weightsync.errors import Aborted, TransportFailed
from weightsync.place import Place, here
from weightsync.transport import segment
from weightsync.transport.segment import Segment
from weightsync.transport.wire import MAX_BYTES, PARTING_SECONDS, SAME, Cancelled, Wire, closed, never

#: Engine's ordinal, and worker's rank within it.
Member = tuple[int, int]

#: A segment is at least so large, bytes.
_LEAST_BYTES = 4096


def place_of(device: torch.device) -> Place:
    """Where this process is, its weights on this device."""
    return here(str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type)


class Listener:
    """Where workers of this host reach a trainer.

    Attributes:
        name: of the abstract socket.
        secret: what a worker must know.

    Raises:
        TransportFailed: this system has no such sockets.
    """

    def __init__(self) -> None:
        self.name, self.secret = f"weightsync-{secrets.token_hex(16)}", secrets.token_hex(32)
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(128)
            self._socket.setblocking(False)
        except (AttributeError, OSError) as exc:
            raise TransportFailed(f"no local socket can be opened: {exc}", hint="Set sync.local to off") from exc

    def accept(
        self, generation: int, members: Collection[Member], device: torch.device, deadline: float, cancelled: Cancelled = never
    ) -> Links:
        """Wait until every worker is there.

        Args:
            generation: of the communicator; workers of another are sent away.
            members: who is waited for.
            device: where the trainer's buckets lie.
            deadline: `time.monotonic()` value.

        Raises:
            TransportFailed: not everybody came in time.
            Aborted: `cancelled()` said so.
        """
        waiting: list[Wire] = []
        found: dict[Member, Wire] = {}
        try:
            while set(members) - found.keys():
                self._take_in(waiting)
                for wire in list(waiting):
                    if (member := self._admit(wire, generation, members, found)) is None:
                        continue
                    waiting.remove(wire)
                    if member:
                        found[member] = wire
                if cancelled():
                    raise Aborted("the update was aborted before its trainer and workers had met")
                if time.monotonic() >= deadline:
                    missing = ", ".join(f"worker {w} of engine {e}" for e, w in sorted(set(members) - found.keys()))
                    raise TransportFailed(
                        f"{missing} did not come to the trainer's local socket (generation {generation}) in time", hint="Sync again"
                    )
                if set(members) - found.keys():
                    time.sleep(0.005)
        except BaseException:
            for wire in found.values():
                wire.close()
            raise
        finally:
            for wire in waiting:
                wire.close()
        return Links(found, device)

    def _take_in(self, waiting: list[Wire]) -> None:
        try:
            connected = self._socket.accept()[0]
        except BlockingIOError:
            return
        except OSError as exc:
            raise TransportFailed(f"the trainer's local socket takes nobody: {exc}", hint="Sync again") from exc
        with contextlib.suppress(TransportFailed):  # another user's process
            waiting.append(Wire(connected, "a worker"))

    def _admit(self, wire: Wire, generation: int, members: Collection[Member], found: dict[Member, Wire]) -> Member | tuple[()] | None:
        """Who this is; () if it was sent away, None if it has said nothing yet."""
        try:
            hello, _ = wire.hear(time.monotonic(), never)
        except TransportFailed:
            if not wire.gone:
                return None
            wire.close()
            return ()
        member = (_whole(hello.get("engine")), _whole(hello.get("worker")))
        if not hmac.compare_digest(str(hello.get("secret")).encode(), self.secret.encode()):
            why = "the secret is not this trainer's"
        elif hello.get("generation") != generation:
            why = f"generation {hello.get('generation')} is over, this is {generation}"
        elif member not in members or member in found:
            why = f"worker {member[1]} of engine {member[0]} is not waited for"
        else:
            wire.peer = f"worker {member[1]} of engine {member[0]}"
            wire.tell(time.monotonic() + PARTING_SECONDS, never, welcome=True)
            return member
        wire.part(why)
        return ()

    def close(self) -> None:
        """Take nobody any more. Links that were made go on."""
        self._socket.close()


class Links:
    """A trainer's ends of the links of one generation.

    Args:
        wires: by worker.
        device: where buckets lie.
    """

    def __init__(self, wires: dict[Member, Wire], device: torch.device) -> None:
        self._wires: list[Wire] | None = list(wires.values())
        self._device = device
        self._ring: tuple[Segment, ...] = ()
        self._knows: set[Wire] = set()  # have been handed the ring
        self._number = 0

    @property
    def open(self) -> bool:
        """Whether they can still be used."""
        return self._wires is not None

    @property
    def gone(self) -> bool:
        """Whether a worker has left, or these were closed."""
        wires = self._wires
        return wires is None or any(wire.gone for wire in wires)

    def buffers(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """So many segments to pack buckets into, the ones there are while they do.

        Raises:
            TransportFailed: there is not so much memory to share.
        """
        ring = self._ring
        if len(ring) < count or any(held.nbytes < nbytes for held in ring):
            self._drop()
            self._ring = ring = tuple(segment.create(max(nbytes, _LEAST_BYTES), self._device) for _ in range(count))
            if not self.open:  # another thread closed these meanwhile
                self._drop()
                raise closed()
        return [held.tensor[:nbytes] for held in ring[:count]]

    def post(self, tensor: torch.Tensor, deadline: float, cancelled: Cancelled) -> int | None:
        """Tell every worker of bytes that are there; returns what `settle` waits for, None if nothing has to be waited for.

        Raises:
            TransportFailed: a worker is gone, or the deadline passed. The links are closed, as whenever this raises.
            Aborted: `cancelled()` said so.
        """
        with self._closing():
            wires = self._wires
            if wires is None:
                raise closed()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            offsets = ((slot, held.offset(tensor)) for slot, held in enumerate(self._ring))
            at = next(((slot, offset) for slot, offset in offsets if offset is not None), None)
            if at is None:
                self._send_inline(wires, tensor, deadline, cancelled)
                return None
            self._number += 1
            for wire in wires:
                self._hand_over(wire, deadline, cancelled)
                wire.tell(deadline, cancelled, number=self._number, slot=at[0], offset=at[1], nbytes=tensor.nbytes)
            return self._number

    def settle(self, number: int | None, deadline: float, cancelled: Cancelled) -> None:
        """Wait until every worker has what `post` told of. Raises as it does."""
        with self._closing():
            wires = self._wires
            if wires is None:
                raise closed()
            for wire in wires if number is not None else ():
                try:
                    said, _ = wire.hear(deadline, lambda: cancelled() or self.gone)
                except Aborted:
                    if cancelled():
                        raise
                    raise self.blame() from None
                if "failed" in said:
                    raise _failed(wire, said)
                if said.get("done") != number:
                    raise TransportFailed(f"{wire.peer} answered {said} to bucket {number}", hint=SAME)

    def blame(self) -> TransportFailed:
        """What the first worker that has left said at last, or that it left."""
        for wire in self._wires or ():
            if wire.gone:
                try:
                    while "failed" not in (said := wire.hear(time.monotonic(), never)[0]):
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
        self._drop()

    def _hand_over(self, wire: Wire, deadline: float, cancelled: Cancelled) -> None:
        if wire not in self._knows:
            ring = self._ring
            sizes = [held.nbytes for held in ring]
            wire.tell(deadline, cancelled, [held.descriptor for held in ring], segments=sizes, device=self._device.type)
            self._knows.add(wire)

    def _send_inline(self, wires: list[Wire], tensor: torch.Tensor, deadline: float, cancelled: Cancelled) -> None:
        held = tensor.cpu()
        data = ctypes.string_at(held.data_ptr(), held.nbytes)
        for wire in wires:
            wire.tell(deadline, cancelled, inline=len(data))
            for start in range(0, len(data), MAX_BYTES):
                wire.send(data[start : start + MAX_BYTES], deadline, cancelled)

    def _drop(self) -> None:
        ring, self._ring = self._ring, ()
        self._knows.clear()
        for held in ring:
            held.close()

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else -1


def _failed(wire: Wire, said: dict[str, Any]) -> TransportFailed:
    return TransportFailed(f"{wire.peer}: {said['failed']}", hint=str(said.get("hint", "")))
