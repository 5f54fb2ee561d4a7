"""What becomes of an engine's requests when it is about to be written: `sync.in_flight` and `sync.new_requests`.

| in_flight | requests that run | new ones |
|---|---|---|
| keep | frozen over the update, and go on behind it | `wait`: inside vLLM, as those that run |
| wait | end first; what has not after `sync.drain_timeout_seconds` is kept | `wait`: at the gate |
| abort | end with an error that says to come again | `wait`: at the gate |

With `refuse` new ones get an error that says to come again, whatever becomes of the others.

Not covered: the freezing itself (`transaction`).
"""

from __future__ import annotations

from weightsync.config import SyncSettings
from weightsync.errors import EngineUpdating
from weightsync.fleet.gate import Gate

_AGAIN = "Send it again: to another engine now, or to this one in a moment"


class Draining:
    """One engine's.

    Attributes:
        under_way: requests that have passed the gate are still to begin, with the version that is being replaced.
    """

    def __init__(self, ordinal: int, sync: SyncSettings) -> None:
        self._ordinal, self._sync = ordinal, sync
        self.under_way = False

    @property
    def acts(self) -> bool:
        """Whether anything happens at all before the pause."""
        return (self._sync.in_flight, self._sync.new_requests) != ("keep", "wait")

    async def make_way(self, gate: Gate | None) -> dict[str, int]:
        """Returns when the engine may be paused; what became of requests in flight, as counts that are not 0."""
        if gate is None or not self.acts:
            return {}
        gate.hold(self._sync.new_requests)
        counts, self.under_way = {}, True
        try:
            if self._sync.in_flight == "wait":
                counts["requests_kept"] = await gate.inside.drained(self._sync.drain_timeout_seconds)
            elif self._sync.in_flight == "abort":
                counts["requests_ended"] = await gate.inside.end(self._ended)
        finally:
            self.under_way = False
        return {what: count for what, count in counts.items() if count}

    def go_on(self, gate: Gate | None) -> None:
        """The engine has a verdict: let those in that wait, or tell them that it serves no more."""
        if gate is not None:
            gate.release()

    def _ended(self) -> EngineUpdating:
        return EngineUpdating("the request was ended for an update (sync.in_flight = abort)", engine=self._ordinal, hint=_AGAIN)
