"""Each way to hold a tensor that a graph reads: wrong after a reload without the repair, right with it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.standin import ReadsFreedMemory, StandinGraph, Warm, layer_of, model_of, parameter
from weightsync.storage.adopt import Adopter
from weightsync.storage.contract import Contract, What, compare
from weightsync.storage.owners import rewalk, walk
from weightsync.storage.pins import pin, places, slots_of
from weightsync.storage.sweep import Sweep, sweep

TABLE = torch.zeros(8)
TABLES: dict[str, torch.Tensor] = {}


class Registry:
    """A cache on a class."""

    version = 0
    workspace: Any = None


@functools.cache
def workspace() -> torch.Tensor:
    return value(Registry.version)


def value(version: int) -> torch.Tensor:
    return torch.full((8,), float(version))


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    scale: torch.Tensor


class Slots:
    __slots__ = ("never_set", "scale")

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale

    def run(self) -> None:
        """What a bound method needs."""


class Wrapper:
    """As triton_kernels' Tensor: no tensor itself, has one, and answers to every attribute."""

    def __init__(self, data: torch.Tensor) -> None:
        self.storage = Slots(data)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: nobody may ask")


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


class Kernel:
    """As a MoE kernel object: rebuilt by every reload, with config and helpers of its own."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.fused_experts = [Slots(scale)]


class Model(nn.Module):
    """An empty module; `held` is put on it."""

    held: Any


def closing(scale: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: scale


def defaulting(scale: torch.Tensor) -> Callable[..., torch.Tensor]:
    def run(x: int, w: torch.Tensor = scale, *, v: int = 0) -> torch.Tensor:
        return w

    return run


def parameter_with(scale: torch.Tensor) -> nn.Parameter:
    """As when a scale hangs on a weight."""
    weight = nn.Parameter(torch.zeros(1), requires_grad=False)
    weight.input_scale = scale  # type: ignore[attr-defined]
    return weight


ON_AN_ATTRIBUTE: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor], str]] = {
    # name: make the holder, read the tensor out of it, the path under `model.held`
    "attribute": (lambda t: t, lambda h: h, ""),
    "dict": (lambda t: {"w": t}, lambda h: h["w"], "['w']"),
    "ordered dict": (lambda t: collections.OrderedDict(w=t), lambda h: h["w"], "['w']"),
    "list": (lambda t: [1, t], lambda h: h[1], "[1]"),
    "tuple": (lambda t: (t,), lambda h: h[0], "[0]"),
    "named tuple": (lambda t: Pair(t, 1), lambda h: h.first, "[0]"),
    "deque": (lambda t: collections.deque([t]), lambda h: h[0], "[0]"),
    "partial, keyword": (lambda t: functools.partial(print, end=t), lambda h: h.keywords["end"], ".<keyword end>"),
    "partial, argument": (lambda t: functools.partial(print, t), lambda h: h.args[0], ".<arg 0>"),
    "closure": (closing, lambda h: h(), ".<closure scale>"),
    "default": (defaulting, lambda h: h(0), ".<default w>"),
    "bound method": (lambda t: Slots(t).run, lambda h: h.__self__.scale, ".<self>.scale"),
    "frozen dataclass": (Frozen, lambda h: h.scale, ".scale"),
    "frozen dataclass with slots": (FrozenSlots, lambda h: h.scale, ".scale"),
    "slots": (Slots, lambda h: h.scale, ".scale"),
    "wrapper": (Wrapper, lambda h: h.storage.scale, ".storage.scale"),
    "tensor on a parameter": (parameter_with, lambda h: h.input_scale, ".input_scale"),
    "rebuilt kernel object": (Kernel, lambda h: h.fused_experts[0].scale, ".fused_experts[0].scale"),
    "nested": (lambda t: {0: [functools.partial(closing(t))]}, lambda h: h[0][0](), "[0][0].<func>.<closure scale>"),
}


def on_an_attribute(make: Callable[[torch.Tensor], Any]) -> Callable[[Model, int], None]:
    return lambda model, version: setattr(model, "held", make(value(version)))


def replace_parameter(model: Model, version: int) -> None:
    model.held = nn.Parameter(value(version), requires_grad=False)


def rename_parameter(model: Model, version: int) -> None:
    """As layers that load `w13_weight_packed` and compute with `w13_weight`."""
    if hasattr(model, "held"):
        del model.held
    model.packed = nn.Parameter(value(version) * 2, requires_grad=False)
    model.held = nn.Parameter(model.packed / 2, requires_grad=False)
    del model.packed


def rebind_data(model: Model, version: int) -> None:
    """As Marlin's bias."""
    if not hasattr(model, "held"):
        model.held = nn.Parameter(value(0), requires_grad=False)
    model.held.data = value(version)


