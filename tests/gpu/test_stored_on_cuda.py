"""Stored parameters compared with what was sent on an engine with CUDA graphs, whose kernels take fused weights as they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoints import build
from benchmarks.matrix_rows import ROWS
from tests.test_stored import on_vllm
from weightsync.check.environment import ENGINE_ENV

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]


@pytest.mark.parametrize("row", ["dense-bf16", "moe-bf16"])
def test_fused_weights_are_compared(row: str, tmp_path: Path) -> None:
    one, other = (build(row, tmp_path / f"{seed}", seed) for seed in (1, 2))
    said = on_vllm(one, other, ROWS["cuda"][row].arguments("cuda"), ENGINE_ENV["cuda"])
    print(row, said["counts"], said["paths"])
    assert said["error"] is None
    assert said["broken"] == ["model.norm.weight"]
    assert any(path.endswith("qkv_proj.weight") for path in said["paths"])
    if row == "dense-bf16":
        assert said["counts"].get("stored_unchecked") == 0
