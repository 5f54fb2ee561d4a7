"""What becomes of an engine's requests when it is about to be written, or paused: `sync.in_flight` and `sync.new_requests`.

| in_flight | requests that run | new ones |
|---|---|---|
| keep | frozen over the update, and go on behind it | `wait`: inside vLLM, as those that run |
| wait | end first; what has not after `sync.drain_timeout_seconds` is kept | `wait`: at the gate |
| abort | end with an error that says to come again | `wait`: at the gate |

With `refuse` new ones get an error that says to come again, whatever becomes of the others. Of a paused engine they stay what they are
over updates: those that are frozen could not end before the next one.

Not covered: the freezing itself (`transaction`).
"""

from __future__ import annotations

from weightsync.errors import EngineUpdating, WeightSyncError
from weightsync.fleet.gate import Gate, out_of_service
from weightsync.sections import SyncSettings

_AGAIN = "Send it again: to another engine now, or to this one in a moment"
_ELSEWHERE = "Ask another engine now, or this one in a moment"


class Draining:
    """One engine's.

    Attributes:
        under_way: requests that have passed the gate are still to begin, with the version that is being replaced.
        paused: by an operator.
    """

    def __init__(self, ordinal: int, sync: SyncSettings) -> None:
        self._ordinal, self._sync = ordinal, sync
        self.under_way = self.paused = False

    @property
    def acts(self) -> bool:
        """Whether anything happens at all before an engine is written."""
        return self._policy != ("keep", "wait") and not self.paused

    @property
    def _policy(self) -> tuple[str, str]:
        return self._sync.in_flight, self._sync.new_requests

    async def make_way(self, gate: Gate | None) -> dict[str, int]:
        """Returns when the engine may be paused; what became of requests in flight, as counts that are not 0."""
        if gate is None or not self.acts:
            return {}
        return await self._clear(
            gate, EngineUpdating("this engine is being updated (sync.new_requests = refuse)", hint=_ELSEWHERE), "an update"
        )

    async def pause(self, gate: Gate | None) -> None:
        """An operator wants the engine to stand still; returns when it may be frozen."""
        self.paused = True
        if gate is not None and self._policy != ("keep", "wait"):
            await self._clear(gate, out_of_service("paused (sync.new_requests = refuse)"), "a pause")

    def resume(self, gate: Gate | None) -> None:
        """It may go on: let those in that wait."""
        self.paused = False
        self.go_on(gate)

    def go_on(self, gate: Gate | None) -> None:
        """The engine does something else, or has a verdict: let those in that wait, or tell them that it serves no more.

        Those that wait at a paused one wait on, unless it will not serve them.
        """
        if gate is not None:
            gate.look_again() if self.paused else gate.release()

    async def _clear(self, gate: Gate, refusal: WeightSyncError, why: str) -> dict[str, int]:
        gate.hold(self._sync.new_requests, refusal)
        counts, self.under_way = {}, True
        try:
            if self._sync.in_flight == "wait":
                counts["requests_kept"] = await gate.inside.drained(self._sync.drain_timeout_seconds)
            elif self._sync.in_flight == "abort":
                counts["requests_ended"] = await gate.inside.end(lambda: self._ended(why))
        finally:
            self.under_way = False
        return {what: count for what, count in counts.items() if count}

    def _ended(self, why: str) -> EngineUpdating:
        return EngineUpdating(f"the request was ended for {why} (sync.in_flight = abort)", engine=self._ordinal, hint=_AGAIN)
