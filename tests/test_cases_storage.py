"""Ways in which storage went wrong in weight updates elsewhere, each as one test, where it really happens.

Layers here are small and of vLLM's own kind: they load through the loaders on their
parameters, are processed by their quantisation method, and go through vLLM's reload.
What needs a whole engine shares one INT8 engine, in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoints import KINDS
from tests.fleets import ENGINE_ARGS, MAX_TOKENS, PROMPTS
from tests.peers import Peer, engine_process
from tests.standin import ReadsFreedMemory, StandinGraph, Warm, layer_of, load, model_of, parameter
from weightsync.fleet import vllm_api
from weightsync.sections import EngineSettings
from weightsync.storage.contract import What
from weightsync.storage.owners import walk
from weightsync.storage.selftest import SelfTest


@pytest.fixture(autouse=True)
def with_vllm() -> None:
    """Imported late: loading vLLM takes seconds."""
    pytest.importorskip("vllm")


# --- layouts that processing changes --------------------------------------------------------------

EXPERTS, INTER, HIDDEN, BLOCK = 2, 8, 16, 4


def experts_loader(param: nn.Parameter, tensor: torch.Tensor) -> None:
    """As the loaders of mixtures of experts: they cut along the dimensions of a checkpoint's tensor, [E, N, K]."""
    if param.dim() != 3:
        raise ValueError(f"shard_dim 0 not valid for {param.dim()}D")
    param.data.copy_(tensor)


def to_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[E, N, K] → [E, N / 4, K, 4], as kernels for blocks of rows want it."""
    experts, rows, columns = weight.shape
    return weight.view(experts, rows // BLOCK, BLOCK, columns).transpose(2, 3).contiguous()


def expert_weights(version: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(version)
    return {"experts.w13_weight_packed": torch.randn(EXPERTS, INTER, HIDDEN, generator=random)}


def test_layout_that_processing_renames_and_blocks_is_loaded_three_times_in_a_row() -> None:
    """The second sync raised `shard_dim 0 not valid for 3D`: the weight was in the kernel's blocks, under the kernel's name."""
    from vllm.model_executor.utils import replace_parameter

    def process(layer: Any) -> None:
        packed = layer.w13_weight_packed
        del layer.w13_weight_packed
        layer.w13_weight = packed
        replace_parameter(layer, "w13_weight", to_blocks(packed.data))
        # The kernel object that is built over it, and what it derives.
        layer.quant_method.kernel = SimpleNamespace(run=functools.partial(print, layer.w13_weight), norm=layer.w13_weight.sum((1, 2, 3)))

    def make() -> nn.Module:
        return model_of(experts=layer_of(process, w13_weight_packed=parameter(EXPERTS, INTER, HIDDEN, weight_loader=experts_loader)))

    warm = Warm(make, expert_weights(1))
    layer = warm.model.experts
    graph = StandinGraph({"w13": layer.w13_weight, "norm": layer.quant_method.kernel.norm})
    address = layer.w13_weight.data_ptr()
    with pytest.raises(ValueError, match="shard_dim 0 not valid for 4D"):  # what a plain second load does
        load(warm.model, {"experts.w13_weight": expert_weights(2)["experts.w13_weight_packed"]})
    for version in (2, 3, 4):
        assert warm.ours(expert_weights(version)).ok
        fresh = Warm(make, expert_weights(version)).model.experts
        seen: Any = graph.replay()
        assert torch.equal(seen["w13"], fresh.w13_weight) and torch.equal(seen["norm"], fresh.quant_method.kernel.norm)
        assert torch.equal(layer.w13_weight, fresh.w13_weight)
        assert layer.w13_weight.data_ptr() == layer.quant_method.kernel.run.args[0].data_ptr() == address
        assert warm.verdict().ok
        assert set(layer.state_dict()) == {"w13_weight"}


def test_layout_that_another_load_would_give_is_a_fault_and_nothing_is_written() -> None:
    """A kernel's choice of layout depended on more than the weights, and a graph read the new bytes in the old order."""
    from vllm.model_executor.utils import replace_parameter

    model: Any = model_of(layer=layer_of(lambda _: None, weight=parameter(4, 8)))
    warm = Warm(lambda: model, {"layer.weight": torch.ones(4, 8)})
    graph = StandinGraph({"w": warm.model.layer.weight})
    replace_parameter(warm.model.layer, "weight", torch.full((8, 4), 2.0))
    done = warm.repair()
    assert list(done.changed_layout) == ["model.layer.weight"] and not done.ok
    assert [(fault.what, fault.path) for fault in warm.verdict().faults] == [(What.CHANGED_LAYOUT, "model.layer.weight")]
    assert bool((graph.replay()["w"] == 1).all())  # type: ignore[union-attr]


