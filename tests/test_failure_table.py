"""What becomes of an engine when an update fails: every fault, then a complete update, or another failure before it.

One real engine on a CPU, in a process of its own, serves the whole table (`faulty`), in three
ways: with staging, with the last update kept to go back to, and without staging. For each
fault: what was reported, that an engine which wrote nothing (or went back) answers as before
and holds the same bytes, that one which wrote says so until a complete update was verified,
and that nothing is left behind. After the next complete update every tensor and every
log-probability equals a cold engine's, to the bit.

Not covered: what a fleet makes of it (`test_faults.py`, `test_main_job.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import faulty, random_models
from tests.faulty import AGAIN, UP, K, Q, V
from tests.fleets import ENGINE_ARGS
from tests.peers import Peer, engine_process
from weightsync.check.engine import OURS
from weightsync.errors import ManifestRefused
from weightsync.protocol import Manifest, TensorSpec
from weightsync.worker import admission, loadmap

pytestmark = pytest.mark.engine

SECONDS = 200.0


class Engine:
    """The engine, and what cold ones hold and say."""

    def __init__(self, peer: Peer, folders: dict[str, Any]) -> None:
        self.peer = peer
        arguments = {**ENGINE_ARGS, "enable_prefix_caching": False}
        self.cold = self.call(faulty.start, folders, arguments, OURS)
        self.held = "a"  # the weights of the last update that was verified
        self.wrote = False
        self.kept = False  # whether that update's bytes are still there
        self.quiet = self.call(faulty.after, True, False)

    def call(self, function: Any, *args: Any) -> Any:
        return self.peer.call(function, *args, seconds=SECONDS)

    @property
    def other(self) -> str:
        return "b" if self.held == "a" else "a"

    def attempt(self, fault: str, weights: str, way: str = "staged") -> dict[str, Any]:
        """One update; whether it may have written is told as it is."""
        report: dict[str, Any] = self.call(faulty.attempt, fault, weights, way)
        if report["state"] == "verified":
            self.held, self.wrote, self.kept = weights, False, way == "kept"
        wrote = {self.wrote or (report["at"] in ("apply", "verify") and report["state"] != "verified")}
        if way == "streamed" and report["error"] and report["error"]["code"] != APPLY:
            wrote.add(self.wrote)  # it broke before the first tensor was taken, or behind it
        if report["checks"].get("rolled_back"):
            wrote = {False}
        assert report["wrote"] in wrote
        self.wrote = report["wrote"]
        return report

    def require_sound(self) -> None:
        """It answers and holds what a cold engine does, if it may serve; and whether or not, nothing is left of any update."""
        if not self.wrote:
            seen, want = self.call(faulty.look), self.cold[self.held]
            assert seen["outputs"] == want["outputs"]
            assert {path for part in ("registered", "owned") for path in seen[part] if seen[part][path] != want[part].get(path)} == set()
        after = self.call(faulty.after, False, self.kept)
        assert after["changed"] == {}
        assert (after["ours"], after["staging"]) == ([], int(self.kept))


@pytest.fixture(scope="module")
def started(checkpoint: Any) -> Iterator[Engine]:
    with engine_process() as peer:
        yield Engine(peer, {name: checkpoint("qwen3", seed) for seed, name in enumerate("abc", 1)})


@pytest.fixture
def engine(started: Engine) -> Engine:
    """The engine, serving whatever the test before has left."""
    if started.wrote:
        assert started.attempt("none", started.other)["state"] == "verified"
    return started


REFUSED, TRANSPORT, DIGEST, APPLY = "manifest_refused", "transport_failed", "digest_mismatch", "apply_failed"
DOWN, NORM = "model.layers.1.mlp.down_proj", "model.layers.1.input_layernorm"
#: Fault to how far it comes, the error's code, and what its names begin with, in any order.
TABLE: dict[str, tuple[str, str, set[str]]] = {
    **{
        f"{name}, offered": ("begin", REFUSED, names)
        for name, names in {
            "q missing": {Q},
            "k missing": {K},
            "v missing": {V},
            "up missing": {UP},
            "norm missing": {f"{NORM}.weight"},
            "qkv missing": {Q, K, V},
            "down missing": {f"{DOWN}.weight"},
            "embedding missing": {"model.embed_tokens.weight"},
            "head missing": {"lm_head.weight"},
            "layer missing": {"model.layers.1."},
            "wrong shape": {K},
        }.items()
    },
    **{
        f"{name}, admitted": ("apply", APPLY, names)
        for name, names in {
            "q missing": {Q},
            "k missing": {K},
            "v missing": {V},
            "up missing": {UP},
            "norm missing": {f"{NORM}.weight"},
            "qkv missing": {Q, K, V},
            "down missing": {f"{DOWN}.weight"},
            "embedding missing": {"model.embed_tokens.weight"},
            "head missing": {"lm_head.weight"},
            "layer missing": {"model.layers.1."},
            "wrong shape": {K},
        }.items()
    },
    "NaN": ("receive", "bad_values", {K}),
    "short bucket, trainer gone": ("receive", TRANSPORT, set()),
    "short bucket": ("receive", DIGEST, {"model.embed_tokens.weight"}),
    "bytes flipped": ("receive", DIGEST, {"model.embed_tokens.weight"}),
    "gone at 0 %": ("receive", TRANSPORT, set()),
    "gone at 50 %": ("receive", TRANSPORT, set()),
    "gone at 100 %": ("receive", "", set()),  # staged, and aborted
    "loader raises at 1": ("apply", APPLY, {"lm_head.weight"}),
    "loader raises at n/2": ("apply", APPLY, {V}),
    "loader raises at n": ("apply", APPLY, {"model.norm.weight"}),
    "processing raises in a linear layer": ("apply", APPLY, {"model.layers.1."}),
    "processing raises in attention": ("apply", APPLY, set()),
    "repair raises": ("verify", APPLY, set()),
    "verify raises": ("verify", APPLY, set()),
}


def require_reported(fault: str, way: str, report: dict[str, Any]) -> None:
    at, code, names = TABLE[fault]
    error = report["error"] or {"code": "", "names": [], "message": ""}
    assert error["code"] == code, error
    assert report["at"] == at or (way == "streamed" and at == "receive" and report["at"] == "apply"), report
    assert len(error["names"]) >= len(names) and (not names or all(name.startswith(tuple(names)) for name in error["names"])), error
    assert all(any(name.startswith(start) for name in error["names"]) for start in names)
    if "raises" in fault:
        assert "Broken: out of" in error["message"], "what the worker said comes through"


def require_repaired(engine: Engine, way: str) -> None:
    """A complete update brings everything to where a cold engine of its weights has it."""
    found = engine.attempt("none", engine.other, way)
    assert found["state"] == "verified", found["error"]
    engine.require_sound()
    after = engine.call(faulty.after, True, engine.kept)
    assert after["ours"] == [] and all(after[key] <= engine.quiet[key] for key in ("threads", "files"))


@pytest.mark.parametrize("again", [False, True], ids=["then complete", "then broken again"])
@pytest.mark.parametrize("fault", TABLE)
def test_what_fails_is_told_leaves_nothing_behind_and_the_next_complete_update_is_right(fault: str, again: bool, engine: Engine) -> None:
    require_reported(fault, "staged", engine.attempt(fault, "c"))
    engine.require_sound()
    if again:
        faults = list(TABLE)
        behind = faults[(faults.index(fault) + len(faults) // 2) % len(faults)]  # of another kind
        require_reported(behind, "staged", engine.attempt(behind, "c"))
        engine.require_sound()
    require_repaired(engine, "staged")


@pytest.mark.parametrize("fault", TABLE)
def test_with_the_last_update_kept_a_failure_leaves_its_weights_in_place_to_the_bit(fault: str, engine: Engine) -> None:
    if not engine.kept:
        require_repaired(engine, "kept")
    report = engine.attempt(fault, "c", "kept")
    require_reported(fault, "kept", report)
    assert not engine.wrote and bool(report["checks"].get("rolled_back")) is (TABLE[fault][0] in ("apply", "verify"))
    engine.require_sound()
    require_repaired(engine, "kept")


@pytest.mark.parametrize("fault", [name for name in TABLE if name != "gone at 100 %"])  # all has come then, and is applied
def test_what_is_not_staged_fails_with_the_same_words_and_is_repaired_by_the_next(fault: str, engine: Engine) -> None:
    require_reported(fault, "streamed", engine.attempt(fault, "c", "streamed"))
    engine.require_sound()
    require_repaired(engine, "streamed")


@pytest.mark.parametrize("order", ["q late", "layer late"])
def test_what_comes_behind_all_else_is_loaded_where_it_belongs(order: str, engine: Engine) -> None:
    assert engine.attempt(order, engine.other)["state"] == "verified"
    engine.require_sound()


def test_a_fault_that_does_not_come_back_is_gone_with_the_second_try(engine: Engine) -> None:
    report = engine.attempt("loader raises once", engine.other)
    assert report["state"] == "verified" and report["checks"]["second_tries"] == 1
    engine.require_sound()


def test_a_tensor_that_comes_twice_does_not_count_for_one_that_is_missing(engine: Engine) -> None:
    """vLLM's own count takes the second for new elements: the layer was processed before its last tensor had come."""
    report = engine.attempt("shard twice", engine.other)
    engine.wrote = True
    assert report["state"] == "failed" and "came twice" in report["error"]["message"]


