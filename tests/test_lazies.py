"""Values that a first run fills in: found, taken back, filled in again, and the rest as it was."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.storage.adopt import Adopter
from weightsync.storage.owners import walk
from weightsync.storage.pins import pin
from weightsync.worker.lazies import Lazies, Snapshot


@dataclass(frozen=True)
class Frozen:
    scale: Any = None
    numbers: dict[str, int] = field(default_factory=dict)


class Helper:
    """Somebody's object that comes with the first run."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Bare:
    """An object that has nothing yet."""

    value: torch.Tensor


class Model(nn.Module):
    """Caches in every way that a first run can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("hidden", None, persistent=False)
        self.merged: torch.Tensor | None = None
        self.product: float | None = None
        self.table: dict[str, torch.Tensor] = {}
        self.grown: list[Any] = [torch.zeros(1)]
        self.frozen = Frozen()
        self.counter = 0
        self.view: torch.Tensor | None = None
        self.scratch: torch.Tensor | None = None
        self.cache: Any = None
        self.helper: Helper | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.merged is None:
            self.merged = torch.cat([self.weight, self.weight * 2])
        if not hasattr(self, "absent"):
            self.register_buffer("absent", self.weight * 3, persistent=False)
        if self.hidden is None:
            self.hidden = self.weight * 4
        if self.product is None:
            self.product = float(self.weight.sum())
        if not self.table:
            self.table["w"] = self.weight * 5
            self.grown.append(self.weight * 6)
        if self.frozen.scale is None:
            object.__setattr__(self.frozen, "scale", self.weight * 7)
        if self.scratch is None:
            self.scratch = x.new_zeros(len(x))
        if self.view is None:
            self.view = self.weight[:2]
        if self.helper is None:
            self.helper = Helper(self.weight * 8)
        self.counter += 1
        return self.merged * self.product


def first_run() -> tuple[Model, Lazies]:
    model = Model()
    fresh = Snapshot(model)
    model(torch.zeros(16))
    model.cache = torch.full((3,), 9.0)  # bound from outside, as a KV cache is
    return model, Lazies(model, fresh)


def test_what_a_first_run_filled_in_is_found_and_nothing_else() -> None:
    _, lazies = first_run()
    names = {path.removeprefix("model.") for path in lazies.paths}
    assert names == {"merged", "absent", "hidden", "product", "table", "frozen.scale", "scratch", "cache"}
    assert sorted(lazies.unrefreshable) == ["model.grown", "model.helper"]
    assert lazies.counts == {"lazies": 8, "unrefreshable": 2}


def test_a_placeholder_that_the_first_run_replaced_is_told_as_what_no_update_refreshes() -> None:
    model = Model()
    model.lent = torch.empty(0)
    fresh = Snapshot(model)
    model.lent = model.weight * 2
    lazies = Lazies(model, fresh)
    assert lazies.unrefreshable == ["model.lent"] and "model.lent" not in lazies.paths
    model.lent = model.weight[:2]
    assert Lazies(model, fresh).unrefreshable == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([None, None], lambda w: [w * 2, None]),
        ({"a": None}, lambda w: {"a": w * 2}),
        ({"a": [None]}, lambda w: {"a": [w * 2]}),
        ((), lambda w: (w * 2,)),
        (1.0, lambda w: float(w.sum())),
        (1, lambda w: float(w.sum())),
        (False, lambda w: w * 2),
        (Helper(torch.zeros(4)), lambda w: Helper(w * 2)),
    ],
    ids=["list", "dict", "nested", "tuple", "number", "whole number", "flag", "object"],
)
def test_what_took_the_place_of_something_else_is_told_as_what_no_update_refreshes(before: Any, after: Any) -> None:
    model = Model()
    model.lent, model.steady = before, Helper(torch.ones(4))
    fresh = Snapshot(model)
    assert Lazies(model, fresh).unrefreshable == []
    model.lent = after(model.weight)
    lazies = Lazies(model, fresh)
    assert lazies.unrefreshable == ["model.lent"] and lazies.paths == []


def test_what_an_object_without_attributes_got_and_what_lies_deep_in_an_empty_table_is_filled_in_again() -> None:
    model = Model()
    model.bare, model.layers = Bare(), {}
    fresh = Snapshot(model)
    model.bare.value, model.layers["a"] = model.weight * 2, (model.weight * 3, model.weight * 4)
    lazies = Lazies(model, fresh)
    assert lazies.paths == ["model.layers", "model.bare.value"] and lazies.unrefreshable == []
    lazies.reset()
    assert not model.layers and not hasattr(model.bare, "value")
    assert lazies.settle() == {"lazies_refreshed": 0, "lazies_kept": 2}
    assert model.bare.value.tolist() == [2.0] * 4


def test_what_a_runner_has_bound_to_the_model_is_left_alone() -> None:
    model = Model()
    fresh = Snapshot(model)
    model(torch.zeros(16))
    runner = SimpleNamespace(model=model, caches=[torch.full((3,), 9.0)])
    model.cache = runner.caches[0][1:]
    assert "model.cache" not in Lazies(model, fresh, runner).paths
    assert "model.merged" in Lazies(model, fresh, runner).paths


def test_each_is_filled_in_again_from_the_new_weights_and_comes_back_to_its_storage() -> None:
    model, lazies = first_run()
    pins = pin(walk(model, "model"))
    held = {path: tensor.data_ptr() for path, tensor in walk(model, "model").tensors.items()}
    for value in (5.0, 7.0):
        model.weight.data.fill_(value)
        lazies.reset()
        assert model.merged is None and not hasattr(model, "absent") and not model.table
        model(torch.zeros(1))
        counts = lazies.settle()
        assert Adopter(pins).adopt(walk(model, "model")).ok
        assert model.merged is not None and torch.equal(model.merged, torch.tensor([value] * 4 + [value * 2] * 4))
        assert torch.equal(model.absent, torch.full((4,), value * 3))
        assert torch.equal(model.hidden, torch.full((4,), value * 4))
        assert torch.equal(model.table["w"], torch.full((4,), value * 5))
        assert torch.equal(model.frozen.scale, torch.full((4,), value * 7))
        assert model.product == value * 4 and lazies.changed == ["model.product"]
        assert counts == {"lazies_refreshed": 6, "lazies_kept": 2}
        assert lazies.kept == ["model.scratch", "model.cache"], "and of the last run alone"
        assert {path: tensor.data_ptr() for path, tensor in walk(model, "model").tensors.items() if path in held} == held
    assert list(model.state_dict()) == ["weight"]


def test_a_number_that_graphs_hold_counts_as_changed_until_they_are_captured_anew() -> None:
    model, lazies = first_run()
    assert lazies.changed == []
    model.weight.data.fill_(5.0)
    for _ in range(2):  # the first of two updates to the same weights fails before it has captured anything
        lazies.reset()
        model(torch.zeros(16))
        lazies.settle()
        assert lazies.changed == ["model.product"]
    lazies.note_captured()
    assert lazies.changed == []
    model.weight.data.fill_(1.0)
    lazies.reset()
    model(torch.zeros(16))
    lazies.settle()
    assert lazies.changed == ["model.product"]


def test_a_number_whose_owner_was_built_anew_counts_as_changed() -> None:
    model = Model()
    fresh = Snapshot(model)
    object.__setattr__(model.frozen, "scale", 2.0)
    lazies = Lazies(model, fresh)
    assert lazies.paths == ["model.frozen.scale"] and lazies.changed == []
    model.frozen = Frozen(2.0)
    lazies.note_captured()
    assert lazies.changed == ["model.frozen.scale"]


def test_what_the_run_does_not_fill_in_is_the_same_object_as_before() -> None:
    model, lazies = first_run()
    before = {name: getattr(model, name) for name in ("cache", "scratch", "merged", "absent", "hidden", "product")}
    table = dict(model.table)
    lazies.reset()
    assert model.cache is None
    assert lazies.settle() == {"lazies_refreshed": 0, "lazies_kept": 8}
    assert all(getattr(model, name) is value for name, value in before.items())
    assert model.table.keys() == table.keys() and model.table["w"] is table["w"]
    assert dict(model.named_buffers()).keys() == {"hidden", "absent"}
    assert list(model.state_dict()) == ["weight"]


def test_memory_whose_size_goes_by_the_batch_stays_where_graphs_read_it() -> None:
    model, lazies = first_run()
    scratch = model.scratch
    lazies.reset()
    model(torch.zeros(2))
    assert model.scratch is not None and len(model.scratch) == 2
    lazies.settle()
    assert model.scratch is scratch


def test_an_object_that_was_built_anew_is_left_alone() -> None:
    model, lazies = first_run()
    model.frozen = Frozen()
    lazies.reset()
    model(torch.zeros(16))
    lazies.settle()
    assert torch.equal(model.frozen.scale, torch.full((4,), 7.0))


def test_a_snapshot_keeps_no_object_alive() -> None:
    model = Model()
    fresh = Snapshot(model)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None
    other = Model()
    (was,) = (entry for entry in fresh._fresh.values() if "weight" in entry.had)
    fresh._fresh[id(other)] = was  # as when an object comes to lie where another was
    assert fresh.of(other) is None
