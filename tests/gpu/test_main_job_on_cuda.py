"""The main job with vLLM on CUDA, CUDA graphs on, and NCCL between trainer and engine.

Trainer and engine may share one GPU: NCCL refuses two ranks on one device of one
host, so each names a host of its own (for function, not for speed).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fleets import MAX_TOKENS, PROMPTS, Fleet, answers, wait_until
from weightsync.demo.cold import ColdEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

KIND = "qwen3"
EXTRA: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4], "kernel_config": {"enable_flashinfer_autotune": False}}
COLD_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": False,
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    **EXTRA,
}
#: Two cold engines of the same weights may pick other kernels; measured spread of dense bf16 models is below this.
COLD_SPREAD = 0.05


def _started(checkpoint: Any, home: Path, *more: str) -> Iterator[Fleet]:
    os.environ.update({"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"})
    flags = [
        "--engine.device=cuda", "--engine.gpus=0.3", f"--engine.extra={json.dumps(EXTRA)}",
        "--engine.kv_cache_memory_bytes=268435456", "--engine.start_timeout_seconds=400", "--sync.local=off", *more,
    ]  # fmt: skip
    fleet = Fleet(checkpoint(KIND, 1), home, flags=flags, env={"NCCL_HOSTID": "engine", "NCCL_SOCKET_IFNAME": "lo"})
    yield fleet.ready(450)
    assert fleet.stop() == 0


@pytest.fixture(scope="module")
def cuda_fleet(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    yield from _started(checkpoint, tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def unstaged_fleet(checkpoint: Any, tmp_path: Path) -> Iterator[Fleet]:
    yield from _started(checkpoint, tmp_path / "unstaged", "--sync.stage=none")


@pytest.fixture(scope="module")
def cold_on_cuda(checkpoint: Any) -> Iterator[Any]:
    with ColdEngine(env=COLD_ENV) as engine:
        yield lambda seed: engine.outputs(checkpoint(KIND, seed), PROMPTS, MAX_TOKENS, ENGINE_ARGS)


def _on_cuda(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def test_nccl_from_cuda_tensors_to_new_weights_and_back(cuda_fleet: Fleet, tensors: Any, cold_on_cuda: Any) -> None:
    with cuda_fleet.client(bucket_bytes=60_000) as sync:
        outputs, reports = [], []
        for seed in (1, 2, 1, 2):
            reports.append(sync.sync_weights(_on_cuda(tensors(KIND, seed))))
            outputs.append(answers(sync, 0))
    for report in reports:
        print("report", report.version, {k: round(v, 4) for k, v in report.seconds.items()}, round(report.pause_seconds, 4))
    assert outputs[0] == outputs[2] and outputs[1] == outputs[3], "the same weights again must give the same bits"
    for seed, warm in ((1, outputs[0]), (2, outputs[1])):
        cold = cold_on_cuda(seed)
        assert warm[0] == cold["tokens"]
        gap = max(abs(a - b) for one, other in zip(warm[1], cold["logprobs"], strict=True) for a, b in zip(one, other, strict=True))
        print("largest difference from a cold engine, seed", seed, gap)
        assert gap <= COLD_SPREAD


def test_a_trainer_killed_inside_an_nccl_broadcast_costs_its_deadline_and_no_restart(
    cuda_fleet: Fleet, tensors: Any, checkpoint: Any, tmp_path: Path
) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import sys, time\nfrom safetensors.torch import load_file\nfrom weightsync import WeightSync\n"
        "sync = WeightSync(sys.argv[1], sys.argv[2], bucket_bytes=60000, timeout_seconds=25)\n"
        "def hold(sent, total):\n"
        "    if sent * 2 > total:\n        print('half', flush=True)\n        time.sleep(600)\n"
        "sync.sync_weights({k: v.cuda() for k, v in load_file(sys.argv[3]).items()}, progress=hold)\n"
    )
    with cuda_fleet.client() as sync:
        sync.sync_weights(_on_cuda(tensors(KIND, 1)))
        before, engine = answers(sync, 0), sync.engines()[0]
        command = [sys.executable, str(script), cuda_fleet.url, cuda_fleet.token, str(checkpoint(KIND, 2) / "model.safetensors")]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None and trainer.stdout.readline().strip() == "half"
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        killed = time.monotonic()
        update = cuda_fleet.get("/v1/updates").json()[0]["update_id"]
        wait_until(lambda: cuda_fleet.get(f"/v1/updates/{update}").json()["state"] == "aborted", 40, "the abort")
        print(
            "aborted after", round(time.monotonic() - killed, 2), "s:", cuda_fleet.get(f"/v1/updates/{update}").json()["error"]["message"]
        )
        assert answers(sync, 0) == before
        sync.sync_weights(_on_cuda(tensors(KIND, 2)))
        assert sync.engines()[0].url == engine.url, "the engine was not restarted"
        assert answers(sync, 0) != before
        sync.sync_weights(_on_cuda(tensors(KIND, 1)))
        assert answers(sync, 0) == before


def test_without_staging_tensors_go_from_the_broadcast_into_the_captured_storage(
    unstaged_fleet: Fleet, tensors: Any, cold_on_cuda: Any
) -> None:
    with unstaged_fleet.client(bucket_bytes=60_000) as sync:
        for where, seed in (("cuda", 1), ("cuda", 2), ("cpu", 1), ("cpu", 2)):  # NCCL, gloo
            report = sync.sync_weights({name: tensor.to(where) for name, tensor in tensors(KIND, seed).items()})
            print(where, "not staged:", {key: round(value, 4) for key, value in report.seconds.items()})
            assert answers(sync, 0)[0] == cold_on_cuda(seed)["tokens"]
