"""One engine actor and its workers over several updates, in one process. Without Ray and vLLM (`workers`).

Not covered: requests (`test_undo.py` has them on a real fleet).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers import NAMES, Worker, weights, without_vllm
from weightsync import config
from weightsync.errors import InternalError, VerdictNotOk
from weightsync.fleet.carried import Carried
from weightsync.fleet.engine_actor import EngineActor
from weightsync.fleet.reports import Inventory
from weightsync.protocol import EngineState


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


class Core:
    """Stands for vLLM: hands calls to the workers, and fails as often as it is told."""

    alive = True

    def __init__(self, *workers: Worker) -> None:
        self.inventory, self.adapter = Inventory(), Carried(SimpleNamespace(add_request=None))
        self.workers, self.stamped, self.running, self.resets, self.ended = workers, -1, True, 0, 0
        self.fail = {"reset": 0, "stamp": 0, "resume": 0}

    def _due(self, step: str) -> None:
        self.fail[step] -= 1
        if self.fail[step] >= 0:
            raise VerdictNotOk("the prefix cache could not be dropped") if step == "reset" else RuntimeError(step)

    async def pause(self) -> bool:
        self.running = False
        return True

    async def resume(self) -> None:
        self.running = True  # an answer that is lost: it may have gone on
        self._due("resume")

    async def end_requests(self) -> None:
        self.ended += 1

    async def reset_caches(self) -> None:
        self._due("reset")
        self.resets += 1

    async def set_version(self, version: int, adapter: str) -> None:
        self._due("stamp")
        self.stamped = version
        self.adapter.carry(adapter)

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        assert not self.running or method in ("weightsync_begin", "weightsync_keep", "weightsync_abort", "weightsync_check"), (
            "weights are written below requests"
        )
        answers = [self._one(worker, method.removeprefix("weightsync_"), *args) for worker in self.workers]
        self.inventory.note(answers)
        return answers

    def _one(self, worker: Worker, method: str, *args: Any) -> dict[str, Any]:
        from weightsync.worker.extension import WeightSyncExtension

        extension: Any = WeightSyncExtension()
        extension._weightsync_applier, extension.rank = worker.applier, worker.applier.rank
        extension.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=len(self.workers)))
        answer: dict[str, Any] = getattr(extension, f"weightsync_{method}")(*args)
        return answer


class Engine:
    """An engine with rollback on.

    Args:
        workers: how many.
        more: settings by their whole names.
        sync: settings of that section.
    """

    def __init__(self, folder: Path, workers: int = 2, more: Mapping[str, Any] | None = None, **sync: Any) -> None:
        (folder / "config.json").write_text("{}")
        self.workers = [Worker(workers=workers, rank=rank) for rank in range(workers)]
        self.core = Core(*self.workers)
        settings = {"engine.model": folder, **{f"sync.{key}": value for key, value in sync.items()}, **(more or {})}
        self.actor = EngineActor(0, config.dump(config.load({"sync.rollback": "host", **settings})))
        self.actor._engine = self.core  # type: ignore[assignment]
        self.actor._url, self.actor._reason = "http://engine", "pending_weights"

    def update(self, version: int, value: float | None = None) -> Any:
        """One update to these values; the actor's verdict."""
        ids = {worker.begin(weights(version if value is None else value)) for worker in self.workers}

        async def commit() -> Any:
            return await self.actor.commit(ids.pop(), version, 0)

        return asyncio.run(commit())["value"]

    def require(self, version: int, value: float | None = None) -> None:
        """It serves this version, and in every worker these values."""
        value = version if value is None else value
        assert (self.actor._state, self.actor._version, self.core.stamped) == (EngineState.SERVING, version, version)
        assert self.core.running
        assert [worker.model.values() for worker in self.workers] == [dict.fromkeys(NAMES, value)] * len(self.workers)

    def require_out(self) -> None:
        assert (self.actor._state, self.actor._version) == (EngineState.QUARANTINED, None)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("step", ["reset", "stamp", "resume"])
def test_what_fails_behind_the_proof_is_undone_too(step: str, workers: int, tmp_path: Path) -> None:
    engine = Engine(tmp_path, workers)
    assert engine.update(1)["committed"]
    for version in (2, 3):
        engine.core.fail[step] = 1
        verdict = engine.update(version)
        assert not verdict["committed"] and verdict["checks"]["rolled_back"] == 1
        engine.require(1)
    # What requests have computed with weights that were taken back goes.
    assert engine.core.resets == {"reset": 1, "stamp": 3, "resume": 5}[step]
    assert engine.update(4)["committed"]
    engine.require(4)


