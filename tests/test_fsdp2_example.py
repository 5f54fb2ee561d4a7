"""`examples/fsdp2.py` as a user runs it: torchrun, two ranks, real engines.

Not covered: GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"step (\d+): loss [\d.]+, version (\d+) in (\d+) engines, .* gap (?:([\d.]+) -> )?([\d.]+)")


@pytest.mark.engine
def test_engines_follow_a_trainer_of_two_fsdp2_ranks(fleet: Any, checkpoint: Callable[[str, int], Path], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(fleet.token)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/fsdp2.py", str(checkpoint("qwen3", 1))]
    done = subprocess.run(
        [sys.executable, *command, fleet.url, str(token)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = LINE.findall(done.stdout)
    assert [int(number) for number, *_ in steps] == [1, 2, 3], done.stdout
    versions = [int(version) for _, version, *_ in steps]
    assert versions == [versions[0], versions[0] + 1, versions[0] + 2]
    for _, _, engines, before, gap in steps:
        assert int(engines) == 2
        assert float(gap) < 0.1, done.stdout
        assert not before or float(before) > 2 * float(gap), "the weights that were there before answer otherwise"
