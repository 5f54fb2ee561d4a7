"""A worker's place in the communicator of its fleet, or its link to a trainer on its host.

Joined by the receiving thread, kept between updates, left after a failure.

RPCs and the receiving thread both come here. A thread that an abort has left behind
may still be on its way in when the next update begins; what it joins then is closed again.

Not covered: who is a member, which the controller decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from weightsync.errors import Aborted
from weightsync.protocol import BeginOrder
from weightsync.transport.communicator import Communicator
from weightsync.transport.fanout import Channel
from weightsync.transport.link import Link
from weightsync.transport.rendezvous import rank_of


def landing(order: BeginOrder, device: torch.device) -> torch.device:
    """Where buckets arrive: a trainer with CPU tensors reaches an engine on any device over gloo."""
    return device if order.request.transport == "nccl" else torch.device("cpu")


class Joining:
    """How one worker is reached by its trainer.

    Args:
        device: the worker's.
        rank: this worker's rank within its engine.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._lock = threading.Lock()
        self._order: BeginOrder | None = None
        self._channel: Channel | None = None

    def begin(self, order: BeginOrder) -> Callable[[], Channel]:
        """Take note of the update that this worker receives now; returns what joins its communicator."""
        with self._lock:
            self._order = order
        return lambda: self._connect(order)

    def end(self, order: BeginOrder) -> None:
        """That update is over: a thread that still joins for it does so in vain."""
        with self._lock:
            if self._order is order:
                self._order = None

    def leave(self) -> None:
        """Close what is held: the stream may stand in the middle of an update, so everybody meets anew."""
        with self._lock:
            held, self._channel = self._channel, None
        if held is not None:
            held.close()

    def _connect(self, order: BeginOrder) -> Channel:
        """The communicator, or the link, of this generation. Runs in the receiving thread.

        Raises:
            Aborted: the update ended meanwhile.
            TransportFailed: see `Communicator` and `Link`.
        """
        self._require_current(order)
        held = self._channel
        if held is not None and held.open and held.info == order.communicator:
            return held
        if held is not None:
            held.close()
        made = self._make(order)
        with self._lock:
            current = self._order is order
            if current:
                self._channel = made
        if not current:  # this took so long that a later update may have its own by now
            made.close()
        self._require_current(order)
        return made

    def _make(self, order: BeginOrder) -> Channel:
        info, request, device = order.communicator, order.request, landing(order, self._device)
        rank = rank_of(order.rank_offset, info.local.get(str(order.engine), ()), self._rank)
        if rank is None:
            member = (order.engine, self._rank)
            return Link(
                info, member, request.socket, request.secret, device, order.connect_seconds, cancelled=lambda: self._order is not order
            )
        return Communicator(
            info,
            rank,
            device,
            connect_seconds=order.connect_seconds,
            operation_seconds=request.timeout_seconds,
            interface=order.interface,
        )

    def _require_current(self, order: BeginOrder) -> None:
        if self._order is not order:
            raise Aborted("the update was aborted before its trainer and workers had met", update_id=order.request.update_id)
