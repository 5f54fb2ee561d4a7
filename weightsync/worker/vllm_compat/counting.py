"""How many elements of a parameter a load has filled, each counted once.

vLLM processes a layer when as many elements have been loaded as it has. Its count
takes every call of a loader for new elements: one that fills the same place twice
(the input scale that gate and up share) makes up for others that have not come yet,
and they are dropped when they do.

Not covered: regions that overlap and are not equal count twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weightsync.worker.meta_reads import MetaReads


class Counter:
    """Wraps vLLM's `get_numel_loaded` for one reload."""

    def __init__(self) -> None:
        self._filled: dict[int, set[Any]] = {}
        self._held: list[torch.UntypedStorage] = []  # so that no identity is used twice

    def around(self, stock: Callable[..., tuple[int, object]]) -> Callable[..., tuple[int, object]]:
        """The same function, for loaders that read what they load, and with each region counted once."""

        def count(loader: Callable[..., Any], arguments: Any) -> tuple[int, object]:
            parameter = arguments.arguments.get("param")
            storage = parameter.untyped_storage() if isinstance(parameter, torch.Tensor) else None
            with _Regions(storage) as regions:
                numel, returned = stock(loader, arguments)
            if not regions.written or storage is None:
                return numel, returned
            if storage._cdata not in self._filled:
                self._held.append(storage)
            filled = self._filled.setdefault(storage._cdata, set())
            new = sum(count for region, count in regions.written.items() if region not in filled)
            filled.update(regions.written)
            return min(numel, new), returned

        return count


class _Regions(MetaReads):
    """Notes the regions of one storage that are copied into, and answers reads."""

    def __init__(self, storage: torch.UntypedStorage | None) -> None:
        super().__init__()
        self._storage = storage._cdata if storage is not None else None
        self.written: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage()._cdata == self._storage:
            into = args[0]
            self.written[(into.storage_offset(), tuple(into.shape), tuple(into.stride()))] = into.numel()
        return super().__torch_dispatch__(func, types, args, kwargs)
