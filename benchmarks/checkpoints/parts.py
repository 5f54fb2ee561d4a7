"""What random models are made of: draws in a fixed order, attention, MLPs, experts, and the common part of a config.

Dimensions suit Machete, Marlin, CUTLASS and Triton kernels (multiples of 128).

Not covered: other dimensions; a model that needs them has its own.
"""

from __future__ import annotations

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Model = tuple[Config, Tensors]

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 1024, 2048, 4, 8, 4, 128
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_INTERMEDIATE = 8, 2, 512
WEIGHT_STD, BIAS_STD = 0.05, 0.02


class Random:
    """Draws in a fixed order, so that a seed means one model."""

    def __init__(self, seed: int, std: float = WEIGHT_STD) -> None:
        self._std = std
        self._generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int, std: float | None = None) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * (self._std if std is None else std)).to(torch.bfloat16)

    def bias(self, *shape: int) -> torch.Tensor:
        return self.weight(*shape, std=BIAS_STD)

    def norm(self, size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=self._generator)).to(torch.bfloat16)

    def fraction(self) -> float:
        """From 0 to 1."""
        return float(torch.rand((), generator=self._generator))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers from low to high, both included, as bytes."""
        return torch.randint(low, high + 1, shape, generator=self._generator, dtype=torch.uint8)


def common(architecture: str, model_type: str) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def skeleton(random: Random, layers: int = LAYERS) -> Tensors:
    """What stands outside attention and MLPs."""
    tensors = {
        "model.embed_tokens.weight": random.weight(VOCAB, HIDDEN),
        "model.norm.weight": random.norm(HIDDEN),
        "lm_head.weight": random.weight(VOCAB, HIDDEN),
    }
    for index in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{index}.{name}.weight"] = random.norm(HIDDEN)
    return tensors


def attention(random: Random, prefix: str, *, norms: bool, bias: bool = False, gated: bool = False) -> Tensors:
    """`gated`: the queries' projection also makes a gate for the output."""
    tensors: Tensors = {}
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        tensors[f"{prefix}.{name}_proj.weight"] = random.weight((2 if gated and name == "q" else 1) * heads * HEAD_DIM, HIDDEN)
        if bias:
            tensors[f"{prefix}.{name}_proj.bias"] = random.bias(heads * HEAD_DIM)
    tensors[f"{prefix}.o_proj.weight"] = random.weight(HIDDEN, HEADS * HEAD_DIM)
    if norms:
        tensors |= {f"{prefix}.{name}_norm.weight": random.norm(HEAD_DIM) for name in ("q", "k")}
    return tensors


def mlp(random: Random, prefix: str, intermediate: int) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": random.weight(intermediate, HIDDEN),
        f"{prefix}.up_proj.weight": random.weight(intermediate, HIDDEN),
        f"{prefix}.down_proj.weight": random.weight(HIDDEN, intermediate),
    }


def experts(random: Random, prefix: str, number: int = EXPERTS) -> Tensors:
    tensors = {f"{prefix}.gate.weight": random.weight(number, HIDDEN)}
    for expert in range(number):
        tensors |= mlp(random, f"{prefix}.experts.{expert}", EXPERT_INTERMEDIATE)
    return tensors
