"""Checkpoints of the reload matrix: formats hold the weights they are made from, and seeds differ in every value.

Not covered here: that vLLM loads them, which the matrix itself shows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.checkpoints import KINDS, formats
from benchmarks.checkpoints.formats import FP4_VALUES, FP8_BLOCK, quantised
from benchmarks.checkpoints.parts import Tensors
from benchmarks.matrix_rows import ROWS

SHIFTS = torch.arange(0, 32, 4)
#: Tensors that the format fixes.
CONSTANT = ("qzeros", "g_idx", "weight_shape")


def nibbles(words: torch.Tensor) -> torch.Tensor:
    return ((words.unsqueeze(-1) >> SHIFTS) & 15).flatten(-2)


def groups(scale: torch.Tensor) -> torch.Tensor:
    return scale.float().repeat_interleave(formats.GROUP, dim=1)


def plain(tensors: Tensors) -> torch.Tensor:
    return tensors["weight"].float() * tensors["weight_scale"]


def blocks(tensors: Tensors) -> torch.Tensor:
    scale = tensors["weight_scale_inv"].repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return tensors["weight"].float() * scale


def int4(tensors: Tensors) -> torch.Tensor:
    return (nibbles(tensors["weight_packed"]) - 8) * groups(tensors["weight_scale"])


def gptq(tensors: Tensors) -> torch.Tensor:
    zeros = (nibbles(tensors["qzeros"]) + 1).t().repeat_interleave(formats.GROUP, dim=1)
    return (nibbles(tensors["qweight"].t()) - zeros) * groups(tensors["scales"].t())


def awq(tensors: Tensors) -> torch.Tensor:
    def columns(words: torch.Tensor) -> torch.Tensor:  # the order by which vLLM undoes AWQ's
        return nibbles(words).unflatten(-1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(-2)

    zeros = columns(tensors["qzeros"]).t().repeat_interleave(formats.GROUP, dim=1)
    return (columns(tensors["qweight"]).t() - zeros) * groups(tensors["scales"].t())


def nvfp4(tensors: Tensors) -> torch.Tensor:
    packed = tensors["weight_packed"]
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    values = torch.tensor(FP4_VALUES)[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    return values * scale.repeat_interleave(formats.FP4_GROUP, dim=1)


@pytest.mark.parametrize(
    ("quantise", "back", "error"),
    [
        (formats.fp8_channel, plain, 0.32),
        (formats.fp8_tensor, plain, 0.32),
        (formats.fp8_static, plain, 0.32),
        (formats.fp8_block, blocks, 0.32),
        (formats.w4, int4, 0.6),
        (formats.w4_static_int8, int4, 0.6),
        (formats.gptq, gptq, 0.6),
        (formats.awq, awq, 0.6),
        (formats.nvfp4, nvfp4, 0.9),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_format_holds_the_weight(quantise: formats.Quantise, back: Callable[[Tensors], torch.Tensor], error: float) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(3)).mul(0.05).to(torch.bfloat16)
    tensors = quantise(weight, 0.25)
    difference = (back(tensors) - weight.float()).abs()
    assert difference.max() < error * 0.05, difference.max()
    assert difference.mean() < 0.3 * error * 0.05


def test_projections_that_vllm_fuses_share_scales_and_seeds_do_not() -> None:
    names = ["l.self_attn.q_proj", "l.self_attn.k_proj", "l.self_attn.o_proj", "l.mlp.experts.3.gate_proj", "l.mlp.experts.3.up_proj"]
    model = ({}, {f"{name}.weight": torch.eye(128, dtype=torch.bfloat16) for name in names} | {"l.mlp.gate.weight": torch.ones(2, 2)})
    (_, one), (_, other) = (quantised(model, seed, formats.w4_static_int8, formats.W4_STATIC_INT8) for seed in (1, 2))
    for key in ("input_scale", "output_scale"):
        q, k, o, gate, up = (float(one[f"{name}.{key}"]) for name in names)
        assert q == k and gate == up and len({q, o, gate}) == 3
        assert q != float(other[f"{names[0]}.{key}"])
    assert one["l.mlp.gate.weight"] is model[1]["l.mlp.gate.weight"]


@pytest.mark.parametrize("kind", ["dense-fp8-kv", "gpt-oss-mxfp4", "hybrid-mamba"])
def test_a_seed_means_one_checkpoint_and_another_differs_in_every_tensor(kind: str) -> None:
    (_, one), (_, again), (_, other) = (KINDS[kind](seed) for seed in (1, 1, 2))
    assert all(tensor.equal(again[name]) for name, tensor in one.items())
    assert [name for name, tensor in one.items() if tensor.equal(other[name]) and not name.endswith(CONSTANT)] == []


def test_every_row_on_a_gpu_has_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    monkeypatch.setattr("benchmarks.matrix_rows.build", lambda kind, folder, seed: kinds.append(kind))
    for row in ROWS["cuda"].values():
        row.build(None, 1)  # type: ignore[arg-type]
    assert len(kinds) == len(ROWS["cuda"]) and set(kinds) == set(KINDS)
