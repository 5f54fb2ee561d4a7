"""What joins a trainer to its workers, from update to update.

Not covered: what goes over it (`sender`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch

from weightsync.errors import Aborted, TransportFailed
from weightsync.protocol import CommunicatorInfo
from weightsync.transport.channel import Channel, Outlet
from weightsync.transport.fanout import join
from weightsync.transport.local import Listener

_CONNECT_SECONDS = 30.0


class Joined:
    """The channel of a trainer, kept while the service names the same.

    Args:
        operation_seconds: upper bound of one broadcast, a backstop behind the caller's deadlines.
        interface: network interface for gloo; when empty the one that leads to the service's store.
    """

    def __init__(self, operation_seconds: float, interface: str) -> None:
        self._operation, self._interface = max(operation_seconds, _CONNECT_SECONDS), interface
        self._channel: Outlet | None = None
        self._lock = threading.Lock()  # a thread that sends may outlive its update
        self._listener: Listener | None = None

    def listener(self) -> Listener | None:
        """Where workers of this host come to; None where the system has no such sockets: they are reached as others are."""
        if self._listener is None:
            with contextlib.suppress(TransportFailed):
                self._listener = Listener()
        return self._listener

    def connect(self, info: CommunicatorInfo, device: torch.device, deadline: float, cancelled: Callable[[], bool]) -> Outlet:
        """The channel that the service names, made if need be before `deadline`, a `time.monotonic()` value."""
        held = self._channel
        if held is not None and held.open and held.info == info:
            return held
        self.leave()
        seconds = min(_CONNECT_SECONDS, max(0.1, deadline - time.monotonic()))
        made = join(info, device, self._listener, seconds, self._operation, self._interface, cancelled=cancelled)
        with self._lock:
            if current := not cancelled():
                self._channel = made
        if not current:  # given up meanwhile: whoever did so had nothing to close
            made.close()
            raise Aborted("the update was given up before trainer and workers had met")
        return made

    def leave(self, channel: Channel | None = None) -> None:
        """Close the channel, or this one of an earlier update; the next update makes another."""
        with self._lock:
            held = channel or self._channel
            if held is self._channel:
                self._channel = None
        if held is not None:
            held.close()

    def close(self) -> None:
        self.leave()
        if self._listener is not None:
            self._listener.close()
