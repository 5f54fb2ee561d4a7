"""Pins, the slots made of them, and comparing bytes."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from weightsync.storage import pins as pins_module
from weightsync.storage.contract import Contract, Kind, Layout, Slot, compare
from weightsync.storage.owners import walk
from weightsync.storage.pins import Read, pin, places, same_bytes, slots_of


def sealed_model() -> types.SimpleNamespace:
    base = torch.zeros(4, 4)
    weight = nn.Parameter(torch.zeros(8), requires_grad=False)
    return types.SimpleNamespace(weight=weight, again=weight, base=base, row=base[1], loose=torch.zeros(3))


def test_one_slot_for_each_view_with_all_its_paths() -> None:
    model = sealed_model()
    slots = {slot.name: slot for slot in slots_of(pin(walk(model, "m")))}
    at = model.base.data_ptr()
    assert slots == {
        "m.weight": Slot(model.weight.data_ptr(), 32, ("m.weight", "m.again"), Layout("float32", (8,), (1,)), kind=Kind.WEIGHT),
        "m.base": Slot(at, 64, ("m.base",), Layout("float32", (4, 4), (4, 1)), kind=Kind.DERIVED),
        "m.row": Slot(at, 64, ("m.row",), Layout("float32", (4,), (1,), 4), kind=Kind.DERIVED),
        "m.loose": Slot(model.loose.data_ptr(), 12, ("m.loose",), Layout("float32", (3,), (1,)), kind=Kind.DERIVED),
    }


def test_reads_of_a_census_choose_the_slots_and_name_the_kernels() -> None:
    model = sealed_model()
    held = pin(walk(model, "m"), [ghost := torch.zeros(5)])
    at = model.base.data_ptr()
    reads = [Read(at + 20, 64, "gemm"), Read(at + 63, 64, "norm"), Read(ghost.data_ptr(), 20, "topk"), Read(0x10, 0, "nobody")]
    slots = slots_of(held, [*reads, Read(0x10, 0, "nobody")], {"m.base": Kind.STATIC})
    assert [(slot.paths, slot.kernel, slot.kind) for slot in slots] == [
        (("m.base",), "gemm, norm", Kind.STATIC),
        (("m.row",), "gemm, norm", Kind.DERIVED),
        ((), "topk", Kind.ANONYMOUS),
        ((), "nobody", Kind.ANONYMOUS),
    ]
    kept = held.only({slot.address for slot in slots})
    assert set(kept.by_path) == {"m.base", "m.row"}
    assert len(kept.anonymous) == 1
    contract = Contract.seal(slots)
    assert [fault.kernel for fault in compare(contract, places(walk(model, "m"))).faults] == ["topk", "nobody"]


def test_a_read_past_the_end_of_a_storage_is_not_of_it() -> None:
    model = types.SimpleNamespace(w=torch.zeros(4))
    slots = slots_of(pin(walk(model, "m")), [Read(model.w.data_ptr() + 16)])
    assert [slot.paths for slot in slots] == [()]


def test_an_anonymous_view_of_an_owned_storage_is_no_slot_of_its_own() -> None:
    model = sealed_model()
    slots = slots_of(pin(walk(model, "m"), [model.base[2:]]))
    assert all(slot.paths for slot in slots)


@pytest.mark.parametrize("chunk", [64 << 20, 64, 8])
@pytest.mark.parametrize("at", [None, 0, 63])
@pytest.mark.parametrize(
    "shape",
    [lambda t: t, lambda t: t.view(8, 8).t(), lambda t: t.view(8, 8)[:, 1::2], lambda t: t.view(8, 8)[1:, :3], lambda t: t[1:]],
    ids=["whole", "transposed", "columns", "block", "odd offset"],
)
def test_bytes_are_compared_in_every_layout(shape: object, at: int | None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "CHUNK_BYTES", chunk)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex128):
        one = torch.zeros(64, dtype=dtype)
        other = torch.zeros(64, dtype=dtype)
        if at is not None:
            other[at] = 1
        a, b = shape(one), shape(other)  # type: ignore[operator]
        assert same_bytes(a, b) is bool((a == b).all())


def test_bytes_in_the_holes_of_a_tensor_are_not_its_own() -> None:
    """As many elements as lie between the first and the last, and still with holes: one dimension repeats."""
    a, b = (torch.zeros(16).as_strided((2, 2), (3, 0)) for _ in range(2))
    torch.as_strided(b, (1,), (1,), 1).fill_(5)
    assert same_bytes(a, b)
    torch.as_strided(b, (1,), (1,), 3).fill_(5)
    assert not same_bytes(a, b)


def test_a_pin_holds_the_memory_and_nothing_but_the_memory() -> None:
    model = sealed_model()
    held = pin(walk(model, "m")).by_path["m.row"]
    model.base[1] = 7
    address = model.base.data_ptr()
    del model
    assert held.intact
    view = held.view()
    assert view.tolist() == [7] * 4
    assert view.data_ptr() == address + 16
    assert not isinstance(view, nn.Parameter)


def test_a_view_may_be_written_through_wherever_it_was_made() -> None:
    with torch.inference_mode():
        model = types.SimpleNamespace(w=torch.zeros(4))
        view = pin(walk(model, "m")).by_path["m.w"].view()
    view.fill_(3)
    assert model.w.tolist() == [3] * 4
