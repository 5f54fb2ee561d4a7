"""The one adapter that an engine of ours serves with: in vLLM's slots, under one number whatever its version.

vLLM's workers find an adapter by its number, and load one that they have not by its path. So the number stays: requests in
flight go on with whatever the slot holds, as they do with weights. From the start something is there, zeros, which change
nothing: so requests need not be told whether there is an adapter. The name, by which vLLM tells cached prefixes apart, is the
engine's business (`fleet.carried`).

Not covered: adapters beside this one, and layers whose slots have another layout than a linear layer's: experts,
embeddings, output heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from weightsync.storage.pins import bits
from weightsync.worker.naming import ADAPTER_NUMBER, ADAPTER_PATH, HALVES

_PEFT = "base_model.model."


@dataclass(frozen=True)
class Target:
    """A layer that an adapter may change, as the checkpoint has it: `q_proj`, not the engine's `qkv_proj`.

    Attributes:
        inputs, outputs: of the whole layer, also where this worker has a part of it.
    """

    inputs: int
    outputs: int


class AdapterSlot:
    """vLLM's slot for our adapter in one worker.

    Args:
        runner: vLLM's model runner.
        config: the engine's configuration, which takes adapters.

    Attributes:
        max_rank: of an adapter.
        dtype: of what lies in the slots.
        targets: layers that can be adapted, by the engine's paths; those of this worker.
    """

    def __init__(self, runner: Any, config: Any) -> None:
        self._workers, self._manager = runner.lora_manager, runner.lora_manager._adapter_manager
        self.max_rank, self.dtype = int(config.lora_config.max_lora_rank), config.lora_config.lora_dtype
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        self.targets = {part: target for _, parts in self._layers() for part, target in parts.items()}
        self.write({})

    def path(self, layer: str) -> str:
        """The engine's path of a layer of the checkpoint."""
        return str(parse_fine_tuned_lora_name(f"{_PEFT}{layer}.{HALVES[0]}", self._mapper)[0])

    def _layers(self) -> Iterator[tuple[Any, dict[str, Target]]]:
        """Linear layers of the engine, each with the checkpoint's that are joined in it, in their order."""
        for path, layer in self._manager.modules.items():
            parts = self._manager.packed_modules.get(path, [path])
            if not isinstance(layer, BaseLinearLayerWithLoRA) or len(parts) != layer.n_slices:
                continue
            base = layer.base_layer
            if len(parts) == 1:
                outputs = [base.output_size]
            elif hasattr(base, "total_num_kv_heads"):  # its own sizes count heads once for each worker that has a copy
                kv = base.total_num_kv_heads
                outputs = [base.total_num_heads * base.head_size, kv * base.head_size, kv * base.v_head_size]
            else:
                outputs = list(base.output_sizes)
            yield layer, {part: Target(base.input_size, size) for part, size in zip(parts, outputs, strict=True)}

    def write(self, tensors: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Put an adapter into the slot, in the place of the one before; zeros where it is empty.

        Args:
            tensors: on the host, of the slot's dtype, by the checkpoint's layer and which half it is.
        """
        manager = self._manager
        manager.remove_adapter(ADAPTER_NUMBER)
        if tensors:
            rank = max(tensor.shape[0] for (_, half), tensor in tensors.items() if half == HALVES[0])
            named = {f"{_PEFT}{layer}.{half}": tensor.clone() for (layer, half), tensor in tensors.items()}  # vLLM may scale in place
            helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
            model = LoRAModel.from_lora_tensors(ADAPTER_NUMBER, named, helper, "cpu", self.dtype, weights_mapper=self._mapper)
            manager.add_adapter(model)
        else:
            rank = self._workers.get_dummy_lora_warmup_rank(1)
            self._workers.add_dummy_lora(LoRARequest("weightsync", ADAPTER_NUMBER, ADAPTER_PATH), rank)
        manager.activate_adapter(ADAPTER_NUMBER)

    def differing(self, tensors: Mapping[tuple[str, str], torch.Tensor]) -> tuple[int, list[str]]:
        """How many layers were compared, and those whose slot does not hold this adapter, to the bit, and zeros around it.

        Args:
            tensors: as for `write`.
        """
        wanted = {(self.path(layer), half): tensor for (layer, half), tensor in tensors.items()}
        slots = self._manager.lora_index_to_id
        at = slots.index(ADAPTER_NUMBER) if ADAPTER_NUMBER in slots else None
        wrong: list[str] = []
        for layer, parts in self._layers():
            halves = [[wanted.get((part, half)) for part in parts] for half in HALVES]
            if layer.tp_size > 1:
                halves = [_cut(layer.slice_lora_a, halves[0]), _cut(layer.slice_lora_b, halves[1])]
            stacks = (layer.lora_a_stacked, layer.lora_b_stacked)
            for number, part in enumerate(parts):
                held = [stack[number] for stack in stacks]
                if at is None or not all(_holds(stack[at, 0], half[number]) for stack, half in zip(held, halves, strict=True)):
                    wrong.append(part)
        return len(self.targets), wrong


def _cut(cut: Any, whole: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """What of a layer's adapter this worker has; vLLM's functions take one tensor, or a list of several."""
    if len(whole) > 1:
        return list(cut(whole))
    return [None if tensor is None else cut(tensor) for tensor in whole]


def _holds(slot: torch.Tensor, tensor: torch.Tensor | None) -> bool:
    want = torch.zeros(slot.shape, dtype=slot.dtype)
    if tensor is not None:
        want[: tensor.shape[0], : tensor.shape[1]] = tensor
    return torch.equal(bits(slot.cpu()), bits(want))


def adapter_slot(runner: Any, config: Any) -> AdapterSlot | None:
    """The slot of an engine that takes adapters."""
    return None if config.lora_config is None else AdapterSlot(runner, config)
