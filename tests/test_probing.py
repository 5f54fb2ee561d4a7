"""The probe behind a commit: how answers are compared, what a controller makes of them, and that it is in nobody's way.

Engines are made up. Not covered: vLLM's own answers (`test_mismatch_on_fleet.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_controller import drive
from tests.test_engine_update import Engine
from tests.test_metrics import Fleet, engine, fleet_of, one_update, samples, scraped
from tests.workers import without_vllm
from weightsync.codec import decode
from weightsync.errors import DeadlineExceeded
from weightsync.fleet import probing, scores
from weightsync.fleet.compared import BASELINE_COMMITS, Baselines, apart, from_most
from weightsync.fleet.controller import Controller
from weightsync.mismatch import FLOOR_NATS, ProbeAnswer
from weightsync.protocol import EngineState, FleetStatus, UpdateStatus

At = dict[str, float]


def says(shift: float = 0.0, positions: int = 4) -> tuple[At, ...]:
    """Answers of a model, and of one whose log-probabilities lie this far off."""
    return tuple({"7": -1.0 - shift, "8": -2.0 + shift, "9": -5.0 - shift} for _ in range(positions))


# --- comparing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shifts", "off"),
    [
        ([0.0], []),
        ([0.0, 0.0], [0.0, 0.0]),
        ([0.0, 2.0], [2.0, 2.0]),  # of two nobody knows which
        ([0.0, 2.0, 0.0], [0.0, 2.0, 0.0]),
        ([2.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]),
        ([0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]),  # no majority
        ([0.0, 0.0, 0.0, 2.0, 3.0], [0.0, 0.0, 0.0, 2.0, 3.0]),
        ([0.0, math.nan, 0.0], [0.0, pytest.approx(1000, rel=0.01), 0.0]),
    ],
)
def test_an_engine_is_as_far_off_as_it_is_from_most(shifts: list[float], off: list[Any]) -> None:
    assert list(from_most({number: says(shift) for number, shift in enumerate(shifts)}).values()) == off


def test_a_token_that_one_engine_does_not_name_counts_at_most_as_its_least_likely_one() -> None:
    one, other = ({"1": -1.0, "2": -2.0},), ({"1": -1.0, "3": -4.0},)
    # Of 2 the other says at most -4, and of 3 the one at most -2: bounds from below.
    assert apart(one, other) == pytest.approx((0.0 + 2.0 + 2.0) / 3)


def test_answers_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        from_most({0: says(), 1: says(positions=3)})


def test_a_baseline_comes_of_the_first_commits_and_of_none_that_was_out() -> None:
    limits, early = Baselines(), 5 * FLOOR_NATS
    assert limits.limit(0, "engines") == early and limits.baseline(0, "engines") is None
    for value in (0.02, 7.0, 0.03, 0.03, 0.04, 9.0):
        assert limits.take("engines", {0: value}) == ({0} if value > early else set())
    assert limits.baseline(0, "engines") is None, "two of six were out"
    limits.take("engines", {0: 0.02})
    assert limits.baseline(0, "engines") == 0.03 and limits.limit(0, "engines") == pytest.approx(0.12)
    assert limits.take("engines", {0: 0.15}) == {0}
    for _ in range(BASELINE_COMMITS):
        limits.take("engines", {0: 0.1, 1: 0.0})
    assert limits.baseline(0, "engines") == 0.03, "it stays that of the first"
    assert limits.limit(1, "engines") == FLOOR_NATS, "engines that agree to the bit may still round otherwise one day"
    assert limits.limit(1, "graphs") == early
    limits.forget([0])
    assert (0, "engines") not in limits.last and limits.limit(0, "engines") == early


@pytest.mark.parametrize(
    ("shifts", "graphs", "named", "said"),
    [
        ([0.0, 0.0, 0.0], {0: 0.01, 1: 0.02}, set(), []),
        ([0.0, 2.0, 0.0], {}, {1}, ["engine 1 differs from most engines by 2 nats a token, and 0.25 is allowed"]),
        ([0.0, 2.0], {}, set(), ["engines 0, 1 differ at one version by 2 nats a token; none can be blamed, as there is no majority"]),
        (
            [0.0, 2.0],
            {0: 0.01, 1: 2.0},
            {1},
            [
                "engine 1: captured graphs differ from the same model without them by 2 nats a token, and 0.25 is allowed",
                "engines 0, 1 differ at one version by 2 nats a token; engine 1 is at fault by its graphs",
            ],
        ),
        (
            [0.0],
            {0: 2.0},
            {0},
            ["engine 0: captured graphs differ from the same model without them by 2 nats a token, and 0.25 is allowed"],
        ),
    ],
)
def test_who_is_named_and_what_is_said(shifts: list[float], graphs: dict[int, float], named: set[int], said: list[str]) -> None:
    engines = from_most({number: says(shift) for number, shift in enumerate(shifts)})
    assert Baselines().judge(range(len(shifts)), {"engines": engines, "graphs": graphs}) == (named, said)


def test_what_an_engine_was_off_by_is_over_when_there_is_nothing_to_hold_it_against() -> None:
    limits = Baselines()
    limits.judge([0, 1], {"engines": {0: 2.0, 1: 2.0}, "graphs": {}})
    assert set(limits.last) == {(0, "engines"), (1, "engines")}
    limits.judge([0], {"engines": {}, "graphs": {}})
    assert set(limits.last) == {(1, "engines")}


# --- the controller ------------------------------------------------------------------------------------


class Probed(Fleet):
    """Engines that answer as the test tells them to."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(controller)
        self.say[2] = engine(2)
        self.shifts = {0: 0.0, 1: 0.0, 2: 0.0}
        self.fails: dict[int, Exception] = {}
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.asked: list[tuple[int, str]] = []
        self.retired: list[tuple[int, str, str]] = []

    async def probe(self, ordinal: int, update_id: str, seconds: float) -> ProbeAnswer:
        self.asked.append((ordinal, update_id))
        await self.goes_on.wait()
        if ordinal in self.fails:
            raise self.fails[ordinal]
        return ProbeAnswer(says(self.shifts[ordinal]), no_graphs="this engine captures no graphs")

    async def retire(self, ordinal: int, update_id: str, reason: str) -> None:
        self.retired.append((ordinal, update_id, reason))


