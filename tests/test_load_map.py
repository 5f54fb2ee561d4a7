"""What real models' own loaders make of a trainer's manifest, and what is admitted of it: on meta twins, without an engine."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoints import KINDS
from tests.checkpoints import EXPERTS, HIDDEN, LAYERS, VOCAB, _common
from tests.fleets import ENGINE_ARGS
from weightsync.errors import ConfigError, ManifestRefused, UnsupportedEngine
from weightsync.protocol import Manifest, TensorSpec

Shapes = Mapping[str, tuple[int, ...]]


class Engine:
    """What admission knows of an engine: its configuration, and the map of the checkpoint that it started from."""

    def __init__(self, folder: Path, shapes: Shapes | None = None, **arguments: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs

        from weightsync.worker import loadmap, vllm_compat

        self.config = EngineArgs(model=str(folder), **ENGINE_ARGS, **arguments).create_engine_config()
        self.twin = lambda: vllm_compat.meta_twin(self.config)
        self.twins = 0
        specs = loadmap.checkpoint_specs(folder) if shapes is None else [TensorSpec(n, "bfloat16", s) for n, s in shapes.items()]
        self.base = loadmap.record(self.twin(), specs)
        self.tied = bool(self.config.model_config.hf_config.tie_word_embeddings)
        self.shapes = {name: spec.shape for name, spec in self.base.specs.items()}

    def admit(self, shapes: Shapes, frozen: tuple[str, ...] = (), scope: tuple[str, ...] = (), alone: bool = True, last: Any = None) -> Any:
        """Offer tensors of these names and shapes, with the checkpoint's dtypes where it has the name."""
        from weightsync.worker import admission

        def make_twin() -> torch.nn.Module:
            self.twins += 1
            return self.twin()

        dtypes = {name: spec.dtype for name, spec in self.base.specs.items()}
        manifest = Manifest(tuple(TensorSpec(name, dtypes.get(name, "bfloat16"), shape) for name, shape in shapes.items()))
        return admission.admit(manifest, self.base, make_twin, self.tied, admission.Frozen(frozen, self.base), scope, alone, last)

    def looking(self) -> Engine:
        """The same, of whose checkpoint the loaders pass over one tensor; so that a manifest of all others is looked at anew."""
        made = copy.copy(self)
        made.base = dataclasses.replace(self.base, specs={**self.base.specs, "metadata": TensorSpec("metadata", "bfloat16", (1,))})
        return made

    def refused(self, shapes: Shapes, frozen: tuple[str, ...] = (), scope: tuple[str, ...] = ()) -> ManifestRefused:
        with pytest.raises(ManifestRefused) as caught:
            self.admit(shapes, frozen, scope)
        return caught.value

    def renamed(self, change: Callable[[str], str]) -> dict[str, tuple[int, ...]]:
        return {change(name): shape for name, shape in self.shapes.items()}


@pytest.fixture(scope="module", autouse=True)
def process(checkpoint: Callable[[str, int], Path]) -> Iterator[None]:
    """What vLLM wants in a process before it builds a model, and takes away again."""
    pytest.importorskip("vllm")
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    environment, default = dict(os.environ), torch.get_default_dtype()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    config = EngineArgs(model=str(checkpoint("qwen3-moe", 1)), **ENGINE_ARGS).create_engine_config()
    with set_current_vllm_config(config):  # of a mixture of experts, so that the group of experts is made too
        store = checkpoint("qwen3-moe", 1).parent / "rendezvous"
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(default)


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str, int], Path]) -> Callable[[str], Engine]:
    made: dict[str, Engine] = {}

    def get(kind: str) -> Engine:
        if kind not in made:
            made[kind] = Engine(checkpoint(kind, 1))
        return made[kind]

    return get


def written(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parts(twin: torch.nn.Module, within: str = "language_model.") -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of a model whose projections are fused in vLLM, and apart in checkpoints, within this module."""
    found = {}
    for name, parameter in twin.named_parameters():
        rows, *rest = parameter.shape
        split = {
            "qkv_proj": {"q_proj": rows // 2, "k_proj": rows // 4, "v_proj": rows // 4},
            "gate_up_proj": {"gate_proj": rows // 2, "up_proj": rows // 2},
        }
        fused = next((key for key in split if key in name and name.startswith(within)), None)
        if fused:
            found |= {name.replace(fused, part): (size, *rest) for part, size in split[fused].items()}
        else:
            found[name] = (rows, *rest)
    return found


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A text model inside one that hears: `language_model.*` beside `audio_tower.*`."""
    from vllm.engine.arg_utils import EngineArgs

    from weightsync.worker import vllm_compat

    audio = {
        "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "num_mel_bins": 8, "max_source_positions": 16,
    }  # fmt: skip
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "audio_token_index": 500, "text_config": _common("Qwen2ForCausalLM", "qwen2", tied=False),
        "audio_config": audio,
    }  # fmt: skip
    folder = written(tmp_path_factory.mktemp("audio"), config)
    twin = vllm_compat.meta_twin(EngineArgs(model=str(folder), **ENGINE_ARGS).create_engine_config())
    return Engine(folder, parts(twin))


