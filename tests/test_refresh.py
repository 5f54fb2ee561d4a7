"""What a reload must compute anew beside the layers' own parameters, through vLLM's real layerwise reload."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

CONFIG = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
SIZE = 8


@pytest.fixture(scope="module")
def compat() -> Any:
    """Imported late: loading vLLM takes seconds."""
    pytest.importorskip("vllm")
    from weightsync.worker import vllm_compat

    return vllm_compat


@pytest.fixture(autouse=True)
def plain_context(compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are no engine's: there is no configuration to set."""
    monkeypatch.setattr("weightsync.worker.vllm_compat.reload.cold_load_context", lambda _: contextlib.nullcontext())


def method(process: Any) -> Any:
    """A quantisation method with this processing."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Method(QuantizeMethodBase):
        def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None: ...

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            process(layer)

        def apply(self, layer: nn.Module, *_: Any, **__: Any) -> torch.Tensor:
            raise NotImplementedError

    return Method()


class Toy:
    """A model of one layer as vLLM treats it: built, loaded, processed; then reloaded through our `Reload`."""

    def __init__(self, compat: Any, build: Any, process: Any = lambda layer: None, hook: Any = None) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        from weightsync.worker.vllm_compat import blueprint

        self.compat, self.layerwise = compat, layerwise

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Module()
                build(self.layer)
                self.layer.quant_method = method(process)

            def load_weights(self, weights: Any) -> None:
                from vllm.model_executor.model_loader.weight_utils import default_weight_loader

                for name, value in weights:
                    parameter = self.layer.get_parameter(name)
                    getattr(parameter, "weight_loader", default_weight_loader)(parameter, value)

        if hook is not None:
            Model.process_weights_after_loading = hook  # type: ignore[attr-defined]
        with torch.no_grad(), blueprint.Constants() as constants, torch.device("meta"):
            self.fresh = blueprint.read(Model(), constants)
        self.model = Model()
        layerwise.record_metadata_for_reloading(self.model)

    def load(self, **values: Any) -> nn.Module:
        """A cold load."""
        with torch.no_grad():
            self.model.load_weights(values.items())
            self.model.layer.quant_method.process_weights_after_loading(self.model.layer)
            if hasattr(self.model, "process_weights_after_loading"):
                self.model.process_weights_after_loading()
        return self.model.layer

    def reload(self, **values: Any) -> dict[str, int]:
        """What an update runs; its counts."""
        with torch.no_grad(), _dirty_memory(), self.compat.Reload(self.model, CONFIG, self.fresh) as reload:
            self.model.load_weights(values.items())
            reload.finish()
        return reload.counts


@contextlib.contextmanager
def _dirty_memory() -> Iterator[None]:
    """Memory that nobody has written holds sevens, not whatever happens to be there."""
    stock = torch.empty_strided

    def dirty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = stock(*args, **kwargs)
        return made if made.is_meta else made.fill_(7)

    torch.empty_strided = dirty
    try:
        yield
    finally:
        torch.empty_strided = stock


def parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def full(number: float, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), float(number))


def test_buffers_outside_the_checkpoint_that_processing_computes_follow_in_place(compat: Any) -> None:
    def build(layer: nn.Module) -> None:
        layer.weight = parameter(torch.empty(SIZE))
        for name in ("replaced", "written", "constant"):
            layer.register_buffer(name, torch.arange(float(SIZE)), persistent=False)

    def process(layer: Any) -> None:
        layer.replaced = layer.weight.data * 2 + layer.constant
        layer.written.copy_(layer.weight.data * 3)

    toy = Toy(compat, build, process)
    layer: Any = toy.load(weight=full(1))
    held = [layer.replaced, layer.written, layer.constant]
    for value in (5, 6):
        counts = toy.reload(weight=full(value))
        assert all(a is b for a, b in zip([layer.replaced, layer.written, layer.constant], held, strict=True))
        assert torch.equal(layer.replaced, full(value) * 2 + torch.arange(float(SIZE)))
        assert torch.equal(layer.written, full(value) * 3)
        assert torch.equal(layer.constant, torch.arange(float(SIZE)))
        assert counts["buffers_recomputed"] == 2
    assert list(toy.model.state_dict()) == ["layer.weight"]


def test_a_buffer_that_was_none_until_processing_is_none_again_and_then_set(compat: Any) -> None:
    def build(layer: nn.Module) -> None:
        layer.weight = parameter(torch.empty(SIZE))
        layer.register_buffer("late", None)
        layer.register_buffer("hidden", None, persistent=False)

    def process(layer: Any) -> None:
        assert layer.late is None and layer.hidden is None
        layer.late = layer.weight.data * 2
        layer.hidden = layer.weight.data * 4

    toy = Toy(compat, build, process)
    layer: Any = toy.load(weight=full(1))
    held = layer.late, layer.hidden
    toy.reload(weight=full(5))
    assert layer.late is held[0] and layer.hidden is held[1]
    assert torch.equal(layer.late, full(10)) and torch.equal(layer.hidden, full(20))
    assert list(toy.model.state_dict()) == ["layer.weight", "layer.late"]


def test_what_nothing_is_loaded_into_starts_as_in_a_fresh_layer(compat: Any) -> None:
    def loads_a_part(param: Any, value: torch.Tensor) -> None:
        param.data[: len(value)].copy_(value)

    def build(layer: nn.Module) -> None:
        layer.padded = parameter(torch.empty(SIZE + 4))
        layer.padded.weight_loader = loads_a_part
        layer.weight = parameter(torch.empty(SIZE))
        layer.ones = parameter(torch.ones(SIZE))
        layer.table = parameter(torch.arange(float(SIZE)))
        scale = torch.empty(3)
        scale[:] = -4.0
        layer.scale = parameter(scale)

    toy = Toy(compat, build)
    layer: Any = toy.load(padded=full(1), weight=full(1))
    layer.ones.data.fill_(9)  # a constructor's value comes back even where processing has changed it
    toy.reload(padded=full(5), weight=full(5))
    assert layer.padded.tolist() == [5.0] * SIZE + [0.0] * 4
    assert layer.ones.tolist() == [1.0] * SIZE
    assert layer.scale.tolist() == [-4.0] * 3
    assert layer.table.tolist() == list(range(SIZE))


def test_the_models_own_hook_runs_behind_the_layers(compat: Any) -> None:
    def build(layer: nn.Module) -> None:
        layer.weight = parameter(torch.empty(SIZE))

    def process(layer: Any) -> None:
        layer.weight.data.mul_(2)

    def hook(model: Any) -> None:
        model.total = float(model.layer.weight.sum())

    toy = Toy(compat, build, process, hook)
    toy.load(weight=full(1))
    assert toy.reload(weight=full(5))["model_hooks"] == 1
    assert toy.model.total == SIZE * 10  # type: ignore[comparison-overlap]


def input_scale_loader(param: Any, value: torch.Tensor, expert: int) -> None:
    """As vLLM's experts load one input scale that two projections share."""
    if param.data[expert] != 1 and (param.data[expert] - value).abs() > 1e-5:
        raise ValueError("input_scales of w1 and w3 of a layer must be equal")
    param.data[expert] = value