def test_a_proof_that_fails_in_one_worker_of_several_is_tried_again_in_all(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.update(1)
    engine.workers[1].guard.fail = [True]
    verdict = engine.update(2)
    assert verdict["committed"] and verdict["checks"]["second_tries"] == 1
    engine.require(2)


@pytest.mark.parametrize("settings", [{"engine.strict": True}, {"sync.stage": "none"}])
def test_what_another_try_can_not_mend_is_tried_once(settings: dict[str, Any], tmp_path: Path) -> None:
    """A repair that `strict` does not allow comes again, and what was not staged is gone."""
    engine = Engine(tmp_path, more={"sync.rollback": "off", **settings})
    engine.update(1)
    engine.workers[1].guard.fail = [True]
    verdict = engine.update(2)
    assert not verdict["committed"] and "second_tries" not in verdict["checks"]
    engine.require_out()


@pytest.mark.parametrize("at", [0, 1])
def test_one_worker_that_fails_takes_all_back(at: int, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.update(1)
    for version in (2, 3):
        engine.workers[at].guard.fail = [True, True]
        assert engine.update(version)["checks"]["rolled_back"] == 1
        engine.require(1)
        engine.workers[at].model.fail_behind = [1, 0]
        assert engine.update(version)["checks"]["rolled_back"] == 1
        engine.require(1)


@pytest.mark.parametrize("step", ["load", "prove"])
def test_an_engine_that_did_not_come_back_serves_nothing(step: str, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.update(1)
    if step == "load":
        engine.workers[1].model.fail_behind = [1, 1, 1]
    else:
        engine.workers[1].guard.fail = [True, True, True]
    verdict = engine.update(2)
    assert "rolled_back" not in verdict["checks"]
    engine.require_out()
    assert engine.core.ended == 1, "requests that stand still would wait for the next update"
    engine.workers[0].guard.fail = [True, True]
    assert "rolled_back" not in engine.update(3)["checks"], "it served nothing to go back to"
    engine.require_out()
    assert engine.update(4)["committed"]
    engine.require(4)


def test_an_engine_that_can_not_go_on_is_told_as_such(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.update(1)
    engine.workers[0].guard.fail = [True, True]
    engine.core.fail["resume"] = 1
    assert not engine.update(2)["committed"]
    engine.require_out()
    assert engine.update(3)["committed"]
    engine.require(3)


def test_an_update_that_workers_were_not_told_counts_is_not_gone_back_to(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.update(1)
    stock = engine.core.rpc

    async def rpc(method: str, *args: Any) -> list[dict[str, Any]]:
        if method == "weightsync_keep":
            raise InternalError("lost")
        return await stock(method, *args)

    engine.core.rpc = rpc  # type: ignore[method-assign]
    assert engine.update(2)["committed"]
    engine.core.rpc = stock  # type: ignore[method-assign]
    engine.workers[0].guard.fail = [True, True]
    assert "rolled_back" not in engine.update(3)["checks"]
    engine.require_out()


def test_a_version_that_was_undone_and_comes_again_finds_nothing_under_its_salt(tmp_path: Path) -> None:
    engine = Engine(tmp_path, caches="salt")
    engine.update(1)
    engine.core.fail["stamp"] = 1
    engine.update(2)
    engine.require(1)
    engine.core.fail["reset"] = 1
    assert engine.update(2)["error"]["message"].startswith("the prefix cache could not be dropped"), "it is asked for"
    engine.require(1)
    assert engine.update(2, value=5)["committed"]
    engine.require(2, value=5)


def test_an_engine_that_restarted_since_it_received_an_update_says_so(tmp_path: Path) -> None:
    engine = Engine(tmp_path)

    async def commit() -> Any:
        return await engine.actor.commit("u1", 1, 0)

    verdict = asyncio.run(commit())["value"]
    assert (verdict["error"]["code"], verdict["state"], verdict["version"]) == ("aborted", "pending", None)
    assert "restarted" in verdict["error"]["message"]
    assert not engine.core.running, "it has nothing that it may serve"


def test_an_update_that_is_being_applied_is_not_ended_below_it(tmp_path: Path) -> None:
    """A new controller, or a trainer that gives up, may ask for it: the bytes would be gone between loading and the proof."""
    engine = Engine(tmp_path, workers=1)
    update, stock, loaded = engine.workers[0].begin(weights(1)), engine.core.rpc, asyncio.Event()

    async def rpc(method: str, *args: Any) -> list[dict[str, Any]]:
        answer = await stock(method, *args)
        if method == "weightsync_apply":
            loaded.set()
            await asyncio.sleep(0.05)
        return answer

    async def run() -> tuple[Any, Any, Any]:
        engine.core.rpc = rpc  # type: ignore[method-assign]
        commit = asyncio.create_task(engine.actor.commit(update, 1, 0))
        await loaded.wait()
        ended, begun = await engine.actor.abort(update), await engine.actor.begin({"base_update": ""})
        return ended, begun, await commit

    ended, begun, committed = asyncio.run(run())
    assert ended["error"]["code"] == begun["error"]["code"] == "update_conflict" and committed["value"]["committed"]
    assert begun["error"]["message"] == f"engine 0 still applies update {update}"
    engine.require(1)
