"""Live storage read again: what is compared with what, and that a value that changed is named. Without vLLM.

Not covered: a real engine (`test_seen_on_fleet.py`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.test_engine_update import Engine
from tests.test_stored import HALF, Model
from tests.workers import NAMES, Worker, weights, without_vllm
from weightsync.client.source import offer
from weightsync.codec import decode
from weightsync.errors import DeadlineExceeded, Refused, WeightSyncError
from weightsync.protocol import WorkerCheck
from weightsync.transport.digest import digest_tensor
from weightsync.worker import rereading
from weightsync.worker.loadmap import record
from weightsync.worker.rereading import Rereading

#: Kept as sent: q, k, v, norm, offset, both at `left`, experts. In another form: the others.
SENT = {
    "q": (4, 4), "k": (4, 4), "v": (4, 4), "shard": (4, 6), "turned": (5, 5), "shuffled": (6, 4), "wide": (4,), "doubled": (4,),
    "norm": (4,), "both": (3,), "expert.0": (3, 4), "expert.1": (3, 4),
}  # fmt: skip


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made).to(HALF) for name, shape in SENT.items()}


class Guarded:
    """Stands for the guard."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def verify(self, _: Any) -> Any:
        return SimpleNamespace(slots={"weight": 5}, lines=lambda: self.lines)


class Live:
    """A model, and what reads it again."""

    def __init__(self) -> None:
        self.model, self.guard, self.updates = Model("cpu"), Guarded(), 0
        self.rereading = Rereading(self.model, self.guard, 0)  # type: ignore[arg-type]

    def update(self, sent: dict[str, torch.Tensor]) -> None:
        manifest = offer(sent).manifest
        load_map = record(Model("meta"), list(manifest.tensors))
        self.model.load_weights(sent.items())
        self.model.process()
        self.updates += 1
        digests = {index: digest_tensor(sent[spec.name]) for index, spec in enumerate(manifest.tensors)}
        self.rereading.note(load_map, manifest, digests)

    def check(self) -> WorkerCheck:
        found = self.rereading.step(f"u{self.updates}", True)
        while not found.done:
            found = self.rereading.step(f"u{self.updates}", False)
        return found


@pytest.fixture
def live() -> Live:
    made = Live()
    made.update(tensors(1))
    return made


def test_what_is_kept_as_it_was_sent_is_compared_with_what_was_sent(live: Live) -> None:
    found = live.check()
    assert found.ok and found.slots == 5 and found.nbytes > 0
    # q, k, v, norm, both at left, two experts; `both at right` is turned, and is first seen like what is kept in another form.
    assert found.equal == 7
    again = live.check()
    assert (again.equal, again.first_seen, again.unchanged) == (7, 0, found.first_seen) and found.first_seen >= 5


@pytest.mark.parametrize("name", ["norm", "qkv", "experts"])
def test_a_value_that_is_kept_as_sent_is_missed_at_once_under_any_update(live: Live, name: str) -> None:
    live.check()
    live.update(tensors(2))
    assert live.check().ok, "another update is another thing to be compared with"
    live.update(tensors(3))
    with torch.no_grad():
        live.model.get_parameter(name).view(-1)[1] += 1
    expected = {"norm": "norm", "qkv": "q", "experts": "expert.0"}[name]
    for _ in range(2):
        found = live.check()
        assert not found.ok and found.differs == (expected,) and found.error is None
    live.update(tensors(4))
    assert live.check().ok


@pytest.mark.parametrize("name", ["shuffled", "turned", "shard", "wide", "doubled"])
def test_what_is_kept_in_another_form_is_compared_with_the_check_before(live: Live, name: str) -> None:
    live.check()
    with torch.no_grad():
        live.model.get_parameter(name).view(-1)[0] += 1
    for _ in range(2):
        assert live.check().differs == (name,)


def test_a_broken_contract_is_a_fault_and_lists_are_bounded(live: Live) -> None:
    live.guard.lines = [f"model.x{number}: moved" for number in range(50)]
    found = live.check()
    assert not found.ok and len(found.faults) == 20 and found.left_out == 30


