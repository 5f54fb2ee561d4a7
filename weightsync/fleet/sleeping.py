"""One engine's sleep: vLLM's two levels, in the order that loses nothing and lets nobody compute with what is gone.

Asleep an engine has given its GPU's memory back. Behind level 1 it holds what it held.
Behind level 2 its weights are gone: it has pending weights, and what a complete update does
not bring is put aside before and brought back before any request can run. Requests end
when it falls asleep; a few that are still on their way in are ended when it wakes.

Not covered: vLLM's level 0, a mere pause; waking the weights or the KV cache alone.
"""

from __future__ import annotations

from typing import Any, Protocol

from weightsync.codec import decode
from weightsync.errors import Refused, WeightSyncError
from weightsync.protocol import EngineState, WorkerReport

LEVELS = (1, 2)


class SleepingEngine(Protocol):
    """What a sleep needs of an engine (`vllm_api.Engine`)."""

    def check_sleep(self) -> None: ...

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]: ...

    async def sleep(self, level: int) -> None: ...

    async def wake_weights(self) -> None: ...

    async def wake_rest(self) -> None: ...

    async def end_requests(self) -> None: ...

    async def pause(self) -> bool: ...


class Sleeping:
    """See the module.

    Attributes:
        level: at which the engine sleeps; 0 while it is awake.
        before: what it did before, and why.
    """

    def __init__(self) -> None:
        self.level = 0
        self.before = (EngineState.PENDING, "pending_weights")

    async def prepare(self, engine: SleepingEngine, level: int) -> None:
        """See that it may fall asleep, and put aside what it must not lose.

        Raises:
            Refused: no such level.
            UnsupportedEngine: started without sleep mode.
            WeightSyncError: a worker's.
        """
        if level not in LEVELS:
            raise Refused(f"level {level}: want 1 (weights are kept on the host) or 2 (weights are dropped)")
        engine.check_sleep()
        try:
            await _all(engine, "weightsync_sleep", level)
        except WeightSyncError:
            await engine.rpc("weightsync_stay_awake")
            raise

    async def fall(self, engine: SleepingEngine, level: int, before: tuple[EngineState, str]) -> None:
        """Give the memory back."""
        self.level, self.before = level, before
        await engine.sleep(level)

    async def wake(self, engine: SleepingEngine) -> tuple[EngineState, str]:
        """Take the memory again; what the engine does from now on, and why.

        Raises:
            WeightSyncError: a worker's: what it put aside did not come back.
        """
        state, reason = self.before if self.level == 1 else (EngineState.PENDING, "pending_weights")
        await engine.wake_weights()  # vLLM resumes only when all is there
        await _all(engine, "weightsync_woken")
        if state != EngineState.SERVING:
            await engine.end_requests()
        await engine.wake_rest()
        if state != EngineState.SERVING:
            await engine.pause()
        self.level = 0
        return state, reason

    def failed(self) -> None:
        """A step failed: nobody knows what the engine holds, and waking may be tried again."""
        self.before = (EngineState.PENDING, "pending_weights")


async def _all(engine: SleepingEngine, method: str, *args: Any) -> None:
    for report in await engine.rpc(method, *args):
        if (error := decode(WorkerReport, report).error) is not None:
            raise WeightSyncError.from_dict(error)
