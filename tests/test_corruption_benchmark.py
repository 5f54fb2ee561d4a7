"""The benchmark of corruptions: what it draws is what it says, and its judging counts the right things."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import corruption
from benchmarks.corruption_cases import CASES
from benchmarks.corruption_site import Made, Site
from tests import checkpoints
from weightsync.transport.digest import as_bytes

LIVE = {"embed.weight": (8, 4), "experts.w13_weight": (2, 8, 4), "qkv.weight_scale": (8, 1), "norm.weight": (8,)}


class Model(nn.Module):
    """Live parameters of an engine."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        for name, shape in LIVE.items():
            layer, _, last = name.rpartition(".")
            self.add_module(layer, nn.Module())
            getattr(self, layer).register_parameter(last, nn.Parameter(torch.randn(shape, generator=random), requires_grad=False))

    def get(self, name: str) -> torch.Tensor:
        return self.get_parameter(name)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, torch.Tensor]]]:
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("corruption")
    made = {kind: [checkpoints.build(kind, folder / f"{kind}-{seed}", seed) for seed in (1, 2)] for kind in corruption.KINDS}
    return {kind: [load_file(one / "model.safetensors") for one in folders] for kind, folders in made.items()}


def site(weights: Any, kind: str, seed: int) -> Site:
    held, target = weights[kind]
    return Site(held, target, random.Random(seed), Model(1), dict(Model(2).named_parameters()))


@pytest.mark.parametrize("kind", corruption.KINDS)
@pytest.mark.parametrize("case", [name for name, (where, _) in CASES.items() if where in ("trainer", "wire")])
def test_a_corruption_of_what_is_sent_changes_what_it_names_and_nothing_else(case: str, kind: str, weights: Any) -> None:
    for seed in range(8):
        given = site(weights, kind, seed)
        made = CASES[case][1](given)
        assert made is not None
        sent = made.offered if made.offered is not None else made.arrives
        assert sent is not None and (made.everywhere is (made.offered is not None))
        differ = {name for name in given.target if name not in sent or not same(sent[name], given.target[name])}
        assert differ == set(made.names) and sent.keys() <= given.target.keys()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(as_bytes(one), as_bytes(other))


@pytest.mark.parametrize("case", [name for name, (where, _) in CASES.items() if where in ("storage", "live")])
def test_a_corruption_of_storage_changes_the_parameter_that_it_names_and_no_other(case: str, weights: Any) -> None:
    for seed in range(8):
        given = site(weights, "qwen3", seed)
        before = {name: (p.data_ptr(), p.stride(), p.detach().clone()) for name, p in given.model.named_parameters()}
        made = CASES[case][1](given)
        assert made is not None and len(made.names) == 1
        for step in (made.before, made.loaded, made.late):
            if step is not None:
                step()
        for name, (address, stride, value) in before.items():
            now = given.model.get(name)
            unchanged = (now.data_ptr(), now.stride()) == (address, stride) and torch.equal(now, value)
            assert unchanged is (name not in made.names)


def test_all_that_is_drawn_by_one_seed_is_the_same(weights: Any) -> None:
    for case in ("bit flipped", "shards swapped", "tensor dropped"):
        one, other = (CASES[case][1](site(weights, "qwen3-moe", 5)) for _ in range(2))
        assert isinstance(one, Made) and isinstance(other, Made) and one.names == other.names


def attempt(stage: str, wrong: bool, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "wrong": wrong, "named": bool(stage), "said": stage, "names": ["w"], "observed": None, "restart": ""} | more


def test_what_nothing_told_of_is_missed_where_the_engine_is_another_one_and_harmless_where_it_is_not() -> None:
    found = corruption.judged(
        [attempt("digest", False), attempt("digest", False, named=False), attempt("probe", True), attempt("", True), attempt("", False)]
    )
    assert (found["seeds"], found["detected"], found["named"], found["missed"], found["harmless"]) == (5, 3, 2, 1, 1)
    assert found["stages"] == {"digest": 2, "probe": 1} and found["missed_names"] == ["w"]
    assert corruption.judged([attempt("repaired", True)])["wrong_though_repaired"] == 1


def test_samples_count_as_beyond_where_they_are_far_from_what_a_right_engine_shows() -> None:
    attempts = [attempt("", True, observed=gap) for gap in (0.01, 0.3, 4.0)]
    assert corruption.judged(attempts, usual=0.01)["observed_beyond"] == 2
    assert corruption.judged(attempts, usual=0.1)["observed_beyond"] == 1
    assert corruption.judged([attempt("", True)], usual=0.1)["observed_beyond"] is None


def test_a_complaint_of_an_update_without_corruption_is_a_false_alarm() -> None:
    clean = [{"alarms": [], "right": True}, {"alarms": ["probe"], "right": True}, {"alarms": [], "right": False}]
    found = corruption.cleared(clean)
    assert (found["updates"], found["false_alarms"], found["not_right"], len(found["said"])) == (3, 1, 1, 2)


def test_stock_is_silent_where_it_raises_nothing_and_leaves_something_else() -> None:
    made = [("", True, True, "w"), ("", False, False, ""), ("TypeError", True, False, "raised")]
    found = corruption.judged_stock([dict(zip(("raised", "wrong", "checksum", "rehearsal"), one, strict=True)) for one in made])
    assert (found["seeds"], found["raised"], found["silent"], found["checksum"], found["rehearsal"]) == (3, 1, 1, 1, 2)


def row(case: str, values: bool, **ours: Any) -> dict[str, Any]:
    found = corruption.judged([attempt(*one) for one in ours["seen"]])
    return {"kind": "qwen3", "case": case, "where": CASES[case][0], "values": values, "weightsync": found, "stock": None}


def test_totals_leave_the_trainers_own_values_apart_and_the_table_has_a_line_for_each_case() -> None:
    rows = [
        row("bit flipped", False, seen=[("digest", False)] * 3),
        row("stale stride", False, seen=[("contract", False), ("", True)]),
        row("square tensor transposed", True, seen=[("", True)]),
    ]
    found = corruption.totals(rows, [corruption.cleared([{"alarms": [], "right": True}])])
    assert (found["corruptions"], found["detected"], found["missed"], found["by_the_trainer"]) == (5, 4, 1, 1)
    assert (found["updates_without"], found["false_alarms"]) == (1, 0)
    text = corruption.table(rows)
    assert len(text.splitlines()) == 2 + 3 and "| wire | bit flipped | 3 of 3 | digest 3 |" in text


def test_the_readme_says_what_the_file_says() -> None:
    readme, result = (
        (corruption.RESULTS.parents[1] / "README.md").read_text(),
        json.loads((corruption.RESULTS / "corruption-cpu.json").read_text()),
    )
    assert result["totals"] == corruption.totals(result["rows"], result["clean"])
    assert corruption.summary(result["rows"]) in readme and corruption.sentence(result["totals"]) in readme


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_corruptions_of_a_real_engine_are_detected_and_nothing_else_is() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.corruption", "--quick"], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
