"""Engines' answers to the probe, compared: who is out of the limits, and who is to blame. Pure.

An engine is held against what most engines say, position by position and token by token: the median. One that is out when fewer
than half are is at fault. Of two engines, or where there is no majority, nobody knows which is right, unless the other comparison
says it: an engine whose captured graphs say something else than the same model without them is at fault by itself.

The limit of an engine is a multiple of its baseline, the median of its first commits: engines may differ by the kernels that they
have chosen, and graphs from what is not captured by the order in which they add. What was out of the limits goes into no baseline.

Not covered: engines that all are wrong in the same way; `observe`, which holds them against the trainer, sees that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from weightsync.mismatch import FACTOR, FLOOR_NATS

#: Log-probabilities at one position, by token id: of the likeliest tokens and of one more.
At = Mapping[str, float]
Against = Literal["engines", "graphs"]
AGAINST: tuple[Against, ...] = ("engines", "graphs")

#: Commits that make a baseline, and how many times the floor is allowed until it is there.
BASELINE_COMMITS = 5
_UNTIL_THEN = 5.0
#: What NaN or infinity counts for: further off than any log-probability.
_NO_NUMBER = -1000.0


class Baselines:
    """How far each engine has been off in its first commits.

    Attributes:
        last: the last value, by engine and by what it was held against.
    """

    def __init__(self) -> None:
        self.last: dict[tuple[int, Against], float] = {}
        self._first: dict[tuple[int, Against], list[float]] = {}

    def baseline(self, engine: int, against: Against) -> float | None:
        """Nats; None before its commits are there."""
        first = self._first.get((engine, against), [])
        return statistics.median(first) if len(first) == BASELINE_COMMITS else None

    def limit(self, engine: int, against: Against) -> float:
        """What an engine may be off by, nats."""
        baseline = self.baseline(engine, against)
        return _UNTIL_THEN * FLOOR_NATS if baseline is None else max(FLOOR_NATS, FACTOR * baseline)

    def take(self, against: Against, values: Mapping[int, float]) -> set[int]:
        """Take in what one probe found; the engines that are out of their limits."""
        out = {engine for engine, value in values.items() if value > self.limit(engine, against)}
        for engine, value in values.items():
            self.last[engine, against] = value
            first = self._first.setdefault((engine, against), [])
            if engine not in out and len(first) < BASELINE_COMMITS:
                first.append(value)
        return out

    def judge(self, probed: Iterable[int], values: Mapping[Against, Mapping[int, float]]) -> tuple[set[int], list[str]]:
        """Take in what one probe found; who is at fault, and what is out of the limits, in sentences.

        Args:
            probed: engines that have answered.
            values: how far they are off, by what they were held against, as far as there was something.
        """
        for gone in [(engine, against) for engine in probed for against in AGAINST if engine not in values[against]]:
            self.last.pop(gone, None)
        differ, there = self.take("engines", values["engines"]), values["engines"]
        named, said = self.take("graphs", values["graphs"]), list[str]()
        for engine in sorted(named):
            said.append(f"engine {engine}: captured graphs differ from the same model without them by {self._about(engine, 'graphs')}")
        if differ and len(differ) < len(there) / 2:
            said += [f"engine {engine} differs from most engines by {self._about(engine, 'engines')}" for engine in sorted(differ)]
            named |= differ
        elif differ:
            by_graphs = f"engine {', '.join(map(str, sorted(named)))} is at fault by its graphs"
            blamed = by_graphs if named else "none can be blamed, as there is no majority"
            said.append(
                f"engines {', '.join(map(str, sorted(differ)))} differ at one version by {max(there.values()):.3g} nats a token; {blamed}"
            )
        return named, said

    def _about(self, engine: int, against: Against) -> str:
        return f"{self.last[engine, against]:.3g} nats a token, and {self.limit(engine, against):.3g} is allowed"

    def forget(self, engines: Iterable[int]) -> None:
        """These have left, or are other processes now: what they were off by says nothing any more."""
        for engine in engines:
            for against in AGAINST:
                self.last.pop((engine, against), None)
                self._first.pop((engine, against), None)


def from_most(answers: Mapping[int, Sequence[At]]) -> dict[int, float]:
    """How far each engine is from the median of all, mean |difference| over positions and tokens; from the other, of two.

    Raises:
        ValueError: answers are of different lengths.
    """
    if len(answers) < 2:
        return {}
    sums, count = dict.fromkeys(answers, 0.0), 0
    scale = 2.0 if len(answers) == 2 else 1.0  # the median of two lies half way between them
    for position in zip(*answers.values(), strict=True):
        least = [min(map(_number, at.values())) for at in position]
        for token in set().union(*position):
            values = [_number(at[token]) if token in at else bound for at, bound in zip(position, least, strict=True)]
            middle = statistics.median(values)
            for engine, value in zip(answers, values, strict=True):
                sums[engine] += scale * abs(value - middle)
            count += 1
    return {engine: total / count for engine, total in sums.items()} if count else {}


def apart(one: Sequence[At], other: Sequence[At]) -> float:
    """How far two answers of the same tokens are from each other. Raises as `from_most`."""
    return from_most({0: one, 1: other})[0]


def _number(value: float) -> float:
    return value if math.isfinite(value) else _NO_NUMBER
