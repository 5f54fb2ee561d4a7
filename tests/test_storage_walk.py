"""The walk over odd objects, its names and limits; and the sweep of what it misses."""

from __future__ import annotations

import enum
import functools
import gc
import logging
import threading
import time
import types
import typing
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.storage import fields
from weightsync.storage import sweep as sweep_module
from weightsync.storage.owners import Walker, rewalk, scalars, translations, walk
from weightsync.storage.pins import pin, place, places
from weightsync.storage.sweep import sweep

T = torch.zeros(3)


def found(**held: Any) -> set[str]:
    return set(walk(types.SimpleNamespace(**held), "r").tensors)


class Hostile:
    """Any touch by the usual ways runs this code."""

    touched = False

    def __init__(self) -> None:
        object.__setattr__(self, "scale", T)

    def _run(self, *_: Any) -> Any:
        Hostile.touched = True
        raise RuntimeError("somebody ran my code")

    __getattribute__ = __getattr__ = __eq__ = __hash__ = __repr__ = __str__ = __bool__ = __len__ = __iter__ = _run  # type: ignore[assignment]
    weight = property(_run)
    __class__ = property(_run)  # type: ignore[assignment]


class HostileDict(dict):  # type: ignore[type-arg]
    __getitem__ = __iter__ = __len__ = items = values = keys = Hostile._run  # type: ignore[assignment]


class HostileList(list):  # type: ignore[type-arg]
    __getitem__ = __iter__ = __len__ = Hostile._run  # type: ignore[assignment]


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        Hostile._run(cls)  # type: ignore[arg-type]


class DictIsAProperty:
    __slots__ = ("scale",)
    __dict__ = property(Hostile._run)  # type: ignore[assignment]


class Color(enum.Enum):
    RED = 1


@pytest.fixture(autouse=True)
def nobody_ran_hostile_code() -> Any:
    Hostile.touched = False
    yield
    assert not Hostile.touched


def test_no_code_of_the_objects_runs() -> None:
    slotted = DictIsAProperty()
    slotted.scale = T
    odd = HostileTensor._make_subclass(HostileTensor, T)
    walked = walk({"a": Hostile(), "b": HostileDict(w=T), "c": HostileList([T]), "d": slotted, "e": odd, "f": Hostile}, "r")
    assert set(walked.tensors) == {"r['a'].scale", "r['b']['w']", "r['c'][0]", "r['d'].scale", "r['e']"}
    assert places(walked)["r['e']"][0] == T.data_ptr()
    assert pin(walked).by_path["r['e']"].address == T.data_ptr()


def test_cycles_end_and_their_other_paths_are_aliases() -> None:
    one, other = types.SimpleNamespace(w=T), types.SimpleNamespace()
    one.other, other.one, one.me = other, one, one
    ring: list[Any] = [one]
    ring.append(ring)
    walked = walk(ring, "r")
    assert set(walked.tensors) == {"r[0].w"}
    assert walked.aliases == {"r[1]": "r", "r[0].me": "r[0]", "r[0].other.one": "r[0]"}
    for path in ("r[1][0].w", "r[0].other.one.w", "r[0].me.other.one.me.w", "r[1][1][0].w"):
        assert walked.resolve(path) is T
    assert walked.resolve("r[0].v") is None


def test_every_path_to_a_tensor_is_kept_and_registered_ones_come_first() -> None:
    model = nn.Module()
    model.early = types.SimpleNamespace(w=None)
    model.child = nn.Linear(2, 2, bias=False)
    model.early.w = model.child.weight  # type: ignore[assignment]
    model.tied = nn.Module()
    model.tied.weight = model.child.weight
    model.again = model.child
    walked = walk(model, "m")
    assert list(walked.tensors) == ["m.child.weight", "m.tied.weight", "m.early.w"]
    assert walked.registered == {"m.child.weight", "m.tied.weight"}
    assert walked.resolve("m.again.weight") is model.child.weight


def test_buffers_of_both_kinds_and_attributes_beside_them() -> None:
    model = nn.Module()
    model.register_buffer("kept", T)
    model.register_buffer("derived", torch.ones(3), persistent=False)
    model.register_buffer("never", None)
    model.plain = [torch.ones(3)]
    assert set(walk(model, "m").tensors) == {"m.kept", "m.derived", "m.plain[0]"}


