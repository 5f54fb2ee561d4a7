"""The contract: which storages captured graphs read, and whether their owners still lie there.

Sealed once after capture. After each update `compare` says, for every path, whether
it still leads to the captured address with the captured layout. It fails closed: a
slot that nobody owns, or an owner that moved, is a fault until somebody proves
otherwise.

Plain Python over plain values; no torch here, so a contract can be made from CUDA
graphs, from a walk on a CPU, or by hand in a test.

Not covered: values. A storage in its place may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What a slot holds, as far as is known."""

    WEIGHT = "weight"  # a registered parameter
    DERIVED = "derived"  # computed from weights, or nobody knows that it is not
    STATIC = "static"  # from the configuration alone
    SCRATCH = "scratch"  # written by the graph before it is read, or a lock
    ENGINE = "engine"  # the engine's own, not the model's: inputs, the KV cache
    ANONYMOUS = "anonymous"  # no owner was found, and nothing is known of it


class What(StrEnum):
    """What is wrong with a slot."""

    LOST = "lost"  # no owner is left; the storage keeps what it held
    MOVED = "moved"  # an owner lies at another address
    CHANGED_LAYOUT = "changed_layout"  # an owner has another shape, stride, dtype or offset
    ANONYMOUS = "anonymous"  # never had an owner
    SCALAR = "scalar"  # a host number that a graph has baked in has changed
    UNREFRESHED = "unrefreshed"  # it follows the weights, and an update left it behind; only a self-test sees that


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in its storage.

    Args:
        dtype: torch's name without the module, for example `bfloat16`.
        shape: elements per dimension.
        stride: elements between neighbours, per dimension.
        offset: elements from the start of the storage.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def __str__(self) -> str:
        where = f"+{self.offset}" if self.offset else ""
        return f"{self.dtype}{list(self.shape)}/{list(self.stride)}{where}"


#: Where a path leads: address of the storage in bytes (0 when it has none), and the layout in it.
Place = tuple[int, Layout]


@dataclass(frozen=True, slots=True)
class Slot:
    """One view of one storage that a graph reads.

    Args:
        address: of the storage, not of the first element.
        nbytes: of the storage.
        paths: every path that leads to this view, the canonical one first; empty when nobody owns it.
        layout: None when no owner is known.
        kernel: what reads it, if that is known.
        kind: what it holds.
        where: for one without an owner, what asked for the memory or holds it, if that is known.
        watched: False for what only the engine's own runs hold: they lay it anew as they need, and no update
            touches it. Such a slot is counted and reported, and never a fault.
    """

    address: int
    nbytes: int
    paths: tuple[str, ...]
    layout: Layout | None
    kernel: str = ""
    kind: Kind = Kind.DERIVED
    where: str = ""
    watched: bool = True

    @property
    def name(self) -> str:
        """The canonical path, or the address of a slot without one."""
        return self.paths[0] if self.paths else f"<{self.kind} at {self.address:#x}>"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that breaks the contract. `nbytes` is the size of the whole storage, 0 for a number."""

    what: What
    path: str
    kernel: str = ""
    nbytes: int = 0
    detail: str = ""

    def __str__(self) -> str:
        by = f" read by {self.kernel}" if self.kernel else ""
        return f"{self.path}: {self.what}{by}, {self.nbytes} bytes{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class Verdict:
    """What `compare` found.

    Args:
        slots: how many slots there are of each kind.
        faults: everything that breaks the contract, in the order of the slots.
        dropped: paths that are gone while another path still leads to the same slot; no fault.
        repaired: paths whose storage had to be repaired in this update.
        strict: whether a repair counts as a failure.
    """

    slots: Mapping[Kind, int]
    faults: tuple[Fault, ...] = ()
    dropped: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    strict: bool = False

    @property
    def ok(self) -> bool:
        """Whether every slot is proved to be in its place, and, when strict, needed no repair."""
        return not self.faults and not (self.strict and self.repaired)

    def of(self, what: What) -> tuple[Fault, ...]:
        """The faults of one sort."""
        return tuple(fault for fault in self.faults if fault.what is what)

    @property
    def counts(self) -> dict[str, int]:
        """Flat, JSON-ready: slots of each kind, faults of each sort, dropped and repaired paths. Zeros are there."""
        return {
            **{f"slots_{kind}": self.slots.get(kind, 0) for kind in Kind},
            **{f"faults_{what}": len(self.of(what)) for what in What},
            "paths_dropped": len(self.dropped),
            "paths_repaired": len(self.repaired),
        }

    def lines(self, limit: int = 20) -> list[str]:
        """What stands against `ok`, one line each, at most `limit` and one that says how many more."""
        found = [str(fault) for fault in self.faults]
        if self.strict:
            found += [f"{path}: repaired, and strict is set" for path in self.repaired]
        return found if len(found) <= limit else [*found[:limit], f"and {len(found) - limit} more"]


@dataclass(frozen=True)
class Contract:
    """The sealed slots. Make it with `Contract.seal`.

    Args:
        slots: every slot.
        places: where each path must lead; what the quick check reads.
        scalars: host numbers beside device tensors, by path.
        kinds: how many slots there are of each kind.
        unowned: slots without a path that could hold something derived from weights.
    """

    slots: tuple[Slot, ...] = field(repr=False)
    places: Mapping[str, Place] = field(repr=False)
    scalars: Mapping[str, float] = field(repr=False)
    kinds: Mapping[Kind, int]
    unowned: tuple[Slot, ...]

    @classmethod
    def seal(cls, slots: Iterable[Slot], scalars: Mapping[str, float] | None = None) -> Contract:
        """Fix what must hold from now on.

        Raises:
            ValueError: one path leads to two places, or an owned slot has no layout.
        """
        kept = tuple(slots)
        places: dict[str, Place] = {}
        kinds: dict[Kind, int] = {}
        for slot in kept:
            kinds[slot.kind] = kinds.get(slot.kind, 0) + 1
            if slot.paths and slot.layout is None:
                raise ValueError(f"{slot.paths[0]} has an owner and no layout")
            for path in slot.paths if slot.watched else ():
                assert slot.layout is not None
                if places.setdefault(path, (slot.address, slot.layout)) != (slot.address, slot.layout):
                    raise ValueError(f"{path} is in two slots")
        unowned = tuple(slot for slot in kept if not slot.paths and slot.kind not in (Kind.STATIC, Kind.SCRATCH))
        return cls(kept, places, dict(scalars or {}), kinds, unowned)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages, each counted once."""
        return sum({slot.address: slot.nbytes for slot in self.slots}.values())


