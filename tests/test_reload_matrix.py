"""The reload matrix's own logic: when a row is right, what a crash leaves, how rows are merged; and one row for real."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import matrix_judge, reload_matrix
from benchmarks.matrix_judge import Outcome, judge_row
from benchmarks.matrix_rows import ROWS
from benchmarks.matrix_worker import WARM_STEPS

TOKENS = {"a": [[1, 2, 3], [4, 5, 6]], "b": [[7, 8, 9], [9, 8, 7]]}


def step(name: str, letter: str, **changes: Any) -> dict[str, Any]:
    """What an engine in order sees when it holds these weights."""
    seen = {
        "step": name,
        "weights": letter,
        "outputs": {"tokens": TOKENS[letter], "logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.5]]},
        "registered": {"w": f"w of {letter}", "rotary": "constant"},
        "owned": {"model.kernel.strides": "constant"},
        "scalars": {},
        "scratch": {"model.kv_cache": 64},
        "addresses": {"w": 100, "rotary": 200},
        "truncated": [],
        "complete": True,
    }
    return copy.deepcopy(seen | changes)


def outcomes(**records: Any) -> dict[str, Outcome]:
    """Five processes without a fault; `mode=…` replaces one."""
    versions = {"torch": "2", "vllm": "0"}
    warm = [step(*names) for names in WARM_STEPS]
    healthy = {f"cold-{letter}": [step("start", letter)] for letter in "ab"} | {"stock": warm, "weightsync": warm}
    made = {mode: Outcome({"steps": copy.deepcopy(steps), "error": None, "versions": versions}, 0) for mode, steps in healthy.items()}
    return made | {name.replace("_", "-"): outcome for name, outcome in records.items()}


def warm(changes: dict[str, dict[str, Any]]) -> Outcome:
    return Outcome({"steps": [step(*names, **changes.get(names[0], {})) for names in WARM_STEPS], "error": None, "versions": {}}, 0)


def judged(**records: Any) -> dict[str, Any]:
    row = judge_row("r", "a row", 1, outcomes(**records))
    assert row is not None
    return row


def test_engines_without_a_fault_are_right() -> None:
    row = judged()
    assert row["verdict"] == row["weightsync"]["verdict"] == row["stock"]["verdict"] == "right"
    assert row["weightsync"]["tokens_equal"] == 2 and row["weightsync"]["tensors_equal"] and row["weightsync"]["returns_to_the_bit"]
    assert row["evidence"]["cold_engines"] == 3 and row["evidence"]["cold_spread"] == 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"new": {"registered": {"w": "w of a", "rotary": "constant"}}}, "new: 1 tensor(s) differ from a cold engine's: w (value)"),
        ({"same": {"owned": {}}}, "model.kernel.strides (only there)"),
        ({"same": {"owned": {"model.kernel.strides": "constant", "model.left.over": "x"}}}, "model.left.over (only here)"),
        ({"pressed": {"owned": {"model.kernel.strides": "overwritten"}}}, "pressed: other bytes than at new"),
        ({"new": {"outputs": step("", "a")["outputs"]}}, "new: 0 of 2 sequences equal a cold engine's"),
        ({"back": {"outputs": {"tokens": TOKENS["a"], "logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.4]]}}}, "differ by 0.1"),
        ({"back": {"outputs": {"tokens": TOKENS["a"], "logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.499]]}}}, "back: other outputs"),
        ({"same": {"outputs": {"tokens": TOKENS["a"], "logprobs": [[float("nan")] * 3] * 2}}}, "same: log-probabilities are not numbers"),
    ],
)
def test_each_kind_of_difference_from_a_cold_engine_is_wrong_and_named(changes: dict[str, Any], said: str) -> None:
    row = judged(weightsync=warm(changes))
    assert row["verdict"] == "wrong" and row["stock"]["verdict"] == "right"
    assert any(said in reason for reason in row["weightsync"]["reasons"]), row["weightsync"]["reasons"]
    json.dumps(row, allow_nan=False)


def test_log_probabilities_within_the_spread_of_cold_engines_are_right() -> None:
    shifted = {"tokens": TOKENS["a"], "logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.45]]}
    at_a = {name: {"outputs": shifted} for name, letter in WARM_STEPS if letter == "a"}
    row = judged(weightsync=warm(at_a))  # its start is a cold engine too, and shows the spread
    assert row["verdict"] == "right" and row["evidence"]["cold_spread"] == pytest.approx(0.05)
    assert not row["weightsync"]["bit_equal_to_cold"]


def test_a_path_that_cold_engines_do_not_agree_on_is_left_out_and_listed() -> None:
    pointer = {name: {"owned": {"model.kernel.strides": f"differs {name}"}} for name, _ in WARM_STEPS}
    row = judged(weightsync=warm(pointer))
    assert row["verdict"] == "right"
    assert row["evidence"]["unstable"] == {"model.kernel.strides": "value"} and row["evidence"]["unstable_registered"] == []


def test_moved_addresses_are_counted() -> None:
    row = judged(stock=warm({"new": {"addresses": {"w": 101, "rotary": 200}}}))
    assert row["stock"]["moved"] == 1 and row["stock"]["steps"][2]["moved_paths"] == ["w"]
    assert row["stock"]["verdict"] == "right", "an address that moved is no proof of a wrong value"


def test_a_crash_is_wrong_with_its_exit_code_and_last_words() -> None:
    steps = [step("start", "a"), {"step": "same", "weights": "a"}]
    crashed = Outcome({"steps": steps, "error": None, "versions": {}}, -6, stderr=("CUDA error: an illegal memory access", "core dumped"))
    row = judged(stock=crashed)
    assert row["stock"]["verdict"] == "wrong" and row["stock"]["exit_code"] == -6
    assert row["stock"]["error"] == "the process ended with exit code -6 after start; CUDA error: an illegal memory access"
    assert row["verdict"] == "right"
    assert "illegal memory access" in matrix_judge.table({"rows": [row]})


def test_a_refusal_is_wrong_with_its_message() -> None:
    refused = Outcome({"steps": [step("start", "a")], "error": "start: RuntimeError: UNSUPPORTED_ENGINE: no", "versions": {}}, 0)
    row = judged(weightsync=refused)
    assert row["verdict"] == "wrong" and row["weightsync"]["reasons"] == ["start: RuntimeError: UNSUPPORTED_ENGINE: no"]


def test_a_row_is_blocked_only_when_a_cold_start_fails() -> None:
    failed = Outcome({"steps": [], "error": "start: ValueError: no kernel", "versions": {"gpu": "X"}}, 0, stderr=("last",))
    row = judge_row("r", "a row", 1, {"cold-a": failed})
    assert row is not None and row["verdict"] == "blocked"
    assert row["evidence"] == {"error": "cold-a: start: ValueError: no kernel", "stderr": ["last"]}
    assert judge_row("r", "a row", 1, {"cold-a": Outcome(None, -9, timed_out=True)}) is None, "no time is no proof"
    assert judged(weightsync=Outcome(None, -9, timed_out=True))["verdict"] == "wrong"


def test_a_row_whose_weights_give_the_same_outputs_proves_nothing() -> None:
    same = Outcome({"steps": [step("start", "b", outputs=step("", "a")["outputs"])], "error": None, "versions": {}}, 0)
    row = judged(cold_b=same)
    assert row["verdict"] == "wrong" and row["evidence"]["void"]


def test_merging_replaces_a_row_and_keeps_the_others_in_order(tmp_path: Path) -> None:
    path = tmp_path / "results" / "matrix.json"
    for name, verdict in (("third", "right"), ("first", "wrong"), ("first", "right"), ("unlisted", "right")):
        row = {"row": name, "verdict": verdict, "versions": {"gpu": "X"}, "seed": 1}
        matrix_judge.merge_into(path, row, ["first", "second", "third"])
    results = json.loads(path.read_text())
    assert [(row["row"], row["verdict"]) for row in results["rows"]] == [("first", "right"), ("third", "right"), ("unlisted", "right")]
    assert results["gpu"] == "X" and results["seed"] == 1


def test_the_table_says_wrong_and_blocked_in_words() -> None:
    blocked = judge_row("r", "other", 1, {"cold-a": Outcome({"steps": [], "error": "start: no | kernel", "versions": {}}, 0)})
    stock = warm({"new": {"outputs": step("", "a")["outputs"]}})
    lines = matrix_judge.table({"rows": [judged(stock=stock), blocked]}).splitlines()
    assert lines[2] == "| a row | **wrong, no error: 0 of 2 sequences match** | right, equal to the bit | apply 0 ms, 0 moved |"
    assert lines[3] == "| other | does not start: cold-a: start: no / kernel | blocked | |"


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert reload_matrix.main(["--rows", "nothing"]) == 2
    assert "no such row: nothing" in capsys.readouterr().err


def test_rows_keep_the_common_kernel_settings_beside_their_own() -> None:
    arguments = ROWS["cuda"]["moe-bf16"].arguments("cuda")
    assert arguments["kernel_config"] == {"enable_flashinfer_autotune": False, "moe_backend": "triton"}
    assert "kernel_config" not in ROWS["cuda"]["moe-bf16"].arguments("cpu")


@pytest.mark.engine
@pytest.mark.slow
def test_on_a_cpu_stock_loses_a_mixture_of_experts_and_weightsync_does_not(tmp_path: Path) -> None:
    out = tmp_path / "matrix.json"
    command = ["--device", "cpu", "--rows", "qwen3-moe", "--out", str(out), "--work", str(tmp_path / "work")]
    assert reload_matrix.main(command) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["verdict"] == "right" and row["weightsync"]["bit_equal_to_cold"], row["weightsync"]["reasons"]
    assert row["stock"]["verdict"] == "wrong" and "error" not in row["stock"]
    assert row["evidence"]["sequences_that_a_and_b_share"] == 0
    assert row["evidence"]["unstable_registered"] == []
