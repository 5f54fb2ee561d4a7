"""What one worker keeps and brings back, over several updates. Without vLLM (`workers`).

Not covered: real loaders (`test_failure_table.py`), several workers at once.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.workers import NAMES, Worker, weights, without_vllm
from weightsync.errors import ManifestRefused, WeightSyncError

BODY, TOWER = NAMES


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


def body(value: float) -> dict[str, torch.Tensor]:
    return {BODY: weights(value)[BODY]}


def test_a_worker_goes_back_to_the_update_before_more_than_once() -> None:
    worker = Worker()
    worker.update(weights(1))
    for value in (2, 3):
        worker.model.fail_behind = [1]
        update, report = worker.apply(weights(value))
        assert report.wrote and worker.model.values() == {BODY: value, TOWER: 1}
        back = worker.go_back(update)
        assert (back.state, back.wrote) == ("rolled_back", False)
        assert worker.model.values() == {BODY: 1, TOWER: 1}
        worker.applier.abort(update)
    worker.update(weights(4))
    assert worker.model.values() == {BODY: 4, TOWER: 4}


def test_what_was_verified_and_does_not_count_is_applied_again_or_undone() -> None:
    """Another worker of the engine failed, or a cache could not be dropped."""
    worker = Worker(workers=2)
    worker.update(weights(1))
    update, _ = worker.apply(weights(2))
    assert worker.applier.verify(update).state == "verified"
    assert worker.applier.apply(update).state == "applied"
    assert worker.applier.verify(update).state == "verified"
    assert worker.go_back(update).state == "rolled_back"
    assert worker.model.values() == {BODY: 1, TOWER: 1}


def test_a_worker_that_has_not_begun_to_write_goes_back_with_the_others() -> None:
    worker = Worker(workers=2)
    worker.update(weights(1))
    assert worker.go_back(worker.begin(weights(2))).state == "rolled_back"
    assert worker.model.values() == {BODY: 1, TOWER: 1}


def test_going_back_is_proved_apart_from_loading() -> None:
    """A run of the model, and a capture, wait for all workers of an engine: none may begin before all have loaded."""
    worker = Worker(workers=2)
    worker.update(weights(1))
    worker.model.fail_behind = [1]
    update, _ = worker.apply(weights(2))
    worker.guard.fail = [True]
    report = worker.applier.rollback(update)
    assert (report.state, report.wrote, worker.guard.fail) == ("applied", True, [True])
    report = worker.applier.verify(update)
    assert (report.state, report.wrote) == ("failed", True)


@pytest.mark.parametrize("settled", [True, False])
def test_what_nobody_said_counts_is_not_gone_back_to(settled: bool) -> None:
    """The engine may hold the one before, or this one: nobody knows."""
    worker = Worker()
    worker.update(weights(1))
    update, _ = worker.apply(weights(2))
    worker.applier.verify(update)
    if settled:
        worker.applier.keep(update)
        worker.applier.keep(update)
    worker.model.fail_behind = [1]
    update, report = worker.apply(weights(3))
    assert report.wrote
    if settled:
        assert worker.go_back(update).state == "rolled_back"
        assert worker.model.values() == {BODY: 2, TOWER: 2}
    else:
        with pytest.raises(WeightSyncError, match="no earlier update"):
            worker.go_back(update)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("retain", [True, False])
def test_bytes_are_let_go_of_when_the_update_counts(workers: int, retain: bool) -> None:
    worker = Worker(workers=workers, retain=retain)
    update = worker.update(weights(1))
    assert worker.applier._receiver is not None and worker.applier._receiver.into is None
    assert (worker.applier._retained is not None) is retain
    update, _ = worker.apply(weights(2))
    worker.applier.verify(update)
    worker.applier.abort(update)
    assert worker.applier._receiver.into is None


@pytest.mark.parametrize("then", ["abort", "begin"])
def test_what_is_not_staged_goes_by_when_loading_failed_until_the_next_update(then: str) -> None:
    worker = Worker(retain=False, stage="none")
    worker.model.fail_behind = [1]
    update, report = worker.apply(weights(1))
    receiver = worker.applier._receiver
    assert report.wrote and receiver is not None and receiver.draining
    if then == "abort":
        worker.applier.abort(update)
        assert receiver.into is not None, "it is still in the broadcast"
    else:
        worker.update(weights(2))
        assert receiver.into is None
        assert worker.model.values() == {BODY: 2, TOWER: 2}


@pytest.mark.parametrize("ends", ["verified", "failed", "aborted"])
def test_a_communicator_is_kept_behind_an_update_that_went_well_and_behind_no_other(ends: str) -> None:
    """The trainer keeps its end too: a worker that left would wait for it in vain."""
    worker, closed = Worker(retain=False), list[str]()
    worker.applier._joining._channel = SimpleNamespace(close=lambda: closed.append("closed"))  # type: ignore[assignment]
    if ends == "verified":
        worker.update(weights(1))
    elif ends == "failed":
        worker.model.fail_behind = [1]
        worker.applier.abort(worker.apply(weights(1))[0])
    else:
        worker.applier.abort(worker.begin(weights(1)))
    worker.begin(weights(2))
    assert closed == ([] if ends == "verified" else ["closed"])


# --- frozen ----------------------------------------------------------------------------------------


def test_what_was_frozen_and_then_written_can_not_be_left_out_any_more() -> None:
    """It is the checkpoint's no longer: an engine that restarts, or one that the update failed in, would hold another."""
    worker = Worker(frozen=["tower.*"])
    worker.update(body(1))
    worker.update(body(2))
    assert worker.model.values() == {BODY: 2, TOWER: 0}
    worker.update(weights(3))
    with pytest.raises(ManifestRefused, match=r"missing: tower\.weight \(frozen, but sent before") as caught:
        worker.update(body(4))
    assert caught.value.names == (TOWER,)
    worker.update(weights(5))
    assert worker.model.values() == {BODY: 5, TOWER: 5}


def test_half_an_update_that_wrote_what_is_frozen_is_not_left_there() -> None:
    worker = Worker(frozen=["tower.*"], retain=False)
    worker.update(body(1))
    worker.model.fail_behind = [1]
    update, report = worker.apply(dict(reversed(weights(2).items())))
    assert report.wrote and worker.model.values() == {BODY: 1, TOWER: 2}
    worker.applier.abort(update)
    with pytest.raises(ManifestRefused, match=r"missing: tower\.weight"):
        worker.update(body(3))


def test_what_the_update_before_left_out_can_not_be_brought_back() -> None:
    worker = Worker(frozen=["tower.*"])
    worker.update(body(1))
    worker.model.fail_behind = [1]
    update, report = worker.apply(dict(reversed(weights(2).items())))
    assert report.wrote and worker.model.values() == {BODY: 1, TOWER: 2}
    with pytest.raises(WeightSyncError, match=r"left out tower\.weight"):
        worker.go_back(update)
    assert worker.applier.wrote
    worker.applier.abort(update)
    worker.update(weights(3))
    assert worker.model.values() == {BODY: 3, TOWER: 3}
