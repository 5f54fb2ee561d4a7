"""Repair: new values go into the captured storage, and the new tensors come to lie there.

A reload builds objects anew, and their tensors lie where no graph looks. For each
path that was pinned, `Adopter.adopt` copies the new tensor's bytes into the pinned
storage and points the new tensor at it (`new.data = old`). The tensor stays the same
object, so closures, partials and frozen dataclasses that hold it see the change, and
it keeps its hooks, its `requires_grad` and its place among persistent buffers.

What can't be done for certain is left alone and reported: another layout, two new
tensors that want different bytes in one place, one new tensor that would have to lie
in two. An update needs `Adoption.ok` and the contract's verdict: a path whose tensor
never moved passes the latter, though another path to the slot brought other bytes.

Not covered: a tensor that the fresh walk doesn't reach keeps its own copy. A value
that a reload should have recomputed and did not is in its place and stale; nothing
here can see that (`selftest` can).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weightsync.storage.contract import Layout, Place
from weightsync.storage.owners import Walk, translations
from weightsync.storage.pins import Pin, Pins, bits, pin_one, place, places, same_bytes

log = logging.getLogger(__name__)

#: Names that were never sealed and are remembered one by one: a table keyed by `id` has others after every reload.
MAX_NEW_NAMES = 4096


@dataclass
class Adoption:
    """What one repair did. Each path is the canonical one of its slot, and is in one list only, but for `refreshed`.

    Args:
        adopted: had moved, and lie at the captured address again.
        refreshed: those of them whose captured bytes changed by it.
        lost: no path is left that leads to the slot; it keeps its old value.
        changed_layout: path to what was and what is; nothing was copied.
        conflicts: path to why two tensors can't both be right; nothing was changed.
        failed: path to why the tensor can't be repaired (on meta, no storage, refuses).
        followed: new paths, never sealed, that were brought along with the memory they share.
        strays: new paths that share memory with an adopted tensor and could not follow; they keep a copy.
        appeared: how many paths are new.
        in_place: how many sealed paths had not moved.
        nbytes: copied.
    """

    adopted: list[str] = field(default_factory=list)
    refreshed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    changed_layout: dict[str, str] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    followed: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    appeared: int = 0
    in_place: int = 0
    nbytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether every sealed path of the walk now leads to its captured storage."""
        return not (self.lost or self.changed_layout or self.conflicts or self.failed)

    @property
    def counts(self) -> dict[str, int]:
        """Flat, JSON-ready."""
        lists = ("adopted", "refreshed", "lost", "changed_layout", "conflicts", "failed", "followed", "strays")
        numbers = ("appeared", "in_place", "nbytes")
        return {name: len(getattr(self, name)) for name in lists} | {name: getattr(self, name) for name in numbers}


class Adopter:
    """Repairs reload after reload, and remembers what it has told the log.

    Args:
        pins: what was sealed.
    """

    def __init__(self, pins: Pins) -> None:
        self.pins = pins
        self._logged: set[tuple[str, str]] = set()
        self._new_names = 0

    def adopt(self, fresh: Walk) -> Adoption:
        """Bring what moved back to its captured storage.

        Args:
            fresh: a walk made after post-processing, of all that was pinned or of a
                part: pins outside its roots are left alone. The root's name must be
                the one it has in the pins' paths.

        The caller must keep the engine from stepping. Copies are queued on the current
        stream; comparing bytes waits for the device.
        """
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            done = _Repair(self.pins, fresh).run()
        self._log(done)
        return done

    def _log(self, done: Adoption) -> None:
        self._tell(logging.INFO, "adopted", dict.fromkeys(done.adopted + done.followed, ""))
        self._tell(logging.WARNING, "lost", dict.fromkeys(done.lost, ""))
        self._tell(logging.WARNING, "changed layout", done.changed_layout)
        self._tell(logging.WARNING, "conflict", done.conflicts)
        self._tell(logging.WARNING, "not repaired", done.failed)
        self._tell(logging.WARNING, "keeps a copy", dict.fromkeys(done.strays, ""))

    def _tell(self, level: int, what: str, paths: Mapping[str, str]) -> None:
        for path, why in paths.items():
            new = path not in self.pins.by_path
            if (what, path) not in self._logged and not (new and self._new_names >= MAX_NEW_NAMES):
                self._logged.add((what, path))
                self._new_names += new
                log.log(level, "%s: %s%s", what, path, f" ({why})" if why else "")


@dataclass(slots=True, eq=False)
class _Pair:
    """A pin and the tensor that its path leads to now; `at` is where that lies, `source` its plain view."""

    pin: Pin
    new: Any
    at: Place
    source: Any = None


