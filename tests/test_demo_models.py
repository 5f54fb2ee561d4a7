"""The demo on each of its models, as a user runs it. The default runs for three steps in `test_lifecycle.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weightsync.demo import MODELS, summary

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("model", MODELS[1:])
def test_demo_learns_and_every_engine_equals_a_cold_one(model: str, tmp_path: Path) -> None:
    flags = ["--model", model, "--steps", str(summary.STEPS_TO_LEARN), "--engines", "1", "--json", "--out", str(tmp_path / "demo")]
    done = subprocess.run([sys.executable, "-m", "weightsync.cli", "demo", *flags], capture_output=True, text=True, timeout=280)
    result = json.loads(done.stdout)
    assert (done.returncode, result["ok"], result["cold_equal"]) == (0, True, True), done.stderr[-3000:]
    assert result["model"] == model and result["gain"] >= summary.MIN_GAIN
