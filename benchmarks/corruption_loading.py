"""Corruptions that happen while an engine loads: what the model's own loaders and processing do otherwise, in any engine of vLLM's.

Not covered: what the trainer, the wire and storage do (`corruption_cases`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.corruption_site import Made, Site
from weightsync.transport.digest import as_bytes


def lost_before_loading(site: Site) -> Made:
    """The loader is never given a tensor that has come."""
    name = site.pick(list(site.target))
    return Made((name,), stream=lambda pairs: (pair for pair in pairs if pair[0] != name))


def twice(site: Site) -> Made:
    """A tensor comes once more at the end, with the values of before."""
    name = site.pick(list(site.target))

    return Made((name,), stream=lambda pairs: itertools.chain(pairs, [(name, site.held[name])]))


def passed_over(site: Site) -> Made:
    """A loader does nothing with a shard."""
    name = site.pick(site.halves)
    return Made((name,), loading=lambda: _not_counted(site.target[name]))


def write_lost(site: Site) -> Made:
    """A loader has gone through a shard, and its bytes never come to lie in the parameter."""
    name = site.pick(site.halves)
    return Made((name,), loading=lambda: _loader([(site.target[name], None)]))


def swapped_by_loader(site: Site) -> Made | None:
    if (pair := site.pair()) is None:
        return None
    one, other = (site.target[name] for name in pair)
    return Made(pair, loading=lambda: _loader([(one, other), (other, one)]))


def half_stale(site: Site) -> Made:
    """A loader is given the bytes of before for a shard: its memory was used again."""
    name = site.pick(site.halves)
    return Made((name,), loading=lambda: _loader([(site.target[name], site.held[name])]))


def scale_stale(site: Site) -> Made | None:
    scales = [name for name in site.target if name.endswith("_scale")]
    if not scales:
        return None
    name = site.pick(scales)
    return Made((name,), loading=lambda: _loader([(site.target[name], site.held[name])]))


def processing_skipped(site: Site) -> Made:
    """What a kernel makes of a layer's weights is not made anew."""
    # What an embedding's method packs is read by a head that is tied to it alone.
    paths = [path for path, layer in site.model.named_modules() if _processes(layer) and not path.endswith("embed_tokens")]
    path = site.pick(paths)
    layer = site.model.get_submodule(path)
    owner: Any = type(layer.quant_method)
    stock = owner.process_weights_after_loading

    def process(self: Any, given: Any, *rest: Any) -> None:
        if given is not layer:
            stock(self, given, *rest)

    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    stem, _, last = path.rpartition(".")
    names = (path, *(f"{stem}.{part}" for part in parts.get(last, ())))
    return Made(names, loading=lambda: patch.object(owner, "process_weights_after_loading", process))


def _processes(layer: Any) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(layer, "quant_method", None)
    own = type(method).process_weights_after_loading if isinstance(method, QuantizeMethodBase) else None
    return own is not None and own is not QuantizeMethodBase.process_weights_after_loading


def _loader(exchange: list[tuple[torch.Tensor, torch.Tensor | None]]) -> AbstractContextManager[Any]:
    """A parameter's loader that is given one of these tensors takes the other one instead, or does nothing."""
    from vllm.model_executor.model_loader.reload import layerwise

    stock = layerwise._get_original_loader

    def original(parameter: Any) -> Callable[..., Any]:
        loader = stock(parameter)

        @functools.wraps(loader)
        def other(*args: Any, **kwargs: Any) -> Any:
            loaded = _loaded((*args, *kwargs.values()))
            found = [instead for tensor, instead in exchange if _same(loaded, tensor)]
            if not found:
                return loader(*args, **kwargs)
            if found[0] is None:
                return True
            args = tuple(found[0] if value is loaded else value for value in args)
            return loader(*args, **{key: found[0] if value is loaded else value for key, value in kwargs.items()})

        return other

    return patch.object(layerwise, "_get_original_loader", original)


@contextlib.contextmanager
def _not_counted(tensor: torch.Tensor) -> Iterator[None]:
    """What is loaded is counted by a first run of the loader; one that does nothing with a tensor counts nothing either."""
    from vllm.model_executor.model_loader.reload import layerwise

    from weightsync.worker.vllm_compat.counting import Counter

    def around(stock: Any) -> Any:
        def count(*given: Any) -> Any:
            return (0, True) if _same(_loaded(given[-1].arguments.values()), tensor) else stock(*given)

        return count

    with (
        patch.object(Counter, "count", around(Counter.count)),
        patch.object(layerwise, "get_numel_loaded", around(layerwise.get_numel_loaded)),
        _loader([(tensor, None)]),
    ):
        yield


def _loaded(values: Any) -> Any:
    """What a loader is given beside the parameter."""
    return [value for value in values if isinstance(value, torch.Tensor)][1]


def _same(value: Any, tensor: torch.Tensor) -> bool:
    alike = isinstance(value, torch.Tensor) and not value.is_meta and value.shape == tensor.shape and value.dtype == tensor.dtype
    return alike and torch.equal(as_bytes(value.contiguous()), as_bytes(tensor))
