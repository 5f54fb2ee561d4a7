"""Which elements a region has, against sets of elements written out."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.worker.regions import Region, filled, numel, overlaps, region, uncovered

SHAPE = (3, 4, 6)
MEMORY = torch.arange(72).view(SHAPE)


def place(view: torch.Tensor, path: str = "p") -> Region:
    return region(path, view.storage_offset(), view.shape, view.stride())


def elements(view: torch.Tensor) -> set[int]:
    return set(view.flatten().tolist())


@st.composite
def boxes(draw: st.DrawFn) -> torch.Tensor:
    """A box of the parameter, sometimes seen in another order of axes."""
    view = MEMORY
    for axis, size in enumerate(SHAPE):
        start = draw(st.integers(0, size - 1))
        view = view.narrow(axis, start, draw(st.integers(1, size - start)))
    return view.permute(draw(st.permutations(range(3))))


@pytest.mark.parametrize(
    "views",
    [
        [MEMORY, MEMORY.flatten(), MEMORY.view(12, 6), MEMORY.transpose(0, 2), MEMORY.unsqueeze(1)],
        [MEMORY[1], MEMORY[1].t(), MEMORY[1:2], MEMORY.view(-1)[24:48]],
        [MEMORY[..., 2:4], MEMORY[..., 2:4].transpose(0, 1), MEMORY.view(12, 6)[:, 2:4]],
    ],
)
def test_views_of_the_same_elements_are_the_same_region(views: list[torch.Tensor]) -> None:
    assert len({place(view) for view in views}) == 1
    assert numel(place(views[0])) == len(elements(views[0]))


@given(st.lists(boxes(), min_size=1, max_size=5))
def test_filled_counts_each_element_once(views: list[torch.Tensor]) -> None:
    assert filled(map(place, views)) == {"p": len(set().union(*map(elements, views)))}


@given(st.lists(boxes(), min_size=1, max_size=5))
def test_overlaps_name_the_first_source_that_filled_an_element(views: list[torch.Tensor]) -> None:
    found = overlaps({str(number): [place(view)] for number, view in enumerate(views)})
    want = {}
    for first, second in itertools.combinations(range(len(views)), 2):
        if elements(views[first]) & elements(views[second]):
            want.setdefault(str(second), str(first))
    assert found == want


@given(st.lists(boxes(), min_size=1, max_size=3), st.lists(boxes(), max_size=4))
def test_uncovered_counts_the_elements_that_nothing_fills(want: list[torch.Tensor], have: list[torch.Tensor]) -> None:
    there = set().union(*map(elements, have))
    expected = {str(n): left for n, view in enumerate(want) if (left := len(elements(view) - there))}
    assert uncovered({str(n): [place(view)] for n, view in enumerate(want)}, map(place, have)) == expected


def test_another_parameter_covers_nothing() -> None:
    assert uncovered({"a": [place(MEMORY, "p")]}, [place(MEMORY, "q")]) == {"a": 72}
    assert overlaps({"a": [place(MEMORY, "p")], "b": [place(MEMORY, "q")]}) == {}


def test_a_region_that_is_no_box_is_never_taken_for_covered() -> None:
    rows, wraps = MEMORY.view(12, 6)[:, :3], MEMORY.view(-1)[3:15]  # the second runs on into the next rows
    assert uncovered({"a": [place(wraps)]}, [place(MEMORY), place(rows)]) == {"a": 12}
    assert uncovered({"a": [place(wraps)]}, [place(wraps), place(rows)]) == {}
    assert overlaps({"a": [place(rows)], "b": [place(wraps)]}) == {"b": "a"}
