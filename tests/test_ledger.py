"""The fleet's book: which update may follow which, and what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from weightsync.errors import (
    Aborted,
    ApplyFailed,
    BaseRefused,
    DeadlineExceeded,
    EngineDied,
    NoEngineReady,
    Refused,
    UpdateConflict,
    VersionRefused,
    WeightSyncError,
)
from weightsync.fleet.ledger import Ledger, Update
from weightsync.protocol import CommunicatorInfo, EngineState, EngineStatus, EngineVerdict, Manifest, TensorSpec, UpdateRequest, UpdateState

MANIFEST = Manifest((TensorSpec("w", "float32", (2,)),))
COMMUNICATOR = CommunicatorInfo("127.0.0.1", 1, 1, 3, {"0": 1, "1": 2}, "gloo")


def request(update_id: str, version: int) -> UpdateRequest:
    return UpdateRequest(update_id, "trainer", version, MANIFEST, 4096, "hash", 10.0, "gloo", "2.13.0")


def engine(ordinal: int, version: int | None = None, state: EngineState | None = None) -> EngineStatus:
    state = state or (EngineState.PENDING if version is None else EngineState.SERVING)
    return EngineStatus(ordinal, state, version, None, "http://engine", "policy", 1, "0.32.0")


def fleet(engines: int = 2, require: int | None = None, history: int = 10) -> Ledger:
    ledger = Ledger(require, history)
    for ordinal in range(engines):
        ledger.see(engine(ordinal))
    return ledger


def verdict(ordinal: int, version: int, committed: bool = True) -> EngineVerdict:
    if committed:
        return EngineVerdict(ordinal, True, version, EngineState.SERVING)
    return EngineVerdict(ordinal, False, None, EngineState.QUARANTINED, error=ApplyFailed("no", engine=ordinal).to_dict())


def apply(ledger: Ledger, update: Update, *committed: bool) -> bool:
    """Take an admitted update to its end with these engines' verdicts."""
    for state in (UpdateState.RECEIVING, UpdateState.STAGED, UpdateState.APPLYING):
        update.move(state)
    verdicts = [verdict(ordinal, update.request.version, ok) for ordinal, ok in zip(update.engines, committed, strict=True)]
    return ledger.conclude(update, verdicts, 2.0)


# --- states ------------------------------------------------------------------------------------

ALLOWED = {
    ("admitted", "receiving"), ("receiving", "staged"), ("staged", "applying"), ("applying", "committed"),
    ("admitted", "aborted"), ("receiving", "aborted"), ("staged", "aborted"), ("applying", "aborted"),
}  # fmt: skip


@pytest.mark.parametrize("before", list(UpdateState))
@pytest.mark.parametrize("after", list(UpdateState))
def test_an_update_moves_as_the_table_says_and_no_other_way(before: UpdateState, after: UpdateState) -> None:
    update = Update(request("u", 1), (0,), 0.0, before)
    if (before, after) in ALLOWED:
        update.move(after)
        assert update.state == after
    else:
        with pytest.raises(AssertionError, match=f"update u: {before} → {after}"):
            update.move(after)
        assert update.state == before


def test_an_update_shows_itself() -> None:
    ledger = fleet()
    update = ledger.admit(request("u", 3), 1.0)
    update.communicator = COMMUNICATOR
    assert update.admission.engines == (0, 1)
    assert update.admission.communicator == COMMUNICATOR
    status = update.status
    assert (status.update_id, status.version, status.state, status.tensors, status.nbytes) == ("u", 3, UpdateState.ADMITTED, 1, 8)
    assert (status.began_unix_seconds, status.ended_unix_seconds) == (1.0, None)
    assert apply(ledger, update, True, True)
    assert update.status.ended_unix_seconds == 2.0
    assert [v.engine for v in update.status.verdicts] == [0, 1]


# --- admission ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [s for s in UpdateState if not s.final])
def test_a_second_update_is_told_which_one_is_under_way(state: UpdateState) -> None:
    ledger = fleet()
    ledger.admit(request("first", 5), 0.0).state = state
    with pytest.raises(UpdateConflict, match=rf"update first to version 5 is under way \({state}\)") as caught:
        ledger.admit(request("second", 6), 0.0)
    assert caught.value.retryable and "`weightsync abort first`" in caught.value.hint
    assert caught.value.update_id == "second"
    assert ledger.get("second") is None


