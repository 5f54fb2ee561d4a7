"""What the repair does with aliases, views, layouts, odd tensors; and what it leaves alone and reports."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.standin import StandinGraph
from weightsync.storage.adopt import Adopter, Adoption, rebind_temporaries
from weightsync.storage.contract import Contract, What, compare
from weightsync.storage.owners import walk
from weightsync.storage.pins import Pins, pin, places, slots_of
from weightsync.storage.selftest import SelfTest


def value(version: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (8,), float(version))


class Sealed:
    """A model, what a graph captured of it, and its contract."""

    def __init__(self, model: Any, **reads: torch.Tensor | float) -> None:
        self.model = model
        self.graph = StandinGraph(reads)
        found = walk(model, "m")
        self.pins: Pins = pin(found)
        self.contract = Contract.seal(slots_of(self.pins), found.scalars)
        self.adopter = Adopter(self.pins)

    def adopt(self) -> Adoption:
        return self.adopter.adopt(walk(self.model, "m"))

    def verdict(self) -> Any:
        now = walk(self.model, "m")
        return compare(self.contract, places(now, self.contract.places), scalars=now.scalars)

    def reads(self, name: str, version: float) -> bool:
        seen = self.graph.replay()[name]
        return bool(torch.all(seen == version)) if isinstance(seen, torch.Tensor) else seen == version


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


# Aliases and views


def test_tied_weights_come_back_together() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Module(), nn.Module()
    model.embed.weight = model.head.weight = frozen(value(1))
    sealed = Sealed(model, w=model.embed.weight)
    address = model.embed.weight.data_ptr()
    model.embed.weight = model.head.weight = frozen(value(2))
    assert sealed.reads("w", 1)
    done = sealed.adopt()
    assert (done.adopted, done.ok) == (["m.embed.weight"], True)
    assert sealed.reads("w", 2)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.data_ptr() == address
    assert sealed.verdict().ok


@pytest.mark.parametrize("second", [2, 3])
def test_tied_weights_that_came_apart_must_agree(second: int) -> None:
    model = nn.Module()
    model.embed, model.head = nn.Module(), nn.Module()
    model.embed.weight = model.head.weight = frozen(value(1))
    sealed = Sealed(model, w=model.embed.weight)
    model.embed.weight, model.head.weight = frozen(value(2)), frozen(value(second))
    done = sealed.adopt()
    if second == 2:
        assert done.ok
        assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
        assert sealed.reads("w", 2)
        assert sealed.verdict().ok
    else:
        assert set(done.conflicts) == {"m.embed.weight", "m.head.weight"}
        assert sealed.reads("w", 1)  # nothing was written
        assert not sealed.verdict().ok


def test_two_storages_that_became_one_tensor_are_a_conflict() -> None:
    model = types.SimpleNamespace(a=value(1), b=value(1))
    sealed = Sealed(model, a=model.a, b=model.b)
    model.a = model.b = value(2)
    assert set(sealed.adopt().conflicts) == {"m.a", "m.b"}
    model.a = model.b = sealed.pins.by_path["m.b"].view()  # one of the two is in its place
    assert set(sealed.adopt().conflicts) == {"m.a"}
    assert not sealed.verdict().ok


def test_an_alias_buffer_stays_a_view_of_its_parameter() -> None:
    """As Mamba's conv_weights."""

    def load(model: nn.Module, version: int) -> None:
        model.weight = frozen(value(version, 4, 1, 2))
        model.register_buffer("conv_weights", model.weight.view(4, 2), persistent=False)

    model = nn.Module()
    load(model, 1)
    sealed = Sealed(model, w=model.conv_weights)
    load(model, 2)
    assert sealed.reads("w", 1)
    done = sealed.adopt()
    assert done.ok
    assert sealed.reads("w", 2)
    model.weight.fill_(7)
    assert sealed.reads("w", 7)
    assert bool(torch.all(model.conv_weights == 7))
    assert "conv_weights" not in model.state_dict()
    assert sealed.verdict().ok


def columns(base: torch.Tensor) -> types.SimpleNamespace:
    return types.SimpleNamespace(base=base, even=base[:, 0::2], odd=base[:, 1::2])


