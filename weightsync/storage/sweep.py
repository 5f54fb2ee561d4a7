"""Tensors that no walk from the model finds: globals of modules, and the anonymous.

Kernels keep tables and workspaces in globals, in caches of functions, in objects that
nothing on the model refers to. The garbage collector knows every tensor that Python
holds, so what it knows and the walk does not is looked for below the globals of all
loaded modules; what is not there either has no name and is reported as anonymous.

The collector's list leaves out the frozen part of the heap, and engines freeze it
after capture. So the heap is thawed for the look and frozen again.

Not covered: tensors that only C++ holds (handles of oneDNN, autograd's saved tensors),
which have no Python object. What is reached only from a running function's frame, a
set, a weak reference or a global named like `__this__` comes out as anonymous.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.storage import fields
from weightsync.storage.owners import Walk, Walker
from weightsync.storage.pins import storages

MAX_TRACED = 8


@dataclass(frozen=True)
class Sweep:
    """What the collector knows, named as far as it can be.

    Args:
        everything: the walk of the roots, and of the globals that hold tensors which the roots don't.
        globals: names of those globals (`module:NAME`), for `rewalk`.
        anonymous: tensors without a path, one for each storage.
        held_by: classes of the objects that hold each of them, for the first of those that were looked for.
    """

    everything: Walk
    globals: tuple[str, ...]
    anonymous: tuple[torch.Tensor, ...]
    held_by: tuple[tuple[str, ...], ...] = ()


def sweep(exclude: Mapping[str, object], wanted: Callable[[torch.Tensor], bool] | None = None) -> Sweep:
    """Walk the roots, and find the tensors that they don't reach.

    Going through all globals takes a second or more in an engine, and ends when every
    tensor that is looked for has been found. Call it when the engine is idle: a tensor
    of a step under way would come out as anonymous.

    Args:
        exclude: name to object, as for `rewalk`: what is reached from there is owned.
        wanted: which tensors to look for; all, if left out. Of the first `MAX_TRACED` of these that stay anonymous
            the holders are looked for as well, which takes one more look at the whole heap.
    """
    with _thawed():
        walker = Walker()
        for name, root in exclude.items():
            walker.add(root, name)
        known = set(storages(walker.found.tensors).values())
        loose = {at: tensor for at, tensor in _alive().items() if at not in known and (wanted is None or wanted(tensor))}
        names = list(_name(walker, loose)) if loose else []
        anonymous = tuple(loose.values())
        traced = anonymous[:MAX_TRACED] if wanted is not None else ()
        held_by = _holders(traced, loose, anonymous)
        return Sweep(walker.finish(), tuple(names), anonymous, (*held_by, *[()] * (len(anonymous) - len(held_by))))


def _name(walker: Walker, loose: dict[int, torch.Tensor]) -> Iterator[str]:
    """Globals below which loose tensors lie; takes those tensors out of `loose`."""
    for name, value in _globals():
        # Most are descriptors of C, or functions that other modules have as well.
        if not walker.is_new(value):
            continue
        mark = walker.mark()
        walker.add(value, name)
        new = storages(walker.since(mark)).values() if walker.mark() != mark else ()
        if loose.keys() & set(new):
            for at in new:
                loose.pop(at, None)
            yield name
            if not loose:
                return
        else:
            walker.undo(mark)


def _alive() -> dict[int, torch.Tensor]:
    """One tensor for each storage that has memory and a tensor in Python."""
    kinds: dict[type, bool] = {}
    tensors: dict[str, torch.Tensor] = {}
    for value in gc.get_objects():
        kind = type(value)
        if kind not in kinds:
            kinds[kind] = fields.is_tensor_type(kind)
        if kinds[kind]:
            tensors[str(len(tensors))] = value
    return {at: tensors[name] for name, at in reversed(storages(tensors).items())}


def _globals() -> Iterator[tuple[str, Any]]:
    """(`module:NAME` or `module:Class.NAME`, value) of everything that could hold a tensor."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if _is_pythons(name):
                continue
            if fields.is_class(value):
                if fields.class_module(value) == module_name:
                    yield from (
                        (f"{module_name}:{name}.{key}", held)
                        for key, held in fields.class_dict(value).items()
                        if not _is_pythons(key) and _holds(held)
                    )
            elif _holds(value):
                yield f"{module_name}:{name}", value


def _is_pythons(name: object) -> bool:
    """Names like `__init__` and `__spec__`: half of all there are, some with a schema of thousands of objects below."""
    return type(name) is str and name.startswith("__") and name.endswith("__")


def _holds(value: object) -> bool:
    """A quick no for most of what a module has: functions without state, constants, empty tables."""
    kind = type(value)
    if kind in (dict, list, tuple):
        return bool(value)
    if kind is not types.FunctionType:
        return kind not in fields.PLAIN
    function: Any = value
    if function.__closure__ or function.__dict__:
        return True
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return any(type(default) not in fields.PLAIN for default in defaults)


@contextlib.contextmanager
def _thawed() -> Iterator[None]:
    """The collector sees the whole heap meanwhile, and doesn't run: a full collection of a thawed heap takes seconds."""
    frozen, enabled = gc.get_freeze_count() > 0, gc.isenabled()
    if frozen:
        gc.collect()  # what is garbage now would be frozen for good
    gc.disable()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
        if enabled:
            gc.enable()


def _holders(tensors: tuple[torch.Tensor, ...], *ours: object) -> list[tuple[str, ...]]:
    """For each tensor, classes of the objects that refer to it: where to look for its owner."""
    if not tensors:
        return []
    at = {id(tensor): index for index, tensor in enumerate(tensors)}
    classes: list[set[str]] = [set() for _ in tensors]
    skipped = {id(tensors), *map(id, ours)}
    for holder in gc.get_referrers(*tensors):
        if id(holder) not in skipped and not isinstance(holder, (types.FrameType, types.GeneratorType)):
            for held in gc.get_referents(holder):
                if (index := at.get(id(held))) is not None:
                    classes[index].add(type(holder).__name__)
    return [tuple(sorted(names)) for names in classes]
