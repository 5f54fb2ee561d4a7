"""Values that an engine must not get are found in the digest's own read, in every dtype that has them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.protocol import DTYPE_BYTES
from weightsync.transport import digest, finite
from weightsync.transport.digest import BLOCK

FLOATS = sorted(name for name in DTYPE_BYTES if getattr(torch, name).is_floating_point)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN, INF = math.nan, math.inf


def refused(tensor: torch.Tensor, target: str = "") -> bool:
    peak = finite.Peak(str(tensor.dtype).removeprefix("torch."), target)
    assert digest.digest_tensor(tensor, peak) == digest.digest_tensor(tensor)
    return peak.refused


def of_bits(dtype: str, *bits: int) -> torch.Tensor:
    """Elements with these bits."""
    width = DTYPE_BYTES[dtype]
    data = b"".join(value.to_bytes(width, "little") for value in bits)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype))


def is_finite(number: torch.Tensor) -> bool:
    """What Python says of it; every dtype here fits a double."""
    return math.isfinite(number.to(torch.float64).item())


# --- every dtype -------------------------------------------------------------------------------


def test_every_dtype_with_floats_is_watched_and_no_other() -> None:
    assert FLOATS == ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    assert [name for name in sorted(DTYPE_BYTES) if finite.watched(name)] == FLOATS


@pytest.mark.parametrize("dtype", [name for name in FLOATS if DTYPE_BYTES[name] <= 2])
def test_each_of_a_dtypes_bit_patterns_is_judged_as_python_judges_its_value(dtype: str) -> None:
    count = 1 << (8 * DTYPE_BYTES[dtype])
    numbers = torch.arange(count).to(INTEGERS[DTYPE_BYTES[dtype]]).view(getattr(torch, dtype))
    values = numbers.to(torch.float64).tolist()
    peaks = [finite.Peak(dtype) for _ in range(count)]
    # One element in a word of its own, in changing lanes; the other lanes are zero (1.0 and less for e8m0).
    lanes = 8 // DTYPE_BYTES[dtype]
    for index, (number, peak) in enumerate(zip(numbers.split(1), peaks, strict=True)):
        word = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, dtype))
        word[index % lanes] = number[0]
        peak(word.view(torch.int64), torch.empty(1, dtype=torch.int64))
    assert [peak.refused for peak in peaks] == [not math.isfinite(value) for value in values]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["float32", "float64"]), st.data())
def test_any_wide_bit_pattern_is_judged_as_python_judges_its_value(dtype: str, data: st.DataObject) -> None:
    bits = 8 * DTYPE_BYTES[dtype]
    exponents = st.sampled_from([0, (1 << bits) - 1, 0x7F80_0000 if bits == 32 else 0x7FF0_0000_0000_0000])
    pattern = data.draw(st.integers(0, (1 << bits) - 1) | st.builds(lambda e, m: e ^ m, exponents, st.integers(0, 3)))
    number = of_bits(dtype, pattern)
    assert refused(number) is not is_finite(number)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_number_passes_and_the_pattern_behind_it_does_not(dtype: str) -> None:
    largest = torch.tensor([torch.finfo(getattr(torch, dtype)).max], dtype=torch.float64).to(getattr(torch, dtype))
    behind = (largest.view(INTEGERS[DTYPE_BYTES[dtype]]) + 1).view(getattr(torch, dtype))
    assert not refused(largest.repeat(19))
    assert refused(torch.cat([largest.repeat(18).view(torch.uint8), behind.view(torch.uint8)]).view(getattr(torch, dtype)))


# --- every place -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 1001, 4 * BLOCK + 3, 9 * BLOCK + 1])
def test_one_bad_value_is_found_wherever_it_stands(value: float, length: int) -> None:
    tensor = torch.full((length,), -3.0, dtype=torch.bfloat16)
    assert not refused(tensor)
    for at in {0, length // 2, length - 1, min(length - 1, 4 * BLOCK), min(length - 1, 4 * BLOCK - 1)}:
        tensor[at] = value
        assert refused(tensor)
        tensor[at] = -3.0


@pytest.mark.parametrize("target", ["", "float16"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_it_is_told_counts_as_what_it_sees(dtype: str, target: str) -> None:
    tensor = torch.tensor([1.0, NAN, 0.5]).to(getattr(torch, dtype))
    told, seen = finite.Peak(dtype, target), finite.Peak(dtype, target)
    assert told.bits == 8 * DTYPE_BYTES[dtype]
    assert told.sign_bits == (dtype != "float8_e8m0fnu")
    for number in tensor:
        bits = int(number.view(INTEGERS[DTYPE_BYTES[dtype]])) % (1 << told.bits - told.sign_bits)
        told.saw(bits)
        digest.digest_tensor(number, seen)
        assert told.refused == seen.refused == (not is_finite(number) or seen.refused)
    assert told.refused


def test_it_is_found_in_a_slice_among_slices() -> None:
    data = torch.ones(4096, dtype=torch.float32)
    data[3000] = NAN
    peak = finite.Peak("float32")
    verdicts = []
    for start in range(0, 4 * 4096, 4096):
        digest.digest_bytes(digest.as_bytes(data)[start : start + 4096], start, peak)
        verdicts.append(peak.refused)
    assert verdicts == [False, False, True, True]


def test_it_is_found_in_a_tensor_that_is_not_contiguous() -> None:
    matrix = torch.ones(6, 50)
    matrix[2, 7] = INF
    assert refused(matrix.t())
    assert not refused(matrix[3:, ::2])


def test_nothing_holds_nothing() -> None:
    assert not refused(torch.empty(0, 3))


# --- narrower dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "fits", "too_large"),
    [
        ("bfloat16", "float16", 65_280.0, 65_536.0),
        ("float32", "float16", 65_519.99, 65_520.0),  # the middle between the largest number and the next one
        ("float32", "bfloat16", 3.3961e38, 3.3962e38),
        ("float64", "float32", 3.4028235e38, 3.4028236e38),
        ("float16", "float8_e5m2", 61_408.0, 61_440.0),
    ],
)
def test_a_value_that_would_become_infinite_in_the_engines_dtype_is_refused(
    source: str, target: str, fits: float, too_large: float
) -> None:
    for sign in (1, -1):
        good = torch.tensor([1.0, sign * fits, 0.0], dtype=getattr(torch, source))
        bad = torch.tensor([1.0, 0.0, sign * too_large], dtype=getattr(torch, source))
        assert bool(good.to(getattr(torch, target)).float().isfinite().all())
        assert not bool(bad.to(getattr(torch, target)).float().isfinite().all())
        assert not refused(good, target)
        assert refused(bad, target)
        assert not refused(bad)


@pytest.mark.parametrize("target", ["float32", "float64", "bfloat16", "int8", "uint8", ""])
def test_a_dtype_that_holds_as_much_or_no_floats_changes_nothing(target: str) -> None:
    largest = torch.tensor([torch.finfo(torch.bfloat16).max], dtype=torch.bfloat16)
    assert not refused(largest, target)
    assert refused(torch.tensor([NAN], dtype=torch.bfloat16), target)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_nan_is_refused_whatever_it_is_loaded_into(source: str, target: str) -> None:
    assert refused(torch.tensor([1.0, NAN]).to(getattr(torch, source)), target)
    assert not refused(torch.tensor([1.0, 2.0]).to(getattr(torch, source)), target)


# --- what is said ------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [3, 1 << 20])
def test_the_values_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(finite, "_COUNT_ELEMENTS", at_once)
    tensor = torch.tensor([[1.0, NAN, 70_000.0, -INF], [INF, -1e5, -NAN, 1e38], [0.0, 65_280.0, INF, -70_000.0]], dtype=torch.bfloat16)
    assert finite.Peak("bfloat16", "float16").describe(tensor) == "2 NaN, 3 infinite, 4 beyond 65504, the most that float16 holds of 12"
    assert finite.Peak("bfloat16").describe(tensor) == "2 NaN, 3 infinite of 12"


@pytest.mark.parametrize(("dtype", "said"), [("float8_e4m3fn", "3 NaN of 4"), ("float8_e8m0fnu", "2 NaN of 4")])
def test_dtypes_without_infinity_have_nan_alone(dtype: str, said: str) -> None:
    tensor = of_bits(dtype, 0x7F, 0xFF, 0x01, 0xFF)
    assert finite.Peak(dtype).describe(tensor) == said
