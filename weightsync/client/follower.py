"""A rank of the trainer that does not send: it takes part in gathers, and learns what became of the update.

The calling thread listens to the first rank; gathers run in a thread beside it, so that one
that never ends does not keep the caller past its deadline.

Not covered: stopping a gather that hangs: it runs in the trainer's own process group. Until it has ended
the next update is refused.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch

from weightsync.client.published import Published
from weightsync.client.ranks import Kind, Ranks
from weightsync.client.source import Offer
from weightsync.codec import decode
from weightsync.errors import DeadlineExceeded, TransportFailed, WeightSyncError
from weightsync.protocol import Admission
from weightsync.results import SyncReport

#: The first rank has the same deadline, and then says how the update ended.
_GRACE_SECONDS = 10.0


class Follower:
    """What `WeightSync` does on ranks other than the first."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._part: _Part | None = None

    def require_idle(self) -> None:
        """See that no gather of an earlier update is still running.

        Raises:
            TransportFailed: one is.
        """
        if self._part is not None:
            self._part.require_ended()

    def publish(self, offered: Offer, began: float, deadline: float) -> Published:
        """See `WeightSync.publish`; returns when this rank's tensors may change, where they are read before the commit."""
        if offered.device.type == "cuda":
            torch.cuda.current_stream(offered.device).synchronize()  # gathers read in another thread, on its own stream
        part = self._part = _Part(offered)
        admission = decode(Admission, self._hear_until(Kind.ADMITTED, part, None, deadline))
        published = Published(admission, began, deadline)
        published._model = offered.model
        if not offered.runs:
            published._has_read()
        elif admission.staged:
            self._hear_until(Kind.READ, part, published, deadline)
        return published

    def commit(self, published: Published, deadline: float) -> SyncReport:
        """See `WeightSync.commit`."""
        assert self._part is not None
        return decode(SyncReport, self._hear_until(Kind.REPORT, self._part, published, deadline))

    def _hear_until(self, wanted: Kind, part: _Part, published: Published | None, deadline: float) -> Any:
        try:
            while True:
                kind, value = self._ranks.hear(deadline + _GRACE_SECONDS, part.failed)
                if kind == Kind.GATHER:
                    part.take(value)
                elif kind == Kind.READ and published is not None:
                    part.finish(deadline)
                    published._has_read()
                if kind == wanted:
                    return value
        except WeightSyncError as exc:
            part.leave()
            if published is not None:
                published._end(exc)
            raise


class _Part:
    """This rank's part in the gathers of one update."""

    def __init__(self, offered: Offer) -> None:
        self._offered = offered
        self._runs: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._error: WeightSyncError | None = None
        self._thread: threading.Thread | None = None

    def take(self, run: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="weightsync-gather", daemon=True)
            self._thread.start()
        self._runs.put(run)

    def failed(self) -> WeightSyncError | None:
        return self._error

    def leave(self) -> None:
        """Take part in no more."""
        self._runs.put(None)

    def finish(self, deadline: float) -> None:
        """Wait for the last one."""
        if not self._ended(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded("this rank's part in a gather did not end before the deadline", hint="See what its process group does")
        if self._error is not None:
            raise self._error

    def require_ended(self) -> None:
        """See `Follower.require_idle`."""
        if not self._ended(1.0):
            raise TransportFailed("the last update's tensors are still being read", hint="Start the trainer again", retryable=False)

    def _ended(self, seconds: float) -> bool:
        self.leave()
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _work(self) -> None:
        if self._offered.device.type == "cuda":
            torch.cuda.set_device(self._offered.device)
        try:
            while (run := self._runs.get()) is not None:
                self._offered.take_part(run)
        except WeightSyncError as exc:
            self._error = exc
        except Exception as exc:  # a thread's exception would vanish
            self._error = TransportFailed(f"this rank could not take part in a gather: {type(exc).__name__}: {exc}")
