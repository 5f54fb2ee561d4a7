"""A trainer's side of its communicator: links to the workers on its own host, a process group with the others, or one of them.

One packed bucket serves both: it lies in a shared segment, local workers copy it while the
process group broadcasts it, and a broadcast returns when everybody has it.

Not covered: who is reached how, which the controller decides.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from weightsync.errors import Aborted, TransportFailed
from weightsync.protocol import CommunicatorInfo
from weightsync.transport.communicator import Communicator
from weightsync.transport.local import Links, Listener
from weightsync.transport.wire import Cancelled, never


class Channel(Protocol):
    """What sender and receiver need: a `Communicator`, a `FanOut`, or a worker's `Link`."""

    info: CommunicatorInfo
    device: torch.device

    @property
    def open(self) -> bool: ...

    def buffers(self, count: int, nbytes: int) -> list[torch.Tensor]: ...

    def broadcast(self, tensor: torch.Tensor, deadline: float, cancelled: Cancelled = ...) -> None: ...

    def close(self) -> None: ...


class FanOut:
    """See the module.

    Args:
        info: what was agreed on.
        device: where the trainer's buckets lie.
        links: to local workers.
        group: with the others, if there are any.
    """

    def __init__(self, info: CommunicatorInfo, device: torch.device, links: Links, group: Communicator | None) -> None:
        self.info, self.device, self._links, self._group = info, device, links, group

    @property
    def open(self) -> bool:
        """Whether it can still broadcast."""
        return self._links.open and (self._group is None or self._group.open)

    def buffers(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """Shared segments to pack buckets into: what lies there is not copied again to be sent."""
        return self._links.buffers(count, nbytes)

    def broadcast(self, tensor: torch.Tensor, deadline: float, cancelled: Cancelled = never) -> None:
        """As `Communicator.broadcast`. Whatever it raises, links and group are closed."""
        try:
            number = self._links.post(tensor, deadline, cancelled)
            if self._group is not None:
                try:
                    self._group.broadcast(tensor, deadline, lambda: cancelled() or self._links.gone)
                except Aborted:
                    if cancelled():
                        raise
                    raise self._links.blame() from None
            self._links.settle(number, deadline, cancelled)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave; can be called twice."""
        self._links.close()
        if self._group is not None:
            self._group.close()


def join(
    info: CommunicatorInfo,
    device: torch.device,
    listener: Listener | None,
    connect_seconds: float,
    operation_seconds: float,
    interface: str = "",
    cancelled: Cancelled = never,
) -> Channel:
    """Join a communicator as its trainer. Arguments as for `Communicator`.

    Args:
        listener: where local workers come to.

    Raises:
        TransportFailed, ConfigError: as `Communicator`; or a local worker did not come.
        Aborted: `cancelled()` said so.
    """
    if not info.local:
        return Communicator(info, 0, device, connect_seconds, operation_seconds, interface)
    if listener is None:
        raise TransportFailed("workers of this host are to be reached by shared memory, and this trainer opened no local socket for them")
    members = [(int(engine), worker) for engine, workers in info.local.items() for worker in workers]
    links = listener.accept(info.generation, members, device, time.monotonic() + connect_seconds, cancelled)
    try:
        alone = info.world_size == 1
        group = None if alone else Communicator(info, 0, device, connect_seconds, operation_seconds, interface)
    except BaseException:
        links.close()
        raise
    return FanOut(info, device, links, group)
