"""Where the model's own loaders put every tensor of a manifest, without moving a byte.

`record` runs the model's own `load_weights` on a meta twin with meta tensors and
notes each copy into a parameter: source tensor, destination region, elements.
Sharding, fusing (qkv, gate_up) and experts are what the loaders make of them.
What follows from a map is decided in `admission`.

Not covered: which part of a source tensor goes where, when it is converted or computed on
its way; loaders that write by other means than `copy_`, which are seen as writing nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync.errors import ManifestRefused, UnsupportedEngine
from weightsync.protocol import TensorSpec
from weightsync.worker import regions
from weightsync.worker.meta_reads import MetaReads
from weightsync.worker.regions import Region

_SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

#: Elements of a tensor's memory: first element, shape, stride.
View = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Copy:
    """Elements of a source tensor that a loader copied as they are: same dtype, same shape.

    Attributes:
        path: the parameter, by its path in the model.
        into: where in its memory.
        source: where in the source tensor's.
    """

    path: str
    into: View
    source: View


@dataclass
class LoadMap:
    """What one run of the loaders did. Tensors go by the names of the engine's checkpoint.

    Attributes:
        specs: the manifest, by name.
        writes: for each source tensor, the regions it fills; no entry when the loader took nothing from it.
        dtypes: for each source tensor, dtype of the first region it fills.
        twice: sources that fill elements which another source had filled before, with that source.
        aliases: paths of parameters that have another path too.
        names: what the trainer calls them, to the engine's names, where the two differ.
        copies: for each source tensor, those of its writes that copied elements as they are.
        touched: source tensors of which a loader did more than look at their shapes and take views.
        unclaimed: what no loader of this worker takes and its checkpoint has not, by the trainer's name, with how to say it: other
            workers of the engine may take it.
        part: it is of a scope, or an adapter alone: only layers that it fills are loaded.
        adapter: the trainer's names of tensors that are parts of an adapter, which no loader is given.
        shapes: of parameters before anything is made of them, with their dtype, by path; those that are contiguous.
    """

    specs: dict[str, TensorSpec]
    writes: dict[str, list[Region]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    twice: dict[str, str] = field(default_factory=dict)
    aliases: frozenset[str] = frozenset()
    names: dict[str, str] = field(default_factory=dict)
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    unclaimed: dict[str, str] = field(default_factory=dict)
    part: bool = False
    adapter: frozenset[str] = frozenset()
    shapes: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._filled: dict[str, int] | None = None

    def name(self, raw: str) -> str:
        """The engine's name of a tensor of the trainer's."""
        return self.names.get(raw, raw)

    def loaded_as(self) -> dict[str, str]:
        """Dtype of what each tensor is loaded into, by the trainer's name."""
        raw = {name: raw for raw, name in self.names.items()}
        return {raw.get(name, name): dtype for name, dtype in self.dtypes.items()}

    def unused(self, names: Iterable[str]) -> frozenset[int]:
        """Which of the trainer's tensors this worker can do without: other stages' layers, other workers' experts."""
        return frozenset(index for index, raw in enumerate(names) if self.name(raw) not in self.touched)

    @property
    def adapter_alone(self) -> bool:
        """Whether no loader is given anything."""
        return self.part and bool(self.adapter)

    @property
    def layers(self) -> frozenset[str]:
        """Paths of the layers that have parameters which are filled."""
        return frozenset(path.rpartition(".")[0] for path in self.filled())

    def filled(self) -> dict[str, int]:
        """Elements of each parameter that are filled, by its path in the model."""
        if self._filled is None:
            self._filled = regions.filled(place for places in self.writes.values() for place in places)
        return self._filled


