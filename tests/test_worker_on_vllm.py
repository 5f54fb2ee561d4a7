"""The worker's half on real vLLM code, in a process of its own (vLLM's CPU worker patches torch).

What stock vLLM gets wrong on a CPU is shown here, red, with its own reload; the
same kinds are green in `test_kinds.py`. Should a test here fail on a newer vLLM,
it has been mended there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.fleets import ENGINE_ARGS, MAX_TOKENS, PROMPTS
from weightsync.demo.cold import COLD_ENV

pytestmark = pytest.mark.engine

STOCK = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from weightsync.worker import tiles
first, second, arguments, prompts, length = json.loads(sys.argv[1])
tiles.ask()
llm = LLM(model=first, **arguments)
llm.collective_rpc("reload_weights", kwargs={"weights_path": second})
llm.reset_prefix_cache()
params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
outputs = [llm.generate([TokensPrompt(prompt_token_ids=p)], params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
print("RESULT", json.dumps([list(o) for o in outputs]), flush=True)
import os; os._exit(0)
"""

REFUSALS = """
import functools
import torch, vllm
from vllm.model_executor.model_loader.reload import layerwise
from weightsync.errors import UnsupportedEngine
from weightsync.worker import vllm_compat
vllm_compat.require_supported()
def refused():
    try:
        vllm_compat.require_supported()
    except UnsupportedEngine as exc:
        return str(exc)
    return "not refused"
version, vllm.__version__ = vllm.__version__, "0.99.0"
print("VERSION", refused())
vllm.__version__ = version
stock = layerwise._place_kernel_tensors
layerwise._place_kernel_tensors = lambda layer, info: None
print("NOSOURCE", refused())
layerwise._place_kernel_tensors = layerwise._layerwise_process
print("SOURCE", refused())
layerwise._place_kernel_tensors = functools.wraps(stock)(lambda layer, info: None)
print("WRAPPED", refused())
layerwise._place_kernel_tensors = torch.no_grad()(stock)
print("DECORATED", refused())
layerwise._place_kernel_tensors = stock
vllm_compat.require_supported()
class Quantised: pass
model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
model["b"].weight = model["a"].weight
model["b"].quant_method = Quantised()
print("LAYERS", vllm_compat.unproved_layers(model))
"""


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **COLD_ENV})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "kind", ["qwen3-tied", pytest.param("qwen3-moe", marks=pytest.mark.slow), pytest.param("int8-channel", marks=pytest.mark.slow)]
)
def test_stock_reload_answers_wrongly_and_says_nothing(kind: str, checkpoint: Any, cold: Any) -> None:
    if kind == "int8-channel" and torch.cpu._is_amx_tile_supported():
        pytest.skip("with AMX stock is right here, also when what it freed is used again")
    job = json.dumps([str(checkpoint(kind, 1)), str(checkpoint(kind, 2)), ENGINE_ARGS, PROMPTS, MAX_TOKENS])
    line = next(line for line in _run(STOCK, job).splitlines() if line.startswith("RESULT "))
    assert json.loads(line.removeprefix("RESULT ")) != cold(kind, 2)[0]


def test_unknown_versions_sources_and_layers_are_refused_by_name() -> None:
    said = dict(line.split(" ", 1) for line in _run(REFUSALS).splitlines() if line.split(" ")[0].isupper())
    assert "vLLM 0.99.0 has not been proved" in said["VERSION"] and "0.33.0" in said["VERSION"]
    for kind in ("SOURCE", "NOSOURCE", "WRAPPED"):
        assert "_place_kernel_tensors" in said[kind] and "is not the one that was proved" in said[kind]
    assert said["DECORATED"] == "not refused", "the runner's functions have torch's decorators on them"
    assert said["LAYERS"] == "['b (tied, Quantised)']"
