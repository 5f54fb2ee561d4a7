"""Values that a model's first run fills in: found by what they were when loading ended, and made to be filled in again.

A model may cache what it derives from weights: merged weights, products of scales.
It has none when it is loaded; an update must take it back to there and let it run
once, or the cache stays that of the old weights. What counts is an attribute that
was None or absent on an object when loading ended, or an empty list or dict, and has
a tensor or a float in it when the contract is sealed. What took the place of something
else (a number, an object, items of a list) can't be taken back, and is told of.

A `Snapshot` holds no object alive and no tensor: only weak references and names.

Not covered: caches in closures, in functools' caches, and on objects that can't be
referenced weakly; whole numbers and flags, which are counters and sizes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync.storage import fields
from weightsync.storage.contract import same_number
from weightsync.storage.owners import rewalk, walk

_MISSING = object()
_CONTAINERS = (list, tuple, dict)
#: Classes of what belongs to compilers, adapters and runners: made after loading, and not derived from weights.
_NOT_DERIVED = ("vllm.compilation", "vllm.lora", "vllm.v1", "vllm.distributed", "torch", "functools")


@dataclass(frozen=True)
class _Fresh:
    """One object when loading ended: names with a value, names that were None, its numbers, how long its containers were.

    `lay` is where its tensors lay, `items` where those in its containers did.
    """

    ref: weakref.ref[Any]
    had: frozenset[str]
    none: frozenset[str]
    sizes: dict[str, int]
    lay: dict[str, int]
    items: dict[str, frozenset[int]]
    numbers: dict[str, float]


class Snapshot:
    """What the objects of a model held when its loading ended."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._fresh: dict[int, _Fresh] = {}
        self._unheld: set[int] = set()  # objects that can't be referenced weakly
        known: dict[frozenset[str], frozenset[str]] = {}  # objects of a class have the same names: one set for all
        for owner, _, held in _objects(model):
            try:
                ref = weakref.ref(owner)
            except TypeError:
                self._unheld.add(id(owner))
                continue
            had = frozenset(name for name, value in held.items() if value is not None)
            none = frozenset(name for name, value in held.items() if value is None)
            sizes = {name: len(value) for name, value in held.items() if type(value) in (list, dict)}
            lay = {name: _address(value) for name, value in held.items() if fields.is_tensor_type(type(value))}
            items = {name: frozenset(map(_address, _tensors_in(value))) for name, value in held.items() if type(value) in _CONTAINERS}
            numbers = {name: value for name, value in held.items() if type(value) is float}
            self._fresh[id(owner)] = _Fresh(ref, known.setdefault(had, had), known.setdefault(none, none), sizes, lay, items, numbers)

    def of(self, owner: object) -> _Fresh | None:
        """The object as it was; None when it did not exist."""
        found = self._fresh.get(id(owner))
        return found if found is not None and found.ref() is owner else None

    def is_new(self, value: object) -> bool:
        """Whether an object came after loading had ended; False where that can't be told."""
        return self.of(value) is None and id(value) not in self._unheld

    def registered(self, model: torch.nn.Module) -> Iterator[torch.Tensor]:
        """Parameters and buffers under names that had one when loading ended."""
        for layer in model.modules():
            was = self.of(layer)
            for table, name, value in fields.module_tables(layer):
                if was is not None and table != "_modules" and name in was.had:
                    yield value


@dataclass
class _Lazy:
    """One attribute that the first run filled in."""

    path: str
    owner: weakref.ref[Any]
    name: str
    kind: str  # "none", "absent" or "items": what it was when loading ended
    persistent: bool | None  # of a registered buffer
    captured: float | None = None  # a number, as captured graphs hold it
    old: Any = field(default=_MISSING, repr=False)

    @property
    def number(self) -> float | None:
        """A number as it is now; None when it is none, or its owner is gone."""
        owner = self.owner()
        now = _held(owner).get(self.name) if owner is not None else None
        return now if type(now) is float else None


