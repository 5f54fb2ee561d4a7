"""Adapters alone in an engine with CUDA graphs on: they equal merged weights within rounding, and captured graphs go on reading one slot.

Not run yet. Trainer and engine may share one GPU: each names a host of its own for NCCL. Not covered: what needs no GPU
(`test_lora_on_vllm.py`), several workers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.fleets import PROMPTS, Fleet
from tests.gpu.test_undo_on_cuda import EXTRA, KIND
from tests.test_lora_on_vllm import merged, pairs
from weightsync import WeightSync
from weightsync.client import Lora

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]
#: Nats, of tokens that both choose.
ROUNDING = 0.1


@pytest.fixture(scope="module")
def fleet(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    os.environ.update({"NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"})
    extra = EXTRA | {"enable_lora": True, "max_lora_rank": 8}
    flags = [
        "--engine.device=cuda", "--engine.gpus=0.3", f"--engine.extra={json.dumps(extra)}", "--sync.stage=gpu",
        "--engine.kv_cache_memory_bytes=268435456", "--engine.start_timeout_seconds=400", "--sync.local=off",
    ]  # fmt: skip
    env = {"NCCL_HOSTID": "engine", "NCCL_SOCKET_IFNAME": "lo"}
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("lora"), flags=flags, env=env)
    yield running.ready(450)
    assert running.stop() == 0


def scores(sync: WeightSync) -> list[tuple[int, float]]:
    """First token and its log-probability, prompt by prompt: by prefill, and by a decoding step of a graph behind it."""
    said = [sync.generate(prompt, max_tokens=2, temperature=0.0, ignore_eos=True) for prompt in PROMPTS]
    return [pair for one in said for pair in zip(one.token_ids, one.logprobs, strict=True)]


def gap(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> float:
    """Of tokens that both have chosen, half of them at least: where two are as likely, rounding decides."""
    both = [abs(a[1] - b[1]) for a, b in zip(one, other, strict=True) if a[0] == b[0]]
    assert 2 * len(both) >= len(one)
    return max(both)


@pytest.mark.parametrize("where", ["cuda", "cpu"])  # NCCL, gloo
def test_an_adapter_alone_equals_merged_weights(where: str, fleet: Fleet, tensors: Any) -> None:
    base, model = tensors(KIND, 1), torch.nn.Module()
    first, second = pairs(base, 5), pairs(base, 6, rank=4, layers=("q_proj", "k_proj", "down_proj"))

    def there(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(where) for name, tensor in given.items()}

    with fleet.client(bucket_bytes=60_000) as sync:
        want = []
        for adapter in ({}, first, second):
            sync.sync_weights(there(merged(base, adapter)))
            want.append(scores(sync))
        assert sum(one == other for one, other in zip(want[0], want[1], strict=True)) == 0, "the adapter is seen"
        for number, (adapter, merged_scores) in enumerate([(first, want[1]), (second, want[2]), (first, want[1])]):
            lora = Lora(model, there(base), there(adapter))
            report = sync.sync_weights(lora, adapter_only=True)
            assert report.tensors == len(adapter) + (0 if number else len(base))
            assert report.verdicts[0].checks["adapted_layers"] and not report.verdicts[0].checks.get("recaptured")
            assert gap(scores(sync), merged_scores) < ROUNDING
        sync.sync_weights(there(base))
        assert scores(sync) == want[0]
