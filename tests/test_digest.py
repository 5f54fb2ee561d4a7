"""The digest: it changes when anything changes places, and adds up over slices."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import transport
from weightsync.protocol import DTYPE_BYTES
from weightsync.transport import digest
from weightsync.transport.digest import BLOCK, digest_bytes, digest_tensor
from weightsync.transport.finite import Peak

U64 = st.integers(0, 2**64 - 1)


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_words(count: int, seed: int = 0) -> torch.Tensor:
    return random_bytes(8 * count, seed).view(torch.int64)


LONG = random_bytes(8 * (2 * BLOCK + 77) + 3, seed=1)
LONG_DIGEST = digest_bytes(LONG)


def swapped(tensor: torch.Tensor, i: int, j: int) -> torch.Tensor:
    """A copy with the entries i and j of the first dimension in each other's place."""
    other = tensor.clone()
    other[i], other[j] = tensor[j].clone(), tensor[i].clone()
    assert not torch.equal(other, tensor)
    return other


# --- what must change it -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float64], ids=str)
@pytest.mark.parametrize(("i", "j"), [(0, 1), (3, 4), (0, 2999), (16, 2032)])
def test_two_elements_in_each_others_place_change_it(dtype: torch.dtype, i: int, j: int) -> None:
    tensor = torch.arange(3000).remainder(101).to(dtype)
    tensor[j] += 1
    assert digest_tensor(swapped(tensor, i, j)) != digest_tensor(tensor)


def test_two_rows_or_shards_in_each_others_place_change_it() -> None:
    matrix = random_bytes(64 * 32 * 2).view(torch.bfloat16).reshape(64, 32)
    seen = {digest_tensor(matrix)}
    for i, j in itertools.combinations(range(0, 64, 7), 2):
        seen.add(digest_tensor(swapped(matrix, i, j)))
    first, second = matrix.chunk(2)
    seen.add(digest_tensor(torch.cat((second, first))))
    left, right = matrix.chunk(2, dim=1)
    seen.add(digest_tensor(torch.cat((right, left), dim=1)))
    seen.add(digest_tensor(matrix.t()))
    assert len(seen) == 1 + 45 + 3


@pytest.mark.parametrize(("i", "j"), [(0, 1), (0, 2), (1, 2)])
def test_two_blocks_of_coefficients_in_each_others_place_change_it(i: int, j: int) -> None:
    # Words that are one block apart share a coefficient within their block.
    blocks = random_words(3 * BLOCK, seed=2).reshape(3, BLOCK)
    assert digest_tensor(swapped(blocks, i, j)) != digest_tensor(blocks)
    one_word = blocks.clone()
    one_word[i, 5], one_word[j, 5] = blocks[j, 5], blocks[i, 5]
    assert digest_tensor(one_word) != digest_tensor(blocks)


@pytest.mark.parametrize("distance", [2**k for k in range(17)])
@pytest.mark.parametrize("difference", [0x8000, 0x4000, 0x0001, 0xC000, 0xBF80])
def test_values_that_differ_in_the_top_bits_alone_change_it_when_swapped(distance: int, difference: int) -> None:
    # A difference in the top bits, times an even difference of coefficients, vanishes modulo 2**64.
    words = random_words(2 * BLOCK, seed=3)
    for at in (0, 1, 12_345 % (2 * BLOCK - distance)):
        words[at + distance] = words[at] ^ digest._signed(difference << 48)
        assert digest_tensor(swapped(words, at, at + distance)) != digest_tensor(words)


def test_two_signs_that_flip_together_change_it() -> None:
    # Two top bits add up to 2**64 times the coefficients' half sum.
    values = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    before = digest_tensor(values)
    pairs = [(0, 1 << k) for k in range(12)] + [(7, 8), (100, 4000)]
    for i, j in pairs:
        flipped = values.clone()
        flipped[[i, j]] *= -1
        assert digest_tensor(flipped) != before
    assert digest_tensor(-values) != before


def test_any_single_flipped_bit_changes_both_halves() -> None:
    data = LONG.clone()
    rng = random.Random(5)
    places = [*range(16), *range(len(data) - 11, len(data)), *(rng.randrange(len(data)) for _ in range(60))]
    for place in places:
        bit = 1 << rng.randrange(8)
        data[place] ^= bit
        low, high = digest_bytes(data)
        assert low != LONG_DIGEST[0]
        assert high != LONG_DIGEST[1]
        data[place] ^= bit
    assert digest_bytes(data) == LONG_DIGEST


