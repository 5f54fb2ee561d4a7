"""Which layers an update is copies of, learned from one that went the general way: a model with loaders like vLLM's, a real guard.

Not covered: vLLM's own layers (`test_kinds.py`, where the way back is planned), CUDA (`benchmarks.apply`).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from weightsync.client.source import offer
from weightsync.errors import ApplyFailed
from weightsync.transport.packing import plan_buckets
from weightsync.worker import loadmap, planned, vllm_compat
from weightsync.worker.guard import Guard
from weightsync.worker.planned import AGAIN, Planner
from weightsync.worker.staging import Staged

CPU = torch.device("cpu")
CONFIG = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
ROWS = 4


class UnquantizedMethod:
    """Keeps what is loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is made of it."""


class Sums(UnquantizedMethod):
    """Makes something of it, beside it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.total.copy_(layer.weight.sum())


class UnquantizedSums(Sums):
    """The like, and one can't tell by its name."""


class FlippedLinearMethod(UnquantizedMethod):
    """Stands for a method that quantises: other numbers, laid out otherwise, and a scale."""

    def process_weights_after_loading(self, layer: Any) -> None:
        scale = layer.weight.abs().amax(1)
        made = (layer.weight / scale[:, None] * 127).to(torch.int8)
        layer.weight = nn.Parameter(made.t(), requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)


FlippedLinearMethod.__module__ = "vllm.model_executor.layers.quantization.online.fp8"


class Layer(nn.Module):
    """A linear layer of two parts, as gate and up are."""

    def __init__(self, method: Any = None, **more: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * ROWS, 3), requires_grad=False)
        if method is not None:
            self.quant_method = method
        for name, tensor in more.items():
            self.register_buffer(name, tensor, persistent=False)


class Experts(nn.Module):
    """Two experts whose kernel wants up before gate."""

    def __init__(self, changed: bool = True) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(2, 2 * ROWS, 3), requires_grad=False)
        self.quant_method, self.changed = UnquantizedMethod(), changed