@pytest.mark.parametrize(
    ("change", "adopted", "conflicts", "seen"),
    [
        # All of it anew, in one storage: consistent by construction.
        (lambda m: columns(value(2, 2, 4)), {"m.base", "m.even", "m.odd"}, set(), 2),
        # Views cloned apart, with the same values.
        (lambda m: types.SimpleNamespace(base=value(2, 2, 4), even=loose(2), odd=loose(2)), {"m.base", "m.even", "m.odd"}, set(), 2),
        # One of them disagrees.
        (lambda m: types.SimpleNamespace(base=value(2, 2, 4), even=loose(2), odd=loose(3)), set(), {"m.base", "m.even", "m.odd"}, 1),
        # The base was written in place, a view was copied from it.
        (lambda m: types.SimpleNamespace(base=m.base.fill_(2), even=loose(2), odd=m.odd), {"m.even"}, set(), 2),
        # The base was written in place, a view brings something else.
        (lambda m: types.SimpleNamespace(base=m.base.fill_(2), even=loose(3), odd=m.odd), set(), {"m.even"}, 2),
    ],
)
def test_overlapping_views_must_agree(change: Callable[[Any], Any], adopted: set[str], conflicts: set[str], seen: int) -> None:
    model = columns(value(1, 2, 4))
    holder = types.SimpleNamespace(**vars(model))
    sealed = Sealed(holder, w=model.base)
    vars(holder).update(vars(change(model)))
    done = sealed.adopt()
    assert (set(done.adopted), set(done.conflicts)) == (adopted, conflicts)
    assert sealed.reads("w", seen)
    assert sealed.verdict().ok is not bool(conflicts)


def loose(version: float) -> torch.Tensor:
    """A tensor of the layout of every second column of two rows of four, in a storage of its own."""
    return value(version, 2, 4)[:, 0::2]


def test_views_that_interleave_and_share_no_element_do_not_disturb_each_other() -> None:
    base = value(1, 2, 4)
    model = types.SimpleNamespace(even=base[:, 0::2], odd=base[:, 1::2])
    sealed = Sealed(model, w=base)
    model.even = loose(2)
    done = sealed.adopt()
    assert done.adopted == ["m.even"]
    assert sealed.graph.replay()["w"].tolist() == [[2, 1, 2, 1]] * 2  # type: ignore[union-attr]
    assert sealed.verdict().ok


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside its memory"])
def test_an_expanded_scale_is_written_once_for_all_that_it_stands_for(other: bool) -> None:
    def kernel(version: float) -> Any:
        one = value(version, 4, 1)
        return types.SimpleNamespace(scale=one.expand(4, 8), **({"one": one} if other else {}))

    model = types.SimpleNamespace(kernel=kernel(1))
    sealed = Sealed(model, scale=model.kernel.scale[:, :1])
    model.kernel = kernel(2)
    done = sealed.adopt()
    assert done.ok and sealed.verdict().ok and "m.kernel.scale" in done.refreshed
    assert sealed.reads("scale", 2) and torch.equal(model.kernel.scale, value(2, 4, 8))
    if other:
        model.kernel = types.SimpleNamespace(scale=value(3, 4, 1).expand(4, 8), one=value(4, 4, 1))
        assert len(sealed.adopt().conflicts) == 2
        assert sealed.reads("scale", 2), "what can't both be right leaves the captured bytes as they were"


def test_two_that_changed_places() -> None:
    model = types.SimpleNamespace(a=value(1), b=value(2))
    sealed = Sealed(model, a=model.a, b=model.b)
    model.a, model.b = model.b, model.a
    done = sealed.adopt()
    assert done.ok
    assert sealed.reads("a", 2) and sealed.reads("b", 1)
    assert bool(torch.all(model.a == 2)) and bool(torch.all(model.b == 1))
    assert sealed.verdict().ok


def test_new_views_of_adopted_memory_follow_it_and_those_that_cannot_are_told() -> None:
    model = types.SimpleNamespace(w=value(1))
    sealed = Sealed(model, w=model.w)
    whole = value(2, 12)
    model.w, model.pair, model.wide, model.bits = whole[4:], whole[4:6], whole, whole[4:].view(torch.int32)
    done = sealed.adopt()
    assert (done.adopted, set(done.followed), done.strays, done.appeared) == (["m.w"], {"m.pair", "m.bits"}, ["m.wide"], 3)
    model.w.fill_(5)
    assert model.pair.tolist() == [5, 5]
    assert bool(torch.all(model.bits.view(torch.float32) == 5))
    assert model.pair.data_ptr() == sealed.pins.by_path["m.w"].address
    assert bool(torch.all(model.wide == 2))


