"""A model with a LoRA adapter, taken apart: the weights that it lies on, and its low-rank pairs, as they are sent.

    sync.sync_weights(model, adapter_only=True)

Only the pairs travel, a few megabytes; with them once all of the weights below, the first time and where engines have lost
them. The second half of a pair is multiplied by the adapter's scaling on the way, so that nothing else has to be told of it.
PEFT's layers are told by what they have; PEFT is not imported.

Not covered: what an engine's adapter can't be: DoRA and other variants, biases, embeddings, experts adapted as one parameter,
modules that are trained as a whole, several adapters at once: refused. And weights below that are changed in place
by hand: they are not sent again, as nobody sees it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from weightsync.client import sharded
from weightsync.client.source import Lazy
from weightsync.errors import BaseRefused, ManifestRefused, WeightSyncError
from weightsync.protocol import Adapter

_SHOWN = 20
_HINT = "Send the merged weights instead: trainer_adapters.fleet.weights(model)"
#: A tensor, or what stands for it.
Value: TypeAlias = torch.Tensor | Lazy


@dataclass(frozen=True)
class Lora:
    """What `sync_weights(adapter_only=True)` takes, and makes of a model by itself.

    Attributes:
        model: whose adapter it is; the same one has the same weights below it.
        base: those, by name.
        adapter: its pairs, by name.
    """

    model: torch.nn.Module
    base: Mapping[str, Value] = field(repr=False)
    adapter: Mapping[str, Value] = field(repr=False)


def lora_of(model: Any, as_sent: Callable[[torch.Tensor], Value] = lambda value: value) -> Lora:
    """Take a model apart. Nothing is copied, gathered or multiplied before it is sent.

    Args:
        model: PEFT's, or one into which its LoRA layers were put.
        as_sent: makes of a parameter what is sent for it (cast, gathered); of both parts.

    Raises:
        ManifestRefused: it has no LoRA, or one that engines can't take apart from the weights; with what and where.
    """
    if not isinstance(model, torch.nn.Module):
        raise ManifestRefused(f"adapter_only wants a model with a LoRA adapter, got {type(model).__name__}", hint="Pass PEFT's model")
    sharded.refuse_fsdp1(model)
    persistent = model.state_dict(keep_vars=True).keys()  # this also has FSDP2 show its shards
    faults: dict[str, list[str]] = {}
    pairs: dict[str, Value] = {}
    parts: set[int] = set()
    for path, module in model.named_modules():
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            faults.setdefault("trained as a whole, beside the adapter (modules_to_save)", []).append(path)
        if not (hasattr(module, "base_layer") and hasattr(module, "active_adapters")):
            continue
        below = {id(value) for value in module.base_layer.parameters()}
        parts |= {id(value) for value in module.parameters() if id(value) not in below}
        if why := _fault(module):
            faults.setdefault(why, []).append(path)
            continue
        (name,) = module.active_adapters
        one, other = module.lora_A[name].weight, module.lora_B[name].weight
        pairs[f"{path}.lora_A.weight"] = as_sent(one)
        pairs[f"{path}.lora_B.weight"] = _scaled(as_sent(other), float(module.scaling[name]))
    named = {name: value for name, value in model.named_parameters() if id(value) not in parts}
    if trained := [name for name, value in named.items() if value.requires_grad]:
        faults.setdefault("trained, and no part of the adapter", []).extend(trained)
    if faults:
        said = "; ".join(f"{len(at)} {why}: {', '.join(at[:_SHOWN])}" for why, at in faults.items())
        raise ManifestRefused(f"the adapter can't be sent alone: {said}", hint=_HINT, names=[one for at in faults.values() for one in at])
    if not pairs:
        raise ManifestRefused(
            f"{type(model).__name__} has no LoRA layer, so there is no adapter to send alone", hint="Leave adapter_only out"
        )
    base: dict[str, Value] = {name: as_sent(value) for name, value in named.items()}
    base |= {name: value for name, value in model.named_buffers() if name in persistent}
    return Lora(model, base, pairs)


def _fault(layer: Any) -> str:
    """Why a layer that PEFT wraps can't be sent as a low-rank pair; empty if it can."""
    if not hasattr(layer, "lora_A"):
        return "adapted by something else than LoRA"
    active = list(layer.active_adapters)
    if layer.merged or layer.disable_adapters or len(active) != 1:
        state = "merged into the weights" if layer.merged else "disabled" if layer.disable_adapters else f"{len(active)} at once"
        return f"whose adapter is {state} now"
    (name,) = active
    if name not in layer.lora_A or not isinstance(layer.lora_A[name], torch.nn.Linear) or hasattr(layer, "parameter_name"):
        return "adapted, and no linear layer"
    if getattr(layer, "lora_variant", {}).get(name) is not None or getattr(layer, "use_dora", {}).get(name):
        return "adapted by a variant of LoRA (DoRA and the like)"
    if layer.lora_B[name].bias is not None or layer.lora_A[name].bias is not None:
        return "with a bias in the adapter"
    return ""


def _scaled(value: Value, scaling: float) -> Value:
    if scaling == 1.0:
        return value
    if isinstance(value, Lazy):
        return Lazy(value.dtype, value.shape, functools.partial(_times, value.read, scaling), value.device, value.collective)
    together = sharded.is_sharded(value) and value.device_mesh.size() > 1
    read = functools.partial(_times, value.detach, scaling)
    return Lazy(value.dtype, tuple(value.shape), read, sharded.device_of(value), together)


@torch.no_grad()
def _times(read: Callable[[], torch.Tensor], scaling: float) -> torch.Tensor:
    return read() * scaling


@dataclass(frozen=True)
class Chosen:
    """What is sent of a source.

    Attributes:
        source: makes what `offer` takes.
        about: of it, as `UpdateRequest` has it.
        model: whose adapter it has; None for none.
    """

    source: Callable[[], Any]
    about: dict[str, Any]
    model: torch.nn.Module | None = None


class Below:
    """Which model's weights lie below the adapter that engines serve with, as far as this trainer has brought them itself.

    Every rank of a trainer comes to the same, since all take part in all updates.
    """

    def __init__(self) -> None:
        self._model: Callable[[], torch.nn.Module | None] = lambda: None
        self._version: int | None = None

    def choose(self, source: Any, options: dict[str, Any]) -> Chosen:
        """What to send.

        Args:
            options: of `sync_weights`; `adapter_only` is taken out.
        """
        if not options.pop("adapter_only"):
            return Chosen(lambda: source, {})
        model = source.model if isinstance(source, Lora) else source

        def lora() -> Lora:
            return source if isinstance(source, Lora) else lora_of(source)

        if self._version is None or self._model() is not model or options["rewind"]:  # going back takes all of it
            return Chosen(lambda: _all(lora()), {"adapter": Adapter.WITH_BASE, "base_version": None}, model)
        base = self._version if options["base_version"] is None else options["base_version"]
        return Chosen(lambda: lora().adapter, {"adapter": Adapter.ALONE, "base_version": base}, model)

    def note(self, model: torch.nn.Module | None, version: int) -> None:
        """An update has committed, with this model's adapter or with none."""
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._version = None if model is None else version

    def lost(self, error: WeightSyncError) -> bool:
        """Whether an update failed because engines lack what an adapter lies on: all of it is sent the next time."""
        if not isinstance(error, BaseRefused) or self._version is None:
            return False
        self._version = None
        return True


def _all(lora: Lora) -> dict[str, Value]:
    return {**lora.base, **lora.adapter}