def mixture(folder: Path, checkpoint: Callable[[str, int], Path], inner: int, **arguments: Any) -> Engine:
    """The checkpoints' mixture of experts with experts of another width."""
    model = checkpoint("qwen3-moe", 1)
    config = json.loads((model / "config.json").read_text()) | {"moe_intermediate_size": inner}
    whole = loadmap().checkpoint_specs(model)
    shapes = {spec.name: spec.shape for spec in whole if ".experts." not in spec.name}
    return Engine(written(folder, config), shapes | one_by_one(inner), **arguments)


def loadmap() -> Any:
    from weightsync.worker import loadmap

    return loadmap


def one_by_one(inner: int) -> dict[str, tuple[int, ...]]:
    kinds = {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight": shape
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for kind, shape in kinds.items()
    }


def in_one(inner: int, experts: int = EXPERTS) -> dict[str, tuple[int, ...]]:
    kinds = {"gate_up_proj": (experts, 2 * inner, HIDDEN), "down_proj": (experts, HIDDEN, inner)}
    return {f"model.layers.{layer}.mlp.experts.{kind}": shape for layer in range(LAYERS) for kind, shape in kinds.items()}


def besides_experts(engine: Engine) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in engine.shapes.items() if ".experts." not in name}


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_wrapped_names_are_admitted_as_the_checkpoints_own_without_another_look_at_the_loaders(kind: str, engine: Any) -> None:
    target = engine(kind)
    wrapped = {
        f"module._orig_mod.{name}".replace(".self_attn.", ".self_attn._fsdp_wrapped_module.").replace(
            ".mlp.", "._checkpoint_wrapped_module.mlp."
        ): name
        for name in target.shapes
    }
    before = target.twins
    found = target.admit({raw: target.shapes[name] for raw, name in wrapped.items()})
    assert {raw: found.name(raw) for raw in wrapped} == wrapped
    assert (found.writes, target.twins) == (target.base.writes, before)
    assert target.base.names == {}


def test_a_stream_in_which_only_adapted_modules_carry_a_base_layer_is_admitted(engine: Any) -> None:
    target = engine("qwen3")
    adapted = ("q_proj", "v_proj", "down_proj")
    raw = {
        name: "base_model.model."
        + (name.replace(".weight", ".base_layer.weight") if any(f".{part}." in name for part in adapted) else name)
        for name in target.shapes
    }
    found = target.admit({raw[name]: shape for name, shape in target.shapes.items()})
    assert {found.name(there): name for name, there in raw.items()} == {name: name for name in raw}


def test_a_module_trained_as_a_whole_is_taken_for_the_module_itself(engine: Any) -> None:
    target = engine("qwen3")
    raw = target.renamed(lambda name: name.replace("lm_head.", "lm_head.modules_to_save.default."))
    assert target.admit(raw).names == {"lm_head.modules_to_save.default.weight": "lm_head.weight"}
    said = target.refused({**raw, "lm_head.original_module.weight": (VOCAB, HIDDEN)})
    assert said.message == "1 tensor(s) are what a module was before it was trained as a whole: lm_head.original_module.weight"
    assert said.names == ("lm_head.original_module.weight",) and "Leave them out" in said.hint


def test_parts_of_an_adapter_are_refused_in_one_sentence_that_says_to_merge_it(engine: Any) -> None:
    target = engine("qwen3")
    sides = {"lora_A.default": (8, HIDDEN), "lora_B.default": (HIDDEN, 8)}
    targets = [name.removesuffix(".weight") for name in target.shapes if "_proj" in name]
    parts = {f"base_model.model.{name}.{side}.weight": shape for name in targets for side, shape in sides.items()}
    said = target.refused({**target.renamed(lambda name: f"base_model.model.{name}"), **parts})
    assert (
        said.message
        == f"{len(parts)} tensor(s) are parts of an adapter that was not merged into the weights, the first {next(iter(parts))!r}"
    )
    assert "Merge the adapter first" in said.hint and said.names == tuple(parts)[:20]


def test_two_names_for_one_tensor_are_refused_and_both_named(engine: Any) -> None:
    target = engine("qwen3")
    said = target.refused({**target.shapes, "_orig_mod.model.norm.weight": (HIDDEN,)})
    assert said.message == "1 sent twice: model.norm.weight and _orig_mod.model.norm.weight are both model.norm.weight"
    assert said.names == ("model.norm.weight", "_orig_mod.model.norm.weight")


def test_a_refusal_names_tensors_as_the_trainer_does(engine: Any) -> None:
    target = engine("qwen3")
    raw = target.renamed(lambda name: f"module.{name}")
    said = target.refused({**raw, "module.model.norm.weight": (HIDDEN + 1,)})
    assert said.message == f"1 wrong shape: module.model.norm.weight (read as model.norm.weight) is [{HIDDEN + 1}], want [{HIDDEN}]"
    assert said.names == ("module.model.norm.weight",)
    said = target.refused({**raw, "module.model.normal.weight": (HIDDEN,)})
    assert "1 unknown: module.model.normal.weight (read as model.normal.weight) (closest: model.norm.weight)" in said.message
    assert "the model's loader refused 'model.normal.weight': There is no module or parameter named" in said.message