def test_views_beyond_the_adopted_part_or_in_its_holes_do_not_follow() -> None:
    model = types.SimpleNamespace(w=value(1), odd=value(1, 2, 4)[:, 0::2])
    sealed = Sealed(model, w=model.w)
    whole, grid = value(2, 12), value(2, 2, 4)
    model.w, model.wide, model.tail = whole[:8], whole, whole[6:10]
    model.odd, model.hole = grid[:, 0::2], grid[:, 1:2]
    done = sealed.adopt()
    assert (set(done.adopted), done.followed, set(done.strays)) == ({"m.w", "m.odd"}, [], {"m.wide", "m.tail", "m.hole"})
    assert sealed.pins.by_path["m.w"].storage.nbytes() == 32


# Objects that became two, or one


def kernel(version: float) -> types.SimpleNamespace:
    return types.SimpleNamespace(w=value(version))


@pytest.mark.parametrize(
    ("reload", "ok", "seen"),
    [
        (lambda m: (kernel(2),) * 2, True, 2),  # one new object at both paths
        (lambda m: (kernel(2), kernel(2)), True, 2),  # two with the same values
        (lambda m: (kernel(2), kernel(3)), False, 1),
        (lambda m: (m.a, kernel(2)), False, 1),  # the path that is sealed kept the old object; the other was rebuilt
        (lambda m: (kernel(2), m.b), False, 1),
    ],
)
def test_one_object_at_two_paths_is_still_one_after_the_reload_or_must_agree(reload: Callable[[Any], Any], ok: bool, seen: int) -> None:
    model = types.SimpleNamespace(a=kernel(1))
    model.b = model.a
    sealed = Sealed(model, w=model.a.w)
    assert set(sealed.pins.by_path) == {"m.a.w"}
    model.a, model.b = reload(model)
    done = sealed.adopt()
    assert done.ok is ok
    assert bool(done.conflicts) is not ok
    assert sealed.reads("w", seen)
    if ok:
        assert model.a.w.data_ptr() == model.b.w.data_ptr()
    assert sealed.verdict().ok or not ok


def test_a_path_is_found_by_another_name_of_its_holder() -> None:
    """Attributes are set anew in another order, so the walk comes to the shared object by another way."""
    model = types.SimpleNamespace(a=kernel(1))
    model.b = model.a
    sealed = Sealed(model, w=model.a.w)
    del model.a
    model.b = kernel(2)
    model.a = model.b
    assert "m.a.w" not in walk(model, "m").tensors
    assert sealed.adopt().ok
    assert sealed.reads("w", 2)
    assert sealed.verdict().ok


def test_a_new_name_that_comes_first_does_not_hide_the_sealed_one() -> None:
    model = types.SimpleNamespace(a=kernel(1))
    sealed = Sealed(model, w=model.a.w)
    del model.a
    model.early = kernel(2)
    model.a = model.early
    assert set(walk(model, "m").tensors) == {"m.early.w"}
    done = sealed.adopt()
    assert (done.adopted, done.lost) == (["m.a.w"], [])
    assert sealed.reads("w", 2)
    assert sealed.verdict().ok


# Layouts


def strided() -> torch.Tensor:
    return value(2, 4, 2).t()


@pytest.mark.parametrize(
    "new",
    [value(2, 4, 2), value(2, 2, 4).double(), strided(), value(2, 8), value(2, 2, 8)],
    ids=["shape", "dtype", "stride", "rank", "size"],
)
def test_another_layout_is_reported_and_nothing_is_copied(new: torch.Tensor) -> None:
    """As replace_parameter, which rebinds when the layout differs."""
    model = nn.Module()
    model.weight = frozen(value(1, 2, 4))
    sealed = Sealed(model, w=model.weight)
    model.weight = frozen(new)
    address = model.weight.data_ptr()
    done = sealed.adopt()
    assert set(done.changed_layout) == {"m.weight"}
    assert "[2, 4]" in done.changed_layout["m.weight"]
    assert not done.adopted
    assert sealed.reads("w", 1)
    assert model.weight.data_ptr() == address
    assert [fault.what for fault in sealed.verdict().faults] == [What.CHANGED_LAYOUT]