def test_an_update_that_has_ended_is_not_begun_again() -> None:
    ledger = fleet()
    ledger.abort(ledger.admit(request("u", 1), 0.0), Aborted("stop"), 1.0)
    with pytest.raises(Refused, match=r"update u has ended \(aborted\)"):
        ledger.admit(request("u", 2), 0.0)


@pytest.mark.parametrize("version", [0, 4, 5])
def test_a_version_must_rise(version: int) -> None:
    ledger = fleet()
    apply(ledger, ledger.admit(request("u", 5), 0.0), True, True)
    with pytest.raises(VersionRefused, match=f"version {version} does not rise: the fleet has committed version 5") as caught:
        ledger.admit(request("again", version), 0.0)
    assert not caught.value.retryable
    assert "6" in caught.value.hint
    ledger.admit(request("next", 6), 0.0)


def test_the_first_version_may_be_0() -> None:
    ledger = fleet()
    assert apply(ledger, ledger.admit(request("u", 0), 0.0), True, True)
    assert ledger.committed_version == 0
    assert ledger.ready == 2
    with pytest.raises(VersionRefused):
        ledger.admit(request("again", 0), 0.0)


def test_a_version_that_too_few_engines_took_may_be_tried_again_and_lower_ones_may_not() -> None:
    ledger = fleet()
    assert not apply(ledger, ledger.admit(request("u1", 5), 0.0), True, False)
    assert ledger.committed_version == 5
    with pytest.raises(VersionRefused):
        ledger.admit(request("lower", 4), 0.0)
    # An attempt that ends before it is applied changes nothing of that.
    ledger.abort(ledger.admit(request("u2", 5), 0.0), Aborted("stop"), 1.0)
    assert apply(ledger, ledger.admit(request("u3", 5), 0.0), True, True)
    with pytest.raises(VersionRefused):
        ledger.admit(request("u4", 5), 0.0)


def test_an_engine_with_that_number_from_the_first_try_is_not_ready_behind_the_second() -> None:
    """The trainer was told that the first had failed and may have sent other weights since: two kinds of version 5 were both ready."""
    ledger = fleet()
    assert not apply(ledger, ledger.admit(request("u1", 5), 0.0), True, False)
    assert ledger.ready == 1
    again = ledger.admit(request("u2", 5), 0.0)
    for state in (UpdateState.RECEIVING, UpdateState.STAGED, UpdateState.APPLYING):
        again.move(state)
    went_back = replace(verdict(0, 5, committed=False), version=5, state=EngineState.SERVING)
    assert not ledger.conclude(again, [went_back, verdict(1, 5)], 2.0)
    assert [(e.version, e.update_id) for e in ledger.engines.values()] == [(5, "u1"), (5, "u2")]
    assert ledger.ready == 1
    assert apply(ledger, ledger.admit(request("u3", 5), 0.0), True, True) and ledger.ready == 2


@pytest.mark.parametrize("state", [EngineState.SERVING, EngineState.QUARANTINED])
def test_why_an_engines_last_update_failed_is_kept_until_one_commits(state: EngineState) -> None:
    """An engine that went back serves, and has no reason to give: a second later nothing told why it was behind."""
    ledger = fleet(require=1)
    apply(ledger, ledger.admit(request("u1", 5), 0.0), True, True)
    update = ledger.admit(request("u2", 6), 0.0)
    for step in (UpdateState.RECEIVING, UpdateState.STAGED, UpdateState.APPLYING):
        update.move(step)
    error = ApplyFailed("no room", engine=0, update_id="u2").to_dict()
    held = 5 if state == EngineState.SERVING else None
    assert ledger.conclude(update, [EngineVerdict(0, False, held, state, error=error), verdict(1, 6)], 2.0)
    says = replace(engine(0, held, state), update_id="u1", reason="" if held else "apply_failed")
    for _ in range(2):
        assert (ledger.engines[0].failed, ledger.engines[1].failed) == (error, None)
        ledger.see(says)
    ledger.lose(0, "engine_died")
    ledger.see(engine(0))  # its process is another one
    assert ledger.engines[0].failed == error
    assert apply(ledger, ledger.admit(request("u3", 7), 0.0), True, True)
    assert ledger.engines[0].failed is None


