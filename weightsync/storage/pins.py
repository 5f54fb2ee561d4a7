"""Captured storages, held: a pin for each path, and what a contract needs to know of it.

A graph holds addresses, not references. A strong reference to each storage keeps its
memory from being handed to somebody else: what would have been a read of freed memory
becomes a stale value, which a repair can mend.

Not covered: a storage that somebody resizes lets go of its memory however many hold it
(`Pins.broken` says so); tensors without one plain storage (sparse, nested, quantised
wrappers), which can't be pinned and are listed in `Pins.opaque`.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weightsync.storage import fields
from weightsync.storage.contract import Kind, Layout, Place, Slot
from weightsync.storage.owners import Walk

_layouts: dict[tuple[Any, ...], Layout] = {}


def place(tensor: torch.Tensor) -> Place | None:
    """Where a tensor lies: address of its storage (0 on meta, or when empty) and layout; None if it has no storage of its own.

    Equal layouts are one object, which is what makes comparing thousands of places fast.
    """
    try:
        offset = tensor.storage_offset()
        key = (tensor.dtype, tensor.shape, tensor.stride(), offset)
        layout = _layouts.get(key)
        if layout is None:
            layout = _layouts[key] = Layout(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride(), offset)
        pointer = tensor.data_ptr()
        return (pointer - offset * tensor.element_size() if pointer else 0), layout
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None


def places(found: Walk, wanted: Iterable[str] = ()) -> dict[str, Place]:
    """Where every path of a walk leads. Paths wanted beyond those are resolved through the walk's aliases."""
    out: dict[str, Place] = {}
    with torch._C.DisableTorchFunctionSubclass():  # no subclass has a say in where it lies
        for path, tensor in found.tensors.items():
            if (at := readable_place(tensor)) is not None:
                out[path] = at
        for path in wanted:
            if path not in out and (other := found.resolve(path)) is not None and (at := readable_place(other)) is not None:
                out[path] = at
    return out


def readable_place(tensor: torch.Tensor) -> Place | None:
    """`place` of anything that a walk may find."""
    # Asking a fake tensor for its pointer warns, and in some versions raises.
    return None if type(tensor).__module__.startswith("torch._subclasses") else place(tensor)