# --- parameters that lose what they had -----------------------------------------------------------


def test_loader_that_processing_drops_is_there_again_for_the_next_sync() -> None:
    """Processing wrapped the parameter anew, its loader was gone, and no second load was possible."""

    class Sharded(nn.Module):
        """A layer that loads its own shard: rows 2 and 3 of 4."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = parameter(2, output_dim=0)
            self.bias.weight_loader = self.load_shard

        def load_shard(self, param: nn.Parameter, tensor: torch.Tensor) -> None:
            param.data.copy_(tensor.narrow(param.output_dim, 2, 2))  # type: ignore[arg-type]

    def process(layer: Any) -> None:
        layer.bias = nn.Parameter(layer.bias.data * 10, requires_grad=False)

    def make() -> nn.Module:
        layer: Any = Sharded()
        layer.quant_method = layer_of(process).quant_method
        return model_of(layer=layer)

    def weights(version: int) -> dict[str, torch.Tensor]:
        return {"layer.bias": torch.arange(4.0) + version}

    stock = Warm(make, weights(1))
    with pytest.raises(AssertionError, match="Attempted to load weight"):
        stock.stock(weights(2))
    warm = Warm(make, weights(1))
    graph = StandinGraph({"bias": warm.model.layer.bias})
    for version in (2, 3):
        assert warm.ours(weights(version)).ok
        assert graph.replay()["bias"].tolist() == [10.0 * (2 + version), 10.0 * (3 + version)]  # type: ignore[union-attr]
        assert warm.verdict().ok


def test_bias_that_processing_rebinds_is_brought_back() -> None:
    """A kernel permuted the bias into new memory under the old parameter; the graph went on with what was freed."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_bias

    def process(layer: Any) -> None:
        layer.bias.data = marlin_permute_bias(layer.bias)  # as the mixed-precision kernel does

    def make() -> nn.Module:
        return model_of(layer=layer_of(process, weight=parameter(64, 16), bias=parameter(64)))

    def weights(version: int) -> dict[str, torch.Tensor]:
        return {"layer.weight": torch.full((64, 16), float(version)), "layer.bias": torch.arange(64.0) * version}

    stock = Warm(make, weights(1))
    stock_graph = StandinGraph({"bias": stock.model.layer.bias})
    stock.release()
    stock.stock(weights(2))
    gc.collect()
    with pytest.raises(ReadsFreedMemory):
        stock_graph.replay()

    warm = Warm(make, weights(1))
    graph = StandinGraph({"bias": warm.model.layer.bias, "weight": warm.model.layer.weight})
    for version in (2, 3):
        assert warm.ours(weights(version)).ok
        assert torch.equal(graph.replay()["bias"], marlin_permute_bias(torch.arange(64.0) * version))  # type: ignore[arg-type]
        assert torch.equal(warm.model.layer.bias, graph.replay()["bias"])  # type: ignore[arg-type]
        assert warm.verdict().ok


# --- values that go with others -------------------------------------------------------------------


def test_processing_runs_for_a_tied_layer_when_its_partner_was_loaded() -> None:
    """The output head is the embedding's parameter; what its kernel had packed stayed that of the old weights."""

    def pack(layer: Any) -> None:
        layer.packed = layer.weight.data * 2

    def make() -> nn.Module:
        model: Any = model_of(embed=layer_of(pack, weight=parameter(8)), head=layer_of(pack))
        model.head.weight = model.embed.weight
        return model

    def weights(version: int) -> dict[str, torch.Tensor]:
        return {"embed.weight": torch.full((8,), float(version))}

    def graph_of(warm: Warm) -> StandinGraph:
        return StandinGraph({"weight": warm.model.head.weight, "packed": warm.model.head.packed})

    stock = Warm(make, weights(1))
    graph = graph_of(stock)
    stock.stock(weights(2))
    assert [graph.replay()[name].tolist() for name in ("weight", "packed")] == [[2] * 8, [2] * 8]  # type: ignore[union-attr]
    warm = Warm(make, weights(1))
    graph = graph_of(warm)
    for version in (2, 3):
        assert warm.ours(weights(version)).ok
        seen: Any = graph.replay()
        assert [seen[name].tolist() for name in ("weight", "packed")] == [[version] * 8, [2 * version] * 8]
        assert warm.model.head.weight is warm.model.embed.weight and warm.verdict().ok