def probed(controller: Controller) -> Probed:
    made = Probed(controller)
    controller._roster = controller._probing._roster = made  # type: ignore[assignment]
    return made


def test_a_wrong_engine_is_named_in_result_status_metrics_and_log_and_serves_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        engines = probed(controller)
        first = decode(UpdateStatus, await one_update(controller, 1))
        assert first.probe is not None and (first.probe.named, first.probe.said) == ((), ())
        assert first.probe.engines == {"0": 0.0, "1": 0.0, "2": 0.0} and first.probe.no_graphs == "this engine captures no graphs"
        engines.shifts[1] = 1.5
        second = decode(UpdateStatus, await one_update(controller, 2))
        assert second.probe is not None and second.probe.named == (1,) and second.probe.engines["1"] == pytest.approx(1.5)
        assert second.state == "committed" and all(v.committed for v in second.verdicts) and engines.retired == []
        assert second.seconds["probe"] < 0.5
        status = decode(FleetStatus, (await controller.status())["value"])
        assert status.probe == second.probe == (status.update and status.update.probe)
        found = await scraped(controller)
        about = 'against="engines",engine="1"'
        assert found[f"weightsync_probe_difference_nats{{{about}}}"] == pytest.approx(1.5)
        assert found[f"weightsync_probe_limit_nats{{{about}}}"] == 0.25 and f"weightsync_probe_baseline_nats{{{about}}}" not in found
        assert [found[f'weightsync_probe_named{{engine="{o}"}}'] for o in (0, 1, 2)] == [0, 1, 0]
        assert found['weightsync_probes_total{engine="1",outcome="scored"}'] == 2 and found["weightsync_probe_seconds_count"] == 2
        engines.shifts[1] = 0.0
        for version in range(3, 3 + BASELINE_COMMITS):
            await one_update(controller, version)
        found = await scraped(controller)
        assert found[f"weightsync_probe_baseline_nats{{{about}}}"] == 0 and found[f"weightsync_probe_limit_nats{{{about}}}"] == FLOOR_NATS
        assert found['weightsync_probe_named{engine="1"}'] == 0

    drive(tmp_path, scenario, **{"engine.count": 3})
    assert "behind update u2, version 2: engine 1 differs from most engines by 1.5 nats a token, and 0.25 is allowed" in caplog.text


