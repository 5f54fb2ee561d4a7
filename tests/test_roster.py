"""What the controller's book of engines makes of engines that do not answer: no call waits longer than it may, and each is named.

Actors are made up; `test_survivors.py` has the same with processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions

from tests.test_engine_update import Engine
from tests.test_ledger import apply, engine, fleet, request
from tests.workers import weights, without_vllm
from weightsync import config
from weightsync.codec import encode
from weightsync.errors import BadValues, DeadlineExceeded, EngineDied, TransportFailed, WeightSyncError
from weightsync.fleet import roster as roster_module
from weightsync.fleet.ledger import Ledger, Update
from weightsync.fleet.membership import Membership
from weightsync.fleet.rejoin import Rejoin
from weightsync.fleet.roster import Roster
from weightsync.protocol import CommunicatorInfo, EngineState, EngineVerdict, Retained, WorkerReport


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


async def dies(*_: Any) -> Any:
    raise ray.exceptions.RayActorError(error_msg="its process is gone")


def says(value: Any) -> Callable[..., Awaitable[Any]]:
    async def answer(*_: Any) -> Any:
        return {"value": encode(value)}

    return answer


def fails(error: WeightSyncError) -> Callable[..., Awaitable[Any]]:
    return says([WorkerReport(0, "u", "failed", error=error.to_dict())])


class Handle:
    """An engine's actor, of which each method does what it is told."""

    def __init__(self, **methods: Callable[..., Awaitable[Any]]) -> None:
        for name, method in methods.items():
            setattr(self, name, type("Method", (), {"remote": staticmethod(method), "_method_name": name}))


async def applies(*_: Any) -> Any:
    """A commit that takes a second."""
    await asyncio.sleep(1.0)
    return {"value": encode(EngineVerdict(0, True, 1, EngineState.SERVING))}


async def committed_under_heartbeats(roster: Roster, update: Update) -> EngineVerdict:
    """A commit in engine 0, while engines are asked what they are over and over."""

    async def heart() -> None:
        while True:
            await roster.refresh()
            await asyncio.sleep(0.02)

    beating = asyncio.create_task(heart())
    verdict = await asyncio.wait_for(roster.commit(update, 0), 5.0)
    beating.cancel()
    return verdict


def roster_of(
    folder: Path, *handles: Handle, control: float = 0.3, applying: float = 0.2, ledger: Ledger | None = None
) -> tuple[Roster, Ledger]:
    (folder / "config.json").write_text("{}")
    sync = config.load({"engine.model": folder, "sync.control_timeout_seconds": control, "sync.apply_timeout_seconds": applying}).sync
    ledger = ledger or fleet(len(handles))
    made = Roster("nowhere", len(handles), ledger, sync)
    made._handles = dict(enumerate(handles))
    return made, ledger


def staged(update: str = "u", state: str = "staged", tensors: int = 1) -> Callable[..., Awaitable[Any]]:
    return says([WorkerReport(0, update, state, tensors)])


def late(roster: Roster, ledger: Ledger, seconds: float) -> tuple[list[str], float]:
    update = ledger.admit(request("u", 1), 0.0)
    began = time.monotonic()
    return asyncio.run(roster.late(update, began + seconds)), time.monotonic() - began


def test_at_the_deadline_those_are_named_that_did_not_answer_or_have_not_got_all(tmp_path: Path) -> None:
    handles = Handle(poll=staged()), Handle(poll=never), Handle(poll=staged(state="receiving", tensors=0)), Handle(poll=staged("older"))
    said, took = late(*roster_of(tmp_path, *handles, control=5.0), 0.3)
    assert said == ["engine 1 did not answer", "engine 2 had 0 of 1 tensors", "engine 3 had 1 of 1 tensors"]
    assert took < 1.0


def test_an_engine_that_does_not_answer_in_its_own_time_ends_the_update_by_name(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="engine 1 did not answer poll") as caught:
        late(*roster_of(tmp_path, Handle(poll=staged()), Handle(poll=never)), 5.0)
    assert caught.value.engine == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_death_is_told_rather_than_the_broken_broadcasts_of_those_who_live(order: tuple[int, int], tmp_path: Path) -> None:
    polls = [fails(TransportFailed("the trainer (rank 0) died or left")), dies]
    with pytest.raises(EngineDied) as caught:
        late(*roster_of(tmp_path, *(Handle(poll=polls[number]) for number in order)), 5.0)
    assert caught.value.engine == order.index(1)