def test_processing_does_not_run_for_a_part_that_nothing_was_sent_for() -> None:
    """A frozen draft model was in the update: no tensor came for it, its weights were shuffled once more, nobody was told."""

    def shuffle(layer: Any) -> None:
        layer.weight.data.copy_(layer.weight.data.roll(1))  # twice is not once
        layer.runs = getattr(layer, "runs", 0) + 1

    def make() -> nn.Module:
        return model_of(target=layer_of(shuffle, weight=parameter(8)), draft=layer_of(shuffle, weight=parameter(8)))

    warm = Warm(make, {"target.weight": torch.arange(8.0), "draft.weight": torch.arange(8.0)})
    graph = StandinGraph({"target": warm.model.target.weight, "draft": warm.model.draft.weight})
    for version in (2, 3):
        assert warm.ours({"target.weight": torch.arange(8.0) * version}).ok
        seen: Any = graph.replay()
        assert torch.equal(seen["target"], torch.arange(8.0).roll(1) * version)
        assert torch.equal(seen["draft"], torch.arange(8.0).roll(1))
        assert (warm.model.target.runs, warm.model.draft.runs) == (version, 1)
        assert warm.verdict().ok


def kv_scales() -> nn.Module:
    """An attention layer's scales, by vLLM's own method and defaults."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    class Scales(nn.Module, AttentionLayerBase):
        kv_cache_dtype = "fp8"

        def __init__(self) -> None:
            super().__init__()
            set_default_quant_scales(self, register_buffer=True)
            self.quant_method = BaseKVCacheMethod(None)  # type: ignore[arg-type]
            self.quant_method.create_weights(self)

        def get_attn_backend(self) -> Any:
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise NotImplementedError

        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            """Nothing of the backend's own."""

    return model_of(norm=layer_of(lambda _: None, weight=parameter(4)), attn=Scales())


def test_scale_that_is_also_a_host_number_is_refreshed_in_both_places_and_a_graph_that_baked_it_in_is_a_fault() -> None:
    """The device scale followed the update and the host float beside it did not, or did and a captured kernel kept the old one."""

    def weights(version: int) -> dict[str, torch.Tensor]:
        return {"attn.k_scale": torch.tensor(0.25 * version), "attn.v_scale": torch.tensor(0.5 * version)}

    warm = Warm(kv_scales, weights(1))
    attn = warm.model.attn
    graph = StandinGraph({"device": attn._k_scale, "host": attn._k_scale_float})
    assert warm.ours(weights(3)).ok
    assert attn._k_scale.item() == attn._k_scale_float == 0.75 and attn._v_scale_float == 1.5
    assert graph.replay()["device"] == 0.75 and graph.replay()["host"] == 0.25
    faults = warm.verdict().faults
    assert {fault.what for fault in faults} == {What.SCALAR}
    assert {"model.attn._k_scale_float", "model.attn._v_scale_float"} <= {fault.path for fault in faults}
    # Captured anew and sealed anew, and back again to the first weights: as at first.
    warm.seal()
    assert warm.verdict().ok
    assert warm.ours(weights(1)).ok
    assert attn._k_scale_float == StandinGraph({"host": attn._k_scale_float}).replay()["host"] == 0.25


def test_concatenation_that_is_cached_at_the_first_run_is_made_again_and_graphs_read_it() -> None:
    """A merged weight was cached at the first forward and never again; every address was right, and the values were the old ones."""

    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = parameter(4), parameter(4)
            self.quant_method = layer_of(lambda _: None).quant_method
            self._merged: torch.Tensor | None = None

        def forward(self) -> torch.Tensor:
            if self._merged is None:
                self._merged = torch.cat((self.q, self.k))
            return self._merged

    def weights(version: int) -> dict[str, torch.Tensor]:
        return {"layer.q": torch.full((4,), float(version)), "layer.k": torch.full((4,), -float(version))}

    def warm_of(version: int) -> Warm:
        made = Warm(lambda: model_of(layer=Merged()), weights(version))
        made.first_run(lambda model: model.layer())
        return made

    stock = warm_of(1)
    test = SelfTest(stock.contract.slots, stock.pins)
    assert test.remember() == 3
    stock.stock(weights(2))
    assert stock.verdict().ok and set(test.changed()) == {"model.layer.q", "model.layer.k"}  # no address tells of the merged one

    warm = warm_of(1)
    graph = StandinGraph({"merged": warm.model.layer()})
    for version in (2, 3):
        assert warm.ours(weights(version)).adopted == ["model.layer._merged"]
        assert torch.equal(graph.replay()["merged"], warm_of(version).model.layer())  # type: ignore[arg-type]
        assert torch.equal(warm.model.layer(), graph.replay()["merged"])  # type: ignore[arg-type]
        assert warm.verdict().ok


