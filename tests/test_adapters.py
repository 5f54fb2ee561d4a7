"""What the adapters of trainers share: connections that were tried, weights of wrapped, sharded and adapted models, streams.

Receivers are the worker's own, without engines (`tests/service.py`). With engines and whole trainers:
`test_adapters_on_fleet.py`, `test_trl.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.service import Service
from tests.test_ledger import engine
from tests.test_ranks import Model, Trainer, model_of
from trainer_adapters.callback import follow
from trainer_adapters.fleet import Stream, bring, connect, lora, weights
from weightsync import WeightSync, WeightSyncError
from weightsync.client import Lazy
from weightsync.errors import MemoryRefused, ServiceUnreachable

ADAPTED = ["layers.0", "layers.3", "odd"]


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as running:
        running.engines = (engine(0),)
        yield running


def read(made: dict[str, torch.Tensor | Lazy]) -> dict[str, torch.Tensor]:
    return {name: value.read() if isinstance(value, Lazy) else value.detach() for name, value in made.items()}


def adapted(seed: int = 1, **options: Any) -> Any:
    """A model with adapters that change something."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(model_of(seed), peft.LoraConfig(r=4, target_modules=ADAPTED, **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def plain(name: str) -> str:
    """A wrapped model's name as the engines take it."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".modules_to_save.default", "")


# --- connections ------------------------------------------------------------------------------------


def test_a_wrong_address_and_a_fleet_without_engines_are_told_at_once(service: Service) -> None:
    with pytest.raises(ServiceUnreachable, match=r"no service answers at http://127.0.0.1:9.*Is `weightsync serve` running there\?"):
        connect("http://127.0.0.1:9", "token")
    service.engines = ()
    with pytest.raises(WeightSyncError, match=r"has no engine that runs. See `weightsync status`; start one with `weightsync serve`"):
        connect(service.url, "token")
    service.engines = (engine(0),)
    connect(service.url, "token").close()


# --- weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["layers.1"]}], ids=["lora", "dora", "modules to save"])
def test_merged_weights_are_those_that_peft_merges_and_the_model_stays(options: dict[str, Any]) -> None:
    model = adapted(**options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = weights(model)
    assert sum(isinstance(value, Lazy) for value in made.values()) == 6, "weight and bias of three layers; nothing else is made"
    sent = {plain(name): value for name, value in read(made).items()}
    want = copy.deepcopy(model).merge_and_unload()
    expected = dict(want.named_parameters()) | dict(want.named_buffers())
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], value) for name, value in expected.items())
    assert not torch.equal(sent["layers.0.weight"], dict(model_of(1).named_parameters())["layers.0.weight"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_the_trainer_has_merged_itself_is_sent_as_it_is() -> None:
    model = adapted()
    model.merge_adapter()
    made = weights(model)
    assert not any(isinstance(value, Lazy) for value in made.values())
    assert not any("lora_" in name for name in made)


def tiny() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "head_dim": 8}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))


def test_adapters_that_change_no_weights_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(tiny(), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(WeightSyncError, match=r"PromptTuningConfig changes prompts and no weights.*Use LoRA"):
        weights(model)


def test_parameters_are_cast_when_they_are_read_and_buffers_stay() -> None:
    made = weights(model_of(1), torch.bfloat16)
    assert isinstance(made["odd.weight"], Lazy) and made["odd.weight"].dtype is torch.bfloat16
    sent = read(made)
    assert sent["scale"].dtype is torch.float32
    assert all(value.dtype is torch.bfloat16 for name, value in sent.items() if name != "scale")
    assert torch.equal(sent["odd.weight"], model_of(1).odd.weight.bfloat16())


# --- transformers.Trainer ---------------------------------------------------------------------------


def test_transformers_trainer_syncs_when_it_begins_every_so_many_steps_and_when_it_ends(service: Service, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = tiny()
    from transformers import Trainer, TrainingArguments

    row = torch.arange(8)
    arguments = TrainingArguments(str(tmp_path), max_steps=5, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
    callback = follow(service.url, "token", every_steps=2, model=model)
    assert list(service.held) == [1], "so that a model which does not fit is refused here"
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}] * 8, callbacks=[callback]).train()
    assert list(service.held) == [1, 2, 3, 4, 5] and callback.report.version == 5
    assert all(torch.equal(service.held[5][0][name], value) for name, value in model.named_parameters())
    differ = [not torch.equal(service.held[at][0]["lm_head.weight"], service.held[at + 1][0]["lm_head.weight"]) for at in (1, 2, 3, 4)]
    assert differ == [False, True, True, True]


# --- streams ----------------------------------------------------------------------------------------


def pairs(model: Model, seen: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in model.named_parameters():
        seen.append(name)
        yield name, value.detach()


def test_a_stream_brings_every_tensor_the_first_time_and_later(service: Service) -> None:
    with WeightSync(service.url, "token", bucket_bytes=20_000) as sync:
        stream = Stream(sync, torch.bfloat16)
        for version in (1, 2, 3):
            seen: list[str] = []
            model = model_of(version)
            assert stream.send(pairs(model, seen)).version == version
            assert seen == [name for name, _ in model.named_parameters()]
            (held,) = service.held[version]
            assert all(torch.equal(held[name], value.bfloat16()) for name, value in model.named_parameters())


def test_names_that_the_trainer_knows_spare_the_copy(service: Service) -> None:
    model, seen = model_of(1), list[str]()
    specs = [(name, value.dtype, tuple(value.shape)) for name, value in model.named_parameters()]
    with WeightSync(service.url, "token", bucket_bytes=20_000) as sync:
        published: list[int] = []
        Stream(sync, specs=specs).send(pairs(model, seen), progress=lambda sent, whole: published.append(len(seen)))
    assert published[0] < len(specs), "it has been sending before the last tensor was there"
    assert all(torch.equal(service.held[1][0][name], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("version", [1, 2])
def test_a_stream_that_is_refused_is_gone_through_to_its_end(service: Service, version: int) -> None:
    """Other ranks stand in its gathers."""
    model = model_of(1)
    with WeightSync(service.url, "token") as sync:
        stream = Stream(sync)
        if version == 2:
            stream.send(pairs(model, []))
        service.refuse, seen = MemoryRefused("no room"), list[str]()
        with pytest.raises(MemoryRefused):
            stream.send(pairs(model, seen))
        assert len(seen) == len(list(model.named_parameters()))
        service.refuse = None
        assert stream.send(pairs(model, [])).version == version


def test_a_stream_of_other_tensors_than_before_is_an_error(service: Service) -> None:
    model = model_of(1)
    with WeightSync(service.url, "token") as sync:
        stream = Stream(sync)
        stream.send(pairs(model, []))
        with pytest.raises(WeightSyncError, match=r"gave 'other' where 'embed.weight' came before.*make the adapter anew"):
            stream.send(iter([("other", torch.ones(3))]))
        with pytest.raises(WeightSyncError, match=r"gave 'nothing' where 'layers.0.weight' came before"):
            stream.send(iter(list(pairs(model, []))[:1]))
        more = (pair for pair in [*pairs(model, []), ("new", torch.ones(3))])
        with pytest.raises(WeightSyncError, match=r"gave 1 more tensor\(s\) than before: new"):
            stream.send(more)


# --- several ranks ----------------------------------------------------------------------------------


def shard_adapted(state: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    state["model"] = model = adapted()
    for layer in model.base_model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def sync_adapted(state: dict[str, Any], url: str) -> tuple[int, bool]:
    with connect(url, "token", group=dist.group.WORLD, bucket_bytes=20_000) as sync:
        report = sync.sync_weights(weights(state["model"], torch.bfloat16))
        return report.version, sync._follower is None


@pytest.mark.slow
def test_adapters_of_a_model_that_fsdp2_has_sharded_are_merged_and_gathered(service: Service, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    trainer = Trainer(tmp_path)
    assert [type(result) for result in trainer.all(shard_adapted, seconds=90.0)] == [type(None)] * 2
    assert trainer.all(sync_adapted, (service.url,)) == [(1, True), (1, False)]
    want = adapted().merge_and_unload()
    (held,) = service.held[1]
    assert {plain(name) for name in held} == {name for name, _ in want.named_parameters()} | {"scale"}
    gaps = [(held[name].float() - dict(want.named_parameters())[plain(name)]).abs().max() for name in held if plain(name) != "scale"]
    assert max(gaps) < 0.02, "bfloat16 of values of about one"


def sync_alone(state: dict[str, Any], url: str) -> list[int]:
    with connect(url, "token", group=dist.group.WORLD, bucket_bytes=20_000) as sync:
        return [bring(sync, state["model"], torch.bfloat16, adapter_only=True).nbytes for _ in range(2)]


@pytest.mark.slow
def test_the_adapter_of_a_model_that_fsdp2_has_sharded_is_gathered_alone(service: Service, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    trainer = Trainer(tmp_path)
    assert [type(result) for result in trainer.all(shard_adapted, seconds=90.0)] == [type(None)] * 2
    first, second = trainer.all(sync_alone, (service.url,))
    want = read({**lora(adapted(), torch.bfloat16).adapter})
    assert first == second and first[1] == sum(value.nbytes for value in want.values()) < first[0], "both ranks tell the same"
    (held,) = service.held[2]
    assert held.keys() == want.keys() and all(torch.equal(held[name], value) for name, value in want.items())
    (held,) = service.held[1]
    assert {plain(name) for name in held.keys() - want.keys()} == {name for name, _ in model_of(1).named_parameters()} | {"scale"}


def partition(state: dict[str, Any]) -> None:
    """As DeepSpeed's ZeRO-3 has it, behind a step of training."""
    import os
    import sys

    os.environ |= {"RANK": str(state["rank"]), "LOCAL_RANK": str(state["rank"]), "WORLD_SIZE": "2"}
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would be compiled, for a minute
    deepspeed.init_distributed("gloo")
    model = model_of(1)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state["engine"], *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    loss = state["engine"](torch.arange(8)).square().mean()
    state["engine"].backward(loss)
    state["engine"].step()
    state["model"] = state["engine"].module
    assert all(parameter.numel() == 0 for parameter in state["model"].parameters())


def whole_of_zero(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(state["model"].parameters())):
        return {name: value.detach().clone() for name, value in state["model"].named_parameters()}


def sync_partitioned(state: dict[str, Any], url: str) -> int:
    with connect(url, "token", group=dist.group.WORLD, bucket_bytes=20_000) as sync:
        return sync.sync_weights(weights(state["model"])).version


@pytest.mark.slow
def test_what_zero_3_has_partitioned_is_gathered(service: Service, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    trainer = Trainer(tmp_path)
    assert trainer.all(partition, seconds=120.0) == [None, None]
    assert trainer.all(sync_partitioned, (service.url,)) == [1, 1]
    want, _ = trainer.all(whole_of_zero)
    assert not torch.equal(want["odd.weight"], model_of(1).odd.weight), "it was trained"
    (held,) = service.held[1]
    assert held.keys() == want.keys() | {"scale"}
    assert all(torch.equal(held[name], value) for name, value in want.items())
