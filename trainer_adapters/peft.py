"""Adapters of PEFT merged into what is sent, a layer at a time, while the model stays as it is.

    from trainer_adapters.fleet import lora, weights
    sync.sync_weights(weights(model))          # instead of sync_weights(model), which the engines refuse
    sync.sync_weights(lora(model), adapter_only=True)     # or the adapter alone, to engines that take one (`client/lora.py`)

A layer's weights are copied and the copy merged by PEFT itself, so that nothing is added to the model's own and taken away again, which
in bfloat16 would change them a little each time. Memory: one layer more. Modules that are trained as a whole (`modules_to_save`) are
sent in their trained form.

Tested with peft 0.21.2: LoRA and DoRA on linear layers. Not covered: prompt tuning and the like, which have no weights to merge;
experts that PEFT adapts as one parameter; adapters on weights that ZeRO-3 has partitioned; `trainable_token_indices` (engines refuse it).
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from weightsync import WeightSyncError


def merges(model: torch.nn.Module) -> tuple[dict[str, Callable[[], torch.Tensor]], set[str]]:
    """How to make the tensors that adapters change, by name; and names that are not sent.

    Args:
        model: a `PeftModel`, or one into which adapters were put; any other gives nothing.

    Raises:
        WeightSyncError: an adapter is no change of weights.
    """
    if "peft" not in sys.modules:
        return {}, set()
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        kind = type(model.active_peft_config).__name__
        raise WeightSyncError(
            f"{kind} changes prompts and no weights, so there is nothing to merge", hint="Use LoRA or another weight adapter"
        )
    made: dict[str, Callable[[], torch.Tensor]] = {}
    left_out: set[str] = set()
    adapted: list[str] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, ModulesToSaveWrapper):
            active = [f"{prefix}modules_to_save.{name}." for name in module.active_adapters if name in module.modules_to_save]
            left_out |= {name for name in _names(module, prefix) if not name.startswith(tuple(active))}
        elif isinstance(module, BaseTunerLayer) and not prefix.startswith(tuple(adapted)):
            adapted.append(prefix)
            base = {id(value): name for name, value in module.get_base_layer().named_parameters()}
            for name, value in module.named_parameters(prefix=path):
                if id(value) not in base:
                    left_out.add(name)
                elif not module.merged:
                    made[name] = functools.partial(_merged, module, base[id(value)])
    return made, left_out


def _names(module: torch.nn.Module, prefix: str) -> list[str]:
    return [prefix + name for name in module.state_dict(keep_vars=True)]


@torch.no_grad()
def _merged(layer: Any, name: str) -> torch.Tensor:
    # Not by deepcopy, which FSDP2 forbids for what it wraps, and which would copy adapters and gradients.
    copied = base = _shallow(layer)
    while "base_layer" in base._modules:
        base._modules["base_layer"] = _shallow(base._modules["base_layer"])
        base = base._modules["base_layer"]
    base._parameters = {
        own: value if value is None else torch.nn.Parameter(value.clone(), False) for own, value in base._parameters.items()
    }
    copied.merge()
    found: torch.Tensor = base.get_parameter(name).detach()
    return found


def _shallow(module: Any) -> Any:
    """The same module with lists and dictionaries of its own."""
    made = object.__new__(type(module))
    made.__dict__ = {name: copy.copy(value) if isinstance(value, (dict, list)) else value for name, value in module.__dict__.items()}
    return made
