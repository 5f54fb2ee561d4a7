"""On real CPU engines: what a model caches at its first run, requests that stand still meanwhile, adapters, draft models.

Each engine lives in a process of its own, with its trainer beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fleets import ENGINE_ARGS, PROMPTS
from weightsync.check.environment import ENGINE_ENV

pytestmark = pytest.mark.engine

MAX_TOKENS = 12

COMMON = """
import json, os, sys
first, second, adapter, arguments, prompts, length = json.loads(sys.argv[1])
import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from weightsync.check.engine import OURS, Trainer
from weightsync.worker import tiles

tiles.ask()
def outputs(llm):
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
    found = []
    for lora in [None, LoRARequest("a", 1, adapter)] if adapter else [None]:
        for prompt in prompts:
            made = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False, lora_request=lora)[0].outputs[0]
            found.append([list(made.token_ids), [float(at[t].logprob) for at, t in zip(made.logprobs, made.token_ids)]])
    return found

def answer(**found):
    print("RESULT", json.dumps(found), flush=True)
    os._exit(0)
"""

#: A norm that keeps a product of its weight from its first run on, as public reports have it of a merged weight.
CACHING = """
from vllm.model_executor.layers.layernorm import RMSNorm
def forward(self, x, residual=None):
    if not hasattr(self, "_product"):
        self._product = self.weight.data.float() * 1.5
    residual = x if residual is None else x + residual
    y = residual.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self._product).to(x.dtype)
    return y if residual is x else (y, residual)
RMSNorm.forward = forward
"""

COLD = "answer(outputs=outputs(LLM(model=second, **arguments)))"

UPDATED = """
llm = LLM(model=first, **arguments, **OURS)
before = outputs(llm)
trainer = Trainer(llm)

def draft(worker):
    model = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    return {name: tensor.float().sum().item() for name, tensor in model.named_parameters()} if model is not None else {}

drafted = llm.collective_rpc(draft)[0]
weights = [load_file(f"{folder}/model.safetensors") for folder in (first, second)]

def across_an_update():
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
    made = {}
    for step in range(10 * length):
        if step == 4:
            trainer.sync(weights[0])  # the same weights: nothing may change for those under way
        for output in engine.step():
            made[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
    return [made[number] for number in sorted(made)]

standing = across_an_update()
checks = trainer.sync(weights[1])["checks"]
llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
# Before the next request, which would bring its adapter along.
loras = sorted(llm.collective_rpc(lambda worker: sorted(worker.list_loras()) if adapter else [])[0])
after, kept = outputs(llm), drafted == llm.collective_rpc(draft)[0]
trainer.sync(weights[0])
llm.reset_prefix_cache()
answer(before=before, standing=standing, after=after, back=outputs(llm), checks=checks, loras=loras, drafted=len(drafted), kept=kept)
"""


def run(script: str, *job: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", COMMON + script, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **ENGINE_ENV["cpu"]})
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.slow
def test_a_value_cached_at_the_first_run_follows_and_requests_that_stand_still_go_on_as_if_nothing_was(checkpoint: Any) -> None:
    job = [str(checkpoint("qwen3", 1)), str(checkpoint("qwen3", 2)), "", ENGINE_ARGS, PROMPTS, MAX_TOKENS]
    cold, updated = run(CACHING + COLD, *job), run(CACHING + UPDATED, *job)
    assert updated["checks"]["lazies_refreshed"] == 9  # every norm of two layers, and the last
    assert updated["standing"] == [tokens for tokens, _ in updated["before"]]
    assert updated["after"] == cold["outputs"] != updated["before"]
    assert updated["back"] == updated["before"]


def adapter(base: Path, folder: Path) -> Path:
    """A LoRA adapter of random values, large enough to change what is said."""
    random, rank, targets = torch.Generator().manual_seed(5), 4, ["q_proj", "v_proj", "gate_proj", "down_proj"]
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in targets:
            for side, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensors[f"base_model.model.{path}.lora_{side}.weight"] = (torch.randn(shape, generator=random) * 0.3).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_adapters_stay_and_the_weights_below_them_follow(checkpoint: Any, tmp_path: Path) -> None:
    base = checkpoint("qwen3", 1)
    arguments = {**ENGINE_ARGS, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    job = [str(base), str(checkpoint("qwen3", 2)), str(adapter(base, tmp_path / "adapter")), arguments, PROMPTS, MAX_TOKENS]
    # With a cached value too: the run that fills it in must leave adapters alone.
    cold, updated = run(CACHING + COLD, *job), run(CACHING + UPDATED, *job)
    plain, adapted = updated["before"][: len(PROMPTS)], updated["before"][len(PROMPTS) :]
    assert plain != adapted
    assert updated["standing"] == [tokens for tokens, _ in plain]
    assert updated["loras"] == [1]
    assert updated["after"] == cold["outputs"] != updated["before"]
    assert updated["back"] == updated["before"]


@pytest.mark.slow
def test_a_draft_model_beside_the_target_is_left_as_it_is(checkpoint: Any) -> None:
    first = str(checkpoint("qwen3", 1))
    arguments = {**ENGINE_ARGS, "speculative_config": {"method": "draft_model", "model": first, "num_speculative_tokens": 2}}
    job = [first, str(checkpoint("qwen3", 2)), "", arguments, PROMPTS, MAX_TOKENS]
    cold, updated = run(COLD, *job), run(UPDATED, *job)
    assert updated["drafted"] > 0 and updated["kept"]
    assert updated["after"] == cold["outputs"] != updated["before"]
    assert updated["back"] == updated["before"]