def test_a_death_that_is_known_a_moment_after_the_broadcast_broke_is_told(tmp_path: Path) -> None:
    asked = 0

    async def dying(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        return await (dies() if asked > 2 else staged(state="receiving")())

    with pytest.raises(EngineDied, match="engine 1"):
        late(*roster_of(tmp_path, Handle(poll=fails(TransportFailed("broke"))), Handle(poll=dying)), 5.0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_refusal_is_told_rather_than_the_broken_broadcasts_of_the_others(order: tuple[int, int], tmp_path: Path) -> None:
    polls = [fails(TransportFailed("the trainer (rank 0) died or left")), fails(BadValues("w holds 3 NaN"))]
    with pytest.raises(BadValues, match="w holds") as caught:
        late(*roster_of(tmp_path, *(Handle(poll=polls[number]) for number in order)), 5.0)
    assert caught.value.engine == order.index(1)


def test_a_refusal_that_is_known_a_moment_after_the_broadcast_broke_is_told(tmp_path: Path) -> None:
    asked = 0

    async def refusing(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        return await (fails(BadValues("w holds 3 NaN")) if asked > 2 else staged(state="receiving"))()

    with pytest.raises(BadValues) as caught:
        late(*roster_of(tmp_path, Handle(poll=fails(TransportFailed("broke"))), Handle(poll=refusing)), 5.0)
    assert caught.value.engine == 1


def test_a_broken_broadcast_of_which_nobody_died_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(TransportFailed, match="broke"):
        late(*roster_of(tmp_path, Handle(poll=fails(TransportFailed("broke"))), Handle(poll=staged())), 5.0)


def test_heartbeats_of_one_engine_do_not_wait_for_another_or_for_rays_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(ray, "get_actor", lambda *_: time.sleep(1.0))
    roster, ledger = roster_of(tmp_path, Handle(describe=describes(0)), Handle(describe=never), Handle())
    del roster._handles[2]

    async def ask() -> float:
        began = time.monotonic()
        await roster.refresh()
        return time.monotonic() - began

    assert asyncio.run(ask()) < 0.9
    assert [ledger.engines[o].state for o in range(3)] == [EngineState.SERVING, EngineState.DEAD, EngineState.DEAD]
    assert [ledger.engines[o].reason for o in (1, 2)] == ["deadline", "deadline"]


def describes(ordinal: int) -> Callable[..., Awaitable[Any]]:
    return says({"incarnation": f"{ordinal}-1", "places": [], "status": encode(engine(ordinal, 3))})


def test_an_engine_that_is_known_not_to_answer_holds_updates_up_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a cut link each sync of the others waited 10 s for one that had not answered for minutes."""
    monkeypatch.setattr(roster_module, "_LOST_SECONDS", 0.1)
    roster, ledger = roster_of(tmp_path, Handle(describe=describes(0), abort=says([])), Handle(describe=never, abort=never), control=0.6)

    async def took(step: Callable[[], Awaitable[None]]) -> float:
        began = time.monotonic()
        await step()
        return time.monotonic() - began

    async def scenario() -> None:
        assert await took(lambda: roster.refresh(waited_for=True)) > 0.5, "nothing is known of it yet"
        assert ledger.engines[1].reason == "deadline"
        assert await took(lambda: roster.refresh(waited_for=True)) < 0.4
        assert await took(lambda: roster.abort("u")) < 0.4
        assert await took(lambda: roster.refresh()) > 0.5, "a heartbeat has time"
        roster._handles[1] = Handle(describe=describes(1))
        await roster.refresh(waited_for=True)
        assert ledger.engines[1].state == EngineState.SERVING

    asyncio.run(scenario())


@pytest.mark.parametrize("step", ["poll", "begin"])
def test_an_engine_whose_silence_ended_an_update_is_left_out_of_the_next(step: str, tmp_path: Path) -> None:
    roster, ledger = roster_of(tmp_path, Handle(poll=staged()), Handle(poll=never, begin=never))
    with pytest.raises(DeadlineExceeded):
        if step == "poll":
            late(roster, ledger, 5.0)
        else:
            update = ledger.admit(request("u", 1), 0.0)
            update.communicator = CommunicatorInfo("127.0.0.1", 1, 1, 3, {"0": 1, "1": 2}, "gloo")
            asyncio.run(roster.begin(update, 1))
    assert (ledger.engines[1].state, ledger.engines[1].reason) == (EngineState.DEAD, "deadline")


@pytest.mark.parametrize("silent", [True, False])
def test_a_commit_is_waited_for_while_its_engine_says_what_it_is(silent: bool, tmp_path: Path) -> None:
    """A host whose link was cut in a commit kept the fleet from every other update for as long as applying may take."""
    handle = Handle(describe=never if silent else describes(0), commit=never if silent else applies)
    roster, ledger = roster_of(tmp_path, handle, control=0.2, applying=60.0)
    update = ledger.admit(request("u", 1), 0.0)

    verdict = asyncio.run(committed_under_heartbeats(roster, update))
    assert verdict.committed is not silent
    if silent:
        assert verdict.error is not None and "engine 0 has stopped answering" in verdict.error["message"]
        assert (verdict.state, verdict.error["code"], verdict.error["engine"]) == (EngineState.DEAD, "deadline", 0)


def test_a_commit_that_gets_no_answer_is_a_verdict_by_name(tmp_path: Path) -> None:
    roster, ledger = roster_of(tmp_path, Handle(commit=never), control=0.1)
    update = ledger.admit(request("u", 1), 0.0)
    began = time.monotonic()
    verdict = asyncio.run(roster.commit(update, 0))
    assert time.monotonic() - began < 1.0
    assert verdict.error is not None
    assert (verdict.committed, verdict.state, verdict.error["code"], verdict.error["engine"]) == (False, EngineState.DEAD, "deadline", 0)


def test_an_abort_waits_for_nobody_longer_than_a_short_call_may_take(tmp_path: Path) -> None:
    roster, _ = roster_of(tmp_path, Handle(abort=never), Handle(abort=dies))
    began = time.monotonic()
    asyncio.run(roster.abort("u"))
    assert time.monotonic() - began < 0.9


def test_a_late_engine_is_told_to_serve_nothing_until_it_says_so_itself(tmp_path: Path) -> None:
    told: list[Any] = []

    async def retire(*args: Any) -> Any:
        told.append(args)
        return {"value": None}

    status = engine(0, 1)
    roster, ledger = roster_of(
        tmp_path, Handle(describe=says({"incarnation": "0", "places": [], "status": {**encode(status), "update_id": "u"}}), retire=retire)
    )
    assert not apply(ledger, ledger.admit(request("u", 1), 0.0), False)
    asyncio.run(roster.refresh())
    assert told == [("u",)] and (ledger.engines[0].state, ledger.engines[0].reason) == (EngineState.QUARANTINED, "late_commit")


# --- the engine's own side ----------------------------------------------------------------------


def test_an_engine_whose_worker_hangs_answers_its_calls_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    engine = Engine(tmp_path, workers=1, control_timeout_seconds=0.2)
    monkeypatch.setattr(engine.core, "rpc", never)

    order = {"base_update": "", "request": {"update_id": "u", "timeout_seconds": 1.0, "adapter": "none"}, "restores": "", "hand_on": False}

    async def ask() -> list[Any]:
        return [await engine.actor.poll(), await engine.actor.begin(order), await engine.actor.abort("u")]

    began = time.monotonic()
    answers = asyncio.run(ask())
    assert time.monotonic() - began < 0.6, "workers that are silent are waited for once"
    codes = [(a["error"]["code"], a["error"]["engine"]) for a in answers]
    assert codes == [("deadline", 0), ("workers_silent", 0), ("workers_silent", 0)]
    assert "a worker of engine 0 did not answer weightsync_poll" in answers[0]["error"]["message"]


@pytest.mark.parametrize("told", ["another", "this"])
def test_an_engine_that_is_told_it_came_too_late_serves_nothing_until_the_next_update(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_vllm(monkeypatch)
    engine = Engine(tmp_path)
    assert engine.update(1)["committed"]
    assert engine.actor._update_id is not None
    asyncio.run(engine.actor.retire(engine.actor._update_id if told == "this" else told))
    if told == "another":
        engine.require(1)
    else:
        engine.require_out()
        assert engine.actor._refusal() == "late_commit"
    assert engine.update(2)["committed"]
    engine.require(2)
    assert weights(2)


# --- what engines say before a wave ---------------------------------------------------------------


def test_before_a_wave_engines_are_asked_themselves_and_who_is_silent_is_not_waited_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_module, "_TIMEOUT_SECONDS", 0.3)

    def describes(state: EngineState) -> Handle:
        return Handle(describe=says({"status": encode(engine(0, 3, state))}))

    handles = describes(EngineState.QUARANTINED), describes(EngineState.SERVING), Handle(describe=never), Handle(describe=dies), Handle()
    roster, ledger = roster_of(tmp_path, *handles)
    for ordinal in range(4):
        ledger.see(engine(ordinal, 3))  # as the ledger has them, which stands still while an update is applied
    del roster._handles[4]
    wanted = {0: EngineState.QUARANTINED, 1: EngineState.SERVING, 2: None, 3: EngineState.DEAD, 4: EngineState.DEAD}
    assert asyncio.run(roster.states()) == wanted
    ledger.lose(2, "deadline")
    began = time.monotonic()
    assert asyncio.run(roster.states()) == wanted and time.monotonic() - began < 0.2


# --- waves ----------------------------------------------------------------------------------------


def in_waves(folder: Path, waves: int) -> tuple[list[tuple[int, bool, str]], list[int]]:
    """Three engines that serve, two of which always must, with this many waves allowed: verdicts, and who was told that it has ended."""
    ended: list[int] = []

    def one(ordinal: int) -> Handle:
        async def abort(update_id: str) -> Any:
            ended.append(ordinal)
            return {"value": []}

        done = EngineVerdict(ordinal, True, 4, EngineState.SERVING)
        return Handle(describe=says({"status": encode(engine(ordinal, 3))}), commit=says(done), abort=abort)

    roster, ledger = roster_of(folder, *map(one, range(3)))
    roster._sync = roster._sync.model_copy(update={"min_available": 2})
    for ordinal in range(3):
        ledger.see(engine(ordinal, 3))
    asked = iter(range(9))
    update = ledger.admit(request("u", 4), 0.0)
    verdicts = asyncio.run(roster.commit_all(update, lambda: next(asked) < waves))
    return [(v.engine, v.committed, (v.error or {}).get("code", "")) for v in verdicts], ended


def test_engines_are_written_one_wave_after_the_other(tmp_path: Path) -> None:
    assert in_waves(tmp_path, 9) == ([(0, True, ""), (1, True, ""), (2, True, "")], [])


def test_no_further_wave_begins_when_a_trainer_comes_and_those_left_let_the_bytes_go(tmp_path: Path) -> None:
    assert in_waves(tmp_path, 1) == ([(0, True, ""), (1, False, "held_back"), (2, False, "held_back")], [1, 2])


def test_a_rejoin_takes_no_further_engine_out_of_service_when_a_trainer_comes(tmp_path: Path) -> None:
    calls: list[str] = []

    async def run() -> None:
        writing, written, name = asyncio.Event(), asyncio.Event(), [""]

        async def offer(update_id: str, own: str, seconds: float) -> Any:
            name[0] = own
            return {"value": encode(request(own, 4))}

        async def nothing(*_: Any) -> Any:
            return {"value": []}

        def taker(ordinal: int) -> Handle:
            async def poll() -> Any:
                return await staged(name[0])()

            async def commit(*_: Any) -> Any:
                calls.append(f"commit {ordinal}")
                writing.set()
                await written.wait()
                return await says(EngineVerdict(ordinal, True, 4, EngineState.SERVING))()

            async def abort(update_id: str) -> Any:
                calls.append(f"abort {ordinal}")
                return {"value": []}

            return Handle(describe=says({"status": encode(engine(ordinal, 3))}), begin=nothing, poll=poll, commit=commit, abort=abort)

        giver = Handle(describe=says({"status": encode(engine(0, 4))}), offer=offer, hand_on=nothing, call_off=nothing)
        roster, ledger = roster_of(tmp_path, giver, taker(1), taker(2))
        roster._sync = sync = roster._sync.model_copy(update={"min_available": 2})
        roster._incarnations, roster._places = dict.fromkeys(range(3), "first"), dict.fromkeys(range(3), (None,))
        for ordinal in (1, 2):
            ledger.see(replace(engine(ordinal, 3), update_id="old"))
        ledger.see(replace(engine(0, 4), update_id="new", retained=Retained("new", 4, 0, 4096, "hash", 8, "new")))
        ended: list[str] = []
        rejoin = Rejoin(roster, ledger, Membership(sync, 1, 1), sync, lambda how, *_: ended.append(how))
        rejoin.look()
        await asyncio.wait_for(writing.wait(), 5)
        trainer = asyncio.create_task(rejoin.give_way())
        await asyncio.sleep(0)
        written.set()
        await asyncio.wait_for(trainer, 5)
        assert calls == ["commit 1", "abort 2"] and ended == ["committed"]
        assert [ledger.engines[o].version for o in range(3)] == [4, 4, 3]
        rejoin.look()  # its turn comes when the trainer has ended
        await asyncio.wait_for(rejoin._task or asyncio.sleep(0), 5)
        assert calls[2:] == ["commit 2"] and ended == ["committed"] * 2

    asyncio.run(run())


@pytest.mark.parametrize(("third", "begins"), [(EngineState.DEAD, False), (EngineState.SERVING, True)])
def test_a_rejoin_does_not_begin_for_engines_that_can_not_be_taken(third: EngineState, begins: bool, tmp_path: Path) -> None:
    roster, ledger = roster_of(tmp_path, Handle(offer=never, call_off=never, abort=never), *[Handle(abort=never)] * 2)
    roster._incarnations, roster._places = dict.fromkeys(range(3), "first"), dict.fromkeys(range(3), (None,))
    sync = roster._sync.model_copy(update={"min_available": 2})
    ledger.see(replace(engine(1, 3), update_id="old"))
    ledger.see(replace(engine(0, 4), update_id="new", retained=Retained("new", 4, 0, 4096, "hash", 8, "new")))
    ledger.see(replace(engine(2, 4, third), update_id="new"))
    rejoin = Rejoin(roster, ledger, Membership(sync, 1, 1), sync, lambda *_: None)

    async def run() -> None:
        rejoin.look()
        assert rejoin.busy is begins

    asyncio.run(run())
