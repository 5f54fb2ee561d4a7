"""The benchmark of a whole update runs, and its table says what its file says. Not covered: its numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.engine
@pytest.mark.slow
def test_a_small_model_goes_all_ways_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "whole.json"
    command = [sys.executable, "-m", "benchmarks.whole_update", "--layers", "1", "--repeats", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert set(result["seconds"]) == {"gloo", "local", "bare", "reload"} and min(result["seconds"].values()) > 0
    assert all(f"| {way} | {seconds:.3f} |" in done.stdout for way, seconds in result["seconds"].items())
    assert result["tensors"] == 13 and result["bytes"] > 90e6