class Lazies:
    """What a model's first run has filled in since its loading ended.

    Args:
        model: the live model, after its first run.
        fresh: made when its loading ended.
        runner: what runs the model. What it holds itself, caches and tables, it has bound to the model and will not do so again.

    Attributes:
        unrefreshable: paths that hold such values in a way that can't be taken back.
        kept: paths that the last run did not fill in again. A buffer whose size goes by the batch can't be told
            from a value that only another sort of run fills in, so nothing is proved of either.
    """

    def __init__(self, model: torch.nn.Module, fresh: Snapshot, runner: object = None) -> None:
        self._found: list[_Lazy] = []
        self.unrefreshable: list[str] = []
        self.kept: list[str] = []
        own = {_address(tensor) for tensor in fresh.registered(model)}  # views of those are no cached values
        # Paths that begin with the runner are those of its own: what it reaches through the model was walked before.
        found = rewalk({"model": model, "runner": runner}).tensors
        own |= {_address(tensor) for path, tensor in found.items() if path.startswith("runner.")}
        for owner, path, held in _objects(model):
            was = fresh.of(owner)
            if was is None:
                continue
            for name, value in held.items():
                if self._replaced(fresh, name, value, was, own):
                    self.unrefreshable.append(f"{path}.{name}")
                else:
                    self._sort(owner, f"{path}.{name}", name, value, was, own)
        self.note_captured()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def counts(self) -> dict[str, int]:
        """Flat, JSON-ready; empty where there is nothing."""
        numbers = {"lazies": len(self._found), "unrefreshable": len(self.unrefreshable)}
        return {name: number for name, number in numbers.items() if number}

    @property
    def changed(self) -> list[str]:
        """Numbers that are not what captured graphs hold, be it that an update failed before they were captured anew."""
        return [lazy.path for lazy in self._found if lazy.captured is not None and not same_number(lazy.captured, lazy.number)]

    def note_captured(self) -> None:
        """Graphs hold the numbers as they are now. One whose owner was built anew can't be told, and stays among `changed`."""
        for lazy in self._found:
            lazy.captured = lazy.captured if lazy.number is None else lazy.number

    @property
    def paths(self) -> list[str]:
        """Where they are."""
        return [lazy.path for lazy in self._found]

    def _replaced(self, fresh: Snapshot, name: str, value: Any, was: _Fresh, own: set[int]) -> bool:
        """Whether this took the place of something else, so that no run would fill it in again."""
        if name not in was.had:
            return False
        if type(value) is float:
            return not same_number(value, was.numbers.get(name))
        if fields.is_tensor_type(type(value)):
            return _address(value) not in {was.lay.get(name), *own}
        if type(value) in _CONTAINERS:
            known = own | was.items.get(name, frozenset())
            return not _was_empty(name, value, was) and any(_address(tensor) not in known for tensor in _tensors_in(value))
        return _derives(value) and fresh.is_new(value) and any(_address(tensor) not in own for tensor in walk(value, "").tensors.values())

    def _sort(self, owner: Any, path: str, name: str, value: Any, was: _Fresh, own: set[int]) -> None:
        kind = "none" if name in was.none else "absent"
        tensor = fields.is_tensor_type(type(value))
        if name in was.had:
            if not _was_empty(name, value, was) or all(_address(item) in own for item in _tensors_in(value)):
                return
            kind = "items"
        elif not tensor and type(value) is not float:
            if type(value) in _CONTAINERS or _derives(value):
                found = walk(value, "").tensors.values()
                self.unrefreshable += [path] if any(_address(t) not in own for t in found) else []
            return
        elif tensor and _address(value) in own:
            return
        buffer = fields.is_module(owner) and name in owner._buffers
        persistent = name not in owner._non_persistent_buffers_set if buffer else None
        self._found.append(_Lazy(path, weakref.ref(owner), name, kind, persistent))

    def reset(self) -> None:
        """Take each back to what it was when loading ended."""
        for lazy in self._found:
            owner = lazy.owner()
            # An object that the reload has built anew is fresh already.
            lazy.old = _held(owner).get(lazy.name, _MISSING) if owner is not None else _MISSING
            if lazy.old is _MISSING:
                continue
            if lazy.kind == "items":
                lazy.old = lazy.old.copy()
                _held(owner)[lazy.name].clear()
            elif lazy.kind == "none":
                _set(owner, lazy.name, None, lazy.persistent)
            else:
                _delete(owner, lazy.name)

    def settle(self) -> dict[str, int]:
        """After the run: keep what it filled in, and give the rest its old value back.

        What came back in another layout was no value of the weights': a buffer
        whose size goes by the batch. It gets its old memory back as well.
        """
        counts = {"lazies_refreshed": 0, "lazies_kept": 0}
        self.kept = []
        for lazy in self._found:
            owner, old, lazy.old = lazy.owner(), lazy.old, _MISSING
            if owner is None or old is _MISSING:
                continue
            new: Any = _held(owner).get(lazy.name)
            if lazy.kind == "items" and not new:
                new.update(old) if isinstance(old, dict) else new.extend(old)
            elif lazy.kind != "items" and not _alike(new, old):
                _set(owner, lazy.name, old, lazy.persistent)
            else:
                counts["lazies_refreshed"] += 1
                continue
            counts["lazies_kept"] += 1
            self.kept.append(lazy.path)
        return counts