def compare(
    sealed: Contract,
    now: Mapping[str, Place],
    *,
    scalars: Mapping[str, float] | None = None,
    repaired: Sequence[str] = (),
    strict: bool = False,
    allow_anonymous: bool = False,
) -> Verdict:
    """Whether every path still leads where it led when the contract was sealed.

    Args:
        sealed: the contract.
        now: where each path leads now; paths that the contract doesn't name are ignored.
        scalars: host numbers as they are now; None leaves them unchecked.
        repaired: paths that were repaired in this update.
        strict: let a repair fail the verdict.
        allow_anonymous: let slots pass of which nothing is known at all. One without
            an owner that is known to be derived from weights is a fault all the same.
    """
    faults: list[Fault] = []
    dropped: list[str] = []
    # The whole check in one C loop when nothing changed: a view of items is compared as a set would be.
    if not sealed.places.items() <= now.items():
        for slot in sealed.slots:
            if slot.watched:
                _check(slot, now, faults, dropped)
    stands = (slot for slot in sealed.unowned if not (allow_anonymous and slot.kind is Kind.ANONYMOUS))
    faults += [_fault(What.ANONYMOUS, slot, slot.name, slot.where) for slot in stands]
    if scalars is not None:
        for path, value in sealed.scalars.items():
            have = scalars.get(path)
            if not same_number(value, have):
                faults.append(Fault(What.SCALAR, path, detail=f"was {value!r}, is {have!r}; a captured kernel keeps the old one"))
    return Verdict(sealed.kinds, tuple(faults), tuple(dropped), tuple(repaired), strict)


def _check(slot: Slot, now: Mapping[str, Place], faults: list[Fault], dropped: list[str]) -> None:
    """Faults of one slot: each path that leads elsewhere, and the slot itself when no path is left."""
    gone: list[str] = []
    for path in slot.paths:
        have = now.get(path)
        if have is None:
            gone.append(path)
        elif have[1] != slot.layout:
            faults.append(_fault(What.CHANGED_LAYOUT, slot, path, f"was {slot.layout}, is {have[1]}"))
        elif have[0] != slot.address:
            faults.append(_fault(What.MOVED, slot, path, f"from {slot.address:#x} to {have[0]:#x}"))
    if gone and len(gone) == len(slot.paths):
        also = f"and {len(gone) - 1} other path(s) to it" if len(gone) > 1 else ""
        faults.append(_fault(What.LOST, slot, gone[0], also))
    else:
        dropped += gone


def _fault(what: What, slot: Slot, path: str, detail: str = "") -> Fault:
    return Fault(what, path, slot.kernel, slot.nbytes, detail)


def same_number(a: float, b: float | None) -> bool:
    """Equal numbers; a NaN equals a NaN."""
    return a == b or (a != a and b is not None and b != b)
