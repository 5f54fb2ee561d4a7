"""Whom a pin holds, what that changes in the fleet's book, and what engines, controller and clients make of it.

Not covered: processes (`test_pins.py`), vLLM (`test_pins_on_fleet.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_controller import Roster, begin, drive
from tests.test_engine_update import Engine
from tests.test_ledger import apply, engine, fleet, request
from tests.test_roster import Handle, roster_of, says
from tests.workers import without_vllm
from weightsync.client.rollouts import Rollouts
from weightsync.codec import encode
from weightsync.errors import DeadlineExceeded, NoEngineReady, PinRefused, Refused, UpdateConflict, WeightSyncError
from weightsync.fleet.controller import Controller
from weightsync.fleet.ledger import Ledger
from weightsync.fleet.pinning import choose, stands
from weightsync.fleet.scaling import leaving
from weightsync.metrics import Recorder
from weightsync.protocol import EngineState, EngineStatus, Retained

KEPT = Retained("u5", 5, 0, 4096, "h", 68, "u5.bytes")
DEAD, ASLEEP, OUT = EngineState.DEAD, EngineState.ASLEEP, EngineState.QUARANTINED


def at(ordinal: int, version: int | None = 5, pin: str = "", state: EngineState | None = None, **more: Any) -> EngineStatus:
    known = {"update_id": None if version is None else f"u{version}", "pinned": pin, **more}
    return replace(engine(ordinal, version, state), **known)


# --- whom ---------------------------------------------------------------------------------------

CHOSEN: list[tuple[str, list[EngineStatus], int, int | None, tuple[int, ...]]] = [
    # what is tried, engines, how many of version 5, sync.require → who
    ("the highest", [at(0), at(1), at(2)], 1, None, (2,)),
    ("several", [at(0), at(1), at(2)], 2, None, (1, 2)),
    ("those that keep bytes come last", [at(0), at(1), at(2, retained=KEPT)], 1, None, (1,)),
    ("and come when nobody else can", [at(0), at(1, 4), at(2, retained=KEPT)], 2, None, (0, 2)),
    ("others hold something else", [at(0), at(1, 4), at(2, None)], 1, None, (0,)),
    ("a version below the committed one", [at(0, 5), at(1, 6), at(2, 6)], 1, None, (0,)),
    ("those that serve nothing can't", [at(0), at(1), at(2, state=OUT), at(3, state=ASLEEP), at(4, state=DEAD)], 1, None, (1,)),
    ("another pin's stay with it", [at(0), at(1), at(2, pin="other")], 1, None, (1,)),
    ("it is so", [at(0), at(1), at(2, pin="eval")], 1, None, ()),
    ("it is so in part", [at(0), at(1), at(2), at(3, pin="eval")], 2, None, (2,)),
    ("as many as updates take stay", [at(0), at(1), at(2), at(3)], 2, 2, (2, 3)),
    ("one number, two updates: the fleet's own", [at(0), at(1), at(2, update_id="failed")], 1, None, (1,)),
    ("one number, two rewinds", [at(0, rewinds=1, update_id="x"), at(1, rewinds=1, update_id="x"), at(2, update_id="y")], 1, None, (1,)),
]  # fmt: skip


@pytest.mark.parametrize(("engines", "count", "require", "chosen"), [row[1:] for row in CHOSEN], ids=[row[0] for row in CHOSEN])
def test_those_are_pinned(engines: list[EngineStatus], count: int, require: int | None, chosen: tuple[int, ...]) -> None:
    assert choose(engines, "eval", 5, count, require, "u5") == chosen
    assert choose(engines[::-1], "eval", 5, count, require, "u5") == chosen


TOO_FEW = r"1 engine\(s\) are to be pinned as 'eval' at version 5, and 0 serve it unpinned: "
REFUSED: list[tuple[str, list[EngineStatus], int, int | None, str]] = [
    ("nobody serves it", [at(0, 6), at(1, 4), at(2, None)], 1, None,
     TOO_FEW + "engine 0 serves with version 6, engine 1 serves with version 4, engine 2 is pending with no version"),
    ("too few serve it", [at(0, 6), at(1), at(2, 6)], 2, None, r"2 engine\(s\) .*, and 1 serve it"),
    ("another pin has it", [at(0, 6), at(1, 5, "other")], 1, None,
     TOO_FEW + "engine 0 .* 6, engine 1 serves with version 5, pinned as 'other'"),
    ("it holds another version", [at(0), at(1), at(2, 4, "eval")], 1, None,
     "pin 'eval' holds version 4 on engine 2, and is asked for at version 5"),
    ("it holds more engines", [at(0), at(1, pin="eval"), at(2, pin="eval")], 1, None, "pin 'eval' holds 2 engines, and is asked for 1"),
    ("no engine would be left", [at(0), at(1)], 2, None, r"would leave 0 for updates, which take 1: engine 0 serves"),
    ("nor one that lives", [at(0, state=DEAD), at(1)], 1, None, r"would leave 0 for updates.*engine 0 is dead with version 5"),
    ("fewer than must commit", [at(0), at(1), at(2)], 1, 3, r"would leave 2 for updates, which take 3 \(sync.require\)"),
    ("beside those of another pin", [at(0), at(1), at(2), at(3, pin="other")], 1, 3, "would leave 2 for updates, which take 3"),
    ("the rest of it is of another update", [at(0), at(1, 6), at(2, pin="eval", update_id="u4")], 2, None, "1 engine.*, and 0 serve it"),
    ("there is no engine", [], 1, None, "there are no engines"),
    ("none is asked for", [at(0), at(1)], 0, None, "pin 'eval' of 0 engines: want 1 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("engines", "count", "require", "said"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_pin_that_cannot_be_says_why_and_what_engines_hold(
    engines: list[EngineStatus], count: int, require: int | None, said: str
) -> None:
    with pytest.raises(PinRefused, match=said) as caught:
        choose(engines, "eval", 5, count, require, "u5")
    assert isinstance(caught.value, Refused) and not caught.value.retryable


@pytest.mark.parametrize("name", ["", "a b", "größe", "x" * 65, "eval\n", "../x", "a/b", "'"])
def test_a_name_is_short_and_plain(name: str) -> None:
    with pytest.raises(PinRefused, match="want 1 to 64 ASCII"):
        stands([at(0)], name, 5, 1)


@pytest.mark.parametrize("name", ["e", "eval-2.x_Y", "x" * 64])
def test_a_name_that_is(name: str) -> None:
    assert stands([at(0, pin=name)], name, 5, 1) and not stands([at(0)], name, 5, 1)


# --- the book -----------------------------------------------------------------------------------


def pinned_fleet(engines: int = 3, pinned: int = 1, require: int | None = None) -> Ledger:
    """Version 5 on all, of which the last ones are pinned."""
    ledger = fleet(engines, require)
    for ordinal in range(engines):
        ledger.see(at(ordinal, pin="eval" if ordinal >= engines - pinned else ""))
    return ledger


@pytest.mark.parametrize(("require", "must"), [(None, 2), (1, 1), (2, 2), (3, 2)])
def test_a_pinned_engine_is_for_no_update_and_none_waits_for_it(require: int | None, must: int) -> None:
    ledger = pinned_fleet(require=require)
    assert (ledger.require, ledger.ready) == (must, 2)
    update = ledger.admit(request("u6", 6), 0.0)
    assert update.engines == (0, 1)
    assert apply(ledger, update, True, True) and ledger.committed_version == 6
    assert [v.engine for v in update.verdicts] == [0, 1]
    ledger.see(at(2, pin="eval"))
    assert (ledger.ready, ledger.engines[2].version, ledger.lacking()) == (2, 5, {})
    ledger.see(at(2))
    assert (ledger.ready, ledger.require, ledger.lacking()) == (2, min(require or 3, 3), {2: "u6"})


def test_a_pinned_engine_that_is_dead_or_asleep_stands_in_nobodys_way() -> None:
    for state in (DEAD, ASLEEP):
        ledger = pinned_fleet()
        ledger.see(at(2, pin="eval", state=state))
        assert ledger.admit(request("u6", 6), 0.0).engines == (0, 1)
    ledger = pinned_fleet()
    ledger.lose(2, "deadline")
    assert ledger.engines[2].pinned == "eval", "it may come back with it"
    assert ledger.admit(request("u6", 6), 0.0).engines == (0, 1)


def test_a_partial_update_is_for_those_that_follow() -> None:
    ledger = pinned_fleet()
    update = ledger.admit(replace(request("u6", 6), scope=("w",)), 0.0)
    assert (update.engines, update.left_out) == ((0, 1), ())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_new_controller_takes_what_is_pinned_for_the_fleets_version_only_while_it_knows_nothing_better(order: tuple[int, ...]) -> None:
    kept = Retained("u9", 9, 0, 4096, "h", 68, "u9.bytes")
    long_ago = replace(kept, update_id="u5", version=5)
    said = [at(0, None, retained=kept), at(1, 5, "eval", retained=long_ago), at(2, None, retained=long_ago)]
    ledger = Ledger(None, 10)
    for ordinal in order:
        ledger.see(said[ordinal])
    assert (ledger.committed_version, ledger.committed_update) == (9, "u9")
    ledger.see(at(2, 9))
    ledger.see(at(0, None, retained=replace(kept, version=10, update_id="late")))
    assert ledger.committed_version == 9, "an engine that follows serves it: nothing that is only kept lies above"
    alone = Ledger(None, 10)
    alone.see(said[1])
    assert alone.committed_version == 5


def test_an_engine_may_be_pinned_at_what_it_committed_too_late_to_be_told() -> None:
    ledger = fleet(2, require=1)
    assert apply(ledger, ledger.admit(request("u5", 5), 0.0), True, False)
    ledger.see(at(1, 5))
    ledger.see(at(1, 5, "eval"))
    assert apply(ledger, ledger.admit(request("u6", 6), 0.0), True)
    for pin in ("eval", ""):
        ledger.see(at(1, 5, pin))
        assert (ledger.engines[1].state, ledger.engines[1].version) == (EngineState.SERVING, 5)


def test_pinned_engines_are_not_taken_away() -> None:
    assert leaving([at(0), at(1), at(2, pin="eval"), at(3, None, "eval")], range(4), 1) == (1,)
    assert leaving([at(0), at(1), at(2, pin="eval"), at(3, None, "eval")], range(4), 2) == (0, 1)


def test_metrics_count_them() -> None:
    recorder = Recorder()
    ledger = Ledger(None, 10)
    for status in (at(0), at(1, pin="eval"), at(2, pin="b")):
        ledger.see(status)
    recorder.fleet(ledger)
    assert "weightsync_pinned_engines 2.0" in recorder.text().splitlines()


# --- an engine ----------------------------------------------------------------------------------


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    without_vllm(monkeypatch)
    made = Engine(tmp_path, workers=1)
    assert made.update(1)["committed"]
    return made


def ask(call: Any) -> Any:
    answer = asyncio.run(call)
    if "error" in answer:
        raise WeightSyncError.from_dict(answer["error"])
    return answer["value"]


def test_an_engine_keeps_its_pin_and_takes_no_update(serving: Engine) -> None:
    actor = serving.actor
    for _ in range(2):
        assert ask(actor.pin("eval", 1))["status"]["pinned"] == "eval"
    order = {"base_update": "", "request": {"update_id": "u"}, "restores": "", "hand_on": False}
    for call in (actor.begin(order), actor.sleep(2), actor.pin("other", 1)):
        with pytest.raises(PinRefused, match=r"engine 0 is pinned as 'eval' at version 1 and .*\[engine 0\]. Unpin it first"):
            ask(call)
    serving.require(1)
    assert ask(actor.unpin("other"))["status"]["pinned"] == "eval", "a pin is taken off by its name"
    assert ask(actor.unpin("eval"))["status"]["pinned"] == ""
    assert serving.update(2)["committed"]


def test_an_engine_is_pinned_at_what_it_serves_and_at_nothing_else(serving: Engine) -> None:
    with pytest.raises(PinRefused, match="engine 0 is serving with version 1, and is to be pinned at version 2"):
        ask(serving.actor.pin("eval", 2))
    serving.actor._state = OUT
    with pytest.raises(PinRefused, match="engine 0 is quarantined with version 1"):
        ask(serving.actor.pin("eval", 1))
    assert serving.actor._pinned == ""


def test_an_engine_is_not_pinned_while_it_applies_an_update(serving: Engine) -> None:
    async def scenario() -> Any:
        serving.actor._commits = {"u": asyncio.create_task(asyncio.sleep(5))}  # type: ignore[dict-item]
        return await serving.actor.pin("eval", 1)

    assert asyncio.run(scenario())["error"]["code"] == UpdateConflict.code
    assert serving.actor._pinned == ""


def test_an_engine_whose_sleep_failed_is_pinned_no_longer(serving: Engine, caplog: pytest.LogCaptureFixture) -> None:
    actor = serving.actor
    ask(actor.pin("eval", 1))

    async def fails() -> None:
        raise RuntimeError("no memory")

    with caplog.at_level(logging.WARNING), pytest.raises(WeightSyncError, match="no memory"):
        asyncio.run(actor._rest(fails()))
    assert (actor._pinned, actor._version) == ("", None)
    assert "engine 0 is no longer pinned as 'eval' at version 1" in caplog.text


# --- the controller -----------------------------------------------------------------------------


class Pinned(Roster):
    """Engines that keep their pins, and say so when they are asked."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(controller)
        self.told: list[tuple[Any, ...]] = []
        self.pins = {0: "", 1: ""}
        controller._pins._roster = self  # type: ignore[assignment]

    async def refresh(self, *, waited_for: bool = False) -> None:
        for ordinal, pin in self.pins.items():
            self._ledger.see(at(ordinal, 5, pin))

    async def pin(self, engines: tuple[int, ...], name: str, version: int) -> None:
        self.told.append((engines, name, version))
        self.pins |= dict.fromkeys(engines, name)
        await self.refresh()

    async def unpin(self, engines: list[int], name: str) -> None:
        self.told.append((tuple(engines), name))
        self.pins |= dict.fromkeys(engines, "")
        await self.refresh()


