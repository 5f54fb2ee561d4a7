"""The probe on an engine with CUDA graphs: graphs and the model without them agree, and graphs that read other weights are named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.fleets import Fleet, order_fault, wait_until, with_faults
from tests.gpu.test_main_job_on_cuda import EXTRA, _on_cuda
from weightsync import WeightSync
from weightsync.mismatch import ProbeReport

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

KIND = "qwen3"


def probe_of(sync: WeightSync, weights: Any) -> ProbeReport:
    report = sync.sync_weights(weights)
    wait_until(lambda: (probe := sync.status().probe) is not None and probe.version == report.version, 15, "the probe")
    probe = sync.status().probe
    assert probe is not None and probe.skipped == {} and probe.no_graphs == ""
    print(f"probe of version {probe.version}: {probe.seconds:.3f} s; {probe.graphs}")
    return probe


def test_graphs_that_read_what_the_model_does_not_hold_any_more_are_named(checkpoint: Any, tensors: Any, tmp_path: Path) -> None:
    os.environ.update({"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"})
    fault = tmp_path / "fault.json"
    flags = [
        "--engine.device=cuda", "--engine.gpus=0.3", f"--engine.extra={json.dumps(EXTRA)}", "--engine.kv_cache_memory_bytes=268435456",
        "--engine.start_timeout_seconds=400", "--sync.local=off",
    ]  # fmt: skip
    env = {"NCCL_HOSTID": "engine", "NCCL_SOCKET_IFNAME": "lo", **with_faults(fault)}
    fleet = Fleet(checkpoint(KIND, 1), tmp_path / "home", flags=flags, env=env).ready(450)
    try:
        with fleet.client(bucket_bytes=60_000) as sync:
            for seed in (1, 2, 1):
                right = probe_of(sync, _on_cuda(tensors(KIND, seed)))
                assert right.named == () and right.graphs["0"] < 0.1 and right.seconds < 0.5
            order_fault(fault, 1, step="rebind")
            wrong = probe_of(sync, _on_cuda(tensors(KIND, 2)))
            assert wrong.named == (0,) and wrong.graphs["0"] > 0.25 and "captured graphs differ" in wrong.said[0]
    finally:
        assert fleet.stop() == 0