def test_table_outside_the_checkpoint_keeps_its_values_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload made a rotary table anew, nothing loads into it, and attention read memory that nobody had written."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    def make() -> nn.Module:
        rotary = RotaryEmbedding(8, 8, 64, 10000, True, torch.bfloat16)
        beside: Any = layer_of(lambda _: None, weight=parameter(8))  # a layer that has both: its weight is loaded, its table is not
        beside.register_buffer("table", torch.arange(8.0), persistent=False)
        return model_of(rotary=rotary, beside=beside)

    warm = Warm(make, {"beside.weight": torch.ones(8)})
    graph = StandinGraph({"rotary": warm.model.rotary.cos_sin_cache, "table": warm.model.beside.table})
    before: Any = graph.replay()
    stock = torch.empty_strided
    # Memory that nobody has written holds sevens, not what was there by chance.
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: made if (made := stock(*a, **k)).is_meta else made.fill_(7))
    for version in (2, 3):
        assert warm.ours({"beside.weight": torch.full((8,), float(version))}).ok
        after: Any = graph.replay()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert warm.model.rotary.cos_sin_cache.data_ptr() and torch.equal(warm.model.beside.table, torch.arange(8.0))
        assert warm.verdict().ok and set(warm.model.state_dict()) == {"beside.weight"}


# --- what processing needs around it --------------------------------------------------------------


def test_processing_that_builds_a_quantiser_finds_vllms_config_though_no_caller_set_it() -> None:
    """An FP8 quantiser that is built in post-processing reads vLLM's current config; the reload crashed without one."""
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    def process(layer: Any) -> None:
        layer.quant_method.quantise = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)

    def make() -> nn.Module:
        return model_of(layer=layer_of(process, weight=parameter(4, 4)))

    stock = Warm(make, {"layer.weight": torch.ones(4, 4)})
    with pytest.raises(AssertionError, match="Current vLLM config is not set"):
        stock.stock({"layer.weight": torch.ones(4, 4)})
    warm = Warm(make, {"layer.weight": torch.ones(4, 4)})
    first = warm.model.layer.quant_method.quantise
    assert warm.ours({"layer.weight": torch.full((4, 4), 2.0)}).ok
    assert warm.model.layer.quant_method.quantise is not first
    assert bool((warm.model.layer.weight == 2).all())


# --- tensors that no walk over parameters and buffers sees ----------------------------------------

COS, SIN = torch.zeros(8), torch.zeros(8)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """As rotary code that keeps its tables in globals of its module."""
    return x * COS + x.flip(0) * SIN


def wake(version: int) -> None:
    """As a wake-up that makes the tables anew."""
    global COS, SIN
    COS, SIN = torch.full((8,), float(version)), torch.full((8,), -float(version))