def with_pins(folder: Path, scenario: Callable[[Controller, Pinned], Any]) -> None:
    async def run(controller: Controller, _: Roster) -> None:
        controller._roster = roster = Pinned(controller)  # type: ignore[assignment]
        await scenario(controller, roster)  # type: ignore[arg-type]

    drive(folder, run)


def test_a_pin_is_set_and_taken_off_by_a_controller_that_has_only_been_made(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Pinned) -> None:
        for _ in range(2):
            status = (await controller.pin("eval", 5, 1))["value"]
            assert ([e["pinned"] for e in status["engines"]], status["ready"]) == (["", "eval"], 1)
        assert roster.told == [((1,), "eval", 5)], "the same again is nothing new"
        assert (await controller.pin("eval", 4, 1))["error"]["code"] == "pin_refused"
        assert (await controller.pin("other", 5, 1))["error"]["code"] == "pin_refused", "engine 0 alone is left"
        assert "value" in await controller.unpin("other")
        controller._ledger.engines.clear()  # as in a controller that has just been made
        status = (await controller.unpin("eval"))["value"]
        assert [e["pinned"] for e in status["engines"]] == ["", ""]
        assert roster.told[1:] == [((1,), "eval")]

    with_pins(tmp_path, scenario)


def test_while_an_update_is_under_way_nothing_is_pinned_or_unpinned_but_what_is_so_already(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Pinned) -> None:
        assert "value" in await controller.pin("eval", 5, 1)
        assert "value" in await controller.begin(begin("u6", 6))
        assert roster.begun == {0: "u6"}
        for call in (controller.pin("eval", 5, 2), controller.pin("b", 5, 1), controller.unpin("eval")):
            refused = (await call)["error"]
            assert (refused["code"], refused["retryable"]) == ("update_conflict", True)
            assert refused["message"].startswith("update u6 to version 6 is under way")
        assert "value" in await controller.pin("eval", 5, 1) and "value" in await controller.unpin("b")
        await controller.abort("u6", "skipped")
        assert "value" in await controller.unpin("eval")

    with_pins(tmp_path, scenario)


