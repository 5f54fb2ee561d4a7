"""A trainer's side of its communicator: links to the workers on its own host, a process group with the others, or one of them.

One packed bucket serves both: it lies in a local worker's own memory, or in a segment out of which
local workers copy, and the process group broadcasts it from there. A broadcast returns when the
group has it, and who copies; `end` when everybody has seen everything.

Not covered: who is reached how, which the controller decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

import torch

from weightsync.errors import Aborted, TransportFailed
from weightsync.protocol import CommunicatorInfo
from weightsync.transport.communicator import Communicator
from weightsync.transport.ground import Ground
from weightsync.transport.links import Links
from weightsync.transport.local import Listener
from weightsync.transport.packing import BucketPlan
from weightsync.transport.wire import Cancelled, never


class Channel(Protocol):
    """What a receiver needs: a `Communicator`, or a worker's `Link`.

    Attributes:
        device: where small things that are broadcast lie, and buckets of a `Communicator`.
    """

    info: CommunicatorInfo
    device: torch.device

    @property
    def open(self) -> bool: ...

    def broadcast(self, tensor: torch.Tensor, deadline: float, cancelled: Cancelled = ...) -> None: ...

    def close(self) -> None: ...


class Outlet(Channel, Protocol):
    """What a sender needs: a `Communicator`, or a `FanOut`. An update is `ground`, broadcasts of what is packed there, `end`."""

    def ground(self, plan: BucketPlan, deadline: float, cancelled: Cancelled = ...) -> Ground: ...

    def end(self, deadline: float, cancelled: Cancelled = ...) -> None: ...


class FanOut:
    """See the module.

    Args:
        info: what was agreed on.
        device: where the trainer's buckets lie.
        links: to local workers.
        group: with the others, if there are any.
    """

    def __init__(self, info: CommunicatorInfo, device: torch.device, links: Links, group: Communicator | None) -> None:
        self.info, self._links, self._group = info, links, group
        # Digests go to local workers as messages.
        self.device = torch.device("cpu") if group is None else device

    @property
    def open(self) -> bool:
        """Whether it can still broadcast."""
        return self._links.open and (self._group is None or self._group.open)

    def ground(self, plan: BucketPlan, deadline: float, cancelled: Cancelled = never) -> Ground:
        """Memory that workers share with this process: what is packed there is not copied again to be sent to the first of them.

        Raises:
            TransportFailed, Aborted: see `Links.ground`; links and group are closed.
        """
        with self._closing():
            return self._links.ground(plan, deadline, cancelled)

    def end(self, deadline: float, cancelled: Cancelled = never) -> None:
        """Wait until local workers have seen all of the update, and hold nothing of theirs any more. Raises as `ground`."""
        with self._closing():
            self._links.end(deadline, cancelled)

    def broadcast(self, tensor: torch.Tensor, deadline: float, cancelled: Cancelled = never) -> None:
        """As `Communicator.broadcast`. Whatever it raises, links and group are closed."""
        with self._closing():
            number = self._links.post(tensor, deadline, cancelled)
            if self._group is not None:
                try:
                    self._group.broadcast(tensor, deadline, lambda: cancelled() or self._links.gone)
                except Aborted:
                    if cancelled():
                        raise
                    raise self._links.blame() from None
            self._links.settle(number, deadline, cancelled)

    def close(self) -> None:
        """Leave; can be called twice."""
        self._links.close()
        if self._group is not None:
            self._group.close()

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


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
