"""An engine whose workers hang while its actor answers: at its gate, in the fleet's book, in the API; and when they answer again.

Without Ray and vLLM (`workers`). The watch itself: `test_liveness.py`; a whole fleet of processes: `test_survivors.py`;
real workers that are stopped: `test_silence_on_fleet.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_draining import Served, ask, in_time, moment, served
from tests.test_engine_update import Engine
from tests.test_ledger import apply, engine, fleet, request
from tests.test_liveness import until
from tests.test_roster import Handle, applies, committed_under_heartbeats, never, roster_of
from tests.workers import weights, without_vllm
from weightsync.api.discovery import targets
from weightsync.client.attach import attachment
from weightsync.codec import encode
from weightsync.errors import EngineDied, WeightSyncError, WorkersSilent
from weightsync.fleet import gate as gate_module
from weightsync.fleet.left_out import absent
from weightsync.fleet.liveness import Liveness
from weightsync.fleet.waves import next_wave
from weightsync.protocol import CommunicatorInfo, EngineState, EngineStatus, FleetStatus, Retained

SILENT, SERVING = EngineState.SILENT, EngineState.SERVING
MOST = 0.24


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    monkeypatch.setattr(gate_module, "_ANSWERED_SECONDS", 0.1)


# --- one engine ---------------------------------------------------------------------------------


class Hanging:
    """An engine that serves version 1, said to be of two workers, of which the second can be stopped. Calls reach them one by one."""

    def __init__(self, made: Served, folder: Path) -> None:
        self.made, self.actor = made, made.actor
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.calls: list[str] = []
        made.core.rpc = self._call  # type: ignore[method-assign]
        self._turn = asyncio.Lock()
        settings = self.actor._settings
        self.actor._settings = settings.model_copy(update={"engine": settings.engine.model_copy(update={"tensor_parallel_size": 2})})
        self.actor._scratch = SimpleNamespace(folder=folder)  # type: ignore[assignment]
        self.actor._liveness = Liveness(MOST, self.actor._ask_for_sign, self.actor._silence_changed)
        self.actor._begin_watch()

    async def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        async with self._turn:
            self.calls.append(method)
            signs = [getattr(worker, method)(*args) for worker in _extensions(1)] if method == "weightsync_sign" else []
            await self.go_on.wait()
            return signs + [worker.weightsync_sign(*args) for worker in _extensions(2)[1:] if signs]

    def stop(self) -> None:
        self.go_on.clear()

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self.actor.describe())["value"]["status"]
        return status


def _extensions(workers: int) -> list[Any]:
    from weightsync.worker.extension import WeightSyncExtension

    made: list[Any] = [WeightSyncExtension() for _ in range(workers)]
    for rank, extension in enumerate(made):
        extension.rank, extension.vllm_config = rank, SimpleNamespace(parallel_config=SimpleNamespace(world_size=workers))
    return made


async def hanging(folder: Path, **sync: Any) -> Hanging:
    made = await served(folder, **sync)
    made.actor._starting = asyncio.get_running_loop().create_future()
    made.actor._starting.set_result(None)
    return Hanging(made, folder)


async def answer_of(engine: Hanging, method: str, *args: Any) -> WeightSyncError:
    answer = await asyncio.wait_for(getattr(engine.actor, method)(*args), 1.0)
    return WeightSyncError.from_dict(answer["error"])


def test_one_worker_that_hangs_takes_its_engine_out_of_service_by_name_until_it_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        engine = await hanging(tmp_path)
        runs = ask(engine.made.gate, "plain")
        await until(lambda: engine.calls.count("weightsync_sign") > 1)
        assert (await engine.status())["state"] == "serving"
        engine.stop()
        await until(lambda: engine.actor._silent)
        status = await engine.status()
        assert (status["state"], status["reason"], status["version"]) == ("silent", "workers_silent", 1)
        assert status["silent_workers"] == [1] and status["silence_seconds"] >= MOST

        refused, ended = await ask(engine.made.gate, "new"), await runs
        for answer in (refused, ended):
            assert (answer.status, answer.error.code, answer.error.retryable) == (503, "no_engine_ready", True)
            assert "workers_silent" in answer.error.message

        engine.go_on.set()
        await until(lambda: not engine.actor._silent)
        status = await engine.status()
        assert (status["state"], status["reason"], status["version"], status["silent_workers"]) == ("serving", "", 1, [])
        engine.made.vllm.finish.set()
        assert (await ask(engine.made.gate, "again")).status == 200
        assert "no answer from worker 1 of 2 of engine 0" in caplog.text and "the workers of engine 0 answer again" in caplog.text

    in_time(run())


def test_silent_workers_are_told_nothing_but_the_end_of_what_they_were_told_before(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await hanging(tmp_path, control_timeout_seconds=0.2)
        order = {
            "base_update": "",
            "request": {"update_id": "u", "timeout_seconds": 1.0, "adapter": "none"},
            "restores": "",
            "hand_on": False,
        }
        engine.stop()
        began = await answer_of(engine, "begin", order)
        assert began.code == "deadline" and (await engine.status())["state"] == "silent", "by its heartbeat too, from now on"
        orders = (("pause", ()), ("resume", ()), ("sleep", (1,)), ("wake", ()))
        for method, args in (("poll", ()), ("begin", (order,)), ("contract", ()), ("abort", ("another",)), ("abort", ("u",)), *orders):
            error = await answer_of(engine, method, *args)
            assert isinstance(error, WorkersSilent) and (error.engine, error.retryable) == (0, True)
        told = [call for call in engine.calls if call != "weightsync_sign"]
        assert told in ([], ["weightsync_begin"]), "whatever stands before it, if anything does"
        engine.go_on.set()
        await until(lambda: not engine.actor._silent and "weightsync_abort" in engine.calls)
        assert [call for call in engine.calls if call != "weightsync_sign"][:2] == ["weightsync_begin", "weightsync_abort"]
        assert engine.calls.count("weightsync_abort") == 1

    in_time(run())


def test_a_paused_engine_stands_still_behind_a_silence_as_before(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await hanging(tmp_path)
        await engine.actor.pause()
        engine.stop()
        await until(lambda: engine.actor._silent)
        status = await engine.status()
        assert (status["state"], status["paused"]) == ("silent", True)
        engine.go_on.set()
        await until(lambda: not engine.actor._silent)
        assert (await engine.status())["state"] == "paused" and not engine.made.core.running

    in_time(run())


def test_an_engine_that_writes_for_longer_than_it_may_says_so(tmp_path: Path) -> None:
    made = Engine(tmp_path, workers=1, control_timeout_seconds=0.1, apply_timeout_seconds=0.2)
    stock, go_on = made.core.rpc, asyncio.Event()

    async def rpc(method: str, *args: Any) -> list[dict[str, Any]]:
        if method == "weightsync_apply":
            await go_on.wait()
        return await stock(method, *args)

    async def run() -> None:
        made.core.rpc = rpc  # type: ignore[method-assign]
        made.actor._begin_watch()
        update = made.workers[0].begin(weights(1))
        commit = asyncio.create_task(made.actor.commit(update, 1, 0))
        await moment()
        assert made.actor._describe()["status"]["state"] == "updating"
        await until(lambda: bool(made.actor._describe()["status"]["state"] == "silent"))
        go_on.set()
        assert (await commit)["value"]["committed"]
        assert made.actor._describe()["status"]["state"] == "serving"

    in_time(run())


# --- the fleet's book ---------------------------------------------------------------------------


def silent(ordinal: int, version: int | None = None, **more: Any) -> EngineStatus:
    return replace(engine(ordinal, version, SILENT), reason="workers_silent", **more)


def test_an_update_goes_on_without_a_silent_engine_where_require_allows_it_and_says_so() -> None:
    ledger = fleet(2, require=1)
    assert apply(ledger, ledger.admit(request("u1", 1), 0.0), True, True)
    ledger.see(silent(1, 1, update_id="u1"))
    assert ledger.ready == 1
    update = ledger.admit(request("u2", 2), 0.0)
    assert update.engines == (0,) and apply(ledger, update, True)
    verdict = update.status.verdicts[1]
    assert (verdict.engine, verdict.committed, verdict.state, verdict.version) == (1, False, SILENT, 1)
    assert verdict.error is not None and (verdict.error["code"], verdict.error["retryable"]) == ("workers_silent", True)
    assert "engine 1 was silent (workers_silent) when the update began" in verdict.error["message"]

    assert ledger.lacking() == {}, "it can be told nothing"
    ledger.see(replace(engine(1, 1), update_id="u1"))
    assert ledger.lacking() == {1: "u2"} and ledger.ready == 1
    ledger.see(replace(engine(1, 2), update_id="u2"))
    assert ledger.lacking() == {} and ledger.ready == 2


def test_where_all_must_commit_an_update_is_refused_and_names_the_silent_engine() -> None:
    ledger = fleet(3)
    ledger.see(silent(1))
    with pytest.raises(WorkersSilent, match=r"1 engine\(s\) are silent: 1 \(workers_silent\); 3 must commit and 2 can") as info:
        ledger.admit(request("u", 1), 0.0)
    assert (info.value.engine, info.value.retryable, info.value.http_status) == (1, True, 503)
    ledger.lose(0, "gone")
    with pytest.raises(EngineDied) as other:
        ledger.admit(request("u", 1), 0.0)
    assert type(other.value) is EngineDied
    ledger.see(engine(0))
    ledger.see(engine(1))
    assert ledger.admit(request("u", 1), 0.0).engines == (0, 1, 2)


def test_a_silent_engine_takes_no_place_in_a_wave_and_gives_what_it_keeps() -> None:
    states = {0: SERVING, 1: SERVING, 2: SILENT}
    assert next_wave([0, 1], states, 1) == (0,)
    ledger = fleet(2)
    assert apply(ledger, ledger.admit(request("u", 1), 0.0), True, True)
    ledger.see(silent(0, 1, update_id="u", retained=Retained("u", 1, 0, 4096, "h", 8, "u")))
    assert ledger.giver() == 0, "its actor sends, not its workers"


def test_its_absence_is_told_as_what_it_is() -> None:
    assert (absent(silent(3, 7)).error or {})["code"] == "workers_silent"


# --- the controller's calls ---------------------------------------------------------------------


def describes(status: EngineStatus, *, behind: asyncio.Event | None = None) -> Any:
    async def answer(*_: Any) -> Any:
        if behind is not None:
            await behind.wait()
        return {"value": {"incarnation": f"{status.engine}-1", "places": [], "status": encode(status)}}

    return answer


@pytest.mark.parametrize("says_so", [False, True])
@pytest.mark.parametrize("step", ["begin", "poll"])
def test_a_heartbeat_that_was_asked_before_a_call_timed_out_does_not_undo_that(step: str, says_so: bool, tmp_path: Path) -> None:
    """The next one does not either: by then the engine says itself that its workers are silent."""

    async def run() -> None:
        behind = asyncio.Event()
        method = says_silent if says_so else never
        roster, ledger = roster_of(
            tmp_path, Handle(describe=describes(engine(0, 3), behind=behind), poll=method, begin=method), control=0.3
        )
        update = ledger.admit(request("u", 1), 0.0)
        update.communicator = CommunicatorInfo("127.0.0.1", 1, 1, 2, {"0": 1}, "gloo")
        heartbeat = asyncio.create_task(roster.refresh())
        await asyncio.sleep(0.05)
        with pytest.raises(WeightSyncError):
            await (roster.begin(update, 0) if step == "begin" else roster.late(update, asyncio.get_running_loop().time() + 5))
        assert ledger.engines[0].state == EngineState.DEAD
        behind.set()
        await heartbeat
        assert (ledger.engines[0].state, ledger.engines[0].reason) == (EngineState.DEAD, "workers_silent" if says_so else "deadline")
        roster._handles[0] = Handle(describe=describes(silent(0, 3)))
        await roster.refresh()
        assert (ledger.engines[0].state, ledger.engines[0].reason) == (SILENT, "workers_silent")
        roster._handles[0] = Handle(describe=describes(engine(0, 3)))
        await roster.refresh()
        assert ledger.engines[0].state == SERVING

    asyncio.run(run())


async def says_silent(*_: Any) -> Any:
    return {"error": WorkersSilent("no answer from all workers of engine 0 for 9 s", engine=0).to_dict()}


@pytest.mark.parametrize("hangs", [True, False])
def test_a_commit_is_not_waited_for_where_workers_are_silent(hangs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would have kept the fleet from every other update for as long as applying may take."""
    handle = Handle(describe=describes(silent(0) if hangs else engine(0)), commit=never if hangs else applies)
    roster, ledger = roster_of(tmp_path, handle, control=0.2, applying=60.0)
    update = ledger.admit(request("u", 1), 0.0)

    verdict = asyncio.run(committed_under_heartbeats(roster, update))
    assert verdict.committed is not hangs
    if hangs:
        assert verdict.error is not None and (verdict.error["code"], verdict.error["engine"]) == ("workers_silent", 0)
        assert caplog.text.count("the workers of engine 0 don't answer") == 1, "a heartbeat a second says it"


# --- what is shown ------------------------------------------------------------------------------


def test_it_is_not_ready_wherever_that_is_asked() -> None:
    status = FleetStatus("f", 3, 1, (engine(0, 3), silent(1, 3)), None)
    assert [group["labels"]["__meta_weightsync_ready"] for group in targets(status)] == ["true", "false"]
    assert attachment(status, 3).behind == (1,)
