"""Messages between two processes of one host: a unix socket that knows who is at the other end.

Whole messages (`SOCK_SEQPACKET`), file descriptors with them. Sockets are abstract: they
have no file that a killed process would leave, and are seen in one network namespace only.
Whoever is in it may connect, so the kernel is asked for the peer's user, which must be ours
or root.

Every wait has a deadline and asks `cancelled()`. A peer's death ends it at once: by the
socket, or, where a child that was forked from the peer holds that open, by its process id.

Not covered: peers whose process id this process can't see, with such children: the deadline ends those.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from weightsync.errors import Aborted, TransportFailed, WeightSyncError
from weightsync.transport.segment import Descriptor

#: Longest message, bytes; well below what a socket's buffer takes.
MAX_BYTES = 32 << 10
_MAX_DESCRIPTORS = 16
#: How long one wait lasts before cancellation is looked at again, seconds.
_TICK_SECONDS = 0.05

#: How long a last message may take to leave.
PARTING_SECONDS = 0.5
SAME = "Install the same weightsync on both sides"

Cancelled = Callable[[], bool]


def never() -> bool:
    """For who can't be cancelled."""
    return False


class Wire:
    """One connection. Used by one thread at a time; `close` may be called by any.

    Args:
        connected: a SEQPACKET unix socket.
        peer: who is at the other end, in words.

    Raises:
        TransportFailed: the process at the other end is another user's.
    """

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self.peer, self._socket, self._using = peer, connected, threading.Lock()
        self.engine: int | None = None  # where a worker is at the other end
        connected.setblocking(False)
        pid, uid = peer_of(connected)
        if uid not in (os.geteuid(), 0):
            connected.close()
            raise TransportFailed(
                f"{peer} runs as user {uid}, this process as user {os.geteuid()}",
                hint="Run trainer and engines as one user, or set sync.local to off",
            )
        self._process: Descriptor | None = None
        with contextlib.suppress(OSError):  # 0 where that process is in another container
            self._process = Descriptor(os.pidfd_open(pid)) if pid else None

    def send(self, message: bytes, deadline: float, cancelled: Cancelled, descriptors: Sequence[Descriptor] = ()) -> None:
        """Send one message.

        Raises:
            TransportFailed: the peer is gone, or did not take it before the deadline.
            Aborted: `cancelled()` said so.
        """
        numbers = [descriptor.number for descriptor in descriptors]

        def step() -> None:
            if numbers:
                socket.send_fds(self._socket, [message], numbers)
            else:
                self._socket.send(message)

        self._do(step, select.POLLOUT, deadline, cancelled)

    def receive(self, deadline: float, cancelled: Cancelled) -> tuple[bytes, list[Descriptor]]:
        """The next message, and what came with it. Raises as `send`."""
        return self._do(self._receive, select.POLLIN, deadline, cancelled)

    def tell(self, deadline: float, cancelled: Cancelled, descriptors: Sequence[Descriptor] = (), **fields: Any) -> None:
        """Send fields. Raises as `send`."""
        self.send(json.dumps(fields).encode(), deadline, cancelled, descriptors)

    def hear(self, deadline: float, cancelled: Cancelled) -> tuple[dict[str, Any], list[Descriptor]]:
        """The fields that `tell` sent. Raises as `send`."""
        message, descriptors = self.receive(deadline, cancelled)
        try:
            fields = json.loads(message)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise TransportFailed(f"{self.peer} sent something else than a message", hint=SAME)
        return fields, descriptors

    def part(self, why: str, hint: str = "") -> None:
        """Say why, as far as anybody still listens, and leave."""
        with contextlib.suppress(WeightSyncError):
            self.tell(time.monotonic() + PARTING_SECONDS, never, failed=why[:2000], hint=hint[:2000])
        self.close()

    @property
    def gone(self) -> bool:
        """Whether the peer has left; what it had sent before can still be read."""
        with self._using:
            return self._socket.fileno() < 0 or self._look(0, 0)[0]

    def close(self) -> None:
        """Leave. Who waits in another thread is woken and told that the peer is gone."""
        with contextlib.suppress(OSError):  # closing alone tells the peer nothing while a forked child holds the socket
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._using:  # a number that a wait still uses must not become somebody else's
            self._socket.close()

    def _receive(self) -> tuple[bytes, list[Descriptor]]:
        message, numbers, flags, _ = socket.recv_fds(self._socket, MAX_BYTES + 1, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        descriptors = [Descriptor(number) for number in numbers]
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise TransportFailed(f"a message of {self.peer} was cut short", hint="See the limit of open files of both processes")
        if not message:
            raise self.left()
        return message, descriptors

    def _do(self, step: Callable[[], Any], events: int, deadline: float, cancelled: Cancelled) -> Any:
        while True:
            with self._using:
                if self._socket.fileno() < 0:
                    raise self.left()
                with contextlib.suppress(BlockingIOError):
                    return self._try(step)
                left, ready = self._look(events, min(_TICK_SECONDS, max(0.0, deadline - time.monotonic())))
                if ready or left:  # also what it had sent before it left
                    with contextlib.suppress(BlockingIOError):
                        return self._try(step)
                if left:
                    raise self.left()
            if cancelled():
                raise Aborted("the update was aborted while bytes were on their way")
            if time.monotonic() >= deadline:
                raise TransportFailed(f"{self.peer} did not answer before the deadline", hint="It hangs; sync again", engine=self.engine)

    def _try(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BlockingIOError:
            raise
        except OSError as exc:
            raise self.left() from exc

    def _look(self, events: int, seconds: float) -> tuple[bool, bool]:
        """Wait for events; whether the peer has left, and whether there are any."""
        poll = select.poll()
        poll.register(self._socket, events)
        if self._process is not None:
            poll.register(self._process.number, select.POLLIN)
        found = dict(poll.poll(max(1, seconds * 1000) if seconds else 0))
        seen = found.get(self._socket.fileno(), 0)
        died = self._process is not None and self._process.number in found
        return died or bool(seen & (select.POLLHUP | select.POLLERR | select.POLLNVAL)), bool(seen & events)

    def left(self) -> TransportFailed:
        """What to raise when the peer has left."""
        what = f"{self.peer} is gone: it died or left"
        return TransportFailed(what, hint="Sync again: a new connection is made", engine=self.engine)


def closed() -> TransportFailed:
    """What to raise when this side has left."""
    return TransportFailed("the link is closed", hint="Sync again: a new one is made")


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Process id and user id of who is at the other end; the id is 0 where it can't be seen from here."""
    pid, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
