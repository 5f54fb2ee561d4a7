"""An engine actor's part in the probe behind a commit: it scores the fixed prompts, and goes out of service when it is told to.

Whatever goes wrong in scoring is said, and is nobody else's fault: requests and updates go on.

Not covered: how prompts are scored (`scores`), and what the answers mean (`probing`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from weightsync.codec import encode
from weightsync.fleet import scores, vllm_api
from weightsync.fleet.calls import answers
from weightsync.fleet.ledger import LATE
from weightsync.mismatch import ProbeAnswer
from weightsync.protocol import EngineState

logger = logging.getLogger(__name__)


class Probed:
    """Attributes are those of `EngineActor`. Coroutines marked `answers` are methods of the actor."""

    _ordinal: int
    _state: EngineState
    _reason: str
    _version: int | None
    _update_id: str | None

    def _live(self) -> vllm_api.Engine:
        raise NotImplementedError

    def _describe(self) -> dict[str, Any]:
        raise NotImplementedError

    def _clear_shelf(self) -> None:
        raise NotImplementedError

    async def _end_requests(self) -> None:
        raise NotImplementedError

    @property
    def _shown(self) -> EngineState:
        raise NotImplementedError

    @answers
    async def probe(self, update_id: str, seconds: float) -> dict[str, Any]:
        """Score the fixed prompts with what this update brought; a plain `ProbeAnswer`.

        Args:
            seconds: how long that may take; an engine whose seats are all taken has none for the probe.
        """
        began = time.monotonic()
        if not self._serves(update_id):
            answer = ProbeAnswer(skipped="overtaken", why="it does not serve this update")
        else:
            answer = await self._scored(seconds)
        if not answer.skipped and not self._serves(update_id):
            answer = ProbeAnswer(skipped="overtaken", why="the next update came meanwhile")
        return dict(encode(replace(answer, seconds=time.monotonic() - began)))

    def _serves(self, update_id: str) -> bool:
        return (self._shown, self._update_id) == (EngineState.SERVING, update_id)

    async def _scored(self, seconds: float) -> ProbeAnswer:
        try:
            return await asyncio.wait_for(scores.score(self._live().llm), seconds)
        except TimeoutError:
            return ProbeAnswer(skipped="late", why=f"it had no seat for the probe, or did not answer, for {seconds:.0f} s")
        except Exception as exc:  # vLLM's own, of which an update knows nothing
            logger.warning("engine %d could not score the probe's prompts: %s: %s", self._ordinal, type(exc).__name__, exc)
            return ProbeAnswer(skipped="failed", why=f"{type(exc).__name__}: {exc}"[:300])

    @answers
    async def retire(self, update_id: str, reason: str = LATE) -> dict[str, Any]:
        """Serve nothing until the next update, where this one is served; what the engine is then.

        Args:
            reason: why, as a code. `LATE`: it was applied when the controller had given it up; nothing of it is handed on.
        """
        if self._update_id == update_id and self._state == EngineState.SERVING:
            self._state, self._reason, self._version = EngineState.QUARANTINED, reason, None
            if reason == LATE:
                self._clear_shelf()
            await self._end_requests()
        return self._describe()
