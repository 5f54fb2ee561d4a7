"""An engine that is lost in mid-broadcast where the others do: the same call sends the bytes again to those that are left.

A quick one is in `test_survivors.py`. Not covered: vLLM and Ray (`test_two_hosts.py`).
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import test_ranks as ranks
from tests.fleets import wait_until
from tests.peers import Peer
from tests.service import Service
from tests.survivors import BUCKET, ENGINES, TOKEN, UPDATE, Survivors, bring, go, say_no, slow_down, weights, writes
from weightsync import WeightSync
from weightsync.client.again import SENDINGS
from weightsync.client.source import Lazy
from weightsync.codec import decode
from weightsync.errors import EngineDied, TransportFailed, WeightSyncError
from weightsync.protocol import EngineState, EngineVerdict, UpdateState, UpdateStatus
from weightsync.results import SyncReport
from weightsync.transport import beside

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
#: Of a call, seconds: an engine that hangs is noticed after one.
CALL = 2 * UPDATE


def make(folder: Path, require: int | None = 1) -> Survivors:
    memory = {"retain_engines": 1, "retain_folder": str(folder / "memory")}
    fleet = Survivors(folder, require=require, apply_timeout_seconds=0.5, **memory)
    wait_until(lambda: "error" not in fleet.update(), 30, "a first update, behind everybody's imports")
    wait_until(lambda: fleet.status().ready == ENGINES, 10, "all engines")
    return fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivors]:
    fleet = make(tmp_path_factory.mktemp("again"))
    yield fleet
    fleet.end()


def sync(fleet: Survivors, *strikes: Callable[[], None], version: bool = True, source: str = "mapping") -> dict[str, Any]:
    """One call of `sync_weights`; each strike falls half way through a sending. What came of it, and its updates, the newest first."""
    fleet.version += 1
    before = {update.update_id for update in updates(fleet)}
    trainer, left = fleet.roles["trainer"], list(strikes)
    trainer.start(bring, fleet.url, fleet.version if version else None, source, CALL)
    while (said := trainer.result(CALL + 9)) == "here":
        if left:
            left.pop(0)()
        go(trainer)
    assert not left, "every sending was begun"
    assert said["seconds"] < CALL
    return said | {"updates": [update for update in updates(fleet) if update.update_id not in before]}


def kill(fleet: Survivors, *ordinals: int) -> Callable[[], None]:
    return lambda: [fleet.roles[f"engine {ordinal}"].signal(KILL) for ordinal in ordinals] and None


def updates(fleet: Survivors) -> list[UpdateStatus]:
    with WeightSync(fleet.url, TOKEN) as client:
        return [decode(UpdateStatus, each) for each in client._http.get("/v1/updates", 5.0)]


def holds(fleet: Survivors, ordinal: int) -> bool:
    want = {name: float(tensor[0]) for name, tensor in weights(fleet.version).items()}
    return fleet.held(ordinal) == ("serving", fleet.version, want)


def require_sent_again(fleet: Survivors, outcome: dict[str, Any], *lost: int) -> None:
    """That the others have the version from this call, and each was written once."""
    assert "error" not in outcome, outcome["error"]
    report: SyncReport = outcome["report"]
    assert report.version == fleet.version and [sent.engine for sent in report.sent_again] == [*lost]
    assert all(f"engine {sent.engine}" in sent.error["message"] for sent in report.sent_again)
    committed, *aborted = outcome["updates"]
    assert all(update.version == fleet.version for update in (committed, *aborted)) and fleet.status().committed_version == fleet.version
    assert (committed.update_id, committed.state) == (report.update_id, "committed")
    assert [(u.update_id, u.state, u.verdicts) for u in aborted] == [(s.update_id, "aborted", ()) for s in reversed(report.sent_again)]
    for verdict in report.verdicts:
        if verdict.engine in lost:
            assert not verdict.committed and "was lost while these weights were sent" in (verdict.error or {})["message"]
        else:
            assert verdict.committed and holds(fleet, verdict.engine)
            assert fleet.roles[f"engine {verdict.engine}"].call(writes)[-1] == 1
    assert report.seconds["total"] > sum(sent.seconds for sent in report.sent_again) > 0


def rejoin(fleet: Survivors, *killed: int) -> None:
    """Killed engines are started again, as Ray does, and get the version from the one that keeps it."""
    for ordinal in killed:
        fleet.replace(f"engine {ordinal}")
    wait_until(lambda: fleet.status().ready == ENGINES, 15, "all engines")
    assert all(holds(fleet, ordinal) for ordinal in range(ENGINES))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2, 0], ids=["another", "the-one-that-keeps"])
def test_one_that_is_killed_half_way_costs_the_others_no_call(fleet: Survivors, victim: int) -> None:
    require_sent_again(fleet, sync(fleet, kill(fleet, victim)), victim)
    rejoin(fleet, victim)
    assert [update.state for update in sync(fleet)["updates"]] == ["committed"]


@pytest.mark.slow
def test_one_that_hangs_half_way_costs_the_others_no_call(fleet: Survivors) -> None:
    victim = fleet.roles["engine 1"]
    require_sent_again(fleet, sync(fleet, lambda: victim.signal(STOP), version=False), 1)
    victim.signal(signal.SIGCONT)
    rejoin(fleet)


def hang(state: dict[str, Any]) -> None:
    """The engine's workers answer nothing any more; the engine itself says that it is well."""
    engine = state["actor"]._engine
    state["rpc"], engine.rpc = engine.rpc, lambda *_: asyncio.sleep(3600)


