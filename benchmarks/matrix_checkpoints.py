"""Small random checkpoints for GPU kernels: `build("moe-fp8-channel", folder, seed=1)`.

Like `tests/checkpoints.py`, with dimensions that Machete, Marlin, CUTLASS and
Triton kernels accept (multiples of 128), with experts, biases and MXFP4. Each is
a config.json and one safetensors file of 50 to 150 MB, without a tokenizer.
Weights are N(0, 0.05), norms 1 + 0.1 N(0, 1), biases N(0, 0.02). The same kind
and seed give the same bytes.

A quantised kind is made from the bfloat16 weights of the same seed, in the form
that compressed-tensors or GPTQ writes, so vLLM needs no conversion; MXFP4 blocks
are random bytes.

Not covered: AWQ, NVFP4, FP8 in blocks, W4A8, LoRA, draft models, hybrids with Mamba layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Model = tuple[Config, Tensors]

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 1024, 2048, 4, 8, 4, 128
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_INTERMEDIATE = 8, 2, 512
GROUP = 128
WEIGHT_STD, BIAS_STD = 0.05, 0.02
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
#: A static input scale: activations behind a norm are of order 1, and 448 * 0.05 is far above them.
INPUT_SCALE = 0.05


class Random:
    """Draws in a fixed order, so that a seed means one model."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int, std: float = WEIGHT_STD) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * std).to(torch.bfloat16)

    def bias(self, *shape: int) -> torch.Tensor:
        return self.weight(*shape, std=BIAS_STD)

    def norm(self, size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=self._generator)).to(torch.bfloat16)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers from low to high, both included, as bytes."""
        return torch.randint(low, high + 1, shape, generator=self._generator, dtype=torch.uint8)


# --- models in bfloat16 ------------------------------------------------------------------------


def _common(architecture: str, model_type: str) -> Config:
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


def _skeleton(random: Random, layers: int = LAYERS) -> Tensors:
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


def _attention(random: Random, prefix: str, *, norms: bool, bias: bool = False) -> Tensors:
    tensors: Tensors = {}
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        tensors[f"{prefix}.{name}_proj.weight"] = random.weight(heads * HEAD_DIM, HIDDEN)
        if bias:
            tensors[f"{prefix}.{name}_proj.bias"] = random.bias(heads * HEAD_DIM)
    tensors[f"{prefix}.o_proj.weight"] = random.weight(HIDDEN, HEADS * HEAD_DIM)
    if norms:
        tensors |= {f"{prefix}.{name}_norm.weight": random.norm(HEAD_DIM) for name in ("q", "k")}
    return tensors


def _mlp(random: Random, prefix: str, intermediate: int) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": random.weight(intermediate, HIDDEN),
        f"{prefix}.up_proj.weight": random.weight(intermediate, HIDDEN),
        f"{prefix}.down_proj.weight": random.weight(HIDDEN, intermediate),
    }


def _experts(random: Random, prefix: str) -> Tensors:
    tensors = {f"{prefix}.gate.weight": random.weight(EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        tensors |= _mlp(random, f"{prefix}.experts.{expert}", EXPERT_INTERMEDIATE)
    return tensors


def qwen3(seed: int) -> Model:
    """Dense."""
    random = Random(seed)
    tensors = _skeleton(random)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= _attention(random, f"{layer}.self_attn", norms=True) | _mlp(random, f"{layer}.mlp", INTERMEDIATE)
    return _common("Qwen3ForCausalLM", "qwen3"), tensors


def qwen2(seed: int) -> Model:
    """Dense, as Qwen2.5: biases on q, k and v."""
    random = Random(seed)
    tensors = _skeleton(random)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= _attention(random, f"{layer}.self_attn", norms=False, bias=True) | _mlp(random, f"{layer}.mlp", INTERMEDIATE)
    return _common("Qwen2ForCausalLM", "qwen2"), tensors


def qwen3_moe(seed: int) -> Model:
    """Experts in every layer."""
    random = Random(seed)
    tensors = _skeleton(random)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= _attention(random, f"{layer}.self_attn", norms=True) | _experts(random, f"{layer}.mlp")
    config = _common("Qwen3MoeForCausalLM", "qwen3_moe") | {
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return config, tensors


def deepseek(seed: int) -> Model:
    """DeepSeek-V3's attention (keys and values compressed); the first layer dense, then experts and a shared one."""
    q_rank, kv_rank, nope, rope, value = 256, 512, 128, 64, 128
    random = Random(seed)
    tensors = _skeleton(random)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        tensors |= {
            f"{attention}.q_a_proj.weight": random.weight(q_rank, HIDDEN),
            f"{attention}.q_a_layernorm.weight": random.norm(q_rank),
            f"{attention}.q_b_proj.weight": random.weight(HEADS * (nope + rope), q_rank),
            f"{attention}.kv_a_proj_with_mqa.weight": random.weight(kv_rank + rope, HIDDEN),
            f"{attention}.kv_a_layernorm.weight": random.norm(kv_rank),
            f"{attention}.kv_b_proj.weight": random.weight(HEADS * (nope + value), kv_rank),
            f"{attention}.o_proj.weight": random.weight(HIDDEN, HEADS * value),
        }
        if index == 0:
            tensors |= _mlp(random, f"{layer}.mlp", INTERMEDIATE)
            continue
        tensors |= _experts(random, f"{layer}.mlp") | _mlp(random, f"{layer}.mlp.shared_experts", EXPERT_INTERMEDIATE)
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = random.bias(EXPERTS).float()
    config = _common("DeepseekV3ForCausalLM", "deepseek_v3") | {
        "num_key_value_heads": HEADS,
        "head_dim": rope,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }
    return config, tensors