def test_while_an_update_is_admitted_nothing_is_pinned_behind_its_back(tmp_path: Path) -> None:
    async def scenario(controller: Controller, roster: Pinned) -> None:
        roster.gate.clear()
        admission = asyncio.create_task(controller.begin(begin("u6", 6)))
        await asyncio.sleep(0.05)
        assert (await controller.pin("eval", 5, 1))["error"]["code"] == "update_conflict"
        roster.gate.set()
        assert (await admission)["value"]["engines"] == [0, 1]

    with_pins(tmp_path, scenario)


def test_engines_are_pinned_all_or_none(tmp_path: Path) -> None:
    told: list[Any] = []

    def takes(ordinal: int, pin: bool) -> Callable[..., Any]:
        async def answer(*args: Any) -> Any:
            told.append((ordinal, *args))
            return {"value": {"status": encode(at(ordinal, pin="eval" if pin else ""))}}

        return answer

    async def refuses(*_: Any) -> Any:
        return {"error": DeadlineExceeded("engine 1 sleeps").to_dict()}

    handles = Handle(pin=takes(0, True), unpin=takes(0, False)), Handle(pin=refuses, unpin=refuses)
    roster, ledger = roster_of(tmp_path, *handles)
    with pytest.raises(DeadlineExceeded, match="engine 1 sleeps"):
        asyncio.run(roster.pin([0, 1], "eval", 5))
    assert told == [(0, "eval", 5), (0, "eval")] and ledger.engines[0].pinned == ""


