"""An update that is not staged: tensors pass a bounded queue between two threads, and then real engines.

Not covered: engines on a GPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fleets import Fleet, answers, order_fault, trainer, wait_until, with_faults
from weightsync import WeightSync
from weightsync.client.source import offer
from weightsync.errors import Aborted, DeadlineExceeded, TransportFailed, UpdateFailed, WeightSyncError
from weightsync.protocol import BeginOrder, CommunicatorInfo, EngineState, UpdateRequest
from weightsync.transport import digest
from weightsync.transport.channel import Channel
from weightsync.transport.packing import plan_buckets
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.receiver import Receiver
from weightsync.worker.streaming import Passing, Streamed

CPU = torch.device("cpu")
TENSORS = {f"t{n}": torch.randint(0, 255, (n * 37,), dtype=torch.uint8) for n in range(12)} | {"empty": torch.empty(0, 3)}
BUCKET = 256


def passing(limit_bytes: int = 1 << 20, seconds: float = 10.0, cancelled: Any = lambda: False) -> Passing:
    manifest = offer(TENSORS).manifest
    return Passing(manifest, plan_buckets(manifest, BUCKET), CPU, time.monotonic() + seconds, cancelled, limit_bytes)


def send(into: Passing, buckets: int | None = None) -> None:
    """What the receiving thread does, with bytes from here."""
    plan = plan_buckets(offer(TENSORS).manifest, BUCKET)
    values = list(TENSORS.values())
    for bucket in plan.buckets[:buckets]:
        into.window(bucket).fill_(255)
        for piece in bucket.pieces:
            run = values[piece.tensor].view(torch.uint8).reshape(-1)[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
            into.window(bucket)[piece.bucket_offset : piece.bucket_offset + piece.nbytes] = run
        into.landed(bucket)
        into.hand_over(bucket.complete)


def loaded(into: Passing) -> dict[str, torch.Tensor]:
    taken: list[str] = []
    found = dict(Streamed(offer(TENSORS).manifest, into, LoadMap({})).stream(taken))
    assert taken == list(TENSORS)
    return found


@pytest.mark.parametrize("limit_bytes", [0, 100, 1 << 20])
def test_every_tensor_passes_whole_and_in_order(limit_bytes: int) -> None:
    into = passing(limit_bytes)
    thread = threading.Thread(target=send, args=(into,))
    thread.start()
    found = loaded(into)
    thread.join(5)
    assert list(found) == list(TENSORS) and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_the_thread_stands_still_when_the_loader_does() -> None:
    into = passing(limit_bytes=200)
    thread = threading.Thread(target=send, args=(into,))
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive() and sum(tensor.nbytes for _, tensor in into._whole) <= 200
    assert loaded(into)
    thread.join(5)
    assert not thread.is_alive()


def test_what_ends_receiving_ends_loading() -> None:
    into = passing()
    send(into, buckets=3)
    into.fail(TransportFailed("the trainer is gone"))
    with pytest.raises(TransportFailed, match="the trainer is gone"):
        loaded(into)
    empty = passing()
    empty.fail(TransportFailed("the trainer is gone"))
    with pytest.raises(TransportFailed, match="the trainer is gone"):
        Streamed(offer(TENSORS).manifest, empty, LoadMap({})).wait()


def test_what_nobody_takes_any_more_goes_by() -> None:
    """Else the trainer stands still, and with it the engines that still load, until the update's deadline."""
    into = passing(limit_bytes=0, seconds=5)
    thread = threading.Thread(target=send, args=(into,))
    thread.start()
    assert torch.equal(into.take(0), TENSORS["t0"])
    into.drain()
    thread.join(2)
    assert not thread.is_alive() and not into._whole and not into._partial


def test_waiting_ends_with_the_deadline_and_the_update() -> None:
    with pytest.raises(DeadlineExceeded):
        passing(seconds=0.1).take(0)
    with pytest.raises(DeadlineExceeded):
        send(passing(limit_bytes=0, seconds=0.1))
    with pytest.raises(Aborted):
        passing(cancelled=lambda: True).take(0)


def test_the_first_tensor_stays_for_the_loader() -> None:
    into = passing()
    send(into)
    Streamed(offer(TENSORS).manifest, into, LoadMap({})).wait()
    assert list(loaded(into)) == list(TENSORS)


class Wire(Channel):
    """Stands for a communicator: all buckets and digests come, one behind the other, and are counted."""

    device, info, open = CPU, CommunicatorInfo("h", 1, 1, 2, {"0": 1}, "gloo"), True  # type: ignore[assignment]

    def __init__(self) -> None:
        self.buckets, self._partial = 0, dict[int, Any]()
        plan = plan_buckets(offer(MANY).manifest, 4096)
        self._stream = self._all(plan)
        self.count = len(plan.buckets)

    def _all(self, plan: Any) -> Iterator[torch.Tensor]:
        values = [tensor.view(torch.uint8) for tensor in MANY.values()]
        for bucket in plan.buckets:
            data = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            for piece in bucket.pieces:
                run = values[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.nbytes]
                data[piece.bucket_offset : piece.bucket_offset + piece.nbytes] = run
            yield data
            self.buckets += 1
            if bucket.complete:
                yield digest.pack([digest.digest_tensor(values[index]) for index in bucket.complete])

    def buffers(self, count: int, nbytes: int) -> list[torch.Tensor]:
        raise NotImplementedError("a trainer's")

    def post(self, tensors: Sequence[torch.Tensor], deadline: float, cancelled: Any = None) -> Sequence[torch.Tensor]:
        return tensors

    def settle(self, posted: Sequence[torch.Tensor], deadline: float, cancelled: Any = None) -> None:
        for tensor in posted:
            tensor.copy_(next(self._stream))

    def close(self) -> None:
        """Nobody is at the other end."""


