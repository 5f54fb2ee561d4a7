"""From a trainer to workers on its own host, by memory that both have mapped: the trainer's side.

A `Listener` is the trainer's, for its life; its name and secret travel in the request, which
is authenticated. `links.Links` are the trainer's ends of one generation, and say how bytes travel;
`link.Link` is a worker's end.

Whatever fails closes the links: workers learn of it at once, and everybody meets anew.

Not covered: a peer that hangs but lives is noticed at the deadline only.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Collection
from typing import Any

import torch

from weightsync.errors import Aborted, TransportFailed
from weightsync.place import Place, here
from weightsync.transport.links import Links
from weightsync.transport.wire import PARTING_SECONDS, Cancelled, Wire, never

#: Engine's ordinal, and worker's rank within it.
Member = tuple[int, int]


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
        return Links(list(found.values()), device)

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
            wire.peer, wire.engine = f"worker {member[1]} of engine {member[0]}", member[0]
            wire.tell(time.monotonic() + PARTING_SECONDS, never, welcome=True)
            return member
        wire.part(why)
        return ()

    def close(self) -> None:
        """Take nobody any more. Links that were made go on."""
        self._socket.close()


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else -1