def test_another_part_of_the_same_storage_is_another_layout() -> None:
    base = torch.arange(16.0)
    model = types.SimpleNamespace(w=base[:8])
    sealed = Sealed(model, w=model.w)
    model.w = base[8:]
    assert set(sealed.adopt().changed_layout) == {"m.w"}
    assert base.tolist() == list(range(16))


def test_the_offset_in_a_new_storage_does_not_matter() -> None:
    model = types.SimpleNamespace(w=value(1))
    sealed = Sealed(model, w=model.w)
    model.w = value(2, 100)[40:48]
    assert sealed.adopt().ok
    assert sealed.reads("w", 2)
    assert sealed.verdict().ok


# Odd tensors


def inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("old_inference", [False, True])
@pytest.mark.parametrize("new_inference", [False, True])
def test_inference_tensors(mode: Any, old_inference: bool, new_inference: bool) -> None:
    model = types.SimpleNamespace(w=inference(value(1)) if old_inference else value(1))
    sealed = Sealed(model, w=model.w)
    with mode():
        for version in (2, 3):
            model.w = inference(value(version)) if new_inference else value(version)
            assert sealed.adopt().ok
            assert sealed.reads("w", version)
            # A model's next step takes views of it.
            assert torch.equal(model.w[1:].reshape(-1), value(version)[1:])
    assert sealed.verdict().ok


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.int64, torch.complex64, torch.complex128, torch.uint16]
)
def test_dtypes(dtype: torch.dtype) -> None:
    def make(bits: int) -> torch.Tensor:
        return torch.full((32,), bits, dtype=torch.uint8).view(dtype)

    model = types.SimpleNamespace(w=make(0))
    sealed = Sealed(model, w=model.w)
    model.w = make(1)
    assert sealed.adopt().refreshed == ["m.w"]
    assert torch.equal(sealed.graph.replay()["w"].view(torch.uint8), make(1).view(torch.uint8))  # type: ignore[union-attr]


def test_nans_and_signs_of_zero_count_by_their_bits() -> None:
    model = types.SimpleNamespace(nan=value(float("nan")), zero=value(0.0))
    sealed = Sealed(model)
    model.nan, model.zero = model.nan.clone(), value(-0.0)
    done = sealed.adopt()
    assert set(done.adopted) == {"m.nan", "m.zero"}
    assert done.refreshed == ["m.zero"]
    assert done.nbytes == 32


