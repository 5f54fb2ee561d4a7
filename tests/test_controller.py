"""The controller's part in updates that end at odd moments. Without Ray: engines are made up.

Not covered: engines that die, and what engines do (`test_faults.py`, `test_engine_update.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.test_ledger import engine, request
from weightsync import config
from weightsync.codec import encode
from weightsync.fleet.controller import Controller
from weightsync.fleet.ledger import Update
from weightsync.protocol import BeginOrder, EngineVerdict, Place


class Roster:
    """Stands for the engines: what each has begun and not ended."""

    def __init__(self, controller: Controller) -> None:
        self._ledger, self.begun, self.gate = controller._ledger, dict[int, str](), asyncio.Event()
        self.gate.set()
        self.rested: list[tuple[list[int], int]] = []
        self.place: Place | None = None  # of every worker

    async def refresh(self, *, waited_for: bool = False) -> None:
        for ordinal in range(2):
            self._ledger.see(engine(ordinal))

    def members(self, ordinals: Iterable[int]) -> tuple[dict[int, str], dict[int, tuple[Place | None, ...]]]:
        return {ordinal: f"{ordinal}-first" for ordinal in ordinals}, {ordinal: (self.place,) for ordinal in ordinals}

    async def begin(self, order: BeginOrder) -> None:
        await self.gate.wait()
        self.begun[order.engine] = order.request.update_id

    async def late(self, update: Update, until: float) -> list[str]:
        return [f"engine {ordinal}" for ordinal in update.engines if self.begun.get(ordinal) != update.request.update_id]

    async def held(self) -> set[str]:
        return set(self.begun.values())

    async def abort(self, update_id: str) -> None:
        self.begun = {ordinal: held for ordinal, held in self.begun.items() if held != update_id}

    async def rest(self, engines: list[int], level: int, timeout_seconds: float) -> None:
        self.rested.append((engines, level))

    async def commit(self, update: Update, ordinal: int) -> EngineVerdict:
        raise NotImplementedError


def drive(folder: Path, scenario: Callable[[Controller, Roster], Coroutine[Any, Any, None]]) -> None:
    (folder / "config.json").write_text("{}")

    async def run() -> None:
        controller = Controller(config.dump(config.load({"engine.model": folder})))
        roster = Roster(controller)
        controller._roster = roster  # type: ignore[assignment]
        await scenario(controller, roster)
        for task in controller._background:
            task.cancel()

    asyncio.run(run())


def begin(update_id: str = "u1", version: int = 1) -> dict[str, Any]:
    data: dict[str, Any] = encode(request(update_id, version))
    return data


def test_an_update_that_is_aborted_while_it_is_admitted_leaves_nothing_in_engines(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Roster) -> None:
        roster.gate.clear()
        admission = asyncio.create_task(controller.begin(begin()))
        await asyncio.sleep(0.05)
        assert (await controller.abort("u1", "the trainer has gone"))["value"]["state"] == "aborted"
        roster.gate.set()  # an engine that began only now, behind the abort
        assert (await admission)["error"]["code"] == "aborted"
        assert roster.begun == {}
        assert "value" in await controller.begin(begin("u2"))

    drive(tmp_path, scenario)


def test_two_ranks_on_one_gpu_are_refused_and_nothing_has_begun(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Roster) -> None:
        roster.place = Place("boot/1", "GPU-0")
        refused = await controller.begin(begin() | {"transport": "nccl"})
        assert refused["error"]["code"] == "refused" and "engine 0 and worker 0 of engine 1 are on one GPU" in refused["error"]["message"]
        assert roster.begun == {}
        assert "value" in await controller.begin(begin("u2"))

    drive(tmp_path, scenario)


def test_an_abort_of_an_update_that_an_earlier_controller_admitted_reaches_engines(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Roster) -> None:
        await controller.start()
        roster.begun = {0: "old", 1: "old"}
        assert (await controller.abort("old", "closed"))["error"]["message"].startswith("no update 'old' is known")
        assert roster.begun == {}

    drive(tmp_path, scenario)


def test_a_new_controller_ends_what_an_earlier_one_had_admitted(tmp_path: Path) -> None:
    """Its bytes would stay in the engines until the next update begins."""

    async def scenario(controller: Controller, roster: Roster) -> None:
        roster.begun = {0: "old", 1: "old"}
        await controller.start()
        await asyncio.sleep(0.05)
        assert roster.begun == {}
        assert "value" in await controller.begin(begin())
        await asyncio.sleep(0.05)
        assert roster.begun == {0: "u1", 1: "u1"}

    drive(tmp_path, scenario)


def test_engines_neither_sleep_nor_wake_while_an_update_is_under_way(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Roster) -> None:
        assert "value" in await controller.begin(begin())
        for level in (0, 1, 2):
            refused = (await controller.rest([0], level, 5.0))["error"]
            assert refused["code"] == "update_conflict" and refused["message"].startswith("update u1 is under way")
        assert roster.rested == []
        await controller.abort("u1", "skipped")
        assert "committed_version" in (await controller.rest([0], 2, 5.0))["value"]
        assert roster.rested == [([0], 2)]

    drive(tmp_path, scenario)


def test_a_partial_update_reaches_engines_with_its_base(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Roster) -> None:
        orders: list[BeginOrder] = []
        stock = roster.begin

        async def begin_noting(order: BeginOrder) -> None:
            orders.append(order)
            await stock(order)

        roster.begin = begin_noting  # type: ignore[method-assign]
        asked = begin("u2", 6) | {"scope": ["w"], "base_version": None}
        assert (await controller.begin(asked))["error"]["code"] == "base_refused"

        async def refresh(*, waited_for: bool = False) -> None:
            for ordinal in range(2):
                controller._ledger.see(replace(engine(ordinal, 5), update_id="u1"))

        roster.refresh = refresh  # type: ignore[method-assign]
        assert "value" in await controller.begin(asked)
        assert {(order.base_version, order.base_update, order.request.scope) for order in orders} == {(5, "u1", ("w",))}

    drive(tmp_path, scenario)