class TestLoadersThatRead:
    """Static input scales: read while they are loaded, each place filled twice."""

    def build(self, layer: nn.Module) -> None:
        layer.input_scale = parameter(torch.ones(2))
        layer.input_scale.weight_loader = input_scale_loader
        layer.last = parameter(torch.empty(2))

    def stream(self, toy: Toy, number: float, last: float) -> Iterator[Any]:
        for expert in (0, 1, 0, 1):
            toy.model.layer.input_scale.weight_loader(toy.model.layer.input_scale, torch.tensor(number), expert)
        yield "last", full(last, 2)

    def test_an_update_loads_all_of_them_and_what_follows(self, compat: Any) -> None:
        toy = Toy(compat, self.build)
        layer: Any = toy.load()
        with torch.no_grad(), _dirty_memory(), compat.Reload(toy.model, CONFIG, toy.fresh) as reload:
            toy.model.load_weights(self.stream(toy, 0.5, 3))
            assert reload.waiting() == {"": 0}  # the layer was processed with its last tensor, not before
            reload.finish()
        assert layer.input_scale.tolist() == [0.5, 0.5] and layer.last.tolist() == [3, 3]

    def test_two_that_differ_are_refused_by_the_loader_itself(self, compat: Any) -> None:
        toy = Toy(compat, self.build)
        toy.load()
        with pytest.raises(ValueError, match="must be equal"), torch.no_grad(), compat.Reload(toy.model, CONFIG, toy.fresh) as reload:
            layer: Any = toy.model.layer
            for value in (0.5, 0.25):
                layer.input_scale.weight_loader(layer.input_scale, torch.tensor(value), 0)
            toy.model.load_weights([("last", full(3, 2))])
            reload.finish()
        assert not layer.input_scale.is_meta
