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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fleets import Fleet, answers, order_fault, wait_until, with_faults
from weightsync import WeightSync
from weightsync.client.source import offer
from weightsync.errors import Aborted, DeadlineExceeded, TransportFailed, UpdateFailed, WeightSyncError
from weightsync.protocol import EngineState
from weightsync.transport.packing import plan_buckets
from weightsync.worker.loadmap import LoadMap
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
    with one.client(bucket_bytes=60_000) as client:
        client.sync_weights(tensors(KIND, 1))
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
