"""An engine that is lost while the bytes are on their way: whether `sync_weights` sends them again to those that are left.

One process group joins trainer and workers, so that a peer that dies or hangs ends the broadcast
for all. Where the fleet needs fewer engines than it has (`sync.require`), the same call sends the same version
once more, as an update of its own, without those that were lost. It does not where anything was refused, was
the trainer's own fault, or may have been written: an update that was being applied is never sent again.

Ranks of a trainer decide together. All have the first one's error, and each says whether it could give its tensors
once more; only the first asks the service.

Not covered: `publish` and `commit` by hand, and the lost engine, which gets the version as any does that comes later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from weightsync.client.http import Http
from weightsync.client.published import Published
from weightsync.client.ranks import Ranks
from weightsync.client.view import WORD_SECONDS
from weightsync.codec import decode
from weightsync.errors import DeadlineExceeded, EngineDied, Refused, TransportFailed, WeightSyncError
from weightsync.protocol import Phase, UpdateState, UpdateStatus
from weightsync.results import SentAgain

#: How often one call sends at most, in all.
SENDINGS = 3
#: Less time than this before the deadline is not worth beginning anew, seconds.
_LEAST_SECONDS = 0.5
_ONCE = (
    "It was not sent again to the engines that are left: this source is an iterator, which can be read once. "
    "Pass a module, a mapping or a list where sync.require allows an update to go on without some"
)


class Again:
    """What one call of `sync_weights` knows of its sendings.

    Args:
        source: what is sent.
        version: that was asked for, if any.
        deadline: of the call, a `time.monotonic()` value.
        ranks: of a trainer that has several.

    Attributes:
        version: to ask for; that of the first sending behind it.
        sent: the sendings that were lost.
    """

    def __init__(self, source: Any, version: int | None, deadline: float, http: Http, ranks: Ranks | None) -> None:
        self._source, self.version, self._deadline, self._http, self._ranks = source, version, deadline, http, ranks
        self._failed: WeightSyncError | None = None  # that of the last sending
        self._since = time.monotonic()
        self.sent: tuple[SentAgain, ...] = ()

    def after(self, error: WeightSyncError, tried: Published | None) -> None:
        """Take in how a sending failed; returns when the next is to begin.

        Args:
            tried: the update, on the rank that sent it, as far as it was admitted.

        Raises:
            WeightSyncError: what the call ends with.
        """
        if (agreed := self._agreed(error, tried)) is not None:
            lost, self.version = agreed
            self.sent, self._failed, self._since = (*self.sent, lost), error, time.monotonic()
            return
        if self._failed is not None and error.phase == Phase.ADMIT:  # those that are left do not do
            raise self._failed from error
        if self._failed is not None:
            raise error from self._failed
        raise error

    def _agreed(self, error: WeightSyncError, tried: Published | None) -> tuple[SentAgain, int | None] | None:
        """What is to be sent again, if every rank can and the service has ended the update unwritten."""
        # The same on all ranks: they have the first one's error.
        kinds = (EngineDied, DeadlineExceeded, TransportFailed)
        if not isinstance(error, kinds) or error.engine is None or not error.retryable or len(self.sent) + 1 >= SENDINGS:
            return None
        try:
            if self._ranks is None:
                return self._judge(error, tried)
            until = max(self._deadline, time.monotonic() + WORD_SECONDS)
            return self._ranks.agree("sync_weights", lambda: self._judge(error, tried), lambda _: "again", until)[0]
        except WeightSyncError as exc:
            if exc.hint == _ONCE:
                error.hint = f"{error.hint}. {_ONCE}" if error.hint else _ONCE
            return None

    def _judge(self, error: WeightSyncError, tried: Published | None) -> tuple[SentAgain, int | None]:
        """This rank's part in the decision: what was lost, and the version.

        Raises:
            WeightSyncError: no.
        """
        assert error.engine is not None
        update_id = error.update_id or (tried.update_id if tried else "")
        version = self.version
        if self._ranks is None or self._ranks.leads:
            version = self._unwritten(update_id, error, tried)
        if isinstance(self._source, Iterator):
            raise Refused("the source can be read once", hint=_ONCE)
        if tried is not None and not tried._idle(self._deadline - _LEAST_SECONDS):
            raise Refused("the source is still being read")  # by a thread that was left behind: two at once may be more than it takes
        return SentAgain(update_id, error.engine, error.to_dict(), time.monotonic() - self._since), version

    def _unwritten(self, update_id: str, error: WeightSyncError, tried: Published | None) -> int:
        """The version of an update that ended because of that engine, before anything was written."""
        if isinstance(error, TransportFailed) and (tried is None or error is not tried._error):
            # An engine says that it lost others; who was lost this side has not seen, and nobody is known to be dead.
            raise Refused("nobody knows which engine was lost")
        if self._deadline - time.monotonic() < _LEAST_SECONDS:
            raise Refused("no time is left")
        status = decode(UpdateStatus, self._http.get(f"/v1/updates/{update_id}", WORD_SECONDS))
        if status.state != UpdateState.ABORTED or status.verdicts:
            raise Refused(f"update {update_id} may have been written")
        return status.version
