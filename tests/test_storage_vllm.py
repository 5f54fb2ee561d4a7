"""vLLM's own layerwise reload, on a layer whose kernel object is rebuilt: which tensors move, and what mends it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.standin import ReadsFreedMemory, StandinGraph
from weightsync.storage.adopt import Adopter
from weightsync.storage.contract import Contract, What, compare
from weightsync.storage.owners import walk
from weightsync.storage.pins import pin, places, slots_of


@pytest.fixture(scope="module")
def layerwise() -> Any:
    """Imported late: loading vLLM takes seconds."""
    return pytest.importorskip("vllm.model_executor.model_loader.reload.layerwise")


@pytest.fixture(scope="module")
def method_class(layerwise: Any) -> Any:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Method(QuantizeMethodBase):
        """Loads `packed`, computes with `weight`; its kernel has strides, a derived scale, and the weight itself."""

        def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None:
            layer.packed = nn.Parameter(torch.zeros(8), requires_grad=False)
            layer.scale = nn.Parameter(torch.zeros(8), requires_grad=False)

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.weight = nn.Parameter(layer.packed.data * 2, requires_grad=False)
            del layer.packed
            inverse = 1 / layer.scale.data
            self.kernel = SimpleNamespace(
                strides=torch.full((4,), 8), weight=layer.weight, run=functools.partial(print, layer.scale), inverse=lambda: inverse
            )

        def apply(self, layer: nn.Module, *_: Any, **__: Any) -> torch.Tensor:
            raise NotImplementedError

    return Method


def load(model: nn.Module, version: float) -> None:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    for parameter in list(model.layer.parameters()):  # type: ignore[operator, union-attr]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, torch.full((8,), version))


def cold(layerwise: Any, method_class: Any) -> nn.Module:
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.quant_method = method_class()
    model.layer.quant_method.create_weights(model.layer)
    layerwise.record_metadata_for_reloading(model)
    load(model, 1)
    model.layer.quant_method.process_weights_after_loading(model.layer)
    return model


def reload(layerwise: Any, model: nn.Module, version: float) -> None:
    with torch.device("cpu"), torch.no_grad():
        layerwise.initialize_layerwise_reload(model)
        load(model, version)
        layerwise.finalize_layerwise_processing(model, SimpleNamespace(dtype=torch.float32))


def captured(model: Any) -> StandinGraph:
    layer, kernel = model.layer, model.layer.quant_method.kernel
    return StandinGraph({"weight": layer.weight, "scale": layer.scale, "strides": kernel.strides, "inverse": kernel.inverse()})


KERNEL = "model.layer.quant_method.kernel"


def test_the_stock_reload_frees_what_the_kernel_object_holds(layerwise: Any, method_class: Any) -> None:
    model: Any = cold(layerwise, method_class)
    graph = captured(model)
    reload(layerwise, model, 2)
    with pytest.raises(ReadsFreedMemory, match="strides, inverse"):
        graph.replay()
    assert model.layer.quant_method.kernel.weight is not model.layer.weight  # eager code reads a copy


def test_with_the_repair_reload_after_reload_is_right(layerwise: Any, method_class: Any) -> None:
    model: Any = cold(layerwise, method_class)
    graph = captured(model)
    pins = pin(walk(model, "model"))
    contract = Contract.seal(slots_of(pins))
    adopter = Adopter(pins)
    for version in (2, 4):
        reload(layerwise, model, version)
        stale = compare(contract, places(walk(model, "model"), contract.places))
        assert {fault.path for fault in stale.of(What.MOVED)} >= {f"{KERNEL}.strides", f"{KERNEL}.weight", f"{KERNEL}.run.<arg 0>"}
        done = adopter.adopt(walk(model, "model"))
        assert done.ok
        assert done.refreshed == [f"{KERNEL}.inverse.<closure inverse>"]
        seen: Any = graph.replay()
        assert [seen[name].tolist() for name in ("weight", "scale", "inverse")] == [[version * 2] * 8, [version] * 8, [1 / version] * 8]
        assert seen["strides"].tolist() == [8] * 4
        kernel = model.layer.quant_method.kernel
        assert kernel.weight.data_ptr() == model.layer.weight.data_ptr()
        assert kernel.run.args[0].data_ptr() == model.layer.scale.data_ptr()
        assert compare(contract, places(walk(model, "model"), contract.places)).ok


def test_a_reload_that_was_begun_and_not_finished_is_a_fault(layerwise: Any, method_class: Any) -> None:
    model: Any = cold(layerwise, method_class)
    pins = pin(walk(model, "model"))
    contract = Contract.seal(slots_of(pins))
    layerwise.initialize_layerwise_reload(model)
    assert all(tensor.is_meta for tensor in model.layer.parameters())
    done = Adopter(pins).adopt(walk(model, "model"))
    assert "meta" in done.failed["model.layer.scale"]
    assert not compare(contract, places(walk(model, "model"), contract.places)).ok


def test_vllms_parameters_are_repaired_as_what_they_are(layerwise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)

    def make(version: float) -> Any:
        return parameter.ModelWeightParameter(data=torch.full((2, 4), version), input_dim=1, output_dim=0, weight_loader=print)

    model = nn.Module()
    model.weight = make(1)
    graph, pins = StandinGraph({"w": model.weight}), pin(walk(model, "m"))
    model.weight = make(2)
    done = Adopter(pins).adopt(walk(model, "m"))
    assert done.ok
    assert type(model.weight) is parameter.ModelWeightParameter
    assert graph.replay()["w"].tolist() == [[2] * 4] * 2  # type: ignore[union-attr]
