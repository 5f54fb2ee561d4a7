"""Small random checkpoints for GPU kernels: `build("moe-fp8-channel", folder, seed=1)`.

Like `tests/checkpoints.py`, with dimensions that kernels for a GPU accept, with
experts, biases and quantised forms. Each is a config.json and one safetensors file
of 25 to 150 MB, without a tokenizer. Weights are N(0, 0.05), norms 1 + 0.1 N(0, 1),
biases N(0, 0.02). The same kind and seed give the same bytes; another seed gives
others in every tensor, scales too.

A quantised kind is made from the bfloat16 weights of the same seed, in the form
that the tools of its format write, so vLLM needs no conversion; MXFP4 blocks are
random bytes.

Not covered: adapters; drafts in a folder of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.checkpoints import formats
from benchmarks.checkpoints.formats import Quantise, quantised
from benchmarks.checkpoints.models import deepseek, exaone_moe, gpt_oss, qwen2, qwen3, qwen3_moe
from benchmarks.checkpoints.parts import Config, Model
from benchmarks.checkpoints.recurrent import nemotron_h, qwen3_next


def _quantised(base: Callable[[int], Model], quantise: Quantise, quantisation: Config) -> Callable[[int], Model]:
    return lambda seed: quantised(base(seed), seed, quantise, quantisation)


KINDS: dict[str, Callable[[int], Model]] = {
    "dense-bf16": qwen3,
    "dense-fp8-channel": _quantised(qwen3, formats.fp8_channel, formats.FP8_CHANNEL),
    "dense-fp8-kv": lambda seed: formats.with_cache_scales(quantised(qwen3(seed), seed, formats.fp8_tensor, formats.FP8_TENSOR), seed),
    "dense-w4a16": _quantised(qwen3, formats.w4, formats.W4A16),
    "dense-w4a8": _quantised(qwen3, formats.w4, formats.W4A8),
    "dense-wna8o8": _quantised(qwen3, formats.w4_static_int8, formats.W4_STATIC_INT8),
    "dense-nvfp4": _quantised(qwen3, formats.nvfp4, formats.NVFP4_WEIGHTS),
    "dense-gptq-bias": _quantised(qwen2, formats.gptq, formats.GPTQ),
    "dense-awq-bias": _quantised(qwen2, formats.awq, formats.AWQ),
    "moe-bf16": qwen3_moe,
    "moe-fp8-channel": _quantised(qwen3_moe, formats.fp8_channel, formats.FP8_CHANNEL),
    "moe-fp8-static": _quantised(qwen3_moe, formats.fp8_static, formats.FP8_STATIC),
    "moe-fp8-static-limit": _quantised(exaone_moe, formats.fp8_static, formats.FP8_STATIC),
    "moe-fp8-block": _quantised(qwen3_moe, formats.fp8_block, formats.FP8_BLOCKS),
    "moe-w4a16": _quantised(qwen3_moe, formats.w4, formats.W4A16),
    "moe-w4a8": _quantised(qwen3_moe, formats.w4, formats.W4A8),
    "moe-nvfp4": lambda seed: formats.with_expert_input_scales(
        quantised(qwen3_moe(seed), seed, formats.nvfp4, formats.NVFP4_WEIGHTS), seed
    ),
    "moe-shared-gate": lambda seed: qwen3_next(seed, lone_gate=True),
    "gpt-oss-mxfp4": gpt_oss,
    "mla-bf16": deepseek,
    "mla-fp8-channel": _quantised(deepseek, formats.fp8_channel, formats.FP8_CHANNEL),
    "hybrid-mamba": nemotron_h,
    "hybrid-gdn": qwen3_next,
    "mtp-draft": lambda seed: deepseek(seed, drafts=1),
}


def build(kind: str, folder: Path, seed: int) -> Path:
    """Write a checkpoint of a kind in `KINDS` into `folder` (made if missing); returns it."""
    config, tensors = KINDS[kind](seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
