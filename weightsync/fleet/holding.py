"""An engine actor's pin: a version that it keeps, and takes no update, until it is unpinned.

The pin lives here, so that a controller that was restarted learns of it, and ends with this process: what a new one
serves is the fleet's business.

Not covered: who is pinned (`pinning`).
"""

from __future__ import annotations

import logging
from typing import Any

from weightsync.errors import PinRefused
from weightsync.fleet.calls import answers
from weightsync.protocol import EngineState

logger = logging.getLogger(__name__)


class Holding:
    """Attributes are those of `EngineActor`. Coroutines marked `answers` are methods of the actor."""

    _ordinal: int
    _state: EngineState
    _version: int | None
    _pinned = ""  # the pin's name; none when empty

    def _require_idle(self) -> None:
        raise NotImplementedError

    def _describe(self) -> dict[str, Any]:
        raise NotImplementedError

    @answers
    async def pin(self, name: str, version: int) -> dict[str, Any]:
        """Keep the version that is served, under this name. The same pin again changes nothing.

        Raises:
            PinRefused: another version is served, or another pin holds it.
            UpdateConflict: an update is being applied.
        """
        self._require_idle()
        if self._pinned not in ("", name):
            raise self._held("can't be pinned again")
        if (self._state, self._version) != (EngineState.SERVING, version):
            raise PinRefused(
                f"engine {self._ordinal} is {self._state} with version {self._version}, and is to be pinned at version {version}",
                hint="Pin what engines serve now, before the next update",
                engine=self._ordinal,
            )
        self._pinned = name
        return self._describe()

    @answers
    async def unpin(self, name: str) -> dict[str, Any]:
        """Take updates again, if this pin holds the engine."""
        if self._pinned == name:
            self._pinned = ""
        return self._describe()

    def _require_unpinned(self, doing: str) -> None:
        if self._pinned:
            raise self._held(doing)

    def _held(self, doing: str) -> PinRefused:
        return PinRefused(
            f"engine {self._ordinal} is pinned as {self._pinned!r} at version {self._version} and {doing}",
            hint="Unpin it first",
            engine=self._ordinal,
        )

    def _let_go(self, why: str) -> None:
        """The version that is pinned is lost."""
        if self._pinned:
            logger.warning("engine %d is no longer pinned as %r at version %s: %s", self._ordinal, self._pinned, self._version, why)
            self._pinned = ""
