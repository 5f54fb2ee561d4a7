"""An engine that quantises while it loads: what planned updates leave in it is what the general way leaves, to the bit.

Not covered: kinds that keep what is loaded (`test_kinds.py`), CUDA (`benchmarks.apply`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.fleets import ENGINE_ARGS
from weightsync.demo.cold import COLD_ENV

pytestmark = [pytest.mark.engine, pytest.mark.slow]

UPDATES = """
import json, os, sys
from safetensors.torch import load_file
from vllm import LLM
from weightsync.check.contents import contents, differing
from weightsync.check.engine import OURS, Trainer
from weightsync.worker import tiles
first, second, arguments = json.loads(sys.argv[1])
tiles.ask()
llm = LLM(model=first, quantization="fp8_per_channel", **arguments, **OURS)
trainer = Trainer(llm)
weights = [load_file(f"{folder}/model.safetensors") for folder in (second, first)]
general = None
for number in range(3):
    report = trainer.sync(weights[number % 2])
    held = llm.collective_rpc(lambda worker: contents(worker.get_model()))[0]
    general = general or held
    doubles = llm.collective_rpc(lambda worker: [len(one.doubles) for one in worker._weightsync()._planner._learned.values()])[0]
    print("RESULT", json.dumps([report["checks"].get("layers_planned", 0), doubles, sorted(differing(general, held))]), flush=True)
os._exit(0)
"""


def test_layers_that_are_quantised_while_they_load_are_right_when_they_are_made_beside_themselves(checkpoint: Any) -> None:
    job = json.dumps([str(checkpoint("qwen3", 1)), str(checkpoint("qwen3", 2)), ENGINE_ARGS])
    done = subprocess.run([sys.executable, "-c", UPDATES, job], capture_output=True, text=True, timeout=280, env={**os.environ, **COLD_ENV})
    assert done.returncode == 0, done.stderr[-3000:]
    first, other, again = (json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT "))
    assert first[0] == 0 and other[0] == again[0] > first[1][0] > 0, "linear layers are among those that are planned"
    assert other[2] and not again[2], "other weights differ, and the same are the same"