class OwnData(nn.Parameter):
    """As vLLM's SharedWeightParameter."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        raise ValueError("not this way")


def test_a_parameter_keeps_class_grad_and_hooks() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(value(1))
    sealed = Sealed(model, w=model.weight)
    model.weight = OwnData(value(2))
    model.weight.tag = "mine"
    calls: list[torch.Tensor] = []
    model.weight.register_hook(calls.append)
    before = model.weight
    assert sealed.adopt().ok
    assert model.weight is before
    assert type(model.weight) is OwnData
    assert model.weight.requires_grad and model.weight.tag == "mine"
    (model.weight * 2).sum().backward()
    assert len(calls) == 1
    assert sealed.reads("w", 2)


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (torch.empty(8, device="meta"), "meta"),
        (torch.eye(8).to_sparse(), "storage"),
        (nn.parameter.UninitializedParameter(), "storage"),
        (torch.zeros(8, dtype=torch.complex64).imag, ""),
        (torch.empty(0), ""),
    ],
    ids=["meta", "sparse", "uninitialised", "negative view", "empty"],
)
def test_what_cannot_be_repaired_is_reported(new: torch.Tensor, why: str) -> None:
    model = types.SimpleNamespace(w=value(1), other=value(1))
    sealed = Sealed(model, w=model.w, other=model.other)
    model.w, model.other = new, value(2)
    done = sealed.adopt()
    reported = {**done.failed, **done.changed_layout}
    assert set(reported) == {"m.w"}
    assert why in reported["m.w"]
    assert done.adopted == ["m.other"]  # the rest is repaired all the same
    assert sealed.reads("other", 2)
    assert not sealed.verdict().ok


def test_a_repair_that_raises_is_a_failure_of_all_that_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = types.SimpleNamespace(a=value(1), b=value(1))
    sealed = Sealed(model, a=model.a, b=model.b)
    model.a, model.b = value(2), value(3)

    def out_of_memory(old: torch.Tensor, new: torch.Tensor) -> bool:
        if bool((new == 2).all()):
            raise RuntimeError("out of memory")
        return False

    monkeypatch.setattr("weightsync.storage.adopt.same_bytes", out_of_memory)
    done = sealed.adopt()
    assert done.failed == {"m.a": "RuntimeError: out of memory"} and not done.ok
    assert done.adopted == ["m.b"] and sealed.reads("b", 3) and sealed.reads("a", 1)


def test_a_negated_view_is_not_taken_for_its_bytes() -> None:
    model = types.SimpleNamespace(w=torch.zeros(8, dtype=torch.complex64).imag)
    sealed = Sealed(model)
    model.w = torch.zeros(8, dtype=torch.complex64).conj().imag
    assert model.w.is_neg()
    assert "negated" in sealed.adopt().failed["m.w"]


def test_empty_and_meta_tensors_can_be_sealed() -> None:
    model = types.SimpleNamespace(empty=torch.empty(0), meta=torch.empty(8, device="meta"))
    sealed = Sealed(model)
    model.empty, model.meta = torch.empty(0), torch.empty(8, device="meta")
    assert sealed.adopt().ok
    assert sealed.verdict().ok
    model.empty, model.meta = value(1), value(1)
    done = sealed.adopt()
    assert set(done.changed_layout) == {"m.empty"}
    assert set(done.failed) == {"m.meta"}
    assert not sealed.verdict().ok


def test_a_storage_that_was_resized_is_broken_and_not_written() -> None:
    model = types.SimpleNamespace(w=value(1))
    sealed = Sealed(model)
    assert sealed.pins.broken() == []
    model.w.untyped_storage().resize_(0)
    assert sealed.pins.broken() == ["m.w"]
    model.w = value(2)
    assert "resized" in sealed.adopt().failed["m.w"]
    assert not sealed.verdict().ok


# What vanished, what is stale


def concatenation(model: Any) -> torch.Tensor:
    """As a gate weight that is put together at its first use."""
    if model.combined is None:
        model.combined = torch.cat([model.a, model.b])
    return model.combined  # type: ignore[no-any-return]


@pytest.mark.parametrize("reset", [True, False])
def test_a_lazily_cached_concatenation(reset: bool) -> None:
    model = types.SimpleNamespace(a=frozen(value(1)), b=frozen(value(1)), combined=None, table=value(9))
    sealed = Sealed(model, c=concatenation(model))
    test = SelfTest(sealed.contract.slots, sealed.pins)
    assert test.remember() == 4
    model.a.data.fill_(2)
    model.b.data.fill_(2)
    if reset:
        model.combined = None
        assert sealed.adopt().lost == ["m.combined"]
        assert [(fault.what, fault.path) for fault in sealed.verdict().faults] == [(What.LOST, "m.combined")]
        concatenation(model)  # the first use brings it back, and the next repair brings it home
        assert sealed.adopt().refreshed == ["m.combined"]
        assert sealed.reads("c", 2)
        assert sealed.verdict().ok
        assert set(test.changed()) == {"m.a", "m.b", "m.combined"}
    else:
        # In its place and stale. Addresses can't show it; that its bytes stayed makes it a candidate, as any constant is.
        assert sealed.adopt().ok
        assert sealed.verdict().ok
        assert sealed.reads("c", 1)
        assert set(test.changed()) == {"m.a", "m.b"}


def test_a_host_number_beside_a_device_scale() -> None:
    model = types.SimpleNamespace(_k_scale=value(1), _k_scale_float=1.0)
    sealed = Sealed(model, k=model._k_scale, number=model._k_scale_float)
    model._k_scale, model._k_scale_float = value(2), 2.0
    assert sealed.adopt().ok
    assert sealed.reads("k", 2)
    assert sealed.reads("number", 1)  # baked in: only a new capture helps
    assert [(fault.what, fault.path) for fault in sealed.verdict().faults] == [(What.SCALAR, "m._k_scale_float")]


def test_a_path_that_vanished_while_another_holds_the_slot_is_not_lost() -> None:
    model = types.SimpleNamespace(a=value(1))
    model.b = [model.a]
    sealed = Sealed(model, w=model.a)
    model.b, model.a = [], value(2)
    assert sealed.adopt().ok
    verdict = sealed.verdict()
    assert verdict.ok
    assert verdict.dropped == ("m.b[0]",)


# Parts, temporaries, telling


def test_a_walk_of_a_part_leaves_the_rest_alone() -> None:
    model = nn.Module()
    model.first, model.second = nn.Linear(2, 2), nn.Linear(2, 2)
    sealed = Sealed(model)
    model.first.weight, model.second.weight = frozen(value(2, 2, 2)), frozen(value(2, 2, 2))
    done = sealed.adopter.adopt(walk(model.first, "m.first"))
    assert (done.adopted, done.in_place, done.lost) == (["m.first.weight"], 1, [])
    assert [fault.path for fault in sealed.verdict().faults] == ["m.second.weight"]


class RebuiltKernel:
    """Holds the parameters it was built from, and a view of one."""

    def __init__(self, layer: nn.Module) -> None:
        self.scale = layer.scale
        self.run = functools.partial(print, layer.weight.view(2, 4))


def reload_in_place(layer: nn.Module, version: int) -> dict[str, torch.Tensor]:
    """As vLLM's layerwise reload: build the kernel on temporaries, copy them back into the old parameters."""
    registered = dict(layer.named_parameters())
    for name in registered:
        delattr(layer, name)
        setattr(layer, name, frozen(value(version)))
    layer.kernel = RebuiltKernel(layer)
    temporaries = dict(layer.named_parameters())
    for name, old in registered.items():
        old.data.copy_(temporaries[name])
        delattr(layer, name)
        layer.register_parameter(name, old)
    return temporaries


