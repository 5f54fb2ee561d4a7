"""One trainer and its workers, joined for broadcasts from rank 0.

torch.distributed process groups, outside the default group (whatever the
trainer does with its own groups is left alone): gloo for CPU tensors, NCCL for
CUDA tensors, by the same code. Deadlines are ours: a broadcast that does not
finish in time, or that is cancelled, raises, and the communicator is finished;
the process lives on. Nothing here waits without a deadline.

A gloo operation can't be interrupted from outside. But when the application's own wait for
one operation times out, gloo ends all others of that group: so whoever leaves posts a
receive that nobody answers, and the memory and the thread of what was on its way come back
at once. Nor does gloo tell an operation that its peer died in the middle of a message; the
connections are probed for that, which also tells who it was. NCCL has nothing to probe: there every member
gives signs of life in the store (`pulse`).

Making a group is left to a thread of its own: where the store's process hangs, torch's
client waits for ever. A thread that was left closes what it made too late.

Not covered: a peer that hangs but stays connected, under NCCL one that hangs there, is noticed at the deadline
only, and only whoever asks the others (the controller) can tell which.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import Aborted, ConfigError, TransportFailed
from weightsync.protocol import CommunicatorInfo
from weightsync.transport import network
from weightsync.transport.channel import Outlet
from weightsync.transport.ground import Ground, in_turns, turns_of
from weightsync.transport.memory import huge_pages
from weightsync.transport.packing import BucketPlan
from weightsync.transport.pulse import SILENCE, Pulse
from weightsync.transport.rendezvous import engine_of, join_store, named
from weightsync.transport.wire import Cancelled, never

#: How long one wait lasts before cancellation is looked at again, seconds.
_TICK_SECONDS = 0.05
#: How often a wait looks for peers that are gone, seconds.
_PROBE_SECONDS = 0.25
#: How long leaving waits for the group's threads.
_CLOSE_SECONDS = 1.0
#: What torch adds to the deadline of a rendezvous before it says why it failed.
_GRACE_SECONDS = 1.0
#: How long the store is asked who has come, when not everybody has.
_ASK_SECONDS = 1.0
_PROBE_TAG, _LEAVE_TAG = 1, 2
#: Transports that do not tell when a peer dies.
_PULSED = ("nccl",)


class Communicator(Outlet):
    """A process group of the trainer (rank 0) and every worker.

    Args:
        info: where to meet, and as how many.
        rank: this process's rank.
        device: where the broadcast tensors live.
        connect_seconds: deadline of the rendezvous.
        operation_seconds: upper bound of one broadcast, a backstop behind the caller's deadlines.
        interface: network interface for gloo; when empty the one that leads to the store.
        cancelled: asked about every 50 ms while it joins.

    Raises:
        TransportFailed: not everybody came in time; names who did not, as far as the store knows.
        Aborted: `cancelled()` said so.
        ConfigError: this torch can't do the transport, or there is no such interface.
    """

    def __init__(
        self,
        info: CommunicatorInfo,
        rank: int,
        device: torch.device,
        connect_seconds: float,
        operation_seconds: float,
        interface: str = "",
        cancelled: Cancelled = never,
    ) -> None:
        self.info = info
        self.rank = rank
        self.device = device
        if info.transport == "gloo":
            network.require_interface(interface)
        until = time.monotonic() + connect_seconds
        store = _in_time(lambda: join_store(info, connect_seconds), connect_seconds, cancelled, lambda _: None)
        if store is None:
            raise TransportFailed(
                f"the rendezvous store at {network.shown(info.host, info.port)} took a connection and did not answer within "
                f"{connect_seconds:.0f} s",
                hint="The controller hangs; see its log, and sync again",
            )
        left = max(0.1, until - time.monotonic())

        def make() -> Any:
            return _new_group(info, store, rank, device, left, operation_seconds, interface)

        self._group: Any = None
        why = f"no answer within {connect_seconds:.0f} s"
        try:
            self._group = _in_time(make, left + _GRACE_SECONDS, cancelled, lambda late: _dismiss([late]))
        except RuntimeError as exc:
            why = _first_line(exc)
        if self._group is None:
            absent = _in_time(lambda: _absent(info, store), _ASK_SECONDS, cancelled, lambda _: None)
            raise TransportFailed(
                f"rank {rank} of {info.world_size} (generation {info.generation}) could not join from {network.way_to(info.host)}: "
                + (f"{named(info, absent)} did not come; " if absent else "")
                + why,
                hint="Sync again: a new generation is made",
            )
        # Workers wait for the trainer, and it for all of them.
        watched = [0] if rank else range(1, info.world_size)
        self._pulse = Pulse(store, rank, watched) if info.transport in _PULSED else None

    @property
    def open(self) -> bool:
        return self._group is not None

    def ground(self, plan: BucketPlan, deadline: float, cancelled: Cancelled = never) -> Ground:
        count, nbytes = turns_of(plan)
        return in_turns([huge_pages(torch.empty(nbytes, dtype=torch.uint8, device=self.device)) for _ in range(count)])

    def end(self, deadline: float, cancelled: Cancelled = never) -> None:
        """Nothing is left to wait for: what is settled is there."""

    def post(self, tensors: Sequence[torch.Tensor], deadline: float, cancelled: Cancelled = never) -> list[Any]:
        with self._leaving(deadline) as group:
            return [group.broadcast([tensor], self._options(deadline)) for tensor in tensors]

    def settle(self, posted: list[Any], deadline: float, cancelled: Cancelled = never) -> None:
        with self._leaving(deadline):
            for work in posted:
                self._wait(work, deadline, cancelled)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

    def _options(self, deadline: float) -> dist.BroadcastOptions:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        if self.device.type == "cpu":
            # Ends a gloo operation that was left; a little later, so that `_wait` is the one to say why.
            options.timeout = timedelta(seconds=max(0.0, deadline - time.monotonic()) + 0.1)
        return options

    @contextlib.contextmanager
    def _leaving(self, deadline: float) -> Iterator[Any]:
        """The group; it is left on any error, which says what happened."""
        if self._group is None:
            raise _closed()
        try:
            yield self._group
        except (TransportFailed, Aborted):
            self._leave()
            raise
        except RuntimeError as exc:
            if self._group is None:  # another thread has left, which ends what is under way
                raise _closed() from exc
            late = time.monotonic() >= deadline  # then gloo itself has closed every connection
            gone = [] if late else self._gone()
            self._leave()
            if gone:
                raise self._lost(gone) from exc
            if late:
                raise _too_late(self.rank) from exc
            raise TransportFailed(f"broadcast failed: {_first_line(exc)}", hint="A peer died or left; sync again") from exc

    def _wait(self, work: Any, deadline: float, cancelled: Cancelled) -> None:
        probe_at = time.monotonic() + _PROBE_SECONDS
        while not work.is_completed():
            if cancelled():
                raise Aborted("the update was aborted while bytes were on their way")
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                raise _too_late(self.rank)
            if self._pulse is not None and (silent := self._pulse.silent()):
                raise self._lost(silent, f"gave no sign of life for {SILENCE:.0f} s while bytes were on their way")
            if self.device.type == "cpu":
                # A timed-out wait leaves a gloo operation as it was; a failed one completes it.
                # torch counts whole milliseconds and takes 0 for no timeout at all.
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=max(0.001, min(_TICK_SECONDS, left))))
                if now >= probe_at:
                    self._probe()
                    probe_at = now + _PROBE_SECONDS
            else:
                time.sleep(min(0.0002, left))
        work.wait()  # raises what went wrong, and orders the current CUDA stream behind the broadcast

    def _probe(self) -> None:
        """Raise TransportFailed when gloo peers' connections are broken."""
        if gone := self._gone():
            raise self._lost(gone)

    def _gone(self) -> list[int]:
        """Ranks whose connection to this one is broken, as far as the transport can tell."""
        # A receive that nobody answers costs nothing, and posting it fails on a broken connection.
        gone, group = [], self._group
        for peer in range(self.info.world_size) if self.device.type == "cpu" and group is not None else ():
            if peer != self.rank:
                try:
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _PROBE_TAG)
                except RuntimeError:
                    gone.append(peer)
        return gone

    def _lost(self, gone: list[int], how: str = "died or left while bytes were on their way") -> TransportFailed:
        what = f"{named(self.info, gone)} {how}"
        engines = {engine_of(self.info, rank) for rank in gone}  # several ranks may be workers of one
        return TransportFailed(what, hint="Sync again", engine=engines.pop() if len(engines) == 1 else None)

    def close(self) -> None:
        """Leave; waits a moment for the group's threads to end."""
        self._leave()

    def _leave(self) -> None:
        holder, self._group = [self._group], None
        if holder[0] is None:
            return
        if self._pulse is not None:
            self._pulse.stop()
        if self.device.type == "cpu":
            for peer in range(self.info.world_size):
                if peer != self.rank:
                    _interrupt(holder[0], peer)
        _dismiss(holder)


