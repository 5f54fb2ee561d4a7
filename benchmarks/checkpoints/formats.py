"""Quantised forms of a model's projections, as the tools that make such checkpoints write them.

Each function takes a weight [N, K] and a number from 0 to 1, which is the same for
projections that vLLM fuses (they share scales) and another for every seed and
layer, so that a stale scale shows; it returns the tensors that replace the weight.

Not covered: activation ordering, zero points of GPTQ, channel-wise 4-bit scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import torch

from benchmarks.checkpoints.parts import LAYERS, Config, Model, Random, Tensors

Quantise = Callable[[torch.Tensor, float], Tensors]

GROUP, FP8_BLOCK, FP4_GROUP = 128, 128, 16
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
FP4_MAX = 6.0
#: What four bits hold: a sign and one of these.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: AWQ's order of eight values in a word.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


# --- 8-bit floats ------------------------------------------------------------------------------


def _fp8(weight: torch.Tensor, share: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in FP8 and its float32 scale: one for each row, shape [N, 1], or with `share` one in all, shape [1].

    The largest of all weights is often the same bfloat16 for two seeds: `share` sets the scales apart.
    """
    wide = weight.float()
    top = wide.abs().amax(dim=1, keepdim=True) if share is None else wide.abs().amax().reshape(1) * (1 + share / 4)
    return (wide / (top / FP8_MAX)).to(torch.float8_e4m3fn), top / FP8_MAX


def fp8_channel(weight: torch.Tensor, share: float) -> Tensors:
    quantised, scale = _fp8(weight)
    return {"weight": quantised, "weight_scale": scale}


def fp8_tensor(weight: torch.Tensor, share: float) -> Tensors:
    quantised, scale = _fp8(weight, share)
    return {"weight": quantised, "weight_scale": scale.squeeze()}


def fp8_static(weight: torch.Tensor, share: float) -> Tensors:
    """Activations behind a norm are of order 1, and 448 * 0.04 is far above them."""
    quantised, scale = _fp8(weight, share)
    return {"weight": quantised, "weight_scale": scale, "input_scale": torch.tensor([0.04 + 0.04 * share])}


def fp8_block(weight: torch.Tensor, share: float) -> Tensors:
    """A scale for each block of 128 x 128, as DeepSeek writes it."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / FP8_MAX
    return {"weight": (blocks / scale).to(torch.float8_e4m3fn).view(rows, columns), "weight_scale_inv": scale[:, 0, :, 0]}


# --- 4-bit integers ----------------------------------------------------------------------------


def _int4(weight: torch.Tensor, zero: torch.Tensor | int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Values 0 to 15, shape [N, K], of which `zero` stands for 0, and scales, shape [N, K / GROUP]."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // GROUP, GROUP)
    steps, offset = (5, zero.unsqueeze(2)) if isinstance(zero, torch.Tensor) else (7, zero)  # zeros from 6 to 10 leave room for 5
    scale = grouped.abs().amax(dim=2, keepdim=True) / steps
    return ((grouped / scale).round() + offset).clamp(0, 15).to(torch.int64).view(rows, columns), scale.squeeze(2)


def _packed(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit values of the last dimension to an int32, lowest first."""
    words = (nibbles.unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)  # the same 32 bits, as a signed number


def w4(weight: torch.Tensor, share: float) -> Tensors:
    nibbles, scale = _int4(weight)
    return {"weight_packed": _packed(nibbles), "weight_scale": scale.to(torch.bfloat16), "weight_shape": torch.tensor(weight.shape)}


def w4_static_int8(weight: torch.Tensor, share: float) -> Tensors:
    """With scales by which the engine rounds what goes into a projection and what comes out to 8 bits."""
    scales = {"input_scale": torch.tensor([0.04 + 0.03 * share]), "output_scale": torch.tensor([0.06 + 0.03 * share])}
    return w4(weight, share) | scales


