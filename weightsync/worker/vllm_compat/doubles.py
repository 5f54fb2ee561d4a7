"""What a layer's processing makes of loaded weights, without the layer: its quantisation method run on a double.

The double has the layer's settings, and for parameters the loaded tensors alone. Where a method makes of these what it makes
in the layer, and leaves nothing in objects that the layer's kernel holds, its result can be copied into captured storage:
nothing of the layer is taken apart.

Not covered: experts, whose methods build their kernel anew; formats other than those that vLLM quantises to FP8 while it loads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weightsync.worker.vllm_compat.layers import holds_foreign

_ONLINE = "vllm.model_executor.layers.quantization.online.fp8"
#: Of a layer, what its double must not have.
_OWN = ("_parameters", "_buffers", "_modules", "_already_called_process_weights_after_loading")


def requantises(layer: torch.nn.Module) -> bool:
    """Whether a double may stand for this layer."""
    method = getattr(layer, "quant_method", None)
    kind = type(method)
    online = kind.__module__ == _ONLINE and kind.__name__.endswith("LinearMethod")
    return online and getattr(method, "requantization_source", None) is None and not layer._modules and not holds_foreign(layer)


def processed(layer: torch.nn.Module, loaded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a layer's method makes of loaded ones. In a `cold_load_context`.

    Args:
        loaded: by the names of the layer's parameters, on its device; they may be among the results.
    """
    double = torch.nn.Module()
    vars(double).update({name: value for name, value in vars(layer).items() if name not in _OWN})
    for name, tensor in loaded.items():
        double.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    layer.quant_method.process_weights_after_loading(double)
    tensors = {**double._parameters, **double._buffers}
    return {name: tensor.data for name, tensor in tensors.items() if tensor is not None}