def test_an_element_that_two_tensors_fill_counts_once(engine: Engine) -> None:
    """As above: a scale that gate and up share made up for the last tensor, which was dropped when it came."""
    order = ["0/gate_scale", "0/up_scale", "0/rows", "0/point"]
    for way in ("staged", "streamed"):
        assert engine.call(random_models.through_updates, [("shared", 2)], False, order, order[:3], way) == []


TWICE = ["shard twice, other values", *(f"{name} again after all else" for name in AGAIN)]


@pytest.mark.parametrize("way", ["staged", "compared"])
@pytest.mark.parametrize("fault", TWICE)
def test_a_tensor_that_comes_twice_with_other_values_is_told(fault: str, way: str, engine: Engine) -> None:
    report = engine.attempt(fault, "c", way)
    engine.wrote = True  # whatever it says
    assert report["state"] == "failed" and report["wrote"]


def test_stored_bytes_of_a_complete_update_compare_equal(engine: Engine) -> None:
    report = engine.attempt("none", engine.other, "compared")
    assert report["state"] == "verified" and report["checks"]["stored"] > 0
    engine.require_sound()


def test_a_layer_whose_processing_did_nothing_is_told_and_brought_back_by_the_next_update(engine: Engine) -> None:
    """Its kernel lets go of a parameter, which was there still; no later update could be loaded, since it had nothing to put there."""
    report = engine.attempt("processing skipped in a linear layer", "c")
    assert report["error"]["code"] == "verdict_not_ok" and report["error"]["names"] == ["model.layers.1.self_attn.qkv_proj.weight"]
    require_repaired(engine, "staged")
    engine.require_sound()


