"""The self-test over pins: what an update leaves behind is named; locks and constants are never poisoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.storage.contract import Contract, Kind, What
from weightsync.storage.owners import walk
from weightsync.storage.pins import Read, pin, slots_of
from weightsync.storage.selftest import SelfTest


class Model(torch.nn.Module):
    """A weight, its inverse in a buffer, a cached double in a kernel object; a constant, a lock and a workspace."""

    inverse: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 4, dtype=torch.bfloat16))
        self.register_buffer("inverse", torch.ones(8), persistent=False)
        self.kernel: Any = SimpleNamespace(
            double=torch.ones(16, dtype=torch.float8_e4m3fn)[::2], strides=torch.full((4,), 8), lock=torch.zeros(4, dtype=torch.int32)
        )
        self.workspace = torch.zeros(8, dtype=torch.int32)
        self.load(1)

    def load(self, value: float, leave: str = "") -> None:
        """An update in place; one derived value may be left as it was."""
        with torch.no_grad():
            self.weight.fill_(value)
            if leave != "inverse":
                self.inverse.fill_(1 / value)
            if leave != "double":
                self.kernel.double.copy_(torch.full((8,), 2 * value))


def begun(model: Model, kinds: dict[str, Kind] | None = None) -> SelfTest:
    pins = pin(walk(model, "m"))
    reads = [Read(held.address, held.nbytes, f"kernel of {path}") for path, held in pins.by_path.items()]
    test = SelfTest(Contract.seal(slots_of(pins, reads, kinds or {"m.workspace": Kind.SCRATCH})).slots, pins)
    test.remember()
    return test


def run(model: Model, last: Callable[[], None]) -> SelfTest:
    """Weights 1 → 2 → poison → `last`, which brings 1 back as well as it can."""
    test = begun(model)
    model.load(2)
    test.poison(test.changed())
    last()
    return test


def test_what_every_update_writes_comes_back() -> None:
    model = Model()
    test = begun(model)
    model.load(1)
    assert test.changed() == [], "an identity update leaves every bit"
    model.load(2)
    assert sorted(test.changed()) == ["m.inverse", "m.kernel.double", "m.weight"]
    assert test.poison(test.changed()) == 16 + 32 + 8
    assert model.weight.isnan().all() and model.inverse.isnan().all() and model.kernel.double.float().isnan().all()
    model.load(1)
    assert test.unrefreshed() == [] and test.restore() == 0


@pytest.mark.parametrize(("leave", "path", "nbytes"), [("inverse", "m.inverse", 32), ("double", "m.kernel.double", 8)])
def test_a_derived_value_that_an_update_leaves_is_named_with_kernel_and_bytes_and_restored(leave: str, path: str, nbytes: int) -> None:
    model = Model()
    test = run(model, lambda: model.load(1, leave))
    (fault,) = test.unrefreshed()
    assert (fault.what, fault.path, fault.kernel, fault.nbytes) == (What.UNREFRESHED, path, f"kernel of {path}", nbytes)
    assert fault.detail == "nothing wrote it"
    assert test.restore() == 1 and test.unrefreshed() == []
    assert model.inverse.eq(1).all() and model.kernel.double.float().eq(2).all()


def test_a_value_that_is_computed_from_something_stale_is_named_too() -> None:
    model = Model()

    def half() -> None:
        model.load(1)
        model.inverse[3:].fill_(0.5)

    (fault,) = run(model, half).unrefreshed()
    assert fault.path == "m.inverse" and fault.detail == "it was written, with other bytes"


def test_what_an_update_back_breaks_beside_the_poison_is_named() -> None:
    model = Model()

    def breaks() -> None:
        model.load(1)
        model.kernel.strides.zero_()

    (fault,) = run(model, breaks).unrefreshed()
    assert fault.path == "m.kernel.strides" and fault.detail == "it was not poisoned and has other bytes"


def test_neither_locks_nor_scratch_nor_constants_are_ever_poisoned() -> None:
    model = Model()
    test = begun(model)
    model.load(2)
    for path in ("m.kernel.lock", "m.kernel.strides", "m.workspace"):
        with pytest.raises(ValueError, match="may be a lock or a constant"):
            test.poison([*test.changed(), path])
    assert not model.weight.isnan().any(), "a refusal poisons nothing"
    model.workspace.fill_(7)  # a kernel's, in the middle of something
    test.poison(test.changed())
    assert model.workspace.eq(7).all() and not model.kernel.lock.any() and model.kernel.strides.eq(8).all()
    assert test.left_out == {"m.workspace": "scratch"}
    assert begun(model, {"m.workspace": Kind.ENGINE}).left_out == {"m.workspace": "engine"}


def test_slots_that_cannot_be_looked_at_are_told() -> None:
    model = Model()
    pins = pin(walk(model, "m"))
    slots = Contract.seal(slots_of(pins, [Read(1 << 40, 64, "gemm"), *(Read(p.address) for p in pins.by_path.values())])).slots
    test = SelfTest(slots, replace(pins, by_path={path: held for path, held in pins.by_path.items() if path != "m.inverse"}))
    assert test.left_out == {"<anonymous at 0x10000000000>": "anonymous", "m.inverse": "has no memory of its own that is held"}
    assert test.remember() == 5


def test_a_slot_whose_memory_went_is_unrefreshed_and_not_written() -> None:
    model = Model()
    test = begun(model)
    model.inverse.untyped_storage().resize_(0)
    (fault,) = test.unrefreshed()
    assert fault.path == "m.inverse" and fault.detail == "its memory is gone"
    assert test.restore() == 0
    assert model.inverse.untyped_storage().nbytes() == 0, "a look must not give it new memory"


@pytest.mark.parametrize("kind", [torch.bool, torch.int8, torch.float16, torch.float64, torch.complex64, torch.complex128])
def test_every_dtype_and_layout_is_remembered_poisoned_and_restored_by_its_bits(kind: torch.dtype) -> None:
    owner = SimpleNamespace(
        plain=torch.zeros(6, dtype=kind),
        holes=torch.zeros(4, 6, dtype=kind)[:, ::2],
        expanded=torch.zeros(3, 1, dtype=kind).expand(3, 4),
        scalar=torch.zeros((), dtype=kind),
    )
    pins = pin(walk(owner, "o"))
    test = SelfTest(Contract.seal(slots_of(pins)).slots, pins)
    test.remember()
    for tensor in (owner.plain, owner.holes, owner.expanded[:, :1], owner.scalar):
        tensor.fill_(1)
    assert len(test.changed()) == 4
    test.poison(test.changed())
    assert all(fault.detail == "nothing wrote it" for fault in test.unrefreshed())
    assert test.restore() == 4 and test.changed() == []
    assert not any(tensor.any() for tensor in vars(owner).values())