def test_hooks_loaders_and_methods_of_c_are_looked_into() -> None:
    model = nn.Linear(2, 2)
    scale = torch.ones(2)
    model.register_forward_hook(lambda *_: scale)
    model.weight.weight_loader = functools.partial(print, T)
    model.op = torch.ones(1).mul_
    paths = set(walk(model, "m").tensors)
    assert any(path.startswith("m._forward_hooks[") and path.endswith(".<closure scale>") for path in paths)
    assert {"m.weight.weight_loader.<arg 0>", "m.op.<self>"} <= paths


@pytest.mark.parametrize(
    "leaf",
    [logging.getLogger("x"), threading.Thread(), torch.nn, nn.Linear, Color.RED, "text", 3, T.dtype, weakref.ref(T), torch.Generator()],
    ids=lambda leaf: type(leaf).__name__,  # the same in every process, as their addresses are not
)
def test_leaves_are_left_alone(leaf: Any) -> None:
    assert found(a=leaf) == set()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("w.x", "['w.x']"),
        (3, "[3]"),
        ((1, "a"), "[(1, 'a')]"),
        (Color.RED, "[Color.RED]"),
        (torch.int8, "[torch.int8]"),
        (T, "[<Tensor 0>]"),
    ],
    ids=str,
)
def test_keys_in_names(key: Any, text: str) -> None:
    assert found(d={key: T}) == {f"r.d{text}"}


class NeverSet:
    __slots__ = ("scale",)


def test_cells_and_slots_that_were_never_set() -> None:
    def inner() -> Any:
        return later

    assert found(f=inner, c=types.CellType(), s=NeverSet()) == set()
    assert found(c=types.CellType(T)) == {"r.c.<cell>"}
    later = T
    assert found(f=inner) == {"r.f.<closure later>"}


def test_long_lists_of_numbers_cost_nothing_and_other_long_ones_are_cut_and_told() -> None:
    numbers = list(range(3_000_000))
    began = time.monotonic()
    walked = walk({"ids": numbers, "table": dict.fromkeys(range(100_000), 0.5), "w": T}, "r")
    assert time.monotonic() - began < 5  # looking at each would take longer; a ceiling, not a measurement
    assert set(walked.tensors) == {"r['w']"}
    assert not walked.truncated
    cut = walk([*([[]] * fields.MAX_ITEMS), T], "r")
    assert not cut.tensors
    assert cut.truncated == ["r"]


def test_depth_and_number_of_objects_are_bounded_and_told() -> None:
    deep: Any = T
    for _ in range(100):
        deep = [deep]
    walked = walk(deep, "r")
    assert not walked.tensors
    assert len(walked.truncated) == 1
    walker = Walker(max_objects=10)
    walker.add([[[]] for _ in range(100)], "r")
    assert walker.finish().truncated


def test_translations_put_aliases_in_longest_first_and_end() -> None:
    aliases = {"a.k": "b", "a": "x", "b.l": "c", "loop": "loop.loop"}
    assert list(translations("a.k.l.w", aliases)) == ["b.l.w", "c.w"]
    assert list(translations("a.q", aliases)) == ["x.q"]
    assert list(translations("none", aliases)) == []
    assert len(list(translations("loop.w", aliases))) == 16


def test_a_walk_holds_none_of_the_objects_it_passed() -> None:
    class Kernel:
        pass

    kernel = Kernel()
    kernel.w = torch.ones(2)  # type: ignore[attr-defined]
    gone = weakref.ref(kernel)
    walked = walk([kernel], "r")
    del kernel
    gc.collect()
    assert gone() is None
    assert set(walked.tensors) == {"r[0].w"}


def test_what_has_no_storage_of_its_own_is_told_and_never_raises() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    model = nn.Module()
    model.sparse = torch.eye(2).to_sparse()
    model.fake, model.lazy = fake, nn.parameter.UninitializedParameter()
    model.meta, model.empty = torch.empty(3, device="meta"), torch.empty(0)
    pins = pin(walk(model, "m"))
    assert set(pins.opaque) == {"m.sparse", "m.fake", "m.lazy"}
    assert {path: held.address for path, held in pins.by_path.items()} == {"m.meta": 0, "m.empty": 0}


def test_places_of_views() -> None:
    base = torch.zeros(4, 4)
    address, layout = place(base[1:, 2:]) or (0, None)
    assert address == base.data_ptr()
    assert layout is not None
    assert (layout.dtype, layout.shape, layout.stride, layout.offset) == ("float32", (3, 2), (4, 1), 6)
    assert place(torch.zeros(4, 4)[1:, 2:])[1] is layout  # type: ignore[index]