def test_all_64_bits_of_a_word_count_in_both_halves() -> None:
    for bit in range(64):
        word = torch.tensor([digest._signed(1 << bit)])
        assert all(half != 0 for half in digest_tensor(word))


# --- what must not change it -------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, len(LONG) // 8), max_size=5))
def test_digests_of_slices_add_up(cuts: list[int]) -> None:
    edges = [0, *sorted(8 * cut for cut in cuts), len(LONG)]
    total = digest.ZERO
    for start, stop in itertools.pairwise(edges):
        total = digest.add(total, digest_bytes(LONG[start:stop], start))
    assert total == LONG_DIGEST


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 24))
def test_short_runs_add_up_whatever_their_tail(data: bytes, cut: int) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    at = min(8 * cut, len(data) // 8 * 8)
    assert digest.add(digest_bytes(tensor[:at]), digest_bytes(tensor[at:], at)) == digest_bytes(tensor)


@pytest.mark.parametrize("length", range(1, 18))
def test_an_odd_tail_counts_as_if_filled_up_with_zeros(length: int) -> None:
    data = random_bytes(length, seed=length)
    padded = torch.zeros(-(-length // 8) * 8, dtype=torch.uint8)
    padded[:length] = data
    assert digest_bytes(data) == digest_bytes(padded) != digest.ZERO


@pytest.mark.parametrize("shift", range(1, 8))
def test_bytes_at_an_odd_address_have_the_digest_of_an_aligned_copy(shift: int) -> None:
    odd = LONG[shift:]
    assert odd.data_ptr() % 8
    assert digest_bytes(odd) == digest_bytes(odd.clone())


def test_a_tensor_that_is_not_contiguous_has_the_digest_of_its_copy() -> None:
    matrix = random_bytes(4 * 60 * 30).view(torch.float32).reshape(60, 30)
    for view in (
        matrix.t(),
        matrix[::2],
        matrix[:, 3:17],
        matrix[:, ::3],
        matrix[:1].expand(5, 30),
        matrix.reshape(5, 12, 30).movedim(0, 2),
    ):
        assert not view.is_contiguous()
        assert digest_tensor(view) == digest_tensor(view.contiguous())


def test_the_shape_is_not_part_of_it() -> None:
    flat = random_bytes(480)
    assert digest_tensor(flat) == digest_tensor(flat.reshape(4, 5, 24)) == digest_bytes(flat)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_that_travels_has_one(dtype: str) -> None:
    data = random_bytes(8 * 9) % 2  # 0 and 1 are valid bools
    typed = data.view(getattr(torch, dtype))
    assert digest_tensor(typed) == digest_bytes(data)
    assert digest_tensor(typed[0]) == digest_bytes(data[: DTYPE_BYTES[dtype]])  # a scalar


def test_a_parameter_has_one_without_its_gradient_in_the_way() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    assert digest_tensor(parameter) == digest_tensor(torch.ones(4))


def test_nothing_and_zeros_count_nothing() -> None:
    assert digest_bytes(torch.empty(0, dtype=torch.uint8)) == digest.ZERO
    assert digest_tensor(torch.empty(0, 5)) == digest.ZERO
    assert digest_tensor(torch.zeros(BLOCK + 3, dtype=torch.int64)) == digest.ZERO


def test_the_coefficients_are_those_of_protocol_version_1() -> None:
    # Both sides compute them: another value here is another wire format, so raise PROTOCOL_VERSION with it.
    data = torch.arange(8 * (BLOCK + 2) + 5).remainder(251).to(torch.uint8)
    assert digest.to_hex(digest_bytes(data)) == "de588432e4e2cea0a65fac5a00e49b6e"


# --- who watches, and where it is summed --------------------------------------------------------


#: Ways to sum on CPU tensors; the GPU's operations take two blocks at once, so that the longest runs need several steps.
WAYS = {
    "a CPU's operations": functools.partial(digest._by_operations, digest._dots, 1),
    "a GPU's operations": functools.partial(digest._by_operations, digest._products, 2),
    "a CPU's loop": lambda runs, sums: [digest._by_loop(run, sums) for run in runs],
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way, for all runs."""
    monkeypatch.setattr(digest, "_adder", lambda device: WAYS[request.param])


@pytest.fixture(params=[name for name in WAYS if name.endswith("operations")])
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way by operations, which calls who looks at the values."""
    monkeypatch.setattr(digest, "_adder", lambda device: WAYS[request.param])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("offset", [0, 8, 8 * (BLOCK - 1), 8 * BLOCK, 8 * (3 * BLOCK + 5)])
@pytest.mark.parametrize("length", [5, 8, 8 * BLOCK, 8 * (4 * BLOCK) + 3, 8 * (5 * BLOCK + 9) + 1])
def test_all_ways_to_sum_give_the_digest_of_the_definition(offset: int, length: int) -> None:
    data = random_bytes(length, seed=9)
    words = torch.zeros(-(-length // 8) * 8, dtype=torch.uint8)
    words[:length] = data
    numbers = words.view(torch.int64)
    mixed = numbers ^ ((numbers >> 32) & 0xFFFFFFFF)
    at = torch.arange(len(numbers)) + offset // 8
    want = []
    for half, row in enumerate(digest._table("cpu")):
        factors = torch.tensor([digest._signed(digest._block_factor(block, half)) for block in range(int(at[-1]) // BLOCK + 1)])
        want.append(int((mixed * row[at % BLOCK] * factors[at // BLOCK]).sum()) % 2**64)
    assert digest_bytes(data, offset) == tuple(want)


class Watch(Peak):
    """Keeps the words that it is shown and spoils the scratch."""

    def __init__(self) -> None:
        super().__init__("float64")
        self.seen: list[torch.Tensor] = []

    def __call__(self, words: torch.Tensor, scratch: torch.Tensor) -> None:
        assert scratch.shape == words.shape
        self.seen.append(words.clone())
        scratch.fill_(-1)


@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize("shift", [0, 1])
def test_a_peak_sees_every_word_once_and_may_write_into_the_scratch(shift: int) -> None:
    data = random_bytes(8 * (5 * BLOCK + 9) + 3 + shift, seed=8)[shift:]
    watch = Watch()
    assert digest_bytes(data, 8 * 77, watch) == digest_bytes(data, 8 * 77)
    got = torch.cat(watch.seen).view(torch.uint8)
    assert torch.equal(got[: len(data)], data)
    assert not got[len(data) :].any() and len(got) - len(data) < 8


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("length", [8, 8 * 2048, 8 * 2049 + 5, 8 * (BLOCK + 3)])
@pytest.mark.parametrize("dtype", [None, "float64", "float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"])
def test_the_loop_finds_the_largest_magnitude_that_operations_find(dtype: str | None, length: int, copied: bool) -> None:
    data = random_bytes(length, seed=length) & 0x8F  # few bits, so that the largest is not the largest there is
    found = []
    for way in WAYS.values():
        peak, into = Peak(dtype) if dtype else None, torch.full_like(data, 0xEE)
        sums = torch.zeros((1, 3), dtype=torch.int64)
        way([(data, 77, 0, peak, into if copied else None)], sums)
        if peak is not None:
            peak.saw(int(sums[0, 2]))
        assert not copied or torch.equal(into, data)
        found.append((sums[0, :2].tolist(), peak and peak.top))
    assert found[0] == found[1] == found[2] and (dtype is None or found[0][1])


def test_a_long_run_at_an_address_of_words_has_the_loop_made(monkeypatch: pytest.MonkeyPatch) -> None:
    long, seen = digest._COMPILED_BYTES, list[int]()
    monkeypatch.setattr(digest, "_by_loop", lambda run, sums: seen.append(run[0].numel()))
    digest._loop_runs.cache_clear()
    assert not digest._loop_runs(), "which sums nothing here"
    there = functools.cache(lambda: True)
    monkeypatch.setattr(digest, "_loop_runs", there)
    seen.clear()
    data = torch.ones(long + 16, dtype=torch.uint8)
    digest_bytes(data[: long - 1])
    assert not seen and not there.cache_info().currsize
    for run in (data[1 : long + 1], data[8 : long + 8], data[8:16]):  # a short one takes it once it is there
        digest_bytes(run)
    batch = digest.Batch(1, torch.device("cpu"))
    batch.add(data[:long], into=torch.empty(long + 1, dtype=torch.uint8)[1:])
    assert seen == [long, 8]


@pytest.mark.parametrize("what", ["sums", "maximum", "copy"])
def test_a_loop_that_finds_something_else_is_not_taken(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stock = digest._by_loop

    def wrong(run: Any, sums: torch.Tensor) -> None:
        stock(run, sums)
        if what == "copy":
            run[4][0] += 1
        else:
            sums[run[2], 2 if what == "maximum" else 1] += 1

    monkeypatch.setattr(digest, "_by_loop", wrong)
    assert not digest._loop_runs.__wrapped__() and "finds something else" in caplog.text
    monkeypatch.undo()
    assert digest._loop_runs.__wrapped__()


def test_without_numba_a_line_says_so_and_operations_do_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "weightsync.transport.compiled", raising=False)
    monkeypatch.delattr(transport, "compiled", raising=False)
    digest._loop_runs.cache_clear()
    data = random_bytes(digest._COMPILED_BYTES + 5)
    with caplog.at_level("INFO", "weightsync"):
        got = digest_bytes(data)
    assert "Numba is not installed" in caplog.text
    monkeypatch.undo()
    digest._loop_runs.cache_clear()
    assert digest_bytes(data) == got and digest._loop_runs()


def test_a_batch_has_the_digests_and_peaks_of_its_runs_in_their_order() -> None:
    good, bad = torch.ones(3000), torch.tensor([1.0, float("inf")])
    peaks = [Peak("float32"), None, Peak("float32"), Peak("float32")]
    runs = [(good, 0), (bad, 8), (bad, 16), (torch.empty(0), 0)]
    batch = digest.Batch(4, torch.device("cpu"))
    for (tensor, offset), peak in zip(runs, peaks, strict=True):
        batch.add(digest.as_bytes(tensor), offset, peak)
    assert batch.results() == [digest_bytes(digest.as_bytes(tensor), offset) for tensor, offset in runs]
    assert [peak and peak.refused for peak in peaks] == [False, None, True, False]
    assert digest.Batch(2, torch.device("cpu")).results() == []


def test_bytes_on_another_device_than_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="batch is on cpu, the bytes are on meta"):
        digest.Batch(1, torch.device("cpu")).add(torch.empty(8, dtype=torch.uint8, device="meta"))


class Kernel:
    """Stands in for the module with the fused kernel; `wrong` makes its sums so, and without `copies` it writes nothing."""

    def __init__(self, wrong: int = 0, copies: bool = True) -> None:
        self.wrong, self.copies = wrong, copies
        self.formats: list[tuple[int, int, int]] = []

    def add(
        self, runs: list[tuple[torch.Tensor, int, int, torch.Tensor | None]], block: int, out: torch.Tensor, bits: int, sign: int
    ) -> None:
        assert block == BLOCK
        self.formats.append((bits, sign, len(runs)))
        for data, first, row, into in runs:
            digest._by_operations(digest._dots, 1, [(data.cpu(), first, row, None, into if self.copies else None)], out)
            out[row, 0] += self.wrong
            out[row, 2] = 0x7F80


def provide(kernel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weightsync.transport.fused", kernel)
    monkeypatch.delattr("weightsync.transport.fused", raising=False)


@pytest.mark.parametrize(("kernel", "said"), [(None, "ModuleNotFoundError"), (Kernel(), "meta")], ids=["is missing", "fails"])
def test_where_the_kernel_does_not_run_one_line_says_why_and_operations_do_it(
    kernel: object, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provide(kernel, monkeypatch)
    adder = digest._adder.__wrapped__(torch.device("meta"))
    assert adder.args[0] is digest._products
    assert [said in record.getMessage() for record in caplog.records] == [True]


def test_a_kernel_whose_sums_are_not_a_cpus_or_that_does_not_copy_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    provide(Kernel(), monkeypatch)
    digest._prove_kernel(torch.device("cpu"))
    provide(Kernel(wrong=1), monkeypatch)
    with pytest.raises(ArithmeticError, match="not those of a CPU"):
        digest._prove_kernel(torch.device("cpu"))
    provide(Kernel(copies=False), monkeypatch)
    with pytest.raises(ArithmeticError, match="copies are not what was read"):
        digest._prove_kernel(torch.device("cpu"))


def test_a_kernel_gets_what_each_peak_looks_for_and_tells_it_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, want = Kernel(), digest_bytes(LONG[:24])
    provide(kernel, monkeypatch)
    monkeypatch.setattr(digest, "_adder", lambda device: digest._by_kernel)
    peaks = [Peak("bfloat16"), None, Peak("float32"), Peak("float8_e8m0fnu"), Peak("bfloat16"), Peak("bfloat16")]
    batch = digest.Batch(6, torch.device("cpu"))
    monkeypatch.setattr(batch, "start", lambda: None)  # as on a device, where nothing is begun before all is noted
    for peak, count in zip(peaks, (24, 24, 24, 24, 0, 24), strict=True):
        batch.add(LONG[:count], 0, peak)
    monkeypatch.undo()
    provide(kernel, monkeypatch)
    monkeypatch.setattr(digest, "_adder", lambda device: digest._by_kernel)
    assert batch.results() == [want] * 4 + [digest.ZERO, want]
    assert kernel.formats == [(16, 1, 2), (0, 0, 1), (32, 1, 1), (8, 0, 1)], "one launch for each format"
    assert [peak and peak.refused for peak in peaks] == [True, None, False, True, False, True]


# --- bad input, and the forms it travels in ----------------------------------------------------


@pytest.mark.parametrize(
    "data", [torch.zeros(8, dtype=torch.int8), torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)[::2]], ids=str
)
def test_anything_but_a_run_of_bytes_is_refused(data: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        digest_bytes(data)


def test_a_single_element_with_any_stride_has_its_bytes() -> None:
    column = torch.arange(2).reshape(1, 2)[:, 1]
    assert column.is_contiguous() and column.stride() == (2,)
    assert digest.as_bytes(column).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("count", [1, 5])
def test_a_tensor_that_torch_negates_lazily_has_the_bytes_of_its_values(count: int) -> None:
    negated = torch._neg_view(torch.arange(1.0, count + 1))
    assert negated.is_neg() and digest.as_bytes(negated).view(torch.float32).tolist() == [-float(k) for k in range(1, count + 1)]


@pytest.mark.parametrize("offset", [1, 4, 7, 12])
def test_an_offset_that_splits_a_word_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match=f"offset {offset}"):
        digest_bytes(torch.zeros(8, dtype=torch.uint8), offset)


@given(st.lists(st.tuples(U64, U64), max_size=8))
def test_pack_and_unpack_keep_every_bit(digests: list[digest.Digest]) -> None:
    packed = digest.pack(digests)
    assert packed.dtype == torch.int64
    assert packed.shape == (len(digests), 2)
    assert digest.unpack(packed) == digests


@given(U64, U64, U64, U64)
def test_adding_stays_within_64_bits(a: int, b: int, c: int, d: int) -> None:
    assert digest.add((a, b), (c, d)) == ((a + c) % 2**64, (b + d) % 2**64)


def test_the_written_form_has_32_digits() -> None:
    assert digest.to_hex((1, 2**64 - 1)) == "0000000000000001ffffffffffffffff"


def test_every_kind_of_number_is_prepared_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(digest, "_adder", lambda device: lambda runs, sums: seen.extend(peak.bits if peak else 0 for *_, peak, _ in runs))
    digest.prepare(torch.device("cpu"), ["bfloat16", "float32", "int8", "bfloat16"])
    assert seen == [16, 32, 0]


@pytest.mark.parametrize("length", [0, 1, 8, 77, 8 * digest.BLOCK + 3])
def test_bytes_are_copied_where_they_are_to_go(length: int) -> None:
    data, into = torch.arange(length, dtype=torch.int64).to(torch.uint8), torch.full((length,), 0xEE, dtype=torch.uint8)
    batch = digest.Batch(1, torch.device("cpu"))
    batch.add(data, 8, into=into)
    assert torch.equal(into, data) and batch.results() == [digest.digest_bytes(data, 8)]


@pytest.mark.parametrize(
    "into", [torch.zeros(8, dtype=torch.uint8), torch.zeros(9, dtype=torch.int8), torch.zeros(18, dtype=torch.uint8)[::2]]
)
def test_copies_go_nowhere_but_into_as_many_bytes(into: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="go into the like"):
        digest.Batch(1, torch.device("cpu")).add(torch.ones(9, dtype=torch.uint8), into=into)
    assert not into.any()
