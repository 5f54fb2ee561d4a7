"""The reload matrix's own logic: when a row is right, what a crash leaves, how rows are merged; and one row for real."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import matrix_judge, matrix_scratch, reload_matrix
from benchmarks.matrix_judge import Outcome, judge_row
from benchmarks.matrix_rows import ROWS
from benchmarks.matrix_worker import REFILLED, WARM_STEPS, bounded
from weightsync.storage.contract import Contract, Kind, Layout, Slot
from weightsync.storage.owners import rewalk
from weightsync.storage.pins import pin, slots_of

ROOT = Path(__file__).resolve().parent.parent
TOKENS = {"a": [[1, 2, 3], [4, 5, 6]], "b": [[7, 8, 9], [9, 8, 7]]}


def step(name: str, letter: str, **changes: Any) -> dict[str, Any]:
    """What an engine in order sees when it holds these weights."""
    seen = {
        "step": name,
        "weights": letter,
        "outputs": {"tokens": TOKENS[letter], "logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.5]]},
        "losses": [6.0, 6.0],
        "registered": {"w": f"w of {letter}", "rotary": "constant"},
        "owned": {"model.kernel.strides": "constant"},
        "scalars": {},
        "scratch": {"model.kv_cache": {"rule": "kv_cache", "nbytes": 64}},
        "addresses": {"w": 100, "rotary": 200},
        "truncated": [],
        "complete": True,
    }
    seen |= changes
    return copy.deepcopy({"again": [seen["outputs"]], **seen})


def outcomes(**records: Any) -> dict[str, Outcome]:
    """Six processes without a fault; `mode=…` replaces one."""
    versions = {"torch": "2", "vllm": "0"}
    warm = [step(*names) for names in WARM_STEPS]
    healthy = {f"cold-{letter}{number}": [step("start", letter)] for letter in "ab" for number in ("", "-2")}
    healthy |= {"stock": warm, "weightsync": [*warm, step(*REFILLED, refilled={"runner.workspace": "NaN, 8 bytes"})]}
    made = {mode: Outcome({"steps": copy.deepcopy(steps), "error": None, "versions": versions}, 0) for mode, steps in healthy.items()}
    return made | {name.replace("_", "-"): outcome for name, outcome in records.items()}


def warm(changes: dict[str, dict[str, Any]]) -> Outcome:
    steps = [step(*names, **changes.get(names[0], {})) for names in (*WARM_STEPS, REFILLED)]
    return Outcome({"steps": steps, "error": None, "versions": {}}, 0)


def judged(**records: Any) -> dict[str, Any]:
    row = judge_row("r", "a row", 1, outcomes(**records))
    assert row is not None
    return row


def test_engines_without_a_fault_are_right() -> None:
    row = judged()
    assert row["verdict"] == row["weightsync"]["verdict"] == row["stock"]["verdict"] == "right"
    assert row["weightsync"]["tokens_equal"] == 2 and row["weightsync"]["tensors_equal"] and row["weightsync"]["returns_to_the_bit"]
    assert row["evidence"]["cold_engines"] == {"a": 4, "b": 2} and row["evidence"]["cold_spread"] == 0.0
    assert row["evidence"]["scratch"] == {"model.kv_cache": ["kv_cache", 64]} and row["evidence"]["repeatable"]
    assert row["weightsync"]["steps"][-1]["refilled"] == {"runner.workspace": "NaN, 8 bytes"}
    assert row["evidence"]["perplexity"] == {"a": 403.4288, "b": 403.4288}


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
        ({"refilled": {"outputs": step("", "b")["outputs"]}}, "refilled: other outputs than at start"),
        ({"new": {"losses": [6.0, 6.001]}}, "new: the mean loss differs by 0.001, cold engines by 0 at most"),
        ({"new": {"losses": [float("nan")] * 2}}, "new: log-probabilities are not numbers"),
        ({"new": {"again": [step("", "a")["outputs"]]}}, "new: 0 of 2 sequences equal a cold engine's"),
    ],
)
def test_each_kind_of_difference_from_a_cold_engine_is_wrong_and_named(changes: dict[str, Any], said: str) -> None:
    row = judged(weightsync=warm(changes))
    assert row["verdict"] == "wrong" and row["stock"]["verdict"] == "right"
    assert any(said in reason for reason in row["weightsync"]["reasons"]), row["weightsync"]["reasons"]
    json.dumps(row, allow_nan=False)


def test_log_probabilities_within_the_spread_of_cold_engines_are_right() -> None:
    shifted = {"outputs": {"tokens": TOKENS["a"], "logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.45]]}, "losses": [6.1, 6.1]}
    at_a = {name: shifted for name, letter in (*WARM_STEPS, REFILLED) if letter == "a"}
    row = judged(weightsync=warm(at_a))  # its start is a cold engine too, and shows the spread
    assert row["verdict"] == "right" and row["evidence"]["cold_spread"] == pytest.approx(0.05)
    assert row["evidence"]["cold_loss_spread"] == pytest.approx(0.1) and not row["weightsync"]["bit_equal_to_cold"]


def test_nothing_is_added_to_the_spread_that_was_measured() -> None:
    shifted = {"outputs": {"tokens": TOKENS["b"], "logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.4999]]}}
    row = judged(weightsync=warm({"new": shifted, "pressed": shifted}))
    assert row["weightsync"]["reasons"] == [
        f"{name}: log-probabilities differ by 0.0001, cold engines by 0 at most" for name in ("new", "pressed")
    ]


def test_an_engine_that_does_not_repeat_itself_is_judged_by_bytes_and_by_the_spread() -> None:
    def near(by: float) -> dict[str, Any]:
        return {"tokens": TOKENS["a"], "logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.5 + by]]}

    cold = Outcome({"steps": [step("start", "a", again=[near(0.06)])], "error": None, "versions": {}}, 0)
    row = judged(cold_a=cold, weightsync=warm({"back": {"outputs": near(0.03)}}))
    assert row["verdict"] == "right" and row["evidence"]["cold_spread"] == pytest.approx(0.06) and not row["evidence"]["repeatable"]
    assert not row["weightsync"]["returns_to_the_bit"]
    beyond = judged(cold_a=cold, weightsync=warm({"back": {"outputs": near(0.13)}}))
    assert any("back: other outputs" in reason for reason in beyond["weightsync"]["reasons"])
    bytes_ = judged(cold_a=cold, weightsync=warm({"back": {"registered": {"w": "w of b", "rotary": "constant"}}}))
    assert any("back: 1 tensor(s) differ" in reason for reason in bytes_["weightsync"]["reasons"])


def test_a_path_that_cold_engines_do_not_agree_on_is_left_out_and_listed() -> None:
    pointer = {name: {"owned": {"model.kernel.strides": f"differs {name}"}} for name, _ in (*WARM_STEPS, REFILLED)}
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


def test_an_engine_that_dies_without_what_nobody_owns_was_right_before() -> None:
    record = warm({}).record
    assert record is not None
    blanked = {"outputs": "the process ended", "slots": {}}
    row = judged(weightsync=Outcome(record | {"blanked": blanked}, -6))
    assert row["verdict"] == "right" and row["weightsync"]["blanked"] == blanked
    assert judged(weightsync=Outcome(record, -6))["verdict"] == "wrong"


def test_what_nobody_owns_is_evidence() -> None:
    record = warm({}).record
    assert record is not None
    contract = {
        "anonymous": [{"name": f"<scratch at {n}>"} for n in range(20)],
        "possibly_derived": 2,
        "unproven": ["m.cache"],
        "slots": {},
    }
    row = judged(weightsync=Outcome(record | {"contract": contract}, 0))
    assert row["evidence"]["unowned"] == contract["anonymous"][:8] and row["weightsync"]["contract"] == contract
    assert row["evidence"]["possibly_derived"] == 2 and row["evidence"]["unproven"] == ["m.cache"]


def test_what_is_kept_of_a_report_is_bounded() -> None:
    kept = bounded({"slots": {f"k{n}": n for n in range(100)}, "paths": ["x" * 1000] * 100})
    assert len(json.dumps(kept)) < 9000
    assert kept["slots"]["…"] == "76 more" and kept["paths"][-1] == "… 76 more"
    assert bounded({"a": [1, 2.5, None, True]}) == {"a": [1, 2.5, None, True]}


def test_scratch_is_refilled_with_nan_where_it_is_a_float_and_with_zero_elsewhere() -> None:
    with torch.inference_mode():
        lock = torch.ones(4, dtype=torch.int32)
    pointers = torch.full((2,), 7, dtype=torch.uint8)
    floats = {kind: torch.zeros(6, dtype=kind)[::2] for kind in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)}
    done = matrix_scratch.refill({"lock": lock, "bytes": pointers, **{str(kind): tensor for kind, tensor in floats.items()}})
    assert not lock.any() and not pointers.any()
    assert all(tensor.float().isnan().all() for tensor in floats.values())
    assert done["lock"] == "zero, 16 bytes" and done["torch.bfloat16"] == "NaN, 6 bytes"


def test_scratch_is_what_a_rule_or_the_contract_says_and_never_the_cache() -> None:
    model = torch.nn.Module()
    model.workspace, model.kv_cache, model.handler_tensor = torch.ones(2), torch.ones(2), torch.ones(2)
    model.weight = torch.nn.Parameter(torch.ones(2))
    runner = SimpleNamespace(locks=torch.ones(2), kv_caches=torch.ones(3), ids=torch.ones(4))
    pins = pin(rewalk({"model": model, "runner": runner}))
    contract = Contract.seal(slots_of(pins, kinds={"runner.locks": Kind.SCRATCH, "runner.kv_caches": Kind.SCRATCH}))
    assert sorted(matrix_scratch.scratch_of(model, contract, pins)) == ["model.workspace", "runner.locks"]


def test_what_nobody_owns_is_zeroed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [
        Slot(0x1010, 64, (), None, "gemm", Kind.SCRATCH),
        Slot(0x1020, 64, (), None, "norm", Kind.SCRATCH),
        Slot(0x9000, 8, (), None, "copy", Kind.SCRATCH),
        Slot(0x2000, 8, (), None, "", Kind.ANONYMOUS),
        Slot(0x3000, 8, ("model.w",), Layout("int8", (8,), (1,)), "", Kind.SCRATCH),
    ]
    contract = Contract.seal(slots)
    assert matrix_scratch.unowned(contract, scratch=True) == slots[:3] and matrix_scratch.unowned(contract, scratch=False) == slots[3:4]
    written: list[tuple[int, int, int]] = []
    driver = SimpleNamespace(cuMemsetD8=lambda at, value, size: (written.append((at, value, size)) or 0,))
    monkeypatch.setattr(matrix_scratch, "load_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    blocks = [{"size": size, "state": "active_allocated"} for size in (0x800, 0x100, 0x100)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"address": 0x0800, "blocks": blocks}])
    done = matrix_scratch.blank(slots[:3])
    assert written == [(0x1000, 0, 0x100)] * 2
    assert [done[slot.name] for slot in slots[:3]] == ["zero, 256 bytes, gemm", "zero, 256 bytes, norm", "left alone, not the allocator's"]
    monkeypatch.setattr(matrix_scratch, "load_driver", None)
    assert matrix_scratch.blank([]) == {}, "without such slots no driver is needed"


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
    assert lines[2] == "| a row | **no error; 0 of 2 sequences match** | right, equal to the bit |  |  |"
    assert lines[3] == "| other | does not start: cold-a: start: no / kernel | blocked | | |"
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_counts_repairs_and_tells_outputs_from_bytes() -> None:
    loaded = {"checks": {"paths_repaired": 12}, "seconds": {"apply": 0.0312}}
    mended = judged(weightsync=warm({"same": loaded, "new": loaded | {"seconds": {"apply": 0.5}}}))
    other = {"tokens": [[1, 2, 9], [4, 5, 6]], "logprobs": [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.5]]}
    outputs = judged(
        weightsync=warm({name: {"outputs": other} for name, letter in (*WARM_STEPS, REFILLED) if letter == "a"}), stock=warm({})
    )
    outputs["weightsync"] |= {"verdict": "wrong"}  # whatever the reason: the bytes are equal
    refused = Outcome({"steps": [], "error": "start: UnsupportedEngine: no such | layer / more", "versions": {}}, 0)
    lines = matrix_judge.table({"rows": [mended, outputs, judged(weightsync=refused)]}).splitlines()[2:]
    assert lines[0].endswith("| right, equal to the bit | 12 tensors | 31 ms |")
    assert "| **bytes equal, outputs not** |" in lines[1]
    assert lines[2].endswith("| **UnsupportedEngine: no such / layer** at the start |  | |")


def test_a_table_is_put_between_its_marks_and_nowhere_else() -> None:
    first, second = matrix_judge.MARKS
    assert matrix_judge.put_table(f"a\n{first}\nold\n{second}\nb\n", "new") == f"a\n{first}\nnew\n{second}\nb\n"
    for text in ("no marks", first, f"{second}{first}", f"{first}{second}{first}{second}"):
        with pytest.raises(ValueError, match="once each"):
            matrix_judge.put_table(text, "new")


def test_the_readme_shows_what_the_file_of_results_says() -> None:
    readme = (ROOT / "README.md").read_text()
    results = json.loads((ROOT / "benchmarks/results/reload-matrix-h200.json").read_text())
    assert matrix_judge.put_table(readme, matrix_judge.table(results)) == readme, (
        "run: python3 -m benchmarks.reload_matrix --table benchmarks/results/reload-matrix-h200.json --readme README.md"
    )


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
    assert row["evidence"]["unstable"] == {}, "what differs between cold engines has a rule on a CPU"
    assert row["evidence"]["cold_spread"] == row["evidence"]["cold_loss_spread"] == 0 and row["evidence"]["repeatable"]
    assert row["weightsync"]["steps"][-1]["step"] == "refilled" and row["weightsync"]["contract"]["slots"]["weight"] > 10