# --- wrapper architectures ---------------------------------------------------------------------


def test_text_names_for_a_wrapper_model_are_refused_with_the_prefix_that_is_missing(wrapper: Engine) -> None:
    text = {name.removeprefix("language_model."): shape for name, shape in wrapper.shapes.items() if name.startswith("language_model.")}
    said = wrapper.refused(text)
    assert said.message.startswith(f"{len(text)} of {len(text)} unknown names lack the prefix 'language_model.'")
    assert f"{len(text)} unknown: model.embed_tokens.weight (closest: language_model.model.embed_tokens.weight)" in said.message
    assert "audio_tower.conv1.weight" in said.message and said.names == tuple(text)[:20]


def test_wrapper_names_for_a_text_model_are_refused_with_the_prefix_that_is_too_much(engine: Any) -> None:
    target = engine("qwen3")
    said = target.refused({**target.renamed(lambda name: f"language_model.{name}"), "visual.merger.weight": (8,)})
    count = len(target.shapes)
    assert said.message.startswith(
        f"{count} of {count + 1} unknown names have the prefix 'language_model.', which the engine's checkpoint has not"
    )


def test_a_prefix_that_the_models_own_loaders_take_is_taken(checkpoint: Any, tmp_path: Path) -> None:
    text = _common("GemmaForCausalLM", "gemma", tied=True)
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
        "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    config = {
        "architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma", "image_token_index": 500,
        "projection_dim": HIDDEN, "hidden_size": HIDDEN, "torch_dtype": "bfloat16",
        "text_config": text | {"num_image_tokens": 4}, "vision_config": vision,
    }  # fmt: skip
    old = Engine(written(tmp_path, config), {})
    shapes = parts(old.twin())
    target = Engine(tmp_path, shapes)
    newer = {
        name.replace("language_model.model.", "model.language_model.").replace("vision_tower.", "model.vision_tower."): shape
        for name, shape in shapes.items()
    }
    assert target.admit(newer).filled() == target.base.filled() != {}
    bare = {name.removeprefix("language_model."): shape for name, shape in shapes.items()}
    assert "lack the prefix 'language_model.'" in target.refused(bare).message


# --- coverage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [96, 32])
def test_experts_one_by_one_and_in_one_tensor_fill_the_same_places(inner: int, checkpoint: Any, tmp_path: Path) -> None:
    target = mixture(tmp_path, checkpoint, inner)
    found = target.admit(besides_experts(target) | in_one(inner))
    assert found.filled() == target.base.filled()
    assert {place for places in found.writes.values() for place in places} == {p for places in target.base.writes.values() for p in places}
    fused = Engine(tmp_path, besides_experts(target) | in_one(inner))
    assert fused.admit(target.shapes).filled() == fused.base.filled()


