"""How far trainer and rollout differ: the sums against the formula, what is refused, and who stands out.

Not covered: real samples (`test_mismatch_on_fleet.py`).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from starlette.testclient import TestClient

from tests.alarms import require_alerts, rules
from tests.test_controller import Roster, drive
from tests.test_ledger import apply, engine, fleet, request
from weightsync import config
from weightsync.api import app as api
from weightsync.client import Sample
from weightsync.client.observing import read, tallies
from weightsync.client.view import View
from weightsync.codec import decode, encode
from weightsync.errors import SamplesRefused, WeightSyncError
from weightsync.fleet.compared import Baselines
from weightsync.fleet.controller import Controller
from weightsync.fleet.observed import CALLS, Observed
from weightsync.metrics import Recorder
from weightsync.mismatch import FACTOR, FLOOR_NATS, MAX_TALLIES, MOST_LOG_RATIO, Mismatch, Observation, Tallies, Tally, standing_out
from weightsync.protocol import FleetStatus, ProbeReport
from weightsync.results import Generation, VersionSpan
from weightsync.shown import show_status

logprobs = st.floats(-40.0, 0.0)


def sample(trainer: Any, rollout: Any, engine: int = 0, version: Any = 1) -> Sample:
    return Sample(list(range(len(trainer))), trainer, rollout, engine, version)


# --- the sums ------------------------------------------------------------------------------------


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[float], list[float], int, int]:
    length = draw(st.integers(1, 12))
    of = st.lists(logprobs, min_size=length, max_size=length)
    return draw(of), draw(of), draw(st.integers(0, 2)), draw(st.integers(3, 5))


@settings(max_examples=60, deadline=None)
@given(st.lists(pairs(), min_size=1, max_size=8))
def test_sums_are_those_of_the_formula_token_by_token(drawn: list[tuple[list[float], list[float], int, int]]) -> None:
    found = {(tally.engine, tally.version): tally for tally in tallies([sample(*one) for one in drawn])}
    assert set(found) == {tuple(of) for _, _, *of in drawn}
    for key, tally in found.items():
        trainer = [t for ts, _, *of in drawn if tuple(of) == key for t in ts]
        rollout = [r for _, rs, *of in drawn if tuple(of) == key for r in rs]
        ratios = [math.exp(t) / math.exp(r) for t, r in zip(trainer, rollout, strict=True)]
        assert tally.tokens == len(ratios)
        assert tally.difference == pytest.approx(sum(abs(t - r) for t, r in zip(trainer, rollout, strict=True)), rel=1e-9)
        assert tally.k1 == pytest.approx(sum(-math.log(ratio) for ratio in ratios), rel=1e-9, abs=1e-9)
        assert tally.k3 == pytest.approx(sum((ratio - 1) - math.log(ratio) for ratio in ratios), rel=1e-9, abs=1e-9)
        assert tally.largest == max(abs(t - r) for t, r in zip(trainer, rollout, strict=True))
    assert decode(Tallies, encode(Tallies(tuple(found.values())))).tallies == tuple(found.values()), "what is sent is taken"


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda v: torch.tensor(v, dtype=torch.bfloat16), "numpy"])
def test_arrays_of_any_kind_are_the_same_samples(kind: Any) -> None:
    import numpy

    make = numpy.asarray if kind == "numpy" else kind
    trainer, rollout = [-0.5, -1.0, -3.0], [-1.0, -0.5, -2.0]  # all exact in bfloat16
    (tally,) = tallies(read([{"token_ids": torch.arange(3), "trainer_logprobs": make(trainer), "rollout_logprobs": make(rollout),
                              "engine": 2, "version": 7}], None))  # fmt: skip
    assert (tally.engine, tally.version, tally.tokens, tally.difference, tally.k1) == (2, 7, 3, 2.0, 1.0)
    needs_grad = torch.tensor(trainer, requires_grad=True)
    assert tallies([sample(needs_grad, rollout)])[0].difference == 2.0


def test_the_mean_estimates_the_divergence_of_the_trainer_from_the_rollout_with_its_sign() -> None:
    torch.manual_seed(0)
    rollout, trainer = (torch.randn(50, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = float((rollout.exp() * (rollout - trainer)).sum())
    drawn = torch.multinomial(rollout.exp(), 200_000, replacement=True)
    (tally,) = tallies([sample(trainer[drawn], rollout[drawn])])
    assert tally.k1 / tally.tokens == pytest.approx(exact, rel=0.02)
    assert tally.k3 / tally.tokens == pytest.approx(exact, rel=0.02)


def test_what_would_be_infinite_is_bounded_and_said_so_by_the_largest() -> None:
    (tally,) = tallies([sample([-0.1], [-2000.0])])
    assert tally.k3 == pytest.approx(math.exp(MOST_LOG_RATIO)) and tally.largest == pytest.approx(1999.9)


def test_completions_of_generate_count_each_token_for_the_version_that_sampled_it() -> None:
    made = Generation((5, 6, 7), (-1.0, -1.0, -1.0), (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)), 1, "length")
    first, second = tallies(read([made], [[-1.5, -1.5, -2.0]]))
    assert (first.engine, first.version, first.tokens, first.k1) == (1, 3, 2, 1.0)
    assert (second.version, second.tokens, second.k1) == (4, 1, 1.0)
    empty = replace(made, token_ids=(), logprobs=(), versions=())
    assert tallies(read([empty, made], [[], [-1.5, -1.5, -2.0]])) == (first, second), "one that ended at once says nothing"


# --- what is refused -------------------------------------------------------------------------------

GOOD = sample([-1.0, -2.0], [-1.0, -2.0])
MADE = Generation((5, 6), (-1.0, -1.0), (VersionSpan(3, 0, 2),), 1, "length")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (replace(GOOD, trainer_logprobs=[-1.0]), "has 2 token ids, 1 log-probabilities of the trainer and 2 of the rollout"),
        (replace(GOOD, token_ids=[1, 2, 3]), "has 3 token ids, 2 log-"),
        (replace(GOOD, trainer_logprobs=[[-1.0, -2.0]]), r"has trainer_logprobs of shape \(1, 2\)"),
        (replace(GOOD, rollout_logprobs=-1.0), r"has rollout_logprobs of shape \(\)"),
        (replace(GOOD, rollout_logprobs=[-1.0, math.nan]), "has nan as rollout_logprobs of token 1"),
        (replace(GOOD, trainer_logprobs=[-math.inf, -1.0]), "has -inf as trainer_logprobs of token 0"),
        (replace(GOOD, trainer_logprobs=[-1.0, 0.7]), "has 0.7 as trainer_logprobs of token 1"),
        (replace(GOOD, trainer_logprobs=["a", "b"]), "has no numbers as trainer_logprobs"),
        (replace(GOOD, trainer_logprobs=None), "has no numbers as trainer_logprobs"),
        (replace(GOOD, engine="0"), "has engine '0'"),
        (replace(GOOD, engine=-1), "has engine -1"),
        (replace(GOOD, version=None), "has version None"),
        (replace(GOOD, version=-2), "has tokens of version -2"),
        (replace(GOOD, version=[VersionSpan(1, 0, 1)]), "has versions for 1 of 2 tokens"),
        (replace(GOOD, version=[VersionSpan(1, 0, 1), VersionSpan(2, 0, 2)]), "has versions for 1 of 2 tokens"),
        (replace(GOOD, version=[VersionSpan(None, 0, 2)]), "has tokens of version None"),
        ({"token_ids": [1]}, r"has the keys \['token_ids'\]"),
        (7, "is a int"),
        (MADE, "is a Generation without the trainer's log-probabilities"),
    ],
)
def test_a_sample_that_cannot_be_is_refused_by_its_number(bad: Any, said: str) -> None:
    with pytest.raises(SamplesRefused, match=f"^sample 2 {said}") as raised:
        tallies(read([GOOD, GOOD, bad], None))
    assert raised.value.hint and not raised.value.retryable


@pytest.mark.parametrize(
    ("samples", "own", "said"),
    [
        ([MADE, MADE], [[-1.0, -1.0]], "2 samples, and log-probabilities of the trainer for 1"),
        ([MADE, GOOD], [[-1.0, -1.0], [-1.0, -1.0]], "sample 1 is no Generation"),
        ([], None, "0 samples hold no token"),
        ([sample([], [])], None, "1 samples hold no token"),
        ([sample([-1.0], [-1.0], 0, n) for n in range(MAX_TALLIES + 1)], None, f"want {MAX_TALLIES} at most"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(samples: Sequence[Any], own: Any, said: str) -> None:
    with pytest.raises(SamplesRefused, match=said):
        tallies(read(samples, own))


GOOD_TALLY = {"engine": 0, "version": 1, "tokens": 4, "difference": 2.0, "k1": -1.0, "k3": 0.5, "largest": 1.5}


WRONG: list[dict[str, Any]] = [
    {"tokens": 0}, {"tokens": -1}, {"tokens": 2**41}, {"tokens": 1.5}, {"engine": -1}, {"engine": 2**60}, {"version": -1},
    {"difference": math.nan}, {"difference": -1.0}, {"k1": 3.0}, {"k1": math.inf}, {"k3": -0.1}, {"k3": 1e40},
    {"largest": 3.0}, {"largest": -0.1}, {"text": "x"},
]  # fmt: skip


def test_the_controller_takes_in_no_sums_that_cannot_be(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Roster) -> None:
        await controller.start()
        for data in ({"tallies": []}, {"tallies": [GOOD_TALLY] * (MAX_TALLIES + 1)}, 7, {}):
            assert (await controller.observe(data))["error"]["code"] == "samples_refused"
        for wrong in WRONG:
            refused = await controller.observe({"tallies": [GOOD_TALLY, GOOD_TALLY | wrong]})
            assert refused.get("error", {}).get("code") == "samples_refused", wrong
        assert "weightsync_observed_tokens_total{" not in (await controller.metrics())["value"], "nothing was counted"
        assert "value" in await controller.observe({"tallies": [GOOD_TALLY]})

    drive(tmp_path, scenario)


# --- who stands out --------------------------------------------------------------------------------


def mean(engine: int, difference: float, behind: str = "0", tokens: int = 100) -> Mismatch:
    return Mismatch(engine, behind, tokens, difference, 0.0, 0.0, difference)


@pytest.mark.parametrize(
    ("means", "named"),
    [
        ([], ()),
        ([mean(0, 3.0)], ()),  # with one alone it may be the trainer
        ([mean(0, 0.01), mean(1, 3.0)], (1,)),
        ([mean(0, 3.0), mean(1, 0.01), mean(2, 3.0)], (0, 2)),  # the trainer says who is right, not the majority
        ([mean(0, 0.01), mean(1, 0.04)], ()),  # below the floor
        ([mean(0, 0.2), mean(1, 0.7)], ()),  # all are far off: not one engine's fault
        ([mean(0, 0.01), mean(1, 3.0, tokens=3)], ()),  # too few to say
        ([mean(0, 0.01, "0"), mean(1, 3.0, "2")], ()),  # old samples differ, and are held against old ones
        ([mean(0, 0.01, "0"), mean(0, 0.3, "2"), mean(1, 3.0, "2")], (1,)),
    ],
)
def test_an_engine_stands_out_among_samples_that_were_as_far_behind(means: list[Mismatch], named: tuple[int, ...]) -> None:
    assert standing_out(means) == named


def test_updates_are_counted_and_not_numbers_of_versions() -> None:
    ledger = fleet(1)
    for number, version in enumerate((10, 20, 50)):
        apply(ledger, ledger.admit(request(f"u{number}", version), 0.0), True)
    assert [ledger.behind_version(version) for version in (50, 20, 10, 5, 60, 30)] == [0, 1, 2, 3, 0, 1]
    apply(ledger, ledger.admit(replace(request("back", 20), rewind=True), 0.0), True)
    assert [ledger.behind_version(version) for version in (20, 50, 10)] == [0, 1, 3]


def test_the_last_calls_count_together_and_only_for_engines_that_are_there() -> None:
    observed = Observed()
    tally = Tally(1, 7, 10, 5.0, -5.0, 1.0, 2.0)
    told = observed.take([tally, replace(tally, engine=9), replace(tally, version=3)], {0, 1}, lambda version: 7 - version)
    assert told.unknown == (9,) and [(m.engine, m.behind, m.tokens, m.difference, m.k1) for m in told.engines] == [
        (1, "0", 10, 0.5, -0.5),
        (1, "3+", 10, 0.5, -0.5),
    ]
    for _ in range(CALLS):
        observed.take([replace(tally, difference=20.0, k3=3.0)], {0, 1}, lambda version: 0)
    found = {m.behind: m for m in observed.means({0, 1})}
    assert (found["0"].tokens, found["0"].difference, found["0"].k3) == (10 * CALLS, 2.0, 0.3), "what came before is over"
    assert found["3+"].tokens == 10
    assert observed.means({0}) == () == observed.means({0, 1}), "what an engine that left had said is gone"


def test_a_trainers_samples_show_in_answer_metrics_and_status(tmp_path: Path) -> None:
    bad = [sample([-1.0] * 40, [-3.0] * 40, 1, 5)]
    good = [sample([-1.0] * 40, [-1.01] * 40, 0, 5)]

    async def scenario(controller: Controller, _: Roster) -> None:
        await controller.start()
        told = decode(Observation, (await controller.observe(encode(Tallies(tallies(good + bad)))))["value"])
        assert told.named == (1,) and [(m.engine, m.behind, round(m.difference, 6)) for m in told.engines] == [
            (0, "0", 0.01),
            (1, "0", 2.0),
        ]
        text = (await controller.metrics())["value"]
        assert 'weightsync_observed_difference_nats{behind="0",engine="1"} 2.0' in text
        assert 'weightsync_observed_kl_nats{behind="0",engine="1",estimator="k1"} -2.0' in text
        assert f'engine="1",estimator="k3"}} {math.exp(2) - 1 - 2}' in text
        assert 'weightsync_observed_tokens_total{behind="0",engine="1"} 40.0' in text
        status = decode(FleetStatus, (await controller.status())["value"])
        assert standing_out(status.observed) == (1,)
        console = Console(width=200, record=True, file=io.StringIO())
        show_status(status, console)
        assert "trainer and rollout differ, 0 updates behind, nats a token: engine 0 0.01, engine 1 2 (!)" in console.export_text()
        controller._ledger.forget(1)
        assert 'weightsync_observed_difference_nats{behind="0",engine="1"}' not in (await controller.metrics())["value"]

    drive(tmp_path, scenario)


# --- over HTTP ----------------------------------------------------------------------------------------


class Over:
    """Carries a trainer's calls to the API's application."""

    def __init__(self, client: TestClient) -> None:
        self._client = client
        self.sent: list[Any] = []

    def post(self, path: str, body: Any, seconds: float) -> Any:
        self.sent.append(body)
        answer = self._client.post(path, json=body, headers={"authorization": "Bearer t"}).json()
        if "error" in answer:
            raise WeightSyncError.from_dict(answer["error"])
        return answer


def test_observe_goes_through_api_and_controller_and_sends_no_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    controller = Controller(config.dump(config.load({"engine.model": tmp_path})))
    controller._heart = object()  # type: ignore[assignment]
    for ordinal in (0, 1):
        controller._ledger.see(engine(ordinal, 5))

    class Fleet:
        async def ask(self, method: str, *args: Any, timeout_seconds: float) -> Any:
            answer = await getattr(controller, method)(*args)
            if "error" in answer:
                raise WeightSyncError.from_dict(answer["error"])
            return answer["value"]

    application = api.build(Fleet(), lambda: "t", min_ready=1, max_request_bytes=1 << 20, control_seconds=5.0)
    sync = View("http://127.0.0.1:1", "t")
    with TestClient(application) as client:
        over = Over(client)
        sync._http = over  # type: ignore[assignment]
        made = [Generation((424242,) * 40, (-1.0,) * 40, (VersionSpan(5, 0, 40),), e, "length") for e in (0, 1)]
        told = sync.observe(made, torch.tensor([[-1.0] * 40, [-2.0] * 40]))
        assert told.named == (1,) and [(m.engine, m.behind, m.k1) for m in told.engines] == [(0, "0", 0.0), (1, "0", 1.0)]
        assert "424242" not in json.dumps(over.sent) and len(json.dumps(over.sent)) < 400
        with pytest.raises(SamplesRefused, match="sample 1 has nan"):
            sync.observe(made, [[-1.0] * 40, [math.nan] * 40])
        over.post("/v1/observe", over.sent[0], 1.0)
        with pytest.raises(SamplesRefused, match="the sums are not valid"):
            over.post("/v1/observe", {"tallies": []}, 1.0)
        assert len(over.sent) == 3, "what this side refuses is not sent"


# --- alerts -----------------------------------------------------------------------------------------


def test_the_alerts_numbers_are_those_of_the_code() -> None:
    asked = rules()["WeightsyncRolloutMismatch"]["expr"]
    assert f"> {FLOOR_NATS:g} and" in asked.replace("\n", " ") and f"({FACTOR:g} * min without (engine)" in asked


@pytest.mark.parametrize(
    ("observed", "probed", "expected"),
    [
        ([mean(0, 0.01), mean(1, 0.012), mean(2, 0.011)], {0: 0.0, 1: 0.0, 2: 0.0}, []),
        (
            [mean(0, 0.01), mean(1, 2.5), mean(2, 0.011)],
            {0: 0.0, 1: 1.5, 2: 0.0},
            [
                ("WeightsyncRolloutMismatch", {"engine": "1", "behind": "0"}),
                ("WeightsyncProbeDiffers", {"engine": "1", "against": "engines"}),
                ("WeightsyncProbeNames", {"engine": "1"}),
            ],
        ),
        (
            [mean(0, 0.01), mean(1, 2.5), mean(1, 9.0, "2")],
            {0: 1.5, 1: 1.5},
            [
                ("WeightsyncRolloutMismatch", {"engine": "1", "behind": "0"}),
                ("WeightsyncProbeDiffers", {"engine": "0", "against": "engines"}),
                ("WeightsyncProbeDiffers", {"engine": "1", "against": "engines"}),
            ],
        ),
        ([mean(0, 0.3), mean(1, 0.5)], {}, []),
        ([mean(0, 3.0)], {}, [("WeightsyncFleetMismatch", {"behind": "0"})]),
    ],
)
def test_alerts_fire_on_the_engine_that_is_wrong_and_on_no_other(
    observed: list[Mismatch], probed: dict[int, float], expected: list[Any], tmp_path: Path
) -> None:
    recorder, limits = Recorder(), Baselines()
    named, _ = limits.judge(probed, {"engines": probed, "graphs": {}})
    recorder.mismatch(observed, limits, ProbeReport(1, named=tuple(named)))
    require_alerts(tmp_path, recorder.text(), expected)
