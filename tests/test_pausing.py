"""Engines that operators pause: what becomes of requests, of updates meanwhile, and what the fleet's book makes of it.

Without Ray and vLLM (`workers`). With real engines: `test_seen_on_fleet.py`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_controller import Roster, begin, drive
from tests.test_draining import Served, ask, in_time, moment, served
from tests.test_engine_sleep import Sleeper
from tests.test_engine_update import Engine
from tests.test_ledger import apply, engine, fleet, request, verdict
from tests.test_roster import Handle, roster_of, says
from tests.workers import without_vllm
from weightsync.api.health import readiness
from weightsync.client.attach import attachment
from weightsync.codec import encode
from weightsync.errors import EngineDied, Refused
from weightsync.fleet import resting
from weightsync.fleet.controller import Controller
from weightsync.fleet.waves import next_wave, serving
from weightsync.protocol import EngineState, EngineStatus, FleetStatus, UpdateState

PAUSED, SERVING = EngineState.PAUSED, EngineState.SERVING


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    monkeypatch.setattr(resting, "_ANSWERED_SECONDS", 0.2)


async def tell(made: Engine, method: str, *args: Any) -> dict[str, Any]:
    """An actor's status behind a call."""
    answer = await getattr(made.actor, method)(*args)
    assert "value" in answer, answer
    status: dict[str, Any] = answer["value"]["status"]
    return status


# --- one engine ---------------------------------------------------------------------------------


def test_requests_freeze_and_new_ones_wait_until_it_is_resumed(tmp_path: Path) -> None:
    async def run() -> None:
        made = await served(tmp_path)
        runs = ask(made.gate, "plain")
        await moment()
        status = await tell(made, "pause")
        assert (status["state"], status["reason"], status["version"], status["paused"]) == ("paused", "paused", 1, True)
        assert await tell(made, "pause") == status, "again is nothing new"
        made.vllm.finish.set()
        new = ask(made.gate, "new")
        await moment()
        assert not made.core.running and not runs.done() and not new.done()
        status = await tell(made, "resume")
        assert (status["state"], status["reason"], status["paused"]) == ("serving", "", False)
        assert [(await runs).body, (await new).body] == [b"plain", b"new"] and made.vllm.ended == []
        assert await tell(made, "resume") == status

    in_time(run())


@pytest.mark.parametrize("new_requests", ["wait", "refuse"])
@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_each_policy_holds_for_a_pause_as_for_an_update(in_flight: str, new_requests: str, tmp_path: Path) -> None:
    async def run() -> None:
        made = await served(tmp_path, in_flight=in_flight, new_requests=new_requests)
        runs = ask(made.gate, "plain")
        await moment()
        pausing = asyncio.create_task(tell(made, "pause"))
        await moment()
        if in_flight == "wait":
            assert made.core.running and not pausing.done(), "they end first"
        made.vllm.finish.set()
        assert (await pausing)["state"] == "paused" and not made.core.running
        await moment()
        if in_flight == "abort":
            error = (await runs).error
            assert (error.code, error.retryable) == ("engine_updating", True) and "for a pause" in error.message
        else:
            assert runs.done() == (in_flight == "wait")
        new = ask(made.gate, "new")
        await moment()
        if new_requests == "refuse":
            answer = await new
            assert (answer.status, answer.error.code) == (503, "no_engine_ready") and "paused" in answer.error.message
        else:
            assert not new.done()
        await tell(made, "resume")
        assert (await ask(made.gate, "later")).body == b"later"
        assert new_requests == "refuse" or (await new).body == b"new"
        assert in_flight != "keep" or (await runs).body == b"plain"

    in_time(run())


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_an_update_that_commits_meanwhile_leaves_it_paused(in_flight: str, tmp_path: Path) -> None:
    async def run() -> None:
        made = await served(tmp_path, in_flight=in_flight)
        await tell(made, "pause")
        new = ask(made.gate, "new")
        await moment()
        made.vllm.finish.set()
        for version in (2, 3):
            told = await made.commit(version)
            assert (told["committed"], told["version"], told["state"]) == (True, version, "paused")
            assert "drain" not in told["seconds"], "what is frozen can't end before it"
            status = await tell(made, "pause")
            assert (status["state"], status["version"]) == ("paused", version) and not made.core.running
        await moment()
        assert not new.done() and made.core.stamped == 3
        await tell(made, "resume")
        assert (await new).body == b"new"
        made.require(3)

    in_time(run())