def recover(state: dict[str, Any]) -> None:
    state["actor"]._engine.rpc = state["rpc"]


@pytest.mark.slow
def test_one_whose_workers_hang_while_it_says_that_it_is_well_is_not_asked_again(fleet: Survivors) -> None:
    victim = fleet.roles["engine 2"]
    outcome = sync(fleet, lambda: victim.call(hang))
    require_sent_again(fleet, outcome, 2)
    assert "it is serving" in next(v.error["message"] for v in outcome["report"].verdicts if v.engine == 2)
    victim.call(recover)
    rejoin(fleet)


@pytest.mark.slow
def test_several_at_once_and_one_after_the_other(fleet: Survivors) -> None:
    report = sync(fleet, kill(fleet, 1, 3))["report"]
    assert len(report.sent_again) == 1 and [v.engine for v in report.verdicts if v.committed] == [0, 2]
    assert holds(fleet, 0) and holds(fleet, 2)
    rejoin(fleet, 1, 3)
    require_sent_again(fleet, sync(fleet, kill(fleet, 3), kill(fleet, 1)), 3, 1)
    rejoin(fleet, 1, 3)


@pytest.mark.slow
def test_it_is_not_tried_for_ever(fleet: Survivors) -> None:
    assert SENDINGS == 3
    before = fleet.version
    outcome = sync(fleet, kill(fleet, 3), kill(fleet, 2), kill(fleet, 1))
    error = outcome["error"]
    assert isinstance(error, EngineDied) and error.engine == 1
    assert [update.state for update in outcome["updates"]] == ["aborted"] * SENDINGS
    assert fleet.held(0)[:2] == ("serving", before) and fleet.status().committed_version == before
    fleet.version -= 1
    rejoin(fleet, 1, 2, 3)
    assert "error" not in sync(fleet), "the version is still free"


@pytest.mark.slow
def test_an_iterator_is_not_sent_again_and_the_error_says_why(fleet: Survivors) -> None:
    before = fleet.version
    outcome = sync(fleet, kill(fleet, 2), source="iterator")
    error = outcome["error"]
    assert isinstance(error, EngineDied) and error.engine == 2 and "this source is an iterator" in error.hint
    assert [update.state for update in outcome["updates"]] == ["aborted"]
    fleet.version = before
    rejoin(fleet, 2)


@pytest.mark.slow
def test_what_an_engine_refuses_is_not_sent_again(fleet: Survivors) -> None:
    outcome = sync(fleet, lambda: fleet.roles["engine 3"].call(say_no, "lm_head.bias is not of this model"))
    assert (outcome["error"].code, outcome["error"].engine) == ("manifest_refused", 3)
    assert len(outcome["updates"]) == 1
    assert "error" not in sync(fleet)


@pytest.mark.slow
def test_what_may_have_been_written_is_not_sent_again(fleet: Survivors) -> None:
    engines = [fleet.roles[f"engine {ordinal}"] for ordinal in range(ENGINES)]
    for engine in engines:
        engine.call(slow_down, 3.2)  # longer than the service waits for an answer, and shorter than the call lasts
    outcome = sync(fleet)
    error, (update,) = outcome["error"], outcome["updates"]
    assert error.code == "deadline" and error.engine is not None and error.retryable
    assert update.state == "aborted" and len(update.verdicts) == ENGINES
    wait_until(lambda: all(e.reason == "late_commit" for e in fleet.status().engines), 6, "the late answers")
    for engine in engines:
        engine.call(slow_down, 0.0)
    fleet.version -= 1
    assert "error" not in sync(fleet) and all(holds(fleet, ordinal) for ordinal in range(ENGINES))


@pytest.mark.slow
def test_by_hand_nothing_is_sent_again(fleet: Survivors) -> None:
    trainer, before = fleet.start("half"), len(updates(fleet))
    kill(fleet, 2)()
    go(trainer)
    assert "engine 2" in str(trainer.result(UPDATE + 9)["error"])
    assert len(updates(fleet)) == before
    fleet.version -= 1
    rejoin(fleet, 2)


