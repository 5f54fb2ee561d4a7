"""Looking sealed paths up again: the same answers as a walk gives, whatever has happened to the objects."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.test_storage_walk import Hostile, HostileDict, HostileList, HostileTensor
from weightsync.storage.lookup import Lookup
from weightsync.storage.owners import Walk, rewalk
from weightsync.storage.pins import places


class Slotted:
    __slots__ = ("w", "w_float")

    def __init__(self) -> None:
        self.w, self.w_float = torch.zeros(3), 2.5


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: torch.Tensor
    a_float: float = 1.0


class Color(enum.Enum):
    RED = 1


class HostileSlots(Slotted):
    """An object whose slots and dictionary hold what must not be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Hostile()


def closing(tensor: torch.Tensor) -> Any:
    return lambda: tensor


@functools.cache
def table(length: int) -> torch.Tensor:
    return torch.arange(length)


def zoo() -> Any:
    """One of each kind of thing that a path may lead through."""
    table.cache_clear()
    table(7)
    model: Any = nn.Module()
    model.linear = nn.Linear(2, 3)
    model.register_buffer("part", torch.zeros(4, dtype=torch.float16)[1:3], persistent=False)
    model.register_parameter("never", None)
    model.stack = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.LayerNorm(2)])
    model.slotted, model.frozen = Slotted(), Frozen(torch.ones(2, 2))
    model.cache = {"w": [torch.zeros(1)], 3: torch.zeros(2), "it's.odd": torch.zeros(1), True: torch.zeros(1), Color.RED: torch.zeros(5)}
    model.cache |= {"v": torch.zeros(1), "v_host": 4}
    model.ordered = collections.OrderedDict(scale=torch.zeros(2), scale_float=0.5)
    model.row, model.line = (torch.zeros(1), {"a": torch.zeros(1)}), collections.deque([torch.zeros(1)])
    model.run = functools.partial(print, torch.zeros(2), sep=torch.zeros(3))
    model.fn, model.table = closing(torch.zeros(6)), table
    model.fn.extra = torch.zeros(2)  # type: ignore[attr-defined]
    model.linear.weight.scale = torch.zeros(1)
    model.view = model.linear.weight.data[1:]
    model.tied = model.linear.weight
    return model


def both(lookup: Lookup, sealed: Walk, roots: dict[str, object]) -> tuple[dict[str, Any], dict[str, float]]:
    """What a look-up finds, proved against a new walk."""
    values = lookup.find(roots)
    at, numbers = lookup.places(values), lookup.numbers(values)
    # A number stands for itself, also when the tensor beside it, which is a fault of its own, is gone.
    now = rewalk(roots, also={"w_float", "a_float", "v_host", "scale_float"})
    walked = places(now, sealed.tensors)
    assert at == {path: walked[path] for path in sealed.tensors if path in walked}
    assert numbers == {path: now.scalars[path] for path in sealed.scalars if path in now.scalars}
    return at, numbers


def sealed_zoo() -> tuple[Any, Walk, Lookup]:
    model = zoo()
    found = rewalk({"m": model})
    lookup = Lookup(found, found.tensors, found.scalars)
    assert not lookup.differs(lookup.find({"m": model}), found)
    return model, found, lookup


def test_every_kind_of_path_is_found_again() -> None:
    model, found, lookup = sealed_zoo()
    assert len(found.tensors) == 26 and len(found.scalars) == 4, list(found.tensors)
    for _ in range(2):
        at, numbers = both(lookup, found, {"m": model})
        assert at.keys() == found.tensors.keys() and numbers == found.scalars