@pytest.mark.parametrize("rollback", ["off", "host"])
@pytest.mark.parametrize("fault", ["pause", "load", "resets"])
def test_an_update_that_fails_meanwhile_lets_nothing_run_either(fault: str, rollback: str, tmp_path: Path) -> None:
    async def run() -> None:
        made = await served(tmp_path, in_flight="wait")
        made.actor._settings = made.actor._settings.model_copy(
            update={"sync": made.actor._settings.sync.model_copy(update={"rollback": rollback})}
        )
        await tell(made, "pause")
        waits = ask(made.gate, "waits")
        await moment()
        made.vllm.finish.set()
        stock = made.core.pause
        if fault == "load":
            made.workers[0].model.fail_behind = [1, 1]
        elif fault == "resets":
            made.core.fail["reset"] = 1
        else:
            made.core.pause = refuses  # type: ignore[method-assign]
        told = await made.commit(2)
        made.core.pause = stock  # type: ignore[method-assign]
        back = fault == "pause" or rollback == "host"
        assert not told["committed"] and told["state"] == ("paused" if back else "quarantined")
        assert not made.core.running and made.vllm.running == []
        await moment()
        assert waits.done() is not back, "who waits at the gate is told when it goes out of service"
        if not back:
            assert (await waits).error.code == "no_engine_ready"
            assert (await made.commit(3))["state"] == "paused", "it was paused, and holds a version again"
        await tell(made, "resume")
        made.require(1 if back else 3)
        assert (await ask(made.gate, "next")).body == b"next"

    in_time(run())


async def refuses() -> bool:
    return False


def test_it_is_paused_when_the_update_that_is_being_written_has_its_verdict(tmp_path: Path) -> None:
    async def run() -> None:
        made, goes_on, stock = await served(tmp_path), asyncio.Event(), None
        stock = made.core.rpc

        async def rpc(method: str, *args: Any) -> Any:
            if method == "weightsync_apply":
                await goes_on.wait()
            return await stock(method, *args)

        made.core.rpc = rpc  # type: ignore[method-assign]
        commit = made.commit(2)
        await moment()
        pausing = asyncio.create_task(tell(made, "pause"))
        await moment()
        assert not pausing.done() and made.actor._state == EngineState.UPDATING
        goes_on.set()
        assert (await commit)["state"] == "serving"
        status = await pausing
        assert (status["state"], status["version"]) == ("paused", 2) and not made.core.running

    in_time(run())


def test_a_commit_in_the_middle_of_the_draining_leaves_it_paused(tmp_path: Path) -> None:
    async def run() -> None:
        made = await served(tmp_path, in_flight="wait", drain_timeout_seconds=0.3)
        runs = ask(made.gate, "plain")
        await moment()
        pausing = asyncio.create_task(tell(made, "pause"))
        await moment()
        assert (await made.commit(2))["state"] == "paused" and not made.core.running
        assert (await pausing)["version"] == 2 and not made.core.running
        made.vllm.finish.set()
        await moment()
        assert not runs.done()
        await tell(made, "resume")
        assert (await runs).body == b"plain"

    in_time(run())


def test_a_pending_engine_holds_its_first_version_paused(tmp_path: Path) -> None:
    made = Engine(tmp_path)
    status = asyncio.run(tell(made, "pause"))
    assert (status["state"], status["paused"]) == ("pending", True) and made.core.running, "nothing passes its gate"
    assert made.update(1)["state"] == "paused" and not made.core.running
    assert asyncio.run(tell(made, "resume"))["state"] == "serving" and made.core.running


def test_a_core_that_does_not_confirm_is_not_paused(tmp_path: Path) -> None:
    async def run() -> None:
        made = await served(tmp_path, in_flight="wait")
        made.vllm.finish.set()
        made.core.pause = refuses  # type: ignore[method-assign]
        assert (await made.actor.pause())["error"]["code"] == "internal"
        assert (await ask(made.gate, "next")).body == b"next" and made.actor._shown == SERVING

    in_time(run())


def test_it_sleeps_and_wakes_paused(tmp_path: Path) -> None:
    made = Engine(tmp_path)
    made.core = made.actor._engine = Sleeper(*made.workers)  # type: ignore[assignment]
    assert made.update(1)["committed"]
    asyncio.run(tell(made, "pause"))
    status = asyncio.run(tell(made, "sleep", 1))
    assert (status["state"], status["paused"]) == ("asleep", True)
    assert asyncio.run(tell(made, "wake"))["state"] == "paused" and not made.core.running
    asyncio.run(tell(made, "resume"))
    made.require(1)


@pytest.mark.parametrize("in_flight", ["keep", "wait"])
def test_one_that_leaves_ends_what_is_frozen_at_once_and_tells_who_waits(in_flight: str, tmp_path: Path) -> None:
    async def run() -> None:
        made: Served = await served(tmp_path, in_flight=in_flight, drain_timeout_seconds=0.1)
        runs = ask(made.gate, "plain")
        await moment()
        await tell(made, "pause")
        waits = ask(made.gate, "waits")
        await moment()
        assert (await asyncio.wait_for(made.actor.drain("wait", 60.0), 3.0))["value"] >= 1
        assert [(await one).error.code for one in (runs, waits)] == ["no_engine_ready"] * 2

    in_time(run())


# --- the fleet ----------------------------------------------------------------------------------


def paused(ordinal: int, version: int, update_id: str) -> EngineStatus:
    return replace(engine(ordinal, version, PAUSED), update_id=update_id, paused=True)