@pytest.mark.parametrize("require", [None, 2])
def test_quarantine_takes_the_named_engine_out_as_one_whose_proof_failed(require: int | None, tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        engines = probed(controller)
        engines.shifts[2] = 1.5
        status = decode(UpdateStatus, await one_update(controller, 1))
        assert engines.retired == [(2, "u1", "verdict_not_ok")]
        assert [v.committed for v in status.verdicts] == [True, True, False]
        failed = status.verdicts[2]
        assert (failed.state, failed.version, (failed.error or {})["code"]) == (EngineState.QUARANTINED, None, "verdict_not_ok")
        assert "the probe names engine 2: engine 2 differs from most engines" in (failed.error or {})["message"]
        assert status.state == ("aborted" if require is None else "committed"), "as any engine that did not commit"
        assert (controller._ledger.engines[2].failed or {})["phase"] == "probe"

    more = {} if require is None else {"sync.require": require}
    drive(tmp_path, scenario, **{"engine.count": 3, "sync.probe": "quarantine", **more})


def test_an_engine_that_is_named_again_behind_a_rejoin_waits_for_the_next_update(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        engines = probed(controller)
        engines.shifts[2] = 1.5
        await one_update(controller, 1)
        await engines.refresh()
        held: list[tuple[int, str]] = []
        controller._rejoin.hold = lambda *about: held.append(about)  # type: ignore[assignment,method-assign,misc]
        assert controller._ledger.committed_update == "u1" and held == []
        controller._rejoined("committed")
        controller._rejoined("committed")  # two engines of one rejoin are one probe
        await until(lambda: held != [])
        assert held == [(2, "u1")] and len(engines.retired) == 2 and len(engines.asked) == 6
        assert (controller._ledger.engines[2].failed or {})["code"] == "verdict_not_ok"

    drive(tmp_path, scenario, **{"engine.count": 3, "sync.probe": "quarantine", "sync.require": 2})


def test_off_asks_nobody(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        engines = probed(controller)
        status = decode(UpdateStatus, await one_update(controller, 1))
        controller._rejoined("committed")
        await asyncio.sleep(0.01)
        assert engines.asked == [] and status.probe is None and "probe" not in status.seconds

    drive(tmp_path, scenario, **{"engine.count": 3, "sync.probe": "off"})


@pytest.mark.parametrize("fault", ["engine", "answer", "all", "compare"])
def test_a_fault_in_the_probe_fails_no_update(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        engines = probed(controller)
        if fault == "compare":
            monkeypatch.setattr(probing, "from_most", lambda _: 1 / 0)
        failing = (0, 1, 2) if fault == "all" else (1,)
        error: Exception = ValueError("no ProbeAnswer") if fault == "answer" else DeadlineExceeded("no answer")
        engines.fails = {} if fault == "compare" else dict.fromkeys(failing, error)
        status = decode(UpdateStatus, await one_update(controller, 1))
        assert status.state == "committed" and all(v.committed for v in status.verdicts) and engines.retired == []
        assert status.probe is not None and status.probe.named == ()
        if fault == "compare":
            assert status.probe.said == ("the probe failed: ZeroDivisionError: division by zero",)
        else:
            code = "failed" if fault == "answer" else "deadline"
            assert {o: why.partition(":")[0] for o, why in status.probe.skipped.items()} == {str(o): code for o in failing}
            assert set(status.probe.engines) == ({"0", "2"} if fault != "all" else set())

    drive(tmp_path, scenario, **{"engine.count": 3, "sync.probe": "quarantine"})


def test_a_commit_waits_for_a_busy_engine_a_moment_and_what_it_says_later_counts(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        engines = probed(controller)
        engines.shifts[1], loop = 1.5, asyncio.get_running_loop()
        engines.goes_on.clear()
        began = loop.time()
        status = decode(UpdateStatus, await one_update(controller, 1))
        assert status.state == "committed" and status.probe is None and 0.4 < loop.time() - began < 1.5
        engines.goes_on.set()
        await until(lambda: engines.retired != [])
        status = decode(UpdateStatus, (await controller.update("u1"))["value"])
        assert status.probe is not None and status.probe.named == (1,) and engines.retired == [(1, "u1", "verdict_not_ok")]
        await until(lambda: controller._ledger.engines[1].failed is not None)

    drive(tmp_path, scenario, **{"engine.count": 3, "sync.probe": "quarantine"})


def test_what_comes_behind_the_next_probe_is_not_taken_for_news(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        engines = probed(controller)
        engines.goes_on.clear()
        engines.shifts[1] = 1.5
        assert (await one_update(controller, 1))["probe"] is None
        first, engines.goes_on, engines.shifts[1] = engines.goes_on, asyncio.Event(), 0.0
        engines.goes_on.set()
        assert decode(UpdateStatus, await one_update(controller, 2)).probe == controller._probing.last
        engines.shifts[1] = 1.5
        first.set()
        await until(lambda: not controller._probing._tasks)
        late = decode(UpdateStatus, (await controller.update("u1"))["value"]).probe
        assert late is not None and set(late.skipped) == {"0", "1", "2"} and engines.retired == []
        assert controller._probing.last is not None and controller._probing.last.version == 2

    drive(tmp_path, scenario, **{"engine.count": 3, "sync.probe": "quarantine"})


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come about"
        await asyncio.sleep(0.005)


def test_engines_of_other_fleets_in_these_tests_have_no_probe_and_commit_all_the_same(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        fleet_of(controller)
        status = decode(UpdateStatus, await one_update(controller, 1))
        assert status.state == "committed" and status.probe is not None and set(status.probe.skipped) == {"0", "1"}
        assert samples((await controller.metrics())["value"])['weightsync_probes_total{engine="0",outcome="engine_died"}'] == 1

    drive(tmp_path, scenario)


# --- the engine's side -----------------------------------------------------------------------------------


def config(**more: Any) -> Any:
    told = {
        "vocab": 512,
        "max_logprobs": 20,
        "mode": "FULL",
        "largest": 32,
        "length": 512,
        "batch": 2048,
        "drafts": None,
        "copies": 1,
    } | more
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_vocab_size=lambda: told["vocab"], max_logprobs=told["max_logprobs"], max_model_len=told["length"],
            logprobs_mode=told.get("logprobs", "raw_logprobs"), is_diffusion=False,
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name=told["mode"]), max_cudagraph_capture_size=told["largest"]
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=told["batch"]),
        speculative_config=told["drafts"],
        parallel_config=SimpleNamespace(data_parallel_size=told["copies"]),
    )  # fmt: skip


@pytest.mark.parametrize("vocabulary", [40, 512, 4096, 152_064])
def test_prompts_are_the_same_everywhere_differ_and_lie_inside_the_vocabulary(vocabulary: int) -> None:
    made = [tuple(scores.tokens(vocabulary, 8, seed)) for seed in range(6)]
    assert len(set(made)) == 6 and made == [tuple(scores.tokens(vocabulary, 8, seed)) for seed in range(6)]
    first, last = (1024, vocabulary // 2) if vocabulary >= 4096 else (0, vocabulary)
    assert all(first <= token < last for prompt in made for token in prompt)


@pytest.mark.parametrize(
    ("more", "length", "why"),
    [
        ({}, 33, ""),
        ({"mode": "NONE"}, 0, "this engine captures no graphs"),
        ({"largest": None}, 0, "this engine captures no graphs"),
        ({"length": 35}, 33, ""),
        ({"length": 34}, 0, "max_model_len is no longer than the largest capture, 32 tokens"),
        ({"batch": 33}, 0, "a step takes no more than the largest capture, 32 tokens"),
    ],
)
def test_a_sequence_without_graphs_is_longer_than_the_largest_capture(more: dict[str, Any], length: int, why: str) -> None:
    assert scores.uncaptured_length(config(**more)) == (length, why)


class Llm:
    """Stands for vLLM: the likeliest token is one more than the last, and what is told of it depends on what stands before."""

    def __init__(self, **more: Any) -> None:
        self.vllm_config, self.asked, self.open = config(**more), list[Any](), 0
        self.fail_at: int | None = None
        self.hangs = False

    async def generate(self, prompt: Any, params: Any, request_id: str, data_parallel_rank: int | None = None) -> AsyncIterator[Any]:
        self.asked.append((list(prompt["prompt_token_ids"]), params, prompt["cache_salt"], request_id, data_parallel_rank))
        self.open += 1
        try:
            if self.fail_at == len(self.asked):
                raise RuntimeError("a fault made for a test")
            await (asyncio.Event().wait() if self.hangs else asyncio.sleep(0))
            seen, logprobs = list(prompt["prompt_token_ids"]), []
            for _ in range(params.max_tokens):
                logprobs.append({seen[-1] + 1: SimpleNamespace(logprob=-0.1), 3: SimpleNamespace(logprob=-math.log(2 + sum(seen)))})
                seen.append(next(iter(params.logit_bias)) if params.logit_bias else seen[-1] + 1)
            yield SimpleNamespace(outputs=[SimpleNamespace(logprobs=logprobs)])
        finally:
            self.open -= 1


@pytest.mark.parametrize("copies", [1, 2])
def test_the_same_tokens_are_scored_with_graphs_and_without(copies: int) -> None:
    llm = Llm(copies=copies)
    answer = asyncio.run(scores.score(llm))
    assert len(answer.scores) == copies * 4 * 2 and len(answer.captured) == len(answer.uncaptured) == copies
    assert answer.captured == answer.uncaptured, "the answer depends on all that stands before"
    long = [(prompt, params.max_tokens) for prompt, params, *_ in llm.asked if len(prompt) > 32]
    forced = next(iter(llm.asked[0][1].logit_bias))
    assert [(len(prompt), steps) for prompt, steps in long] == [(33, 2)] * copies + [(34, 1)] * copies
    assert long[-1][0] == [*long[0][0], forced]
    assert all(params.skip_reading_prefix_cache and params.logprobs == 4 and params.ignore_eos for _, params, *_ in llm.asked)
    assert {salt for _, _, salt, *_ in llm.asked} == {"weightsync-probe"} and len({asked[3] for asked in llm.asked}) == len(llm.asked)
    assert {asked[4] for asked in llm.asked} == ({None} if copies == 1 else {0, 1})


@pytest.mark.parametrize(
    ("more", "steps", "why"),
    [
        ({"mode": "NONE"}, 2, "this engine captures no graphs"),
        ({"drafts": object()}, 1, "this engine drafts tokens"),
        ({"logprobs": "processed_logprobs"}, 1, "log-probabilities are told behind the bias (logprobs_mode)"),
    ],
)
def test_an_engine_that_can_not_compare_graphs_says_why_and_is_scored(more: dict[str, Any], steps: int, why: str) -> None:
    llm = Llm(max_logprobs=2, **more)
    answer = asyncio.run(scores.score(llm))
    assert (len(answer.scores), answer.captured, answer.uncaptured, answer.no_graphs) == (4 * steps, (), (), why)
    assert all((params.logit_bias is None) == (steps == 1) and params.logprobs == 2 for _, params, *_ in llm.asked)


@pytest.mark.parametrize("fault", ["none", "raises", "hangs", "dead", "other update", "next update", "paused"])
def test_an_engine_says_what_kept_it_from_scoring_and_leaves_no_request_behind(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_vllm(monkeypatch)
    made, llm = Engine(tmp_path), Llm()
    assert made.update(1)["committed"]
    made.core.llm = llm  # type: ignore[attr-defined]
    llm.fail_at, llm.hangs = (2 if fault == "raises" else None), fault in ("hangs", "next update")
    made.core.alive = fault != "dead"
    made.actor._draining.paused = fault == "paused"

    async def ask() -> ProbeAnswer:
        asked = asyncio.create_task(made.actor.probe("another" if fault == "other update" else "u1", 0.2))
        await asyncio.sleep(0.05)
        if fault == "next update":
            made.actor._update_id = "u2"
        answer = decode(ProbeAnswer, (await asked)["value"])
        await asyncio.sleep(0)
        return answer

    answer = asyncio.run(ask())
    skipped = {"none": "", "raises": "failed", "hangs": "late", "dead": "failed", "next update": "late"}
    assert answer.skipped == skipped.get(fault, "overtaken") and bool(answer.why) == bool(answer.skipped)
    assert llm.open == 0 and bool(answer.scores) == (fault == "none") and answer.seconds > 0


def test_an_engine_that_a_probe_has_put_out_of_service_keeps_what_it_hands_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    made, cleared = Engine(tmp_path), list[str]()
    assert made.update(1)["committed"]
    monkeypatch.setattr(made.actor, "_clear_shelf", lambda: cleared.append("x"))
    asyncio.run(made.actor.retire("u1", "verdict_not_ok"))
    made.require_out()
    assert made.actor._refusal() == "verdict_not_ok" and cleared == [] and made.core.ended == 1
    assert made.update(2)["committed"]
    cleared.clear()
    asyncio.run(made.actor.retire("u2"))
    assert made.actor._refusal() == "late_commit" and cleared == ["x"], "what was given up is nothing to hand on"
