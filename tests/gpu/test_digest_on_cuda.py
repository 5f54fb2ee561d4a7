"""The digest and the look at values on CUDA tensors: the same answers as on a CPU, in one kernel. Needs no vLLM."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from weightsync.transport import digest, finite
from weightsync.transport.digest import BLOCK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
LENGTHS = [1, 7, 8, 77, 8 * 1024, 8 * 1025 + 1, 8 * (BLOCK - 1), 8 * BLOCK, 8 * BLOCK + 3, 8 * (2 * BLOCK + 9) + 5, 8 * 200 * BLOCK + 13]
OFFSETS = [0, 8, 8 * 12_345, 8 * (BLOCK - 1), 8 * (1 << 20) * BLOCK + 16]


@pytest.fixture(params=["fused", "operations"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways on a device; that the kernel runs at all is for `test_the_kernel_runs_here`."""
    if request.param == "operations":
        operations, adder = functools.partial(digest._by_operations, digest._products, digest._CUDA_BLOCKS), digest._adder
        monkeypatch.setattr(digest, "_adder", lambda device: adder(device) if device.type == "cpu" else operations)
    return request.param


def random_bytes(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def kernels(events: profile) -> list[str]:
    """Names of the kernels, fills and copies that ran."""
    return [event.name for event in events.events() if event.device_type == DeviceType.CUDA]


def test_the_kernel_runs_here() -> None:
    assert digest._adder(CUDA) is digest._by_kernel


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.usefixtures("way")
def test_a_digest_is_the_same_on_both_sides(length: int, offset: int) -> None:
    data = random_bytes(length, seed=length)
    assert digest.digest_bytes(data.to(CUDA), offset) == digest.digest_bytes(data, offset)


@pytest.mark.parametrize("shift", [1, 2, 4, 7, 8, 16, 24])
@pytest.mark.parametrize("offset", OFFSETS)
def test_bytes_at_any_address_have_the_same_digest(shift: int, offset: int) -> None:
    data = random_bytes(8 * (BLOCK + 2000) + 3 + shift, seed=shift)
    assert digest.digest_bytes(data.to(CUDA)[shift:], offset) == digest.digest_bytes(data[shift:], offset)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("shift", "there"), [(0, 0), (16, 64), (8, 64), (3, 0), (0, 5), (7, 7)])