def test_a_paused_engine_is_not_ready_and_lacks_nothing_while_it_holds_the_version() -> None:
    ledger = fleet(2)
    apply(ledger, ledger.admit(request("u1", 1), 0.0), True, True)
    ledger.see(paused(1, 1, "u1"))
    assert (ledger.ready, ledger.lacking(), ledger.require) == (1, {}, 2)
    update = ledger.admit(replace(request("u2", 2), scope=("w",)), 0.0)
    assert update.engines == (0, 1), "it holds what a partial update builds on"
    update.move(UpdateState.ABORTED)
    ledger.see(paused(1, 0, "u0"))
    assert ledger.lacking() == {1: "u1"}, "it is brought up to the fleet all the same"


def test_a_commit_that_was_given_up_and_came_late_is_seen_in_a_paused_engine_too() -> None:
    ledger = fleet(2, require=1)
    apply(ledger, ledger.admit(request("u1", 1), 0.0), True, False)
    apply(ledger, ledger.admit(request("u2", 2), 0.0), True, False)
    ledger.see(paused(1, 1, "u1"))
    assert (ledger.engines[1].state, ledger.engines[1].reason) == (EngineState.QUARANTINED, "late_commit")


def test_paused_engines_need_no_place_in_a_wave() -> None:
    states = {0: PAUSED, 1: SERVING, 2: SERVING, 3: PAUSED}
    assert serving(states) == (1, 2)
    assert next_wave((0, 1, 2, 3), states, 1) == (0, 3, 1)


def test_health_and_a_restarted_trainer_tell_a_pause_from_a_failure() -> None:
    status = FleetStatus("default", 3, 1, (replace(engine(0, 3)), paused(1, 3, "u")), None)
    assert readiness(status, 2).reasons == ("too_few_engines_ready", "engine_paused")
    assert attachment(status, 3).behind == () and not attachment(status, 3).needed


def test_all_that_have_started_are_told_or_those_that_are_named(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    def halts(ordinal: int, order: str) -> Any:
        async def answer(*_: Any) -> Any:
            told.append((order, ordinal))
            state = replace(engine(ordinal, 1, PAUSED if order == "pause" else SERVING), paused=order == "pause")
            return await says({"status": encode(state)})()

        return answer

    handles = [Handle(pause=halts(o, "pause"), resume=halts(o, "resume")) for o in range(3)]
    roster, ledger = roster_of(tmp_path, *handles)
    ledger.join(2)  # it is on its way up, and answers nothing yet
    asyncio.run(roster.halt("pause", [], 5.0))
    assert sorted(told) == [("pause", 0), ("pause", 1)]
    assert [ledger.engines[o].paused for o in range(2)] == [True, True]
    asyncio.run(roster.halt("resume", [1, 1], 5.0))
    assert told[2:] == [("resume", 1)] and [ledger.engines[o].state for o in range(2)] == [PAUSED, SERVING]
    with pytest.raises(Refused, match="no engine 7: the fleet has 3"):
        asyncio.run(roster.halt("pause", [7, 0], 5.0))
    roster._handles.pop(0)
    with pytest.raises(EngineDied):
        asyncio.run(roster.halt("pause", [0, 1], 5.0))
    assert told[3:] == [("pause", 1)], "one that is gone keeps nobody from it"


def test_a_pause_while_an_update_is_applied_does_not_run_ahead_of_its_verdict(tmp_path: Path) -> None:
    roster, ledger = roster_of(tmp_path, Handle(pause=says({"status": encode(paused(0, 1, "u1"))})), Handle())
    update = ledger.admit(request("u1", 1), 0.0)
    for state in (UpdateState.RECEIVING, UpdateState.STAGED, UpdateState.APPLYING):
        update.move(state)
    asyncio.run(roster.halt("pause", [0], 5.0))
    assert (ledger.committed_version, ledger.engines[0].state, ledger.engines[0].paused) == (None, EngineState.PENDING, True)
    ledger.conclude(update, [replace(verdict(0, 1), state=PAUSED), verdict(1, 1)], 2.0)
    assert (ledger.engines[0].state, ledger.engines[0].paused, ledger.ready) == (PAUSED, True, 1)


def test_that_a_restart_has_ended_a_pause_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    roster, ledger = roster_of(tmp_path, Handle())
    roster._note_restart(0, "0-1")
    ledger.see(paused(0, 1, "u1"))
    with caplog.at_level(logging.WARNING):
        roster._note_restart(0, "0-1")
        assert not caplog.messages
        roster._note_restart(0, "0-2")
    assert "engine 0 was paused and has restarted" in caplog.text


def test_a_pause_may_come_while_an_update_is_under_way(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Roster) -> None:
        halted: list[tuple[str, list[int]]] = []

        async def halt(order: str, engines: list[int], _: float) -> None:
            halted.append((order, engines))

        roster.halt = halt  # type: ignore[attr-defined]
        assert "value" in await controller.begin(begin())
        assert "committed_version" in (await controller.pause([1], 5.0))["value"]
        assert "committed_version" in (await controller.resume([], 5.0))["value"]
        assert halted == [("pause", [1]), ("resume", [])]

    drive(tmp_path, scenario)