class _Repair:
    """One repair under way."""

    def __init__(self, pins: Pins, fresh: Walk) -> None:
        self.pins, self.fresh = pins, fresh
        self.done = Adoption()
        self.still: dict[int, dict[Layout, Pin]] = {}  # captured storage → views that lie in their place
        self.moved: dict[int, list[_Pair]] = {}  # captured storage → what has to come back to it
        self.appeared: dict[str, Any] = {}
        self._settled: set[int] = set()  # ids of tensors that were pointed at captured storage
        self._from: dict[int, list[_Pair]] = {}  # new storage → what was adopted out of it

    def run(self) -> Adoption:
        self._sort(self._match())
        for address, pairs in self.moved.items():
            try:
                self._settle(pairs, list(self.still.get(address, {}).values()))
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as exc:
                self.done.failed.update((pair.pin.path, f"{type(exc).__name__}: {exc}") for pair in pairs)
        self._follow()
        return self.done

    def _match(self) -> list[tuple[Pin, Any]]:
        """Each pin with the tensor it became; what vanished is reported."""
        matched: set[str] = set()
        pairs: list[tuple[Pin, Any]] = []
        by_path = self.pins.by_path
        for path, new in self.fresh.tensors.items():
            held = by_path.get(path)
            if held is None:
                # What was one object may have become two, of which only the other's path is sealed.
                held = next((by_path[other] for other in translations(path, self.pins.aliases) if other in by_path), None)
            if held is None:
                self.appeared[path] = new
            else:
                pairs.append((held, new))
                matched.add(held.path)
        self.done.appeared = len(self.appeared)
        reached = {by_path[path].place for path in matched}
        gone: dict[Place, str] = {}
        for path, held in by_path.items():
            if path not in matched and self.fresh.covers(path):
                found = self.fresh.resolve(path)
                if found is not None:
                    pairs.append((held, found))
                    reached.add(held.place)
                else:
                    gone.setdefault(held.place, path)
        self.done.lost = [path for at, path in gone.items() if at not in reached]
        return pairs

    def _sort(self, pairs: list[tuple[Pin, Any]]) -> None:
        """Part what lies in its place from what has to come back and from what can't."""
        now = places(Walk(tensors={str(index): new for index, (_, new) in enumerate(pairs)}))
        moved: dict[int, dict[Place, _Pair]] = {}
        wanted: dict[int, set[Place]] = {}
        for index, (held, new) in enumerate(pairs):
            at = now.get(str(index))
            if at == held.place:
                self.done.in_place += 1
                self.still.setdefault(held.address, {}).setdefault(held.layout, held)
                wanted.setdefault(id(new), set()).add(held.place)
            elif at is None:
                self.done.failed[held.path] = f"a {type(new).__name__} has no storage of its own"
            elif why := _other_layout(held, at):
                self.done.changed_layout[held.path] = why
            elif why := _hopeless(held, new, at):
                self.done.failed[held.path] = why
            else:
                moved.setdefault(id(new), {}).setdefault(held.place, _Pair(held, new, at))
                wanted.setdefault(id(new), set()).add(held.place)
        captured = {held.address for held in self.pins.by_path.values()}
        for identity, targets in moved.items():
            for pair in targets.values():
                if len(wanted[identity]) > 1:
                    self.done.conflicts[pair.pin.path] = "is now one tensor with what was in another storage"
                elif (plain := pin_one("", pair.new)) is None:
                    self.done.failed[pair.pin.path] = "has no storage of its own"
                else:
                    # Two that changed places: what one brings must be read before the other overwrites it.
                    pair.source = plain.view().clone() if pair.at[0] in captured else plain.view()
                    self.moved.setdefault(pair.pin.address, []).append(pair)

    def _settle(self, pairs: list[_Pair], still: list[Pin]) -> None:
        """All of one captured storage: write what differs, unless that breaks another view of it; then point the new there."""
        olds = [pair.pin.view() for pair in pairs]
        writes = [index for index, pair in enumerate(pairs) if not same_bytes(olds[index], pair.source)]
        saved: list[tuple[Any, Any]] = []
        if writes and len(pairs) + len(still) > 1:
            touched = [_extent(pairs[index].pin) for index in writes]
            beside = [held.view() for held in still if any(_overlap(_extent(held), extent) for extent in touched)]
            saved = [(bits(view), bits(view).clone()) for view in beside + [olds[index] for index in writes]]
            checks = saved[: len(beside)]
        else:
            checks = []
        for index in writes:
            # As integers: each element that an expanded dimension repeats once, and dtypes that torch has no copy of.
            bits(olds[index]).copy_(bits(pairs[index].source))
        if saved and not (
            all(same_bytes(view, was) for view, was in checks)
            and all(same_bytes(old, pair.source) for old, pair in zip(olds, pairs, strict=True))
        ):
            for view, was in reversed(saved):
                view.copy_(was)
            for pair in pairs:
                self.done.conflicts[pair.pin.path] = "two paths to this storage bring different bytes"
            return
        for index, pair in enumerate(pairs):
            self._point(pair, wrote=index in writes)

    def _point(self, pair: _Pair, wrote: bool) -> None:
        """Let the new tensor lie in the captured storage."""
        path = pair.pin.path
        if why := _set(pair.new, pair.pin):
            self.done.failed[path] = why
            return
        self._settled.add(id(pair.new))
        self._from.setdefault(pair.at[0], []).append(pair)
        if path not in self.done.adopted:
            self.done.adopted.append(path)
        if wrote:
            self.done.refreshed.append(path)
            self.done.nbytes += pair.source.numel() * pair.source.element_size()

    def _follow(self) -> None:
        """New tensors that share memory with an adopted one go with it, or eager code would read a copy."""
        for path, at in places(Walk(tensors=self.appeared)).items():
            new = self.appeared[path]
            if id(new) in self._settled or at[0] not in self._from:
                continue
            target = next((found for pair in self._from[at[0]] if (found := _moved_along(path, new, at[1], pair)) is not None), None)
            if target is None or _set(new, target):
                self.done.strays.append(path)
            else:
                self.done.followed.append(path)


