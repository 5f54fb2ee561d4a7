"""vLLM's own reload of some layers of a small model, in this process: the others are not touched, but for what derives from those.

Not covered: real models (`test_scope_on_vllm.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.standin import Warm, layer_of, load, model_of, parameter
from weightsync.errors import ApplyFailed

vllm = pytest.importorskip("vllm")

WEIGHTS = {f"{name}.weight": torch.full((4,), value) for value, name in enumerate(("a", "b", "c"), 1)}


def linear(done: list[str], name: str, weight: nn.Parameter | None = None) -> nn.Module:
    """A layer whose kernel reads twice its weight."""

    def process(layer: Any) -> None:
        done.append(name)
        if layer.packed is None:
            layer.packed = 2 * layer.weight.data
        else:
            layer.packed.copy_(2 * layer.weight.data)

    layer: Any = layer_of(process, weight=parameter(4) if weight is None else weight)
    layer.packed = None
    return layer


def attention(done: list[str], name: str, projection: nn.Module) -> nn.Module:
    """A layer that has absorbed a projection which is another layer."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Attention(nn.Module, AttentionLayerBase):  # type: ignore[misc]
        absorbed = torch.zeros(4)

        def get_attn_backend(self) -> Any:
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise NotImplementedError

        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            done.append(name)
            self.absorbed = self.projection.weight.data + 100

    made = Attention()
    made.projection = projection
    return made


@pytest.fixture
def done() -> list[str]:
    """What was processed, in order."""
    return []


def warm(done: list[str], tied: bool = False, **more: Any) -> Warm:
    def make() -> nn.Module:
        layers: dict[str, Any] = {name: linear(done, name) for name in ("a", "b", "c")}
        if tied:
            layers["head"] = linear(done, "head", layers["a"].weight)
        layers["first"], layers["second"] = attention(done, "first", layers["a"]), attention(done, "second", layers["b"])
        return model_of(**layers)

    made = Warm(make, WEIGHTS, torch.float32)
    done.clear()
    return made


def values(model: Any) -> Mapping[str, float]:
    return {
        f"{name}.{what}": getattr(model.get_submodule(name), what)[0].item() for name in ("a", "b", "c") for what in ("weight", "packed")
    }


def test_layers_outside_are_neither_taken_apart_nor_processed_and_what_derives_from_those_inside_is_made_anew(done: list[str]) -> None:
    engine = warm(done)
    before = {path: (id(tensor), tensor.data_ptr()) for path, tensor in engine.model.named_parameters()}
    apart: list[str] = []
    names = {layer: path for path, layer in engine.model.named_modules()}
    with pytest.MonkeyPatch.context() as patch:
        stock = engine._layerwise.restore_layer_on_meta
        patch.setattr(engine._layerwise, "restore_layer_on_meta", lambda layer, info: apart.append(names[layer]) or stock(layer, info))  # type: ignore[func-returns-value]
        engine.ours({"a.weight": torch.full((4,), 7.0)}, {"a"})
    assert apart == ["a", "first"]
    assert done == ["a", "first"]
    assert values(engine.model) == {"a.weight": 7, "a.packed": 14, "b.weight": 2, "b.packed": 4, "c.weight": 3, "c.packed": 6}
    assert engine.model.first.absorbed[0] == 107
    assert {path: (id(tensor), tensor.data_ptr()) for path, tensor in engine.model.named_parameters()} == before
    assert engine.verdict().ok


def test_all_layers_are_done_where_no_part_is_named(done: list[str]) -> None:
    engine = warm(done)
    engine.ours({name: 2 * tensor for name, tensor in WEIGHTS.items()})
    assert sorted(done) == ["a", "b", "c", "first", "second"]


def test_a_layer_outside_that_is_tied_to_one_inside_is_processed_too(done: list[str]) -> None:
    engine = warm(done, tied=True)
    engine.ours({"a.weight": torch.full((4,), 7.0)}, {"a"})
    assert sorted(done) == ["a", "first", "head"]
    assert engine.model.head.packed[0] == 14
    done.clear()
    engine.ours({"c.weight": torch.full((4,), 8.0)}, {"c"})
    assert done == ["c"]


def test_a_layer_that_is_not_there_is_refused_before_anything_is_taken_apart(done: list[str]) -> None:
    engine = warm(done)
    with pytest.raises(ApplyFailed, match=r"1 layer\(s\) are not in the live model: d"):
        engine.ours({}, {"a", "d"})
    assert engine._compat.reload_waiting(engine.model) == {} and done == []


def test_a_failure_half_way_puts_the_part_back(done: list[str]) -> None:
    engine = warm(done)
    with pytest.raises(RuntimeError, match="lost"), engine._compat.Reload(engine.model, engine.config, engine._fresh, {"a", "b"}) as reload:
        load(engine.model, {"a.weight": torch.full((4,), 7.0)})
        assert reload.waiting() == {"b": 0, "first": 0, "second": 0}
        raise RuntimeError("lost")
    assert values(engine.model)["b.weight"] == 2 and engine._compat.reload_waiting(engine.model) == {}
    assert engine.model._do_torchao_reload is False


def test_a_model_with_a_hook_over_all_its_layers_is_not_reloaded_in_part(done: list[str]) -> None:
    engine = warm(done)
    assert engine._compat.whole_only(engine.model) == ""
    engine.model.process_weights_after_loading = lambda: done.append("hook")
    assert "Module has a hook of its own that runs over all of its layers" in engine._compat.whole_only(engine.model)
