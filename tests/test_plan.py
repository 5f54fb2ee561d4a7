"""Copies of an update's tensors into storage: rectangles of bytes, against torch's own copies of the same views."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.storage.plan import MOST_RUNS, Plan, Run, View, runs_of


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
    """A shape, and two windows of it: parts of larger tensors, whose axes may have changed places."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=4)))

    def window() -> torch.Tensor:
        order = draw(st.permutations(range(len(shape))))
        before = [draw(st.integers(0, 2)) for _ in shape]
        room = [size + first + draw(st.integers(0, 2)) for size, first in zip(shape, before, strict=True)]
        whole = torch.zeros([max(room[axis], 1) for axis in order], dtype=torch.int16)
        turned = whole.permute([order.index(axis) for axis in range(len(shape))])
        for axis, (first, size) in enumerate(zip(before, shape, strict=True)):
            turned = turned.narrow(axis, min(first, turned.shape[axis] - size), size)
        return turned

    return shape, window(), window()


def view_of(tensor: torch.Tensor) -> View:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def memory(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


@given(views())
def test_runs_copy_what_torch_copies(case: tuple[tuple[int, ...], torch.Tensor, torch.Tensor]) -> None:
    _, source, into = case
    whole = source.new_empty(source.untyped_storage().nbytes() // 2).set_(source.untyped_storage())
    whole.copy_(torch.arange(len(whole)) + 1)
    want = torch.zeros(into.untyped_storage().nbytes() // 2, dtype=torch.int16)
    want.as_strided(into.shape, into.stride(), into.storage_offset()).copy_(source)
    runs = runs_of(0, view_of(source), view_of(into), 2)
    assert runs is not None
    Plan([(run, memory(into)) for run in runs]).execute(memory(source), [0])
    assert torch.equal(memory(into).view(torch.int16), want)
    assert sum(run.rows * run.width for run in runs) == source.numel() * 2


@pytest.mark.parametrize(
    ("source", "into", "want"),
    [
        # a whole tensor; a shard of columns; one of rows into a fused parameter; a transposed one, element by element
        ((0, (8, 4), (4, 1)), (16, (8, 4), (4, 1)), [Run(3, 0, 0, 32, 0, 1, 64)]),
        ((4, (8, 4), (8, 1)), (0, (8, 4), (4, 1)), [Run(3, 8, 16, 0, 8, 8, 8)]),
        ((16, (4, 4), (4, 1)), (64, (4, 4), (4, 1)), [Run(3, 32, 0, 128, 0, 1, 32)]),
        ((0, (2, 3), (3, 1)), (0, (2, 3), (1, 2)), [Run(3, 0, 2, 0, 4, 3, 2), Run(3, 6, 2, 2, 4, 3, 2)]),
        ((5, (), ()), (7, (), ()), [Run(3, 10, 0, 14, 0, 1, 2)]),
        ((0, (4, 0), (0, 1)), (0, (4, 0), (0, 1)), []),
    ],
)
def test_a_copy_falls_into_as_few_rectangles_as_it_can(source: View, into: View, want: list[Run]) -> None:
    assert runs_of(3, source, into, 2) == want


def test_what_falls_into_too_many_is_left_to_its_loader() -> None:
    size = MOST_RUNS + 1
    assert runs_of(0, (0, (size, size, size), (size * size, size, 1)), (0, (size, size, size), (1, size, size * size)), 1) is None


def test_streams_that_lie_elsewhere_are_copied_by_the_same_plan() -> None:
    into = torch.zeros(6, dtype=torch.int16)
    plan = Plan(
        [(run, memory(into)) for index, at in ((0, 0), (1, 4)) for run in runs_of(index, (0, (2,), (1,)), (at, (2,), (1,)), 2) or ()]
    )
    for offsets in ([0, 4], [8, 0]):
        data = torch.randint(-999, 999, (6,), dtype=torch.int16)
        plan.execute(memory(data), offsets)
        assert into[:2].equal(data[offsets[0] // 2 :][:2]) and into[4:].equal(data[offsets[1] // 2 :][:2])
        assert into[2:4].eq(0).all()
    assert len(plan) == 2 and plan.nbytes == 8 and len(plan.memory) == 1


# --- the kernel, in Triton's interpreter (on a GPU: tests/gpu/test_plan_on_cuda.py) ----------------


@pytest.fixture
def launches() -> Iterator[type]:
    pytest.importorskip("triton")
    with patch.dict("os.environ", TRITON_INTERPRET="1"):
        from weightsync.storage import copying

        with patch.object(torch.cuda, "device_of", lambda _: contextlib.nullcontext()):
            yield copying.Launch


@pytest.mark.parametrize("seed", range(12))
def test_one_launch_copies_rectangles_of_any_width_and_place(seed: int, launches: type) -> None:
    require_copied(launches, torch.device("cpu"), seed)


def require_copied(launch: type, device: torch.device, seed: int) -> None:
    """A launch copies what torch copies, and nothing beside it."""
    random.seed(seed)
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=device)
    offsets = [random.choice([0, 16, 24, 7, 4096]) for _ in range(3)]
    copies, wants = [], []
    for number in range(random.randint(1, 6)):
        step = random.choice([1, 2, 8, 16])
        width = random.choice([1, 3, 8, 100, 1024, 8192, 9001]) * step
        rows = random.choice([1, 1, 2, 7, 40]) if width < 9000 else random.choice([1, 3])
        stride = width + step * random.randint(0, 3)
        into = torch.full((rows * stride + 64,), 0xEE, dtype=torch.uint8, device=device)
        run = Run(number % 3, step * random.randint(0, 9), stride, step * random.randint(0, 2), stride, rows, width)
        copies.append((run, into))
        want = into.clone()
        taken = data.as_strided((rows, width), (stride, 1), offsets[run.tensor] + run.source)
        want.as_strided((rows, width), (stride, 1), run.into).copy_(taken)
        wants.append(want)
    ready = launch(copies)
    for _ in range(2):  # the table that was made is used again
        ready(data, offsets)
        for (_, into), want in zip(copies, wants, strict=True):
            assert torch.equal(into, want)
            into.fill_(0xEE)