class Model(nn.Module):
    """Its loader puts `NAME.0` and `NAME.1` into the halves of a layer; `process` is what a load is followed by."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            layer, part = self.layers[name.split(".")[0]], int(name.split(".")[1])
            if isinstance(layer, Experts):
                layer.w13_weight.data[part // 2, part % 2 * ROWS :][:ROWS].copy_(tensor)
            else:
                layer.weight.data[part * ROWS :][:ROWS].copy_(tensor)

    def process(self) -> None:
        for layer in self.layers.values():
            if isinstance(layer, Experts) and layer.changed:
                layer.w13_weight.data.copy_(torch.cat(layer.w13_weight.data.split(ROWS, 1)[::-1], 1))
            elif (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)


def twin(layers: dict[str, nn.Module]) -> Model:
    """As the model was before anything was loaded."""
    fresh = {name: Experts() if isinstance(layer, Experts) else Layer() for name, layer in layers.items()}
    return Model(dict(fresh)).to("meta")


class Site:
    """A live model that has been loaded once, and updates of it."""

    def __init__(self, **layers: nn.Module) -> None:
        self.model, self.kinds = Model(layers), layers
        self.sent = [f"{name}.{part}" for name, layer in layers.items() for part in range(4 if isinstance(layer, Experts) else 2)]
        self.map = loadmap.record(twin(layers), offer(self.tensors(0)).manifest.tensors)
        self.load(self.tensors(0))
        self.guard = Guard(self.model, None, CPU, graphs=False)
        self.planner = Planner(self.model, self.guard, CONFIG)

    def tensors(self, seed: int, still: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
        """Of this seed, but for layers that stay as they are."""
        made = {}
        for name in self.sent:
            random = torch.Generator().manual_seed(100 * (0 if name.split(".")[0] in still else seed) + len(made))
            made[name] = torch.randn(ROWS, 3, generator=random)
        return made

    def staged(self, tensors: dict[str, torch.Tensor]) -> Staged:
        offered = offer(tensors)
        plan = plan_buckets(offered.manifest, 4096)
        data = torch.zeros(plan.stream_bytes, dtype=torch.uint8)
        for spec, offset in zip(offered.manifest.tensors, plan.offsets, strict=True):
            data[offset : offset + spec.nbytes].copy_(tensors[spec.name].view(-1).view(torch.uint8))
        return Staged(offered.manifest, plan.offsets, data, self.map, frozenset())

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """The general way. Live storage keeps its place, as behind a reload."""
        fresh = {name: Experts() if isinstance(layer, Experts) else Layer() for name, layer in self.kinds.items()}
        loaded = Model(dict(fresh))
        loaded.load_weights(tensors.items())
        for name, layer in self.kinds.items():
            loaded.layers[name].quant_method = getattr(layer, "quant_method", None)  # type: ignore[assignment]
            for buffer, tensor in layer._buffers.items():
                loaded.layers[name].register_buffer(buffer, tensor.clone() if tensor is not None else None)
        loaded.process()
        for name, layer in self.kinds.items():
            for key, tensor in {**loaded.layers[name]._parameters, **loaded.layers[name]._buffers}.items():
                assert tensor is not None
                if (live := getattr(layer, key, None)) is None or live.shape != tensor.shape:
                    setattr(layer, key, nn.Parameter(tensor.data, requires_grad=False))
                else:
                    live.data.copy_(tensor.data)

    def update(self, seed: int, still: tuple[str, ...] = ()) -> planned.Planned | None:
        """One that went the general way, and what was learned of it."""
        incoming = self.staged(self.tensors(seed, still))
        assert self.planner.find("key") is None
        self.planner.watch("key", incoming)
        self.load(self.tensors(seed, still))
        self.planner.proved()
        self.planner.learn(incoming)
        return self.planner.find("key")

    def held(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.clone() for name, tensor in {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}.items()
        }

    def left(self, found: planned.Planned | None) -> set[str]:
        """Layers that are taken apart for the next update."""
        return {layer.removeprefix("layers.") for layer in (found.rest.layers if found is not None else self.map.layers)}


def test_layers_that_keep_what_is_loaded_are_written_as_the_general_way_writes_them() -> None:
    site = Site(
        norm=Layer(), dense=Layer(UnquantizedMethod()), experts=Experts(), kept=Experts(changed=False), eight=Layer(FlippedLinearMethod())
    )
    found = site.update(1)
    assert found is not None and site.left(found) == set() and found.layers == 5 and len(found.doubles) == 1
    other = Site(
        norm=Layer(), dense=Layer(UnquantizedMethod()), experts=Experts(), kept=Experts(changed=False), eight=Layer(FlippedLinearMethod())
    )
    for seed in (2, 3):
        left = found.write(site.staged(site.tensors(seed)))
        assert left.unused == set(range(len(site.sent))) and not left.load_map.writes
        other.load(site.tensors(seed))
        held, want = site.held(), other.held()
        assert held.keys() == want.keys() and all(torch.equal(held[name], want[name]) for name in held)


@pytest.mark.parametrize("method", [Sums(), UnquantizedSums()])
def test_a_layer_of_which_something_is_made_is_taken_apart(method: Any) -> None:
    site = Site(dense=Layer(UnquantizedMethod()), sums=Layer(method, total=torch.zeros(())))
    found = site.update(1)
    assert found is not None and site.left(found) == {"sums"}
    before = site.held()["layers.sums.weight"]
    left = found.write(site.staged(site.tensors(2)))
    assert {site.sent[index] for index in left.unused} == {"dense.0", "dense.1"} and left.load_map.part
    assert torch.equal(site.held()["layers.sums.weight"], before), "that is left to the reload"


def test_what_changes_and_is_no_layers_own_leaves_all_to_the_general_way() -> None:
    site = Site(dense=Layer(UnquantizedMethod()))
    site.model.mean = torch.zeros(3)  # type: ignore[assignment]
    site.guard.seal()
    load = site.load

    def merging(tensors: dict[str, torch.Tensor]) -> None:
        load(tensors)
        site.model.mean.copy_(site.model.layers["dense"].weight.mean(0))  # type: ignore[operator, union-attr]

    site.load = merging  # type: ignore[method-assign]
    assert site.update(1) is None


def test_of_what_stays_the_same_nothing_is_learned_but_where_nobody_could_make_something_of_it() -> None:
    site = Site(norm=Layer(), dense=Layer(UnquantizedMethod()))
    assert site.left(site.update(1, still=("norm", "dense"))) == {"dense"}
    like = Site(one=Layer(UnquantizedMethod()), other=Layer(UnquantizedMethod()))
    assert site.left(like.update(1, still=("other",))) == set(), "one of its kind has changed"


def test_a_layer_that_holds_something_else_than_was_loaded_is_taken_apart() -> None:
    site = Site(one=Layer(UnquantizedMethod()), other=Layer(UnquantizedMethod()))
    load = site.load

    def spoiling(tensors: dict[str, torch.Tensor]) -> None:
        load(tensors)
        site.model.layers["other"].weight.data[0, 0] += 1  # type: ignore[index, union-attr]

    site.load = spoiling  # type: ignore[method-assign]
    assert site.left(site.update(1)) == {"other"}


def test_one_parameter_of_two_layers_is_planned_only_if_both_keep_it() -> None:
    head = Layer(Sums(), total=torch.zeros(()))
    site = Site(dense=Layer(UnquantizedMethod()), norm=Layer())
    site.model.head = head
    head.weight = site.model.layers["dense"].weight  # type: ignore[assignment, union-attr]
    site.guard.seal()
    assert site.left(site.update(1)) == {"dense"}


def test_after_so_many_updates_it_is_learned_anew() -> None:
    site = Site(dense=Layer(UnquantizedMethod()))
    found = site.update(1)
    assert found is not None
    for _ in range(AGAIN):
        assert site.planner.find("key") is found
        found.write(site.staged(site.tensors(2)))
    assert site.planner.find("key") is None and site.update(3) is not None


def test_a_seal_and_a_failure_forget_what_was_learned() -> None:
    site = Site(dense=Layer(UnquantizedMethod()))
    assert site.update(1) is not None
    site.guard.seal()
    assert site.planner.find("key") is None
    assert site.update(2) is not None
    site.planner.forget()
    assert site.planner.find("key") is None
    incoming = site.staged(site.tensors(3))
    site.planner.watch("key", incoming)
    site.planner.proved()
    site.guard.seal()  # captured anew by that update
    site.planner.learn(incoming)
    assert site.planner.find("key") is None


def test_a_double_that_makes_something_else_is_refused_before_it_is_written() -> None:
    site = Site(eight=Layer(FlippedLinearMethod()))
    found = site.update(1)
    assert found is not None and len(found.doubles) == 1
    before = site.held()
    site.kinds["eight"].quant_method.process_weights_after_loading = lambda layer: None  # type: ignore[union-attr]
    with pytest.raises(ApplyFailed, match="laid out otherwise"):
        found.write(site.staged(site.tensors(2)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in site.held().items())


def test_what_a_method_keeps_for_itself_is_no_part_of_a_double() -> None:
    layer = Layer(FlippedLinearMethod())
    layer._already_called_process_weights_after_loading = True  # type: ignore[assignment]
    given = torch.randn(2 * ROWS, 3)
    made = vllm_compat.processed(layer, {"weight": given})
    assert set(made) == {"weight", "scale"} and made["weight"].dtype == torch.int8
    assert layer.weight.dtype == torch.float32 and not hasattr(layer, "scale"), "the layer is as it was"
