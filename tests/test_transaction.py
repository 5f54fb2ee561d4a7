"""One engine's part in one commit, by what its workers answer. Pure: the engine is made up.

Not covered: real workers (`test_undo.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from weightsync.codec import encode
from weightsync.errors import ApplyFailed, EngineDied, InternalError, VerdictNotOk, WeightSyncError
from weightsync.fleet.transaction import Transaction
from weightsync.protocol import Phase, WorkerReport

OK: dict[str, WorkerReport] = {
    "weightsync_apply": WorkerReport(0, "u", "applied", wrote=True, checks={"tensors": 3}),
    "weightsync_verdict": WorkerReport(0, "u", "verified", checks={"tensors": 3, "layers": 2}),
    "weightsync_rollback": WorkerReport(0, "u", "applied", wrote=True, checks={"tensors": 3}),
}
APPLY, VERIFY, ROLLBACK = OK


def failed(error: WeightSyncError, wrote: bool = True) -> WorkerReport:
    return WorkerReport(0, "u", "failed", error=error.to_dict(), wrote=wrote)


class Engine:
    """Answers each call with the next of its script, and well when that is used up; two workers, of which the second is always well."""

    def __init__(self, *script: tuple[str, WorkerReport], paused: bool = True) -> None:
        self.script, self.paused, self.calls = list(script), paused, list[str]()

    async def pause(self) -> bool:
        return self.paused

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        assert args == ("u",)
        self.calls.append(method)
        report = self.script.pop(0)[1] if self.script and self.script[0][0] == method else OK[method]
        return [encode(report), encode(replace(OK[method], rank=1))]


def run(engine: Engine, tries: int = 2, seconds_for_all: float = 60.0) -> tuple[Transaction, BaseException | None]:
    transaction = Transaction(engine, "u", tries=tries, seconds_for_all=seconds_for_all)

    async def go() -> None:
        await transaction.pause()
        await transaction.bring()

    try:
        asyncio.run(go())
    except WeightSyncError as exc:
        return transaction, exc
    return transaction, None


def test_what_goes_well_goes_once() -> None:
    engine = Engine()
    transaction, error = run(engine)
    assert error is None and engine.calls == [APPLY, VERIFY]
    assert transaction.wrote, "the old version is gone, and the new one not yet stamped"
    assert transaction.checks == {"tensors": 6, "layers": 4}
    assert transaction.seconds.keys() == {Phase.PAUSE, Phase.APPLY, Phase.VERIFY}


@pytest.mark.parametrize("method", [APPLY, VERIFY])
@pytest.mark.parametrize("kind", [ApplyFailed, VerdictNotOk])
def test_a_failure_is_tried_once_more(method: str, kind: type[WeightSyncError]) -> None:
    engine = Engine((method, failed(kind("no"))))
    transaction, error = run(engine)
    assert error is None
    assert engine.calls == [APPLY, *[VERIFY] * (method == VERIFY), APPLY, VERIFY]
    assert transaction.checks["second_tries"] == 1 and transaction.checks["tensors"] == 6


@pytest.mark.parametrize(("tries", "seconds_for_all", "calls"), [(2, 60.0, 2), (1, 60.0, 1), (2, -1.0, 1)])
def test_the_last_failure_is_told(tries: int, seconds_for_all: float, calls: int) -> None:
    script: Sequence[tuple[str, WorkerReport]] = [(APPLY, failed(ApplyFailed(f"no {n}"))) for n in range(3)]
    engine = Engine(*script)
    transaction, error = run(engine, tries, seconds_for_all)
    assert isinstance(error, ApplyFailed) and error.message == f"worker 0 of 2: no {calls - 1}"
    assert engine.calls == [APPLY] * calls
    assert transaction.wrote and transaction.phase == Phase.APPLY


@pytest.mark.parametrize("error", [InternalError("no"), EngineDied("no")])
def test_what_another_try_can_not_mend_is_not_tried(error: WeightSyncError) -> None:
    engine = Engine((APPLY, failed(error)))
    _, raised = run(engine)
    assert type(raised) is type(error) and engine.calls == [APPLY]


def test_an_engine_in_which_no_worker_wrote_can_go_on() -> None:
    refused = WorkerReport(0, "u", "failed", error=InternalError("no").to_dict(), wrote=False)
    engine = Engine()

    async def rpc(method: str, *args: Any) -> list[dict[str, Any]]:
        return [encode(refused), encode(refused)]

    engine.rpc = rpc  # type: ignore[method-assign]
    transaction, error = run(engine)
    assert isinstance(error, InternalError) and not transaction.wrote


@pytest.mark.parametrize("method", [APPLY, VERIFY])
def test_an_engine_of_which_nobody_knows_what_it_wrote_can_not_go_on(method: str) -> None:
    """The answer was lost, or is none."""
    engine = Engine()
    stock = engine.rpc

    async def rpc(asked: str, *args: Any) -> list[dict[str, Any]]:
        if asked == method:
            raise RuntimeError("the core died")
        return await stock(asked, *args)

    engine.rpc = rpc  # type: ignore[method-assign]
    transaction = Transaction(engine, "u", tries=2, seconds_for_all=60.0)
    asyncio.run(transaction.pause())
    assert not transaction.wrote
    with pytest.raises(RuntimeError):
        asyncio.run(transaction.bring())
    assert transaction.wrote


def test_an_engine_that_does_not_confirm_its_pause_is_not_touched() -> None:
    engine = Engine(paused=False)
    transaction, error = run(engine)
    assert isinstance(error, InternalError) and engine.calls == []
    assert transaction.phase == Phase.PAUSE and not transaction.wrote


@pytest.mark.parametrize("well", [True, False])
def test_an_engine_goes_back_and_keeps_what_had_failed(well: bool) -> None:
    back = [] if well else [(ROLLBACK, failed(ApplyFailed("no way back")))]
    engine = Engine((VERIFY, failed(VerdictNotOk("no"))), (VERIFY, failed(VerdictNotOk("no"))), *back)
    transaction, error = run(engine)
    assert isinstance(error, VerdictNotOk)
    if well:
        asyncio.run(transaction.roll_back())
        assert not transaction.wrote and transaction.checks["rolled_back"] == 1
        assert transaction.phase == Phase.VERIFY, "what the error is told to have happened in"
    else:
        with pytest.raises(ApplyFailed, match="no way back"):
            asyncio.run(transaction.roll_back())
        assert transaction.wrote and "rolled_back" not in transaction.checks
    assert transaction.checks["second_tries"] == 1 and Phase.ROLLBACK in transaction.seconds
    assert transaction.ranks == {"0": "verdict_not_ok: no", "1": "verified"}, "where each worker stood in the update itself"


def test_requests_that_end_first_cost_a_second_try_nothing_and_are_no_pause() -> None:
    engine = Engine((APPLY, failed(ApplyFailed("no"))))
    transaction = Transaction(engine, "u", tries=2, seconds_for_all=0.2)

    async def ended() -> dict[str, int]:
        assert transaction.phase == Phase.DRAIN
        await asyncio.sleep(0.3)
        return {"requests_kept": 2}

    async def go() -> None:
        await transaction.drain(ended())
        assert transaction.checks == {"requests_kept": 2}
        await transaction.pause()
        await transaction.bring()

    asyncio.run(go())
    assert transaction.seconds[Phase.DRAIN] >= 0.3 > 0.2 > transaction.seconds[Phase.PAUSE]
    assert transaction.checks == {"tensors": 6, "layers": 4, "second_tries": 1, "requests_kept": 2}
