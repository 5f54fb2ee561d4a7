"""Arithmetic on the places that loaders fill: which overlap, what is left uncovered, how many elements.

A region is a set of elements of one parameter, as offset, shape and stride in its
memory. Two views of the same elements are the same region. For comparisons the
regions of a parameter become boxes on one grid, whose axes are the strides that
occur in any of them, so that nothing is enumerated element by element.

Not covered: a region that is no box on that grid (its rows wrap around the grid's):
it counts as overlapping all that lies within its bounds, and as covered only by an
equal one, so that a comparison errs on the side of a refusal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

#: Parameter path, first element, shape, stride; made by `region`.
Region = tuple[str, int, tuple[int, ...], tuple[int, ...]]
#: From, to (not included) along each axis of a grid.
_Box = tuple[tuple[int, int], ...]


def region(path: str, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Region:
    """A view's elements, in a form that is the same for every view of them: no axis that can be part of another."""
    axes: list[tuple[int, int]] = []
    for step, size in sorted(((step, size) for size, step in zip(shape, stride, strict=True) if size != 1), reverse=True):
        if axes and axes[-1][0] == step * size:
            axes[-1] = (step, axes[-1][1] * size)
        else:
            axes.append((step, size))
    return (path, offset, tuple(size for _, size in axes), tuple(step for step, _ in axes))


def numel(place: Region) -> int:
    """Elements of a region."""
    count = 1
    for size in place[2]:
        count *= size
    return count


def filled(places: Iterable[Region]) -> dict[str, int]:
    """Elements of each parameter that lie in at least one of the regions."""
    return {path: _Part(own).volume() for path, own in _by_path(places).items()}


def overlaps(writes: Mapping[str, Sequence[Region]]) -> dict[str, str]:
    """Sources that fill elements which an earlier source has filled, with the first such.

    Args:
        writes: each source's regions, in the order of writing.
    """
    names = list(writes)
    order = {name: number for number, name in enumerate(names)}
    owners: dict[Region, list[str]] = {}
    for name, places in writes.items():
        for place in dict.fromkeys(places):
            owners.setdefault(place, []).append(name)
    found: dict[int, int] = {}
    for own in _by_path(owners).values():
        for one, other in [*((place, place) for place in own), *_Part(own).crossing()]:
            for first, second in (sorted((order[a], order[b])) for a in owners[one] for b in owners[other] if a != b):
                found[second] = min(first, found.get(second, first))
    return {names[second]: names[first] for second, first in sorted(found.items())}


def uncovered(want: Mapping[str, Sequence[Region]], have: Iterable[Region]) -> dict[str, int]:
    """Of each source whose regions are not wholly among those that are there: how many elements are not.

    Args:
        want: each source's regions.
        have: what is filled.
    """
    there, wanted = _by_path(have), _by_path(place for places in want.values() for place in places)
    left: dict[Region, int] = {}
    for path, own in wanted.items():
        held = there.get(path, {})
        if lacking := [place for place in own if place not in held]:
            part = _Part({**own, **held})
            left |= {place: count for place in lacking if (count := part.outside(place, list(held)))}
    counts = {name: sum(left.get(place, 0) for place in dict.fromkeys(places)) for name, places in want.items()}
    return {name: count for name, count in counts.items() if count}


def _by_path(places: Iterable[Region]) -> dict[str, dict[Region, None]]:
    found: dict[str, dict[Region, None]] = {}
    for place in places:
        found.setdefault(place[0], {})[place] = None
    return found


class _Part:
    """Regions of one parameter, as boxes on their common grid."""

    def __init__(self, places: Iterable[Region]) -> None:
        self._places = sorted(places, key=lambda place: place[1])
        self._boxes: dict[Region, _Box | None] = {}  # few are asked for: most regions lie behind one another

    @functools.cached_property
    def _steps(self) -> list[int]:
        return sorted({1, *(step for place in self._places for step in place[3])}, reverse=True)

    def _box(self, place: Region) -> _Box | None:
        if place not in self._boxes:
            self._boxes[place] = _box(place, self._steps)
        return self._boxes[place]

    def crossing(self) -> list[tuple[Region, Region]]:
        """Pairs of regions that have elements in common."""
        found: list[tuple[Region, Region]] = []
        open_: list[tuple[int, Region]] = []  # regions that reach behind the one that is looked at, with their end
        for place in self._places:
            open_ = [(end, other) for end, other in open_ if end > place[1]]
            found += [(other, place) for _, other in open_ if self._meet(other, place)]
            open_.append((_end(place), place))
        return found

    def _meet(self, one: Region, other: Region) -> bool:
        a, b = self._box(one), self._box(other)
        return a is None or b is None or _common(a, b) is not None

    def volume(self) -> int:
        """Elements that lie in at least one region."""
        crossing = {place for pair in self.crossing() for place in pair}
        total, seen = 0, list[Region]()
        for place in self._places:
            total += self.outside(place, seen) if place in crossing else numel(place)
            if place in crossing:
                seen.append(place)
        return total

    def outside(self, place: Region, others: Sequence[Region]) -> int:
        """Elements of a region that lie in none of the others."""
        box = self._box(place)
        if box is None:
            return 0 if place in others else numel(place)
        start, end = place[1], _end(place)
        near = [cut for other in others if other[1] < end and _end(other) > start and (cut := self._box(other)) is not None]
        return _outside(box, near)


def _end(place: Region) -> int:
    return place[1] + sum((size - 1) * step for size, step in zip(place[2], place[3], strict=True)) + 1


def _box(place: Region, steps: Sequence[int]) -> _Box | None:
    """A region as a box on the grid of these strides, the largest first; None when it is none."""
    sizes, rest, box = dict(zip(place[3], place[2], strict=True)), place[1], list[tuple[int, int]]()
    starts = []
    for step in steps:
        starts.append(rest // step)
        rest %= step
    spill = 1  # how many whole rows of the axis before this one reach into the one behind it
    for number in reversed(range(len(steps))):
        size, start = sizes.get(steps[number], 1) * spill, starts[number]
        spill = 1
        if number:
            width, odd = divmod(steps[number - 1], steps[number])
            if odd:
                return None
            if start + size > width:
                if start or size % width:
                    return None
                size, spill = width, size // width
                if steps[number - 1] in sizes:
                    return None
        box.append((start, start + size))
    return tuple(reversed(box))


def _common(one: _Box, other: _Box) -> _Box | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < end for start, end in both) else None


def _outside(box: _Box, cuts: Sequence[_Box]) -> int:
    """Elements of a box that lie in none of the cuts."""
    for number, cut in enumerate(cuts):
        if (both := _common(box, cut)) is None:
            continue
        total, rest = 0, list(box)
        for axis, (start, end) in enumerate(both):
            for piece in ((rest[axis][0], start), (end, rest[axis][1])):
                if piece[0] < piece[1]:
                    total += _outside((*rest[:axis], piece, *rest[axis + 1 :]), cuts[number + 1 :])
            rest[axis] = (start, end)
        return total
    count = 1
    for start, end in box:
        count *= end - start
    return count