@pytest.mark.usefixtures("way")
def test_bytes_are_copied_in_the_same_read_and_none_beside_them(length: int, shift: int, there: int) -> None:
    data, room = random_bytes(length + shift, seed=length), torch.full((length + there + 99,), 0xEE, dtype=torch.uint8, device=CUDA)
    into = room[there : there + length]
    batch, source = digest.Batch(2, CUDA), data.to(CUDA)[shift:]
    batch.add(source[: length // 16 * 8], 0, into=into[: length // 16 * 8])
    batch.add(source[length // 16 * 8 :], length // 16 * 8, into=into[length // 16 * 8 :])
    assert digest.add(*batch.results()) == digest.digest_bytes(data[shift:])
    assert torch.equal(into, source)
    assert room[:there].eq(0xEE).all() and room[there + length :].eq(0xEE).all()


@pytest.mark.parametrize("dtype", finite._FORMATS)
@pytest.mark.parametrize("length", LENGTHS[:-1])
@pytest.mark.usefixtures("way")
def test_small_numbers_and_a_larger_one_have_the_same_digest_and_the_same_largest_magnitude(dtype: str, length: int) -> None:
    numbers = torch.rand(length, generator=torch.Generator().manual_seed(length))
    numbers[length // 2] = 1.5 if dtype == "float8_e8m0fnu" else -1.5
    data = digest.as_bytes(numbers.to(getattr(torch, dtype)))
    tops, digests = [], []
    for tensor in (data, data.to(CUDA)):
        peak = finite.Peak(dtype)
        digests.append(digest.digest_bytes(tensor, 16, peak))
        tops.append(max(peak._told, int(peak._top) if peak._top is not None else 0))
    assert digests[0] == digests[1]
    assert tops[0] == tops[1] > 0


@pytest.mark.parametrize("dtype", [name for name in finite._FORMATS])
@pytest.mark.parametrize("at", [0, 1_000_003, 30_000_000])
@pytest.mark.usefixtures("way")
def test_one_nan_is_found_and_nothing_where_there_is_none(dtype: str, at: int) -> None:
    tensor = torch.ones(30_000_001).to(getattr(torch, dtype)).to(CUDA)
    peak = finite.Peak(dtype)
    digest.digest_tensor(tensor, peak)
    assert not peak.refused
    tensor[at : at + 1] = torch.tensor([float("nan")]).to(getattr(torch, dtype))
    digest.digest_tensor(tensor, peak)
    assert peak.refused
    assert peak.describe(tensor) == f"1 NaN of {tensor.numel()}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_every_lane_and_place_is_looked_at(dtype: str, value: float) -> None:
    tensor = torch.full((3 * 8 * BLOCK,), -2.0, dtype=getattr(torch, dtype), device=CUDA)
    rng = random.Random(0)
    places = [*range(8), *(rng.randrange(len(tensor)) for _ in range(40)), len(tensor) - 1]
    batch, peaks = digest.Batch(len(places), CUDA), [finite.Peak(dtype) for _ in places]
    for at, peak in zip(places, peaks, strict=True):
        tensor[at] = value
        batch.add(digest.as_bytes(tensor), 0, peak)
        batch.start()
        tensor[at] = -2.0
    batch.results()
    assert all(peak.refused for peak in peaks)


def test_a_tensor_of_more_bytes_than_32_bits_count() -> None:
    length = (1 << 32) + 8 * BLOCK + 77
    data = torch.arange(length // 8 + 1, device=CUDA).view(torch.uint8)[:length]
    parts = digest.ZERO
    for start in range(0, length, 1 << 30):
        parts = digest.add(parts, digest.digest_bytes(data[start : start + (1 << 30)], start))
    assert digest.digest_bytes(data) == parts
    tail = length // (8 * BLOCK) * 8 * BLOCK
    assert digest.digest_bytes(data[tail:], tail) == digest.digest_bytes(data[tail:].cpu(), tail)
    peaks = [finite.Peak("bfloat16"), finite.Peak("bfloat16")]
    digest.digest_bytes(data.zero_(), 0, peaks[0])
    data[length // 2 * 2 - 100 :][:2] = 255
    digest.digest_bytes(data, 0, peaks[1])
    assert [peak.refused for peak in peaks] == [False, True]


def test_a_batch_is_one_kernel_for_each_format_and_waits_once() -> None:
    tensors = [torch.ones(count, dtype=torch.bfloat16, device=CUDA) for count in (5, 3000, 4 * BLOCK + 1, 40 * BLOCK)]
    peaks = [finite.Peak("bfloat16") for _ in tensors]
    digest.digest_tensor(tensors[0], finite.Peak("bfloat16"))  # compiled
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as events:
        batch = digest.Batch(len(tensors), CUDA)
        for tensor, peak in zip(tensors, peaks, strict=True):
            batch.add(digest.as_bytes(tensor), 0, peak)
        results = batch.results()
        assert not any(peak.refused for peak in peaks)
        torch.cuda.synchronize()
    ran = kernels(events)
    assert sum("_digest_kernel" in name for name in ran) == 1, ran
    assert sum("Memcpy HtoD" in name for name in ran) == 1, ran  # the table
    assert sum("Memcpy DtoH" in name for name in ran) == 1, ran
    assert len(ran) == 4, ran  # and the zeros that it begins with
    assert results == [digest.digest_tensor(tensor.cpu()) for tensor in tensors]


@pytest.mark.parametrize("count", [1, 300])
def test_runs_of_any_length_place_and_address_may_be_in_one_batch(count: int) -> None:
    rng = random.Random(count)
    runs = []
    for number in range(count):
        length, shift = rng.choice([*LENGTHS[:-1], rng.randrange(1, 100_000)]), rng.choice([0, 0, 0, 1, 4, 8])
        runs.append((random_bytes(length + shift, seed=number)[shift:], rng.choice(OFFSETS)))
    batch = digest.Batch(count, CUDA)
    held = [(data.to(CUDA), offset) for data, offset in runs]
    for data, offset in held:
        batch.add(data, offset, finite.Peak("bfloat16") if offset else None)
    assert batch.results() == [digest.digest_bytes(data, offset) for data, offset in runs]


@pytest.mark.parametrize("shift", [0, 1])
def test_it_takes_no_memory_that_grows_with_the_tensor(shift: int) -> None:
    data = torch.empty((64 << 20) + shift, dtype=torch.uint8, device=CUDA)[shift:].zero_()
    digest.digest_bytes(data, 0, finite.Peak("bfloat16"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    digest.digest_bytes(data, 0, finite.Peak("bfloat16"))
    assert torch.cuda.max_memory_allocated() - before <= 64 << 10  # its sums, and the table of its programs


def test_it_runs_on_the_stream_that_is_current() -> None:
    data = random_bytes(8 * 300 * BLOCK, seed=3)
    want, there = digest.digest_bytes(data), torch.zeros(len(data), dtype=torch.uint8, device=CUDA)
    pinned, side = data.pin_memory(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            there.zero_()
            there.copy_(pinned, non_blocking=True)
            assert digest.digest_bytes(there) == want