def test_an_engine_that_serves_what_it_was_said_to_have_failed_at_has_not_failed() -> None:
    ledger = fleet()
    update = ledger.admit(request("u", 5), 0.0)
    for step in (UpdateState.RECEIVING, UpdateState.STAGED, UpdateState.APPLYING):
        update.move(step)
    late = EngineVerdict(1, False, None, EngineState.DEAD, error=DeadlineExceeded("silent", update_id="u").to_dict())
    ledger.conclude(update, [verdict(0, 5), late], 2.0)
    assert ledger.engines[1].failed is not None
    ledger.see(replace(engine(1, 5), update_id="u"))
    assert ledger.engines[1].failed is None and ledger.ready == 2


def test_a_version_that_no_engine_took_leaves_the_fleet_where_it_was() -> None:
    ledger = fleet()
    apply(ledger, ledger.admit(request("u1", 5), 0.0), True, True)
    assert not apply(ledger, ledger.admit(request("u2", 6), 0.0), False, False)
    assert ledger.committed_version == 5
    assert ledger.ready == 0
    with pytest.raises(VersionRefused):  # version 5 did reach everybody
        ledger.admit(request("u3", 5), 0.0)
    assert apply(ledger, ledger.admit(request("u4", 6), 0.0), True, True)


def test_a_version_that_reached_require_is_not_tried_again_for_the_rest() -> None:
    ledger = fleet(require=1)
    assert apply(ledger, ledger.admit(request("u", 5), 0.0), True, False)
    with pytest.raises(VersionRefused):
        ledger.admit(request("again", 5), 0.0)


def test_dead_engines_count_against_require_before_anything_begins() -> None:
    ledger = fleet()
    ledger.lose(1, "engine_died")
    with pytest.raises(EngineDied, match=r"1 engine\(s\) are dead or starting: 1 \(engine_died\); 2 must commit and 1 can") as caught:
        ledger.admit(request("u", 1), 0.0)
    assert caught.value.engine == 1
    assert caught.value.retryable
    assert ledger.get("u") is None
    assert ledger.current is None


def test_dead_engines_are_left_out_where_require_allows_it() -> None:
    ledger = fleet(engines=3, require=2)
    ledger.lose(1, "engine_died")
    assert ledger.admit(request("u", 1), 0.0).engines == (0, 2)


def test_what_is_sent_again_goes_on_without_the_engine_that_was_lost_whatever_it_says_of_itself() -> None:
    ledger = fleet(engines=3, require=2)
    ledger.abort(ledger.admit(request("u1", 1), 0.0), EngineDied("lost", engine=1), 1.0)
    again = ledger.admit(replace(request("u2", 1), without=(1, 7)), 2.0)
    assert again.engines == (0, 2)
    assert [(v.engine, v.state, (v.error or {})["code"]) for v in again.left_out] == [(1, "pending", "engine_died")]
    assert "was lost while these weights were sent" in (again.left_out[0].error or {})["message"]
    assert apply(ledger, again, True, True)
    assert {u.request.update_id: (u.request.version, u.state) for u in ledger.list()} == {"u2": (1, "committed"), "u1": (1, "aborted")}
    assert ledger.admit(request("u3", 2), 3.0).engines == (0, 1, 2), "the next update is for all"


def test_what_is_sent_again_needs_as_many_engines_as_any_update() -> None:
    ledger = fleet()
    with pytest.raises(EngineDied, match=r"1 engine\(s\) are dead or starting: 1 \(lost\); 2 must commit and 1 can"):
        ledger.admit(replace(request("u", 1), without=(1,)), 0.0)
    with pytest.raises(NoEngineReady):
        fleet(engines=1, require=1).admit(replace(request("u", 1), without=(0,)), 0.0)


def test_an_engine_on_its_way_up_is_left_out_like_a_dead_one() -> None:
    ledger = fleet(engines=3, require=2)
    ledger.see(replace(engine(1), workers=0, reason="starting"))
    assert ledger.admit(request("u", 1), 0.0).engines == (0, 2)
    ledger = fleet()
    ledger.see(replace(engine(1), workers=0, reason="starting"))
    with pytest.raises(EngineDied, match=r"1 engine\(s\) are dead or starting: 1 \(starting\)"):
        ledger.admit(request("u", 1), 0.0)


