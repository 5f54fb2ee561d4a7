"""What a model holds, by path: digests of every tensor, and where the registered ones lie.

Not covered: memory that no Python object holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weightsync.storage.owners import walk
from weightsync.transport.digest import digest_tensor, to_hex

#: Parts of owners' paths that hold no weights, and what they hold.
SCRATCH = {"kv_cache": "the KV cache", "workspace": "scratch and locks of kernels", "handler_tensor": "an address, of C++'s"}


def scratch_rule(path: str) -> str:
    """The part of a path by which it is left out; empty when it counts."""
    return next((part for part in SCRATCH if part in path), "")


def contents(model: torch.nn.Module) -> dict[str, Any]:
    """Digests and addresses of what a model holds."""
    registered = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found = walk(model, "model")
    names = {f"model.{name}" for name in registered}
    others = {path: tensor for path, tensor in found.tensors.items() if path not in names}
    scratch = {path: tensor for path, tensor in others.items() if scratch_rule(path)}
    return {
        "registered": {name: fingerprint(tensor) for name, tensor in registered.items()},
        "owned": {path: fingerprint(tensor) for path, tensor in others.items() if path not in scratch},
        "scratch": {path: {"rule": scratch_rule(path), "nbytes": tensor.nbytes} for path, tensor in scratch.items()},
        "scalars": {path: repr(value) for path, value in found.scalars.items()},
        "addresses": {name: tensor.data_ptr() for name, tensor in registered.items()},
        "truncated": list(found.truncated),
    }


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, str]:
    """Paths that two engines don't agree on, and how: `value`, `only here`, `only there`."""
    found: dict[str, str] = {}
    for kind in ("registered", "owned", "scalars"):
        here, there = left[kind], right[kind]
        found |= {path: "value" for path in here.keys() & there.keys() if here[path] != there[path]}
        found |= {path: "only here" for path in here.keys() - there.keys()}
        found |= {path: "only there" for path in there.keys() - here.keys()}
    return dict(sorted(found.items()))


def fingerprint(tensor: torch.Tensor) -> str:
    """Dtype, shape and digest of the elements."""
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return f"{kind}:{tensor.device.type}"
    return f"{kind}:{to_hex(digest_tensor(tensor))}"


def kernels(model: torch.nn.Module) -> list[str]:
    """Classes of quantisation methods, schemes and kernels in a model, for the record."""
    names = set()
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        for value in (method, getattr(layer, "scheme", None), getattr(layer, "impl", None)):
            for part in (value, getattr(value, "kernel", None), getattr(getattr(value, "moe_kernel", None), "fused_experts", None)):
                if part is not None and not isinstance(part, torch.nn.Module):
                    names.add(type(part).__name__)
    return sorted(names - {"function", "method", "NoneType", "UnquantizedEmbeddingMethod"})