@pytest.mark.parametrize("kind", ["gate_up_proj", "down_proj"])
def test_experts_the_other_way_round_are_refused(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    target = mixture(tmp_path, checkpoint, 96)
    turned = {name: (shape[0], shape[2], shape[1]) if kind in name else shape for name, shape in in_one(96).items()}
    said = target.refused(besides_experts(target) | turned)
    assert f"model.layers.0.mlp.experts.{kind}" in said.message


def test_a_square_stack_of_experts_is_not_guessed(checkpoint: Any, tmp_path: Path) -> None:
    target = mixture(tmp_path, checkpoint, HIDDEN // 2)
    said = target.refused(besides_experts(target) | in_one(HIDDEN // 2))
    square = [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(LAYERS)]
    assert "no shape shows which way round" in said.message and said.names == tuple(square)
    own = Engine(tmp_path, besides_experts(target) | in_one(HIDDEN // 2))  # its own checkpoint has them so, whichever way that is
    assert own.looking().admit(own.shapes).filled() == own.base.filled()


def test_what_is_missing_of_another_layout_is_named(checkpoint: Any, tmp_path: Path) -> None:
    target = mixture(tmp_path, checkpoint, 96)
    whole = besides_experts(target) | in_one(96)
    said = target.refused({name: shape for name, shape in whole.items() if name != "model.layers.1.mlp.experts.down_proj"})
    lacking = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(EXPERTS)]
    assert said.message == f"{EXPERTS} missing: {', '.join(lacking)}"
    said = target.refused(besides_experts(target) | in_one(96, EXPERTS - 1))
    assert said.names == tuple(name for name in target.shapes if f".experts.{EXPERTS - 1}." in name)


def test_tensors_that_fill_a_part_of_what_another_fills_are_refused_by_name(checkpoint: Any, tmp_path: Path) -> None:
    target = mixture(tmp_path, checkpoint, 96)
    up = "model.layers.0.mlp.experts.2.up_proj.weight"
    said = target.refused(besides_experts(target) | in_one(96) | {up: target.shapes[up]})
    assert said.message == f"1 filled twice: {up} fills what model.layers.0.mlp.experts.gate_up_proj fills"


def test_one_projection_of_a_fused_layer_that_is_missing_is_named(engine: Any) -> None:
    target = engine("qwen3")
    for lost in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        said = target.refused({name: shape for name, shape in target.shapes.items() if name != lost})
        assert (said.message, said.names) == (f"1 missing: {lost}", (lost,))


def test_a_refusal_shows_twenty_names_of_a_kind_and_the_closest_to_each(engine: Any) -> None:
    target = engine("qwen3")
    said = target.refused({name.replace("weight", "wait"): shape for name, shape in target.shapes.items()})
    assert said.message.startswith("25 unknown: lm_head.wait (closest: lm_head.weight), ")
    assert said.message.count("(closest: ") == 20 and said.message.count(" and 5 more") == 2 and "; 25 missing: " in said.message
    assert len(said.names) == 20 and said.hint and not said.retryable


def test_what_the_loaders_pass_over_may_be_sent_or_left_out(engine: Any, checkpoint: Any) -> None:
    plain = engine("qwen3")
    table = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (16,) for layer in range(LAYERS)}
    target = Engine(checkpoint("qwen3", 1), {**plain.shapes, **table})
    assert set(target.base.specs) - set(target.base.writes) == set(table)
    assert target.admit(plain.shapes).filled() == plain.base.filled()
    assert target.admit({**plain.shapes, **table}).filled() == plain.base.filled()
    assert target.admit({**plain.shapes, **dict(list(table.items())[:1])}).filled() == plain.base.filled()
    assert "2 unknown" in plain.refused({**plain.shapes, **table}).message, "another checkpoint's metadata is no part of this one"


def test_shapes_of_packed_weights_that_three_tensors_write_are_no_overlap(engine: Any) -> None:
    target = engine("w4a16")
    assert {name.rpartition(".")[2] for name in target.base.twice} == {"weight_shape"}
    found = target.looking().admit(dict(reversed(target.shapes.items())))  # whose first is another one then
    assert found.filled() == target.base.filled() and found.twice != target.base.twice


def test_a_value_that_the_checkpoint_leaves_as_it_was_made_is_not_taken(engine: Any) -> None:
    target, scale = engine("qwen3"), "model.layers.0.self_attn.attn._k_scale"  # the loader takes it; no later update would put it back
    assert target.refused({**target.shapes, scale: ()}).message.startswith(f"1 unknown: {scale}")


def test_padding_that_the_model_declares_is_no_gap(checkpoint: Any, tmp_path: Path) -> None:
    words = VOCAB - 12  # vLLM's vocabulary comes in steps of 64
    config = json.loads((checkpoint("qwen3", 1) / "config.json").read_text()) | {"vocab_size": words}
    plain = {spec.name: spec.shape for spec in loadmap().checkpoint_specs(checkpoint("qwen3", 1))}
    target = Engine(written(tmp_path, config), {name: (words, HIDDEN) if shape[0] == VOCAB else shape for name, shape in plain.items()})
    assert dict(target.twin().named_parameters())["lm_head.weight"].shape[0] == VOCAB
    found = target.looking().admit({f"module.{name}": shape for name, shape in reversed(target.shapes.items())})
    assert found.filled()["lm_head.weight"] == words * HIDDEN


# --- tied heads --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", ["", "_orig_mod."])
def test_the_head_of_a_tied_model_may_be_sent_too(wrapped: str, engine: Any) -> None:
    from weightsync.worker import admission

    target = engine("qwen3-tied")
    found = target.admit({**target.shapes, f"{wrapped}lm_head.weight": (VOCAB, HIDDEN)})
    assert found.name(f"{wrapped}lm_head.weight") == "lm_head.weight"
    assert admission.tied_heads(found) == {"lm_head.weight": ["model.embed_tokens.weight"]}
    assert found.filled() == target.base.filled()


def test_the_head_of_a_model_that_has_none_beside_its_embedding_may_be_sent_too(tmp_path: Path) -> None:
    from weightsync.worker import admission

    folder = written(tmp_path, _common("CohereForCausalLM", "cohere", tied=True))
    shapes = parts(Engine(folder, {}).twin(), within="")
    target = Engine(folder, shapes)
    assert not target.base.aliases
    found = target.admit({**shapes, "lm_head.weight": (VOCAB, HIDDEN)})
    assert admission.tied_heads(found) == {"lm_head.weight": ["model.embed_tokens.weight"]}


def test_a_drafts_own_head_is_not_taken_for_the_tied_one(engine: Any, tmp_path: Path) -> None:
    from weightsync.worker import admission

    dense, draft = engine("qwen3-tied"), {"mtp.lm_head.weight": (VOCAB, HIDDEN)}
    assert dense.refused({**dense.shapes, **draft}).message.startswith("1 unknown: mtp.lm_head.weight")
    # This model's loader passes over all that belongs to its draft.
    config, tensors = KINDS["hybrid-gdn"](1)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name != "lm_head.weight"}
    head = {"mtp.lm_head.weight": shapes["model.embed_tokens.weight"]}
    folder = written(tmp_path, config | {"tie_word_embeddings": True})
    without, having = Engine(folder, shapes), Engine(folder, shapes | head)
    assert without.refused(shapes | head).message.startswith("1 unknown: mtp.lm_head.weight")
    assert "mtp.lm_head.weight" not in having.base.writes
    for target, offered in ((having, shapes | head), (having.looking(), shapes | head), (having, shapes)):
        found = target.admit(offered)
        assert (found.filled(), admission.tied_heads(found)) == (without.base.filled(), {})


# --- frozen ------------------------------------------------------------------------------------


def test_frozen_tensors_may_be_left_out_and_others_not(wrapper: Engine) -> None:
    text = {name: shape for name, shape in wrapper.shapes.items() if name.startswith("language_model.")}
    found = wrapper.admit(text, frozen=("audio_tower.*", "multi_modal_projector.*"))
    assert found.filled() == {path: count for path, count in wrapper.base.filled().items() if path.startswith("language_model.")}
    assert wrapper.admit(wrapper.shapes, frozen=("audio_tower.*",)) is not None  # or sent, as ever
    said = wrapper.refused(text, frozen=("audio_tower.*",))
    assert said.message == "2 missing: multi_modal_projector.linear.weight, multi_modal_projector.linear.bias"
    said = wrapper.refused(
        {name: shape for name, shape in text.items() if "lm_head" not in name}, ("audio_tower.*", "multi_modal_projector.*")
    )
    assert said.message == "1 missing: language_model.lm_head.weight"


@pytest.mark.parametrize("part", ["language_model.model.layers.0.self_attn.k_proj.weight", "audio_tower.layer_norm.weight"])
def test_a_layer_of_which_only_a_part_is_frozen_is_refused(part: str, wrapper: Engine) -> None:
    said = wrapper.refused({name: shape for name, shape in wrapper.shapes.items() if name != part}, frozen=(part,))
    assert said.message.startswith(f"1 of a layer that is frozen in part (send all of it or nothing): {part} (beside ")
    assert said.names == (part,)


def test_frozen_experts_may_come_in_another_layout(checkpoint: Any, tmp_path: Path) -> None:
    target = mixture(tmp_path, checkpoint, 96)
    frozen = ("*.experts.*",)
    assert target.admit(besides_experts(target) | in_one(96), frozen).filled() == target.base.filled()
    assert target.admit(besides_experts(target), frozen).filled() == {p: n for p, n in target.base.filled().items() if ".experts." not in p}
    layer = {name: shape for name, shape in in_one(96).items() if "gate_up" not in name}
    assert f"{2 * LAYERS * EXPERTS} of a layer that is frozen in part" in target.refused(besides_experts(target) | layer, frozen).message


def test_a_pattern_that_matches_nothing_is_an_error_at_the_start(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine.frozen: 'visaul.\*' matches no tensor"):
        engine("qwen3").admit(engine("qwen3").shapes, frozen=("model.*", "visaul.*"))


# --- a scope -----------------------------------------------------------------------------------


def of(target: Engine, *scope: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in target.shapes.items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in scope)}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen3-moe", "int8-channel", "w4a16", "mla"])
@pytest.mark.parametrize("scope", [("model.layers.1.*",), ("model.layers.0.mlp.*", "model.norm.weight"), ("*.self_attn.*",)])
def test_all_of_a_scope_is_admitted_and_fills_its_own_layers_alone(kind: str, scope: tuple[str, ...], engine: Any) -> None:
    target = engine(kind)
    found = target.admit(of(target, *scope), scope=scope)
    assert found.part and found.layers == {path.rpartition(".")[0] for path in found.filled()}
    assert found.filled().items() <= target.base.filled().items()
    assert set(found.writes) == set(of(target, *scope)) & set(target.base.writes)


def test_the_manifest_of_the_update_before_costs_no_other_look_at_the_loaders(engine: Any) -> None:
    target, scope = engine("qwen3"), ("model.layers.1.*",)
    first = target.admit(of(target, *scope), scope=scope)
    looked = target.twins
    again = target.admit({f"module.{name}": shape for name, shape in of(target, *scope).items()}, scope=scope, last=first)
    assert target.twins == looked and again.filled() == first.filled() and again.part
    assert again.name("module.model.layers.1.mlp.up_proj.weight") == "model.layers.1.mlp.up_proj.weight" and not first.names
    with pytest.raises(ManifestRefused, match="outside of the scope"):
        target.admit(of(target, *scope), scope=("model.layers.0.*",), last=first)
    target.admit(of(target, "model.layers.0.*"), scope=("model.layers.0.*",), last=first)
    assert target.twins == looked + 1


def test_a_scope_of_everything_is_a_complete_update(engine: Any) -> None:
    target = engine("qwen3")
    assert not target.admit(target.shapes, scope=("*",)).part
    assert target.refused(of(target, "model.layers.1.*"), scope=("*",)).message.startswith(f"{len(target.shapes) - 11} missing: ")


def test_what_a_scope_lacks_or_has_too_much_is_named(engine: Any) -> None:
    target, scope = engine("qwen3"), ("model.layers.1.*",)
    shapes = of(target, *scope)
    norm = "model.layers.1.input_layernorm.weight"
    said = target.refused({name: shape for name, shape in shapes.items() if name != norm}, scope=scope)
    assert (said.message, said.names) == (f"1 missing: {norm}", (norm,))
    said = target.refused({**shapes, "module.model.norm.weight": (HIDDEN,)}, scope=scope)
    assert said.message == "1 outside of the scope: module.model.norm.weight (read as model.norm.weight)"
    assert f"{len(target.shapes) - 11} outside of the scope: " in target.refused(target.shapes, scope=scope).message
    said = target.refused({**shapes, "model.layers.1.extra.weight": (HIDDEN,)}, scope=scope)
    assert "unknown: model.layers.1.extra.weight" in said.message


def test_a_scope_goes_by_the_engines_names_whatever_wraps_them(engine: Any) -> None:
    target, scope = engine("qwen3"), ("model.layers.1.*",)
    found = target.admit({f"_orig_mod.module.{name}": shape for name, shape in of(target, *scope).items()}, scope=scope)
    assert found.part and found.name("_orig_mod.module.model.layers.1.mlp.up_proj.weight") == "model.layers.1.mlp.up_proj.weight"


TORN = {
    "one of three in a fused layer": ("qwen3", ("*.layers.0.self_attn.q_proj.*",), {"k_proj.weight", "v_proj.weight"}),
    "one expert": ("qwen3-moe", ("*.layers.0.mlp.experts.1.*",), {f"experts.{e}.up_proj.weight" for e in (0, 2, 3)}),
    "weights without scales": ("int8-channel", ("*.layers.0.mlp.down_proj.weight",), {"down_proj.weight_scale"}),
}


@pytest.mark.parametrize("case", TORN)
def test_a_layer_that_is_in_a_scope_in_part_is_refused_with_what_is_left_out(case: str, engine: Any) -> None:
    kind, scope, lacking = TORN[case]
    target = engine(kind)
    said = target.refused(of(target, *scope), scope=scope)
    assert "outside of the scope, in layers that are in it with other tensors (a layer is loaded whole" in said.message
    assert all(any(name.endswith(end) for name in said.names) for end in lacking)
    assert all(name.startswith("model.layers.0.") for name in said.names)


def test_experts_of_a_scope_may_come_in_another_layout_and_bring_no_layer_in_from_outside(checkpoint: Any, tmp_path: Path) -> None:
    target, scope = mixture(tmp_path, checkpoint, 96), ("*.layers.1.mlp.experts.*",)
    stacked = {name: shape for name, shape in in_one(96).items() if ".layers.1." in name}
    assert target.admit(stacked, scope=scope).filled() == target.admit(of(target, *scope), scope=scope).filled()
    said = target.refused(in_one(96), scope=scope)
    assert "outside of the scope, in layers" in said.message and all(".layers.0." in name for name in said.names)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("model.layer.0.*", "'model.layer.0.*' matches no tensor of the engine's checkpoint, such as"),
        ("*.lora_A.*", "adapters that are not merged are no scopes: merge an adapter"),
        ("draft_model.*", "A draft model beside the target"),
    ],
)
def test_a_pattern_of_a_scope_that_matches_nothing_is_refused_with_what_it_may_be(pattern: str, said: str, engine: Any) -> None:
    target = engine("qwen3")
    assert said in str(target.refused(of(target, "model.norm*"), scope=("model.norm*", pattern)))


def test_what_the_loaders_pass_over_is_no_scope_of_a_lone_worker(tmp_path: Path) -> None:
    """A draft layer's tensors, in a checkpoint whose target does not load them. Another stage of the model may."""
    config, tensors = KINDS["hybrid-gdn"](1)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | {"mtp.fc.weight": (HIDDEN, HIDDEN)}
    target = Engine(written(tmp_path, config), shapes)
    said = target.refused(of(target, "mtp.*"), scope=("mtp.*",))
    assert said.message == "scope: of what 'mtp.*' matches nothing is loaded (the model's loaders pass over 'mtp.fc.weight')"
    assert target.admit(of(target, "mtp.*"), scope=("mtp.*",), alone=False).layers == frozenset()


def test_an_embedding_and_the_head_that_it_is_are_in_a_scope_together(checkpoint: Any, engine: Any) -> None:
    tied = engine("qwen3-tied")
    assert tied.admit(of(tied, "model.embed*"), scope=("model.embed*",)).layers == {"model.embed_tokens"}
    target = Engine(checkpoint("qwen3-tied", 1), tied.shapes | {"lm_head.weight": (VOCAB, HIDDEN)})
    for scope in (("model.embed*",), ("lm_head*",), ("lm_head*", "model.norm*")):
        said = target.refused(of(target, *scope), scope=scope)
        assert said.message == "scope: 'lm_head.weight' is the embedding (model.embed_tokens.weight), and the scope has one of the two"
        assert set(said.names) == {"lm_head.weight", "model.embed_tokens.weight"}
    both = ("lm_head*", "*.embed*")
    assert target.admit(of(target, *both), scope=both).layers == target.admit(of(target, "*embed*"), scope=both).layers


def test_a_scope_asks_for_frozen_tensors_no_more_than_a_complete_update(wrapper: Engine) -> None:
    frozen, scope = ("audio_tower.layers.*",), ("audio_tower.*",)
    shapes = {name: shape for name, shape in of(wrapper, *scope).items() if ".layers." not in name}
    assert not any(".layers." in layer for layer in wrapper.admit(shapes, frozen, scope).layers)
    assert "missing: audio_tower.layers." in wrapper.refused(shapes, scope=scope).message


# --- with values -------------------------------------------------------------------------------


def loaded(target: Engine, tensors: Mapping[str, torch.Tensor], process: bool = False) -> torch.nn.Module:
    """The model itself on a CPU, with these weights; `process` makes it what an engine serves."""
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.model_loader.reload import layerwise

    from weightsync.worker import vllm_compat

    target.config.compilation_config.static_forward_context = {}
    with vllm_compat.cold_load_context(target.config):
        model = utils.initialize_model(vllm_config=target.config)
        layerwise.record_metadata_for_reloading(model)
        model.load_weights(iter(tensors.items()))
        if process:
            utils.process_weights_after_loading(model, target.config.model_config, torch.device("cpu"))
    return model


def numbered(shapes: Shapes) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with each layer's experts in two tensors."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in (f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)):
        gate, up, down = ([tensors[f"{prefix}.{e}.{kind}_proj.weight"] for e in range(EXPERTS)] for kind in ("gate", "up", "down"))
        found[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        found[f"{prefix}.down_proj"] = torch.stack(down)
    return found


def test_each_of_two_ranks_takes_its_own_slice_of_whole_experts(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import get_tp_group

    inner, ranks = 96, []
    monkeypatch.setattr(get_tp_group(), "world_size", 2)
    for rank in (0, 1):
        monkeypatch.setattr(get_tp_group(), "rank_in_group", rank)
        target = mixture(tmp_path, checkpoint, inner)
        tensors = numbered(target.shapes)
        whole = stacked(tensors)
        found = target.admit({name: tuple(tensor.shape) for name, tensor in whole.items()})
        assert found.filled() == target.base.filled()
        one, other = loaded(target, tensors).state_dict(), loaded(target, whole).state_dict()
        assert all(torch.equal(one[path], other[path]) for path in one)
        ranks.append(other)
    expert = "model.layers.1.mlp.experts"
    w13, w2 = (
        [rank[next(path for path in rank if path.startswith(expert) and path.endswith(end))] for rank in ranks]
        for end in ("w13_weight", "w2_weight")
    )
    assert w13[0].shape == (EXPERTS, inner, HIDDEN)
    gates, ups = zip(*(part.chunk(2, dim=1) for part in w13), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], dim=1), whole[f"{expert}.gate_up_proj"])
    assert torch.equal(torch.cat(w2, dim=2), whole[f"{expert}.down_proj"])


def test_each_of_two_ranks_takes_its_own_experts_and_can_do_without_the_others(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import get_tp_group

    monkeypatch.setattr(get_tp_group(), "world_size", 2)
    inner, needed = 96, []
    for rank in (0, 1):
        monkeypatch.setattr(get_tp_group(), "rank_in_group", rank)
        target = mixture(tmp_path, checkpoint, inner, enable_expert_parallel=True)
        names = list(target.shapes)
        unused = {names[index] for index in target.base.unused(names)}
        assert unused == {name for name in names if ".experts." in name and int(name.split(".experts.")[1][0]) // (EXPERTS // 2) != rank}
        needed.append(set(names) - unused)
        other = {name: tuple(tensor.shape) for name, tensor in stacked(numbered(target.shapes)).items()}
        found = target.admit(other)
        assert found.filled() == target.base.filled() and not found.unused(other), "of a stack it takes a part"
    assert needed[0] | needed[1] == set(names)


def test_a_reload_keeps_a_layer_that_nothing_is_sent_for_and_would_empty_what_is_left_out_of_one(engine: Any, tensors: Any) -> None:
    """Why frozen tensors may be left out layer by layer only."""
    from vllm.config import set_current_vllm_config

    from weightsync.worker import vllm_compat

    target, one, two = engine("qwen3"), tensors("qwen3", 1), tensors("qwen3", 2)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()

    def reload_without(*left_out: str) -> dict[str, torch.Tensor]:
        fresh = vllm_compat.draw(target.config)[1]
        model = loaded(target, one, process=True)
        with set_current_vllm_config(target.config):
            with vllm_compat.Reload(model, target.config, fresh) as reload:
                model.load_weights((name, tensor) for name, tensor in two.items() if not any(part in name for part in left_out))
                reload.finish()
            layer = model.get_submodule("model.layers.0")
            found = dict(zip("qkv", layer.self_attn.qkv_proj(x)[0].split([128, 64, 64], dim=1), strict=True))
        return {**found, "embedding": model.get_parameter("model.embed_tokens.weight"), "norm": layer.input_layernorm.weight}

    def made(from_: Any, part: str) -> torch.Tensor:
        return x @ from_[f"model.layers.0.self_attn.{part}_proj.weight"].T

    found = reload_without("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj", "embed_tokens")
    assert all(torch.equal(found[part], made(one, part)) for part in "qkv")
    assert torch.equal(found["embedding"], one["model.embed_tokens.weight"])
    assert torch.equal(found["norm"], two["model.layers.0.input_layernorm.weight"])
    found = reload_without("layers.0.self_attn.k_proj")
    assert torch.equal(found["q"], made(two, "q")) and not found["k"].any(), "neither the old values nor the new"


# --- what no model of vLLM's shows -------------------------------------------------------------


class Toy(torch.nn.Module):
    """Two parameters on meta, and a loader of one's choice."""

    def __init__(self, load: Callable[[Any, list[tuple[str, torch.Tensor]]], None]) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.empty(4, 2, device="meta"), requires_grad=False) for _ in "ab")
        self._load = load

    def load_weights(self, weights: Any) -> None:
        self._load(self, weights)


def copy_each(model: Any, weights: Any) -> None:
    for name, tensor in weights:
        getattr(model, name.rpartition(".")[2]).copy_(tensor)


def specs(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "float32", (4, 2)) for name in names)


