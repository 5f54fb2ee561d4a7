"""A model whose layers lie in several workers: what each makes of a manifest, and what it can do without. Loaders made up.

Not covered: vLLM's own loaders in such workers (`test_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from weightsync.errors import ApplyFailed, ManifestRefused
from weightsync.protocol import Manifest, TensorSpec, WorkerReport
from weightsync.transport.packing import plan_buckets
from weightsync.worker import admission, loadmap, staging
from weightsync.worker.loadmap import LoadMap

Load = Callable[[Any, Any], None]
CHECKPOINT = ("first.a", "first.b", "second.a", "second.b")


class Stage(torch.nn.Module):
    """One layer of two parameters, on meta.

    Args:
        name: of the layer; the loader passes over all others.
        load: loader instead of the one that copies.
    """

    def __init__(self, name: str, load: Load | None = None) -> None:
        super().__init__()
        layer = torch.nn.Module()
        layer.a, layer.b = (torch.nn.Parameter(torch.empty(4, 2, device="meta"), requires_grad=False) for _ in "ab")
        self.add_module(name, layer)
        self._load = load

    def load_weights(self, weights: Any) -> None:
        if self._load is not None:
            return self._load(self, weights)
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            layer, _, part = name.rpartition(".")
            if part == "both" and f"{layer}.a" in parameters:  # another layout
                parameters[f"{layer}.a"].copy_(tensor[0])
                parameters[f"{layer}.b"].copy_(tensor[1])
            elif name in parameters:
                parameters[name].copy_(tensor)
        return None


def specs(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "float32", (2, 4, 2) if name.endswith("both") else (4, 2)) for name in names)


def judge(*names: str, stages: tuple[str, ...] = ("first", "second")) -> list[LoadMap]:
    """What each stage makes of a manifest."""
    maps = []
    for stage in stages:
        base = loadmap.record(Stage(stage), specs(*CHECKPOINT))
        maps.append(admission.admit(Manifest(specs(*names)), base, lambda stage=stage: Stage(stage), False, alone=False))
    return maps


def refusal(maps: list[LoadMap]) -> Any:
    from weightsync.fleet.reports import failure

    return failure([WorkerReport(rank, "u", "receiving", unclaimed=found.unclaimed) for rank, found in enumerate(maps)])


def test_each_stage_takes_its_own_and_can_do_without_the_others() -> None:
    first, second = judge(*CHECKPOINT)
    assert refusal([first, second]) is None
    assert (first.unused(CHECKPOINT), second.unused(CHECKPOINT)) == ({2, 3}, {0, 1})


def test_another_layout_that_one_stage_knows_is_known() -> None:
    names = ("first.both", "module.second.a", "second.b")
    first, second = judge(*names)
    assert (first.unclaimed, list(second.unclaimed)) == ({}, ["first.both"])
    assert refusal([first, second]) is None
    assert (first.unused(names), second.unused(names)) == ({1, 2}, {0})


def test_a_name_that_no_stage_knows_is_refused_as_the_trainer_calls_it_with_the_closest() -> None:
    maps = judge(*CHECKPOINT, "first.c", "module.third.a")
    error = refusal(maps)
    assert isinstance(error, ManifestRefused) and error.names == ("first.c", "module.third.a")
    assert error.message == "2 unknown to every worker: first.c (closest: first.b), module.third.a (read as third.a)"


@pytest.mark.parametrize(("missing", "by"), [("first.b", "first"), ("second.b", "second")])
def test_what_is_missing_is_said_by_the_stage_that_has_it(missing: str, by: str) -> None:
    names = [name for name in CHECKPOINT if name != missing]
    other = {"first": "second", "second": "first"}[by]
    assert refusal(judge(*names, stages=(other,))) is None
    with pytest.raises(ManifestRefused, match=f"1 missing: {missing}"):
        judge(*names, stages=(by,))


def test_a_worker_alone_refuses_by_itself() -> None:
    base = loadmap.record(Stage("first"), specs("first.a", "first.b"))
    with pytest.raises(ManifestRefused, match=r"1 unknown: second\.a"):
        admission.admit(Manifest(specs("first.a", "first.b", "second.a")), base, lambda: Stage("first"), tied=False)


def holds_back(model: Any, weights: Any) -> None:
    """Writes when it has two tensors, and then a third thing made of both."""
    held = dict(weights)
    model.first.a.copy_(torch.cat([held["first.a"][:2], held["first.b"][:2]]))


def reads(model: Any, weights: Any) -> None:
    """Copies one tensor, and looks at a value of another."""
    held = dict(weights)
    if held["second.b"].sum().item() >= 0:
        model.first.a.copy_(held["first.a"])


def becomes(model: Any, weights: Any) -> None:
    """Copies nothing: a tensor becomes the parameter."""
    model.first.a = torch.nn.Parameter(dict(weights)["first.a"], requires_grad=False)


@pytest.mark.parametrize(
    ("load", "needed"),
    [(holds_back, {"first.a", "first.b"}), (reads, {"first.a", "second.b"}), (becomes, {"first.a"})],
)
def test_what_a_loader_does_anything_with_is_needed(load: Load, needed: set[str]) -> None:
    found = loadmap.record(Stage("first", load), specs(*CHECKPOINT))
    assert {CHECKPOINT[index] for index in range(4) if index not in found.unused(CHECKPOINT)} == needed


def test_a_head_that_only_the_last_stage_ties_is_left_to_it() -> None:
    names = ("first.a", "first.b", "lm_head.weight")
    last = loadmap.record(Stage("first"), specs(*names))
    assert admission.tied_heads(last) == {"lm_head.weight": ["first.a", "first.b"]}
    middle = loadmap.record(Stage("second"), specs(*names))
    assert admission.tied_heads(middle) == {}, "it has nothing to compare the head with"


def test_layers_that_came_short_are_named_with_the_tensors_that_are_missing() -> None:
    from weightsync.worker import loading

    load_map = loadmap.record(Stage("first"), specs(*CHECKPOINT))
    manifest = Manifest(specs("first.a", "second.a", "second.b"))
    plan = plan_buckets(manifest, 1 << 20)
    incoming = staging.Whole(manifest, plan, torch.zeros(plan.stream_bytes, dtype=torch.uint8), [1, 2]).update(load_map, [])
    taken = [spec.name for spec in manifest.tensors]
    with pytest.raises(ApplyFailed, match=r"1 layer\(s\) are incomplete: first \(8 of 16 elements\): first.b did not come") as caught:
        loading.require_complete(incoming, taken, {"first": 8})
    assert caught.value.names == ("first.b",)
    whole = staging.Staged(Manifest(specs(*CHECKPOINT)), incoming.offsets, incoming.data, load_map, [])
    with pytest.raises(ApplyFailed, match=r"first \(8 of 16 elements\): first.a, first.b came, and a loader passed over some") as caught:
        loading.require_complete(whole, list(CHECKPOINT), {"first": 8})
    assert caught.value.names == ("first.a", "first.b")
    assert loading.require_complete(whole, list(CHECKPOINT), {"first": 16}) == {"tensors": 4, "layers": 1}