@pytest.mark.parametrize("by", ["temporaries", "adopt", "both"])
def test_temporaries_held_by_a_kernel_object(by: str) -> None:
    layer = nn.Module()
    layer.weight, layer.scale = frozen(value(1)), frozen(value(1))
    layer.kernel = RebuiltKernel(layer)
    sealed = Sealed(layer, w=layer.weight, s=layer.scale)
    for version in (2, 3):
        temporaries = reload_in_place(layer, version)
        assert sealed.reads("w", version)
        assert layer.kernel.scale is not layer.scale  # the graph is right, and eager code reads a copy
        assert not sealed.verdict().ok
        if by != "adopt":
            assert rebind_temporaries(temporaries, dict(layer.named_parameters())).rebound == ("weight", "scale")
        if by != "temporaries":
            done = sealed.adopt()
            assert done.ok
            assert not done.refreshed
        assert layer.kernel.scale.data_ptr() == layer.scale.data_ptr()
        # A view of a temporary is a tensor of its own: the walk finds it, the table of temporaries can't.
        assert (layer.kernel.run.args[0].data_ptr() == layer.weight.data_ptr()) == (by != "temporaries")
        assert sealed.verdict().ok == (by != "temporaries")


def test_temporaries_that_cannot_be_rebound_are_told() -> None:
    live = frozen(value(1))
    temporaries = {"same": live, "shares": live.detach(), "gone": value(2), "shape": value(2, 4), "meta": torch.empty(8, device="meta")}
    done = rebind_temporaries(temporaries, dict.fromkeys(["same", "shares", "shape", "meta"], live))
    assert done.rebound == ()
    assert set(done.skipped) == {"gone", "shape", "meta"}


def test_each_repair_is_counted_every_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = types.SimpleNamespace(a=value(1), b=value(1))
    sealed = Sealed(model)
    with caplog.at_level(logging.INFO, "weightsync.storage.adopt"):
        for version in (2, 3):
            model.a, model.b = value(version), value(version, 4)
            counts = sealed.adopt().counts
            assert (counts["adopted"], counts["refreshed"], counts["changed_layout"], counts["nbytes"]) == (1, 1, 1, 32)
    assert [record.message.split(" (")[0] for record in caplog.records] == ["adopted: m.a", "changed layout: m.b"]


def test_names_that_are_new_after_every_reload_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("weightsync.storage.adopt.MAX_NEW_NAMES", 3)
    model = types.SimpleNamespace(weight=value(0), table={})
    sealed = Sealed(model)
    with caplog.at_level(logging.INFO):
        for version in range(1, 8):
            model.weight = value(version)
            model.table = {version: model.weight.view(2, 4)}
            done = sealed.adopt()
            assert done.followed == [f"m.table[{version}]"] and done.adopted == ["m.weight"], "each is still brought along"
    assert len(caplog.records) == 4


def test_nothing_moved_nothing_done() -> None:
    model = nn.Linear(2, 2)
    sealed = Sealed(model)
    model.weight.data.fill_(3)
    assert sealed.adopt() == Adoption(in_place=2)
    assert sealed.verdict().ok
