"""What several workers say, taken together.

Not covered: how they come to say it (`test_parallel.py`).
"""

from __future__ import annotations

import pytest

from weightsync.errors import ApplyFailed, DigestMismatch, InternalError, ManifestRefused, TransportFailed, WeightSyncError
from weightsync.fleet.reports import failure, require_ranks, standings
from weightsync.protocol import WorkerReport


def report(rank: int, error: WeightSyncError | None = None, unclaimed: dict[str, str] | None = None) -> WorkerReport:
    plain = error.to_dict() if error else None
    return WorkerReport(rank, "u", "failed" if error else "staged", error=plain, unclaimed=unclaimed or {})


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_every_worker_has_a_rank_of_its_own(ranks: list[int]) -> None:
    require_ranks([report(rank) for rank in ranks], 4)


@pytest.mark.parametrize("ranks", [[], [0, 1], [0, 1, 0, 1], [0, 1, 2, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4]])
def test_ranks_that_several_have_or_none_are_refused(ranks: list[int]) -> None:
    with pytest.raises(InternalError, match="4 worker"):
        require_ranks([report(rank) for rank in ranks], 4)


def test_all_well_is_no_failure() -> None:
    assert failure([report(0), report(1)]) is None
    assert failure([]) is None


@pytest.mark.parametrize("rank", range(3))
def test_what_failed_in_one_worker_failed_in_the_engine(rank: int) -> None:
    error = failure([report(n, ApplyFailed("no", names=["a"]) if n == rank else None) for n in range(3)])
    assert isinstance(error, ApplyFailed)
    assert (error.message, error.names) == (f"worker {rank} of 3: no", ("a",))


def test_no_failure_is_lost_behind_another() -> None:
    error = failure([report(0), report(1, DigestMismatch("bits", names=["b"])), report(2, ApplyFailed("no", names=["a", "b"]))])
    assert isinstance(error, DigestMismatch)
    assert error.message == "worker 1 of 3: bits; worker 2 of 3: no"
    assert error.names == ("b", "a")


def test_what_failed_alike_is_said_once() -> None:
    alike = [report(n, ApplyFailed("no")) for n in (0, 1)]
    assert failure(alike).message == "no"  # type: ignore[union-attr]
    assert failure([*alike, report(2)]).message == "worker 0, 1 of 3: no"  # type: ignore[union-attr]


@pytest.mark.parametrize("refuses", [0, 1])
def test_a_refusal_gives_its_kind_rather_than_the_broadcast_that_it_broke(refuses: int) -> None:
    errors: list[WeightSyncError] = [TransportFailed("the trainer left"), ApplyFailed("no")]
    error = failure([report(n, errors[n == refuses]) for n in (0, 1)])
    assert isinstance(error, ApplyFailed)
    assert f"worker {refuses} of 2: no" in error.message and f"worker {1 - refuses} of 2: the trainer left" in error.message


def test_a_worker_alone_is_not_named() -> None:
    assert failure([report(0, ApplyFailed("no"))]).message == "no"  # type: ignore[union-attr]


def test_where_each_stands_is_kept_by_rank() -> None:
    assert standings([report(0), report(1, ApplyFailed("no"))]) == {"0": "staged", "1": "apply_failed: no"}


def test_a_name_is_unknown_when_nobody_can_place_it() -> None:
    both, first, second = {"x": "x (closest: y)"}, {"a": "a"}, {"b": "b"}
    assert failure([report(0, unclaimed=first), report(1, unclaimed=second)]) is None
    assert failure([report(0, unclaimed=first), report(1)]) is None
    error = failure([report(0, unclaimed=first | both), report(1, unclaimed=both | second)])
    assert isinstance(error, ManifestRefused) and error.names == ("x",)
    assert error.message == "1 unknown to every worker: x (closest: y)"


def test_many_unknown_names_are_counted() -> None:
    names = {f"n{number}": f"n{number}" for number in range(30)}
    error = failure([report(0, unclaimed=names), report(1, unclaimed=names)])
    assert error is not None and error.message.startswith("30 unknown") and error.message.endswith("n19 and 10 more")


def test_an_error_comes_before_unknown_names() -> None:
    names = {"x": "x"}
    assert isinstance(failure([report(0, ApplyFailed("no"), names), report(1, unclaimed=names)]), ApplyFailed)
