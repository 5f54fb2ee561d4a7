"""Answers for loaders that read values while they run on meta tensors, which have none.

Some loaders look before they write: "this scale was loaded already, with another
value" is an error to them. On meta such a read raises, in vLLM's own reload too,
which counts a tensor's elements by a run of its loader on the meta parameter. Here
every read answers as if all values were alike and nothing had been loaded before:
comparisons hold that ask for equality, others don't, and a number is one. The real
load afterwards reads real values.

Not covered: loaders whose writes depend on the number they read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HOLD = frozenset({"eq", "ge", "le", "isclose"})
_INVERT = frozenset({"logical_not", "bitwise_not"})


class MetaReads(TorchDispatchMode):
    """While it is active, reads of meta tensors give an answer."""

    def __init__(self) -> None:
        super().__init__()
        self._true: dict[int, torch.Tensor] = {}  # results that stand for True, held so that no id is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(func)
        if name in ("_local_scalar_dense", "equal", "allclose") and args[0].is_meta:
            if name != "_local_scalar_dense":
                return True
            return id(args[0]) in self._true if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool and out.is_meta and self._holds(name, args):
            self._true[id(out)] = out
        return out

    def _holds(self, name: str, args: Any) -> bool:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if name in _INVERT:
            return id(tensors[0]) not in self._true
        # A view of an answer, or one moved or joined with others, is that answer.
        return name in _HOLD or (bool(tensors) and all(id(tensor) in self._true for tensor in tensors))


@functools.cache
def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")
