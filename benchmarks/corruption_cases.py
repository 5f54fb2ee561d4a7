"""Corruptions of an update, drawn by seed: what the trainer offers, what arrives, what loading does, what lies in live storage.

A case draws a `Made` for a `Site`; the same `Made` is put into an engine with weightsync and into a stock one. Where each comes from
(numbers are those of public reports, in words): tensors dropped between trainer and engine; gate and up of one expert that never come
together; square stacks taken for transposed ones; a router's bias cast on its way; a receive buffer that is used again while a loader still
refers to it; shards sent twice; processing that is skipped in a reload; scales that are kept as they were; post-processing that moves
a parameter away from where captured graphs read it, or lays it out in another order.

Not covered: corruptions between controller and engines, and of versions (the fleet's tests have those).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from weightsync.transport.digest import as_bytes

Tensors = dict[str, torch.Tensor]
Pairs = Iterator[tuple[str, torch.Tensor]]

#: Parts of one parameter of the engine's: fused projections, and experts'.
_FUSED = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up"))
_EXPERT = ".mlp.experts."


@dataclass
class Site:
    """What a corruption is drawn for.

    Attributes:
        held, target: the tensors of the checkpoint that the engine holds, and those that the update brings.
        chance: what it is drawn with.
        model: the live model.
        others: live parameters as an engine that holds `held` has them.
    """

    held: Tensors
    target: Tensors
    chance: random.Random
    model: Any
    others: Tensors = field(default_factory=dict)

    def pick(self, names: list[str]) -> str:
        return self.chance.choice(sorted(names))

    def alike(self, name: str, among: list[str]) -> str | None:
        """Another tensor of the same shape and dtype; None where there is none."""
        like = self.target[name]
        found = [n for n in among if n != name and self.target[n].shape == like.shape and self.target[n].dtype == like.dtype]
        return self.pick(found) if found else None

    @property
    def halves(self) -> list[str]:
        """Tensors that are a part of a parameter: of experts where there are any, else of fused projections."""
        experts = [name for name in self.target if _EXPERT in name]
        return experts or [name for name in self.target if name.endswith(_FUSED)]

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """Live parameters whose memory Python sees, of more than one element."""
        return {name: p for name, p in self.model.named_parameters() if p.numel() > 1 and p.layout == torch.strided}


@dataclass
class Made:
    """One corruption.

    Attributes:
        names: of what is corrupted, tensors or parameters; a report that has one of them has named it.
        offered: what the trainer offers; the target when None.
        arrives: what comes over the wire in its place; the same when None.
        everywhere: all engines of a fleet get it.
        values: the trainer itself gives other values under right names, shapes and dtypes.
        before: done to the live model before the update.
        stream: changes what the model's own `load_weights` is given.
        loading: active while the engine loads.
        loaded: done to the live model when all is loaded, before anything looks at it.
        blind: nothing that would repair storage does so.
        late: done to the live model behind the commit.
    """

    names: tuple[str, ...]
    offered: Tensors | None = None
    arrives: Tensors | None = None
    everywhere: bool = False
    values: bool = False
    before: Callable[[], None] | None = None
    stream: Callable[[Pairs], Pairs] | None = None
    loading: Callable[[], AbstractContextManager[Any]] = nullcontext
    loaded: Callable[[], None] | None = None
    blind: bool = False
    late: Callable[[], None] | None = None


Case = Callable[[Site], Made | None]


# --- what the trainer offers ---------------------------------------------------------------------


def dropped(site: Site) -> Made:
    name = site.pick(list(site.target))
    return Made((name,), offered={n: t for n, t in site.target.items() if n != name}, everywhere=True)


def half_missing(site: Site) -> Made:
    name = site.pick(site.halves)
    return Made((name,), offered={n: t for n, t in site.target.items() if n != name}, everywhere=True)


def _matrices(site: Site, square: bool) -> list[str]:
    return [n for n, t in site.target.items() if t.dim() == 2 and min(t.shape) > 1 and (t.shape[0] == t.shape[1]) is square]


def transposed(site: Site) -> Made:
    name = site.pick(_matrices(site, square=False))
    return Made((name,), offered=site.target | {name: site.target[name].t().contiguous()}, everywhere=True)


def cast(site: Site) -> Made:
    name = site.pick([n for n, t in site.target.items() if t.is_floating_point()])
    dtype = site.chance.choice([d for d in (torch.float16, torch.float32) if d is not site.target[name].dtype])
    return Made((name,), offered=site.target | {name: site.target[name].to(dtype)}, everywhere=True)


def not_a_number(site: Site) -> Made:
    name = site.pick([n for n, t in site.target.items() if t.is_floating_point()])
    spoilt = site.target[name].clone()
    spoilt.view(-1)[site.chance.randrange(spoilt.numel())] = site.chance.choice([float("nan"), float("inf")])
    return Made((name,), offered=site.target | {name: spoilt}, everywhere=True)


def transposed_square(site: Site) -> Made:
    name = site.pick(_matrices(site, square=True))
    return Made((name,), offered=site.target | {name: site.target[name].t().contiguous()}, everywhere=True, values=True)


def _pair(site: Site) -> tuple[str, str] | None:
    name = site.pick(site.halves)
    other = site.alike(name, site.halves)
    return None if other is None else (name, other)


def exchanged(site: Site) -> Made | None:
    if (pair := _pair(site)) is None:
        return None
    one, other = pair
    return Made(pair, offered=site.target | {one: site.target[other], other: site.target[one]}, everywhere=True, values=True)


# --- what arrives --------------------------------------------------------------------------------


def flipped_on_the_wire(site: Site) -> Made:
    name = site.pick(list(site.target))
    return Made((name,), arrives=site.target | {name: _flipped(site.target[name], site.chance)})


def swapped_on_the_wire(site: Site) -> Made | None:
    if (pair := _pair(site)) is None:
        return None
    one, other = pair
    return Made(pair, arrives=site.target | {one: site.target[other], other: site.target[one]})


def stale_on_the_wire(site: Site) -> Made:
    """A run of 64 bytes or more of a tensor is what was there before."""
    name = site.pick([n for n in site.target if not torch.equal(as_bytes(site.target[n]), as_bytes(site.held[n]))])
    mixed, old = site.target[name].clone(), as_bytes(site.held[name])
    into = as_bytes(mixed)
    size = min(len(into), 64 << site.chance.randrange(6))
    first = site.chance.randrange(len(into) - size + 1)
    into[first : first + size] = old[first : first + size]
    return Made((name,), arrives=site.target | {name: mixed})


def _flipped(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    made = tensor.clone()
    _flip(made, chance)
    return made


def _flip(tensor: torch.Tensor, chance: random.Random) -> None:
    data = as_bytes(tensor)
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


# --- what loading does ---------------------------------------------------------------------------


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
    if (pair := _pair(site)) is None:
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


# --- what lies in storage ------------------------------------------------------------------------


def graph_reads_old(site: Site) -> Made:
    """Before the update a parameter has come to lie elsewhere than where graphs that were captured read it."""
    return _moved(site, blind=False)


def graph_reads_old_unrepaired(site: Site) -> Made:
    return _moved(site, blind=True)


def _moved(site: Site, blind: bool) -> Made:
    name = site.pick(list(site.live))
    return Made((name,), before=lambda: _move(site.live[name]), blind=blind)


def _move(parameter: Any) -> None:
    parameter.data = parameter.data.clone()


def stale_stride(site: Site) -> Made:
    """A parameter has the right bytes in the right place, and strides of another layout."""
    name = site.pick([name for name, p in site.live.items() if p.dim() > 1 and min(p.shape[-2:]) > 1])

    def relay() -> None:
        parameter = site.live[name]
        *outer, rows, columns = parameter.shape
        strides = [*parameter.stride()[: len(outer)], 1, rows] if rows * columns else list(parameter.stride())
        parameter.data = parameter.data.as_strided((*outer, rows, columns), strides, parameter.storage_offset())

    return Made((name,), loaded=relay)


def flipped_live(site: Site) -> Made:
    name = site.pick(list(site.live))
    return Made((name,), late=lambda: _flip_live(site.live[name], site.chance))


def _flip_live(parameter: Any, chance: random.Random) -> None:
    with torch.inference_mode(False), torch.no_grad():
        flat = parameter.data.reshape(-1)[:1] if not parameter.data.is_contiguous() else parameter.data
        _flip(flat, chance)


def swapped_live(site: Site) -> Made:
    """The two halves of a parameter's rows are changed about."""
    name = site.pick([name for name, p in site.live.items() if p.dim() > 1 and p.shape[-2] % 2 == 0 and p.is_contiguous()])

    def swap() -> None:
        with torch.no_grad():
            data = site.live[name].data
            data.copy_(data.roll(data.shape[-2] // 2, dims=-2))

    return Made((name,), late=swap)


def half_stale_live(site: Site) -> Made:
    """Half of the rows of a parameter, of an expert where there are any, are those of before."""
    live = {name: p for name, p in site.live.items() if p.dim() > 1 and p.shape[-2] > 1}
    name = site.pick([name for name in live if "expert" in name] or list(live))

    def stale() -> None:
        with torch.no_grad():
            data, old = site.live[name].data, site.others[name]
            if data.dim() == 3:
                index = site.chance.randrange(data.shape[0])
                data, old = data[index], old[index]
            half = data.shape[0] // 2
            data[:half].copy_(old[:half])

    return Made((name,), late=stale)


def scale_stale_live(site: Site) -> Made | None:
    scales = [name for name in site.live if name.endswith("_scale")]
    if not scales:
        return None
    name = site.pick(scales)

    def stale() -> None:
        with torch.no_grad():
            site.live[name].data.copy_(site.others[name])

    return Made((name,), late=stale)


def moved_late(site: Site) -> Made:
    name = site.pick(list(site.live))
    return Made((name,), late=lambda: _move(site.live[name]))


#: By what is done, and where: trainer, wire, loading, storage, or live storage behind the commit.
CASES: dict[str, tuple[str, Case]] = {
    "tensor dropped": ("trainer", dropped),
    "half an expert (or fused layer) missing": ("trainer", half_missing),
    "tensor transposed": ("trainer", transposed),
    "tensor cast to another dtype": ("trainer", cast),
    "one element NaN or infinite": ("trainer", not_a_number),
    "square tensor transposed": ("trainer", transposed_square),
    "two tensors exchanged": ("trainer", exchanged),
    "bit flipped": ("wire", flipped_on_the_wire),
    "shards swapped": ("wire", swapped_on_the_wire),
    "bytes of the update before": ("wire", stale_on_the_wire),
    "tensor lost before the loader": ("loading", lost_before_loading),
    "tensor comes again with old values": ("loading", twice),
    "loader passes over a shard": ("loading", passed_over),
    "loader's write of a shard lost": ("loading", write_lost),
    "loader swaps two shards": ("loading", swapped_by_loader),
    "half an expert (or fused layer) stale": ("loading", half_stale),
    "scale not refreshed": ("loading", scale_stale),
    "processing of a layer skipped": ("loading", processing_skipped),
    "graph reads old storage": ("storage", graph_reads_old),
    "graph reads old storage; nothing repairs": ("storage", graph_reads_old_unrepaired),
    "stale stride": ("storage", stale_stride),
    "bit flipped behind the commit": ("live", flipped_live),
    "shards swapped behind the commit": ("live", swapped_live),
    "half an expert (or parameter) old behind the commit": ("live", half_stale_live),
    "scale old behind the commit": ("live", scale_stale_live),
    "storage moved behind the commit": ("live", moved_late),
}
