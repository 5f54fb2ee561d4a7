"""TRL's own trainers with real engines, in float32, so that what log-probabilities differ by is rounding alone.

`examples/trl_grpo.py` is run as a user runs it, in one process and in two (DDP). TRL's asynchronous trainer loads an attention kernel for
GPUs, for which `varlen` stands in here. Not covered: GPUs, FSDP, DeepSpeed.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fleets import Fleet
from trainer_adapters import trl as adapter
from trainer_adapters.trl_async import FleetRollouts, FleetTransfer
from weightsync import WeightSyncError
from weightsync.demo import task
from weightsync.demo.checkpoint import build_checkpoint
from weightsync.errors import AuthError, ManifestRefused, ServiceUnreachable

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"step (\d+): reward ([\d.]+), largest log-probability gap ([\d.e+-]+)")
#: Between the engines' log-probabilities of what they sampled and TRL's own, both in float32, nats.
TOLERANCE = 1e-3
STALE = 0.01


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trl", reason="trl is not installed")
    from examples.serving import _widen

    folder = build_checkpoint(tmp_path_factory.mktemp("policy"), seed=0)
    _widen(folder)
    return folder


@pytest.fixture(scope="module")
def fleet(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(policy, tmp_path_factory.mktemp("fleet"), 2, ["--engine.dtype=float32"]).ready()
    (running.home / "token").write_text(running.token)
    yield running
    assert running.stop() == 0


def run_example(fleet: Fleet, policy: Path, folder: Path, steps: int, *launcher: str) -> str:
    command = [sys.executable, *launcher, str(ROOT / "examples/trl_grpo.py"), str(policy), fleet.url, str(fleet.home / "token")]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, "STEPS": str(steps), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def trainer_of(policy: Path, folder: Path, steps: int = 1, **options: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, num_generations=4, max_completion_length=6,
        learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    return GRPOTrainer(
        model,
        rewarded,
        config,
        train_dataset=Dataset.from_dict({"prompt": [f"<bos> {topic}1 {topic}2" for topic in task.TOPICS] * 4}),
        processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
        **options,
    )


def rewarded(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def gaps_of(trainer: Any) -> list[float]:
    return [logs["sampling/sampling_logp_difference/max"] for logs in trainer.state.log_history if "reward" in logs]


@pytest.mark.timeout(400)
def test_grpo_of_ten_steps_has_the_engines_hold_its_weights_at_each(fleet: Fleet, policy: Path, tmp_path: Path) -> None:
    steps = LINE.findall(said := run_example(fleet, policy, tmp_path, 10))
    assert [int(number) for number, *_ in steps] == list(range(1, 11)), said
    assert max(float(gap) for *_, gap in steps) < TOLERANCE, said
    # One sync when it is attached, one before each step's rollouts.
    assert "engines serve version 11" in said


def test_of_two_processes_the_first_one_sends(fleet: Fleet, policy: Path, tmp_path: Path) -> None:
    said = run_example(fleet, policy, tmp_path, 3, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    steps = LINE.findall(said)
    assert {int(number) for number, *_ in steps} == {1, 2, 3}, said
    assert max(float(gap) for *_, gap in steps) < TOLERANCE, said
    assert said.count("engines serve version") == 1, "the other process has no connection"


def test_weights_that_are_not_synced_show_in_what_trl_logs(fleet: Fleet, policy: Path, tmp_path: Path) -> None:
    """So that the other tests here can fail."""
    trainer = trainer_of(policy, tmp_path, 3)
    sync = adapter.attach(trainer, fleet.url, fleet.token)
    trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    assert sync is not None
    sync.close()
    first, *later = gaps_of(trainer)
    assert first < TOLERANCE and min(later) > STALE, gaps_of(trainer)


def test_adapters_of_peft_are_trained_through_the_fleet(fleet: Fleet, policy: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    trainer = trainer_of(policy, tmp_path, 3, peft_config=peft.LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "down_proj"]))
    trainer.args.learning_rate = 1e-2
    sync = adapter.attach(trainer, fleet.url, fleet.token)
    assert sync is not None
    with sync:
        begun = sync.generate([1, 8, 9], max_tokens=6, temperature=0.0, ignore_eos=True)
        trainer.train()
        assert max(gaps_of(trainer)) < TOLERANCE
        trainer.vllm_generation.sync_weights()
        assert sync.generate([1, 8, 9], max_tokens=6, temperature=0.0, ignore_eos=True).logprobs != begun.logprobs


def test_mistakes_are_told_when_the_trainer_is_attached(fleet: Fleet, policy: Path, tmp_path: Path) -> None:
    trainer = trainer_of(policy, tmp_path)
    with pytest.raises(ServiceUnreachable, match=r"no service answers at .*Is `weightsync serve` running there\?"):
        adapter.attach(trainer, "http://127.0.0.1:9", fleet.token)
    with pytest.raises(AuthError, match=r"wrong bearer token.*prints where the token is kept"):
        adapter.attach(trainer, fleet.url, "wrong")
    with pytest.raises(ManifestRefused, match=r"is bfloat16, want float32.*Pass dtype="):
        adapter.attach(trainer, fleet.url, fleet.token, dtype=torch.bfloat16)
    trainer.model.lm_head = torch.nn.Linear(256, 500, bias=False)
    with pytest.raises(ManifestRefused, match=r"wrong shape.*lm_head.weight"):
        adapter.attach(trainer, fleet.url, fleet.token)
    trainer.use_vllm = True
    with pytest.raises(WeightSyncError, match=r"Make it with use_vllm=False"):
        adapter.attach(trainer, fleet.url, fleet.token)


def varlen(query: Any, key: Any, value: Any, starts: Any, key_starts: Any, *_: Any, softmax_scale: float, **__: Any) -> torch.Tensor:
    """What `flash_attn_varlen_func` computes of causal sequences; tokens, heads and their width are the dimensions."""
    made, share = [], query.shape[1] // key.shape[1]
    for at in range(len(starts) - 1):
        own, there = query[starts[at] : starts[at + 1]], slice(key_starts[at], key_starts[at + 1])
        keys, values = key[there].repeat_interleave(share, 1), value[there].repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", own, keys) * softmax_scale
        seen = torch.ones(len(own), len(keys), dtype=torch.bool).tril(len(keys) - len(own))
        made.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values))
    return torch.cat(made)


def test_asynchronous_grpo_trains_through_the_fleet(fleet: Fleet, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # of a GPU
    rows = Dataset.from_dict({"prompt": [f"<bos> {topic}1 {topic}2" for topic in task.TOPICS]})
    rollouts = FleetRollouts(
        fleet.url, fleet.token, dataset=rows, reward_funcs=[rewarded], processing_class=AutoTokenizer.from_pretrained(policy),
        num_generations=4, max_tokens=6, samples_ahead=4,
    )  # fmt: skip
    config = AsyncGRPOConfig(
        output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=4, num_generations=4, use_cpu=True, bf16=False, dtype="float32",
        report_to="none", token_budget=0, learning_rate=1e-3, gradient_checkpointing=False, max_staleness=2, weight_sync_steps=1,
        logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        str(policy), args=config, train_dataset=rows, weight_transfer=FleetTransfer(fleet.url, fleet.token), rollout_worker=rollouts
    )
    trainer.train()
    history = [logs for logs in trainer.state.log_history if "ratio" in logs]
    assert len(history) == 5 and max(logs["sample/staleness_max"] for logs in history) <= 2
    assert history[0]["sample/staleness_max"] == 0 and abs(history[0]["ratio"] - 1) < TOLERANCE, "fresh samples are on policy"
    trained = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    assert not torch.equal(trained.lm_head.weight, trainer.model.lm_head.weight)
    trained.load_state_dict(trainer.model.state_dict())
    with fleet.client() as sync, torch.no_grad():
        answer = sync.generate([1, 8, 9], max_tokens=6, ignore_eos=True)
        scores = trained(torch.tensor([[1, 8, 9, *answer.token_ids]])).logits[0, 2:-1].log_softmax(-1)
    ours = scores.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert (ours - torch.tensor(answer.logprobs)).abs().max() < TOLERANCE


def test_rollouts_that_fail_are_told_to_the_trainer(fleet: Fleet, policy: Path) -> None:
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutWorkerProtocol

    def raises(**_: Any) -> list[float]:
        raise ValueError("no reward today")

    rollouts = FleetRollouts(
        fleet.url, fleet.token, dataset=[{"prompt": [{"role": "user", "content": "sea1"}]}], reward_funcs=[raises],
        processing_class=AutoTokenizer.from_pretrained(policy), num_generations=2, max_tokens=2,
    )  # fmt: skip
    assert set(RolloutWorkerProtocol.__annotations__) <= vars(rollouts).keys()
    rollouts.start()
    rollouts._thread.join(60)
    with pytest.raises(RuntimeError, match="rollouts from the fleet have ended: ValueError: no reward today"):
        rollouts.check_health(600.0)
    rollouts.stop()


def test_the_asynchronous_trainers_calls_bring_its_weights(fleet: Fleet, policy: Path) -> None:
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol, _iter_vllm_named_params

    calls = [name for name, part in vars(WeightTransferProtocol).items() if inspect.isfunction(part) and not name.startswith("_")]
    for name in calls:
        wanted = inspect.signature(getattr(WeightTransferProtocol, name)).parameters
        assert inspect.signature(getattr(FleetTransfer, name)).parameters.keys() == wanted.keys(), name
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    transfer = FleetTransfer(fleet.url, fleet.token)
    transfer.init_weight_transfer()
    with fleet.client() as sync:
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            transfer.pause()
            transfer.send_weights((name, parameter.detach()) for name, parameter in _iter_vllm_named_params(model))
            transfer.resume()
            answer = sync.generate([1, 8, 9], max_tokens=6, temperature=1.0, ignore_eos=True)
            assert transfer.report is not None and answer.version == transfer.report.version
            with torch.no_grad():
                scores = model(torch.tensor([[1, 8, 9, *answer.token_ids]])).logits[0, 2:-1].log_softmax(-1)
            ours = scores.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            assert (ours - torch.tensor(answer.logprobs)).abs().max() < TOLERANCE
    transfer.destroy()
    assert set(calls) == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
