"""A trainer's side of its communicator: links to the workers on its own host, a process group with the others, or one of them.

One packed bucket serves both: it lies in a local worker's own memory, or in a segment out of which
local workers copy, and the process group broadcasts it from there. It is settled when the group has
it, and who copies; `end` returns when everybody has seen everything.

Not covered: who is reached how, which the controller decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.errors import Aborted, TransportFailed
from weightsync.protocol import CommunicatorInfo
from weightsync.transport.channel import Outlet, closed_on_error
from weightsync.transport.communicator import Communicator
from weightsync.transport.ground import Ground
from weightsync.transport.links import Links
from weightsync.transport.local import Listener
from weightsync.transport.packing import BucketPlan
from weightsync.transport.wire import Cancelled, never


class FanOut(Outlet):
    """See the module.

    Args:
        info: what was agreed on.
        device: where the trainer's buckets lie.
        links: to local workers.
        group: with the others, if there are any.
    """

    def __init__(self, info: CommunicatorInfo, device: torch.device, links: Links, group: Communicator | None) -> None:
        self.info, self._links, self._group = info, links, group
        if group is not None:
            links.before_letting_go = group.close
        # Digests go to local workers as messages.
        self.device = torch.device("cpu") if group is None else device

    @property
    def open(self) -> bool:
        return self._links.open and (self._group is None or self._group.open)

    def ground(self, plan: BucketPlan, deadline: float, cancelled: Cancelled = never) -> Ground:
        """Memory that workers share with this process: what is packed there is not copied again to be sent to the first of them."""
        return self._links.ground(plan, deadline, cancelled)

    def end(self, deadline: float, cancelled: Cancelled = never) -> None:
        """Wait until local workers have seen all of the update, and hold nothing of theirs any more."""
        self._links.end(deadline, cancelled)

    def post(self, tensors: Sequence[torch.Tensor], deadline: float, cancelled: Cancelled = never) -> tuple[list[int | None], Any]:
        with closed_on_error(self):
            numbers = [self._links.post(tensor, deadline, cancelled) for tensor in tensors]
            return numbers, None if self._group is None else self._group.post(tensors, deadline, cancelled)

    def settle(self, posted: tuple[list[int | None], Any], deadline: float, cancelled: Cancelled = never) -> None:
        numbers, others = posted
        with closed_on_error(self):
            if self._group is not None:
                try:
                    self._group.settle(others, deadline, lambda: cancelled() or self._links.gone)
                except Aborted:
                    if cancelled():
                        raise
                    raise self._links.blame() from None
            for number in numbers:
                self._links.settle(number, deadline, cancelled)

    def close(self) -> None:
        self._links.close()  # and, before they let go of what it sends, the group


def join(
    info: CommunicatorInfo,
    device: torch.device,
    listener: Listener | None,
    connect_seconds: float,
    operation_seconds: float,
    interface: str = "",
    cancelled: Cancelled = never,
) -> Outlet:
    """Join a communicator as its trainer. Arguments as for `Communicator`.

    Args:
        listener: where local workers come to.

    Raises:
        TransportFailed, ConfigError: as `Communicator`; or a local worker did not come.
        Aborted: `cancelled()` said so.
    """
    if not info.local:
        return Communicator(info, 0, device, connect_seconds, operation_seconds, interface, cancelled)
    if listener is None:
        raise TransportFailed("workers of this host are to be reached by shared memory, and this trainer opened no local socket for them")
    members = [(int(engine), worker) for engine, workers in info.local.items() for worker in workers]
    links = listener.accept(info.generation, members, device, time.monotonic() + connect_seconds, cancelled)
    try:
        alone = info.world_size == 1
        group = None if alone else Communicator(info, 0, device, connect_seconds, operation_seconds, interface, cancelled)
    except BaseException:
        links.close()
        raise
    return FanOut(info, device, links, group)
