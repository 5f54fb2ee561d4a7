"""Adapters of trainers with real engines: mistakes that are told before training, PEFT, `transformers.Trainer`.

TRL has a file of its own, `test_trl.py`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fleets import MAX_TOKENS, PROMPTS, Fleet, answers
from trainer_adapters.callback import follow
from trainer_adapters.fleet import weights
from weightsync import WeightSync
from weightsync.client import Lazy
from weightsync.errors import AuthError, ManifestRefused, ServiceUnreachable

pytestmark = pytest.mark.engine
#: Between an engine in bfloat16 and a trainer that computes in float32 from the same values, nats.
TOLERANCE = 0.1


@pytest.fixture
def sync(fleet: Fleet, tensors: Callable[[str, int], dict[str, Any]]) -> Iterator[WeightSync]:
    with fleet.client() as client:
        yield client
        client.sync_weights(tensors("qwen3", 1))  # as other tests found it


def model_of(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def gap(model: Any, sync: WeightSync, engine: int) -> float:
    """The largest distance between an engine's log-probabilities of its own answers and the model's, with its weights as they are sent."""
    sent = {name: value.read() if isinstance(value, Lazy) else value for name, value in weights(model, torch.bfloat16).items()}
    rounded, worst = {name: value.float() for name, value in sent.items()}, 0.0
    for prompt, tokens, logprobs in zip(PROMPTS, *answers(sync, engine), strict=True):
        with model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext():
            given = {"input_ids": torch.tensor([prompt + tokens])}
            scores = torch.func.functional_call(model, rounded, kwargs=given).logits[0, -MAX_TOKENS - 1 : -1].log_softmax(-1)
        worst = max(worst, (scores.gather(1, torch.tensor(tokens)[:, None])[:, 0] - torch.tensor(logprobs)).abs().max().item())
    return worst


def test_mistakes_are_told_when_the_adapter_is_made(fleet: Fleet, sync: WeightSync, checkpoint: Any) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(ServiceUnreachable, match=r"no service answers at http://127.0.0.1:9.*Is `weightsync serve` running"):
        follow("http://127.0.0.1:9", fleet.token)
    with pytest.raises(AuthError, match=r"wrong bearer token.*`weightsync serve` prints where the token is kept"):
        follow(fleet.url, fleet.token + "x")
    model, version = model_of(checkpoint("qwen3", 1)), sync.status().committed_version
    with pytest.raises(ManifestRefused, match=r"wrong dtype.*is float32, want bfloat16.*Pass dtype="):
        follow(fleet.url, fleet.token, model=model)
    with pytest.raises(ManifestRefused, match=r"q_norm"):
        follow(fleet.url, fleet.token, model=model.model.layers[0], dtype=torch.bfloat16)
    assert sync.status().committed_version == version


def test_merged_adapters_change_the_rollout_and_unmerged_ones_are_refused(fleet: Fleet, sync: WeightSync, checkpoint: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = model_of(checkpoint("qwen3", 1))
    sync.sync_weights(weights(base, torch.bfloat16))
    before = answers(sync, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of attributes of transformers that go away
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with pytest.raises(ManifestRefused, match="adapter"):
        sync.sync_weights(model.bfloat16())
    model.float()
    sync.sync_weights(weights(model, torch.bfloat16))
    assert answers(sync, 0) == before, "LoRA begins with a change of nothing"
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    sync.sync_weights(weights(model, torch.bfloat16))
    assert answers(sync, 0) != before
    assert answers(sync, 1) == answers(sync, 0)
    assert gap(model, sync, 0) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["whole model", "peft"])
def test_engines_follow_transformers_trainer(fleet: Fleet, sync: WeightSync, checkpoint: Any, tmp_path: Path, adapted: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = model_of(checkpoint("qwen3", 1))
    if adapted:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    started, gaps = sync.status().committed_version or 0, list[tuple[float, float]]()
    callback = follow(fleet.url, fleet.token, every_steps=2, dtype=torch.bfloat16, model=model)

    class Look(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        """Before the sync of a step and behind it."""

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.stale = gap(model, sync, 0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            gaps.append((self.stale, gap(model, sync, 0)))

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 512, (16, 12), generator=torch.Generator().manual_seed(1))]
    rate = 3e-2 if adapted else 3e-3
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=5, learning_rate=rate, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
    )
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback, Look()]).train()
    # One when it was made, one when training began, behind steps 2 and 4, and at the end.
    assert callback.report.version == sync.status().committed_version == started + 5
    assert [before == behind for before, behind in gaps] == [True, False, True, False, True], gaps
    assert max(gaps[1][1], gaps[3][1]) < TOLERANCE < gaps[1][0], gaps
    assert gap(model, sync, 0) < TOLERANCE and gap(model, sync, 1) < TOLERANCE
