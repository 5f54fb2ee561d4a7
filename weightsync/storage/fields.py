"""What one Python object holds, read without running any of its code.

Attributes come from the instance dictionary and from slot descriptors, items from
the built-in containers' own methods. No property, `__getattr__`, `__class__`,
`__iter__` or `__repr__` of anybody's is called, so that a look at a live engine
changes nothing and can't raise.

What holds no weights and is large is left out by the module that its class comes
from: configurations, tokenisers, loggers, threads, torch's and triton's own objects.

Not covered: sets (their order is no name), weak references (they hold nothing),
frames of running functions and generators, C++ members, arrays of numpy.
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

#: Yields (the part of the path that leads to it, the value) for everything that an object holds.
Fields = Callable[[Any], Iterator[tuple[str, Any]]]

#: Items of one container that are looked at. Longer ones that hold nothing but numbers and text are left out whole.
MAX_ITEMS = 65_536

#: Objects of classes from these modules, and from what lies below them, are left alone.
SKIPPED_MODULES = (
    *("torch", "triton", "numpy", "transformers", "tokenizers", "sentencepiece", "vllm.config", "vllm.transformers_utils"),
    *("ray", "zmq", "pydantic", "pydantic_core", "pydantic_settings", "jinja2", "prometheus_client", "opentelemetry"),
    *("logging", "threading", "_thread", "queue", "asyncio", "concurrent", "multiprocessing", "subprocess", "socket", "ssl"),
    *("io", "_io", "pathlib", "re", "typing", "inspect", "ast", "importlib", "weakref", "contextvars", "ctypes", "datetime"),
)
#: Where nn.Module keeps what `named_parameters` and its like return, and bookkeeping without tensors.
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_MODULE_BOOKKEEPING = frozenset({*MODULE_TABLES, "_non_persistent_buffers_set", "training", "_is_full_backward_hook"})
_LRU = type(functools.lru_cache(lambda: None))

# `type`'s own descriptors: a metaclass may override attribute access on the class.
_mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_dict_of: Callable[[type], dict[str, Any]] = type.__dict__["__dict__"].__get__
_module_of: Callable[[type], object] = type.__dict__["__module__"].__get__


def is_tensor_type(kind: type) -> bool:
    """Whether objects of this class are tensors; asks no metaclass."""
    return torch.Tensor in _mro_of(kind)


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether this is a Parameter, or of a subclass of it."""
    return torch.nn.Parameter in _mro_of(type(tensor))


def is_module_type(kind: type) -> bool:
    """Whether objects of this class are nn.Modules."""
    return torch.nn.Module in _mro_of(kind)


def is_module(value: object) -> bool:
    """Whether this is an nn.Module."""
    return is_module_type(type(value))


def reader(kind: type) -> Fields | None:
    """How to read objects of this class; None for those that hold nothing of interest. Ask once per class."""
    mro = _mro_of(kind)
    if kind in _EXACT:
        return _EXACT[kind]
    if torch.nn.Module in mro:
        return _attributes(kind, _module_fields)
    if torch.Tensor in mro:
        return _attributes(kind, None)
    if type in mro or types.ModuleType in mro or enum.Enum in mro:
        return None
    for base, fields in _CONTAINERS:
        if base in mro:
            return _attributes(kind, fields)
    return None if _skipped(_module_of(kind)) else _attributes(kind, None)


def _skipped(module: object) -> bool:
    return isinstance(module, str) and any(module == skip or module.startswith(skip + ".") for skip in SKIPPED_MODULES)


def members(kind: type) -> tuple[Any, list[tuple[str, Any]]]:
    """The descriptor of the instance dictionary, if there is one, and (name, descriptor) of each slot."""
    own = None
    slots: list[tuple[str, Any]] = []
    for cls in _mro_of(kind):
        for name, member in _dict_of(cls).items():
            if name == "__dict__":  # a property of that name would be somebody's code
                own = member if own is None and type(member) in (types.GetSetDescriptorType, types.MemberDescriptorType) else own
            elif type(member) is types.MemberDescriptorType and cls not in _BUILTIN:
                slots.append((name, member))
    return own, slots


def _attributes(kind: type, first: Fields | None) -> Fields | None:
    """A reader of instance dictionary and slots, after what `first` yields."""
    own, slots = members(kind)
    if own is None and not slots:
        return first
    # A module's dictionary has its tables in it, which `_module_fields` has read.
    hidden = _MODULE_BOOKKEEPING if first is _module_fields else frozenset()

    def fields(value: Any) -> Iterator[tuple[str, Any]]:
        if first is not None:
            yield from first(value)
        if own is not None:
            for name, held in _items(own.__get__(value)):
                if name not in hidden:
                    yield f".{name}", held
        for name, member in slots:
            try:
                held = member.__get__(value)
            except AttributeError:  # never set
                continue
            yield f".{name}", held

    return fields


def module_tables(module: object) -> Iterator[tuple[str, str, Any]]:
    """(table, name, value) of a module's parameters, buffers and children, in this order; Nones left out."""
    own = object.__getattribute__(module, "__dict__")
    for table in MODULE_TABLES:
        held = own.get(table)
        # A ScriptModule keeps them in C++.
        if is_dict(held):
            yield from ((table, name, value) for name, value in _items(held) if value is not None)


def _module_fields(module: Any) -> Iterator[tuple[str, Any]]:
    return ((f".{name}", value) for _, name, value in module_tables(module))


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    """The first `MAX_ITEMS` of a mapping, copied in one go since another thread may write."""
    return list(islice(dict.items(mapping), MAX_ITEMS))


