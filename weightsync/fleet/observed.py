"""What trainers have told of their samples of late: means by engine and by updates behind. Pure: no clock, no I/O.

Several ranks of a trainer may tell, each of its own samples, so the last few calls count together.

Not covered: how an engine's log-probabilities come about, and whether the trainer is right.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable

from weightsync.mismatch import BEHIND, Mismatch, Observation, Tally, standing_out

#: So many calls that had tokens of an engine, as many updates behind, count together.
CALLS = 16


class Observed:
    """The last calls of `observe`."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, str], deque[Mismatch]] = {}

    def take(self, tallies: Iterable[Tally], engines: Collection[int], behind: Callable[[int], int]) -> Observation:
        """Take in one call.

        Args:
            engines: of the fleet; of others nothing is kept.
            behind: how many updates were committed since the one that brought a version.
        """
        unknown, groups = set[int](), dict[tuple[int, str], list[Tally]]()
        for tally in tallies:
            if tally.engine in engines:
                groups.setdefault((tally.engine, BEHIND[min(behind(tally.version), len(BEHIND) - 1)]), []).append(tally)
            else:
                unknown.add(tally.engine)
        means = tuple(_mean(*key, [_means(*key, tally) for tally in group]) for key, group in sorted(groups.items()))
        for mean in means:
            self._calls.setdefault((mean.engine, mean.behind), deque(maxlen=CALLS)).append(mean)
        return Observation(means, standing_out(means), tuple(sorted(unknown)))

    def means(self, engines: Collection[int]) -> tuple[Mismatch, ...]:
        """Of the last calls, by engine and by updates behind; what was kept of engines that have left is dropped."""
        for engine, behind in [key for key in self._calls if key[0] not in engines]:
            del self._calls[engine, behind]
        return tuple(_mean(*key, calls) for key, calls in sorted(self._calls.items()))


def _means(engine: int, behind: str, tally: Tally) -> Mismatch:
    n = tally.tokens
    return Mismatch(engine, behind, n, tally.difference / n, tally.k1 / n, tally.k3 / n, tally.largest)


def _mean(engine: int, behind: str, parts: Collection[Mismatch]) -> Mismatch:
    """Of parts, by their tokens."""
    tokens = sum(part.tokens for part in parts)
    of = (tuple(part.tokens / tokens * value for value in (part.difference, part.k1, part.k3)) for part in parts)
    difference, k1, k3 = map(math.fsum, zip(*of, strict=True))
    return Mismatch(engine, behind, tokens, difference, k1, k3, max(part.largest for part in parts))