def test_an_engine_that_still_applies_what_was_given_up_is_left_out_where_require_allows_it() -> None:
    """It refuses another update until that ends; one that hung in it kept the whole fleet from every later version."""
    ledger = fleet(engines=3, require=2)
    ledger.see(engine(1, 5, EngineState.UPDATING))
    assert ledger.admit(request("u", 6), 0.0).engines == (0, 2)
    ledger = fleet(engines=2)
    ledger.see(engine(1, 5, EngineState.UPDATING))
    assert ledger.admit(request("u", 6), 0.0).engines == (0, 1), "it is needed, and may have ended by now"


def test_quarantined_and_pending_engines_take_part() -> None:
    ledger = fleet()
    ledger.see(engine(0, None, EngineState.QUARANTINED))
    assert ledger.admit(request("u", 1), 0.0).engines == (0, 1)


def test_engines_that_an_update_goes_on_without_are_in_its_report_with_the_reason() -> None:
    ledger = fleet(engines=5, require=1)
    apply(ledger, ledger.admit(request("u1", 5), 0.0), True, True, True, True, False)
    ledger.lose(0, "deadline")
    ledger.see(replace(engine(1, 5, EngineState.ASLEEP), update_id="u1", reason="asleep"))
    ledger.see(replace(engine(2, 5, EngineState.UPDATING), update_id="u1", reason="updating"))
    assert apply(ledger, ledger.admit(partial("u2", 6), 0.0), True)
    verdicts = ledger.list()[0].status.verdicts
    assert [(v.engine, v.committed, (v.error or {}).get("code")) for v in verdicts] == [
        (0, False, "engine_died"), (1, False, "no_engine_ready"), (2, False, "update_conflict"), (3, True, None), (4, False, "base_refused")
    ]  # fmt: skip
    assert "engine 0 was dead (deadline) when the update began" in verdicts[0].error["message"]  # type: ignore[index]
    assert all(v.error["retryable"] for v in verdicts[:3])  # type: ignore[index]
    assert ledger.engines[1].state == EngineState.ASLEEP, "they are left as they are"


def test_without_an_engine_there_is_no_update() -> None:
    with pytest.raises(NoEngineReady):
        fleet(engines=0).admit(request("u", 1), 0.0)
    ledger = fleet(engines=1, require=1)
    ledger.lose(0, "gone")
    with pytest.raises(NoEngineReady):
        ledger.admit(request("u", 1), 0.0)


def test_require_is_never_more_than_the_fleet() -> None:
    assert fleet(engines=2, require=5).require == 2
    assert fleet(engines=3, require=2).require == 2
    assert fleet(engines=3).require == 3


# --- what an update leaves ----------------------------------------------------------------------


def test_verdicts_become_the_engines_states() -> None:
    ledger = fleet()
    apply(ledger, ledger.admit(request("u", 4), 0.0), True, False)
    took, failed = ledger.engines[0], ledger.engines[1]
    assert (took.state, took.version, took.update_id, took.reason) == (EngineState.SERVING, 4, "u", "")
    assert (failed.state, failed.version, failed.update_id, failed.reason) == (EngineState.QUARANTINED, None, None, "apply_failed")
    assert ledger.list()[0].state == UpdateState.ABORTED


def test_ready_counts_engines_that_serve_the_committed_version() -> None:
    ledger = fleet(engines=4)
    assert ledger.ready == 0
    for status in (engine(0, 5), engine(1, 4), engine(2, 5, EngineState.UPDATING)):
        ledger.see(status)
    assert ledger.committed_version == 5
    assert ledger.ready == 1
    ledger.lose(0, "gone")
    assert ledger.ready == 0


def test_a_new_controller_learns_the_version_from_the_engines() -> None:
    ledger = Ledger(None, 10)
    for status in (engine(0, 7), engine(1, 9), engine(2)):
        ledger.see(status)
    assert ledger.committed_version == 9
    with pytest.raises(VersionRefused):
        ledger.admit(request("u", 9), 0.0)


def test_an_engine_that_comes_back_with_a_higher_version_in_mid_update_is_not_rewound() -> None:
    ledger = fleet(engines=2, require=1)
    ledger.see(engine(0, 3))
    ledger.lose(1, "gone")
    update = ledger.admit(request("u", 5), 0.0)
    ledger.see(engine(1, 8))
    assert apply(ledger, update, True)
    assert ledger.committed_version == 8


def test_losing_an_engine_that_nobody_knows_changes_nothing() -> None:
    ledger = fleet()
    ledger.lose(9, "gone")
    ledger.forget(9)
    assert sorted(ledger.engines) == [0, 1]
    ledger.forget(1)
    assert sorted(ledger.engines) == [0]


