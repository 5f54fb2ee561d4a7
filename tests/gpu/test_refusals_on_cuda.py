"""What must not reach a quantised engine with CUDA graphs: scales of another dtype than its checkpoint's.

Not covered: other formats; admission knows none of them, and its own tests are on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkpoints import build
from benchmarks.matrix_rows import ROWS
from weightsync.check.environment import ENGINE_ENV

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from vllm import LLM
from weightsync.check.engine import OURS, Trainer, generate
from weightsync.check.inputs import read_tensors
from weightsync.errors import ManifestRefused

one, other, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(model=one, **OURS, **arguments)
trainer = Trainer(llm)
ask = lambda: generate(llm, [[1, 5, 9, 13], [2, 4, 8]], 8)
said, new = {"start": ask()}, read_tensors(Path(other))
scales = sorted(name for name in new if name.endswith(("input_scale", "output_scale")))
try:
    trainer.sync(new | {name: new[name].to(torch.float16) for name in scales})
    said["refused"] = None
except ManifestRefused as exc:
    said["refused"] = {"message": str(exc), "names": sorted(exc.names)}
said |= {"after": ask(), "scales": scales}
said["state"] = trainer.sync(new)["state"]
said["new"] = ask()
print("SAID", json.dumps(said), flush=True)
os._exit(0)
"""


def test_scales_of_another_dtype_are_refused_by_name_and_change_nothing(tmp_path: Path) -> None:
    one, other = (build("dense-wna8o8", tmp_path / f"{seed}", seed) for seed in (1, 2))
    arguments = json.dumps(ROWS["cuda"]["dense-wna8o8"].arguments("cuda"))
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(one), str(other), arguments], env=os.environ | ENGINE_ENV["cuda"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    said = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("SAID "))[5:])
    assert said["scales"] and said["refused"] is not None
    assert said["refused"]["names"] and set(said["refused"]["names"]) <= set(said["scales"])
    assert f"{len(said['scales'])} wrong dtype: " in said["refused"]["message"]
    assert said["after"] == said["start"]
    assert said["state"] == "verified" and said["new"] != said["start"]