def test_no_engine_falls_asleep_where_a_pinned_one_would_lose_its_weights(tmp_path: Path) -> None:
    slept: list[int] = []

    async def sleeps(level: int) -> Any:
        slept.append(level)
        return {"value": {"status": encode(at(0, state=ASLEEP))}}

    roster, ledger = roster_of(tmp_path, Handle(sleep=sleeps), Handle(sleep=sleeps))
    ledger.see(at(1, pin="eval"))
    with pytest.raises(PinRefused, match="level 2 drops weights, and pinned are: engine 1 as 'eval' at version 5"):
        asyncio.run(roster.rest([], 2, 5.0))
    assert slept == []
    asyncio.run(roster.rest([0], 2, 5.0))
    asyncio.run(roster.rest([], 1, 5.0))
    assert slept == [2, 1, 1]


def test_a_pin_that_went_with_its_process_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def heard(incarnation: str, status: EngineStatus) -> str:
        roster._handles[0] = Handle(describe=says({"incarnation": incarnation, "places": [], "status": encode(status)}))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            asyncio.run(roster.refresh())
        return caplog.text

    roster, ledger = roster_of(tmp_path, Handle())
    assert heard("0-1", at(0, pin="eval")) == heard("0-1", at(0, pin="eval")) == heard("0-1", at(0)) == ""
    assert heard("0-1", at(0, pin="eval")) == ""
    ledger.lose(0, "engine_died")
    assert "engine 0 was pinned as 'eval' at version 5 and has restarted" in heard("0-2", at(0, None))
    assert heard("0-2", at(0, None)) == ""