def test_an_aborted_update_keeps_its_error_and_frees_the_way() -> None:
    ledger = fleet()
    update = ledger.admit(request("u", 1), 0.0)
    assert ledger.current is update
    ledger.abort(update, Aborted("the step was skipped"), 3.0)
    assert ledger.current is None
    assert update.status.ended_unix_seconds == 3.0
    assert WeightSyncError.from_dict(update.status.error or {}).message == "the step was skipped"
    ledger.admit(request("next", 1), 4.0)


def test_history_keeps_the_newest() -> None:
    ledger = fleet(history=3)
    for number in range(6):
        ledger.abort(ledger.admit(request(f"u{number}", number), 0.0), Aborted("stop"), 1.0)
    assert [update.request.update_id for update in ledger.list()] == ["u5", "u4", "u3"]
    assert ledger.get("u2") is None
    current = ledger.admit(request("u6", 6), 0.0)
    assert ledger.current is current


def test_an_update_that_has_ended_keeps_its_size_and_lets_its_manifest_go() -> None:
    ledger = fleet()
    for update_id, end in (("a", lambda u: ledger.abort(u, Aborted("no"), 1.0)), ("b", lambda u: apply(ledger, u, True, True))):
        update = ledger.admit(request(update_id, 1), 0.0)
        end(update)
        assert update.request.manifest.tensors == ()
        assert (update.status.tensors, update.status.nbytes) == (len(MANIFEST.tensors), MANIFEST.nbytes)


def test_the_ledger_loads_without_ray_torch_or_vllm() -> None:
    code = "import sys, weightsync.fleet.ledger as _; print(sorted({'ray', 'torch', 'vllm'} & set(sys.modules)))"
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"


# --- the same call again ------------------------------------------------------------------------


@pytest.mark.parametrize("state", [s for s in UpdateState if not s.final])
def test_a_request_that_is_made_again_is_the_same_update(state: UpdateState) -> None:
    ledger = fleet()
    assert ledger.repeated(request("u", 1)) is None
    update = ledger.admit(request("u", 1), 0.0)
    update.state = state
    assert ledger.repeated(request("u", 1)) is update
    assert ledger.list() == [update]


def test_another_request_under_the_id_of_one_under_way_is_refused() -> None:
    ledger = fleet()
    ledger.admit(request("u", 1), 0.0)
    with pytest.raises(Refused, match="update u to version 1 is under way, and this is another request of that id"):
        ledger.repeated(request("u", 2))


@pytest.mark.parametrize("committed", [True, False])
def test_an_update_that_has_ended_says_so_whatever_is_under_way(committed: bool) -> None:
    ledger = fleet()
    update = ledger.admit(request("u", 1), 0.0)
    if committed:
        apply(ledger, update, True, True)
    else:
        ledger.abort(update, Aborted("stop"), 1.0)
    ledger.admit(request("next", 2), 2.0)
    for call in (ledger.repeated, lambda again: ledger.admit(again, 3.0)):
        with pytest.raises(Refused, match=rf"update u has ended \({update.state}\)"):
            call(request("u", 1))


# --- back to an earlier version -----------------------------------------------------------------


def rewind(update_id: str, version: int) -> UpdateRequest:
    return replace(request(update_id, version), rewind=True)


def at(version: int, engines: int = 2, require: int | None = None) -> Ledger:
    """A fleet whose engines serve this version."""
    ledger = fleet(engines, require)
    assert apply(ledger, ledger.admit(request("start", version), 0.0), *[True] * engines)
    return ledger


@pytest.mark.parametrize("version", [0, 1, 56, 57])
def test_a_restarted_trainer_is_refused_unless_it_says_rewind(version: int) -> None:
    ledger = at(57)
    with pytest.raises(VersionRefused, match=f"version {version} does not rise") as caught:
        ledger.admit(request("plain", version), 0.0)
    assert "rewind=True" in caught.value.hint
    assert apply(ledger, ledger.admit(rewind("back", version), 0.0), True, True)
    assert (ledger.committed_version, ledger.rewinds, ledger.ready) == (version, 1, 2)
    assert [update.status.rewind for update in ledger.list()] == [True, False]
    # From here on versions rise again.
    with pytest.raises(VersionRefused):
        ledger.admit(request("again", version), 0.0)
    assert apply(ledger, ledger.admit(request("next", version + 1), 0.0), True, True)
    assert (ledger.committed_version, ledger.rewinds) == (version + 1, 1)


