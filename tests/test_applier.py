"""What one worker keeps and brings back, over several updates. Without vLLM (`workers`).

Not covered: real loaders (`test_failure_table.py`), several workers at once.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.workers import NAMES, Worker, weights, without_vllm
from weightsync.errors import (
    BaseRefused,
    DigestMismatch,
    ManifestRefused,
    MemoryRefused,
    Refused,
    UpdateConflict,
    VerdictNotOk,
    WeightSyncError,
)
from weightsync.worker import applier, loading

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
    assert (worker.applier._held.kept is not None) is retain
    update, _ = worker.apply(weights(2))
    worker.applier.verify(update)
    worker.applier.abort(update)
    assert worker.applier._receiver.into is None


def test_what_somebody_captured_is_sealed_before_the_first_write_and_not_over_half_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed load has left elsewhere would be taken for where it belongs."""
    worker, sealed = Worker(retain=False), list[bool]()
    worker.update(weights(1))
    monkeypatch.setattr(worker.guard, "outdated", True)
    monkeypatch.setattr(worker.guard, "seal", lambda: sealed.append(worker.applier.wrote), raising=False)
    monkeypatch.setattr(worker.applier._lazies, "note_captured", lambda: None, raising=False)
    worker.model.fail_behind = [1]
    update, report = worker.apply(weights(2))
    assert report.wrote and worker.applier.apply(update).state == "applied"
    assert sealed == [False]


def test_on_the_way_back_nothing_is_proved_and_the_failed_updates_bytes_are_gone() -> None:
    """Another worker failed before this one had written."""
    worker = Worker(workers=2)
    worker.update(weights(1))
    update = worker.begin(weights(2))
    worker.model.fail_behind = [1]
    assert worker.applier.rollback(update).state == "failed"
    assert worker.applier._held.proved == "" and worker.applier.wrote
    assert worker.applier._receiver is not None and worker.applier._receiver.into is None


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
        worker.applier.abort(worker.update(weights(1)))  # a trainer that had given up says so too late
    elif ends == "failed":
        worker.model.fail_behind = [1]
        worker.applier.abort(worker.apply(weights(1))[0])
    else:
        worker.applier.abort(worker.begin(weights(1)))
        assert worker.applier._joining._order is None, "a thread that is still on its way in comes in vain"
    worker.begin(weights(2))
    assert closed == ([] if ends == "verified" else ["closed"])


def test_what_has_not_arrived_is_never_loaded_also_not_over_what_an_earlier_update_left() -> None:
    """That the earlier one had written was taken for a first try of this one: bytes that had failed their digests were loaded."""
    worker = Worker(retain=False)
    worker.model.fail_behind = [1]
    update, report = worker.apply(weights(2))
    assert report.wrote
    worker.applier.abort(update)
    update, before = worker.begin(weights(3)), worker.model.values()
    worker.applier._receiver.error = DigestMismatch("other bytes")  # type: ignore[union-attr]
    report = worker.applier.apply(update)
    assert (report.state, report.wrote, worker.model.values()) == ("failed", True, before)


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


# --- partial updates -------------------------------------------------------------------------------

WITHIN = ("body.*",)


def tower(value: float) -> dict[str, torch.Tensor]:
    return {TOWER: weights(value)[TOWER]}


def test_a_partial_update_brings_what_is_in_its_scope_and_leaves_the_rest() -> None:
    worker = Worker()
    worker.update(weights(1))
    worker.update(body(2), WITHIN)
    worker.update(tower(3), ("tower.*",))
    assert worker.model.values() == {BODY: 2, TOWER: 3}


def test_what_is_outside_of_the_scope_or_missing_in_it_is_refused() -> None:
    worker = Worker()
    worker.update(weights(1))
    with pytest.raises(ManifestRefused, match=r"1 outside of the scope: tower\.weight") as caught:
        worker.update(weights(2), WITHIN)
    assert caught.value.names == (TOWER,)
    with pytest.raises(ManifestRefused, match=r"1 outside of the scope: tower\.weight; 1 missing: body\.weight"):
        worker.update(tower(2), WITHIN)
    with pytest.raises(ManifestRefused, match=r"^1 missing: tower\.weight"):
        worker.update(body(2), ("body.*", "tow*"))
    assert worker.model.values() == {BODY: 1, TOWER: 1}


def test_a_partial_update_is_taken_on_its_base_and_on_no_other() -> None:
    worker = Worker(retain=False)
    with pytest.raises(BaseRefused, match=r"builds on version 0 \(update u9\), and this worker holds no proved update"):
        worker.begin(body(1), WITHIN, base="u9")
    first = worker.update(weights(1))
    with pytest.raises(BaseRefused, match=rf"\(update u9\), and this worker holds update {first}"):
        worker.begin(body(2), WITHIN, base="u9")
    second = worker.update(body(2), WITHIN)
    with pytest.raises(BaseRefused, match=f"this worker holds update {second}"):
        worker.begin(body(3), WITHIN, base=first)
    assert worker.model.values() == {BODY: 2, TOWER: 1}