def test_a_loader_that_holds_all_tensors_back_is_seen_by_what_it_copies() -> None:
    found = loadmap().record(Toy(lambda model, weights: copy_each(model, list(weights))), specs("x.a", "x.b"))
    assert {name: places[0][0] for name, places in found.writes.items()} == {"x.a": "a", "x.b": "b"}


def test_a_name_that_may_mean_two_is_refused_with_both() -> None:
    from weightsync.worker import admission

    base = loadmap().record(Toy(copy_each), specs("x.module.a", "module.x.a", "b"))
    with pytest.raises(ManifestRefused, match=r"1 ambiguous: module.x.module.a may be x.module.a or module.x.a") as caught:
        admission.admit(Manifest(specs("module.x.module.a", "b")), base, lambda: Toy(copy_each), tied=False)
    assert caught.value.names == ("module.x.module.a",)


def test_a_loader_that_refuses_a_tensor_of_its_own_checkpoint_is_quoted_and_the_trainers_name_given() -> None:
    from weightsync.worker import admission

    def refuse(model: Any, weights: Any) -> None:
        for name, _ in weights:
            if name == "x.b":
                raise ValueError("scales must be equal")

    base = loadmap().record(Toy(copy_each), specs("x.a", "x.b"))
    with pytest.raises(ManifestRefused, match=r"^the model's loader refused 'x.b': scales must be equal") as caught:
        admission.admit(Manifest(specs("_orig_mod.x.b", "x.a", "x.c")), base, lambda: Toy(refuse), tied=False)
    assert caught.value.names == ("_orig_mod.x.b",) and caught.value.hint