# --- quantised ---------------------------------------------------------------------------------


def _fp8(weight: torch.Tensor, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in FP8 and its float32 scale: one for each row (`dim` 1), shape [N, 1], or one in all, shape [1]."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=dim, keepdim=True) if dim is not None else wide.abs().amax().reshape(1)) / FP8_MAX
    return (wide / scale).to(torch.float8_e4m3fn), scale


def _fp8_channel(weight: torch.Tensor) -> Tensors:
    quantised, scale = _fp8(weight, 1)
    return {"weight": quantised, "weight_scale": scale}


def _fp8_static(weight: torch.Tensor) -> Tensors:
    quantised, scale = _fp8(weight, None)
    return {"weight": quantised, "weight_scale": scale, "input_scale": torch.tensor([INPUT_SCALE])}


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values 0 to 15 for -8 to 7, shape [N, K], and scales, shape [N, K / GROUP]."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // GROUP, GROUP)
    scale = grouped.abs().amax(dim=2, keepdim=True) / 7
    return ((grouped / scale).round().clamp(-8, 7) + 8).to(torch.int64).view(rows, columns), scale.squeeze(2)


def _packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit values of the last dimension to an int32, lowest first."""
    words = (nibbles.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)  # the same 32 bits, as a signed number


def _w4a16(weight: torch.Tensor) -> Tensors:
    nibbles, scale = _int4(weight)
    return {"weight_packed": _packed(nibbles), "weight_scale": scale.to(torch.bfloat16), "weight_shape": torch.tensor(weight.shape)}


def _gptq(weight: torch.Tensor) -> Tensors:
    nibbles, scale = _int4(weight)
    rows, columns = weight.shape
    return {
        "qweight": _packed(nibbles).t(),  # [K/8, N]
        "qzeros": _packed(torch.full((columns // GROUP, rows), 7)),  # symmetric; the format holds zero points less one
        "scales": scale.t().to(torch.bfloat16),
        "g_idx": (torch.arange(columns) // GROUP).to(torch.int32),
    }


def _arguments(bits: int, kind: str, strategy: str, *, dynamic: bool, group: int | None = None) -> Config:
    values: Config = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}
    return values | ({"group_size": group} if group else {})


def _compressed_tensors(form: str, weights: Config, inputs: Config | None) -> Config:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


FP8_CHANNEL = _compressed_tensors(
    "float-quantized", _arguments(8, "float", "channel", dynamic=False), _arguments(8, "float", "token", dynamic=True)
)
FP8_STATIC = _compressed_tensors(
    "float-quantized", _arguments(8, "float", "tensor", dynamic=False), _arguments(8, "float", "tensor", dynamic=False)
)
W4A16 = _compressed_tensors("pack-quantized", _arguments(4, "int", "group", dynamic=False, group=GROUP), None)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}


def _quantised(model: Model, quantise: Callable[[torch.Tensor], Tensors], quantisation: Config) -> Model:
    """`quantise` in place of every projection's weight; biases, norms, routers and the head stay."""
    config, tensors = model
    result: Tensors = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and "_proj" in module.rpartition(".")[2]:
            result |= {f"{module}.{key}": value.contiguous() for key, value in quantise(tensor).items()}
        else:
            result[name] = tensor
    return config | {"quantization_config": quantisation}, result


def gpt_oss(seed: int) -> Model:
    """gpt-oss: experts in MXFP4 with biases, attention sinks, a sliding window in every other layer."""
    layers, experts, heads, kv_heads, head_dim, intermediate = 2, 4, 16, 4, 64, 1024
    random = Random(seed)
    tensors = _skeleton(random, layers)
    for layer in (f"model.layers.{index}" for index in range(layers)):
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        for name, rows, columns in (
            ("q", heads * head_dim, HIDDEN), ("k", kv_heads * head_dim, HIDDEN), ("v", kv_heads * head_dim, HIDDEN),
            ("o", HIDDEN, heads * head_dim),
        ):  # fmt: skip
            tensors[f"{attention}.{name}_proj.weight"] = random.weight(rows, columns)
            tensors[f"{attention}.{name}_proj.bias"] = random.bias(rows)
        tensors[f"{attention}.sinks"] = random.weight(heads, std=1.0)
        tensors |= {f"{mlp}.router.weight": random.weight(experts, HIDDEN), f"{mlp}.router.bias": random.bias(experts)}
        for name, rows, columns in (("gate_up_proj", 2 * intermediate, HIDDEN), ("down_proj", HIDDEN, intermediate)):
            tensors[f"{mlp}.experts.{name}_blocks"] = random.integers(0, 255, experts, rows, columns // 32, 16)
            tensors[f"{mlp}.experts.{name}_scales"] = random.integers(118, 121, experts, rows, columns // 32)
            tensors[f"{mlp}.experts.{name}_bias"] = random.bias(experts, rows)
    config = _common("GptOssForCausalLM", "gpt_oss") | {
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        },
    }
    return config, tensors


KINDS: dict[str, Callable[[int], Model]] = {
    "dense-bf16": qwen3,
    "dense-fp8-channel": lambda seed: _quantised(qwen3(seed), _fp8_channel, FP8_CHANNEL),
    "dense-w4a16": lambda seed: _quantised(qwen3(seed), _w4a16, W4A16),
    "dense-gptq-bias": lambda seed: _quantised(qwen2(seed), _gptq, GPTQ),
    "moe-bf16": qwen3_moe,
    "moe-fp8-channel": lambda seed: _quantised(qwen3_moe(seed), _fp8_channel, FP8_CHANNEL),
    "moe-fp8-static": lambda seed: _quantised(qwen3_moe(seed), _fp8_static, FP8_STATIC),
    "moe-w4a16": lambda seed: _quantised(qwen3_moe(seed), _w4a16, W4A16),
    "gpt-oss-mxfp4": gpt_oss,
    "mla-bf16": deepseek,
    "mla-fp8-channel": lambda seed: _quantised(deepseek(seed), _fp8_channel, FP8_CHANNEL),
}


def build(kind: str, folder: Path, seed: int) -> Path:
    """Write a checkpoint of a kind in `KINDS` into `folder` (made if missing); returns it."""
    config, tensors = KINDS[kind](seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