@pytest.mark.slow
def test_where_all_are_required_the_call_fails_and_names_the_dead(tmp_path: Path) -> None:
    fleet = make(tmp_path, None)
    before = fleet.version
    outcome = sync(fleet, kill(fleet, 2))
    error = outcome["error"]
    assert isinstance(error, EngineDied) and error.engine == 2 and error.retryable
    assert [update.state for update in outcome["updates"]] == ["aborted"]
    assert [fleet.held(ordinal)[1] for ordinal in (0, 1, 3)] == [before] * 3
    # Nor does one that comes back in between make it another call.
    fleet.version = before
    rejoin(fleet, 2)
    outcome = sync(fleet, lambda: fleet.roles["engine 1"].call(hang))
    assert (outcome["error"].code, outcome["error"].engine, len(outcome["updates"])) == ("deadline", 1, 1)
    fleet.end()


# --- a broken broadcast of which the service knows no dead ---------------------------------------


def half_way(strike: Callable[[], Any]) -> Callable[[int, int], None]:
    """Progress that strikes once."""
    left = [strike]
    return lambda sent, total: left.pop()() if left and 2 * sent >= total else None


def test_what_an_engine_says_of_others_names_no_engine_that_was_lost() -> None:
    said = TransportFailed("engine 1 (rank 2) died or left while bytes were on their way", engine=0)
    with Service(receivers=2) as service, WeightSync(service.url, "token", bucket_bytes=BUCKET) as client:
        with pytest.raises(TransportFailed) as caught:
            client.sync_weights(weights(1), 1, progress=half_way(lambda: service.latest().end(said)))
        assert caught.value.engine == 0 and len(service.updates) == 1


def test_a_worker_that_breaks_off_is_lost_also_where_its_engine_is_well() -> None:
    with Service(receivers=2) as service, WeightSync(service.url, "token", bucket_bytes=BUCKET) as client:
        report = client.sync_weights(weights(1), 1, progress=half_way(lambda: service.latest().break_off(1)))
        first, second = service.updates.values()
    assert [(sent.engine, sent.update_id) for sent in report.sent_again] == [(1, first.request.update_id)]
    assert (first.request.without, second.request.without) == ((), (1,))
    assert (first.state, second.state, report.update_id) == ("aborted", "committed", second.request.update_id)


@pytest.mark.parametrize(
    "more", [{"state": UpdateState.APPLYING}, {"verdicts": (EngineVerdict(0, False, None, EngineState.QUARANTINED),)}], ids=str
)
def test_what_the_service_does_not_say_is_unwritten_is_not_sent_again(more: dict[str, Any]) -> None:
    with Service(receivers=2) as service, WeightSync(service.url, "token", bucket_bytes=BUCKET) as client:

        def strike() -> None:
            update = service.latest()
            stock, asked = update.status, list[int]()
            update.end(EngineDied("engine 1 died", engine=1))
            # The first answer, that it has ended, is what the trainer's call fails with.
            update.status = lambda: asked.append(1) or (replace(stock(), **more) if len(asked) > 1 else stock())  # type: ignore[func-returns-value, method-assign]

        with pytest.raises(EngineDied, match="engine 1 died"):
            client.sync_weights(weights(1), 1, progress=half_way(strike))
        assert len(service.updates) == 1


def test_an_iterator_is_sent_once() -> None:
    with Service(receivers=2) as service, WeightSync(service.url, "token", bucket_bytes=BUCKET) as client:
        died = EngineDied("engine 1 died", engine=1)
        with pytest.raises(EngineDied, match="engine 1 died") as caught:
            client.sync_weights(iter(weights(1).items()), 1, progress=half_way(lambda: service.latest().end(died)))
        assert "this source is an iterator" in caught.value.hint and len(service.updates) == 1