def test_a_call_reads_a_bounded_part(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = live.check()
    monkeypatch.setattr(rereading, "_BYTES", {"cpu": 40})
    monkeypatch.setattr(rereading, "_PIECES", 3)
    first = live.rereading.step("u1", True)
    assert not first.done and 0 < first.nbytes <= 40 + 32
    assert live.check().nbytes == whole.nbytes
    monkeypatch.setattr(rereading, "_BYTES", {"cpu": 1 << 20})
    assert live.rereading.step("u1", True).nbytes < whole.nbytes, "and so many pieces at most"


def test_what_has_nothing_to_read_is_counted_not_passed_over(live: Live) -> None:
    live.model.shuffled.data = torch.empty(0, dtype=HALF)
    found = live.check()
    assert found.ok and found.unreadable == 1


def test_an_update_that_comes_meanwhile_ends_the_check(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereading, "_PIECES", 1)
    assert not live.rereading.step("u1", True).done
    live.update(tensors(2))
    with pytest.raises(Refused, match="another update has come") as refused:
        live.rereading.step("u2", False)
    assert refused.value.retryable


# --- in a worker -----------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    without_vllm(monkeypatch)
    return Worker()


def test_a_worker_without_a_proved_update_says_so(worker: Worker) -> None:
    with pytest.raises(Refused, match="no update that live storage could be compared with"):
        worker.applier.check(True)
    worker.update(weights(1))
    assert worker.applier.check(True).first_seen == 2  # integers, that this model keeps as numbers with a point
    worker.apply(weights(2))  # written, and not proved
    with pytest.raises(Refused, match="no update"):
        worker.applier.check(True)


def test_behind_a_partial_update_the_rest_is_still_read(worker: Worker) -> None:
    worker.update(weights(1))
    worker.update({NAMES[0]: torch.full((4,), 5)}, scope=("body.*",))
    assert worker.applier.check(True).first_seen == 2
    with torch.no_grad():
        worker.model.get_parameter(NAMES[1])[2] = 7
    assert worker.applier.check(True).differs == (NAMES[1],)


def test_behind_a_way_back_it_is_compared_with_what_it_came_back_to(worker: Worker) -> None:
    worker.update(weights(1))
    update, _ = worker.apply(weights(2))
    assert worker.go_back(update).state == "rolled_back"
    found = worker.applier.check(True)
    assert found.ok and found.first_seen == 2 and found.update_id == "u1"


def test_asleep_nothing_is_read(worker: Worker) -> None:
    worker.memory.hold(*worker.model.parameters())
    worker.update(weights(1))
    worker.applier.fall_asleep(1)
    worker.memory.sleep(1)
    with pytest.raises(Refused, match="asleep"):
        worker.applier.check(True)


# --- in an engine ----------------------------------------------------------------------------------


def checks_of(engine: Engine, seconds: float = 5.0) -> list[WorkerCheck]:
    answer = asyncio.run(engine.actor.check(seconds))
    if "error" in answer:
        raise WeightSyncError.from_dict(answer["error"])
    return [decode(WorkerCheck, one) for one in answer["value"]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    without_vllm(monkeypatch)
    monkeypatch.setattr(rereading, "_PIECES", 1)  # so that a check takes several calls
    return Engine(tmp_path)


def test_an_engine_reads_every_worker_to_the_end_while_it_serves(engine: Engine) -> None:
    assert engine.update(1)["committed"]
    first = checks_of(engine)
    assert [(check.rank, check.ok, check.first_seen) for check in first] == [(0, True, 2), (1, True, 2)] and engine.core.running
    with torch.no_grad():
        engine.workers[1].model.get_parameter(NAMES[0])[3] = 9
    assert [(check.ok, check.differs) for check in checks_of(engine)] == [(True, ()), (False, (NAMES[0],))]


def test_a_worker_that_cannot_be_checked_does_not_keep_the_others(engine: Engine) -> None:
    assert engine.update(1)["committed"]
    engine.workers[0].applier._wrote = True
    first, second = checks_of(engine)
    assert first.error is not None and first.error["code"] == "refused" and not first.ok
    assert second.ok and second.done


def test_a_check_ends_at_its_deadline(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.update(1)["committed"]
    monkeypatch.setattr(rereading, "_PIECES", 0)  # a call reads nothing
    with pytest.raises(DeadlineExceeded, match="had read 0 bytes"):
        checks_of(engine, 0.05)
