"""What a cold load runs in, and the engine's model once more, on the meta device.

Not covered: loaders that a model keeps elsewhere than on its parameters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import expert_map_manager
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype


@contextlib.contextmanager
def cold_load_context(vllm_config: Any) -> Iterator[None]:
    """What a cold load runs in: the engine's config set, the model's dtype as default, no gradients."""
    with torch.no_grad(), set_current_vllm_config(vllm_config), set_default_torch_dtype(vllm_config.model_config.dtype):
        yield


def meta_twin(vllm_config: Any) -> torch.nn.Module:
    """The engine's model once more, on the meta device: no memory, same loaders.

    Takes 0.01 to 0.3 s. Must run in the worker's own thread: it sets torch's
    default dtype for the moment.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    # Layers register themselves by name here; the twin's must not replace the engine's.
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with cold_load_context(config), torch.device("meta"), _real_expert_maps():
        twin = initialize_model(vllm_config=config)
    _to_meta(twin)
    # Online quantisation wraps loaders to process each layer when it is complete; on meta there is nothing to process.
    for layer in twin.modules():
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader":
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        layerwise.get_layerwise_info(layer).reset()
    return twin


@contextlib.contextmanager
def _real_expert_maps() -> Iterator[None]:
    """Where a worker's experts lie is read when they are loaded: on meta every expert would look the same."""
    stock = expert_map_manager.determine_expert_map

    def determine(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return stock(*args, **kwargs)

    expert_map_manager.determine_expert_map = determine
    try:
        yield
    finally:
        expert_map_manager.determine_expert_map = stock


def _to_meta(twin: torch.nn.Module) -> None:
    """Move parameters that a layer has put on a device of its own choice. Buffers stay: loaders may read them."""
    moved: dict[int, Any] = {}
    for layer in twin.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None and not parameter.is_meta:
                layer._parameters[name] = moved.setdefault(id(parameter), to_meta_tensor(parameter))
