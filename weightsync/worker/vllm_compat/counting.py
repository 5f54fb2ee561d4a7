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
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from weightsync.worker.meta_reads import MetaReads


class Counter:
    """Takes the place of vLLM's `get_numel_loaded` for one reload."""

    def __init__(self) -> None:
        self._filled: dict[int, set[Any]] = {}
        self._held: list[torch.UntypedStorage] = []  # so that no identity is used twice

    def count(self, loader: Callable[..., object], arguments: Any) -> tuple[int, object]:
        """Run a loader on the meta parameter among its arguments; how many elements it filled that were not, and what it returned."""
        parameter = arguments.arguments.get("param")
        storage = parameter.untyped_storage() if isinstance(parameter, torch.Tensor) else None
        with _Regions(storage) as regions:
            returned = loader(*arguments.args, **arguments.kwargs)
        if storage is None:
            return regions.copied, returned
        numel = min(regions.copied, get_tensor_load_numel(parameter))
        if regions.written:
            if storage._cdata not in self._filled:
                self._held.append(storage)
            filled = self._filled.setdefault(storage._cdata, set())
            numel = min(numel, sum(count for region, count in regions.written.items() if region not in filled))
            filled.update(regions.written)
        return numel, returned


class _Regions(MetaReads):
    """Counts the elements that are copied, notes which regions of one storage they fill, and answers reads."""

    def __init__(self, storage: torch.UntypedStorage | None) -> None:
        super().__init__()
        self._storage = storage._cdata if storage is not None else None
        self.copied = 0
        self.written: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            into = args[0]
            self.copied += into.numel()
            if into.untyped_storage()._cdata == self._storage:
                self.written[(into.storage_offset(), tuple(into.shape), tuple(into.stride()))] = into.numel()
        return super().__torch_dispatch__(func, types, args, kwargs)