def test_tables_in_a_modules_globals_are_found_repaired_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a deep sleep and a reload outputs were wrong: rotary tables lay in module globals, which no walk had seen."""
    from weightsync.storage import census
    from weightsync.storage.census import Block, Census
    from weightsync.worker.guard import Guard

    def block(tensor: torch.Tensor) -> Block:
        nbytes = tensor.untyped_storage().nbytes()
        return Block("external", tensor.data_ptr(), nbytes, nbytes, (0,), ("rotate",), 1)

    wake(1)
    hidden = iter([torch.ones(8)])  # an iterator's tensor has no path
    model: Any = model_of(attn=layer_of(lambda _: None, weight=parameter(8)))
    model.attn.bound = functools.partial(rotate, model.attn.weight)
    model.attn.closed = (lambda table: lambda: table)(torch.ones(8))
    anonymous = hidden.__reduce__()[1][0][0]
    reads = sorted((block(t) for t in (COS, SIN, model.attn.weight, model.attn.closed(), anonymous)), key=lambda b: b.address)
    monkeypatch.setattr(census, "active", lambda: True)
    monkeypatch.setattr(census, "take", lambda: Census(1, {}, {}, len(reads), tuple(reads)))
    held = Guard(model, None, torch.device("cuda"), graphs=True)
    paths = {path for slot in held.contract.slots for path in slot.paths}
    here = __name__
    assert {f"{here}:COS", f"{here}:SIN", "model.attn.bound.<arg 0>", "model.attn.closed.<closure table>"} <= paths
    assert [slot.address for slot in held.contract.unowned] == [anonymous.data_ptr()]
    graph = StandinGraph({"cos": COS, "sin": SIN})
    wake(2)
    done = held.repair()
    verdict = held.verify(done)
    assert {f"{here}:COS", f"{here}:SIN"} <= set(done.adopted) | {fault.path for fault in verdict.faults}
    if verdict.ok:
        assert graph.replay()["cos"].tolist() == [2.0] * 8  # type: ignore[union-attr]


# --- a whole engine, in a process of its own ------------------------------------------------------
# Functions whose first argument is `state` run there.

SECONDS = 200.0


def start(state: dict[str, Any], first: Path, other: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a cold engine says on `other`; then an engine on `first` that is updated by what follows."""
    import vllm

    from weightsync.check.engine import Trainer
    from weightsync.demo.cold import cold_outputs

    cold = cold_outputs(other, PROMPTS, MAX_TOKENS, ENGINE_ARGS)
    state["llm"] = vllm.LLM(**arguments)
    state["model"] = state["llm"].collective_rpc(lambda worker: worker.get_model())[0]
    state["trainer"] = Trainer(state["llm"])
    state["said"] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: state["said"].append((record.name, record.getMessage()))  # type: ignore[method-assign]
    for name in ("vllm", "weightsync"):
        logging.getLogger(name).addHandler(listener)
    told = state["llm"].collective_rpc(lambda worker: worker.vllm_config.additional_config)[0]
    return {"cold": {name: cold[name] for name in ("tokens", "logprobs")}, "told": told}


def look(state: dict[str, Any]) -> dict[str, Any]:
    """What the engine says, and what it holds; numbers that are addresses of oneDNN's are left out."""
    from weightsync.check.contents import contents
    from weightsync.check.engine import generate

    held = contents(state["model"])
    held["owned"] = {path: digest for path, digest in held["owned"].items() if not path.endswith(".handler_tensor")}
    return {"outputs": generate(state["llm"], PROMPTS, MAX_TOKENS), **held}


def update(state: dict[str, Any], folder: Path, pressed: bool) -> dict[str, Any]:
    """Sync a checkpoint; with `pressed`, what the reload freed is written over before the engine runs again."""
    from safetensors.torch import load_file

    state["said"].clear()
    report = state["trainer"].sync(load_file(folder / "model.safetensors"))
    if pressed:
        sizes = {tensor.nbytes for tensor in state["model"].state_dict().values() if tensor.nbytes}
        state["held"] = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes for _ in range(32)]
        state["held"].clear()
    return {"checks": report["checks"], "said": list(state["said"])}


@contextlib.contextmanager
def running(checkpoint: Any, kind: str) -> Iterator[tuple[Peer, dict[str, Any]]]:
    """An engine in a process of its own, with settings that are not the defaults; and `start`'s answer."""
    first, other = checkpoint(kind, 1), checkpoint(kind, 2)
    settings = EngineSettings(model=first, unknown_vllm="observe")
    arguments = {"model": str(first), **ENGINE_ARGS, **vllm_api.worker_arguments(settings)}
    with engine_process() as peer:
        yield peer, peer.call(start, first, other, arguments, seconds=SECONDS)


@pytest.fixture(scope="module")
def engine(checkpoint: Any) -> Iterator[tuple[Peer, dict[str, Any]]]:
    """INT8: its kernels derive more than others do."""
    with running(checkpoint, "int8-channel") as started:
        yield started


def require_identity(peer: Peer, folder: Path) -> dict[str, Any]:
    """Sync the engine's own weights, twice; what it holds and says must stay to the bit."""
    before: dict[str, Any] = peer.call(look, seconds=SECONDS)
    for _ in range(2):
        peer.call(update, folder, True, seconds=SECONDS)
        assert peer.call(look, seconds=SECONDS) == before
    assert any(path.endswith("rotary_emb.cos_sin_cache") for path in before["registered"]), "a buffer outside the checkpoint"
    return before


