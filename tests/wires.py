"""A broadcast from a trainer to one worker inside a process, for tests of what stands around it.

Not covered: how real broadcasts fail (the tests of the communicator have that).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weightsync.client.sender import Sender
from weightsync.client.source import Offer, offer
from weightsync.errors import Aborted, TransportFailed
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.transport.channel import Outlet
from weightsync.transport.ground import Ground, in_turns, turns_of
from weightsync.transport.packing import BucketPlan, plan_buckets
from weightsync.transport.wire import never
from weightsync.worker.receiver import Receiver

CPU = torch.device("cpu")
INFO = CommunicatorInfo("127.0.0.1", 1, 1, 2, {"0": 1}, "gloo")


class Wire(Outlet):
    """One end: rank 0 puts in what the other takes out, when it settles what it posted. `before` is called with a tensor when its
    turn comes: at the trainer's when it is about to travel, at the worker's when it is about to be written.

    Args:
        through: what the two ends share.
        rank: 0 for the trainer.
        device: where the tensors live.
    """

    open, info = True, INFO  # type: ignore[assignment]

    def __init__(self, through: queue.Queue[torch.Tensor], rank: int, device: torch.device = CPU) -> None:
        self._through, self._rank, self.device = through, rank, device
        self.before: Callable[[torch.Tensor], None] = lambda tensor: None

    def ground(self, plan: BucketPlan, deadline: float, cancelled: Callable[[], bool] = never) -> Ground:
        count, nbytes = turns_of(plan)
        return in_turns([torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)])

    def end(self, deadline: float, cancelled: Callable[[], bool] = never) -> None:
        """What is settled is over."""

    def post(self, tensors: Sequence[torch.Tensor], deadline: float, cancelled: Callable[[], bool] = never) -> Sequence[torch.Tensor]:
        for tensor in tensors if self._rank else ():
            self.before(tensor)
        return tensors

    def settle(self, posted: Sequence[torch.Tensor], deadline: float, cancelled: Callable[[], bool] = never) -> None:
        for tensor in posted:
            self.travel(tensor, deadline, cancelled)

    def travel(self, tensor: torch.Tensor, deadline: float, cancelled: Callable[[], bool]) -> None:
        """One tensor, on this end."""
        if self._rank == 0:
            self.before(tensor)
            self._through.put(tensor.to("cpu", copy=True))
            return
        while True:
            if cancelled():
                raise Aborted("the update was aborted while bytes were on their way")
            if time.monotonic() > deadline:
                raise TransportFailed("the broadcast did not finish before its deadline")
            try:
                tensor.copy_(self._through.get(timeout=0.02))
            except queue.Empty:
                continue
            return

    def close(self) -> None:
        """The queue has no other end to tell."""


def order_of(offered: Offer, bucket_bytes: int, stage: str = "host", seconds: float = 20.0, **more: Any) -> BeginOrder:
    plan = plan_buckets(offered.manifest, bucket_bytes)
    request = UpdateRequest("u-1", "t", 1, offered.manifest, plan.bucket_bytes, plan.hash, seconds, "gloo", torch.__version__, **more)
    return BeginOrder(request, INFO, 0, 1, 5.0, stage=stage)


class Ends:
    """A sender and a receiver with a wire between them. `send` and `receive` may be called in any order."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor] | Offer, bucket_bytes: int, stage: str = "host", kind: type[Sender] = Sender, **how: Any
    ) -> None:
        self.offer = tensors if isinstance(tensors, Offer) else offer(tensors)
        self.plan = plan_buckets(self.offer.manifest, bucket_bytes)
        self.order = order_of(self.offer, bucket_bytes, stage, **({"allow_nonfinite": True} | how))
        through: queue.Queue[torch.Tensor] = queue.Queue()
        self.trainer, self.worker = Wire(through, 0, self.offer.device), Wire(through, 1)
        self.sender = kind(self.offer, self.plan, None)
        self.read = threading.Event()

    def send(self, seconds: float = 20.0, cancelled: Callable[[], bool] = lambda: False) -> None:
        self.sender.send(self.trainer, time.monotonic() + seconds, cancelled, self.read.set)  # type: ignore[arg-type]

    def receive(self, device: torch.device = CPU) -> Receiver:
        """Starts it."""
        self.receiver = Receiver(self.order, 0, device, CPU, lambda: self.worker)  # type: ignore[arg-type, return-value]
        self.receiver.start()
        return self.receiver

    def arrived(self) -> list[torch.Tensor]:
        """What the receiver has, in the manifest's order, when it has ended; without staging, taken as a loader does meanwhile."""
        receiver, count = self.receiver, len(self.offer.manifest.tensors)
        into = receiver.held()
        taken = [into.take(index) for index in range(count)] if self.order.stage == "none" else None  # type: ignore[union-attr]
        receiver._thread.join(20)
        assert receiver.error is None and receiver.ready, receiver.error
        return taken if taken is not None else [into.tensor(index) for index in range(count)]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    flat = want.clone(memory_format=torch.contiguous_format).reshape(-1)
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return not flat.numel() or torch.equal(got.reshape(-1).view(torch.uint8).cpu(), flat.view(torch.uint8).cpu())


def threads() -> list[str]:
    """Threads of an update that are alive."""
    return sorted(one.name for one in threading.enumerate() if one.name.startswith(("weightsync-pack", "weightsync-check")))
