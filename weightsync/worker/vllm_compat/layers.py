"""What can be told from one live layer: its own parameters, its experts' kernel, what it holds outside Python.

Not covered: objects behind a layer that are neither vLLM's nor a function's closure.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

#: Tensors that layerwise reload writes straight into live storage and does not count.
WRITTEN_IN_PLACE = frozenset(SKIP_LOAD_TENSORS)
#: Names of tensors that hold a raw pointer of C++'s, and no value.
FOREIGN_HANDLES = (".handler_tensor",)
#: In the paths of memory that an engine writes while it serves.
KV_CACHE = ".kv_cache"
#: How deep `holds_foreign` looks: layer → quantisation method → scheme → kernel → handler.
_DEPTH = 5
_PLAIN = frozenset({str, int, float, bool, type(None), bytes, torch.dtype, torch.device, torch.Size})


def unproved_layers(model: torch.nn.Module) -> list[str]:
    """Layers that may be stale after an update, as `path (why)`; empty when all is well.

    A tied layer is post-processed once more after an update, which only unquantised
    ones are known to bear.
    """
    found: list[str] = []
    owners: dict[int, str] = {}
    for path, layer in model.named_modules():
        method = type(getattr(layer, "quant_method", None)).__name__
        unquantised = method.startswith(("Unquantized", "NoneType"))
        tied = [p for p in own_parameters(layer) if owners.setdefault(id(p), path) != path]
        if tied and not unquantised:
            found.append(f"{path} (tied, {method})")
    return found


def missing_layers(model: torch.nn.Module, parameters: Iterable[str]) -> list[str]:
    """Layers of these parameters that the live model has not any more: it dropped them when it had fused them into others."""
    live = plain_modules(model)
    return sorted({path.rpartition(".")[0] for path in parameters} - live.keys())


def plain_path(path: str) -> str:
    """The path that a layer has in a model without adapters, whose wrappers hold it as `base_layer`."""
    return path.replace(".base_layer", "")


def plain_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules by their plain path; of a wrapped layer, the layer itself."""
    return {plain_path(path): layer for path, layer in model.named_modules()}


def own_parameters(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that a layer's post-processing works on; routing tables and biases are shared between layers as they are."""
    return [p for name, p in layer._parameters.items() if p is not None and name not in WRITTEN_IN_PLACE]


def experts_of(layer: torch.nn.Module) -> Any:
    """The experts implementation inside a mixture-of-experts layer's kernel; None in other layers."""
    return getattr(getattr(getattr(layer, "quant_method", None), "moe_kernel", None), "fused_experts", None)


def keeps_what_is_loaded(layer: torch.nn.Module) -> bool:
    """Whether a layer's processing may leave its parameters as they were loaded, and make nothing of them elsewhere."""
    method = type(getattr(layer, "quant_method", None)).__name__
    return method.startswith(("Unquantized", "NoneType")) and not holds_foreign(layer)


def absorbing(model: torch.nn.Module) -> dict[str, set[str]]:
    """Attention layers that make something of other layers when all are loaded, and the plain paths of those that they hold."""
    plain = {id(layer): path for path, layer in plain_modules(model).items()}
    held = {
        path: {plain[id(inner)] for inner in layer.modules() if inner is not layer and id(inner) in plain}
        for path, layer in plain_modules(model).items()
        if is_deferred_attention_layer(layer)
    }
    return {path: layers for path, layers in held.items() if layers}


def holds_foreign(layer: torch.nn.Module) -> bool:
    """Whether an object of this layer owns something outside Python, by its destructor."""
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(value, 0) for value in vars(layer).values()]
    while todo:
        value, depth = todo.pop()
        if type(value) in _PLAIN or id(value) in seen or isinstance(value, (torch.nn.Module, torch.Tensor, type)):
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple)):
            todo += [(item, depth) for item in value]
        elif isinstance(value, dict):
            todo += [(item, depth) for item in value.values()]
        elif hasattr(type(value), "__del__"):
            return True
        elif depth < _DEPTH and type(value).__module__.startswith("vllm.model_executor"):
            todo += [(item, depth + 1) for item in vars(value).values()] if hasattr(value, "__dict__") else []
        elif type(value) is FunctionType:  # never asked of other objects: a wrapper may answer to any name, or raise
            todo += [(cell.cell_contents, depth + 1) for cell in value.__closure__ or () if _filled(cell)]
    return False


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
