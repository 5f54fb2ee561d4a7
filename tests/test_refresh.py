"""What a reload must compute anew beside the layers' own parameters, through vLLM's real layerwise reload."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.errors import ApplyFailed

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

    def __init__(self, compat: Any, build: Any, process: Any = lambda layer: None, hook: Any = None, quant_method: Any = None) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        from weightsync.worker.vllm_compat import blueprint

        self.compat, self.layerwise = compat, layerwise

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Module()
                build(self.layer)
                self.layer.quant_method = quant_method or method(process)

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


def test_numbers_and_lists_that_processing_hangs_on_a_parameter_follow(compat: Any) -> None:
    def build(layer: nn.Module) -> None:
        layer.weight = parameter(torch.empty(SIZE))

    def process(layer: Any) -> None:
        layer.weight.alpha = float(layer.weight.max())
        layer.weight.parts = {"halves": [layer.weight.data * 2]}
        layer.weight.group = len(layer.weight)

    toy = Toy(compat, build, process)
    layer: Any = toy.load(weight=full(1))
    held, layer.weight.group = layer.weight, 3
    toy.reload(weight=full(5))
    assert layer.weight is held and layer.weight.alpha == 5.0
    assert torch.equal(layer.weight.parts["halves"][0], full(10))
    assert layer.weight.group == 3, "sizes and marks stay the owner's"


def test_processing_that_makes_another_dtype_than_at_the_start_fails_the_update_and_another_shape_is_copied(compat: Any) -> None:
    def build(layer: nn.Module) -> None:
        layer.weight = parameter(torch.empty(SIZE))
        layer.register_buffer("table", torch.zeros(SIZE, dtype=torch.float64), persistent=False)

    made = {"dtype": torch.float32, "size": SIZE}

    def process(layer: Any) -> None:
        layer.scale = parameter((layer.weight.data / 3).to(made["dtype"])[: made["size"]])

    toy = Toy(compat, build, process)
    layer: Any = toy.load(weight=full(1))
    layer.table = layer.table.to(torch.float32)  # as a first run does; processing leaves it alone
    made["size"] = 1
    toy.reload(weight=full(2))
    assert torch.equal(layer.scale.data, full(2) / 3)
    made |= {"dtype": torch.bfloat16, "size": SIZE}
    with pytest.raises(ApplyFailed, match=r"layer\.scale of torch\.bfloat16.*torch\.float32") as refused:
        toy.reload(weight=full(4))
    assert refused.value.names == ("layer.scale",) and "Restart" in refused.value.hint
    made["dtype"] = torch.float32
    toy.reload(weight=full(5))
    assert torch.equal(layer.scale.data, full(5) / 3), "the next update finds the layer whole"


EXPERTS, HIDDEN, INNER = 2, 8, 4


def static_fp8_experts(compat: Any) -> Toy:
    """vLLM's own FP8 experts with static input scales: its weights and loaders, without the kernel that needs a GPU."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import compressed_tensors_moe_w8a8_fp8

    real = compressed_tensors_moe_w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod

    def process(_: Any, layer: Any) -> None:
        layer.w2_weight_scale.data.mul_(2)  # what comes too late is not doubled

    names = {"process_weights_after_loading": process, "__init__": lambda self: None}
    made = type("CompressedTensorsW8A8Fp8MoEMethod", (real,), names)()
    made.weight_quant, made.static_input_scales, made.weight_block_size, made.block_quant = (
        SimpleNamespace(strategy="tensor"),
        True,
        None,
        False,
    )
    made.moe = SimpleNamespace(is_act_and_mul=True)

    class Experts(nn.Module):
        """Of `RoutedExperts` what loading needs."""

        quant_config = None
        _fused_shared_expert_quantizer = None
        moe_config = SimpleNamespace(
            tp_rank=0, tp_size=1, is_act_and_mul=True, tp_shard_with_padding=False, moe_parallel_config=SimpleNamespace(tp_size=1)
        )
        expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: expert)

    for name, member in vars(RoutedExperts).items():
        if name == "weight_loader" or name.startswith(("_load", "_map", "_narrow", "_to_scalar", "_get_hidden")):
            setattr(Experts, name, member)

    def build(layer: nn.Module) -> None:
        layer.__class__ = Experts
        made.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.float32, weight_loader=layer.weight_loader)

    toy = Toy(compat, build, quant_method=made)
    type(toy.model).load_weights = load_experts  # type: ignore[assignment]
    return toy