def is_long(value: object) -> bool:
    """Whether a container has more items than are looked at, and any that could hold something."""
    return _size(value) > MAX_ITEMS and not _all_plain(value)


def is_dict(value: object) -> bool:
    """Whether this is a dictionary, of whatever class."""
    kind = type(value)
    return kind is dict or dict in _mro_of(kind)


def base_of(kind: type) -> Any:
    """The built-in container that objects of this class are, or extend; None when they are none."""
    mro = _mro_of(kind)
    return next((base for base in _SIZED if base in mro), None)


def is_sized_type(kind: type) -> bool:
    """Whether `is_long` can be true of objects of this class."""
    return any(base in _mro_of(kind) for base in _SIZED)


def _size(value: object) -> int:
    base = base_of(type(value))
    return 0 if base is None else int(base.__len__(value))


def _all_plain(value: object) -> bool:
    """Whether a container has nothing but numbers, text and the like; a fast loop, without a look at the items."""
    base = base_of(type(value))
    values: Iterable[Any] = dict.values(value) if base is dict else base.__iter__(value)  # type: ignore[arg-type]
    return set(map(type, values)) <= PLAIN


def _dict_fields(value: Any) -> Iterator[tuple[str, Any]]:
    if dict.__len__(value) > 64 and _all_plain(value):
        return
    for position, (key, held) in enumerate(_items(value)):
        yield f"[{_key(key, position)}]", held


def _key(key: object, position: int) -> str:
    """A key as the path shows it; keys whose text would be somebody's code go by class and position."""
    kind = type(key)
    if kind in _KEYS:
        return repr(key)
    if kind is tuple:
        return f"({', '.join(_key(part, position) for part in key)})"  # type: ignore[attr-defined]
    if enum.Enum in _mro_of(kind):
        return f"{kind.__name__}.{object.__getattribute__(key, '_name_')}"
    return f"<{kind.__name__} {position}>"


def _sequence_fields(base: Any) -> Fields:
    def fields(value: Any) -> Iterator[tuple[str, Any]]:
        if base.__len__(value) > 64 and _all_plain(value):
            return
        for index, held in enumerate(list(islice(base.__iter__(value), MAX_ITEMS))):
            yield f"[{index}]", held

    return fields


def _function_fields(function: Any) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".<closure {name}>", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    for name, held in zip(arguments[len(arguments) - len(defaults) :], defaults, strict=False):
        yield f".<default {name}>", held
    for name, held in (function.__kwdefaults__ or {}).items():
        yield f".<default {name}>", held
    for name, held in function.__dict__.items():
        yield f".{name}", held


def _partial_fields(partial: Any) -> Iterator[tuple[str, Any]]:
    member = functools.partial.__dict__
    yield ".<func>", member["func"].__get__(partial)
    for index, held in enumerate(member["args"].__get__(partial)):
        yield f".<arg {index}>", held
    for name, held in member["keywords"].__get__(partial).items():
        yield f".<keyword {name}>", held


def _method_fields(method: Any) -> Iterator[tuple[str, Any]]:
    yield ".<self>", method.__self__
    yield ".<func>", method.__func__


def _builtin_fields(function: Any) -> Iterator[tuple[str, Any]]:
    yield ".<self>", function.__self__  # a bound method of a C class; a module's is the module, which nobody reads


def _cell_fields(cell: Any) -> Iterator[tuple[str, Any]]:
    try:
        yield ".<cell>", cell.cell_contents
    except ValueError:
        return


def _lru_fields(cached: Any) -> Iterator[tuple[str, Any]]:
    # functools keeps arguments and results in C, where only the collector sees them. With a bound on its size
    # a cache shows them in the order of their use, which makes poor names.
    holding = (held for held in gc.get_referents(cached) if type(held) not in PLAIN)
    for index, held in enumerate(islice(holding, MAX_ITEMS)):
        yield f".<cache {index}>", held


def _wrapped_fields(wrapper: Any) -> Iterator[tuple[str, Any]]:
    yield ".<func>", wrapper.__func__


#: Hold no tensors; leaves of every walk.
PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, bytearray, type(None), type(...), range, slice, type, types.ModuleType}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator, types.CodeType, object}
)
_KEYS = frozenset({int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device})
_SIZED = (dict, list, tuple, collections.deque)
_EXACT: dict[type, Fields | None] = {
    **dict.fromkeys(PLAIN),
    **dict.fromkeys((set, frozenset, memoryview, types.FrameType, types.GeneratorType, types.CoroutineType, property)),
    types.FunctionType: _function_fields,
    types.MethodType: _method_fields,
    types.BuiltinMethodType: _builtin_fields,
    types.MethodWrapperType: _builtin_fields,
    types.CellType: _cell_fields,
    staticmethod: _wrapped_fields,
    classmethod: _wrapped_fields,
    _LRU: _lru_fields,
}
_CONTAINERS: tuple[tuple[Any, Fields], ...] = (
    (dict, _dict_fields),
    (list, _sequence_fields(list)),
    (tuple, _sequence_fields(tuple)),
    (collections.deque, _sequence_fields(collections.deque)),
    (functools.partial, _partial_fields),
)
#: Their slot descriptors are read above, under better names.
_BUILTIN = frozenset({object, functools.partial, types.FunctionType, types.MethodType, BaseException, torch.Tensor})


def is_class(value: object) -> bool:
    """Whether this is a class."""
    return type in _mro_of(type(value))


def class_dict(value: Any) -> dict[str, Any]:
    """A copy of a class's own names; empty for what is no class."""
    return dict(_dict_of(value)) if is_class(value) else {}


def class_module(cls: Any) -> object:
    """The module that a class comes from; asks no metaclass."""
    return _module_of(cls)