CHANGES: dict[str, Any] = {
    "moved": lambda m: setattr(m.linear.weight, "data", torch.zeros(3, 2)),
    "replaced": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.zeros(3, 2))),
    "lost": lambda m: delattr(m.linear, "bias"),
    "set to None": lambda m: setattr(m.linear, "bias", None),
    "another shape": lambda m: setattr(m.linear.bias, "data", m.linear.bias.data.view(3, 1)),
    "another stride": lambda m: setattr(m.frozen.a, "data", m.frozen.a.data.t()),
    "another dtype": lambda m: setattr(m.part, "data", m.part.data.view(torch.int16)),
    "another offset": lambda m: setattr(m.part, "data", m.part.data.as_strided((2,), (1,), 0)),
    "fewer elements": lambda m: setattr(m.linear.bias, "data", m.linear.bias.data[:2]),
    "on meta": lambda m: setattr(m, "frozen", Frozen(torch.ones(2, 2, device="meta"))),
    "sparse": lambda m: m.cache.__setitem__(3, torch.eye(2).to_sparse()),
    "no tensor": lambda m: m.cache.__setitem__(3, [3]),
    "moved in a list": lambda m: m.cache["w"].insert(0, torch.zeros(1)),
    "a list cut short": lambda m: m.cache["w"].clear(),
    "a dict cleared": lambda m: m.cache.clear(),
    "an object rebuilt": lambda m: setattr(m, "slotted", Slotted()),
    "an object of another class": lambda m: setattr(m, "slotted", types.SimpleNamespace(w=m.slotted.w, w_float=2.5)),
    "a slot never set": lambda m: delattr(m.slotted, "w"),
    "an object gone": lambda m: delattr(m, "frozen"),
    "a module gone": lambda m: delattr(m, "linear"),
    "a module for a dict": lambda m: m._modules.__setitem__("linear", {"weight": m.linear.weight}),
    "registered at last": lambda m: m.register_parameter("never", nn.Parameter(torch.zeros(1))),
    "a parameter become an attribute": lambda m: m.linear.__dict__.__setitem__("bias", m.linear._parameters.pop("bias")),
    "a number changed": lambda m: setattr(m.slotted, "w_float", 2.25),
    "a number gone": lambda m: m.cache.pop("v_host"),
    "a number for a tensor": lambda m: m.cache.__setitem__("v_host", torch.zeros(1)),
    "another closure": lambda m: setattr(m, "fn", closing(torch.zeros(6))),
    "a partial rebuilt": lambda m: setattr(m, "run", functools.partial(print, m.run.args[0], sep=torch.zeros(3))),
    "another child of that name": lambda m: setattr(m.stack, "0", nn.Linear(2, 2, bias=False)),
    "left alone": lambda m: None,
}
#: No sealed path leads elsewhere by these.
UNSEEN = {"left alone", "an object of another class", "registered at last", "a parameter become an attribute"}
NUMBERS = {"a number for a tensor", "a number changed", "a number gone"}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_as_a_walk_sees_it(change: Any) -> None:
    model, found, lookup = sealed_zoo()
    before = both(lookup, found, {"m": model})
    keep = [*found.tensors.values()]  # so that no new tensor comes to lie where an old one lay
    change(model)
    after = both(lookup, found, {"m": model})
    name = next(name for name, each in CHANGES.items() if each is change)
    assert (before[0] == after[0]) is (name in UNSEEN | NUMBERS) and (before == after) is (name in UNSEEN)
    del keep


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=4))
def test_and_so_is_one_change_after_another(names: list[str]) -> None:
    model, found, lookup = sealed_zoo()
    keep = [*found.tensors.values()]
    for name in names:
        try:
            CHANGES[name](model)
        except (AttributeError, KeyError, IndexError, TypeError, RuntimeError):  # an earlier change took away what this one changes
            continue
        both(lookup, found, {"m": model})
    del keep


def test_no_code_of_the_objects_runs() -> None:
    odd = HostileTensor._make_subclass(HostileTensor, torch.zeros(3))
    slotted: Any = HostileSlots()
    held = {"s": slotted, "a": Hostile(), "b": HostileDict(w=torch.zeros(1)), "c": HostileList([torch.zeros(1)]), "e": odd}
    Hostile.touched = False
    found = rewalk({"r": held})
    lookup = Lookup(found, found.tensors, found.scalars)
    assert set(both(lookup, found, {"r": held})[0]) == {
        "r['s'].w",
        "r['s'].other.scale",
        "r['a'].scale",
        "r['b']['w']",
        "r['c'][0]",
        "r['e']",
    }
    assert not Hostile.touched


def test_one_address_in_two_storages_is_two_places() -> None:
    memory = bytearray(32)
    model = {"w": torch.frombuffer(memory, dtype=torch.float32)[2:6]}
    found = rewalk({"r": model})
    lookup = Lookup(found, found.tensors, ())
    before = both(lookup, found, {"r": model})
    model["w"] = torch.frombuffer(memory, dtype=torch.float32, offset=8, count=4)
    assert model["w"].data_ptr() == found.tensors["r['w']"].data_ptr()
    assert both(lookup, found, {"r": model}) != before


class SlottedList(list):  # type: ignore[type-arg]
    __slots__ = ("w",)


class SlottedTwice(SlottedList):
    __slots__ = ("w",)


def test_of_two_slots_of_one_name_the_first_counts_as_in_the_walk() -> None:
    odd = SlottedTwice()
    odd.w = torch.zeros(1)
    SlottedList.w.__set__(odd, torch.ones(1))  # type: ignore[attr-defined]
    found = rewalk({"r": odd})
    lookup = Lookup(found, found.tensors, ())
    assert found.tensors["r.w"] is odd.w and not lookup.differs(lookup.find({"r": odd}), found)
    both(lookup, found, {"r": odd})


def test_a_root_that_is_gone_takes_its_paths_along() -> None:
    one, other = {"w": torch.zeros(1)}, torch.zeros(2)
    found = rewalk({"a": one, "b": other})
    lookup = Lookup(found, found.tensors, ())
    assert set(lookup.places(lookup.find({"b": other}))) == {"b"}
    assert set(both(lookup, found, {"a": one, "b": torch.zeros(2)})[0]) == {"a['w']", "b"}


def test_two_fields_of_one_name_are_owned_up_to() -> None:
    """The walk goes on into both; a look-up takes the first, and must say that it isn't what the walk found."""
    model: Any = nn.Module()
    model.child = nn.Linear(2, 2)
    model.__dict__["child"] = types.SimpleNamespace(scale=torch.zeros(1))
    found = rewalk({"m": model})
    assert set(found.tensors) == {"m.child.weight", "m.child.bias", "m.child.scale"}
    lookup = Lookup(found, found.tensors, ())
    assert lookup.differs(lookup.find({"m": model}), found) == ["m.child.scale"]


def test_only_what_is_asked_for_is_looked_up() -> None:
    model = zoo()
    found = rewalk({"m": model})
    lookup = Lookup(found, ["m.linear.weight"], [])
    assert set(lookup.places(lookup.find({"m": model}))) == {"m.linear.weight"}