class _Recorder(TorchDispatchMode):
    """Notes every copy into a tensor that shares storage with one of the twin's parameters."""

    def __init__(self, owners: dict[int, str], sources: dict[int, str], current: Callable[[], str], into: LoadMap) -> None:
        super().__init__()
        self._owners, self._sources, self._current, self._map = owners, sources, current, into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _is_view(func):
            self._touch(tree_leaves((args, kwargs)))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor):
            path = self._owners.get(args[0].untyped_storage()._cdata)
            # A loader may hold tensors back until it has others; only a copy of one is not known by its memory.
            name = self._sources.get(args[1].untyped_storage()._cdata) or self._current()
            if path is not None and name:
                self._note(path, args[0], name)
                self._note_copy(path, args[0], args[1])
        return out

    def _touch(self, values: Sequence[Any]) -> None:
        storages = (value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor))
        self._map.touched.update(self._sources[storage] for storage in storages if storage in self._sources)

    def _note(self, path: str, into: torch.Tensor, name: str) -> None:
        self._map.writes.setdefault(name, []).append(regions.region(path, into.storage_offset(), into.shape, into.stride()))
        self._map.dtypes.setdefault(name, _dtype_name(into.dtype))

    def _note_copy(self, path: str, into: torch.Tensor, source: torch.Tensor) -> None:
        name = self._sources.get(source.untyped_storage()._cdata)
        if name is not None and (into.dtype, into.shape) == (source.dtype, source.shape):
            self._map.copies.setdefault(name, []).append(Copy(path, _view(into), _view(source)))


def record(twin: torch.nn.Module, specs: Sequence[TensorSpec]) -> LoadMap:
    """Run the twin's loaders over meta tensors of a manifest.

    Args:
        twin: fresh from `vllm_compat.meta_twin`; used up afterwards, loaders keep state.
        specs: the manifest, in order.

    Raises:
        ManifestRefused: the loader itself refused; its sentence and the tensor it stood at are in the message.
    """
    result = LoadMap({spec.name: spec for spec in specs})
    owners: dict[int, str] = {}
    sources: dict[int, str] = {}
    keep: list[Any] = []  # storages must outlive the run, or their identities could be reused
    for path, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
        storage = tensor.untyped_storage()
        keep.append(storage)
        owners.setdefault(storage._cdata, path)
    paths: dict[int, list[str]] = {}
    for path, tensor in twin.named_parameters(remove_duplicate=False):
        paths.setdefault(id(tensor), []).append(path)
        if tensor.is_contiguous():
            result.shapes[path] = tuple(tensor.shape), _dtype_name(tensor.dtype)
    result.aliases = frozenset(path for shared in paths.values() if len(shared) > 1 for path in shared)
    at = [""]
    given: list[tuple[str, StorageWeakRef]] = []  # a weak reference suffices to keep an identity from being used again

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            at[0] = spec.name
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            given.append((spec.name, StorageWeakRef(tensor.untyped_storage())))
            sources[tensor.untyped_storage()._cdata] = spec.name
            yield spec.name, tensor

    try:
        with torch.no_grad(), MetaReads(), _Recorder(owners, sources, lambda: at[0], result):
            twin.load_weights(stream())
    except Exception as exc:
        said = str(exc).strip() or type(exc).__name__
        raise ManifestRefused(f"the model's loader refused {at[0]!r}: {said[:500]}", names=[at[0]]) from exc
    result.touched.update(name for name, storage in given if not storage.expired())  # kept as it is
    result.writes = {name: result.writes[name] for name in result.specs if name in result.writes}
    result.twice = regions.overlaps(result.writes)
    return result


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; those of its index where it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


def checkpoint_specs(folder: Path) -> list[TensorSpec]:
    """Names, dtypes and shapes in a checkpoint folder's safetensors files, from their headers alone.

    Raises:
        UnsupportedEngine: there is none.
    """
    specs = []
    if not (files := checkpoint_files(folder)):
        raise UnsupportedEngine(
            f"{folder} holds no safetensors file, which say what an update may consist of",
            hint="Start the engine from a folder with the checkpoint's safetensors files, also where load_format is dummy",
        )
    for file in files:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                specs.append(TensorSpec(name, _SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])))
    return specs


def _is_view(func: Any) -> bool:
    """Whether an operator only gives another look at its argument's memory."""
    returns = func._schema.returns
    return bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def _view(tensor: torch.Tensor) -> View:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
