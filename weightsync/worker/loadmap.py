"""Where the model's own loaders put every tensor of a manifest, without moving a byte.

`record` runs the model's own `load_weights` on a meta twin with meta tensors and
notes each copy into a parameter: source tensor, destination region, elements.
Sharding, fusing (qkv, gate_up) and experts are what the loaders make of them.
`admit` compares a trainer's manifest with the map of the checkpoint that the
engine started from, and refuses before anything moves.

Not covered: overlap of destination regions is recognised only when regions are
equal; loaders that write by other means than `copy_` are seen as writing nothing.
"""

from __future__ import annotations

import difflib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.errors import ManifestRefused
from weightsync.protocol import Manifest, TensorSpec
from weightsync.worker.meta_reads import MetaReads

#: A destination: parameter path, first element, shape, stride.
Region = tuple[str, int, tuple[int, ...], tuple[int, ...]]

_SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_SHOWN = 20

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
    """What one run of the loaders did.

    Attributes:
        specs: the manifest, by name.
        writes: for each source tensor, the regions it fills; no entry when the loader took nothing from it.
        dtypes: for each source tensor, dtype of the first region it fills.
        twice: sources whose region another source had filled before, with that source.
        copies: for each source tensor, those of its writes that copied elements as they are.
    """

    specs: dict[str, TensorSpec]
    writes: dict[str, list[Region]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    twice: dict[str, str] = field(default_factory=dict)
    copies: dict[str, list[Copy]] = field(default_factory=dict)

    def elements(self) -> dict[str, int]:
        """Elements that arrive in each parameter, by its path in the model; those that arrive twice count twice."""
        return _sum(region for regions in self.writes.values() for region in regions)

    def filled(self) -> dict[str, int]:
        """Elements of each parameter that are filled, by its path in the model."""
        return _sum({region for regions in self.writes.values() for region in regions})


class _Recorder(TorchDispatchMode):
    """Notes every copy into a tensor that shares storage with one of the twin's parameters."""

    def __init__(self, owners: dict[int, str], sources: dict[int, str], current: Callable[[], str], into: LoadMap) -> None:
        super().__init__()
        self._owners, self._sources, self._current, self._map = owners, sources, current, into
        self._filled: dict[Region, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor):
            path = self._owners.get(args[0].untyped_storage()._cdata)
            if path is not None:
                self._note(path, args[0])
                self._note_copy(path, args[0], args[1])
        return out

    def _note(self, path: str, into: torch.Tensor) -> None:
        name = self._current()
        region: Region = (path, into.storage_offset(), tuple(into.shape), tuple(into.stride()))
        first = self._filled.setdefault(region, name)
        if first != name:
            self._map.twice[name] = first
        self._map.writes.setdefault(name, []).append(region)
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
    at = [""]

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            at[0] = spec.name
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            keep.append(tensor)
            sources[tensor.untyped_storage()._cdata] = spec.name
            yield spec.name, tensor

    try:
        with torch.no_grad(), MetaReads(), _Recorder(owners, sources, lambda: at[0], result):
            twin.load_weights(stream())
    except Exception as exc:
        said = str(exc).strip() or type(exc).__name__
        raise ManifestRefused(f"the model's loader refused {at[0]!r}: {said[:500]}", names=[at[0]]) from exc
    return result


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; those of its index where it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


def checkpoint_specs(folder: Path) -> list[TensorSpec]:
    """Names, dtypes and shapes in a checkpoint folder's safetensors files, from their headers alone."""
    specs = []
    for file in checkpoint_files(folder):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                specs.append(TensorSpec(name, _SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])))
    return specs


def admit(manifest: Manifest, base: LoadMap, make_twin: Callable[[], torch.nn.Module], tied: bool) -> LoadMap:
    """Decide whether a manifest is a complete set of weights for this engine.

    Args:
        manifest: what the trainer offers.
        base: the map of the checkpoint that the engine started from.
        make_twin: builds a meta twin; called only when the manifest differs from `base`.
        tied: the model's output head is its embedding, so a separate head may be sent (see `tied_heads`).

    Returns:
        The map of this manifest.

    Raises:
        ManifestRefused: empty, unknown, missing, misshapen, wrong dtype, or filled twice; with the names.
    """
    if not manifest.tensors:
        raise ManifestRefused("the manifest is empty: no tensor was given", hint="Pass a model or (name, tensor) pairs")
    offered = {spec.name: spec for spec in manifest.tensors}
    if offered == base.specs:
        return base
    _compare_known(offered, base)
    try:
        found = record(make_twin(), manifest.tensors)
    except ManifestRefused as exc:
        name = exc.names[0]
        if name not in base.specs:
            raise _refusal({"unknown": _closest([name], base)}, [name], loader=exc.message[:300]) from exc
        raise
    _compare_maps(found, base, tied)
    return found


