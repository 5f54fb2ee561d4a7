"""One trainer and its workers, joined for broadcasts from rank 0.

torch.distributed process groups, outside the default group (whatever the
trainer does with its own groups is left alone): gloo for CPU tensors, NCCL for
CUDA tensors, by the same code. Deadlines are ours: a broadcast that does not
finish in time, or that is cancelled, raises, and the communicator is finished;
the process lives on. Nothing here waits without a deadline.

A gloo operation can't be interrupted from outside, only left: its thread stays
behind until its own deadline passes, and is collected in the background. Nor does
gloo tell an operation that its peer died in the middle of a message; the
connections are probed for that.

Not covered: a peer that hangs but stays connected is noticed at the deadline only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import Aborted, ConfigError, TransportFailed
from weightsync.protocol import CommunicatorInfo
from weightsync.transport.memory import huge_pages
from weightsync.transport.rendezvous import join_store

#: How long one wait lasts before cancellation is looked at again, seconds.
_TICK_SECONDS = 0.05
#: How often a wait looks for peers that are gone, seconds.
_PROBE_SECONDS = 0.25
#: How long leaving waits for the group's threads: an idle group's, and those of an operation that was left.
_CLOSE_SECONDS = 1.0
_LEAVE_SECONDS = 0.2
_PROBE_TAG = 1


class Communicator:
    """A process group of the trainer (rank 0) and every worker.

    Args:
        info: where to meet, and as how many.
        rank: this process's rank.
        device: where the broadcast tensors live.
        connect_seconds: deadline of the rendezvous.
        operation_seconds: upper bound of one broadcast, a backstop behind the caller's deadlines.
        interface: network interface for gloo; torch chooses when empty.

    Raises:
        TransportFailed: not everybody came in time.
        ConfigError: this torch can't do the transport.
    """

    def __init__(
        self,
        info: CommunicatorInfo,
        rank: int,
        device: torch.device,
        connect_seconds: float,
        operation_seconds: float,
        interface: str = "",
    ) -> None:
        self.info = info
        self.rank = rank
        self.device = device
        store = join_store(info, connect_seconds)
        try:
            self._group: Any = _new_group(info, store, rank, device, connect_seconds, operation_seconds, interface)
        except RuntimeError as exc:
            raise TransportFailed(
                f"rank {rank} of {info.world_size} (generation {info.generation}) could not join: {_first_line(exc)}",
                hint="Sync again: a new generation is made",
            ) from exc

    @property
    def open(self) -> bool:
        """Whether it can still broadcast."""
        return self._group is not None

    def buffers(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """Memory to pack buckets into, each of shape [nbytes], uint8; zeros, for what lies between tensors is sent as well."""
        return [huge_pages(torch.empty(nbytes, dtype=torch.uint8, device=self.device)).zero_() for _ in range(count)]

    def broadcast(self, tensor: torch.Tensor, deadline: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Send from rank 0 into everybody's `tensor`; returns when the bytes are there.

        Args:
            tensor: contiguous, on this communicator's device, equal shape and dtype everywhere.
            deadline: `time.monotonic()` value after which it is given up.
            cancelled: asked about every 50 ms.

        Raises:
            TransportFailed: a peer is gone, or the deadline passed. The communicator is closed.
            Aborted: `cancelled()` said so. The communicator is closed.
        """
        if self._group is None:
            raise TransportFailed("the communicator is closed", hint="Sync again: a new one is made")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        if self.device.type == "cpu":
            # Ends a gloo operation that was left; a little later, so that `_wait` is the one to say why.
            options.timeout = timedelta(seconds=max(0.0, deadline - time.monotonic()) + 0.1)
        try:
            work = self._group.broadcast([tensor], options)
            self._wait(work, deadline, cancelled)
        except (TransportFailed, Aborted):
            self._close(_LEAVE_SECONDS)
            raise
        except RuntimeError as exc:
            self._close(_LEAVE_SECONDS)
            raise TransportFailed(f"broadcast failed: {_first_line(exc)}", hint="A peer died or left; sync again") from exc

    def _wait(self, work: Any, deadline: float, cancelled: Callable[[], bool]) -> None:
        probe_at = time.monotonic() + _PROBE_SECONDS
        while not work.is_completed():
            if cancelled():
                raise Aborted("the update was aborted while bytes were on their way")
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                raise TransportFailed("the broadcast did not finish before its deadline", hint="A peer hangs; sync again")
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
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _probe(self) -> None:
        """Raise RuntimeError when a gloo peer's connection is broken."""
        # A receive that nobody answers costs nothing, and posting it fails on a broken connection.
        for peer in range(self.info.world_size):
            if peer != self.rank:
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _PROBE_TAG)

    def close(self) -> None:
        """Leave; waits a moment for the group's threads to end, can be called twice."""
        self._close(_CLOSE_SECONDS)

    def _close(self, seconds: float) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        if hasattr(group, "abort"):
            with contextlib.suppress(RuntimeError):
                group.abort()
        # Destroying a group joins its threads, which an unfinished operation can hold. A process
        # that ends in the middle of that aborts, so an idle group is waited for.
        holder = [group]
        del group
        thread = threading.Thread(target=holder.clear, name="weightsync-close", daemon=True)
        thread.start()
        thread.join(seconds)


def _new_group(
    info: CommunicatorInfo,
    store: dist.Store,
    rank: int,
    device: torch.device,
    connect_seconds: float,
    operation_seconds: float,
    interface: str,
) -> Any:
    if info.transport == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=connect_seconds)
        options._threads = 1
        host = info.host if info.host in ("127.0.0.1", "::1", "localhost") else ""
        gloo_device = (
            dist.ProcessGroupGloo.create_device(interface=interface)
            if interface
            else dist.ProcessGroupGloo.create_device(hostname=host)
            if host
            else dist.ProcessGroupGloo.create_default_device()
        )
        options._devices = [gloo_device]
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