def test_a_source_is_read_by_one_sending_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that was under way when an engine was lost goes on for as long as it takes."""
    monkeypatch.setattr(beside, "_LEAVE_SECONDS", 0.1)
    reading, together, ended = threading.Lock(), list[bool](), list[float]()

    def read(value: float) -> torch.Tensor:
        together.append(not reading.acquire(blocking=False))
        if len(together) == 4:
            service.latest().end(EngineDied("engine 1 died", engine=1))
            time.sleep(2)
            ended.append(time.monotonic())
        if not together[-1]:
            reading.release()
        return torch.full((BUCKET // 4,), value)

    lazy = {name: Lazy(torch.float32, (BUCKET // 4,), functools.partial(read, float(at))) for at, name in enumerate(weights(1))}
    with Service(receivers=2) as service, WeightSync(service.url, "token", bucket_bytes=BUCKET) as client:
        report = client.sync_weights(lazy, 1)
    assert len(report.sent_again) == 1 and len(together) == 4 + len(lazy)
    assert not any(together) and ended
    assert [float(tensor[0]) for tensor in service.held[1][0].values()] == [float(at) for at in range(len(lazy))]


def test_what_is_still_being_read_at_the_end_of_the_call_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_LEAVE_SECONDS", 0.1)
    go_on = threading.Event()

    def read() -> torch.Tensor:
        service.latest().end(EngineDied("engine 1 died", engine=1))
        go_on.wait(20)
        return torch.zeros(4)

    with Service(receivers=2) as service, WeightSync(service.url, "token", bucket_bytes=BUCKET, timeout_seconds=3) as client:
        with pytest.raises(EngineDied, match="engine 1 died"):
            client.sync_weights({"w": Lazy(torch.float32, (4,), read)}, 1)
        assert len(service.updates) == 1
        go_on.set()


# --- ranks --------------------------------------------------------------------------------------


def connect(state: dict[str, Any], url: str) -> None:
    state["sync"] = WeightSync(url, TOKEN, bucket_bytes=BUCKET, timeout_seconds=CALL, group=dist.group.WORLD)


def sync_all(state: dict[str, Any], once: bool) -> SyncReport:
    """`sync_weights` of a sharded model; the first rank says when half of it is out, and waits for a word."""
    stood = False

    def stand(sent: int, total: int) -> None:
        nonlocal stood
        if not stood and 2 * sent >= total:
            stood = True
            state["pipe"].send((False, "here"))
            state["pipe"].recv()

    named = dict(state["model"].named_parameters())
    report: SyncReport = state["sync"].sync_weights(iter(named.items()) if once else named, progress=stand)
    return report


def firsts(state: dict[str, Any]) -> dict[str, float]:
    return {name: float(t.full_tensor().reshape(-1)[0]) for name, t in state["model"].named_parameters()}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, fleet: Survivors) -> Iterator[ranks.Trainer]:
    trainer = ranks.Trainer(tmp_path_factory.mktemp("ranks"))
    trainer.all(ranks.shard)
    trainer.all(connect, (fleet.url,))
    trainer.all(ranks.watch_gathers)
    yield trainer
    trainer.kill()


def strike_ranks(trainer: ranks.Trainer, strike: Callable[[], Any], once: Callable[[int], bool]) -> list[Any]:
    for rank, peer in enumerate(trainer.ranks):
        peer.start(sync_all, once(rank))
    first: Peer = trainer.ranks[0]
    assert first.result(CALL) == "here"
    strike()
    go(first)
    return [trainer.result(rank, CALL + 9) for rank in range(len(trainer.ranks))]


@pytest.mark.slow
def test_every_rank_gathers_once_more_and_gets_the_same_report(fleet: Survivors, trainer: ranks.Trainer) -> None:
    gathered = trainer.all(ranks.get_from, ("gathers",))
    first, second = strike_ranks(trainer, kill(fleet, 2), lambda rank: False)
    assert isinstance(first, SyncReport) and first == second
    assert [sent.engine for sent in first.sent_again] == [2] and [v.engine for v in first.verdicts if v.committed] == [0, 1, 3]
    assert fleet.held(0) == fleet.held(3) == ("serving", first.version, trainer.all(firsts)[0])
    after = trainer.all(ranks.get_from, ("gathers",))
    assert after[0] == after[1] > gathered[0] + 1
    fleet.version = first.version
    fleet.replace("engine 2")
    wait_until(lambda: fleet.status().ready == ENGINES, 15, "all engines")


@pytest.mark.slow
def test_ranks_of_which_one_has_an_iterator_all_raise_what_the_first_did(fleet: Survivors, trainer: ranks.Trainer) -> None:
    before = len(updates(fleet))
    errors = strike_ranks(trainer, kill(fleet, 2), lambda rank: rank == 1)
    assert [(type(error), error.engine) for error in errors] == [(EngineDied, 2)] * 2
    assert all(isinstance(error, WeightSyncError) and "this source is an iterator" in error.hint for error in errors)
    assert len(updates(fleet)) == before + 1
    fleet.replace("engine 2")
    wait_until(lambda: fleet.status().ready == ENGINES, 15, "all engines")
    reports = strike_ranks(trainer, lambda: None, lambda rank: False)
    assert [report.sent_again for report in reports] == [(), ()], "the ranks are in step"


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_call_of_all(fleet: Survivors, trainer: ranks.Trainer) -> None:
    """Of both at once it is not the engine that counts."""

    def strike() -> None:
        trainer.ranks[1].signal(KILL)
        kill(fleet, 2)()

    before = len(updates(fleet))
    error, gone = strike_ranks(trainer, strike, lambda rank: False)
    assert gone is None and isinstance(error, WeightSyncError)
    assert len(updates(fleet)) == before + 1
    fleet.replace("engine 2")
