"""`weightsync check`: what is refused before an engine starts, what a report says, and real engines that follow or don't."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests import stale_extension
from weightsync import cli
from weightsync.check import run
from weightsync.check.contents import contents, differing
from weightsync.check.inputs import require_same_kind
from weightsync.check.probe import contract_failures, under_test
from weightsync.check.show import show
from weightsync.errors import ConfigError, DeadlineExceeded, EngineDied, UnsupportedEngine
from weightsync.storage.contract import Contract, Kind, Layout, Slot

Checkpoint = Callable[[str, int], Path]


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(subprocess, "Popen", started)


def copied(folder: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(folder, to)
    (to / "config.json").write_text(json.dumps(json.loads((to / "config.json").read_text()) | config))
    return to


@pytest.mark.usefixtures("no_engine")
def test_a_folder_that_is_no_checkpoint_is_refused_before_an_engine_starts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    good = checkpoint("qwen3", 1)
    bare, weightless, torn, silent = (tmp_path / name for name in ("bare", "weightless", "torn", "silent"))
    bare.mkdir()
    copied(good, weightless)
    (weightless / "model.safetensors").unlink()
    copied(good, torn)
    (torn / "model.safetensors").write_bytes(b"\xff" * 100)
    copied(good, silent, architectures=[])
    for folder, said in (
        (tmp_path / "nothing", "it does not exist"),
        (good / "config.json", "it is no folder"),
        (bare, "it has no config.json"),
        (weightless, "it has no safetensors files"),
        (torn, "can't be read"),
        (silent, "names no architecture"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            run.check(folder)
        assert "--model" in str(caught.value)
        with pytest.raises(ConfigError, match=said) as caught:
            run.check(good, folder)
        assert "--other" in str(caught.value)


@pytest.mark.usefixtures("no_engine")
def test_weights_of_another_model_are_refused_before_an_engine_starts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    good = checkpoint("qwen3", 1)
    with pytest.raises(ConfigError, match="it is a Qwen3MoeForCausalLM, --model is a Qwen3ForCausalLM"):
        run.check(good, checkpoint("qwen3-moe", 1))
    with pytest.raises(ConfigError, match=r"1 not in --other: lm_head.weight"):
        run.check(good, checkpoint("qwen3-tied", 2))
    with pytest.raises(ConfigError, match=r"of another shape or dtype: .*down_proj.weight \(bfloat16\[128, 256\], in --other float8"):
        run.check(good, checkpoint("fp8-channel", 2))


@pytest.mark.usefixtures("no_engine")
def test_two_equal_sets_of_weights_are_refused_before_an_engine_starts(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, parted = checkpoint("qwen3", 1), copied(checkpoint("qwen3", 1), tmp_path / "parted")
    tensors = list(load_file(parted / "model.safetensors").items())
    for name, part in (("a", tensors[::2]), ("b", tensors[1::2])):  # other files, the same tensors
        save_file(dict(part), parted / f"{name}.safetensors")
    (parted / "model.safetensors").unlink()
    for other in (good, parted):
        assert cli.main(["check", "--model", str(good), "--other", str(other)]) == 2
        said = capsys.readouterr().err
        assert f"--other: {other} holds the same values as {good}" in said and "nothing can be told" in said and "engine" not in said
    require_same_kind(good, checkpoint("qwen3", 2))


@pytest.mark.usefixtures("no_engine")
def test_wrong_use_is_told_on_the_command_line(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(checkpoint("qwen3", 1))
    with pytest.raises(SystemExit):
        cli.main(["check", "--model", good, "--other", good, "--identity"])
    assert "not allowed with" in capsys.readouterr().err
    assert cli.main(["check", "--model", good, "--engine-args", "[1]"]) == 2
    assert "--engine-args: got '[1]', want a JSON object" in capsys.readouterr().err
    assert cli.main(["check", "--model", good + "-nothing"]) == 2
    assert "it does not exist" in capsys.readouterr().err


def test_an_engine_that_dies_or_hangs_is_a_typed_error_with_its_last_words(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    monkeypatch.setattr("sys.executable", str(script))
    script.write_text("#!/bin/sh\necho no such kernel >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(EngineDied, match=r"ended with code 3 and no report; it last said: no such kernel"):
        run.check(checkpoint("qwen3", 1))
    script.write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(DeadlineExceeded, match=r"took more than 0.2 s"):
        run.check(checkpoint("qwen3", 1), timeout_seconds=0.2)


def report(**changes: Any) -> dict[str, Any]:
    loose = {"name": "<scratch at 0x10>", "kind": "scratch", "nbytes": 2048, "address": 16, "paths": 0, "kernel": "gemm", "where": "a.py:3"}
    contract = {
        "vllm_version": "0.33.0", "device": "cuda:0", "graphs": 3, "nodes": {"kernel": 50, "memcpy": 2}, "nodes_unread": {},
        "slots": {"weight": 3, "derived": 2, "static": 0}, "nbytes": {"weight": 1024, "derived": 8, "static": 0},
        "anonymous": [loose], "repaired": {f"m.{n}": {"adopted": 2} for n in range(12)}, "repaired_left_out": 5,
        "lost": [], "truncated": [], "seals": 1, "seconds": {"seal": 0.25},
    }  # fmt: skip
    whole = {
        "model": "/m", "other": "/n", "identity_alone": False, "device": "cpu", "ok": True,
        "contract": contract, "repaired": 0, "failures": [], "unproven": [],
        "identity": {"slots": 5, "left_out": 1, "changed": []},
        "proof": {"written": 4, "poisoned_bytes": 1000, "differing": {}, "differing_count": 0, "unrefreshed": [], "restored": 0,
                  "outputs": "equal to the bit"},
    }  # fmt: skip
    return whole | changes


def shown(of: dict[str, Any]) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(of, console)
    return console.export_text()


def test_a_report_shows_slots_by_class_and_says_unproven_plainly() -> None:
    text = shown(report())
    assert "weight" in text and "1,024" in text and "seal 0.25" in text and "lost" not in text and "static" not in text
    assert "vLLM 0.33.0 on cuda:0; 3 captured graphs, 52 nodes, 0 of them unread" in text
    assert "owned by nobody: 1" in text and "<scratch at 0x10> (2,048 bytes, gemm, a.py:3)" in text
    assert "repaired so far: 17" in text and "m.9 (adopted 2)" in text and "m.10" not in text
    assert "4 slots poisoned (1,000 bytes), 0 unrefreshed" in text and "every value follows the weights" in text
    assert "outputs with the other weights, against a cold engine: equal to the bit" in text
    bare = {key: value for key, value in report(unproven=["whether it follows"]).items() if key != "proof"}
    text = shown(bare)
    assert "unproven: whether it follows" in text and "values are unproven" in text and "every value" not in text
    assert "and its own weights change nothing" in shown(bare | {"identity_alone": True, "unproven": []})


def test_a_report_with_failures_is_an_error_that_names_them_and_says_not_to_serve() -> None:
    failed = report(ok=False, failures=["1 slot(s) are unrefreshed: m.x: unrefreshed read by gemm, 64 bytes"])
    assert "FAILED: 1 slot(s) are unrefreshed: m.x" in shown(failed) and "ok: " not in shown(failed)
    with pytest.raises(UnsupportedEngine, match=r"m\.x: unrefreshed read by gemm, 64 bytes.* must not serve"):
        run.require_ok(failed)
    run.require_ok(report())


def test_contents_differ_by_value_and_by_path_and_leave_scratch_out() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    one.workspace, other.workspace = torch.ones(4), torch.zeros(4)
    one.extra = torch.ones(1)
    other.bias.data[1] += 1
    assert differing(contents(one), contents(other)) == {"bias": "value", "model.extra": "only here"}
    assert contents(one)["scratch"] == {"model.workspace": {"rule": "workspace", "nbytes": 16}}


def test_a_contract_fails_by_what_could_not_be_read_or_may_derive_from_weights() -> None:
    sealed = {"nodes_unread": {}, "possibly_derived": 0, "slots": {"weight": 3, "anonymous": 2}}
    assert contract_failures(sealed, strict=False) == []
    assert contract_failures(sealed, strict=True) == ["2 slot(s) are owned by nobody and of unknown age, and strict is set"]
    (unread, derived) = contract_failures(sealed | {"nodes_unread": {"extra": 2, "size": 1}, "possibly_derived": 4}, strict=False)
    assert unread == "3 graph node(s) could not be read" and derived.startswith("4 slot(s) that nobody owns may derive from weights")


def test_neither_caches_nor_the_engines_own_memory_are_tested_and_a_draft_models_weights_are() -> None:
    def slot(address: int, kind: Kind, *paths: str) -> Slot:
        return Slot(address, 8, paths, Layout("int32", (2,), (1,)) if paths else None, kind=kind)

    kept = [
        slot(1, Kind.WEIGHT, "model.w"),
        slot(2, Kind.DERIVED, "runner.table", "model.table"),
        slot(3, Kind.DERIVED, "vllm.kernels:TABLE"),
        slot(4, Kind.WEIGHT, "runner.drafter.model.w"),
    ]
    left = [
        slot(5, Kind.ENGINE, "runner.input_ids"),
        slot(6, Kind.DERIVED, "model.attn.kv_cache", "runner.kv_caches[0]"),
    ]
    assert under_test(Contract.seal([*kept, *left])) == kept


# --- real engines ------------------------------------------------------------------------------


@pytest.mark.engine
def test_an_engine_that_follows_its_weights_passes(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--model", str(checkpoint("qwen3", 1)), "--other", str(checkpoint("qwen3", 2))]
    assert cli.main(["check", *folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["failures"] == found["unproven"] == []
    assert found["contract"]["slots"]["weight"] > 10 and found["identity"]["changed"] == []
    proof = found["proof"]
    assert proof["written"] > 10 and proof["poisoned_bytes"] > 250_000 and proof["differing"] == {} and proof["unrefreshed"] == []
    assert proof["outputs"] == "equal to the bit"


@pytest.mark.engine
@pytest.mark.slow
def test_weights_that_are_equal_in_the_engine_are_not_blamed_on_it(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [copied(checkpoint("qwen3", 1), tmp_path / name) for name in ("exact", "below")]
    for folder, factor in zip(folders, (1.0, 1 + 2**-20), strict=True):  # less than bf16 can tell
        tensors = {name: tensor.float() * factor for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors")
    assert cli.main(["check", "--model", str(folders[0]), "--other", str(folders[1])]) == 2
    assert "this engine holds the same values with either weights" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
def test_weights_with_nan_are_named_with_something_that_can_be_done_here(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(checkpoint("qwen3", 1), tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert cli.main(["check", "--model", str(folder), "--identity"]) == 1
    said = capsys.readouterr().err
    assert f"{folder}: 1 tensor(s) hold values" in said and "model.norm.weight (1 NaN" in said
    assert "Give a checkpoint without such values" in said and "allow_nonfinite" not in said


@pytest.mark.engine
@pytest.mark.slow
def test_values_that_go_stale_fail_the_check_by_name(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    stale = {"worker_extension_cls": f"{stale_extension.__name__}.StaleExtension"}
    found = run.check(checkpoint("qwen3", 1), checkpoint("qwen3", 2), engine_args=stale)
    assert not found["ok"]
    assert found["proof"]["differing"] == {stale_extension.LEFT[2]: "value"}
    (line,) = found["proof"]["unrefreshed"]
    assert line.startswith(f"model.{stale_extension.LEFT[3]}: unrefreshed") and "256 bytes" in line and "nothing wrote it" in line
    assert found["proof"]["restored"] == 1
    with pytest.raises(UnsupportedEngine, match="must not serve"):
        run.require_ok(found)


@pytest.mark.engine
@pytest.mark.slow
# With AMX also the head and the embedding pack their weights for it, once.
@pytest.mark.parametrize(("kind", "repairs"), [("int8-channel", torch.cpu._is_amx_tile_supported()), ("qwen3-moe", True)])
def test_other_kinds_pass_and_a_repair_fails_when_strict(kind: str, repairs: bool, checkpoint: Checkpoint) -> None:
    found = run.check(checkpoint(kind, 1), checkpoint(kind, 2), strict=True)
    assert found["proof"]["differing"] == {} and found["proof"]["unrefreshed"] == [] and found["identity"]["changed"] == []
    assert found["proof"]["outputs"] == "equal to the bit" and bool(found["repaired"]) == repairs
    said = [f"an update needed {found['repaired']} repair(s), and strict is set"]
    assert found["failures"] == (said if repairs else []) and found["ok"] != repairs
    if repairs:
        with pytest.raises(UnsupportedEngine, match="does not follow its weights by itself") as caught:
            run.require_ok(found)
        assert "without strict the contract holds" in caught.value.hint


@pytest.mark.engine
@pytest.mark.slow
def test_an_engines_own_weights_change_nothing(checkpoint: Checkpoint) -> None:
    found = run.check(checkpoint("qwen3", 1), identity=True)
    assert found["ok"] and found["identity_alone"] and found["identity"]["changed"] == []
    assert not [line for line in found["unproven"] if "second set" in line]


@pytest.mark.engine
@pytest.mark.slow
def test_without_other_weights_values_are_unproven(checkpoint: Checkpoint) -> None:
    found = run.check(checkpoint("qwen3", 1))
    assert found["ok"] and "proof" not in found and "no second set of weights" in found["unproven"][0]
    assert found["identity"]["changed"] == []
