"""What a trainer offers, as a manifest and tensors in the same order.

Takes a `torch.nn.Module` (its parameters and persistent buffers, tied ones
once), a mapping, or an iterable of (name, tensor) pairs; names and dtypes must
be those of the engine's checkpoint.

Not covered: sharded tensors (FSDP, DTensor: gather them first) and adapters that
have not been merged; both are refused with their names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from weightsync.errors import ConfigError, ManifestRefused
from weightsync.protocol import DTYPE_BYTES, Manifest, TensorSpec

#: Anything `sync_weights` takes.
Source: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_PAIRS_HINT = "Pass a module, a mapping, or pairs as model.named_parameters() gives them"


@dataclass(frozen=True)
class Offer:
    """A manifest and its tensors, index by index; all on one kind of device."""

    manifest: Manifest
    tensors: tuple[torch.Tensor, ...]
    device: torch.device

    def read(self, index: int) -> torch.Tensor:
        return self.tensors[index]

    @property
    def transport(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"


def offer(source: Source, scope: Sequence[str] | None = None) -> Offer:
    """Read a source.

    Args:
        scope: patterns of names; only tensors that match one are offered.

    Raises:
        ConfigError: a scope without a pattern, or that is no list.
        ManifestRefused: it is empty, holds something else than dense whole tensors,
            a dtype that can't travel, a name twice, or tensors on several devices.
    """
    pairs = list(_pairs(source))
    if not pairs:
        raise ManifestRefused("the model is empty: it has no tensor to send", hint="Pass a module with parameters, or (name, tensor) pairs")
    if scope is not None:
        pairs = _within(pairs, scope)
    specs = []
    for name, tensor in pairs:
        _require_whole(name, tensor)
        try:
            specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        except ValueError as exc:
            raise ManifestRefused(str(exc), names=[str(name)[:200]], hint=f"dtypes that travel: {', '.join(sorted(DTYPE_BYTES))}") from None
    try:
        manifest = Manifest(tuple(specs))
    except ValueError as exc:
        raise ManifestRefused(str(exc), hint="Give each tensor once, under one name") from None
    tensors = tuple(tensor.detach() for _, tensor in pairs)
    return Offer(manifest, tensors, _one_device(pairs))


def _pairs(source: Source) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(source, torch.nn.Module):
        persistent = source.state_dict(keep_vars=True).keys()
        yield from ((n, p) for n, p in source.named_parameters())
        yield from ((n, b) for n, b in source.named_buffers() if n in persistent)
    elif isinstance(source, Mapping):
        yield from source.items()
    elif not isinstance(source, Iterable):
        raise ManifestRefused(f"want weights, got {type(source).__name__}", hint=_PAIRS_HINT)
    else:
        for item in source:
            if not (isinstance(item, tuple) and len(item) == 2):
                raise ManifestRefused(f"want (name, tensor) pairs, got {type(item).__name__}", hint=_PAIRS_HINT)
            yield item


def _within(pairs: list[tuple[str, torch.Tensor]], scope: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(scope, str) or not scope:
        raise ConfigError(f"scope: got {scope!r}, want a list of patterns", hint='Such as ["model.layers.0.*"]; leave it out to send all')
    found = [(name, tensor) for name, tensor in pairs if any(fnmatch.fnmatchcase(str(name), pattern) for pattern in scope)]
    if not found:
        raise ManifestRefused(
            f"scope: none of {len(pairs)} tensors matches {', '.join(map(repr, scope))}",
            hint=f"Patterns go by names such as {pairs[0][0]!r}",
        )
    return found


def _require_whole(name: Any, tensor: Any) -> None:
    if not isinstance(name, str):
        raise ManifestRefused(f"a tensor's name is {type(name).__name__}, want str", hint=_PAIRS_HINT)
    if not isinstance(tensor, torch.Tensor):
        raise ManifestRefused(f"{name!r} is {type(tensor).__name__}, want a tensor", names=[name], hint=_PAIRS_HINT)
    if hasattr(tensor, "full_tensor"):
        raise ManifestRefused(f"{name!r} is sharded ({type(tensor).__name__})", names=[name], hint="Send tensor.full_tensor() instead")
    if tensor.is_sparse or tensor.layout != torch.strided:
        raise ManifestRefused(f"{name!r} has layout {tensor.layout}", names=[name], hint="Send tensor.to_dense() instead")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ManifestRefused(f"{name!r} is on device {tensor.device}", names=[name], hint="Load or gather it first")


def _one_device(pairs: list[tuple[str, torch.Tensor]]) -> torch.device:
    devices = {tensor.device for _, tensor in pairs}
    if len(devices) > 1:
        first: dict[torch.device, str] = {}
        for name, tensor in pairs:
            first.setdefault(tensor.device, name)
        shown = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise ManifestRefused(f"tensors are on several devices: {shown}", names=list(first.values()), hint="Move them to one device first")
    return devices.pop()
