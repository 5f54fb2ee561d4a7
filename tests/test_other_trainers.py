"""Hooks of verl, SkyRL and OpenRLHF with their real classes and registries, where those are installed, and with real engines.

They pin other versions of transformers than the project, so they are in no extra: put them on the path to run this
(`pip install --no-deps --target DIR verl …`). Not covered: whole runs, which need GPUs.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fleets import Fleet, answers
from weightsync import WeightSync, WeightSyncError
from weightsync.errors import AuthError, ServiceUnreachable

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def sync(fleet: Fleet, tensors: Callable[[str, int], dict[str, Any]]) -> Iterator[WeightSync]:
    with fleet.client() as client:
        client.sync_weights(tensors("qwen3", 1))
        yield client
        client.sync_weights(tensors("qwen3", 1))  # as other tests found it


@pytest.fixture
def token_file(fleet: Fleet, tmp_path: Path) -> str:
    (tmp_path / "token").write_text(fleet.token)
    return str(tmp_path / "token")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one, as each of these trainers has at least."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pairs(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


# --- verl -------------------------------------------------------------------------------------------


@pytest.fixture
def verl() -> Any:
    return pytest.importorskip("verl.checkpoint_engine.base", reason="verl is not installed")


def verl_engine(verl: Any, fleet: Fleet, token_file: str, **options: Any) -> Any:
    """As verl makes it: the manager imports the module that the configuration names, and takes what it registered."""
    from verl.workers.config import CheckpointEngineConfig

    config = CheckpointEngineConfig(backend="weightsync", custom_backend_module="trainer_adapters.verl")
    backend = verl.CheckpointEngineManager(config, None, []).backend_cls
    assert backend.__name__ == "FleetCheckpointEngine" and issubclass(backend, verl.CheckpointEngine)
    return verl.CheckpointEngineRegistry.new("weightsync", bucket_size=1 << 20, url=fleet.url, token_file=token_file, **options)


def test_verls_manager_brings_its_actors_weights(
    verl: Any, fleet: Fleet, sync: WeightSync, token_file: str, tensors: Any, cold: Any
) -> None:
    first = verl_engine(verl, fleet, token_file, is_master=True)
    other = verl_engine(verl, fleet, token_file)
    for seed in (2, 1, 2):
        actors, rollouts = first.build_topology(2, 0, [first.prepare(), other.prepare()])
        for engine, rank in zip((first, other), actors["rank"], strict=True):
            engine.init_process_group(rank=rank)
        seen: list[str] = []
        gathered = (seen.append(name) or (name, value) for name, value in pairs(tensors("qwen3", seed)))  # type: ignore[func-returns-value]
        metrics, nothing = asyncio.run(first.send_weights(pairs(tensors("qwen3", seed)))), asyncio.run(other.send_weights(gathered))
        assert (metrics["weightsync/version"], nothing, rollouts) == (sync.status().committed_version, {}, {"rank": []})
        assert len(seen) == len(tensors("qwen3", seed)), "the other rank takes part in the gathers"
        first.finalize()
        assert answers(sync, 0) == cold("qwen3", seed)


def test_verls_own_rollout_workers_are_not_left_with_old_weights_unnoticed(verl: Any, fleet: Fleet, token_file: str) -> None:
    engine = verl_engine(verl, fleet, token_file)
    with pytest.raises(WeightSyncError, match=r"4 rollout worker\(s\).*rollouts_elsewhere=true"):
        engine.build_topology(1, 4, [engine.prepare()])
    told = verl_engine(verl, fleet, token_file, rollouts_elsewhere=True)
    assert told.build_topology(1, 4, [told.prepare()])[1] == {"rank": [-1] * 4}

    async def received() -> list[Any]:
        return [pair async for pair in told.receive_weights()]

    assert asyncio.run(received()) == []


def test_verls_mistakes_are_told_when_its_engine_is_made(verl: Any, fleet: Fleet, token_file: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    with pytest.raises(AuthError, match="wrong bearer token"):
        verl_engine(verl, fleet, str(wrong), is_master=True)
    with pytest.raises(ServiceUnreachable, match="no service answers"):
        verl_engine(verl, SimpleNamespace(url="http://127.0.0.1:9"), token_file, is_master=True)  # type: ignore[arg-type]


def test_verls_agent_loop_samples_from_the_fleet(verl: Any, fleet: Fleet, sync: WeightSync, token_file: str, tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from trainer_adapters.verl_rollouts import FleetAgentLoop
    from weightsync.demo.checkpoint import build_checkpoint

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"prompt_length": 16, "response_length": 6}}, "data": {}})
    tokenizer = AutoTokenizer.from_pretrained(build_checkpoint(tmp_path / "tokenizer", 0))
    asked = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "ignore_eos": True}

    async def run() -> Any:
        loop = FleetAgentLoop(
            trainer_config=DictConfigWrap(config), server_manager=None, processor=None, dataset_cls=None,
            data_config=DictConfigWrap(config.data), tokenizer=tokenizer, url=fleet.url, token_file=token_file,
        )  # fmt: skip
        return await loop.run(asked, raw_prompt=[{"role": "user", "content": "sea1 sea2"}])

    made = asyncio.run(run())
    want = sync.generate(made.prompt_ids, max_tokens=6, temperature=0.0, ignore_eos=True)
    assert (tuple(made.response_ids), tuple(made.response_logprobs)) == (want.token_ids, want.logprobs)
    assert made.response_mask == [1] * 6
    assert made.extra_fields["weight_versions"] == [(want.version, 0, 6)]


# --- SkyRL ------------------------------------------------------------------------------------------


def test_skyrls_selector_and_sender_bring_its_chunks(
    fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    skyrl = pytest.importorskip("skyrl.backends.skyrl_train.weight_sync", reason="skyrl is not installed")
    from trainer_adapters import skyrl as adapter

    monkeypatch.setattr(skyrl, "get_transfer_strategy_cls", skyrl.get_transfer_strategy_cls)  # put back behind the test
    adapter.install(fleet.url, fleet.token)
    chosen = skyrl.get_transfer_strategy_cls(weight_sync_backend="nccl", colocate_all=False)
    assert issubclass(chosen, skyrl.WeightTransferStrategy)
    info = chosen.create_init_info(None, inference_world_size=2)
    assert isinstance(info, skyrl.WeightSyncInitInfo) and info.for_servers(1, 2, dp_size=1) == []
    with pytest.raises(WeightSyncError, match=r"would go on with old weights.*rollouts_elsewhere=True"):
        chosen.create_sender(init_info=info, inference_client=None)
    adapter.install(fleet.url, "wrong", rollouts_elsewhere=True)
    with pytest.raises(AuthError, match="wrong bearer token"):
        skyrl.get_transfer_strategy_cls("nccl", False).create_sender(init_info=info, inference_client=None)
    adapter.install(fleet.url, fleet.token, rollouts_elsewhere=True)
    sender = skyrl.get_transfer_strategy_cls("nccl", False).create_sender(init_info=info, inference_client=None)
    assert isinstance(sender, skyrl.WeightTransferSender)
    for seed in (2, 1):
        named = tensors("qwen3", seed)
        metadata = {
            "names": list(named), "dtype_names": ["bfloat16"] * len(named), "shapes": [list(value.shape) for value in named.values()]
        }  # fmt: skip
        chunks = (skyrl.WeightChunk([name], [str(value.dtype)], [list(value.shape)], [value]) for name, value in named.items())
        asyncio.run(sender.send_chunks(chunks, weight_metadata=metadata))
        assert answers(sync, 0) == cold("qwen3", seed)
    sender.teardown()


# --- OpenRLHF ---------------------------------------------------------------------------------------


def test_openrlhfs_policy_actor_has_the_fleet_follow_its_broadcast(fleet: Fleet, sync: WeightSync, checkpoint: Any, alone: None) -> None:
    ppo_actor = pytest.importorskip("openrlhf.trainer.ray.ppo_actor", reason="openrlhf (with flash_attn) is not installed")
    from transformers import AutoModelForCausalLM

    from trainer_adapters import openrlhf as adapter

    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3", 1), dtype=torch.bfloat16)
    ds = SimpleNamespace(tensor_parallel_size=1, zero_stage=2)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(args=SimpleNamespace(ds=ds)), actor=SimpleNamespace(model=SimpleNamespace(module=model)), own=0
    )
    made = adapter.policy(fleet.url, fleet.token).__ray_metadata__.modified_class.__ray_actor_class__
    original = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class.__ray_actor_class__
    assert issubclass(made, original)
    actor = object.__new__(made)
    actor.trainer, actor._fleet = trainer, adapter.Follower(trainer, fleet.url, fleet.token)
    trainer.broadcast_to_vllm = lambda: setattr(trainer, "own", trainer.own + 1)
    before, version = answers(sync, 0), sync.status().committed_version or 0
    with torch.no_grad():
        model.lm_head.weight.copy_(copy.deepcopy(model.lm_head.weight).roll(1, 0))
    actor.broadcast_to_vllm()
    assert (trainer.own, sync.status().committed_version) == (1, version + 1), "OpenRLHF's own engines got theirs, too"
    assert answers(sync, 0) != before
    ds.tensor_parallel_size = 2
    with pytest.raises(WeightSyncError, match=r"Use ds.tensor_parallel_size=1"):
        adapter.Follower(trainer, fleet.url, fleet.token)