def register_buffer(model: Model, version: int) -> None:
    model.register_buffer("held", value(version), persistent=False)


def set_global(_: Model, version: int) -> None:
    global TABLE
    TABLE = value(version)


def set_in_a_global(_: Model, version: int) -> None:
    TABLES["w"] = value(version)


def set_on_a_class(_: Model, version: int) -> None:
    Registry.workspace = [value(version)]


def fill_a_cache(_: Model, version: int) -> None:
    Registry.version = version
    workspace.cache_clear()
    workspace()


HERE = __name__
KINDS: dict[str, tuple[Callable[[Model, int], None], Callable[[Model], torch.Tensor], str]] = {
    # name: load a version, read the tensor, its path
    **{
        name: (on_an_attribute(make), (lambda model, read=read: read(model.held)), f"model.held{path}")  # type: ignore[misc]
        for name, (make, read, path) in ON_AN_ATTRIBUTE.items()
    },
    "parameter replaced": (replace_parameter, lambda model: model.held, "model.held"),
    "parameter renamed": (rename_parameter, lambda model: model.held, "model.held"),
    "data rebound": (rebind_data, lambda model: model.held, "model.held"),
    "buffer, not persistent": (register_buffer, lambda model: model.held, "model.held"),
    "global": (set_global, lambda _: TABLE, f"{HERE}:TABLE"),
    "dict in a global": (set_in_a_global, lambda _: TABLES["w"], f"{HERE}:TABLES['w']"),
    "class attribute": (set_on_a_class, lambda _: Registry.workspace[0], f"{HERE}:Registry.workspace[0]"),
    "cache of a function": (fill_a_cache, lambda _: workspace(), f"{HERE}:workspace.<cache 0>[()]"),
}
#: No walk finds these: a sweep of all objects does, which takes seconds in a process that has run many tests. One of them is quick.
SWEPT = ("dict in a global", "class attribute", "cache of a function")


@pytest.fixture(autouse=True)
def leave_no_globals() -> Any:
    yield
    set_global(Model(), 0)
    TABLES.clear()
    Registry.workspace = None
    workspace.cache_clear()


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SWEPT else []) for kind in KINDS])
def test_a_graph_reads_freed_memory_without_a_pin_old_values_without_the_repair_and_new_ones_with_it(kind: str) -> None:
    load, read, path = KINDS[kind]
    model = Model()

    # Stock: the reload lets go of what the graph reads.
    load(model, 1)
    graph = StandinGraph({"w": read(model)})
    assert torch.equal(graph.replay()["w"], value(1))  # type: ignore[arg-type]
    load(model, 2)
    gc.collect()
    with pytest.raises(ReadsFreedMemory):
        graph.replay()

    # Held, but not repaired: old values, and the contract says where from.
    model = Model()
    load(model, 1)
    graph = StandinGraph({"w": read(model)})
    found = sweep({"model": model}) if path.startswith(HERE) else Sweep(walk(model, "model"), (), ())
    pins = pin(found.everything)
    contract = Contract.seal(slots_of(pins, graph.census()))
    names, address, saved = found.globals, read(model).data_ptr(), set(model.state_dict())
    assert contract.slots[0].paths[0] == path
    assert contract.slots[0].kernel == "kernel_of_w"
    del found
    load(model, 2)
    assert torch.equal(graph.replay()["w"], value(1))  # type: ignore[arg-type]
    verdict = compare(contract, places(rewalk({"model": model}, names), contract.places))
    assert [(fault.what, fault.path) for fault in verdict.faults] == [(What.MOVED, path)]

    # Repaired, reload after reload: graph and eager code read the new values at the address of the seal.
    adopter = Adopter(pins)
    for version in (2, 3, 4):
        load(model, version)
        done = adopter.adopt(rewalk({"model": model}, names))
        assert done.ok
        assert path in done.adopted
        assert done.refreshed == [path]
        assert torch.equal(graph.replay()["w"], value(version))  # type: ignore[arg-type]
        assert torch.equal(read(model), value(version))
        assert read(model).data_ptr() == address
        assert compare(contract, places(rewalk({"model": model}, names), contract.places)).ok
    assert set(model.state_dict()) == saved
    assert ("held" in model._non_persistent_buffers_set) == (kind == "buffer, not persistent")


