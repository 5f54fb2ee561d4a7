"""An update that fails behind its first write, with CUDA graphs on: once more, back, or out; staged on the GPU.

Trainer and engine may share one GPU: each names a host of its own for NCCL.

Not covered: several engines; `tests/test_undo.py` has two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fleets import Fleet, answers, order_fault, with_faults
from weightsync import WeightSync
from weightsync.errors import UpdateFailed, WeightSyncError
from weightsync.protocol import EngineState

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

KIND = "qwen3"
EXTRA: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4], "kernel_config": {"enable_flashinfer_autotune": False}}
SAID = "a fault made for a test"


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / "fault.json"


@pytest.fixture(scope="module")
def fleet(checkpoint: Any, fault: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    os.environ.update({"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"})
    flags = [
        "--engine.device=cuda", "--engine.gpus=0.3", f"--engine.extra={json.dumps(EXTRA)}", "--sync.rollback=host", "--sync.stage=gpu",
        "--engine.kv_cache_memory_bytes=268435456", "--engine.start_timeout_seconds=400", "--sync.local=off",
    ]  # fmt: skip
    env = with_faults(fault) | {"NCCL_HOSTID": "engine", "NCCL_SOCKET_IFNAME": "lo"}
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("undo"), flags=flags, env=env)
    yield running.ready(450)
    assert running.stop() == 0


@pytest.mark.parametrize("where", ["cuda", "cpu"])  # NCCL, gloo
def test_an_engine_goes_on_goes_back_or_stops_and_never_mixes(where: str, fleet: Fleet, fault: Path, tensors: Any) -> None:
    def sent(seed: int) -> dict[str, torch.Tensor]:
        return {name: tensor.to(where) for name, tensor in tensors(KIND, seed).items()}

    def sync_fails(sync: WeightSync, seed: int) -> None:
        with pytest.raises(UpdateFailed, match=SAID):
            sync.sync_weights(sent(seed))
        verdict = fleet.get("/v1/updates").json()[0]["verdicts"][0]
        print(where, "failed:", {key: round(value, 4) for key, value in verdict["seconds"].items()}, verdict["checks"].get("rolled_back"))

    with fleet.client(bucket_bytes=60_000) as sync:
        said = {}
        for seed in (1, 2, 1):
            sync.sync_weights(sent(seed))
            said[seed] = answers(sync, 0)
        assert said[1] != said[2]
        order_fault(fault, 1)
        report = sync.sync_weights(sent(2))
        print(where, "second try:", {key: round(value, 4) for key, value in report.seconds.items()})
        assert report.verdicts[0].checks["second_tries"] == 1 and answers(sync, 0) == said[2]
        for step, at in (("apply", 0), ("apply", 12), ("verify", 0)):
            held = sync.engines()[0].version
            order_fault(fault, 2, step, at)
            sync_fails(sync, 1)
            assert (sync.engines()[0].state, sync.engines()[0].version) == (EngineState.SERVING, held)
            assert answers(sync, 0) == said[2], "the old version, to the bit"
        order_fault(fault, 3)
        sync_fails(sync, 1)
        assert sync.engines()[0].state == EngineState.QUARANTINED
        with pytest.raises(WeightSyncError):
            sync.generate([1, 5, 9], max_tokens=4, engine=0)
        sync.sync_weights(sent(1))
        assert answers(sync, 0) == said[1]
