"""Tiny random checkpoints of many kinds that vLLM's CPU engine loads: `build("fp8-channel", folder, seed=1)`.

Each is a config.json and one safetensors file of under 1 MB (3.6 MB for MLA), without
a tokenizer. Weights are N(0, `WEIGHT_STD`), norms 1 + 0.1 N(0, 1). The same kind and seed give the same
bytes; two seeds give models that answer differently, so a mix-up shows.

A quantised kind is made from the bfloat16 weights of the same seed, in the form that
compressed-tensors writes, so vLLM needs no conversion.

Not covered: kinds that only a GPU engine loads (MXFP4, FP8 experts), biases, several files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.checkpoints.models import deepseek_attention, deepseek_config
from benchmarks.checkpoints.parts import Random, common

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 128, 256, 2, 4, 2, 32
EXPERTS, EXPERT_INTERMEDIATE = 4, 64
W4_GROUP = 32
#: With 0.05 layers this narrow add so little that a model says one word again and again.
WEIGHT_STD = 0.1
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


# --- models in bfloat16 ------------------------------------------------------------------------


def _common(architecture: str, model_type: str, *, tied: bool) -> Config:
    return common(architecture, model_type) | {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": tied,
    }


def _outside_layers(random: Random, *, tied: bool) -> Tensors:
    tensors = {"model.embed_tokens.weight": random.weight(VOCAB, HIDDEN), "model.norm.weight": random.norm(HIDDEN)}
    return tensors if tied else tensors | {"lm_head.weight": random.weight(VOCAB, HIDDEN)}


def _norms(random: Random, layer: str) -> Tensors:
    return {f"{layer}.{name}.weight": random.norm(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}


def _mlp(random: Random, prefix: str, intermediate: int) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": random.weight(intermediate, HIDDEN),
        f"{prefix}.up_proj.weight": random.weight(intermediate, HIDDEN),
        f"{prefix}.down_proj.weight": random.weight(HIDDEN, intermediate),
    }


def _qwen3_attention(random: Random, prefix: str) -> Tensors:
    return {
        f"{prefix}.q_proj.weight": random.weight(HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.k_proj.weight": random.weight(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.v_proj.weight": random.weight(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.o_proj.weight": random.weight(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.q_norm.weight": random.norm(HEAD_DIM),
        f"{prefix}.k_norm.weight": random.norm(HEAD_DIM),
    }


def qwen3(folder: Path, seed: int, *, tied: bool = False) -> Path:
    """Dense, bfloat16; with `tied` the head is the embedding and not in the file."""
    return _write(folder, *_qwen3(seed, tied=tied))


def _qwen3(seed: int, *, tied: bool = False) -> tuple[Config, Tensors]:
    random = Random(seed, WEIGHT_STD)
    tensors = _outside_layers(random, tied=tied)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= _norms(random, layer) | _qwen3_attention(random, f"{layer}.self_attn") | _mlp(random, f"{layer}.mlp", INTERMEDIATE)
    return _common("Qwen3ForCausalLM", "qwen3", tied=tied), tensors


def qwen3_moe(folder: Path, seed: int) -> Path:
    """Four experts in every layer, two per token, bfloat16."""
    random = Random(seed, WEIGHT_STD)
    tensors = _outside_layers(random, tied=False)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= _norms(random, layer) | _qwen3_attention(random, f"{layer}.self_attn")
        tensors[f"{layer}.mlp.gate.weight"] = random.weight(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            tensors |= _mlp(random, f"{layer}.mlp.experts.{expert}", EXPERT_INTERMEDIATE)
    config = _common("Qwen3MoeForCausalLM", "qwen3_moe", tied=False) | {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return _write(folder, config, tensors)


def mla(folder: Path, seed: int) -> Path:
    """DeepSeek-V3's attention (keys and values compressed), every MLP dense, bfloat16."""
    ranks = 64, 512, 128, 64, 128
    random = Random(seed, WEIGHT_STD)
    tensors = _outside_layers(random, tied=False)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= _norms(random, layer) | _mlp(random, f"{layer}.mlp", INTERMEDIATE)
        tensors |= deepseek_attention(random, f"{layer}.self_attn", ranks, HIDDEN, HEADS)
    config = _common("DeepseekV3ForCausalLM", "deepseek_v3", tied=False) | deepseek_config(ranks, HEADS) | {
        "first_k_dense_replace": LAYERS,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    return _write(folder, config, tensors)


# --- quantised, as compressed-tensors writes them ----------------------------------------------


def fp8_channel(folder: Path, seed: int) -> Path:
    """Dense, FP8 weights with one float32 scale per output row, activations quantised per token."""

    def quantise(weight: torch.Tensor) -> Tensors:
        scale = weight.float().abs().amax(dim=1, keepdim=True) / FP8_MAX
        return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return _quantised(folder, seed, quantise, "float-quantized", weights, inputs)


def int8_channel(folder: Path, seed: int) -> Path:
    """Dense, INT8 weights with one float32 scale per output row, activations quantised per token (W8A8)."""

    def quantise(weight: torch.Tensor) -> Tensors:
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
        return {"weight": (weight.float() / scale).round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return _quantised(folder, seed, quantise, "int-quantized", weights, inputs)


def w4a16(folder: Path, seed: int) -> Path:
    """Dense, 4-bit weights in groups of `W4_GROUP` inputs, eight to an int32, activations in bfloat16."""

    def quantise(weight: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        grouped = weight.float().view(rows, columns // W4_GROUP, W4_GROUP)
        scale = grouped.abs().amax(dim=2, keepdim=True) / 7
        nibbles = ((grouped / scale).round().clamp(-8, 7) + 8).to(torch.int64).view(rows, columns // 8, 8)
        packed = (nibbles << torch.arange(0, 32, 4)).sum(dim=2)  # lowest nibble first
        packed = torch.where(packed >= 2**31, packed - 2**32, packed)  # the same 32 bits, as a signed number
        return {
            "weight_packed": packed.to(torch.int32),
            "weight_scale": scale.squeeze(2).to(torch.bfloat16),
            "weight_shape": torch.tensor([rows, columns]),
        }

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": W4_GROUP, "dynamic": False}
    return _quantised(folder, seed, quantise, "pack-quantized", weights, None)


def _quantised(
    folder: Path, seed: int, quantise: Callable[[torch.Tensor], Tensors], form: str, weights: Config, inputs: Config | None
) -> Path:
    """`qwen3` with `quantise` applied to every projection: [N, K] bfloat16 → what stands in its place, by suffix."""
    config, tensors = _qwen3(seed)
    result: Tensors = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if module.endswith("_proj") and suffix == "weight":
            result |= {f"{module}.{key}": value.contiguous() for key, value in quantise(tensor).items()}
        else:
            result[name] = tensor
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return _write(folder, config, result)


def _write(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


KINDS: dict[str, Callable[[Path, int], Path]] = {
    "qwen3": qwen3,
    "qwen3-tied": lambda folder, seed: qwen3(folder, seed, tied=True),
    "qwen3-moe": qwen3_moe,
    "mla": mla,
    "fp8-channel": fp8_channel,
    "int8-channel": int8_channel,
    "w4a16": w4a16,
}


def build(kind: str, folder: Path, seed: int) -> Path:
    """Write a checkpoint of a kind in `KINDS` into `folder` (made if missing); returns it."""
    return KINDS[kind](folder, seed)
