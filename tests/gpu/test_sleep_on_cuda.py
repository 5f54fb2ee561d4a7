"""vLLM's sleep levels 1 and 2 with CUDA graphs on: memory goes and comes back at its addresses, and weights follow.

The steps are those of `tests/asleep.py`, which a CPU engine with a made-up sleep goes through in `tests/test_sleep_on_fleet.py`.
Trainer and engine may share one GPU: each names a host of its own for NCCL.

Not covered: several engines on one GPU, sleep-mode backends other than `cumem`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.asleep import through_a_deep_sleep, through_a_light_sleep
from tests.fleets import MAX_TOKENS, PROMPTS, Fleet
from tests.gpu.test_main_job_on_cuda import COLD_ENV, COLD_SPREAD, ENGINE_ARGS, EXTRA
from weightsync.demo.cold import ColdEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

KV_BYTES = 8 << 30  # more than others on this GPU may take meanwhile


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe", "mla"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(kind: str, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    os.environ.update({"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"})
    flags = [
        "--engine.device=cuda", "--engine.gpus=0.3", f"--engine.extra={json.dumps({**EXTRA, 'enable_sleep_mode': True})}",
        f"--engine.kv_cache_memory_bytes={KV_BYTES}", "--engine.start_timeout_seconds=400", "--sync.rollback=host",
        "--sync.retain_engines=0",
    ]  # fmt: skip
    env = {"NCCL_HOSTID": "engine", "NCCL_SOCKET_IFNAME": "lo"}
    running = Fleet(checkpoint(kind, 1), tmp_path_factory.mktemp("sleep"), flags=flags, env=env)
    yield running.ready(450)
    assert running.stop() == 0


def test_an_engine_sleeps_and_wakes_at_both_levels(kind: str, fleet: Fleet, checkpoint: Any, tensors: Any) -> None:
    def sent(seed: int) -> dict[str, torch.Tensor]:
        return {name: tensor.cuda() for name, tensor in tensors(kind, seed).items()}

    with fleet.client(bucket_bytes=60_000) as sync:
        sync.sync_weights(sent(1))
        for level in (1, 2):
            awake = torch.cuda.mem_get_info()[0]
            sync.sleep(level)
            freed = torch.cuda.mem_get_info()[0] - awake
            print(kind, "level", level, "gives back", freed >> 20, "MiB")
            assert freed > KV_BYTES // 2
            sync.wake()
        through_a_light_sleep(fleet, sync, sent)  # whose first update is the one behind a deep sleep
        said = through_a_deep_sleep(fleet, sync, sent)
    with ColdEngine(env=COLD_ENV) as engine:
        for seed in (1, 2):
            cold = engine.outputs(checkpoint(kind, seed), PROMPTS, MAX_TOKENS, ENGINE_ARGS)
            assert said[seed][0] == cold["tokens"]
            pairs = zip(said[seed][1], cold["logprobs"], strict=True)
            gap = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
            print(kind, "largest difference from a cold engine, seed", seed, gap)
            assert gap <= COLD_SPREAD
