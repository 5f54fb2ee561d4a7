"""Adapters alone over a real fleet: requests that name none use the one that counts, an engine that restarted gets all of it.

With `sync.caches=retain` nothing is dropped behind an update: that what older adapters computed of a prompt is not found again
is the adapters' names' doing. Not covered: which adapters are refused (`test_adapter.py`), failures (`test_lora_on_vllm.py`).
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.fleets import MAX_TOKENS, PROMPTS, Fleet, answers, engine_pid, wait_until
from tests.test_adapters_on_fleet import TOLERANCE, model_of
from trainer_adapters.fleet import bring, weights
from weightsync import WeightSync
from weightsync.errors import ManifestRefused
from weightsync.protocol import EngineState

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LORA = '--engine.extra={"enable_lora": true, "max_lora_rank": 8}'


@pytest.fixture(scope="module")
def fleet(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = [LORA, "--sync.caches=retain"]
    running = Fleet(checkpoint("qwen3", 1), tmp_path_factory.mktemp("fleet"), 2, flags).ready()
    yield running
    assert running.stop() == 0


@pytest.fixture
def model(checkpoint: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of attributes of transformers that go away
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
        return peft.get_peft_model(model_of(checkpoint("qwen3", 1)), config)


def step(model: Any, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=random)


@torch.no_grad()
def gap(model: Any, sync: WeightSync, engine: int) -> float:
    """The largest distance between an engine's log-probabilities of its own answers and the model's, nats."""
    worst = 0.0
    for prompt, tokens, logprobs in zip(PROMPTS, *answers(sync, engine), strict=True):
        scores = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -MAX_TOKENS - 1 : -1].log_softmax(-1)
        worst = max(worst, (scores.gather(1, torch.tensor(tokens)[:, None])[:, 0] - torch.tensor(logprobs)).abs().max().item())
    return worst


def named(sync: WeightSync, adapter: str) -> None:
    """What engines say of themselves beside a verdict is asked for every second."""
    wait_until(lambda: {engine.adapter for engine in sync.engines()} == {adapter}, 10, f"the adapter {adapter!r}")


def test_engines_follow_an_adapter_that_travels_alone(fleet: Fleet, model: Any) -> None:
    base = sum(value.numel() * 2 for name, value in model.named_parameters() if "lora_" not in name)
    alone = sum(value.numel() * 2 for name, value in model.named_parameters() if "lora_" in name)
    gaps: list[float] = []
    with fleet.client(bucket_bytes=4096) as sync:
        for number in range(4):
            step(model, number)
            report = bring(sync, model, torch.bfloat16, adapter_only=True)
            assert report.nbytes == (alone if number else base + alone)
            assert all(verdict.checks["adapted_layers"] for verdict in report.verdicts)
            gaps += [gap(model, sync, engine) for engine in (0, 1)]
        assert max(gaps) < TOLERANCE, gaps
        named(sync, f"weightsync-{report.version}-{report.update_id[-12:]}")
        same = answers(sync, 0)
        assert same == answers(sync, 1)
        # vLLM's own application, asked for the model by its name.
        engine = sync.engines()[0]
        asked = {"model": engine.model, "prompt": PROMPTS[0], "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        asked["return_token_ids"] = True
        answer = httpx.post(f"{engine.url}/v1/completions", json=asked, headers={"authorization": f"Bearer {fleet.token}"}, timeout=60)
        assert answer.json()["choices"][0]["token_ids"] == same[0][0], answer.text
        assert answer.headers["x-weightsync-version"] == str(report.version) and answer.json()["model"] == engine.model

        # An engine that restarts has the base from its checkpoint, serves nothing, and gets base and adapter in one from the other.
        os.kill(engine_pid(fleet, 1), signal.SIGKILL)
        wait_until(lambda: sync.engines()[1].state != EngineState.SERVING, 30, "the engine's end")
        wait_until(lambda: sync.status().ready == 2, 120, "an engine that has rejoined")
        assert answers(sync, 1) == same
        step(model, 9)
        report = bring(sync, model, torch.bfloat16, adapter_only=True)
        assert report.nbytes == alone and gap(model, sync, 0) < TOLERANCE and answers(sync, 0) == answers(sync, 1) != same

        # Merged weights take its place, and what comes alone behind them brings the weights below again.
        adapted = answers(sync, 0)
        sync.sync_weights(weights(model, torch.bfloat16))
        assert gap(model, sync, 0) < 2 * TOLERANCE
        named(sync, "")
        with pytest.raises(ManifestRefused, match="no LoRA layer"):
            sync.sync_weights(model_of(Path(model.peft_config["default"].base_model_name_or_path)).requires_grad_(False), adapter_only=True)
        report = bring(sync, model, torch.bfloat16, adapter_only=True)
        assert report.nbytes == base + alone and answers(sync, 0) == adapted

    # A trainer that starts anew does not know what lies there; and one whose fleet has had other weights meanwhile finds out.
    with fleet.client() as sync, fleet.client() as other:
        assert bring(sync, model, torch.bfloat16, adapter_only=True).nbytes == base + alone
        other.sync_weights(weights(model, torch.bfloat16))
        assert bring(sync, model, torch.bfloat16, adapter_only=True).nbytes == base + alone
        assert answers(sync, 0) == answers(sync, 1) == adapted


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_each_worker_of_an_engine_takes_its_part_of_an_adapter(kind: str, model: Any, checkpoint: Any, tmp_path: Path) -> None:
    flags = [LORA, f"--engine.{kind}_parallel_size=2"]
    fleet = Fleet(checkpoint("qwen3", 1), tmp_path / "fleet", 1, flags).ready()
    try:
        with fleet.client(bucket_bytes=4096) as sync:
            for number in range(2):
                step(model, number)
                (verdict,) = bring(sync, model, torch.bfloat16, adapter_only=True).verdicts
                assert verdict.ranks == {"0": "verified", "1": "verified"} and verdict.checks["adapted_layers"]
                assert gap(model, sync, 0) < TOLERANCE
            before = answers(sync, 0)
            wrong = model.base_model.model.model.layers[1].mlp.down_proj
            wrong.lora_B["default"].weight = torch.nn.Parameter(wrong.lora_B["default"].weight[:-1])
            with pytest.raises(ManifestRefused, match=r"worker 1|model.layers.1.mlp.down_proj .*want inputs"):
                bring(sync, model, torch.bfloat16, adapter_only=True)
            assert answers(sync, 0) == before
    finally:
        assert fleet.stop() == 0
