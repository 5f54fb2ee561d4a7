"""Adapters alone on vLLM's real LoRA layers, in an engine's process: they equal merged weights within rounding, and touch no weight.

Not covered: requests and versions, which are a
fleet's (`test_lora_on_fleet.py`); which adapters are refused in which words (`test_adapter.py`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.bench import Bench, Fault, Tensors, Way
from tests.faulty import raising
from tests.fleets import ENGINE_ARGS
from tests.peers import Peer, engine_process
from weightsync.check.engine import OURS
from weightsync.protocol import Adapter
from weightsync.worker.naming import ADAPTER_NUMBER, ADAPTER_PATH

pytestmark = pytest.mark.engine

SECONDS = 200.0
STREAM = [1, 5, 9, 300, 7, 7, 100, 200, 300, 400, 500, 11, 12, 13, 44, 45, 46, 47, 48, 2]
ADAPTED = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
ALONE, WITH_BASE = Way(adapter=Adapter.ALONE), Way(adapter=Adapter.WITH_BASE)
#: Nats a token. Merged weights are rounded to bfloat16 once more than a sum of two products.
ROUNDING, SEEN = 0.08, 0.3


def pairs(base: Tensors, seed: int, rank: int = 8, layers: tuple[str, ...] = ADAPTED) -> Tensors:
    """An adapter of random values, large enough to change what is said."""
    random, made = torch.Generator().manual_seed(seed), {}
    for name, weight in base.items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in layers:
            made[f"base_model.model.{path}.lora_A.weight"] = torch.randn((rank, weight.shape[1]), generator=random) * 0.1
            made[f"base_model.model.{path}.lora_B.weight"] = torch.randn((weight.shape[0], rank), generator=random) * 0.1
    return made


def merged(base: Tensors, adapter: Tensors) -> Tensors:
    made = dict(base)
    for name, one in adapter.items():
        if name.endswith("lora_A.weight"):
            path = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            made[path] = (base[path].float() + adapter[name.replace("lora_A", "lora_B")] @ one).to(base[path].dtype)
    return made


# --- in the engine's process ------------------------------------------------------------------------


def start(state: dict[str, Any], folder: Path) -> None:
    import vllm
    from safetensors.torch import load_file

    from weightsync.worker import tiles

    tiles.ask()
    arguments = {**ENGINE_ARGS, "enable_prefix_caching": False, "enable_lora": True, "max_lora_rank": 8}
    state["llm"] = llm = vllm.LLM(model=str(folder), **arguments, **OURS)
    state["bench"] = bench = Bench(lambda name, *args: llm.collective_rpc(name, args=args)[0], llm.collective_rpc(lambda worker: worker)[0])
    state["here"] = here = contextlib.ExitStack()
    here.enter_context(bench.meeting_here())
    state["base"] = load_file(folder / "model.safetensors")


def said(state: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Log-probabilities of a fixed stream, token by token, and digests of the weights."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    from weightsync.check.contents import contents

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    carried = LoRARequest("any", ADAPTER_NUMBER, ADAPTER_PATH)
    (output,) = state["llm"].generate([TokensPrompt(prompt_token_ids=STREAM)], params, use_tqdm=False, lora_request=carried)
    scores = [float(at[token].logprob) for at, token in zip(output.prompt_logprobs, STREAM, strict=True) if at]
    return scores, contents(state["bench"].model)["registered"]


def update(state: dict[str, Any], tensors: Tensors, way: Way, fault: str = "") -> dict[str, Any]:
    report: dict[str, Any] = state["bench"].update(tensors, FAULTS[fault] if fault else None, way)
    return report


def puts(state: dict[str, Any], tensors: Tensors, way: Way) -> tuple[int, list[tuple[str, int, int]]]:
    """An update in small buckets: how many; at each write of the slot where the update stood, how many tensors had come, and were put."""
    bench, seen = state["bench"], []
    slot = slots(bench)
    stock = slot.write

    def write(given: Any) -> None:
        seen.append((bench.applier._state, bench.applier._receiver.tensors, len(given)))
        stock(given)

    with patch.object(slot, "write", write), patch("tests.bench.BUCKET", 16 << 10):
        assert bench.update(tensors, None, way)["state"] == "verified"
        return len(bench.applier._receiver.plan.buckets), seen


def slots(bench: Bench) -> Any:
    return bench.applier._adapters._slot


@contextlib.contextmanager
def half_put(bench: Bench, tensors: Tensors) -> Iterator[None]:
    """vLLM raises when half of the layers have been given theirs; on the way back it does not."""
    layers = list(slots(bench)._manager.modules.values())
    layer, left = layers[len(layers) // 2], [2]
    stock = layer.set_lora

    def once(*args: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("no")
        stock(*args)

    with patch.object(layer, "set_lora", once):
        yield


@contextlib.contextmanager
def spoilt(bench: Bench, tensors: Tensors) -> Iterator[None]:
    """One element of one layer comes out otherwise than it was sent, in both tries."""
    slot, left = slots(bench), [2]
    stock = slot.write

    def write(given: Any) -> None:
        stock(given)
        left[0] -= 1
        if left[0] >= 0:
            next(slot._layers())[0].lora_a_stacked[0].view(-1)[3] += 1

    with patch.object(slot, "write", write):
        yield


FAULTS = {
    "half put": Fault(worker=half_put),
    "spoilt": Fault(worker=spoilt),
    "contract": Fault(worker=raising(lambda bench: (bench.applier._guard, "verify"))),
}


# --- the tests --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(checkpoint: Any) -> Iterator[Peer]:
    with engine_process() as peer:
        peer.call(start, checkpoint("qwen3", 1), seconds=SECONDS)
        yield peer


def gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_an_adapter_alone_equals_merged_weights_and_leaves_the_base_to_the_bit(engine: Peer, tensors: Any) -> None:
    base = tensors("qwen3", 1)
    first, second = pairs(base, 5), pairs(base, 6, rank=4, layers=("q_proj", "k_proj", "down_proj"))

    def bring(given: Tensors, way: Way, fault: str = "") -> tuple[dict[str, Any], list[float], dict[str, Any]]:
        report = engine.call(update, given, way, fault, seconds=SECONDS)
        return (report, *engine.call(said, seconds=SECONDS))

    want = {}
    for name, adapter in (("none", {}), ("first", first), ("second", second)):
        report, want[name], _ = bring(merged(base, adapter), Way())
        assert report["state"] == "verified", report
    refused, *_ = bring(first, ALONE)
    assert refused["state"] == "refused" and refused["error"]["code"] == "base_refused"
    assert "may have one merged in already" in refused["error"]["message"]

    report, scores, weights = bring({**base, **first}, WITH_BASE)
    assert report["state"] == "verified" and report["checks"]["adapted_layers"], report
    assert gap(scores, want["first"]) < ROUNDING < SEEN < gap(want["none"], want["first"])
    for adapter, name in ((second, "second"), (first, "first"), (second, "second")):
        report, scores, after = bring(adapter, ALONE)
        assert report["state"] == "verified" and report["tensors"] == len(adapter), report
        assert after == weights, "no weight is touched"
        assert gap(scores, want[name]) < ROUNDING

    # What fails is undone by every worker itself: what was sent before lies there again, to the bit.
    for fault in FAULTS:
        report, again, after = bring(first, ALONE, fault)
        assert report["state"] == "failed" and report["checks"]["rolled_back"] == 1 and not report["wrote"], report
        assert (again, after) == (scores, weights), fault
    report, behind, _ = bring(first, ALONE)
    assert report["state"] == "verified" and gap(behind, want["first"]) < ROUNDING

    # Weights that come without it take its place.
    report, plain, _ = bring(base, Way())
    assert report["state"] == "verified" and plain == want["none"]
    refused, *_ = bring(first, ALONE)
    assert refused["error"]["code"] == "base_refused"


def test_a_complete_update_that_fails_goes_back_to_the_weights_and_their_adapter(engine: Peer, tensors: Any) -> None:
    base, adapter = tensors("qwen3", 1), pairs(tensors("qwen3", 1), 7)
    kept = Way(retain=True, adapter=Adapter.WITH_BASE)
    assert engine.call(update, {**base, **pairs(base, 5)}, kept, seconds=SECONDS)["state"] == "verified"
    assert engine.call(update, adapter, Way(retain=True, adapter=Adapter.ALONE), seconds=SECONDS)["state"] == "verified"
    before = engine.call(said, seconds=SECONDS)
    for other, way in ((tensors("qwen3", 2), Way(retain=True)), ({**tensors("qwen3", 2), **pairs(base, 8)}, kept)):
        report = engine.call(update, other, way, "contract", seconds=SECONDS)
        assert report["state"] == "failed" and report["checks"]["rolled_back"] == 1 and not report["wrote"], report
        assert engine.call(said, seconds=SECONDS) == before


def swapped(tensors: Tensors, one: str, other: str) -> Tensors:
    names = {one: other, other: one}
    return {re.sub(f"{one}|{other}", lambda found: names[found[0]], name): tensor for name, tensor in tensors.items()}


def test_an_adapter_that_is_cut_over_several_buckets_is_registered_once_when_all_of_it_is_there(engine: Peer, tensors: Any) -> None:
    base, adapter = tensors("qwen3", 1), pairs(tensors("qwen3", 1), 5)
    both = {**base, **adapter}
    # As they come from PEFT: layers that are adapted, and no others, have a segment more in their names.
    wrapped = {
        f"base_model.model.{name.replace('.weight', '.base_layer.weight')}"
        if name.split(".")[-2] in ADAPTED
        else f"base_model.model.{name}": value
        for name, value in base.items()
    }
    mixed = {
        name: value
        for pair in zip(wrapped.items(), [*adapter.items(), *[None] * len(base)], strict=False)
        for name, value in filter(None, pair)
    }
    assert len(mixed) == len(both)
    buckets, seen = engine.call(puts, mixed, WITH_BASE, seconds=SECONDS)
    assert buckets > 3 and seen == [("applied", len(both), len(adapter))]
    buckets, seen = engine.call(puts, adapter, ALONE, seconds=SECONDS)
    assert buckets > 3 and seen == [("staged", len(adapter), len(adapter))]


WRONG = {
    "a rank above the engine's": (lambda base: pairs(base, 5, rank=16), "above the engine's max_lora_rank of 8"),
    "half of a pair": (lambda base: dict(list(pairs(base, 5).items())[1:]), "one half is missing"),
    "a layer that is not there": (
        lambda base: {name.replace("down_proj", "dawn_proj"): value for name, value in pairs(base, 5).items()},
        r"layers that this engine can't adapt.*dawn_proj \(closest: model.layers.0.mlp.down_proj\)",
    ),
    "another shape": (
        lambda base: swapped(pairs(base, 5), "gate_proj", "down_proj"),
        "of another shape than the engine's layer",
    ),
    "DoRA": (
        lambda base: {**pairs(base, 5), "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector.weight": torch.ones(4)},
        "lora_magnitude_vector",
    ),
    "a weight": (
        lambda base: {**pairs(base, 5), "model.norm.weight": base["model.norm.weight"]},
        "no parts of the adapter, which is sent alone",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_an_engine_cannot_take_is_refused_with_names_before_a_byte_moves(case: str, engine: Peer, tensors: Any) -> None:
    base = tensors("qwen3", 1)
    make, words = WRONG[case]
    if not engine.call(counts):
        assert engine.call(update, {**base, **pairs(base, 5)}, WITH_BASE, seconds=SECONDS)["state"] == "verified"
    before = engine.call(said, seconds=SECONDS)
    report = engine.call(update, make(base), ALONE, seconds=SECONDS)
    assert report["state"] == "refused" and report["error"]["code"] == "manifest_refused", report
    assert re.search(words, report["error"]["message"]), report["error"]["message"]
    assert engine.call(said, seconds=SECONDS) == before


def counts(state: dict[str, Any]) -> bool:
    return state["bench"].applier._adapters.counts is not None


def test_an_adapter_is_not_taken_where_bytes_are_not_staged(engine: Peer, tensors: Any) -> None:
    base = tensors("qwen3", 1)
    report = engine.call(update, {**base, **pairs(base, 5)}, Way(stage="none", tries=1, adapter=Adapter.WITH_BASE), seconds=SECONDS)
    assert report["state"] == "refused" and "sync.stage is none" in report["error"]["message"]
