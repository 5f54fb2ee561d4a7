"""Messages of `protocol` as JSON-ready data, and back.

`encode` makes dicts, lists, strings, numbers and None; `decode` builds the
dataclass again and refuses a field that is missing, unknown or of the wrong type
with a `ValueError` that gives its path. Standard library only: a trainer needs it.

Not covered: tuples of mixed types, and unions of anything but one type and None.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def encode(value: Any) -> Any:
    """A message as JSON-ready data (dicts, lists, strings, numbers, None)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(cls: type[T], data: Any) -> T:
    """Build a message from JSON data.

    Raises:
        ValueError: a field is missing, unknown, or of the wrong type; the message gives its path.
    """
    return typing.cast(T, _decode(cls, data, cls.__name__))


_HINTS: dict[type, dict[str, Any]] = {}


def _decode(want: Any, data: Any, path: str) -> Any:
    origin, args = typing.get_origin(want), typing.get_args(want)
    if want is Any:
        return data
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in args:
            return None
        return _decode(next(arg for arg in args if arg is not type(None)), data, path)
    if dataclasses.is_dataclass(want):
        return _decode_dataclass(typing.cast(type, want), data, path)
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise ValueError(f"{path}: want a list, got {type(data).__name__}")
        return tuple(_decode(args[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"{path}: want an object, got {type(data).__name__}")
        return {str(key): _decode(args[1], item, f"{path}.{key}") for key, item in data.items()}
    if isinstance(want, type) and issubclass(want, enum.Enum):
        try:
            return want(data)
        except ValueError:
            raise ValueError(f"{path}: want one of {[m.value for m in want]}, got {data!r}") from None
    if want is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError:
            raise ValueError(f"{path}: want float, got an integer beyond its range") from None
    if not isinstance(data, want) or (want is int and isinstance(data, bool)):
        raise ValueError(f"{path}: want {want.__name__}, got {type(data).__name__}")
    return data


def _decode_dataclass(want: type, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{path}: want an object, got {type(data).__name__}")
    hints = _HINTS.get(want)
    if hints is None:
        hints = _HINTS[want] = typing.get_type_hints(want)
    fields = {f.name: f for f in dataclasses.fields(want)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ValueError(f"{path}: unknown field(s) {', '.join(unknown[:5])}")
    missing = [
        name
        for name, f in fields.items()
        if name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{path}: missing field(s) {', '.join(missing)}")
    return want(**{name: _decode(hints[name], value, f"{path}.{name}") for name, value in data.items()})
