"""The controller's part in updates that end at odd moments. Without Ray: engines are made up.

Not covered: engines that die, and what engines do (`test_faults.py`, `test_engine_update.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.test_ledger import engine, request, verdict
from weightsync import config
from weightsync.codec import encode
from weightsync.errors import TransportFailed
from weightsync.fleet.controller import Controller
from weightsync.fleet.ledger import Update
from weightsync.protocol import EngineState, EngineVerdict, Place


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

    async def discover(self) -> None:
        """They are those of the settings."""

    async def begin(self, update: Update, ordinal: int, *, hand_on: bool = False, restores: str = "") -> None:
        await self.gate.wait()
        self.begun[ordinal] = update.request.update_id

    async def late(self, update: Update, until: float) -> list[str]:
        return [f"engine {ordinal}" for ordinal in update.engines if self.begun.get(ordinal) != update.request.update_id]

    async def held(self) -> set[str]:
        return set(self.begun.values())

    async def abort(self, update_id: str) -> None:
        self.begun = {ordinal: held for ordinal, held in self.begun.items() if held != update_id}

    async def rest(self, engines: list[int], level: int, timeout_seconds: float) -> None:
        self.rested.append((engines, level))

    async def commit_all(self, update: Update) -> list[EngineVerdict]:
        return await asyncio.gather(*(self.commit(update, ordinal) for ordinal in update.engines))

    async def commit(self, update: Update, ordinal: int) -> EngineVerdict:
        raise NotImplementedError


def drive(folder: Path, scenario: Callable[[Controller, Roster], Coroutine[Any, Any, None]], **settings: Any) -> None:
    (folder / "config.json").write_text("{}")

    async def run() -> None:
        controller = Controller(config.dump(config.load({"engine.model": folder, **settings})))
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


def test_an_update_that_is_withdrawn_before_it_has_been_admitted_is_not_admitted_behind_that(tmp_path: Path) -> None:
    """Its trainer has given up waiting for the answer; nobody would commit it, and it would stand in the way until its deadline."""

    async def scenario(controller: Controller, roster: Roster) -> None:
        hangs, stock = asyncio.Event(), roster.refresh

        async def refresh(*, waited_for: bool = False) -> None:
            await hangs.wait()  # an engine that does not answer
            await stock()

        roster.refresh = refresh  # type: ignore[method-assign]
        first, second = (asyncio.create_task(controller.begin(begin(update_id))) for update_id in ("u1", "u2"))  # one waits for the other
        await asyncio.sleep(0.05)
        for update_id in ("u1", "u2"):
            assert (await controller.abort(update_id, "the trainer got no answer"))["error"]["code"] == "refused"
        hangs.set()
        assert [(await task)["error"]["code"] for task in (first, second)] == ["aborted", "aborted"]
        assert roster.begun == {} and controller._ledger.list() == []
        assert "value" in await controller.begin(begin("u3"))

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
            assert refused["code"] == "update_conflict" and refused["message"].startswith("update u1 to version 1 is under way")
        assert roster.rested == []
        await controller.abort("u1", "skipped")
        assert "committed_version" in (await controller.rest([0], 2, 5.0))["value"]
        assert roster.rested == [([0], 2)]

    drive(tmp_path, scenario)


def test_a_deadline_that_passes_while_engines_apply_is_their_verdicts_to_tell(tmp_path: Path) -> None:
    """Aborted below them, the next update would have begun while they write."""

    async def scenario(controller: Controller, roster: Roster) -> None:
        async def commit(update: Update, ordinal: int) -> EngineVerdict:
            await asyncio.sleep(0.5)
            return EngineVerdict(ordinal, True, update.request.version, EngineState.SERVING)

        roster.commit = commit  # type: ignore[method-assign]
        assert "value" in await controller.begin(begin() | {"timeout_seconds": 0.1})
        applied = asyncio.create_task(controller.commit("u1", 5.0))
        await asyncio.sleep(0.35)
        assert (await controller.update("u1"))["value"]["state"] == "applying"
        assert (await controller.begin(begin("u2", 2)))["error"]["code"] == "update_conflict"
        assert (await applied)["value"]["state"] == "committed"

    drive(tmp_path, scenario)


def test_everybody_meets_anew_behind_an_update_that_did_not_end_well_and_behind_no_other(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Roster) -> None:
        well = True

        async def commit(update: Update, ordinal: int) -> EngineVerdict:
            return verdict(ordinal, update.request.version, well or ordinal == 0)

        roster.commit = commit  # type: ignore[method-assign]

        async def generation(version: int) -> int:
            return int((await controller.begin(begin(f"u{version}", version)))["value"]["communicator"]["generation"])

        first = await generation(1)
        assert (await controller.commit("u1", 5.0))["value"]["state"] == "committed"
        assert await generation(2) == first
        await controller.abort("u2", "skipped")
        second = await generation(3)
        assert second > first
        well = False
        assert (await controller.commit("u3", 5.0))["value"]["state"] == "aborted"
        assert await generation(4) > second

    drive(tmp_path, scenario)


def test_what_fails_before_the_commit_of_what_is_not_staged_ends_it(tmp_path: Path) -> None:
    """Engines are ready when they have met the trainer, who may be gone again before it commits."""

    async def scenario(controller: Controller, roster: Roster) -> None:
        assert "value" in await controller.begin(begin())
        await asyncio.sleep(0.1)
        assert (await controller.update("u1"))["value"]["state"] == "staged"

        async def late(update: Update, until: float) -> list[str]:
            raise TransportFailed("the trainer has left")

        roster.late = late  # type: ignore[method-assign]
        await asyncio.sleep(0.3)
        ended = (await controller.update("u1"))["value"]
        assert (ended["state"], ended["error"]["code"]) == ("aborted", "transport_failed") and roster.begun == {}

    drive(tmp_path, scenario, **{"sync.stage": "none"})


def test_a_partial_update_reaches_engines_with_its_base(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Roster) -> None:
        begun: list[tuple[Update, bool]] = []
        stock = roster.begin

        async def begin_noting(update: Update, ordinal: int, *, hand_on: bool = False, restores: str = "") -> None:
            begun.append((update, hand_on))
            await stock(update, ordinal)

        roster.begin = begin_noting  # type: ignore[method-assign]
        asked = begin("u2", 6) | {"scope": ["w"], "base_version": None}
        assert (await controller.begin(asked))["error"]["code"] == "base_refused"

        async def refresh(*, waited_for: bool = False) -> None:
            for ordinal in range(2):
                controller._ledger.see(replace(engine(ordinal, 5), update_id="u1"))

        roster.refresh = refresh  # type: ignore[method-assign]
        assert "value" in await controller.begin(asked)
        assert {(update.base_version, update.base_update, update.request.scope) for update, _ in begun} == {(5, "u1", ("w",))}
        assert [hand_on for _, hand_on in begun] == [True, False], "one of them keeps it for engines that come later"

    drive(tmp_path, scenario)
