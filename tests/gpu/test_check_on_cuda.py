"""`weightsync check` on CUDA: a contract out of captured graphs, and slots that follow their weights, poisoned in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.checkpoints import build
from benchmarks.matrix_rows import ROWS
from tests.stale_extension import LEFT
from weightsync.check import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("row", ["dense-bf16", "moe-fp8-channel"])
def test_an_engine_with_graphs_follows_its_weights(row: str, tmp_path: Path) -> None:
    one, other = (build(row, tmp_path / f"{seed}", seed) for seed in (1, 2))
    found = run.check(one, other, engine_args=ROWS["cuda"][row].arguments("cuda"))
    assert found["ok"], found["failures"]
    assert found["device"] == "cuda" and found["contract"]["slots"]["weight"] > 20
    assert found["identity"]["changed"] == [] and found["proof"]["written"] > 20 and found["proof"]["restored"] == 0


def test_a_stale_slot_is_named_with_the_kernels_that_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
    one, other = (build("dense-bf16", tmp_path / f"{seed}", seed) for seed in (1, 2))
    stale = {"worker_extension_cls": "tests.stale_extension.StaleExtension"}
    found = run.check(one, other, engine_args=ROWS["cuda"]["dense-bf16"].arguments("cuda") | stale)
    assert list(found["proof"]["differing"]) == [LEFT[2]]
    (line,) = found["proof"]["unrefreshed"]
    assert line.startswith(f"model.{LEFT[3]}: unrefreshed read by ") and "nothing wrote it" in line