def _compare_known(offered: dict[str, TensorSpec], base: LoadMap) -> None:
    """Shapes and dtypes of the names that the engine's own checkpoint has."""
    shape = [n for n, s in offered.items() if n in base.specs and s.shape != base.specs[n].shape]
    dtype = [n for n, s in offered.items() if n in base.specs and s.dtype != base.specs[n].dtype]
    kinds = {
        "wrong shape": [f"{n} is {list(offered[n].shape)}, want {list(base.specs[n].shape)}" for n in shape],
        "wrong dtype": [f"{n} is {offered[n].dtype}, want {base.specs[n].dtype}" for n in dtype],
    }
    # Names that only one side has, while the other side has as many: almost always a prefix. Say so at once,
    # together with what else is wrong, rather than let the loader stop at the first.
    unknown = [n for n in offered if n not in base.specs]
    missing = [n for n in base.specs if n not in offered]
    if shape or dtype:
        kinds["unknown"] = _closest(unknown, base)
        raise _refusal(kinds, shape + dtype)
    if unknown and missing and len(unknown) == len(offered):
        kinds = {"unknown": _closest(unknown, base), "missing": missing}
        raise _refusal(kinds, unknown)


def _compare_maps(found: LoadMap, base: LoadMap, tied: bool) -> None:
    """What the loaders made of the manifest against what they made of the engine's own checkpoint."""
    heads = tied_heads(found) if tied else {}
    unknown = [
        name
        for name in found.specs
        if name not in found.writes and not (name in base.specs and name not in base.writes) and not heads.get(name)
    ]
    want, have = base.elements(), found.elements()
    # What the engine's own checkpoint leaves as it was made would keep this update's value in all later ones.
    unknown += [name for name, regions in found.writes.items() if name not in base.specs and any(r[0] not in want for r in regions)]
    short = {path for path, count in want.items() if have.get(path, 0) < count}
    missing = [name for name, regions in base.writes.items() if name not in found.writes and any(r[0] in short for r in regions)]
    # A parameter can be short without a name of ours missing, when the loader saw other names for it.
    lost = sorted(short - {r[0] for name in missing for r in base.writes[name]})
    twice = [f"{name} fills what {first} fills" for name, first in found.twice.items() if base.twice.get(name) != first]
    dtype = [n for n, d in found.dtypes.items() if n not in base.specs and found.specs[n].dtype != d]
    if unknown or missing or lost or twice or dtype:
        raise _refusal(
            {
                "unknown": _closest(unknown, base),
                "missing": missing + [f"part of {path}" for path in lost],
                "filled twice": twice,
                "wrong dtype": [f"{n} is {found.specs[n].dtype}, want {found.dtypes[n]}" for n in dtype],
            },
            unknown + missing + list(found.twice) + dtype,
        )


def tied_heads(found: LoadMap) -> dict[str, list[str]]:
    """Output heads that a tied model's loader passes over, each with the tensors that it must be a copy of one of."""
    heads = [spec for name, spec in found.specs.items() if name not in found.writes and name.endswith("lm_head.weight")]
    taken = [spec for spec in found.specs.values() if spec.name in found.writes]
    return {head.name: [s.name for s in taken if (s.shape, s.dtype) == (head.shape, head.dtype)] for head in heads}


def _refusal(kinds: dict[str, list[str]], names: Sequence[str], loader: str = "") -> ManifestRefused:
    parts = []
    for kind, entries in kinds.items():
        if entries:
            more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
            parts.append(f"{len(entries)} {kind}: {', '.join(entries[:_SHOWN])}{more}")
    if loader:
        parts.append(loader)
    return ManifestRefused(
        "; ".join(parts),
        hint="Send the tensors under the names, shapes and dtypes of the checkpoint that the engine was started from",
        names=names,
    )


def _closest(names: Sequence[str], base: LoadMap) -> list[str]:
    """Each name with the one of the engine's checkpoint that is most like it; only for those that are shown."""
    shown = []
    for name in names[:_SHOWN]:
        close = difflib.get_close_matches(name, base.specs, n=1, cutoff=0.6)
        shown.append(f"{name} (closest: {close[0]})" if close else name)
    return [*shown, *names[_SHOWN:]]


def _view(tensor: torch.Tensor) -> View:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _sum(regions: Iterable[Region]) -> dict[str, int]:
    total: dict[str, int] = {}
    for path, _, shape, _ in regions:
        total[path] = total.get(path, 0) + _numel(shape)
    return total


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
