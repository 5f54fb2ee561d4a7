"""An engine actor that is put to sleep and woken, and updates before, meanwhile and after. Without Ray and vLLM (`workers`).

Not covered: vLLM's own sleep, which there is on CUDA alone (`gpu/test_sleep_on_cuda.py`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.test_engine_update import Core, Engine
from tests.workers import NAMES, Worker, weights, without_vllm
from weightsync.codec import decode, encode
from weightsync.errors import UnsupportedEngine, WeightSyncError
from weightsync.protocol import BeginOrder, EngineState, EngineStatus

BODY, TOWER = NAMES


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


class Sleeper(Core):
    """Stands for a vLLM with sleep mode, whose workers' memory goes and comes; notes in which order it was asked."""

    able = True

    def __init__(self, *workers: Worker) -> None:
        super().__init__(*workers)
        self.done: list[str] = []
        self.breaks = ""
        for worker in workers:
            worker.memory.hold(*worker.model.parameters())

    def _note(self, step: str) -> None:
        self.done.append(step)
        if self.breaks == step:
            raise RuntimeError("out of memory")

    def check_sleep(self) -> None:
        if not self.able:
            raise UnsupportedEngine("this engine was started without vLLM's sleep mode")

    async def sleep(self, level: int) -> None:
        self._note(f"sleep {level}")
        self.running = False
        for worker in self.workers:
            worker.memory.sleep(level)

    async def wake_weights(self) -> None:
        self._note("weights")
        for worker in self.workers:
            worker.memory.gone = False

    async def wake_rest(self) -> None:
        self._note("rest")
        self.running = True
        for worker in self.workers:
            worker.memory.wake()

    async def end_requests(self) -> None:
        self.done.append("requests ended")

    async def pause(self) -> bool:
        self.done.append("paused")
        return await super().pause()

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        if method in ("weightsync_sleep", "weightsync_woken", "weightsync_stay_awake"):
            self.done.append(method)
            return [self._one(worker, method.removeprefix("weightsync_"), *args) for worker in self.workers]
        return await super().rpc(method, *args)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """Two workers that serve version 1."""
    made = Engine(tmp_path)
    made.core = made.actor._engine = Sleeper(*made.workers)  # type: ignore[assignment]
    assert made.update(1)["committed"]
    core(made).done.clear()
    return made


def core(engine: Engine) -> Sleeper:
    assert isinstance(engine.core, Sleeper)
    return engine.core


def ask(engine: Engine, method: str, *args: Any) -> Any:
    """The actor's answer: its status, or an error's code and message."""
    answer = asyncio.run(getattr(engine.actor, method)(*args))
    if "error" in answer:
        raise WeightSyncError.from_dict(answer["error"])
    return decode(EngineStatus, answer["value"]["status"]) if isinstance(answer["value"], dict) else answer["value"]


