"""An update on its way, as its trainer sees it.

Not covered: sending, which `WeightSync` does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from weightsync.client.ranks import Ranks
from weightsync.client.view import WORD_SECONDS
from weightsync.errors import Aborted, DeadlineExceeded, TransportFailed, UpdateFailed, WeightSyncError
from weightsync.protocol import Admission, UpdateStatus
from weightsync.results import SentAgain, SyncReport

_TICK_SECONDS, _WATCH_SECONDS, _LOOK_SECONDS = 0.5, 0.5, 0.02


class Published:
    """An update that has been admitted and is being sent.

    Attributes:
        admission: what the service answered.
        sent_again: sendings of the same call that were lost before.
    """

    def __init__(self, admission: Admission, began: float, deadline: float, sent_again: tuple[SentAgain, ...] = ()) -> None:
        self.admission, self.sent_again = admission, sent_again
        self._began, self._deadline = began, deadline  # `time.monotonic()` values
        self._dtypes: dict[str, str] = {}
        self._model: torch.nn.Module | None = None  # whose adapter it has
        self._go = threading.Event()  # tensors may be read
        self._read = threading.Event()  # every tensor has been read, or never will be
        self._all_read = False
        self._done = threading.Event()
        self._cancelled = threading.Event()
        self._error: WeightSyncError | None = None
        self._seconds: dict[str, float] = {}
        self._reads: Callable[[], bool] = lambda: False  # whether a thread may be in a read, also one that was left behind there

    @property
    def update_id(self) -> str:
        return self.admission.update_id

    @property
    def version(self) -> int:
        return self.admission.version

    def tensors_read(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every tensor has been read, so that the parameters may change.

        What is changed before that may reach the engines, in part even; what is changed behind it never does.

        Returns:
            False when `timeout_seconds` passed first.

        Raises:
            WeightSyncError: sending failed before that.
        """
        left = max(0.0, self._deadline - time.monotonic()) if timeout_seconds is None else timeout_seconds
        done = self._read.wait(left)
        if done and not self._all_read and self._error is not None:
            raise self._error
        return done

    @property
    def _own_error(self) -> WeightSyncError | None:
        """What went wrong on this side and is not a broken broadcast: what the service says of such an update is that its trainer left."""
        broken = (TransportFailed, Aborted, DeadlineExceeded)
        return None if isinstance(self._error, broken) else self._error

    def _has_read(self) -> None:
        self._all_read = True
        self._read.set()

    def _await_go(self) -> None:
        """Wait until tensors may be read; for the sending thread."""
        while not self._go.wait(_TICK_SECONDS):
            if self._cancelled.is_set() or time.monotonic() > self._deadline:
                raise Aborted("the update was given up before its commit")

    def _end(self, error: WeightSyncError | None) -> None:
        self._error = self._error or error
        self._read.set()
        self._done.set()

    def _watch(self, until: threading.Event, ended: Callable[..., WeightSyncError | None], ranks: Ranks | None) -> None:
        """Wait for the sending thread; leave the broadcast when the service has ended the update, or another rank is gone.

        Args:
            until: what it sets.
            ended: see `View._ended`.
            ranks: of a trainer that has several.
        """
        while not until.wait(_WATCH_SECONDS):
            if time.monotonic() > self._deadline:
                self._cancelled.set()
                late = DeadlineExceeded("the update was not sent before its deadline", update_id=self.update_id, phase="receive")
                raise ended(self.update_id, wait=WORD_SECONDS) or late  # the service knows which engine did not answer
            if (error := ended(self.update_id)) is not None:
                self._cancelled.set()
                self._done.wait(5.0)
                raise self._own_error or error
            if ranks is not None and not self._read.is_set():
                ranks.require_all()
        if self._error is not None:
            # The service's word says more than a broken broadcast does, unless all it knows is that this side has left.
            error = ended(self.update_id, wait=WORD_SECONDS) if isinstance(self._error, (TransportFailed, Aborted)) else None
            if error is None or (isinstance(error, TransportFailed) and self._error.engine is not None):
                self._error.update_id = self._error.update_id or self.update_id
                raise self._error
            raise error from self._error

    def _idle(self, until: float) -> bool:
        """Wait until no thread of this sending is in the source any more, or in the caller's progress; False when it still is then."""
        while not self._done.is_set() or self._reads():
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _report(self, status: UpdateStatus) -> SyncReport:
        return SyncReport(
            update_id=status.update_id,
            version=status.version,
            nbytes=status.nbytes,
            tensors=status.tensors,
            seconds={**status.seconds, **self._seconds, "total": time.monotonic() - self._began},
            pause_seconds=max((v.pause_seconds for v in status.verdicts), default=0.0),
            verdicts=status.verdicts,
            sent_again=self.sent_again,
            probe=status.probe,
        )


def failure(status: UpdateStatus) -> WeightSyncError:
    """What an update's status says went wrong, with every engine's state."""
    error = WeightSyncError.from_dict(status.error) if status.error else UpdateFailed("the update did not commit")
    if status.verdicts:
        states = ", ".join(
            f"engine {v.engine} {v.state}" + ("" if v.version is None else f" with version {v.version}") for v in status.verdicts
        )
        error.message = f"{error.message} ({states})"
        error.args = (error.message,)
        error.hint = error.hint or "Sync again, with this version too: an engine that did not take it does then; the others keep it"
    error.update_id = status.update_id
    return error
