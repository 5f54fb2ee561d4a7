"""What a fresh model has that a live one has lost: loaders, names that hold nothing yet, and first values.

All of it is read off a meta twin and what its construction did. A cold load starts
from the constructor's values, and processing and loaders rely on them: scales that
are ones until a checkpoint brings others, zeros in padding, a buffer that is None.

Not covered: first values that are not one number throughout (`torch.tensor([1, 2])`,
an identity matrix); they read as unknown, and a reload then starts from zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.worker.vllm_compat.layers import plain_modules
from weightsync.worker.vllm_compat.twin import meta_twin

_ATEN = torch.ops.aten
#: Factories and in-place operators that leave one number throughout, and where that number is among the arguments.
_CONSTANT: dict[Any, float | None] = {
    **dict.fromkeys((_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default, _ATEN.zero_.default), 0.0),
    **dict.fromkeys((_ATEN.ones.default, _ATEN.new_ones.default, _ATEN.ones_like.default), 1.0),
}
_GIVEN: dict[Any, int] = {
    **dict.fromkeys((_ATEN.full.default, _ATEN.full_like.default, _ATEN.fill_.Scalar, _ATEN.fill_.Tensor), 1),
    _ATEN.new_full.default: 2,
    _ATEN.scalar_tensor.default: 0,
    _ATEN.copy_.default: 1,
}


@dataclass(frozen=True)
class Alias:
    """A buffer outside the checkpoint that is a view of a parameter.

    Args:
        parameter: the parameter's path.
        layout: first element, shape and stride, in the parameter's memory.
    """

    parameter: str
    layout: tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass
class Blueprint:
    """What a fresh model has.

    Args:
        loaders: parameter path to what its module's own loader needs to find on it: the method's name, and plain attributes.
        unset: module path to names that it registers and leaves None.
        fills: parameter or buffer path to the number that construction left in every element of it.
        aliases: path of a buffer outside the checkpoint to the parameter that it is a view of.
    """

    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    unset: dict[str, list[str]] = field(default_factory=dict)
    fills: dict[str, float] = field(default_factory=dict)
    aliases: dict[str, Alias] = field(default_factory=dict)

    def restore_loaders(self, model: torch.nn.Module) -> int:
        """Give parameters that post-processing has made anew their loader back; how many.

        A kernel that replaces a parameter may drop its loader (Marlin's bias), and a
        second load would then fall back to a plain copy.
        """
        count = 0
        live = plain_modules(model)
        for path, attributes in self.loaders.items():
            layer_path, _, name = path.rpartition(".")
            layer = live.get(layer_path)
            parameter = layer._parameters.get(name) if layer is not None else None
            if parameter is not None and not hasattr(parameter, "weight_loader"):
                for key, value in attributes.items():
                    setattr(parameter, key, getattr(layer, value) if key == "weight_loader" else value)
                count += 1
        return count

    def apart(self, model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, Alias]]:
        """Aliases whose parameter lies elsewhere in the live model: parameter path to the buffer, and how it was a view."""
        live = plain_modules(model)

        def find(path: str) -> Any:
            layer, _, name = path.rpartition(".")
            return getattr(live.get(layer), name, None)

        pairs = ((find(buffer), find(alias.parameter), alias) for buffer, alias in self.aliases.items())
        return {
            alias.parameter: (buffer, alias)
            for buffer, parameter, alias in pairs
            if buffer is not None and parameter is not None and _storage(buffer) != _storage(parameter)
        }


def draw(vllm_config: Any) -> tuple[torch.nn.Module, Blueprint]:
    """A meta twin, and what it has when it is fresh."""
    with Constants() as constants:
        twin = meta_twin(vllm_config)
    return twin, read(twin, constants)


def read(twin: torch.nn.Module, constants: Constants) -> Blueprint:
    """The blueprint of a model that was built while `constants` watched, and that nothing was loaded into."""
    found = Blueprint()
    owners = {_storage(p): path for path, p in twin.named_parameters() if not isinstance(p, torch.nn.UninitializedParameter)}
    for path, layer in twin.named_modules():
        tables = (layer._parameters, layer._buffers)
        if unset := [name for table in tables for name, value in table.items() if value is None]:
            found.unset[path] = unset
        for name, tensor in ((name, value) for table in tables for name, value in table.items() if value is not None):
            if name in layer._non_persistent_buffers_set and (owner := owners.get(_storage(tensor))) is not None:
                layout = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
                found.aliases[f"{path}.{name}"] = Alias(owner, layout)
            if (number := constants.of(tensor)) is not None:
                found.fills[f"{path}.{name}"] = number
            loader: Any = getattr(tensor, "weight_loader", None)
            if name in layer._parameters and getattr(loader, "__self__", None) is layer:
                plain = {key: value for key, value in vars(tensor).items() if isinstance(value, (bool, int, str))}
                found.loaders[f"{path}.{name}"] = {**plain, "weight_loader": str(loader.__name__)}
    return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Constants(TorchDispatchMode):
    """Watches which storages hold one number throughout, on whatever device."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, float] = {}
        self._held: list[torch.UntypedStorage] = []  # so that no identity is used twice

    def of(self, tensor: torch.Tensor) -> float | None:
        """The number in every element; None when it is not known to be one."""
        return None if isinstance(tensor, torch.nn.UninitializedParameter) else self._numbers.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {**{spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)}, **(kwargs or {})}
        written = [given.get(spec.name) for spec in func._schema.arguments if spec.alias_info and spec.alias_info.is_write]
        number = self._number(func, args)
        if number is not None and isinstance(out, torch.Tensor):
            self._note(out, number, whole=not written or out.nbytes == out.untyped_storage().nbytes())
        else:
            for tensor in written:
                if isinstance(tensor, torch.Tensor):
                    self._numbers.pop(tensor.untyped_storage()._cdata, None)
        return out

    def _number(self, func: Any, args: Any) -> float | None:
        if func in _CONSTANT:
            return _CONSTANT[func]
        value = args[_GIVEN[func]] if func in _GIVEN and len(args) > _GIVEN[func] else None
        if isinstance(value, torch.Tensor):
            return float(value.item()) if value.numel() == 1 and not value.is_meta else self.of(value)
        return None if value is None else float(value)

    def _note(self, tensor: torch.Tensor, number: float, whole: bool) -> None:
        storage = tensor.untyped_storage()
        if whole:
            self._held.append(storage)
            self._numbers[storage._cdata] = number
        elif self._numbers.get(storage._cdata) != number:
            self._numbers.pop(storage._cdata, None)
