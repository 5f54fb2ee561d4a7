"""A trainer on its engine's GPU, by memory that both map, lent by workers or the trainer's ring: processes alone, then real engines with
CUDA graphs on.

With a second GPU also one engine by memory and one by NCCL in the same update.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fleets import Fleet, answers, wait_until
from tests.gpu.test_main_job_on_cuda import COLD_SPREAD, EXTRA, KIND, cold_on_cuda
from tests.test_lending import landed
from tests.test_local import LENT, MIXED, RING, Stage, held, leave, some
from tests.test_local_on_fleet import BUCKET, HANGS
from weightsync.errors import TransportFailed
from weightsync.transport.local import place_of
from weightsync.transport.segment import create

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

__all__ = ["cold_on_cuda"]  # the fixture


# --- processes alone -----------------------------------------------------------------------------


def gpu_memory(_: dict[str, Any]) -> int:
    return torch.cuda.mem_get_info()[0]


def leave_all(state: dict[str, Any]) -> None:
    """Leave, and give back what torch keeps for itself of memory that nobody has."""
    leave(state)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def two() -> Iterator[Stage]:
    made = Stage(2, transport="nccl")
    yield made
    made.end()


def mapped(state: dict[str, Any]) -> int:
    """How many workers' memories a trainer has mapped."""
    return len(state["channel"]._links._lent)


def drop_regions(state: dict[str, Any]) -> None:
    state["regions"].drop()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("way", [LENT, RING, MIXED], ids=["lent", "ring", "one of each"])
def test_every_bit_arrives_in_two_processes_on_one_gpu(two: Stage, way: tuple[str, ...]) -> None:
    two.stages = way
    for seed, (nbytes, bucket) in enumerate([(100, 4096), (9_000_000, 1 << 20), (3 << 20, 64 << 20), (300_000, 4 << 20)]):
        two.update(some(5, seed, nbytes), bucket)
        assert [worker.call(landed) for worker in two.workers] == [kind == "auto" for kind in (way * 2)[:2]]
        assert two.trainer.call(mapped) == 0


@pytest.mark.parametrize("way", [LENT, RING], ids=["lent", "ring"])
def test_nothing_is_left_behind(two: Stage, way: tuple[str, ...]) -> None:
    two.stages = way
    peers = (two.trainer, *two.workers)
    for _ in range(2):  # what CUDA and torch keep for themselves is there behind the first round
        two.renew()
        two.update(some(3, 1, 32 << 20), 32 << 20)
        for peer in peers:
            peer.call(leave_all)
    before = [peer.call(held)[0] for peer in peers], two.trainer.call(gpu_memory)
    for seed in range(20):
        two.renew()
        two.update(some(3, seed, 32 << 20), 32 << 20)
        for peer in peers:
            peer.call(leave_all)
    assert [peer.call(held)[0] for peer in peers] == before[0]
    assert before[1] - two.trainer.call(gpu_memory) < 64 << 20, "two buckets of one update at most"