def test_a_rewind_that_is_aborted_or_that_no_engine_took_changes_nothing() -> None:
    ledger = at(57)
    ledger.abort(ledger.admit(rewind("u1", 1), 0.0), Aborted("stop"), 1.0)
    assert (ledger.committed_version, ledger.rewinds, ledger.ready) == (57, 0, 2)
    assert not apply(ledger, ledger.admit(rewind("u2", 1), 0.0), False, False)
    assert (ledger.committed_version, ledger.rewinds) == (57, 0)


def test_an_engine_that_failed_in_a_rewind_has_not_gone_back() -> None:
    ledger = at(57)
    assert not apply(ledger, ledger.admit(rewind("u1", 1), 0.0), True, False)
    assert [engine.rewinds for engine in ledger.engines.values()] == [1, 0]


def test_a_rewind_to_a_version_above_is_an_update_like_any() -> None:
    ledger = at(57)
    assert apply(ledger, ledger.admit(rewind("u", 58), 0.0), True, True)
    assert (ledger.committed_version, ledger.rewinds) == (58, 0)


def test_an_engine_that_missed_a_rewind_neither_lifts_the_fleet_nor_counts_as_ready() -> None:
    ledger = at(57, engines=2, require=1)
    away = ledger.engines[1]
    ledger.lose(1, "unreachable")
    assert apply(ledger, ledger.admit(rewind("back", 1), 0.0), True)
    ledger.see(away)
    assert (ledger.committed_version, ledger.rewinds, ledger.ready) == (1, 1, 1)
    # Also not when the fleet has come to the number that it holds: those are other weights.
    assert apply(ledger, ledger.admit(request("up", 57), 0.0), True, False)
    ledger.see(away)
    assert (ledger.committed_version, ledger.rewinds, ledger.ready) == (57, 1, 1)


def test_a_new_controller_learns_of_a_rewind_from_the_engines() -> None:
    ledger = Ledger(None, 10)
    for status in (engine(0, 57), replace(engine(1, 3), rewinds=1)):
        ledger.see(status)
    assert (ledger.committed_version, ledger.rewinds, ledger.ready) == (3, 1, 1)
    assert ledger.admit(request("u", 4), 0.0).rewinds == 1


def test_a_rewind_that_too_few_engines_took_may_be_tried_again() -> None:
    ledger = at(57)
    assert not apply(ledger, ledger.admit(rewind("u1", 1), 0.0), True, False)
    assert (ledger.committed_version, ledger.rewinds, ledger.ready) == (1, 1, 1)
    assert apply(ledger, ledger.admit(request("u2", 1), 0.0), True, True)
    assert (ledger.committed_version, ledger.rewinds, ledger.ready) == (1, 1, 2)


# --- a commit whose answer comes too late -------------------------------------------------------


def too_late(ledger: Ledger, version: int, took: tuple[int, ...] = (), rewinds: bool = False) -> EngineStatus:
    """An update that only these engines answered in time; what engine 1 says of itself when it has applied it after all."""
    asked = replace(request("late", version), rewind=rewinds)
    update = ledger.admit(asked, 0.0)
    apply(ledger, update, *(ordinal in took for ordinal in update.engines))
    ledger.lose(1, "deadline")
    return replace(engine(1, version), update_id="late", rewinds=update.rewinds)


@pytest.mark.parametrize(
    ("took", "require", "then", "serves"),
    [
        ((0,), 1, None, True),  # the update committed without it: it has what the fleet has
        ((0,), 2, None, True),  # it did not, but an engine holds it: that is the fleet's version
        ((), 2, None, False),  # nobody held it when its trainer was told that it failed
        ((), 1, None, False),
        ((), 1, 6, False),  # and other weights may have come under its number since
        ((), 1, 7, False),  # or later ones
        ((0,), 1, 7, False),
    ],
)
def test_an_engine_that_answers_too_late_serves_where_it_has_the_fleets_version(
    took: tuple[int, ...], require: int, then: int | None, serves: bool
) -> None:
    ledger = at(5, require=require)
    late = too_late(ledger, 6, took)
    if then is not None:
        assert apply(ledger, ledger.admit(request("then", then), 0.0), True)
    before = ledger.committed_version, ledger.rewinds
    assert ledger.came_late(late) is not serves
    ledger.see(late)
    assert (ledger.committed_version, ledger.rewinds) == before
    state, reason, version = (EngineState.SERVING, "", 6) if serves else (EngineState.QUARANTINED, "late_commit", None)
    assert (ledger.engines[1].state, ledger.engines[1].reason, ledger.engines[1].version) == (state, reason, version)
    assert ledger.ready == len(took) + serves if then is None else ledger.ready == 1


