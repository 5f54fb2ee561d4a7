"""Requests in flight while updates go by: none is lost, each gets what it asked for, and the versions told are right.

The requests are those of OpenAI's Python client, to the engines' own addresses, of which the service's status tells; the
trainer is a process of its own, and its versions alternate between two sets of weights.

Not covered: what updates cost these requests (`benchmarks/in_flight.py`).
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.in_flight import KINDS, Answer, Clients, Trainer, keep_in_flight, summed, table, training
from tests.fleets import MAX_TOKENS, PROMPTS, Fleet, answers

ROOT = Path(__file__).resolve().parent.parent
KIND = "qwen3"
IN_FLIGHT, UPDATES = 100, 20


class Told:
    """What the trainer has told: which versions an engine can have held at a moment."""

    def __init__(self, trainer: Trainer) -> None:
        self._updates = trainer.committed
        assert len(trainer.updates) == len(self._updates), [update for update in trainer.updates if "code" in update]
        assert all(update["engines"] == [0, 1] for update in self._updates)

    def least(self, at: float) -> int:
        """The version that every engine holds, or an older one than it holds."""
        done = bisect.bisect_right([update["ended"] for update in self._updates], at)
        return self._updates[done - 1]["version"] if done else -1

    def most(self, at: float) -> int:
        """The newest one that any engine can hold."""
        begun = bisect.bisect_right([update["began"] for update in self._updates], at)
        return self._updates[begun - 1]["version"] if begun else -1


def require_versions(answer: Answer, told: Told) -> None:
    assert answer.version is not None
    assert told.least(answer.began) <= answer.version <= told.most(answer.head), answer
    if answer.kind == "generate":
        spans = answer.spans
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])] and spans[-1][2] == answer.asked, answer
        versions = [version for version, _, _ in spans]
        assert versions == sorted(set(versions)) and answer.version <= versions[0] and versions[-1] <= told.most(answer.ended), answer


def through_updates(fleet: Fleet, even: Path, odd: Path, tokens: int) -> tuple[list[Answer], list[Answer], Told]:
    """Requests kept in flight while updates go by, short ones beside them, and what the trainer told."""
    with fleet.client() as sync:
        engines = sync.engines()

    async def run(trainer: Trainer) -> tuple[list[Answer], list[Answer]]:
        clients, short = Clients(engines, fleet.token), list[Answer]()
        until = len(trainer.committed) + UPDATES

        def more(_: int) -> bool:
            return len(trainer.committed) < until and trainer.process.poll() is None

        async def ask_short(engine: int) -> None:
            while more(0):
                short.append(await clients.ask("generate", engine, PROMPTS[len(short) % len(PROMPTS)], MAX_TOKENS))

        long, *_ = await asyncio.gather(keep_in_flight(clients, 2, IN_FLIGHT, tokens, more), ask_short(0), ask_short(1))
        await clients.close()
        return long, short

    with training(fleet, even, odd, 0.0) as trainer:
        assert trainer is not None
        long, short = asyncio.run(run(trainer))
    return long, short, Told(trainer)


def test_the_benchmark_compares_with_the_rounds_without_updates() -> None:
    def one(tokens: float, updates: int) -> dict[str, float]:
        return {
            "seconds": 2.0, "tokens_per_second": tokens, "latency_median": 1.0, "latency_95": 2.0, "updates": updates, "paused": 0.1
        }  # fmt: skip

    rows = summed({"none": [one(100.0, 0), one(300.0, 0), one(200.0, 0)], "some": [one(150.0, 4), one(40.0, 4), one(160.0, 4)]})
    assert [(row["way"], row["tokens_per_second"], row["of_none"]) for row in rows] == [("none", 200.0, 1.0), ("some", 150.0, 0.75)]
    assert rows[1]["updates_per_second"] == 2.0 and len(table(rows).splitlines()) == 4


@pytest.fixture(scope="module")
def wide(checkpoint: Callable[[str, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines in which all requests run at once, so that each update finds them all between two tokens."""
    flags = [f"--engine.max_num_seqs={IN_FLIGHT}"]
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("wide"), 2, flags, {"PYTHONPATH": str(ROOT)}).ready()
    yield running
    assert running.stop() == 0


@pytest.mark.slow
@pytest.mark.engine
def test_a_hundred_requests_in_flight_are_answered_in_full_while_twenty_updates_go_by(
    wide: Fleet, checkpoint: Callable[[str, int], Path], tensors: Any
) -> None:
    long, short, told = through_updates(wide, checkpoint(KIND, 1), checkpoint(KIND, 2), tokens=200)
    assert not [answer for answer in (*long, *short) if not answer.whole]
    assert len(long) >= IN_FLIGHT and {answer.kind for answer in long} == set(KINDS) and {answer.engine for answer in long} == {0, 1}
    for answer in (*long, *short):
        require_versions(answer, told)
    assert any(len(answer.spans) > 1 for answer in long), "no update fell into a request"
    # Whose tokens they are: those that one version made are what its weights say when nothing else goes on.
    said = {}
    with wide.client() as sync:
        for seed in (1, 2):
            sync.sync_weights(tensors(KIND, seed))
            said[(seed + 1) % 2] = answers(sync, 0)[0]
    single = [answer for answer in short if len(answer.spans) == 1]
    assert {answer.spans[0][0] % 2 for answer in single} == {0, 1}
    for answer in single:
        assert answer.tokens == said[answer.spans[0][0] % 2][PROMPTS.index(answer.prompt)]
