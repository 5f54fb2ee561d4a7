"""Engines of two workers on two GPUs, CUDA graphs on: tensor, pipeline, data and expert parallel, over NCCL and gloo.

The trainer shares the first GPU with a worker: each side names a host of its own for NCCL.

Not covered: more than one engine, and GPUs of several hosts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.matrix_rows import ROWS
from tests.fleets import MAX_TOKENS, PROMPTS, Fleet, answers, order_fault, wait_until, with_faults
from tests.test_parallel import flags_of, worker_pids
from weightsync.demo.cold import ColdEngine
from weightsync.errors import ApplyFailed, VerdictNotOk, WeightSyncError
from weightsync.protocol import EngineState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two workers of one engine need two CUDA devices"),
]

TENSOR, STAGES, COPIES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}
EXPERTS = {"enable_expert_parallel": True}
COLD_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip
#: Two cold engines of the same weights may pick other kernels, and reduce in another order.
SPREAD = {"dense-bf16": 0.05, "dense-fp8-kv-fa": 0.2, "moe-bf16": 0.1, "moe-fp8-channel": 0.2}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`built(row, seed)`: a checkpoint's folder, made once."""
    root = tmp_path_factory.mktemp("rows")

    def get(row: str, seed: int) -> Path:
        folder = root / f"{row}-{seed}"
        return folder if folder.exists() else ROWS["cuda"][row].build(folder, seed)

    return get


@contextlib.contextmanager
def fleet_of(folder: Path, home: Path, arguments: dict[str, Any], *more: str, fault: Path | None = None) -> Iterator[Fleet]:
    os.environ.update({"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"})
    flags = [
        # Where an update is kept for engines that come later, the first worker has all of it.
        "--engine.device=cuda", "--sync.retain_engines=0", "--engine.kv_cache_memory_bytes=268435456", "--engine.start_timeout_seconds=400",
        *flags_of(arguments), *more,
    ]  # fmt: skip
    env = {"NCCL_HOSTID": "engine", "NCCL_SOCKET_IFNAME": "lo", **(with_faults(fault) if fault else {})}
    running = Fleet(folder, home, flags=flags, env=env).ready(450)
    try:
        yield running
    finally:
        assert running.stop() == 0