def test_a_version_that_nobody_held_in_time_may_be_tried_again_and_reaches_the_late_engine_too() -> None:
    ledger = at(5)
    late = too_late(ledger, 6)
    ledger.see(late)
    assert apply(ledger, ledger.admit(request("again", 6), 0.0), True, True)
    assert (ledger.committed_version, ledger.ready) == (6, 2)
    ledger.see(replace(late, update_id="again"))
    assert not ledger.came_late(ledger.engines[1]) and ledger.ready == 2


def test_a_rewind_that_was_answered_too_late_does_not_take_the_fleet_back() -> None:
    ledger = at(57)
    late = too_late(ledger, 3, rewinds=True)
    assert late.rewinds == 1 and ledger.came_late(late)
    ledger.see(late)
    assert (ledger.committed_version, ledger.rewinds, ledger.engines[1].state) == (57, 0, EngineState.QUARANTINED)


def test_what_engines_say_of_updates_that_nobody_remembers_is_taken_as_it_is() -> None:
    ledger = at(5)
    for update_id in (None, "of an earlier controller"):
        assert not ledger.came_late(replace(engine(1, 9), update_id=update_id))
    update = ledger.admit(request("now", 6), 0.0)
    assert not ledger.came_late(replace(engine(1, 6), update_id=update.request.update_id)), "it has not ended"


# --- partial updates ----------------------------------------------------------------------------


def partial(update_id: str, version: int, base: int | None = None) -> UpdateRequest:
    return replace(request(update_id, version), scope=("w",), base_version=base)


def test_a_partial_update_builds_on_the_committed_version_and_makes_a_new_one() -> None:
    ledger = fleet()
    apply(ledger, ledger.admit(request("u1", 5), 0.0), True, True)
    update = ledger.admit(partial("u2", 6), 0.0)
    assert (update.engines, update.base_version, update.base_update, update.left_out) == ((0, 1), 5, "u1", ())
    assert apply(ledger, update, True, True)
    assert (ledger.committed_version, ledger.ready) == (6, 2)
    assert ledger.admit(partial("u3", 7, base=6), 0.0).base_update == "u2"


def test_a_complete_update_has_no_base() -> None:
    ledger = fleet()
    update = ledger.admit(request("u1", 5), 0.0)
    assert (update.base_version, update.base_update) == (None, "")


def test_without_a_committed_version_there_is_nothing_to_build_on() -> None:
    with pytest.raises(BaseRefused, match="builds on a committed version, and the fleet holds no committed version") as caught:
        fleet().admit(partial("u1", 1), 0.0)
    assert "complete update" in caught.value.hint and not caught.value.retryable
    with pytest.raises(BaseRefused, match="builds on version 4, and the fleet holds no committed version"):
        fleet().admit(partial("u1", 5, base=4), 0.0)


@pytest.mark.parametrize("base", [4, 6])
def test_another_base_than_the_fleets_is_refused_and_both_are_named(base: int) -> None:
    ledger = fleet()
    apply(ledger, ledger.admit(request("u1", 5), 0.0), True, True)
    with pytest.raises(BaseRefused, match=f"builds on version {base}, and the fleet holds version 5"):
        ledger.admit(partial("u2", 7, base=base), 0.0)
    assert ledger.get("u2") is None and ledger.current is None


def test_an_engine_that_missed_the_base_needs_a_complete_update() -> None:
    ledger = fleet(engines=3, require=2)
    apply(ledger, ledger.admit(request("u1", 5), 0.0), True, True, False)
    update = ledger.admit(partial("u2", 6), 0.0)
    assert update.engines == (0, 1)
    assert apply(ledger, update, True, True), "the call goes on without it"
    left = ledger.list()[0].status.verdicts[2]
    assert (left.engine, left.committed, left.state, left.version) == (2, False, EngineState.QUARANTINED, None)
    assert left.error is not None and left.error["code"] == "base_refused"
    assert "engine 2 is quarantined with no version, and the update builds on version 5 (update u1)" in left.error["message"]
    assert ledger.engines[2].state == EngineState.QUARANTINED, "it is left as it is"
    assert ledger.admit(request("u3", 7), 0.0).engines == (0, 1, 2)