def test_behind_an_update_that_failed_nothing_partial_is_taken_until_a_complete_one_is_proved() -> None:
    worker = Worker(retain=False)
    first = worker.update(weights(1))
    worker.model.fail_behind = [1]
    update, report = worker.apply(weights(2))
    assert report.wrote
    worker.applier.abort(update)
    with pytest.raises(BaseRefused, match="holds no proved update"):
        worker.begin(body(3), WITHIN, base=first)
    worker.update(weights(4))
    worker.update(body(5), WITHIN)
    assert worker.model.values() == {BODY: 5, TOWER: 4}


def test_a_base_that_was_lost_since_the_update_began_is_seen_before_the_first_write() -> None:
    worker = Worker(retain=False)
    worker.update(weights(1))
    update = worker.begin(body(2), WITHIN)
    worker.applier._held.lose()
    with pytest.raises(BaseRefused):
        worker.applier.apply(update)
    assert not worker.applier.wrote and worker.model.values() == {BODY: 1, TOWER: 1}


def test_a_partial_update_that_fails_once_is_applied_again() -> None:
    worker = Worker()
    worker.update(weights(1))
    worker.model.fail_behind = [0]
    update, report = worker.apply(body(2), WITHIN)
    assert report.wrote and report.error is not None
    assert worker.applier.apply(update).state == "applied"
    assert worker.applier.verify(update).state == "verified"
    assert worker.model.values() == {BODY: 2, TOWER: 1}


@pytest.mark.parametrize("fails", [weights(9), body(9)], ids=["complete", "partial"])
def test_a_worker_goes_back_to_all_partial_updates_that_counted(fails: dict[str, torch.Tensor]) -> None:
    worker = Worker()
    worker.update(weights(1))
    worker.update(body(2), WITHIN)
    kept = worker.applier._held.kept
    worker.update(tower(3), ("tower.*",))
    now = worker.applier._held.kept
    assert kept is not None and now is not None and now.data is kept.data, "the kept bytes take the new ones in"
    worker.guard.fail = [True]
    update, report = worker.apply(fails, WITHIN if len(fails) == 1 else ())
    assert worker.applier.verify(update).state == "failed" and report.wrote
    assert worker.go_back(update).state == "rolled_back"
    assert worker.model.values() == {BODY: 2, TOWER: 3}
    worker.update(body(4), WITHIN)
    assert worker.model.values() == {BODY: 4, TOWER: 3}


def test_what_can_not_be_merged_is_not_gone_back_to() -> None:
    """The kept update left out what a partial one brought: together they would be no one version."""
    worker = Worker(frozen=["tower.*"])
    worker.update(body(1))
    worker.update(tower(2), ("tower.*",))
    assert worker.applier._held.kept is None
    worker.model.fail_behind = [0]
    update, _ = worker.apply(body(3), WITHIN)
    with pytest.raises(WeightSyncError, match="no earlier update is kept"):
        worker.go_back(update)
    assert worker.applier.wrote


def test_frozen_tensors_may_be_left_out_of_a_scope_that_has_them() -> None:
    worker = Worker(frozen=["tower.*"])
    worker.update(weights(1))
    with pytest.raises(ManifestRefused, match=r"missing: tower\.weight \(frozen, but sent before"):
        worker.update(body(2), ("*",))
    worker.update(body(2), WITHIN)  # outside of the scope nobody asks for it
    worker = Worker(frozen=["tower.*"])
    worker.update(body(1))
    worker.update(body(2), ("*",))
    assert worker.model.values() == {BODY: 2, TOWER: 0}


def test_a_model_with_a_hook_over_all_its_layers_takes_complete_updates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    worker.update(weights(1))
    monkeypatch.setattr(applier.vllm_compat, "whole_only", lambda model: "Odd has a hook")
    with pytest.raises(ManifestRefused, match="no part of this model can be updated by itself: Odd has a hook"):
        worker.update(body(2), WITHIN)
    worker.update(weights(2))


