"""The engines as the controller knows them: handles, incarnations, heartbeats.

Every engine is asked what it is once a second, by a call that touches no worker
of it; one that does not answer is entered as dead in the ledger, and one that
answers again with what it says.

Not covered: a worker that hangs while its engine actor answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from weightsync.codec import decode
from weightsync.errors import EngineDied, WeightSyncError
from weightsync.fleet.calls import call
from weightsync.fleet.ledger import Ledger
from weightsync.protocol import EngineStatus, UpdateState

_TIMEOUT_SECONDS = 10.0


class Roster:
    """All engines of one fleet.

    Args:
        namespace: Ray's namespace of the fleet.
        count: engines 0 to `count - 1`.
        ledger: takes in what they say.
    """

    def __init__(self, namespace: str, count: int, ledger: Ledger) -> None:
        self._namespace, self._count, self._ledger = namespace, count, ledger
        self._handles: dict[int, Any] = {}
        self._incarnations: dict[int, str] = {}

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._handles

    def handle(self, ordinal: int) -> Any:
        """The actor's handle.

        Raises:
            EngineDied: it went away since it was last seen.
        """
        if ordinal not in self._handles:
            raise EngineDied(f"engine {ordinal} is gone", engine=ordinal, hint="It restarts by itself; sync again when it answers")
        return self._handles[ordinal]

    def incarnation(self, ordinal: int) -> str:
        """Changes when the engine's process does."""
        return self._incarnations[ordinal]

    async def refresh(self) -> None:
        """Ask every engine what it is; none can hold up another."""
        await asyncio.gather(*(self._ask(ordinal) for ordinal in range(self._count)))

    async def _ask(self, ordinal: int) -> None:
        try:
            if ordinal not in self._handles:
                self._handles[ordinal] = await asyncio.to_thread(ray.get_actor, f"engine-{ordinal}", self._namespace)
            answer = await call(self._handles[ordinal].describe, timeout_seconds=_TIMEOUT_SECONDS, engine=ordinal)
        except ValueError:  # no actor of that name
            self._ledger.lose(ordinal, "gone")
        except WeightSyncError as exc:
            if isinstance(exc, EngineDied):
                self._handles.pop(ordinal, None)  # a recreated actor has a new handle
            self._ledger.lose(ordinal, exc.code)
        else:
            self._incarnations[ordinal] = answer["incarnation"]
            current = self._ledger.current
            # While an update is applied its verdict is what counts, not what the engine says on the way.
            if current is None or current.state != UpdateState.APPLYING:
                self._ledger.see(decode(EngineStatus, answer["status"]))
