"""Between a trainer's parameters and the tensors of the engines' checkpoint, for each model of the demo.

    model        trainer                                   checkpoint, and so what is sent
    -----------  ----------------------------------------  -----------------------------------------------
    qwen3        the same names                            bfloat16
    qwen3-moe    experts.gate_up_proj [E, 2I, H]           experts.<e>.gate_proj.weight [I, H], up_proj alike
                 experts.down_proj [E, H, I]               experts.<e>.down_proj.weight [H, I]; all bfloat16
    int8         dense layers' *_proj.weight [N, K]        INT8 [N, K] and *_proj.weight_scale float32 [N, 1]

Pure functions over mappings. Not covered: experts that are quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weightsync.client.quantize import from_int8_channel, int8_channel

_GATE_UP, _DOWN, _PROJECTION, _SCALE = ".experts.gate_up_proj", ".experts.down_proj", "_proj.weight", "_proj.weight_scale"
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}

#: What tells vLLM how an INT8 checkpoint is to be read; activations are quantised per token while it runs.
INT8_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
}


def to_checkpoint(state: Mapping[str, torch.Tensor], model: str) -> dict[str, torch.Tensor]:
    """The trainer's tensors, of any floating dtype, as the engines' checkpoint has them."""
    sent: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        full = tensor.detach()
        if model == "int8" and name.endswith(_PROJECTION):
            sent[name], sent[f"{name}_scale"] = int8_channel(full)
        elif model == "qwen3-moe" and name.endswith((_GATE_UP, _DOWN)):
            sent |= _one_by_one(name, full.to(torch.bfloat16))
        else:
            sent[name] = full.to(torch.bfloat16).contiguous()
    return sent


def _one_by_one(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every expert's own weights out of the stack of all."""
    prefix, _, kind = name.rpartition(".")
    parts = {"gate_proj": stacked.chunk(2, dim=1)[0], "up_proj": stacked.chunk(2, dim=1)[1]} if kind == "gate_up_proj" else {kind: stacked}
    return {
        f"{prefix}.{expert}.{part}.weight": weights[expert].contiguous()
        for expert in range(len(stacked))
        for part, weights in parts.items()
    }


def from_checkpoint(sent: Mapping[str, torch.Tensor], model: str) -> dict[str, torch.Tensor]:
    """The reverse, in float32: the weights with which the engines compute, under the trainer's names."""
    state: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, tensor in sent.items():
        if model == "int8" and name.endswith(_PROJECTION):
            state[name] = from_int8_channel(tensor, sent[f"{name}_scale"])
        elif model == "int8" and name.endswith(_SCALE):
            continue
        elif model == "qwen3-moe" and ".experts." in name:  # in the order of their numbers, as `to_checkpoint` gave them
            prefix, _, rest = name.partition(".experts.")
            experts.setdefault(prefix, {}).setdefault(rest.split(".")[1], []).append(tensor.float())
        else:
            state[name] = tensor.float()
    for prefix, parts in experts.items():
        gate, up, down = (torch.stack(parts[part]) for part in ("gate_proj", "up_proj", "down_proj"))
        state |= {prefix + _GATE_UP: torch.cat((gate, up), dim=1), prefix + _DOWN: down}
    return state