def arguments_of(row: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """vLLM's, without those that are settings."""
    common = ROWS["cuda"][row].arguments("cuda")
    ours = ("dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "skip_tokenizer_init", "enforce_eager")
    return {key: value for key, value in common.items() if key not in ours} | parallel


def sent(folder: Path, where: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(where) for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize(
    ("row", "parallel", "alone"),
    [
        ("dense-bf16", TENSOR, False),
        ("dense-bf16", STAGES, True),
        ("dense-bf16", COPIES, True),
        ("moe-bf16", TENSOR, False),
        ("moe-fp8-channel", TENSOR, False),
        ("moe-bf16", {**TENSOR, **EXPERTS}, False),
        ("moe-bf16", {**COPIES, **EXPERTS}, True),
        # Numbers that graphs hold change: both workers capture anew, or neither.
        ("dense-fp8-kv-fa", TENSOR, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) if isinstance(value, dict) else None,
)
def test_two_workers_follow_to_new_weights_and_back(row: str, parallel: dict[str, Any], alone: bool, built: Any, tmp_path: Path) -> None:
    arguments = arguments_of(row, parallel)
    with fleet_of(built(row, 1), tmp_path / "fleet", arguments) as fleet, fleet.client(bucket_bytes=1 << 20) as sync:
        said: dict[int, list[Any]] = {1: [], 2: []}
        for where, seed in (("cuda", 1), ("cuda", 2), ("cuda", 1), ("cpu", 2), ("cpu", 1)):  # NCCL, then gloo
            report = sync.sync_weights(sent(built(row, seed), where))
            (verdict,) = report.verdicts
            assert verdict.ranks == {"0": "verified", "1": "verified"} and sync.engines()[0].workers == 2
            print(row, where, {k: round(v, 4) for k, v in report.seconds.items()}, verdict.checks)
            said[seed] += [answers(sync, 0) for _ in range(3)]  # data-parallel copies answer in turn
    if EXPERTS.items() <= parallel.items():
        assert verdict.checks["not_kept"] == 96, "4 layers of 8 experts of 3 tensors, each kept by one worker"
    for answered in said.values():
        assert all(one == answered[0] for one in answered), "the same weights again must give the same bits"
    assert said[1][0] != said[2][0]
    common = ROWS["cuda"][row].arguments("cuda")
    cold_arguments = common if alone else {**common, **parallel, "distributed_executor_backend": "mp"}
    with ColdEngine(env=COLD_ENV) as engine:
        for seed in (1, 2):
            cold = engine.outputs(built(row, seed), PROMPTS, MAX_TOKENS, cold_arguments)
            first = [abs(warm[0] - other[0]) for warm, other in zip(said[seed][0][1], cold["logprobs"], strict=True)]
            print(row, seed, "difference from a cold engine at the first token:", first, said[seed][0][0] == cold["tokens"])
            assert max(first) <= SPREAD[row]


def test_one_worker_that_fails_is_tried_again_or_brought_back_with_the_other(built: Any, tmp_path: Path) -> None:
    row, fault = "dense-bf16", tmp_path / "fault.json"
    arguments = arguments_of(row, TENSOR)
    with (
        fleet_of(built(row, 1), tmp_path / "fleet", arguments, "--sync.rollback=host", fault=fault) as fleet,
        fleet.client(bucket_bytes=1 << 20) as sync,
    ):
        said = {}
        for seed in (1, 2, 1):
            sync.sync_weights(sent(built(row, seed), "cuda"))
            said[seed] = answers(sync, 0)
        for rank in (0, 1):
            for step, kind in (("apply", ApplyFailed), ("verify", VerdictNotOk)):
                order_fault(fault, 1, step, rank=rank)
                assert sync.sync_weights(sent(built(row, 2), "cuda")).verdicts[0].checks["second_tries"] == 1
                assert answers(sync, 0) == said[2]
                held = sync.engines()[0].version
                order_fault(fault, 2, step, rank=rank)
                with pytest.raises(kind, match=f"worker {rank} of 2"):
                    sync.sync_weights(sent(built(row, 1), "cuda"))
                assert (sync.engines()[0].state, sync.engines()[0].version) == (EngineState.SERVING, held)
                assert answers(sync, 0) == said[2], "the old version, to the bit"


def test_a_worker_that_is_killed_while_it_receives_costs_its_engine_a_restart(built: Any, tmp_path: Path) -> None:
    row = "dense-bf16"
    with fleet_of(built(row, 1), tmp_path / "fleet", arguments_of(row, TENSOR)) as fleet, fleet.client(bucket_bytes=1 << 20) as sync:
        sync.sync_weights(sent(built(row, 2), "cuda"))
        before, half, go_on = answers(sync, 0), threading.Event(), threading.Event()

        def progress(done: int, total: int) -> None:
            if done > total // 2:
                half.set()
                go_on.wait(60)

        published = sync.publish(sent(built(row, 1), "cuda"), timeout_seconds=60.0, progress=progress)
        assert half.wait(20)
        os.kill(worker_pids(fleet, 0)[1], signal.SIGKILL)
        go_on.set()
        with pytest.raises(WeightSyncError):
            sync.commit(published)
        wait_until(lambda: sync.engines()[0].state == EngineState.DEAD, 60, "its death")
        wait_until(lambda: (e := sync.engines()[0]).state == EngineState.PENDING and e.workers == 2, 300, "the restart")
        sync.sync_weights(sent(built(row, 2), "cuda"))
        assert answers(sync, 0) == before