def order(engine: Engine, values: Any, scope: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a controller would tell the actor of an update that the first worker has begun."""
    engine.workers[0].begin(values, scope)
    receiver = engine.workers[0].applier._receiver
    assert receiver is not None
    made: dict[str, Any] = encode(receiver.order)
    engine.workers[0].applier.abort(made["request"]["update_id"])
    return made


def test_a_light_sleep_ends_where_it_began(engine: Engine) -> None:
    status = ask(engine, "sleep", 1)
    assert (status.state, status.reason, status.version) == (EngineState.ASLEEP, "asleep", 1)
    assert engine.actor._refusal() == "asleep"
    assert ask(engine, "sleep", 1) == status, "again is nothing new"
    assert engine.actor._describe()["status"]["state"] == "asleep"
    status = ask(engine, "wake")
    assert (status.state, status.reason, status.version, status.update_id) == (EngineState.SERVING, "", 1, engine.actor._update_id)
    assert ask(engine, "wake") == status
    assert core(engine).done == ["weightsync_sleep", "sleep 1", "weights", "weightsync_woken", "rest"]
    engine.require(1)
    assert engine.update(2)["committed"]
    engine.require(2)


def test_behind_a_deep_sleep_an_engine_serves_nothing_until_the_next_complete_update(engine: Engine) -> None:
    status = ask(engine, "sleep", 2)
    assert (status.state, status.reason, status.version, status.update_id) == (EngineState.ASLEEP, "asleep", None, None)
    status = ask(engine, "wake")
    assert (status.state, status.reason, status.version) == (EngineState.PENDING, "pending_weights", None)
    assert engine.actor._refusal() == "pending_weights" and not engine.core.running
    # What was on its way in is ended before vLLM resumes: it would be computed from nothing.
    assert core(engine).done == ["weightsync_sleep", "sleep 2", "weights", "weightsync_woken", "requests ended", "rest", "paused"]
    engine.workers[0].guard.fail = [True, True]
    verdict = engine.update(2)
    assert not verdict["committed"] and "rolled_back" not in verdict["checks"], "there is nothing to go back to"
    engine.require_out()
    assert engine.update(3)["committed"]
    engine.require(3)


def test_an_engine_that_never_held_a_version_or_failed_is_so_again_when_it_wakes(engine: Engine) -> None:
    engine.workers[0].guard.fail = [True] * 3
    engine.update(2)
    engine.require_out()
    ask(engine, "sleep", 1)
    status = ask(engine, "wake")
    assert (status.state, status.reason) == (EngineState.QUARANTINED, "verdict_not_ok") and not engine.core.running


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_is_refused_while_asleep_with_a_sentence(level: int, engine: Engine) -> None:
    asked = order(engine, weights(2))
    ask(engine, "sleep", level)
    with pytest.raises(WeightSyncError, match="engine 0 is asleep and can't take an update") as caught:
        ask(engine, "begin", asked)
    assert caught.value.code == "refused"
    ask(engine, "wake")
    assert len(ask(engine, "begin", asked)) == 2


def test_a_commit_while_asleep_writes_nothing(engine: Engine) -> None:
    """The worker's own look, behind everybody else's."""
    update = {worker.begin(weights(2)) for worker in engine.workers}.pop()
    for worker in engine.workers:
        worker.memory.sleep(1)
    verdict = asyncio.run(engine.actor.commit(update, 2, 0))["value"]
    assert (verdict["error"]["code"], verdict["state"], verdict["version"]) == ("refused", "serving", 1)
    assert "asleep" in verdict["error"]["message"]
    assert engine.workers[0].model.values() == dict.fromkeys(NAMES, 1)


@pytest.mark.parametrize("level", [0, 3, -1])
def test_other_levels_are_refused(level: int, engine: Engine) -> None:
    with pytest.raises(WeightSyncError, match=f"level {level}: want 1"):
        ask(engine, "sleep", level)
    engine.require(1)


def test_another_level_while_asleep_is_refused(engine: Engine) -> None:
    ask(engine, "sleep", 1)
    with pytest.raises(WeightSyncError, match="engine 0 is asleep at level 1"):
        ask(engine, "sleep", 2)
    ask(engine, "wake")
    engine.require(1)


def test_an_engine_without_sleep_mode_says_so_and_serves_on(engine: Engine) -> None:
    core(engine).able = False
    with pytest.raises(UnsupportedEngine, match="without vLLM's sleep mode"):
        ask(engine, "sleep", 1)
    engine.require(1)
    assert core(engine).done == []


def test_an_engine_with_an_update_under_way_does_not_fall_asleep(engine: Engine) -> None:
    engine.workers[1].begin(weights(2))
    with pytest.raises(WeightSyncError, match="an update is under way in this worker"):
        ask(engine, "sleep", 2)
    engine.require(1)
    for worker in engine.workers:
        assert worker.applier._held.proved and not worker.applier._sleep._saved, "nothing was given up, nothing will be brought back"


@pytest.mark.parametrize("step", ["sleep 1", "weights", "rest"])
def test_a_sleep_or_a_wake_that_fails_puts_the_engine_out_until_the_next_update(step: str, engine: Engine) -> None:
    core(engine).breaks = step
    with pytest.raises(WeightSyncError, match="RuntimeError: out of memory"):
        ask(engine, "sleep", 1)
        ask(engine, "wake")
    assert (engine.actor._state, engine.actor._version, engine.actor._refusal()) == (EngineState.QUARANTINED, None, "sleep_failed")
    for worker in engine.workers:
        worker.memory.wake()
    assert engine.update(2)["committed"]
    engine.require(2)


@pytest.mark.parametrize("step", ["weights", "rest"])
def test_a_wake_that_failed_is_tried_again_and_ends_with_pending_weights(step: str, engine: Engine) -> None:
    core(engine).breaks = step
    ask(engine, "sleep", 1)
    with pytest.raises(WeightSyncError, match="RuntimeError: out of memory"):
        ask(engine, "wake")
    core(engine).breaks = ""
    status = ask(engine, "wake")
    assert (status.state, status.version, engine.actor._sleeping.level) == (EngineState.PENDING, None, 0)
    assert ask(engine, "wake") == status, "again is nothing new"
    assert engine.update(2)["committed"]
    engine.require(2)


# --- partial updates -------------------------------------------------------------------------------


def test_an_engine_takes_a_partial_update_on_what_it_holds_and_refuses_another_with_both_names(engine: Engine) -> None:
    asked = order(engine, {BODY: weights(2)[BODY]}, ("body.*",))
    assert asked["base_update"] == engine.actor._update_id
    assert {report["state"] for report in ask(engine, "begin", asked)} == {"staged"}
    assert asyncio.run(engine.actor.commit(asked["request"]["update_id"], 2, 0))["value"]["committed"]
    for worker in engine.workers:
        assert worker.model.values() == {BODY: 2, TOWER: 1}
    with pytest.raises(WeightSyncError) as caught:
        ask(engine, "begin", asked)
    assert caught.value.code == "base_refused" and caught.value.engine == 0
    assert f"engine 0 is serving with version 2 (update {engine.actor._update_id})" in caught.value.message
    assert f"builds on version {asked['base_version']} (update {asked['base_update']})" in caught.value.message


@pytest.mark.parametrize("deep", [False, True])
def test_an_engine_that_does_not_serve_takes_no_partial_update(deep: bool, engine: Engine) -> None:
    asked = order(engine, {BODY: weights(2)[BODY]}, ("body.*",))
    if deep:
        ask(engine, "sleep", 2)
        ask(engine, "wake")
    else:
        engine.actor._state = EngineState.QUARANTINED
    with pytest.raises(WeightSyncError, match=r"engine 0 is (pending|quarantined) with"):
        ask(engine, "begin", asked)


def test_orders_cross_processes_with_their_base() -> None:
    plain = encode(decode(BeginOrder, encode(_order())))
    assert (plain["base_version"], plain["base_update"], plain["request"]["scope"]) == (7, "u7", ["a.*"])


def _order() -> BeginOrder:
    from tests.test_ledger import COMMUNICATOR, partial

    asked = partial("u8", 8)
    return BeginOrder(decode(type(asked), encode(asked) | {"scope": ["a.*"]}), COMMUNICATOR, 0, 1, 1.0, base_version=7, base_update="u7")