@pytest.mark.engine
def test_identity_update_leaves_every_tensor_and_every_output_as_it_was(engine: Any, checkpoint: Any) -> None:
    """An update with the engine's own weights changed greedy outputs: a vector was dropped and its memory never written."""
    held = require_identity(engine[0], checkpoint("int8-channel", 1))
    # With AMX vLLM takes another kernel, which packs the weight and derives nothing beside it.
    derived = any(path.endswith("azp_adj") for path in held["registered"])
    assert derived or torch.cpu._is_amx_tile_supported(), "a value that processing derives"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"int8-channel"}))
def test_identity_update_of_other_kinds(kind: str, checkpoint: Any) -> None:
    """As above, where processing packs, merges and quantises otherwise; then new weights, and back."""
    with running(checkpoint, kind) as (peer, started):
        before = require_identity(peer, checkpoint(kind, 1))
        peer.call(update, checkpoint(kind, 2), True, seconds=SECONDS)
        assert peer.call(look, seconds=SECONDS)["outputs"] == started["cold"]
        peer.call(update, checkpoint(kind, 1), True, seconds=SECONDS)
        assert peer.call(look, seconds=SECONDS) == before


@pytest.mark.engine
def test_memory_that_was_freed_and_used_again_is_read_by_nothing(engine: Any, checkpoint: Any) -> None:
    """The first run after an update read addresses that the reload had given back, and others had filled since."""
    peer, started = engine
    before = peer.call(look, seconds=SECONDS)
    peer.call(update, checkpoint("int8-channel", 2), True, seconds=SECONDS)
    after = peer.call(look, seconds=SECONDS)
    assert after["outputs"] == started["cold"] != before["outputs"]
    assert after["addresses"] == before["addresses"]
    peer.call(update, checkpoint("int8-channel", 1), True, seconds=SECONDS)
    assert peer.call(look, seconds=SECONDS) == before


@pytest.mark.engine
def test_layers_without_checkpoint_weights_raise_no_alarm(engine: Any, checkpoint: Any) -> None:
    """Every update warned that rotary embeddings had failed to load."""
    peer, _ = engine
    said = peer.call(update, checkpoint("int8-channel", 1), False, seconds=SECONDS)["said"]
    assert [line for line in said if line[0].startswith("weightsync") or line[0].endswith(".layerwise")] == []


@pytest.mark.engine
def test_settings_for_the_worker_arrive_in_it(engine: Any) -> None:
    """A strict engine was as lenient as any: the setting had stayed in the process that read it."""
    _, started = engine
    assert started["told"] == {"weightsync": {"strict": False, "unknown_vllm": "observe"}}


def mixer(state: dict[str, Any], dtype: torch.dtype) -> dict[int, list[str]]:
    """An identity update, then new weights, through vLLM's own Mamba layer: what differs."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    numbers = itertools.count()

    def make() -> nn.Module:
        return model_of(
            mixer=MambaMixer2(
                hidden_size=32, ssm_state_size=16, conv_kernel_size=4, intermediate_size=64, use_conv_bias=True, use_bias=False,
                n_groups=1, num_heads=4, head_dim=16, prefix=f"mixer{next(numbers)}",
            )
        )  # fmt: skip

    def weights(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        shapes = {"A": (4,), "D": (4,), "dt_bias": (4,), "conv1d.weight": (96, 1, 4), "conv1d.bias": (96,), "norm.weight": (64,)}
        shapes |= {"in_proj.weight": (164, 32), "out_proj.weight": (32, 64)}
        return {f"mixer.{name}": torch.randn(shape, generator=random) for name, shape in shapes.items()}

    def held(warm: Warm) -> dict[str, torch.Tensor]:
        found = walk(warm.model, "model").tensors
        return {path: tensor.detach().clone() for path, tensor in found.items() if not path.endswith(".handler_tensor")}

    found = {}
    warm = Warm(make, weights(1), dtype)
    for seed in (1, 2):
        done = warm.ours(weights(seed))
        now, want = held(warm), held(Warm(make, weights(seed), dtype))
        found[seed] = [path for path in want if not torch.equal(now[path], want[path])]
        found[seed] += [str(fault) for fault in warm.verdict().faults] + ([] if done.ok else [str(done)])
    return found


@pytest.mark.engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # in bfloat16 processing packs the convolution into other memory
def test_vectors_per_head_and_the_alias_of_a_convolution_follow_in_a_state_space_layer(engine: Any, dtype: torch.dtype) -> None:
    """A loader that writes twice made the layer count as complete too early: its last vector was dropped."""
    peer, _ = engine
    assert peer.call(mixer, dtype, seconds=SECONDS) == {1: [], 2: []}