# --- sleep -----------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Worker:
    """A worker with a constant beside its weights, all in the memory that a sleep gives back."""
    worker = Worker()
    worker.model.register_buffer("table", torch.arange(4.0), persistent=False)
    worker.applier._seal = loading.registered_places(worker.model)
    worker.memory.hold(*worker.model.parameters(), *worker.model.buffers())
    return worker


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_while_asleep_is_refused_and_nothing_is_touched(level: int, sleeper: Worker) -> None:
    sleeper.update(weights(1))
    assert sleeper.applier.fall_asleep(level).error is None
    sleeper.memory.sleep(level)
    with pytest.raises(Refused, match="this engine is asleep"):
        sleeper.begin(weights(2))
    with pytest.raises(Refused, match="asleep"):
        sleeper.applier.fall_asleep(1)
    if level == 2:
        with pytest.raises(Refused, match="has not come back"):
            sleeper.applier.woken()
        sleeper.memory.gone = False  # the weights' memory first, and the KV cache's behind it
        assert sleeper.applier.woken().checks == {"constants_restored": 1}
    with pytest.raises(Refused, match="this engine is asleep"):
        sleeper.begin(weights(2))
    assert sleeper.applier.report().state == "verified"


def test_a_sleep_behind_the_beginning_of_an_update_is_seen_before_the_first_write(sleeper: Worker) -> None:
    sleeper.update(weights(1))
    update = sleeper.begin(weights(2))
    with pytest.raises(UpdateConflict, match="an update is under way"):
        sleeper.applier.fall_asleep(1)
    sleeper.memory.sleep(1)  # somebody else's
    with pytest.raises(Refused, match="asleep"):
        sleeper.applier.apply(update)
    assert not sleeper.applier.wrote
    sleeper.memory.wake()
    assert sleeper.applier.apply(update).state == "applied"
    with pytest.raises(UpdateConflict, match="an update is under way"):
        sleeper.applier.fall_asleep(1)


def test_behind_a_light_sleep_all_is_as_it_was(sleeper: Worker) -> None:
    sleeper.update(weights(1))
    sleeper.applier._regions._spare = SimpleNamespace(nbytes=64)  # type: ignore[assignment]
    assert sleeper.applier.fall_asleep(1).checks == {}
    assert sleeper.applier._regions._spare is None, "what is kept for the next update is the engine's to give back"
    sleeper.memory.sleep(1)
    sleeper.memory.wake()
    assert sleeper.applier.woken().checks == {}
    sleeper.update(body(2), WITHIN)
    assert sleeper.model.values() == {BODY: 2, TOWER: 1}


def test_behind_a_deep_sleep_constants_are_there_and_weights_come_with_the_next_complete_update(sleeper: Worker) -> None:
    first = sleeper.update(weights(1))
    assert sleeper.applier.fall_asleep(2).checks == {"constants": 1, "constant_bytes": 16}
    sleeper.memory.sleep(2)
    sleeper.memory.wake()
    table = sleeper.model.get_buffer("table")
    assert table.tolist() == [-77.0] * 4 and sleeper.model.values() == {BODY: -77, TOWER: -77}
    assert sleeper.applier.woken().checks == {"constants_restored": 1}
    assert table.tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(BaseRefused, match="holds no proved update"):
        sleeper.begin(body(2), WITHIN, base=first)
    table.fill_(5)  # whoever ran meanwhile
    update, report = sleeper.apply(weights(3))
    assert report.checks["constants_restored"] == 1 and table.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sleeper.applier.verify(update).state == "verified"
    table.fill_(6)
    sleeper.update(weights(4))
    assert table.tolist() == [6.0] * 4, "what was put aside is owed once"


def test_frozen_layers_are_put_aside_too_since_no_update_need_bring_them() -> None:
    worker = Worker(frozen=["tower.*"])
    worker.memory.hold(*worker.model.parameters())
    worker.update(body(1))
    assert worker.applier.fall_asleep(2).checks["constants"] == 1
    worker.memory.sleep(2)
    worker.memory.wake()
    worker.applier.woken()
    worker.update(body(2))
    assert worker.model.values() == {BODY: 2, TOWER: 0}


def test_a_constant_that_does_not_come_back_fails_the_update_before_it_writes(sleeper: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper.update(weights(1))
    sleeper.applier.fall_asleep(2)
    sleeper.memory.sleep(2)
    sleeper.memory.wake()
    monkeypatch.setattr(sleeper.memory, "write", lambda address, data: None)
    with pytest.raises(VerdictNotOk, match=r"1 constant\(s\) did not come back after a sleep: 16 bytes at 0x"):
        sleeper.applier.woken()
    update = sleeper.begin(weights(2))
    with pytest.raises(VerdictNotOk, match=r"1 constant\(s\) did not come back"):
        sleeper.applier.apply(update)
    assert not sleeper.applier.wrote


def test_a_host_without_room_for_what_would_be_lost_refuses_the_deep_sleep(sleeper: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.worker.staging.free_bytes", lambda where: 10)
    with pytest.raises(MemoryRefused, match="what a sleep of level 2 would lose takes 16 bytes"):
        sleeper.applier.fall_asleep(2)
    assert sleeper.applier.fall_asleep(1).checks == {}