@pytest.mark.parametrize("kind", ON_AN_ATTRIBUTE)
def test_what_processing_makes_anew_is_freed_or_old_after_vllms_reload_and_right_after_ours(kind: str) -> None:
    """The same kinds where they arise: `process_weights_after_loading`, in vLLM's layerwise reload."""
    pytest.importorskip("vllm")
    make, read, path = ON_AN_ATTRIBUTE[kind]

    def process(layer: Any) -> None:
        layer.held = make(layer.weight.data * 2)

    def warm_of(version: int) -> Warm:
        return Warm(lambda: model_of(layer=layer_of(process, weight=parameter(8))), {"layer.weight": value(version)})

    stock = warm_of(1)
    graph = StandinGraph({"w": read(stock.model.layer.held)})
    stock.release()
    stock.stock({"layer.weight": value(2)})
    gc.collect()
    if kind == "tensor on a parameter":
        assert torch.equal(graph.replay()["w"], value(2))  # type: ignore[arg-type]  # of the old weights
    else:
        with pytest.raises(ReadsFreedMemory):
            graph.replay()

    warm = warm_of(1)
    graph = StandinGraph({"w": read(warm.model.layer.held), "weight": warm.model.layer.weight})
    address, saved = read(warm.model.layer.held).data_ptr(), set(warm.model.state_dict())
    for version in (2, 3):
        done = warm.ours({"layer.weight": value(version)})
        assert done.ok and f"model.layer.held{path}" in done.adopted
        seen: Any = graph.replay()
        assert torch.equal(seen["w"], value(2 * version)) and torch.equal(seen["weight"], value(version))
        assert torch.equal(read(warm.model.layer.held), seen["w"]) and read(warm.model.layer.held).data_ptr() == address
        assert warm.verdict().ok and set(warm.model.state_dict()) == saved


@pytest.mark.parametrize("hide", ["set", "generator"])
def test_what_no_path_leads_to_is_reported_and_fails_the_contract(hide: str) -> None:
    def frame() -> Any:
        held = value(1)
        yield held

    model = Model()
    if hide == "set":
        model.held = {value(1)}
        tensor = next(iter(model.held))
    else:
        model.held = frame()
        tensor = next(model.held)
    graph = StandinGraph({"w": tensor})
    found = sweep({"model": model})
    assert any(other is tensor for other in found.anonymous)
    pins = pin(found.everything, found.anonymous)
    contract = Contract.seal(slots_of(pins, graph.census()))
    verdict = compare(contract, {})
    assert [fault.what for fault in verdict.faults] == [What.ANONYMOUS]
    del tensor, found
    model.held = None
    gc.collect()
    assert torch.equal(graph.replay()["w"], value(1))  # type: ignore[arg-type]  # held all the same
