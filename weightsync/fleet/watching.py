"""An engine actor's watch over its workers, and its short calls to them; `liveness` is what counts.

An engine whose workers are silent serves nothing new: those that wait for an answer are told to ask elsewhere. What it held it
holds: when workers answer it goes on where it was, and an update that it missed comes to it as to any that was away.

Not covered: calls of a commit and of a sleep, which are work of their own (`Liveness.work`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

from weightsync.config import Settings
from weightsync.errors import DeadlineExceeded, WorkersSilent
from weightsync.fleet import vllm_api
from weightsync.fleet.gate import Gate
from weightsync.fleet.liveness import Liveness
from weightsync.fleet.scratch import Scratch
from weightsync.protocol import EngineState

logger = logging.getLogger(__name__)

#: Of a short call's deadline: who called this actor is told before it gives the actor up.
_SOONER = 0.9


class Watching:
    """Attributes are those of `EngineActor`."""

    _ordinal: int
    _settings: Settings
    _state: EngineState
    _gate: Gate | None
    _scratch: Scratch | None
    _liveness: Liveness
    _watch: asyncio.Task[None] | None = None

    def _live(self) -> vllm_api.Engine:
        raise NotImplementedError

    def _begin_watch(self) -> None:
        self._watch = asyncio.create_task(self._liveness.watch())

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    @property
    def _silent(self) -> bool:
        """Whether silence of its workers is what is to be said of this engine."""
        return self._liveness.silent and self._state not in (EngineState.DEAD, EngineState.LEAVING)

    @property
    def _silent_workers(self) -> tuple[int, ...]:
        """Ranks that are silent while others of this engine have given their sign; none where that is not known.

        The core says nothing before all have answered; the question passes it by, in files.
        """
        if not self._silent or self._scratch is None or self._liveness.question is None:
            return ()
        ranks = range(self._settings.engine.workers)
        signed = {rank for rank in ranks if _read(_sign_of(self._scratch.folder, rank)) == str(self._liveness.question)}
        return tuple(rank for rank in ranks if signed and rank not in signed)

    async def _ask_for_sign(self, number: int) -> None:
        assert self._scratch is not None
        await self._live().rpc("weightsync_sign", str(self._scratch.folder), number)

    def _silence_changed(self, silent: bool) -> None:
        if not silent:
            logger.warning("the workers of engine %d answer again", self._ordinal)
            return
        logger.error("%s", self._silence().message)
        if self._gate is not None:
            self._gate.look_again()
            self._gate.end_soon()

    def _silence(self) -> WorkersSilent:
        ranks = self._silent_workers
        who = f"worker {', '.join(map(str, ranks))} of {self._settings.engine.workers}" if ranks else "all workers"
        return WorkersSilent(
            f"no answer from {who} of engine {self._ordinal} for {self._liveness.seconds:.0f} s",
            hint="It takes part again when they answer. See its log; if they never do, end its process: it restarts by itself",
            engine=self._ordinal,
        )

    def _require_answering(self) -> None:
        if self._liveness.silent:
            raise self._silence()

    async def _workers_say(self, method: str, *args: Any, owed: bool = False) -> list[dict[str, Any]]:
        """A call that each worker answers at once; one that hangs must not keep the calls of this actor.

        Args:
            owed: silent workers are told too, when they come to it.

        Raises:
            WorkersSilent: they are silent; nobody waits for them.
            DeadlineExceeded: they are from now on.
        """
        if owed and self._liveness.silent:
            self._liveness.owe(self._live().rpc(method, *args), math.inf)
        self._require_answering()
        seconds = self._settings.sync.control_timeout_seconds * _SOONER
        try:
            return await self._liveness.answer(self._live().rpc(method, *args), seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"a worker of engine {self._ordinal} did not answer {method} within {seconds:.0f} s",
                hint="See its log",
                engine=self._ordinal,
            ) from None


def _sign_of(folder: Path, rank: int) -> Path:
    return folder / f"sign-{rank}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