def test_memory_of_a_worker_is_kept_for_the_next_update_alone_and_goes_when_it_is_dropped(two: Stage) -> None:
    two.stages, nbytes = LENT, 512 << 20
    two.renew()
    for peer in (two.trainer, *two.workers):
        peer.call(leave_all)
    two.renew()
    before = two.trainer.call(gpu_memory)
    after = []
    for seed in range(3):
        two.update(some(2, seed, nbytes // 2), 64 << 20)
        assert two.trainer.call(mapped) == 0
        after.append(before - two.trainer.call(gpu_memory))
    print("kept behind each update, MiB:", [taken >> 20 for taken in after])
    assert after[0] >= 2 * nbytes and after[2] - after[0] < 64 << 20, "the same memory each time"
    for worker in two.workers:
        worker.call(drop_regions)
    two.trainer.call(leave_all)
    assert before - two.trainer.call(gpu_memory) < nbytes, "a trainer's mapping would have kept it"


def test_a_trainer_killed_half_way_costs_its_update_alone(two: Stage) -> None:
    two.stages = LENT
    two.renew()
    two.hold()
    two.trainer.signal(signal.SIGKILL)
    killed = time.monotonic()
    for worker in two.workers:
        error, at = worker.result()
        assert type(error) is TransportFailed and "the trainer is gone" in error.message
        assert at - killed < 3
    two.replace_trainer()
    two.update(some(4, 3, 1 << 20), 1 << 20)


def test_a_segment_is_on_this_gpu_and_goes_when_nobody_holds_it() -> None:
    device = torch.device("cuda:0")
    int(torch.zeros(5, dtype=torch.uint8, device=device).fill_(3).sum())  # takes what it takes for good
    before = torch.cuda.mem_get_info()[0]
    made = create(256 << 20, device)
    assert before - torch.cuda.mem_get_info()[0] >= 256 << 20
    view = made.tensor[5:10].fill_(3)
    made.close()
    assert int(view.sum()) == 15
    del view
    assert before - torch.cuda.mem_get_info()[0] < 32 << 20
    assert place_of(device).device == str(torch.cuda.get_device_properties(0).uuid)


# --- real engines --------------------------------------------------------------------------------


def flags(*more: str) -> list[str]:
    extra = json.dumps(EXTRA)
    return [
        "--engine.device=cuda", f"--engine.extra={extra}", "--engine.kv_cache_memory_bytes=268435456",
        "--engine.start_timeout_seconds=400", "--sync.verify_stored=true", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def beside(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("beside"), flags=flags("--engine.gpus=0.3"))
    yield running.ready(450)
    assert running.stop() == 0


def on_cuda(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def require_near(warm: Any, cold: Any) -> None:
    assert warm[0] == cold["tokens"]
    gaps = (abs(a - b) for one, other in zip(warm[1], cold["logprobs"], strict=True) for a, b in zip(one, other, strict=True))
    assert max(gaps) <= COLD_SPREAD


def test_an_engine_with_graphs_takes_new_weights_from_its_own_gpu_and_outlives_a_trainer_that_is_killed(
    beside: Fleet, tensors: Any, checkpoint: Any, cold_on_cuda: Any, tmp_path: Path
) -> None:
    with beside.client(bucket_bytes=BUCKET) as sync:
        said = []
        for seed in (1, 2, 1, 2):
            published = sync.publish(on_cuda(tensors(KIND, seed)))
            assert (published.admission.communicator.local, published.admission.communicator.world_size) == ({"0": (0,)}, 1)
            report = sync.commit(published)
            print("report", report.version, {key: round(value, 4) for key, value in report.seconds.items()}, report.verdicts[0].checks)
            said.append(answers(sync, 0))
        assert said[0] == said[2] and said[1] == said[3], "the same weights again must give the same bits"
        require_near(said[0], cold_on_cuda(1))
        require_near(said[1], cold_on_cuda(2))
        engine = sync.engines()[0]

        script = tmp_path / "trainer.py"
        script.write_text(HANGS.replace("load_file(sys.argv[3])", "{k: v.cuda() for k, v in load_file(sys.argv[3]).items()}"))
        command = [sys.executable, str(script), beside.url, beside.token, str(checkpoint(KIND, 1) / "model.safetensors")]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None and trainer.stdout.readline().strip() == "half"
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        killed = time.monotonic()
        update = beside.get("/v1/updates").json()[0]["update_id"]
        status = wait_until(lambda: (s := beside.get(f"/v1/updates/{update}").json())["state"] == "aborted" and s, 10, "the abort")
        print("aborted after", round(time.monotonic() - killed, 2), "s:", status["error"]["message"])
        assert answers(sync, 0) == said[1]
        sync.sync_weights(on_cuda(tensors(KIND, 1)))
        assert answers(sync, 0) == said[0]
        assert sync.engines()[0].url == engine.url, "the engine was not restarted"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_engine_by_memory_and_one_by_nccl_in_one_update(
    checkpoint: Any, tensors: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("mixed"), 2, flags("--engine.gpus=1"))
    try:
        with running.ready(450).client(bucket_bytes=BUCKET) as sync:
            said = []
            for seed in (1, 2, 1):
                published = sync.publish(on_cuda(tensors(KIND, seed)))
                reached = published.admission.communicator
                assert reached.world_size == 2 and len(reached.local) == 1
                sync.commit(published)
                said.append((answers(sync, 0), answers(sync, 1)))
            assert said[0] == said[2] != said[1]
            assert [one for one, _ in said] == [other for _, other in said]
    finally:
        assert running.stop() == 0