def gptq(weight: torch.Tensor, share: float) -> Tensors:
    nibbles, scale = _int4(weight)
    rows, columns = weight.shape
    return {
        "qweight": _packed(nibbles).t(),  # [K/8, N]
        "qzeros": _packed(torch.full((columns // GROUP, rows), 7)),  # symmetric; the format holds zero points less one
        "scales": scale.t().to(torch.bfloat16),
        "g_idx": (torch.arange(columns) // GROUP).to(torch.int32),
    }


def awq(weight: torch.Tensor, share: float) -> Tensors:
    """Asymmetric, with another zero point in every group."""
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(int(share * 2**31))
    zeros = torch.randint(6, 11, (rows, columns // GROUP), generator=generator)
    nibbles, scale = _int4(weight, zeros)
    return {
        "qweight": _packed(_awq_order(nibbles.t())),  # [K, N/8]
        "qzeros": _packed(_awq_order(zeros.t())),
        "scales": scale.t().to(torch.bfloat16),
    }


def _awq_order(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)


# --- 4-bit floats ------------------------------------------------------------------------------


def nvfp4(weight: torch.Tensor, share: float) -> Tensors:
    """Two values in a byte, an FP8 scale for 16, and a divisor of these scales, as compressed-tensors has it."""
    rows, columns = weight.shape
    divisor = FP8_MAX * FP4_MAX / (0.3 + 0.1 * share)  # no weight is as large as 0.3
    grouped = weight.float().view(rows, columns // FP4_GROUP, FP4_GROUP)
    scale = (grouped.abs().amax(dim=2) / FP4_MAX * divisor).to(torch.float8_e4m3fn)
    steps = grouped.abs() * divisor / scale.float().clamp(min=1e-3).unsqueeze(2)
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(FP4_VALUES)])
    codes = (torch.bucketize(steps, middles) + 8 * (grouped < 0)).to(torch.uint8).view(rows, columns)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([divisor])}


# --- what config.json says ---------------------------------------------------------------------


def _arguments(bits: int, kind: str, strategy: str, *, dynamic: bool, group: int | None = None) -> Config:
    values: Config = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}
    return values | ({"group_size": group} if group else {})


def _compressed_tensors(form: str, weights: Config, inputs: Config | None, outputs: Config | None = None) -> Config:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": outputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


_INT4 = _arguments(4, "int", "group", dynamic=False, group=GROUP)
_TOKEN_FP8 = _arguments(8, "float", "token", dynamic=True)
_STATIC_INT8 = _arguments(8, "int", "tensor", dynamic=False)
_ROUTERS = [f"model.layers.{index}.mlp.gate" for index in range(LAYERS)]

FP8_CHANNEL = _compressed_tensors("float-quantized", _arguments(8, "float", "channel", dynamic=False), _TOKEN_FP8)
FP8_STATIC = _compressed_tensors(
    "float-quantized", _arguments(8, "float", "tensor", dynamic=False), _arguments(8, "float", "tensor", dynamic=False)
)
FP8_TENSOR: Config = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", *_ROUTERS]}
FP8_BLOCKS = FP8_TENSOR | {"weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
W4A16 = _compressed_tensors("pack-quantized", _INT4, None)
W4A8 = _compressed_tensors("pack-quantized", _INT4, _TOKEN_FP8)
W4_STATIC_INT8 = _compressed_tensors("pack-quantized", _INT4, _STATIC_INT8, _STATIC_INT8)
NVFP4_WEIGHTS = _compressed_tensors("nvfp4-pack-quantized", _arguments(4, "float", "tensor_group", dynamic=False, group=FP4_GROUP), None)
GPTQ: Config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
AWQ: Config = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}


def quantised(model: Model, seed: int, quantise: Quantise, quantisation: Config) -> Model:
    """`quantise` in place of every projection's weight; biases, norms, routers and the head stay."""
    config, tensors = model
    random = Random(seed)
    shares: dict[str, float] = {}
    result: Tensors = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and "_proj" in module.rpartition(".")[2]:
            share = shares.setdefault(_fused(module), random.fraction())
            result |= {f"{module}.{key}": value.contiguous() for key, value in quantise(tensor, share).items()}
        else:
            result[name] = tensor
    return config | {"quantization_config": quantisation}, result


def _fused(module: str) -> str:
    """The layer of vLLM's that a projection becomes a part of."""
    return re.sub(r"\b(gate|up)_proj$", "gate_up_proj", re.sub(r"\b[qkv]_proj$", "qkv_proj", module))


def with_cache_scales(model: Model, seed: int) -> Model:
    """With scales of the attention's queries, keys, values and probabilities in every layer."""
    config, tensors = model
    random = Random(seed)
    scales = {
        f"model.layers.{index}.self_attn.attn.{name}_scale": torch.tensor(low + low * random.fraction())
        for index in range(config["num_hidden_layers"])
        for name, low in (("q", 0.02), ("k", 0.03), ("v", 0.04), ("prob", 0.5))
    }
    return config, tensors | scales


def with_expert_input_scales(model: Model, seed: int) -> Model:
    """With scales of the inputs of NVFP4 experts: vLLM reads them even where activations stay as they are."""
    config, tensors = model
    random = Random(seed)
    shares: dict[str, float] = {}
    scales: Tensors = {}
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed" and ".experts." in module:
            share = shares.setdefault(_fused(module), random.fraction())
            scales[f"{module}.input_global_scale"] = torch.tensor([FP8_MAX * FP4_MAX / (8 + 4 * share)])
    return config, tensors | scales