def test_numbers_beside_tensors_of_their_name() -> None:
    layer = nn.Module()
    layer.register_buffer("_k_scale", torch.ones(1))
    layer._k_scale_float, layer._q_scale_float, layer.k_scale_host, layer.training_float = 1.5, 2.5, 3, True
    layer.impl = types.SimpleNamespace(bmm1_scale=0.5, v=T, v_float=4.0)
    layer.table = {"w": T, "w_float": 5.0, 7: 1.0}
    paired = {"l._k_scale_float": 1.5, "l.k_scale_host": 3, "l.impl.v_float": 4.0, "l.table['w_float']": 5.0}
    assert scalars(layer, "l") == paired
    assert scalars(layer, "l", also=["bmm1_scale"]) == {**paired, "l.impl.bmm1_scale": 0.5}


HIDDEN: list[torch.Tensor] = []


class OfAClass:
    table: typing.ClassVar[list[torch.Tensor]] = []
    __table__: typing.ClassVar[list[torch.Tensor]] = []


def test_globals_of_classes_are_seen_but_for_those_with_names_like_pythons_own() -> None:
    OfAClass.table.append(torch.ones(7))
    OfAClass.__table__.append(torch.ones(8))
    seen = sweep({})
    assert seen.everything.tensors[f"{__name__}:OfAClass.table[0]"] is OfAClass.table[0]
    assert [tensor for tensor in seen.anonymous if tensor is OfAClass.__table__[0]], "half of all names; what hides there has no owner"


def test_a_frozen_heap_is_seen_and_stays_frozen() -> None:
    HIDDEN.append(torch.ones(5))
    gc.collect()
    gc.freeze()
    try:
        assert not any(other is HIDDEN[0] for other in gc.get_objects())
        seen = sweep({})
        assert gc.get_freeze_count() > 0
        assert gc.isenabled()
        assert f"{__name__}:HIDDEN" in seen.globals
        assert seen.everything.tensors[f"{__name__}:HIDDEN[0]"] is HIDDEN[0]
    finally:
        gc.unfreeze()
        HIDDEN.clear()


def test_a_sweep_leaves_out_what_the_roots_reach_and_says_who_holds_the_rest() -> None:
    model, loose = nn.Linear(2, 2), {torch.ones(6)}
    also = frozenset({torch.ones(6, 1)})
    seen = sweep({"model": model}, lambda tensor: tensor.numel() == 6)
    assert set(seen.everything.tensors) >= {"model.weight", "model.bias"}
    held_by = {tuple(tensor.shape): by for tensor, by in zip(seen.anonymous, seen.held_by, strict=True)}
    assert held_by == {(6,): ("set",), (6, 1): ("frozenset",)}
    assert not seen.globals, "what nobody looks for is not searched for"
    assert not any(tensor is model.weight for tensor in sweep({"model": model}).anonymous)
    del loose, also


def test_a_search_ends_with_the_last_that_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    HIDDEN.append(torch.ones(9))
    names = list(sweep_module._globals())

    def globals_() -> typing.Iterator[tuple[str, Any]]:
        for name, value in names:
            looked.append(name)
            yield name, value

    try:
        monkeypatch.setattr(sweep_module, "_globals", globals_)
        seen = sweep({}, lambda tensor: tensor is HIDDEN[0])
        assert seen.globals == (f"{__name__}:HIDDEN",) and not seen.anonymous
        assert looked[-1] == f"{__name__}:HIDDEN" and len(looked) < len(names)
        looked.clear()
        assert not sweep({}, lambda _: False).globals and not looked
    finally:
        HIDDEN.clear()


def test_what_is_undone_leaves_no_trace() -> None:
    deep: Any = []
    for _ in range(6):
        deep = [deep, object]
    walker = Walker(max_depth=4)
    walker.add({"w": T}, "kept")
    mark = walker.mark()
    walker.add({"w": torch.ones(1), "w_float": 1.0, "deep": deep, "kept": deep}, "undone")
    assert walker.found.truncated and walker.found.scalars
    walker.undo(mark)
    found = walker.finish()
    assert (set(found.tensors), found.aliases, found.scalars, found.truncated, found.roots) == ({"kept['w']"}, {}, {}, [], ["kept"])


def test_a_global_that_is_gone_still_counts_as_a_root() -> None:
    walked = rewalk({}, [f"{__name__}:NEVER", "no.such.module:X", f"{__name__}:T"])
    assert walked.covers(f"{__name__}:NEVER[0]")
    assert not walked.covers(f"{__name__}:NEVERMORE")
    assert set(walked.tensors) == {f"{__name__}:T"}