# --- rollouts -----------------------------------------------------------------------------------


class Engines:
    """What the service says of engines, and what these answer: the version they really hold."""

    def __init__(self, *engines: EngineStatus) -> None:
        self.said, self.asked = engines, 0
        self.holds = {e.url: e.version for e in engines}

    def ask(self) -> tuple[EngineStatus, ...]:
        self.asked += 1
        return self.said

    def request(self, method: str, url: str, *_: Any) -> Any:
        version = self.holds[url.removesuffix("/inference/v1/generate")]
        spans = [{"version": str(version), "start": 0, "end": 1}]
        return {"choices": [{"token_ids": [1], "weight_versions": spans, "finish_reason": "length"}]}

    def rollouts(self) -> Rollouts:
        return Rollouts(SimpleNamespace(request=self.request), self.ask)  # type: ignore[arg-type]


def served(ordinal: int, version: int = 5, pin: str = "") -> EngineStatus:
    return replace(at(ordinal, version, pin), url=f"http://e{ordinal}")


def sample(rollouts: Rollouts, engine: int | None = None, pin: str | None = None) -> int:
    return rollouts.generate([1], {}, 1.0, engine, pin).engine


def test_requests_go_to_those_that_follow_unless_they_name_an_engine_or_a_pin() -> None:
    rollouts = Engines(served(0), served(1), served(2, 4, "eval"), served(3, 4, "eval")).rollouts()
    assert {sample(rollouts) for _ in range(8)} == {0, 1}
    assert {sample(rollouts, pin="eval") for _ in range(8)} == {2, 3}
    assert sample(rollouts, engine=2) == sample(rollouts, engine=2, pin="eval") == 2
    with pytest.raises(NoEngineReady, match=r"no engine serves as engine 0 under pin 'eval': 0 serving, .* 2 serving \(pin 'eval'\)"):
        sample(rollouts, engine=0, pin="eval")
    with pytest.raises(NoEngineReady, match="no engine serves under pin 'none'"):
        sample(rollouts, pin="none")
    with pytest.raises(NoEngineReady, match=r"no engine serves: 0 serving \(pin 'eval'\)"):
        sample(Engines(served(0, 5, "eval")).rollouts())


def test_a_pin_that_is_new_to_a_client_is_looked_up() -> None:
    engines = Engines(served(0), served(1))
    rollouts = engines.rollouts()
    sample(rollouts)
    engines.said = served(0), served(1, 5, "eval")
    assert sample(rollouts, pin="eval") == 1 and engines.asked == 2


def test_nothing_is_sampled_under_a_pin_from_what_has_moved_on_since_it_was_looked_up() -> None:
    engines = Engines(served(0), served(1, 5, "eval"))
    rollouts = engines.rollouts()
    assert sample(rollouts, pin="eval") == 1
    engines.said, engines.holds["http://e1"] = (served(0, 6), served(1, 6)), 6
    with pytest.raises(NoEngineReady, match="under pin 'eval'"):
        sample(rollouts, pin="eval")


def test_a_client_that_does_not_know_of_a_pin_looks_again_when_an_engine_falls_behind() -> None:
    engines = Engines(served(0), served(1))
    rollouts = engines.rollouts()
    assert {sample(rollouts) for _ in range(4)} == {0, 1} and engines.asked == 1
    engines.said, engines.holds["http://e0"] = (served(0, 6), served(1, 5, "eval")), 6  # by somebody else
    said = [sample(rollouts) for _ in range(8)]
    assert said.count(1) <= 2 and set(said[-5:]) == {0} and engines.asked == 2