def storages(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Path to storage address, of tensors that have memory."""
    with torch._C.DisableTorchFunctionSubclass():
        at = {path: readable_place(tensor) for path, tensor in tensors.items()}
    return {path: found[0] for path, found in at.items() if found is not None and found[0]}


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """One path's view of one storage, which stays alive as long as this does.

    Args:
        path: where it was found; `<anonymous …>` for a tensor without an owner.
        address: of the storage when it was pinned; 0 when it had no memory.
        nbytes: of the storage.
        layout: of the view.
        storage: the storage itself.
        dtype, device: what a new view is made with.
        parameter: whether the owner was a Parameter.
    """

    path: str
    address: int
    nbytes: int
    layout: Layout
    storage: Any
    dtype: Any
    device: Any
    parameter: bool

    @property
    def place(self) -> Place:
        """What the path led to when it was pinned."""
        return self.address, self.layout

    @property
    def intact(self) -> bool:
        """Whether the storage still has its memory."""
        return bool(self.storage.data_ptr() == self.address and self.storage.nbytes() == self.nbytes)

    def view(self, inference: bool = False) -> torch.Tensor:
        """A plain tensor over the pinned memory: no inference tensor unless asked for, so that anybody may write through it.

        Raises:
            RuntimeError: this dtype can't be viewed (quantised).
        """
        with torch.inference_mode(inference):
            bare = torch.empty(0, dtype=self.dtype, device=self.device)
            return bare.set_(self.storage, self.layout.offset, self.layout.shape, self.layout.stride)


@dataclass(frozen=True)
class Pins:
    """All pins of one seal.

    Args:
        by_path: pins of owned tensors.
        anonymous: pins of tensors without an owner.
        opaque: paths whose tensors can't be pinned, and their class.
        aliases: of the walk that was pinned.
    """

    by_path: Mapping[str, Pin] = field(repr=False)
    anonymous: tuple[Pin, ...] = ()
    opaque: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict, repr=False)

    def only(self, addresses: Collection[int]) -> Pins:
        """The pins of some storages: those that a census found to be read. The others' memory may go."""
        kept = {path: held for path, held in self.by_path.items() if held.address in addresses}
        return replace(self, by_path=kept, anonymous=tuple(held for held in self.anonymous if held.address in addresses))

    def broken(self) -> list[str]:
        """Paths whose pinned storage was resized, so that its memory is gone."""
        return [pin.path for pin in (*self.by_path.values(), *self.anonymous) if not pin.intact]


def pin_one(path: str, tensor: torch.Tensor) -> Pin | None:
    """A strong reference to one tensor's storage; None when it has no storage of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        at = readable_place(tensor)
        if at is None:
            return None
        try:
            storage = tensor.untyped_storage()
            return Pin(path, at[0], storage.nbytes(), at[1], storage, tensor.dtype, tensor.device, fields.is_parameter(tensor))
        except (RuntimeError, NotImplementedError):
            return None


def pin(found: Walk, anonymous: Iterable[torch.Tensor] = ()) -> Pins:
    """Hold every storage of a walk, and those of tensors that nobody owns."""
    made = {path: pin_one(path, tensor) for path, tensor in found.tensors.items()}
    loose = [pin_one(f"<anonymous {index}>", tensor) for index, tensor in enumerate(anonymous)]
    return Pins(
        {path: held for path, held in made.items() if held is not None},
        tuple(held for held in loose if held is not None),
        {path: type(found.tensors[path]).__name__ for path, held in made.items() if held is None},
        dict(found.aliases),
    )


@dataclass(frozen=True, slots=True)
class Read:
    """An address that a captured kernel was given.

    Args:
        address: wherever in a storage it points.
        nbytes: size of the allocator's block around it, 0 when there is none.
        kernel: what reads it.
        block: where that block begins; several reads of one that nobody owns are one slot.
        kind: what the memory holds should nobody own it.
        where: what asked for it, if that is known.
    """

    address: int
    nbytes: int = 0
    kernel: str = ""
    block: int = 0
    kind: Kind = Kind.ANONYMOUS
    where: str = ""


def slots_of(pins: Pins, reads: Iterable[Read] | None = None, kinds: Mapping[str, Kind] | None = None) -> list[Slot]:
    """Slots for a contract, one for each distinct view of each storage.

    Args:
        pins: what is owned, and what is known to be anonymous.
        reads: addresses read out of captured graphs, wherever in a storage they point.
            Slots are then those of the storages that are read, and one anonymous slot
            for each address that lies in none. None takes every pinned storage.
        kinds: path to kind, where the caller knows better than "a Parameter is a
            weight, anything else is derived".
    """
    held = [*pins.by_path.values(), *pins.anonymous]
    read_by, stray = (None, []) if reads is None else _join(held, reads)
    kinds = kinds or {}
    groups: dict[Place, list[Pin]] = {}
    for each in held:
        if read_by is None or each.address in read_by:
            groups.setdefault(each.place, []).append(each)
    owned = {address for (address, _), group in groups.items() if any(p.path in pins.by_path for p in group)}
    slots = []
    for (address, layout), group in groups.items():
        paths = tuple(p.path for p in group if p.path in pins.by_path)
        read = (read_by or {}).get(address, Read(address))
        known = next((kinds[p.path] for p in group if p.path in kinds), None)
        if paths:
            default = Kind.WEIGHT if any(p.parameter for p in group) else Kind.DERIVED
            slots.append(Slot(address, group[0].nbytes, paths, layout, read.kernel, known or default))
        elif address not in owned:
            slots.append(Slot(address, group[0].nbytes, (), layout, read.kernel, known or read.kind, read.where or group[0].path))
    return slots + [Slot(read.block or read.address, read.nbytes, (), None, read.kernel, read.kind, read.where) for read in stray]


def _join(held: list[Pin], reads: Iterable[Read]) -> tuple[dict[int, Read], list[Read]]:
    """Storages that are read, with the kernels that do (three at most), and reads that lie in no storage."""
    ends = {each.address: each.address + each.nbytes for each in held if each.address}
    starts = sorted(ends)
    found: dict[int, list[Read]] = {}
    stray: dict[int, Read] = {}
    for read in reads:
        index = bisect.bisect_right(starts, read.address) - 1
        if index >= 0 and read.address < ends[starts[index]]:
            found.setdefault(starts[index], []).append(read)
        else:
            stray.setdefault(read.block or read.address, read)
    kernels = {address: ", ".join(list(dict.fromkeys(read.kernel for read in group))[:3]) for address, group in found.items()}
    return {address: replace(group[0], kernel=kernels[address]) for address, group in found.items()}, list(stray.values())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors of one layout hold the same bytes; NaNs and negative zeros count by their bits.

    Waits for the device, once for each `CHUNK_BYTES` until they differ. A comparison
    needs scratch memory, an eighth of the chunk at best: an engine has little to spare.
    """
    flat, other = _flat(a), _flat(b)
    if flat is None or other is None:
        return torch.equal(bits(a), bits(b))
    if all(bare.numel() % 8 == 0 and bare.storage_offset() % 8 == 0 for bare in (flat, other)):
        flat, other = flat.view(torch.int64), other.view(torch.int64)
    step = CHUNK_BYTES // flat.element_size()
    return all(torch.equal(flat[at : at + step], other[at : at + step]) for at in range(0, flat.numel(), step))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers; those that share memory (an expanded dimension) once."""
    once = tensor.as_strided([1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride(), strict=True)], tensor.stride())
    if tensor.element_size() not in _INTEGERS:  # complex128
        once = torch.view_as_real(once)
    return once.view(_INTEGERS[once.element_size()])


def fill_with_ones(tensor: torch.Tensor) -> None:
    """Set every bit: NaN in each float format, -1 in each signed integer."""
    with torch.inference_mode(False), torch.no_grad():
        whole = bits(tensor.detach())  # an inference tensor may not be written to, a detached one may
        whole.fill_(255 if whole.dtype is torch.uint8 else -1)


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a tensor without holes, in the order of memory; None when it has holes."""
    run = 1  # elements that the dimensions so far fill without a hole, the innermost first
    for stride, n in sorted((stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != run:
            return None
        run *= n
    if not run:
        return None
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


CHUNK_BYTES = 64 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