def fp8_checkpoint(number: float) -> dict[str, torch.Tensor]:
    """Expert by expert, as files have them: gate and up share one input scale."""
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    found = {}
    for expert in range(EXPERTS):
        for order, (name, shape) in enumerate(shapes.items()):
            prefix = f"experts.{expert}.{name}"
            found[f"{prefix}.input_scale"] = torch.tensor(number / (2 if name == "down_proj" else 4))
            found[f"{prefix}.weight"] = torch.full(shape, number + order).to(torch.float8_e4m3fn)
            found[f"{prefix}.weight_scale"] = torch.tensor(number + expert * 3 + order)
    return found


def load_experts(model: Any, weights: Any) -> None:
    for name, value in weights:
        _, expert, projection, kind = name.split(".")
        shard = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[projection]
        parameter = getattr(model.layer, f"{'w2' if shard == 'w2' else 'w13'}_{kind}")
        parameter.weight_loader(parameter, value, name, shard, int(expert))


class TestLoadersThatRead:
    """Static input scales: read while they are loaded, and each place is filled twice."""

    @pytest.fixture
    def toy(self, compat: Any) -> Toy:
        toy = static_fp8_experts(compat)
        toy.load(**fp8_checkpoint(1.0))
        return toy

    def test_an_update_loads_every_tensor(self, toy: Toy) -> None:
        for number in (3.0, 5.0):
            want = static_fp8_experts(toy.compat).load(**fp8_checkpoint(number)).state_dict()
            toy.reload(**fp8_checkpoint(number))
            have = toy.model.layer.state_dict()
            assert {name: value.float().tolist() for name, value in have.items()} == {n: v.float().tolist() for n, v in want.items()}

    def test_the_loaders_own_check_sees_real_values(self, toy: Toy) -> None:
        bad = fp8_checkpoint(3.0)
        bad["experts.1.up_proj.input_scale"] += 1
        with pytest.raises(ValueError, match="must be equal"):
            toy.reload(**bad)
        assert not any(tensor.is_meta for tensor in toy.model.layer.state_dict().values())

    def test_the_load_map_has_every_tensor_and_counts_a_shared_place_once(self, toy: Toy, compat: Any) -> None:
        from weightsync.protocol import TensorSpec
        from weightsync.worker import loadmap

        specs = [TensorSpec(n, str(v.dtype).removeprefix("torch."), tuple(v.shape)) for n, v in fp8_checkpoint(1.0).items()]
        with torch.device("meta"):
            twin = static_fp8_experts(compat).model
        found = loadmap.record(twin, specs)
        assert list(found.writes) == [spec.name for spec in specs]
        assert set(found.twice.values()) == {f"experts.{expert}.gate_proj.input_scale" for expert in range(EXPERTS)}
        assert found.filled() == {f"layer.{name}": parameter.numel() for name, parameter in twin.layer.named_parameters()}


def test_a_layer_that_a_model_has_fused_away_is_named(compat: Any) -> None:
    from weightsync.worker.vllm_compat.layers import plain_modules

    model = nn.ModuleDict({"experts": nn.Linear(2, 2), "wrapped": nn.ModuleDict({"base_layer": nn.Linear(2, 2)})})
    loaded = ["experts.weight", "wrapped.weight"]
    assert plain_modules(model)["wrapped"] is model["wrapped"]["base_layer"]  # type: ignore[index]
    assert compat.missing_layers(model, loaded) == []
    del model["experts"]
    assert compat.missing_layers(model, loaded) == ["experts"]