def test_a_part_of_a_tensor_that_the_loader_leaves_is_counted() -> None:
    from weightsync.worker import admission

    def half(model: Any, weights: Any) -> None:
        for name, tensor in weights:
            getattr(model, name.rpartition(".")[2])[:1].copy_(tensor[:1])

    base = loadmap().record(Toy(lambda model, weights: copy_each(model, list(weights)[:2])), specs("x.a", "x.b", "metadata"))
    with pytest.raises(ManifestRefused, match=r"^2 missing: 6 of x.a's elements, 6 of x.b's elements. "):
        admission.admit(Manifest(specs("x.a", "x.b")), base, lambda: Toy(half), tied=False)


def test_loaders_get_the_engines_names_and_reports_the_trainers_however_tensors_are_held() -> None:
    from weightsync.transport.packing import plan_buckets
    from weightsync.worker import admission, staging, streaming

    base = loadmap().record(Toy(copy_each), specs("x.a", "x.b"))
    manifest = Manifest(specs("module.x.a", "x.b"))
    found = admission.admit(manifest, base, lambda: Toy(copy_each), tied=False)
    assert found.loaded_as() == {"module.x.a": "float32", "x.b": "float32"}
    plan = plan_buckets(manifest, 1 << 20)
    whole = staging.Whole(manifest, plan, torch.zeros(plan.stream_bytes, dtype=torch.uint8))
    passing = streaming.Passing(manifest, plan, torch.device("cpu"), time.monotonic() + 10, lambda: False)
    passing.landed(plan.buckets[0])
    feeder = threading.Thread(target=passing.hand_over, args=(plan.buckets[0].complete,), daemon=True)
    feeder.start()
    for incoming in (whole.update(found, []), passing.update(found, [])):
        taken: list[str] = []
        assert [name for name, _ in incoming.stream(taken)] == ["x.a", "x.b"]
        assert taken == ["module.x.a", "x.b"]
    skipping: list[str] = []
    assert [name for name, _ in whole.update(found, ["x.a"]).stream(skipping)] == ["x.b"]
    assert skipping == ["module.x.a", "x.b"]


def test_a_folder_without_safetensors_files_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedEngine, match=f"{tmp_path} holds no safetensors file") as caught:
        loadmap().checkpoint_specs(tmp_path)
    assert "load_format" in caught.value.hint
