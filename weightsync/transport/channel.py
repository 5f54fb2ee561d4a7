"""What an update's bytes go through: what a worker needs of it, and what a trainer or an engine that hands on what it keeps.

Not covered: how a channel is made, and what a worker says when an update begins and ends, which are matters of its kind.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from weightsync.protocol import CommunicatorInfo
from weightsync.transport.ground import Ground
from weightsync.transport.packing import BucketPlan
from weightsync.transport.wire import Cancelled, never


class Channel(ABC):
    """From one trainer to its workers, in one order.

    Attributes:
        info: what was agreed on.
        device: where small things that are sent lie, and buckets of a `Communicator`.
    """

    info: CommunicatorInfo
    device: torch.device

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether it can still be used."""

    @abstractmethod
    def post(self, tensors: Sequence[torch.Tensor], deadline: float, cancelled: Cancelled = never) -> Any:
        """Begin to send from the trainer into everybody's tensors, in order and behind what was posted before.

        Args:
            tensors: contiguous, equal shapes and dtypes everywhere; not to be touched before `settle`.
            deadline: `time.monotonic()` value after which it is given up.
            cancelled: asked about every 50 ms.

        Returns:
            What `settle` is given.

        Raises:
            TransportFailed: a peer is gone, or the deadline passed. The channel is closed.
            Aborted: `cancelled()` said so. The channel is closed.
        """

    @abstractmethod
    def settle(self, posted: Any, deadline: float, cancelled: Cancelled = never) -> None:
        """Wait until everybody has what was posted; in the order of posting. Arguments and errors as of `post`."""

    def broadcast(self, tensor: torch.Tensor, deadline: float, cancelled: Cancelled = never) -> None:
        """One tensor, to its end."""
        self.settle(self.post([tensor], deadline, cancelled), deadline, cancelled)

    @abstractmethod
    def close(self) -> None:
        """Leave. Can be called twice, and by any thread."""


class Outlet(Channel):
    """A trainer's end. An update is `ground`, what is packed there and posted, `end`."""

    @abstractmethod
    def ground(self, plan: BucketPlan, deadline: float, cancelled: Cancelled = never) -> Ground:
        """Begin an update: memory to pack its buckets into, uninitialised. Arguments and errors as of `post`."""

    @abstractmethod
    def end(self, deadline: float, cancelled: Cancelled = never) -> None:
        """End it: wait until everybody has seen all of it. Arguments and errors as of `post`."""


def send_all(
    channel: Channel,
    posts: Iterable[Sequence[torch.Tensor]],
    deadline: float,
    cancelled: Cancelled = never,
    arrived: Callable[[int], None] = lambda number: None,
) -> None:
    """Post one behind the other, so that the transport need not wait for us between them.

    Args:
        posts: each is asked for when all but the one before it are there.
        arrived: called with the number of each that is there.

    Raises:
        TransportFailed, Aborted: as `Channel.post`.
    """
    before: Any = None
    number = -1
    for number, tensors in enumerate(posts):
        posted = channel.post(tensors, deadline, cancelled)
        if number:
            channel.settle(before, deadline, cancelled)
            arrived(number - 1)
        before = posted
    if number >= 0:
        channel.settle(before, deadline, cancelled)
        arrived(number)


@contextlib.contextmanager
def closed_on_error(end: Any) -> Iterator[None]:
    """Whatever is raised inside, `end.close()` is called first."""
    try:
        yield
    except BaseException:
        end.close()
        raise


def parts(bucket: torch.Tensor, digests: torch.Tensor) -> list[torch.Tensor]:
    """What is posted of a bucket: its bytes, and behind them the digests of the tensors that it completes; neither where it is empty."""
    return [tensor for tensor in (bucket, digests) if tensor.numel()]
