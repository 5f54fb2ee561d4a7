"""Corruptions of an update, drawn by seed: what the trainer offers, what arrives, what loading does, what lies in live storage.

A case draws a `Made` for a `Site`; the same `Made` is put into an engine with weightsync and into a stock one. Where each comes from
(numbers are those of public reports, in words): tensors dropped between trainer and engine; gate and up of one expert that never come
together; square stacks taken for transposed ones; a router's bias cast on its way; a receive buffer that is used again while a loader still
refers to it; shards sent twice; processing that is skipped in a reload; scales that are kept as they were; post-processing that moves
a parameter away from where captured graphs read it, or lays it out in another order.

Not covered: corruptions between controller and engines, and of versions (the fleet's tests have those).
"""

from __future__ import annotations

import random
from typing import Any

import torch

from benchmarks import corruption_loading as loading
from benchmarks.corruption_site import Case, Made, Site
from weightsync.transport.digest import as_bytes

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


def exchanged(site: Site) -> Made | None:
    if (pair := site.pair()) is None:
        return None
    one, other = pair
    return Made(pair, offered=site.target | {one: site.target[other], other: site.target[one]}, everywhere=True, values=True)


# --- what arrives --------------------------------------------------------------------------------


def flipped_on_the_wire(site: Site) -> Made:
    name = site.pick(list(site.target))
    return Made((name,), arrives=site.target | {name: _flipped(site.target[name], site.chance)})


def swapped_on_the_wire(site: Site) -> Made | None:
    if (pair := site.pair()) is None:
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
    "tensor lost before the loader": ("loading", loading.lost_before_loading),
    "tensor comes again with old values": ("loading", loading.twice),
    "loader passes over a shard": ("loading", loading.passed_over),
    "loader's write of a shard lost": ("loading", loading.write_lost),
    "loader swaps two shards": ("loading", loading.swapped_by_loader),
    "half an expert (or fused layer) stale": ("loading", loading.half_stale),
    "scale not refreshed": ("loading", loading.scale_stale),
    "processing of a layer skipped": ("loading", loading.processing_skipped),
    "graph reads old storage": ("storage", graph_reads_old),
    "graph reads old storage; nothing repairs": ("storage", graph_reads_old_unrepaired),
    "stale stride": ("storage", stale_stride),
    "bit flipped behind the commit": ("live", flipped_live),
    "shards swapped behind the commit": ("live", swapped_live),
    "half an expert (or parameter) old behind the commit": ("live", half_stale_live),
    "scale old behind the commit": ("live", scale_stale_live),
    "storage moved behind the commit": ("live", moved_late),
}