def _closed() -> TransportFailed:
    return TransportFailed("the communicator is closed", hint="Sync again: a new one is made")


def _too_late(rank: int) -> TransportFailed:
    what = "the broadcast" if rank == 0 else "the broadcast of the trainer (rank 0)"
    return TransportFailed(f"{what} did not finish before its deadline", hint="A peer hangs; sync again")


def _interrupt(group: Any, peer: int) -> None:
    """End what a gloo group waits for and close its connections, by a receive that nobody answers; a broken connection does not serve."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _LEAVE_TAG).wait(timedelta(milliseconds=1))


def _dismiss(holder: list[Any]) -> None:
    """Destroy the group that this list alone refers to."""

    def end() -> None:
        if hasattr(holder[0], "abort"):
            with contextlib.suppress(RuntimeError):
                holder[0].abort()
        holder.clear()

    # NCCL's abort waits for the device, and destroying a group joins its threads. A process that ends in the middle of
    # that aborts, so it is waited for.
    thread = threading.Thread(target=end, name="weightsync-close", daemon=True)
    thread.start()
    thread.join(_CLOSE_SECONDS)


def _in_time(make: Callable[[], Any], seconds: float, cancelled: Cancelled, too_late: Callable[[Any], None]) -> Any:
    """What `make` returns or raises, run in a thread of its own; None when it has not ended in time.

    Raises:
        Aborted: `cancelled()` said so. As behind the deadline, what comes after goes to `too_late`.
    """
    answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    lock, left = threading.Lock(), threading.Event()

    def run() -> None:
        made, raised = None, None
        try:
            made = make()
        except BaseException as exc:
            raised = exc
        with lock:
            if not left.is_set():
                answer.put((made, raised))
                return
        if made is not None:
            too_late(made)

    threading.Thread(target=run, name="weightsync-join", daemon=True).start()
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(queue.Empty):
            made, raised = answer.get(timeout=_TICK_SECONDS)
            if raised is not None:
                raise raised
            return made
        aborted = cancelled()
        if aborted or time.monotonic() > until:
            with lock:
                left.set()
            if answer.empty():
                if aborted:
                    raise Aborted("the update was aborted before its trainer and workers had met")
                return None


def _absent(info: CommunicatorInfo, store: dist.Store) -> list[int]:
    """Ranks that have not come to the store."""
    return [rank for rank in range(info.world_size) if not store.check([f"here/{rank}"])]


def _new_group(
    info: CommunicatorInfo,
    store: dist.Store,
    rank: int,
    device: torch.device,
    connect_seconds: float,
    operation_seconds: float,
    interface: str,
) -> Any:
    store.set(f"here/{rank}", "")
    if info.transport == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=connect_seconds)
        options._threads = 1
        # torch's own choice is the address that this machine's name has, which many hosts files give as 127.0.0.1.
        here = {"interface": interface} if interface else {"hostname": network.address_to(info.host) or info.host}
        options._devices = [dist.ProcessGroupGloo.create_device(**here)]
        group: Any = dist.ProcessGroupGloo(store, rank, info.world_size, options)
        group.set_timeout(timedelta(seconds=operation_seconds))
        return group
    if not hasattr(dist, "ProcessGroupNCCL") or device.type != "cuda":
        raise ConfigError("transport nccl needs CUDA tensors and a torch with NCCL", hint="Use gloo, or move the tensors to a GPU")
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = timedelta(seconds=max(connect_seconds, operation_seconds))
    with torch.cuda.device(device), _no_watchdog():
        group = dist.ProcessGroupNCCL(store, rank, info.world_size, nccl_options)
        if hasattr(group, "eager_connect_single_device"):
            group.eager_connect_single_device(device)
    return group


@contextlib.contextmanager
def _no_watchdog() -> Iterator[None]:
    """Make NCCL groups whose watchdog does not end this process: deadlines are ours, and the engine lives on.

    torch reads these when a group is made; the trainer's own groups keep what it set.
    """
    ours = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    before = {key: os.environ.get(key) for key in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().splitlines()[0][:300] if str(exc).strip() else type(exc).__name__