def test_a_parameter_that_somebody_has_moved_gets_the_new_values_where_a_plan_writes_its_old_place(engine: Engine) -> None:
    """The repair took its old bytes for what had been loaded, and brought them over what the plan had written."""
    reports = [engine.attempt("none", engine.other) for _ in range(2)]
    assert reports[1]["checks"]["layers_planned"] > 0
    engine.call(faulty.move, "model.norm.weight")
    report = engine.attempt("none", engine.other)
    assert report["state"] == "verified" and "layers_planned" not in report["checks"]
    engine.require_sound()


@pytest.mark.slow
def test_memory_does_not_grow_over_200_updates(engine: Engine) -> None:
    sizes = engine.call(faulty.resident, 200)
    slope = statistics.linear_regression(range(20, 200), sizes[20:]).slope
    print(f"{slope:.4f} MB an update, {sizes[20]:.1f} to {sizes[-1]:.1f} MB")
    engine.held = "a"
    assert slope <= 0.1
    engine.require_sound()


@pytest.mark.slow
def test_requests_are_answered_by_the_weights_of_their_version_through_200_rounds_of_staging(engine: Engine) -> None:
    faults = ["gone at 100 %", "bytes flipped", "gone at 50 %", "k missing, offered", "gone at 100 %", "short bucket, trainer gone"]
    done = engine.call(faulty.beside, 200, 20, faults, engine.held)
    engine.held = done["held"]
    assert done["error"] == ""
    assert sum(done["states"].values()) == 200 and done["states"]["commit verified False"] == 10
    assert not any(key.endswith("True") for key in done["states"])
    wrong = []
    for number, (weights, prompt, tokens, logprobs) in enumerate(done["answers"]):
        want = engine.cold[weights]["outputs"]
        if (tokens, logprobs) != (want["tokens"][prompt], want["logprobs"][prompt]):
            wrong.append(number)
    print(f"{len(done['answers'])} answers, {done['steps']} steps, {done['states']}")
    assert wrong == [] and len(done["answers"]) > 50
    engine.require_sound()


parts = st.lists(st.tuples(st.sampled_from(sorted(random_models.SHAPES)), st.integers(1, 4)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(parts=parts, late=st.booleans(), data=st.data())
def test_a_model_takes_all_its_tensors_in_any_order_and_no_part_of_them(
    parts: Any, late: bool, data: st.DataObject, started: Engine
) -> None:
    names = list(random_models.weights([random_models.Part(*part) for part in parts], 0))
    order = data.draw(st.permutations(names))
    subset = data.draw(st.sets(st.sampled_from(names)))
    way = data.draw(st.sampled_from(["staged", "streamed"]))
    assert started.call(random_models.through_updates, parts, late, order, [name for name in order if name in subset], way) == []


class Scaled(torch.nn.Module):
    """One scale that two tensors of the checkpoint are loaded into, and an embedding that is the output head too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(1, device="meta"))
        self.embed = torch.nn.Parameter(torch.empty(4, 2, device="meta"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if "lm_head" not in name:
                (self.embed if "embed" in name else self.scale).data.copy_(tensor)


def test_tensors_that_may_fill_one_place_may_come_in_any_order() -> None:
    """The map compared who came first, so that the same tensors in another order were refused as filled twice."""
    gate, up, embed, head = (TensorSpec(name, "float32", shape) for name, shape in {
        "gate.scale": (1,), "up.scale": (1,), "embed.weight": (4, 2), "lm_head.weight": (4, 2)
    }.items())  # fmt: skip
    base = loadmap.record(Scaled(), [gate, up, embed])
    for order in ([gate, up, embed, head], [up, gate, embed, head], [head, embed, up, gate]):
        assert admission.admit(Manifest(tuple(order)), base, Scaled, True).filled() == base.filled()
    with pytest.raises(ManifestRefused) as refused:
        admission.admit(Manifest((up, gate)), base, Scaled, True)
    assert refused.value.names == ("embed.weight",)
    third = TensorSpec("third.scale", "float32", (1,))
    with pytest.raises(ManifestRefused, match=r"1 filled twice: third\.scale fills what up\.scale fills") as refused:
        admission.admit(Manifest((up, gate, third, embed)), base, Scaled, True)
    assert refused.value.names == ("third.scale",)