HELD = {
    "an older version": engine(1, 4),
    "nothing": engine(1),
    "quarantined": engine(1, None, EngineState.QUARANTINED),
    "the same version by another update": replace(engine(1, 5), update_id="other"),
    "the same version of before a rewind": replace(engine(1, 5), update_id="u1", rewinds=-1),
    "it, and is being updated": replace(engine(1, 5, EngineState.UPDATING), update_id="u1"),
}


@pytest.mark.parametrize("held", HELD)
def test_too_few_engines_that_hold_the_base_fail_the_call_before_anything_begins(held: str) -> None:
    ledger = fleet()
    apply(ledger, ledger.admit(request("u1", 5), 0.0), True, True)
    ledger.see(HELD[held])
    with pytest.raises(BaseRefused, match=r"engine 1 is .* builds on version 5 \(update u1\)\. 2 must commit and 1 can") as caught:
        ledger.admit(partial("u2", 6), 0.0)
    assert caught.value.engine == 1 and ledger.current is None
    assert ledger.admit(request("u2", 6), 0.0).engines == (0, 1)


def test_a_partial_update_that_too_few_took_is_made_up_for_by_a_complete_one() -> None:
    ledger = fleet()
    apply(ledger, ledger.admit(request("u1", 5), 0.0), True, True)
    update = ledger.admit(partial("u2", 6), 0.0)
    for state in (UpdateState.RECEIVING, UpdateState.STAGED, UpdateState.APPLYING):
        update.move(state)
    failed = EngineVerdict(1, False, 5, EngineState.SERVING, error=ApplyFailed("no", engine=1).to_dict())  # rolled back
    assert not ledger.conclude(update, [verdict(0, 6), failed], 2.0)
    with pytest.raises(BaseRefused, match=r"engine 1 is serving with version 5 \(update u1\), and the update builds on version 6"):
        ledger.admit(partial("u3", 7), 0.0)
    with pytest.raises(BaseRefused):
        ledger.admit(partial("u3", 6), 0.0)
    assert apply(ledger, ledger.admit(request("u3", 6), 0.0), True, True)
    assert ledger.admit(partial("u4", 7), 0.0).engines == (0, 1)


def test_a_new_controller_learns_the_base_from_the_engines() -> None:
    ledger = Ledger(1, 10)
    for status in (replace(engine(0, 4), update_id="u1"), replace(engine(1, 5), update_id="u2"), replace(engine(2, 5), update_id="odd")):
        ledger.see(status)
    update = ledger.admit(partial("u3", 6), 0.0)
    assert (update.engines, update.base_update) == ((1,), "u2")
    assert [v.engine for v in update.left_out] == [0, 2]


# --- sleep --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [5, None])
def test_engines_that_sleep_take_no_update_and_do_not_count_as_ready(version: int | None) -> None:
    ledger = fleet()
    apply(ledger, ledger.admit(request("u1", 5), 0.0), True, True)
    ledger.see(replace(engine(1, version, EngineState.ASLEEP), reason="asleep"))
    assert (ledger.ready, ledger.committed_version) == (1, 5)
    with pytest.raises(NoEngineReady, match=r"1 engine\(s\) are asleep: 1; 2 must commit and 1 can") as caught:
        ledger.admit(request("u2", 6), 0.0)
    assert "wake" in caught.value.hint.lower()
    ledger.lose(0, "gone")
    with pytest.raises(EngineDied, match=r"dead or starting: 0 \(gone\); 2 must commit and 0 can"):
        ledger.admit(request("u2", 6), 0.0)


def test_engines_that_sleep_are_left_out_where_require_allows_it() -> None:
    ledger = fleet(engines=2, require=1)
    ledger.see(engine(1, None, EngineState.ASLEEP))
    assert ledger.admit(request("u1", 1), 0.0).engines == (0,)
    ledger = fleet(engines=1, require=1)
    ledger.see(engine(0, None, EngineState.ASLEEP))
    with pytest.raises(NoEngineReady, match="asleep"):
        ledger.admit(request("u1", 1), 0.0)
