"""A real engine that takes a wrapped trainer's names, and keeps what a policy leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.fleets import ENGINE_ARGS, MAX_TOKENS, PROMPTS, Fleet, answers
from weightsync.demo.cold import ColdEngine
from weightsync.errors import ManifestRefused

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3"
FROZEN = ("model.embed_tokens.weight", *(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"))
PATTERNS = '["model.embed_tokens.*", "*.layers.0.self_attn.[qkv]_proj.*"]'


def wrapped(name: str) -> str:
    adapted = name.replace("o_proj.", "o_proj.base_layer.").replace("lm_head.", "lm_head.modules_to_save.default.")
    return "_orig_mod.base_model.model." + adapted.replace(".mlp.", "._fsdp_wrapped_module.mlp.")


def test_wrapped_names_follow_and_frozen_layers_keep_their_values(checkpoint: Any, tensors: Any, cold: Any, tmp_path: Path) -> None:
    one, two = tensors(KIND, 1), tensors(KIND, 2)
    fleet = Fleet(checkpoint(KIND, 1), tmp_path / "fleet", flags=[f"--engine.frozen={PATTERNS}"]).ready()
    try:
        with fleet.client(bucket_bytes=100_000) as sync:
            sync.sync_weights({wrapped(name): tensor for name, tensor in two.items() if name not in FROZEN})
            mixed = {name: (one if name in FROZEN else two)[name] for name in two}
            folder = tmp_path / "mixed"
            folder.mkdir()
            (folder / "config.json").write_text((checkpoint(KIND, 1) / "config.json").read_text())
            save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
            with ColdEngine() as engine:
                fresh = engine.outputs(folder, PROMPTS, MAX_TOKENS, ENGINE_ARGS)
            assert answers(sync, 0) == (fresh["tokens"], fresh["logprobs"]) != cold(KIND, 2)
            with pytest.raises(ManifestRefused, match=r"frozen in part .*k_proj.weight \(beside model.layers.0.self_attn.[qv]_proj"):
                sync.sync_weights({name: tensor for name, tensor in one.items() if name != FROZEN[2]})
            sync.sync_weights(one)  # they may be sent all the same
            assert answers(sync, 0) == cold(KIND, 1)
    finally:
        assert fleet.stop() == 0