def _objects(root: torch.nn.Module) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """Every object that the model reaches, with its path and its attributes by name; Nones too."""
    seen: set[int] = {id(root)}
    keep: list[Any] = [root]  # no id is used twice while this runs
    waiting: deque[tuple[Any, str]] = deque([(root, "model")])
    readers: dict[type, fields.Fields | None] = {**dict.fromkeys(fields.PLAIN), type(root): fields.reader(type(root))}
    while waiting:
        owner, path = waiting.popleft()
        held: dict[str, Any] = {}
        reader = readers[type(owner)]
        for suffix, value in reader(owner) if reader is not None else ():
            if suffix[0] == "." and suffix[1] != "<":
                held[suffix[1:]] = value
            kind = type(value)
            if kind not in readers:
                readers[kind] = None if fields.is_tensor_type(kind) else fields.reader(kind)
            if readers[kind] is not None and id(value) not in seen:
                seen.add(id(value))
                keep.append(value)
                waiting.append((value, path + suffix))
        if fields.is_module(owner):
            held |= {name: None for table in (owner._parameters, owner._buffers) for name, value in table.items() if value is None}
        if type(owner) not in _CONTAINERS:
            yield owner, path, held


def _held(owner: Any) -> dict[str, Any]:
    """An object's attributes by name."""
    reader = fields.reader(type(owner))
    return {suffix[1:]: value for suffix, value in reader(owner) if suffix[0] == "."} if reader is not None else {}


def _tensors_in(container: Any) -> Iterator[torch.Tensor]:
    """The tensors in a container, and in those inside it."""
    seen: set[int] = set()
    waiting = [container]
    while waiting:
        value = waiting.pop()
        if fields.is_tensor_type(type(value)):
            yield value
        elif type(value) in _CONTAINERS and id(value) not in seen:
            seen.add(id(value))
            waiting += _values(value)


def _was_empty(name: str, value: Any, was: _Fresh) -> bool:
    """Whether a list or dict was there when loading ended, with nothing in it: taking it back is clearing it."""
    return type(value) in (list, dict) and was.sizes.get(name) == 0


def _values(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def _derives(value: Any) -> bool:
    """Whether an object that came after loading may hold values derived from weights."""
    module = str(fields.class_module(type(value)))
    return "." in module and not any(module == skip or module.startswith(skip + ".") for skip in _NOT_DERIVED)


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # no storage of its own
        return 0


def _alike(new: Any, old: Any) -> bool:
    if not isinstance(old, torch.Tensor):
        return type(new) is type(old)
    return isinstance(new, torch.Tensor) and (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())


def _set(owner: Any, name: str, value: Any, persistent: bool | None) -> None:
    if not isinstance(owner, torch.nn.Module):
        object.__setattr__(owner, name, value)  # a frozen dataclass too
    elif persistent is None or name in owner._buffers:
        setattr(owner, name, value)
    else:
        owner.register_buffer(name, value, persistent=persistent)


def _delete(owner: Any, name: str) -> None:
    if isinstance(owner, torch.nn.Module):
        delattr(owner, name)
    else:
        object.__delattr__(owner, name)
