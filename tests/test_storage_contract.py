"""Tables of the contract: what compares equal, what is a fault, what is only told."""

from __future__ import annotations

import pytest

from weightsync.storage.contract import Contract, Kind, Layout, Place, Slot, What, compare

ROW = Layout("bfloat16", (4, 8), (8, 1))
COLUMN = Layout("bfloat16", (4, 8), (1, 4))


def slot(address: int, *paths: str, kind: Kind = Kind.WEIGHT, kernel: str = "gemm") -> Slot:
    return Slot(address, 64, paths, ROW if paths else None, kernel, kind)


SEALED = Contract.seal([slot(100, "a", "a.alias"), slot(200, "b", kind=Kind.DERIVED)])
SAME: dict[str, Place] = {"a": (100, ROW), "a.alias": (100, ROW), "b": (200, ROW)}


def test_all_in_place_is_ok() -> None:
    verdict = compare(SEALED, SAME)
    assert verdict.ok
    assert not verdict.lines()
    assert verdict.counts["slots_weight"] == verdict.counts["slots_derived"] == 1
    assert sum(count for name, count in verdict.counts.items() if not name.startswith("slots_")) == 0


def test_more_paths_than_sealed_are_nobodys_business() -> None:
    assert compare(SEALED, {**SAME, "c": (300, ROW)}).ok


def test_equal_layouts_need_not_be_one_object() -> None:
    other = Layout("bfloat16", (4, 8), (8, 1))
    assert compare(SEALED, {path: (address, other) for path, (address, _) in SAME.items()}).ok


@pytest.mark.parametrize(
    ("change", "what", "path", "text"),
    [
        ({"a": (101, ROW)}, What.MOVED, "a", "from 0x64 to 0x65"),
        ({"a.alias": (300, ROW)}, What.MOVED, "a.alias", "to 0x12c"),
        ({"a": (0, ROW)}, What.MOVED, "a", "to 0x0"),
        ({"b": (200, COLUMN)}, What.CHANGED_LAYOUT, "b", "is bfloat16[4, 8]/[1, 4]"),
        ({"b": (200, Layout("float16", (4, 8), (8, 1)))}, What.CHANGED_LAYOUT, "b", "float16"),
        ({"b": (200, Layout("bfloat16", (32,), (1,)))}, What.CHANGED_LAYOUT, "b", "[32]"),
        ({"b": (200, Layout("bfloat16", (4, 8), (8, 1), 4))}, What.CHANGED_LAYOUT, "b", "+4"),
        ({"b": (201, COLUMN)}, What.CHANGED_LAYOUT, "b", ""),  # the stronger of two faults
        ({"b": None}, What.LOST, "b", ""),
        ({"a": None, "a.alias": None}, What.LOST, "a", "1 other path"),
    ],
)
def test_each_fault_names_path_kernel_and_bytes(change: dict[str, Place | None], what: What, path: str, text: str) -> None:
    now = {name: at for name, at in {**SAME, **change}.items() if at is not None}
    verdict = compare(SEALED, now)
    assert not verdict.ok
    (fault,) = verdict.faults
    assert (fault.what, fault.path, fault.kernel, fault.nbytes) == (what, path, "gemm", 64)
    assert verdict.of(what) == (fault,)
    assert verdict.counts[f"faults_{what}"] == 1
    (line,) = verdict.lines()
    assert path in line and what in line and "gemm" in line and "64 bytes" in line and text in line


def test_a_path_that_is_gone_while_another_holds_the_slot_is_told_and_no_fault() -> None:
    verdict = compare(SEALED, {path: at for path, at in SAME.items() if path != "a"})
    assert verdict.ok
    assert verdict.dropped == ("a",)


def test_a_slot_whose_last_path_moved_is_not_also_lost() -> None:
    verdict = compare(SEALED, {"a.alias": (101, ROW), "b": (200, ROW)})
    assert [(fault.what, fault.path) for fault in verdict.faults] == [(What.MOVED, "a.alias")]
    assert verdict.dropped == ("a",)


@pytest.mark.parametrize(
    ("kind", "ok"), [(Kind.ANONYMOUS, False), (Kind.WEIGHT, False), (Kind.DERIVED, False), (Kind.STATIC, True), (Kind.SCRATCH, True)]
)
def test_a_slot_without_an_owner_fails_unless_it_cannot_hold_weights(kind: Kind, ok: bool) -> None:
    sealed = Contract.seal([slot(0xABC, kind=kind)])
    verdict = compare(sealed, {})
    assert verdict.ok is ok
    assert [fault.path for fault in verdict.of(What.ANONYMOUS)] == ([] if ok else [f"<{kind} at 0xabc>"])
    # What is known to be derived can't be allowed: only what nothing is known of.
    assert compare(sealed, {}, allow_anonymous=True).ok is (ok or kind is Kind.ANONYMOUS)


def test_a_fault_without_an_owner_says_where_its_memory_comes_from() -> None:
    sealed = Contract.seal([Slot(0xABC, 64, (), None, "gemm", Kind.DERIVED, "kernel.py:7 make")])
    (line,) = compare(sealed, {}, allow_anonymous=True).lines()
    assert line == "<derived at 0xabc>: anonymous read by gemm, 64 bytes (kernel.py:7 make)"


@pytest.mark.parametrize(
    ("sealed", "now", "ok"),
    [
        (1.5, 1.5, True),
        (1.5, 1.25, False),
        (1.5, None, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (2, 2.0, True),
    ],
)
def test_a_host_number_that_changed_is_a_fault(sealed: float, now: float | None, ok: bool) -> None:
    contract = Contract.seal([], {"k_scale_float": sealed})
    verdict = compare(contract, {}, scalars={} if now is None else {"k_scale_float": now})
    assert verdict.ok is ok
    assert len(verdict.of(What.SCALAR)) == (0 if ok else 1)
    assert compare(contract, {}).ok  # not asked


def test_strict_turns_a_repair_into_a_failure() -> None:
    assert compare(SEALED, SAME, repaired=["a"]).ok
    verdict = compare(SEALED, SAME, repaired=["a"], strict=True)
    assert not verdict.ok
    assert verdict.counts["paths_repaired"] == 1
    assert verdict.lines() == ["a: repaired, and strict is set"]
    assert compare(SEALED, SAME, strict=True).ok


def test_lines_are_cut_and_say_so() -> None:
    sealed = Contract.seal([slot(index, f"p{index}") for index in range(30)])
    lines = compare(sealed, {}).lines(20)
    assert len(lines) == 21
    assert lines[-1] == "and 10 more"
    assert len(compare(sealed, {}).faults) == 30


@pytest.mark.parametrize("slots", [[slot(1, "a"), slot(2, "a")], [Slot(1, 4, ("a",), None)], [slot(1, "a"), Slot(1, 64, ("a",), COLUMN)]])
def test_what_cannot_be_sealed(slots: list[Slot]) -> None:
    with pytest.raises(ValueError, match="a"):
        Contract.seal(slots)


def test_two_views_of_one_storage_count_its_bytes_once() -> None:
    assert Contract.seal([slot(1, "a"), Slot(1, 64, ("b",), COLUMN), slot(2, "c")]).nbytes == 128
