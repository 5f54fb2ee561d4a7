"""Sealed paths, looked up again without a walk: what makes the check after an update cheap.

A walk goes through everything that the roots hold, since it has to find what is new.
A check asks only whether known paths still lead where they led. `Lookup` goes down
the tree of those paths once, reading from each object only what lies on the way, by
the rules of `fields`: no code of the objects runs, and what the walk would not look
into isn't looked into here either.

Where two fields of one object have the same name, the walk may have gone on from the
second; `Lookup.differs` says of which paths that is so, and a caller walks for those.

Not covered: paths that appeared after the seal, which only a walk finds.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from weightsync.storage import fields
from weightsync.storage.contract import Place
from weightsync.storage.owners import Walk
from weightsync.storage.pins import readable_place

#: Stands for what is not there: None may be.
_GONE: Any = type("Gone", (), {"__slots__": ()})()
#: Reads the wanted fields of one object, in their order.
_Get = Callable[[Any], Sequence[Any]]
#: What a tensor was like when its place was worked out, and that place.
_Known = tuple[Any, int, int, tuple[int, ...], tuple[int, ...], Any, Place | None]
_NOTHING: _Known = (None, 0, 0, (), (), None, None)


class Lookup:
    """The tree of some paths of a walk.

    Args:
        found: the walk; nothing of it but names is kept.
        tensors, numbers: the paths to look up.
    """

    def __init__(self, found: Walk, tensors: Iterable[str], numbers: Iterable[str]) -> None:
        children: dict[str, list[str]] = {}
        tensors, numbers = list(tensors), list(numbers)
        waiting, seen = [*tensors, *numbers], set[str]()
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                parent = found.parents[path]
                children.setdefault(parent, []).append(path)
                if parent:
                    waiting.append(parent)
        self._roots = children.pop("", [])
        # What one object holds lies side by side in the list of values, after the object itself.
        at = {root: number for number, root in enumerate(self._roots)}
        self._groups: list[_Group] = []
        order = list(self._roots)
        for path in order:
            if held := children.get(path):
                self._groups.append(_Group(at[path], len(order), tuple(name[len(path) :] for name in held)))
                at |= {name: len(order) + number for number, name in enumerate(held)}
                order += held
        self._count = len(order)
        self._tensors = [(path, at[path]) for path in tensors]
        self._numbers = [(path, at[path]) for path in numbers]
        self._known = [_NOTHING] * len(self._tensors)

    def find(self, roots: Mapping[str, object]) -> list[Any]:
        """What lies at each path now; for `places` and `numbers`. A root that is gone is left out of `roots`."""
        values = [_GONE] * self._count
        values[: len(self._roots)] = (roots.get(root, _GONE) for root in self._roots)
        for group in self._groups:
            value = values[group.holder]
            if value is not _GONE:
                if type(value) is not group.kind:
                    group.kind, group.get = type(value), _getter(type(value), group.suffixes)
                values[group.start : group.end] = group.get(value)
        return values

    def differs(self, values: list[Any], found: Walk) -> list[str]:
        """Paths at which a look-up finds another object than the walk did: those must be walked for."""
        pairs = [(self._tensors, found.tensors), (self._numbers, found.scalars)]
        return [path for paths, was in pairs for path, at in paths if values[at] is not was[path]]

    def places(self, values: list[Any]) -> dict[str, Place]:
        """Where each path leads; those that lead to no tensor are left out."""
        out: dict[str, Place] = {}
        with torch._C.DisableTorchFunctionSubclass():  # no subclass has a say in where it lies
            for number, (path, at) in enumerate(self._tensors):
                tensor = values[at]
                kind, pointer, offset, stride, shape, dtype, place = self._known[number]
                try:
                    same = (
                        type(tensor) is kind
                        and tensor.data_ptr() == pointer
                        and tensor.storage_offset() == offset
                        and tensor.stride() == stride
                        and tensor.shape == shape
                        and tensor.dtype is dtype
                    )
                except (RuntimeError, ValueError, TypeError, NotImplementedError):  # has no storage any more
                    same = False
                if not same:
                    place = self._look(number, tensor)
                if place is not None:
                    out[path] = place
        return out

    def numbers(self, values: list[Any]) -> dict[str, float]:
        """The host numbers; those that are gone, or no number any more, are left out."""
        return {path: values[at] for path, at in self._numbers if type(values[at]) in (float, int)}

    def _look(self, number: int, tensor: Any) -> Place | None:
        """Work out a place, and remember what it was worked out from."""
        self._known[number] = _NOTHING
        place = readable_place(tensor) if fields.is_tensor_type(type(tensor)) else None
        if place is not None:
            stride, shape = tensor.stride(), tuple(tensor.shape)
            self._known[number] = (type(tensor), tensor.data_ptr(), tensor.storage_offset(), stride, shape, tensor.dtype, place)
        return place


class _Group:
    """What is wanted of one object: `suffixes` of the value at `holder`, to be put at `start` to `end`."""

    __slots__ = ("end", "get", "holder", "kind", "start", "suffixes")

    def __init__(self, holder: int, start: int, suffixes: tuple[str, ...]) -> None:
        self.holder, self.start, self.end, self.suffixes = holder, start, start + len(suffixes), suffixes
        self.kind: type | None = None
        self.get: _Get = lambda _: ()


def _getter(kind: type, suffixes: tuple[str, ...]) -> _Get:
    """How to read these fields of objects of this class; as `fields.reader` would yield them."""
    read = fields.reader(kind)
    if read is None:
        gone = (_GONE,) * len(suffixes)
        return lambda _: gone
    base = fields.base_of(kind)
    attributes = all(suffix.startswith(".") and not suffix.startswith(".<") for suffix in suffixes)
    if base is None and attributes:
        return _attributes(kind, [suffix[1:] for suffix in suffixes])
    keys = [_plain_key(suffix) for suffix in suffixes]
    if base is dict and None not in keys:
        return lambda value: [dict.get(value, key, _GONE) for key in keys]
    if base in (list, tuple) and all(type(key) is int for key in keys):
        return _items(base, keys)
    return _any_fields(read, suffixes)


def _attributes(kind: type, names: list[str]) -> _Get:
    own, slots = fields.members(kind)
    members: dict[str, list[Any]] = {}
    for name, member in slots:
        members.setdefault(name, []).append(member)
    of_dict = dict.get

    def plain(value: Any) -> list[Any]:
        space = {} if own is None else own.__get__(value)
        out = [of_dict(space, name, _GONE) for name in names]
        if members:
            out = [_slot(value, members.get(name, ())) if held is _GONE else held for name, held in zip(names, out, strict=True)]
        return out

    def module(value: Any) -> list[Any]:
        space = own.__get__(value)
        tables: list[Any] = [of_dict(space, name) for name in fields.MODULE_TABLES]
        tables = [table for table in tables if type(table) is dict or fields.is_dict(table)]
        out = []
        for name in names:
            for table in tables:
                if (held := of_dict(table, name)) is not None:
                    break
            else:
                held = of_dict(space, name, _GONE)
                if held is _GONE:
                    held = _slot(value, members.get(name, ()))
            out.append(held)
        return out

    return module if fields.is_module_type(kind) else plain


def _slot(value: Any, members: Sequence[Any]) -> Any:
    for member in members:
        try:
            return member.__get__(value)
        except AttributeError:  # never set
            continue
    return _GONE


def _items(base: Any, keys: list[Any]) -> _Get:
    def get(value: Any) -> list[Any]:
        count = base.__len__(value)
        return [base.__getitem__(value, key) if key < count else _GONE for key in keys]

    return get


def _any_fields(read: fields.Fields, suffixes: tuple[str, ...]) -> _Get:
    """Read all, and pick: for the kinds of objects that are few, and hold little."""

    def get(value: Any) -> list[Any]:
        found = dict.fromkeys(suffixes, _GONE)
        for suffix, held in read(value):
            if found.get(suffix) is _GONE:
                found[suffix] = held
        return [found[suffix] for suffix in suffixes]

    return get


def _plain_key(suffix: str) -> str | int | None:
    """The key of `['name']` or `[3]`; None for what is not written so, whose text need not be its value."""
    text = suffix[1:-1]
    if suffix[:1] != "[" or not (text.isdecimal() or text[:1] in "'\""):
        return None
    key = ast.literal_eval(text)
    return key if type(key) in (str, int) else None
