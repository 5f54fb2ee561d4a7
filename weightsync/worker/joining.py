"""A worker's place in the communicator of its fleet, or its link to a trainer on its host.

Joined by the receiving thread, kept between updates, left after a failure.

RPCs and the receiving thread both come here. A thread that an abort has left behind
may still be on its way in when the next update begins; what it joins then is closed again.

Trainer and worker must speak the same protocol, and their torch be of one minor release: gloo is
built into torch and has no version on the wire, and torch lays its keys in the store as it likes.
A build's suffix (`+cpu`, `+cu130`) and its last number may differ. NCCL itself refuses a peer of
another version, with a warning in a log; so the whole number is compared here.

Not covered: who is a member, which the controller decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from weightsync.errors import Aborted, InternalError, ProtocolMismatch
from weightsync.protocol import PROTOCOL_VERSION, BeginOrder, UpdateRequest
from weightsync.transport.channel import Channel
from weightsync.transport.communicator import Communicator
from weightsync.transport.link import Link
from weightsync.transport.rendezvous import engine_of, rank_of


def landing(order: BeginOrder, device: torch.device) -> torch.device:
    """Where buckets arrive: a trainer with CPU tensors reaches an engine on any device over gloo."""
    return device if order.request.transport == "nccl" else torch.device("cpu")


def place(order: BeginOrder, rank: int) -> int | None:
    """The rank in the communicator of the worker that has this rank in its engine; None if it is local.

    Raises:
        InternalError: it is another's, or nobody's: the controller counts other workers than there are.
    """
    info = order.communicator
    wanted = rank_of(order.rank_offset, info.local.get(str(order.engine), ()), rank)
    if wanted is None:
        return None
    if not 0 < wanted < info.world_size or engine_of(info, wanted) != order.engine:
        raise InternalError(
            f"worker {rank} of engine {order.engine} would be rank {wanted} of {info.world_size}, which is not one of its engine: "
            f"the first ranks of engines are {info.members}",
            hint="The engine has another number of workers than it reported",
            update_id=order.request.update_id,
        )
    return wanted


def require_same_versions(request: UpdateRequest) -> None:
    """See that this worker and the trainer can talk.

    Raises:
        ProtocolMismatch: has both versions.
    """
    pairs = [
        ("protocol", str(request.protocol_version), str(PROTOCOL_VERSION)),
        ("torch", _minor(request.torch_version), _minor(str(torch.__version__))),
    ]
    if request.transport == "nccl":
        pairs.append(("NCCL", request.nccl_version, ".".join(map(str, torch.cuda.nccl.version()))))
    if differ := [f"{what} {theirs or 'unknown'}, the engine {ours}" for what, theirs, ours in pairs if theirs != ours]:
        raise ProtocolMismatch(
            f"the trainer has {' and '.join(differ)}",
            hint="Install the same weightsync, and torch of the same minor release and with the same NCCL, on both sides",
            update_id=request.update_id,
        )


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


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
        """Take note of the update that this worker receives now; returns what joins its communicator.

        Raises:
            ProtocolMismatch: trainer and worker can't talk; has both versions.
        """
        require_same_versions(order.request)
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
        rank, seconds = place(order, self._rank), min(order.connect_seconds, request.timeout_seconds)
        if rank is None:
            member = (order.engine, self._rank)
            return Link(info, member, request.socket, request.secret, device, seconds, cancelled=lambda: self._order is not order)
        return Communicator(
            info,
            rank,
            device,
            connect_seconds=seconds,
            operation_seconds=request.timeout_seconds,
            interface=order.interface,
            cancelled=lambda: self._order is not order,
        )

    def _require_current(self, order: BeginOrder) -> None:
        if self._order is not order:
            raise Aborted("the update was aborted before its trainer and workers had met", update_id=order.request.update_id)
