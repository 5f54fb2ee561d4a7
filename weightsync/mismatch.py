"""Train–inference mismatch as plain data: what `observe` sends and is told, and what a probe finds; part of `protocol`.

All differences are in nats. Signs are Schulman's, with r = p_trainer / p_rollout on tokens that the rollout sampled:
k1 = -log r and k3 = (r - 1) - log r. The mean of either estimates KL(rollout ‖ trainer): unbiased both, k3 never negative and
with less variance. So a positive k1 says that the rollout gave its tokens more than the trainer does.

Standard library only.

Not covered: how log-probabilities become these sums (`client.observing`), and engines' answers to a probe a verdict (`fleet.compared`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

#: By how many committed updates what was sampled lies behind: the values of the label `behind`.
BEHIND = ("0", "1", "2", "3+")
#: Most tallies in one call of `observe`: the engines of a fleet times the versions that its samples are of.
MAX_TALLIES = 4096
MAX_TOKENS = 2**40
#: |log r| counts at most as much in k3, which would leave every range else; e^60 is larger than any threshold.
MOST_LOG_RATIO = 60.0
#: An engine stands out when it differs by more than so many times the least of the others' mean differences…
FACTOR = 4.0
#: …and by more than this, nats. Two healthy engines of one model differ by some hundredths in bf16.
FLOOR_NATS = 0.05
#: Fewer tokens than these say nothing of an engine.
LEAST_TOKENS = 32


@dataclass(frozen=True)
class Tally:
    """Sums over the tokens that one engine sampled from one version.

    Attributes:
        engine: ordinal.
        version: of the weights that sampled them.
        tokens: how many.
        difference, k1, k3: sums of |log r| and of both estimators.
        largest: the largest |log r|.
    """

    engine: int
    version: int
    tokens: int
    difference: float
    k1: float
    k3: float
    largest: float

    def __post_init__(self) -> None:
        for key, most in (("engine", 2**53 - 1), ("version", 2**53 - 1), ("tokens", MAX_TOKENS)):
            if not 0 <= getattr(self, key) <= most:
                raise ValueError(f"{key} {getattr(self, key)}: want 0 to {most}")
        sums = self.difference, self.k1, self.k3, self.largest
        if not self.tokens or not all(map(math.isfinite, sums)):
            raise ValueError(f"engine {self.engine}: want at least one token, and finite sums")
        slack = 1e-6 * (1 + self.difference)  # of adding up
        if min(self.difference, self.k3 + slack, self.largest) < 0 or max(abs(self.k1), self.largest) > self.difference + slack:
            raise ValueError(f"engine {self.engine}: no log-probabilities have these sums: {sums}")
        if self.k3 > self.tokens * math.exp(MOST_LOG_RATIO):
            raise ValueError(f"engine {self.engine}: k3 {self.k3:g}: want |log r| taken for {MOST_LOG_RATIO:g} at most")


@dataclass(frozen=True)
class Tallies:
    """What a trainer sends of its samples: never a token."""

    tallies: tuple[Tally, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.tallies) <= MAX_TALLIES:
            raise ValueError(f"{len(self.tallies)} tallies: want 1 to {MAX_TALLIES}")


@dataclass(frozen=True)
class Mismatch:
    """Means over the tokens of one engine that were so many updates behind, nats.

    Attributes:
        engine: ordinal.
        behind: one of `BEHIND`.
        difference, k1, k3: means of |log r| and of both estimators.
        largest: the largest |log r|.
    """

    engine: int
    behind: str
    tokens: int
    difference: float
    k1: float
    k3: float
    largest: float


@dataclass(frozen=True)
class Observation:
    """What `observe` returns: of the samples that it was given.

    Attributes:
        engines: by engine and by how many updates behind.
        named: engines that stand out among those that were sampled as many updates behind.
        unknown: engines that the fleet has not, or no longer; their samples went into nothing.
    """

    engines: tuple[Mismatch, ...]
    named: tuple[int, ...]
    unknown: tuple[int, ...] = ()


@dataclass(frozen=True)
class ProbeAnswer:
    """How one engine scored the fixed prompts.

    Attributes:
        scores: position after position, log-probabilities of the likeliest tokens and of the one that was forced, by token id.
        captured, uncaptured: of the same tokens at the same positions, by captured graphs and without.
        no_graphs: why there is nothing of the two.
        skipped: why there is nothing at all, as a code; empty when there is.
        why: that in words.
        seconds: that it took.
    """

    scores: tuple[dict[str, float], ...] = ()
    captured: tuple[dict[str, float], ...] = ()
    uncaptured: tuple[dict[str, float], ...] = ()
    no_graphs: str = ""
    skipped: str = ""
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class ProbeReport:
    """What the probe found behind a commit.

    Attributes:
        version: that was probed.
        engines: by ordinal, how far the engine is from what most engines say; from the other one, where there are two.
        graphs: by ordinal, how far its captured graphs are from the same model without them.
        named: ordinals of engines that are at fault.
        said: what is out of the limits, in sentences.
        skipped: by ordinal, why an engine was not probed.
        no_graphs: why no engine compared graphs; empty when one did.
        seconds: that it took, all engines at once.
    """

    version: int
    engines: dict[str, float] = field(default_factory=dict)
    graphs: dict[str, float] = field(default_factory=dict)
    named: tuple[int, ...] = ()
    said: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    no_graphs: str = ""
    seconds: float = 0.0


def standing_out(means: Iterable[Mismatch]) -> tuple[int, ...]:
    """Engines whose samples differ from their trainer by far more than others' that were as many updates behind.

    The trainer is the measure, so one engine of two can be named, and most engines of a fleet, as long as one is right.
    """
    named, known = set[int](), [mean for mean in means if mean.tokens >= LEAST_TOKENS]
    for behind in BEHIND:
        alike = {mean.engine: mean.difference for mean in known if mean.behind == behind}
        limit = max(FLOOR_NATS, FACTOR * min(alike.values(), default=0.0))
        named |= {engine for engine, difference in alike.items() if len(alike) > 1 and difference > limit}
    return tuple(sorted(named))