def _other_layout(held: Pin, at: Place) -> str:
    """Why the tensor can't take the pinned layout; empty when it can. The offset counts only within the same storage."""
    address, layout = at
    same = (layout.dtype, layout.shape, layout.stride) == (held.layout.dtype, held.layout.shape, held.layout.stride)
    return "" if same and address != held.address else f"was {held.layout}, is {layout}"


def _hopeless(held: Pin, new: Any, at: Place) -> str:
    """Why nothing can be copied; empty when it can."""
    if new.device != held.device:
        return f"is on {new.device}, was on {held.device}"
    if not held.address or not at[0]:
        return "had no memory when it was sealed" if not held.address else "has no memory"
    if not held.intact:
        return "the captured storage was resized, and its memory is gone"
    return "is a conjugated or negated view" if new.is_conj() or new.is_neg() else ""


def _set(new: Any, target: Pin) -> str:
    """Point a tensor at pinned memory; why it could not be, or empty."""
    try:
        # A subclass may have a `data` of its own. An inference tensor must stay one: torch lets nobody take views of
        # one that was given ordinary memory.
        torch.Tensor.data.__set__(new, target.view(inference=new.is_inference()))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as exc:
        return f"its data can't be set: {exc}"
    return "" if place(new) == target.place else "its data did not stay set"


def _extent(held: Pin) -> tuple[int, int]:
    """First byte, and the byte after the last, within the storage."""
    last = sum((n - 1) * s for n, s in zip(held.layout.shape, held.layout.stride, strict=True))
    return held.layout.offset * held.dtype.itemsize, (held.layout.offset + last + 1) * held.dtype.itemsize


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _moved_along(path: str, new: Any, layout: Layout, pair: _Pair) -> Pin | None:
    """Where a view of the adopted tensor's old memory lies in the captured storage; None when that doesn't hold it whole."""
    was = replace(pair.pin, layout=pair.at[1])
    view = replace(pair.pin, path=path, layout=layout, dtype=new.dtype)
    (begin, end), (first, last) = _extent(was), _extent(view)
    dense = pair.source.numel() * was.dtype.itemsize == end - begin
    shift = _extent(pair.pin)[0] - begin
    offset, rest = divmod(first + shift, new.dtype.itemsize)
    if not dense or rest or first < begin or last > end:
        return None
    return replace(view, layout=replace(layout, offset=offset))


@dataclass(frozen=True)
class Rebound:
    """What `rebind_temporaries` did.

    Args:
        rebound: names that now share the registered storage.
        skipped: name to why not.
    """

    rebound: tuple[str, ...]
    skipped: Mapping[str, str]


def rebind_temporaries(temporaries: Mapping[str, torch.Tensor], registered: Mapping[str, torch.Tensor]) -> Rebound:
    """Point temporary parameters, which rebuilt kernel objects still hold, at the registered ones.

    A reload that copies processed values back into the old parameters leaves kernel
    objects with the temporaries they were built from: eager code and graphs would read
    different copies. Nothing is copied here: the registered values must be the newer.

    Args:
        temporaries: name to tensor, as they were while post-processing ran.
        registered: name to tensor, as they are registered now.
    """
    rebound: list[str] = []
    skipped: dict[str, str] = {}
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for name, temporary in temporaries.items():
            live = registered.get(name)
            if live is temporary:
                continue
            held = None if live is None else pin_one(name, live)
            at = place(temporary)
            if live is None:
                skipped[name] = "is not registered any more"
            elif held is None or at is None:
                skipped[name] = "has no storage of its own"
            elif at == held.place:
                continue
            elif (why := _other_layout(held, at) or _hopeless(held, temporary, at)) or (why := _set(temporary, held)):
                skipped[name] = why
            else:
                rebound.append(name)
    return Rebound(tuple(rebound), skipped)