MANY = {f"t{n}": torch.full((3000,), n, dtype=torch.uint8) for n in range(8)}


def test_an_engine_that_failed_stays_in_the_broadcast_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Passing.__init__, "__defaults__", (3000,))
    wire, manifest = Wire(), offer(MANY).manifest
    request = UpdateRequest("u", "t", 1, manifest, 4096, plan_buckets(manifest, 4096).hash, 10.0, "gloo", torch.__version__)
    order = BeginOrder(request, Wire.info, 0, 1, 1.0, stage="none")
    receiver = Receiver(order, 0, CPU, CPU, lambda: wire)  # type: ignore[arg-type, return-value]
    receiver.start()
    into = receiver.held()
    assert isinstance(into, Passing) and torch.equal(into.take(0), MANY["t0"])
    time.sleep(0.2)
    assert wire.buckets < wire.count, "it stands still, and so do all others"
    receiver.drain()
    receiver._thread.join(5)
    assert not receiver._thread.is_alive() and receiver.error is None
    assert wire.buckets == wire.count and receiver.into is None


# --- a real engine -----------------------------------------------------------------------------------

KIND = "qwen3"
SCRIPT = """
import sys, time
from safetensors.torch import load_file
from weightsync import WeightSync
sync = WeightSync(sys.argv[1], sys.argv[2], bucket_bytes=60000, timeout_seconds=20)
def hold(sent, total):
    if sent > float(sys.argv[4]) * total:
        print('there', flush=True)
        time.sleep(600)
sync.sync_weights(load_file(sys.argv[3]), progress=hold)
"""


@pytest.fixture(scope="module")
def one(checkpoint: Any, fault: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("stream"), 1, ["--sync.stage=none"], with_faults(fault)).ready()
    yield running
    assert running.stop() == 0


@pytest.fixture
def sync(one: Fleet, tensors: Any) -> Iterator[WeightSync]:
    with trainer(one, tensors(KIND, 1)) as client:
        yield client


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_equals_a_cold_one_to_new_weights_and_back(sync: WeightSync, tensors: Any, cold: Any) -> None:
    for seed in (2, 1, 2):
        sync.sync_weights(tensors(KIND, seed))
        assert answers(sync, 0) == cold(KIND, seed)


@pytest.mark.engine
@pytest.mark.slow
def test_a_failure_quarantines_and_the_next_update_repairs(sync: WeightSync, fault: Path, tensors: Any, cold: Any) -> None:
    order_fault(fault, 1, at=12)
    with pytest.raises(UpdateFailed, match="a fault made for a test"):
        sync.sync_weights(tensors(KIND, 2))
    assert sync.engines()[0].state == EngineState.QUARANTINED
    with pytest.raises(WeightSyncError):
        sync.generate([1, 5, 9], max_tokens=4, engine=0)
    sync.sync_weights(tensors(KIND, 2))
    assert answers(sync, 0) == cold(KIND, 2)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_trainer_that_dies_leaves_an_engine_that_serves_no_mixture(
    share: float, one: Fleet, sync: WeightSync, tensors: Any, cold: Any, checkpoint: Any
) -> None:
    url = sync.engines()[0].url
    command = [sys.executable, "-c", SCRIPT, one.url, one.token, str(checkpoint(KIND, 2) / "model.safetensors"), str(share)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert trainer.stdout is not None and trainer.stdout.readline().strip() == "there"
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_until(lambda: one.get("/v1/updates").json()[0]["state"] == "aborted", 40, "the end of the update")
    assert sync.engines()[0].state == EngineState.QUARANTINED
    with pytest.raises(WeightSyncError):
        sync.generate([1, 5, 9], max_tokens=4, engine=0)
    sync.sync_weights(tensors(KIND, 2))
    assert answers(sync, 0) == cold(KIND, 2)
    assert sync.engines()[0].url == url, "the engine was not restarted"


@pytest.mark.engine
@pytest.mark.slow
def test_a_trainer_that_never_commits_costs_nothing(one: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    with one.client(bucket_bytes=60_000, timeout_seconds=4) as other:
        published = other.publish(tensors(KIND, 2))
        wait_until(lambda: one.get(f"/v1/updates/{published.update_id}").json()["state"] == "aborted", 20, "the deadline")
    assert answers(sync, 0) == cold(KIND, 1)
    sync.sync_weights(tensors(KIND, 2))
    assert answers(sync, 0) == cold(KIND, 2)
