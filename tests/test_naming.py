"""A trainer's names against an engine's: what wrappers, adapters and prefixes leave in them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weightsync.worker.naming import WRAPPERS, canonical, prefix_advice, resolve

NAME = "model.layers.0.self_attn.q_proj.weight"
KNOWN = {
    *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    *(f"model.layers.{n}.self_attn.{p}.weight" for n in range(2) for p in ("q_proj", "k_proj")),
}

#: Words that make names, wrappers among them so that they meet in every order.
WORDS = st.sampled_from(
    ["model", "layers", "0", "norm", "weight", "base_model", "modules_to_save", "default", "original_module", *WRAPPERS]
)
NAMES = st.lists(WORDS, min_size=1, max_size=8).map(".".join)


@pytest.mark.parametrize(
    "nested", list(itertools.permutations(["module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"], 2))
)
@pytest.mark.parametrize("at", range(6))
def test_wrappers_are_taken_off_in_any_order_and_anywhere_in_the_path(nested: tuple[str, ...], at: int) -> None:
    path = NAME.split(".")
    raw = ".".join([*path[:at], *nested, *path[at:]])
    assert resolve([raw], KNOWN).names == {raw: NAME}


@pytest.mark.parametrize(
    "raw",
    [
        f"base_model.model.{NAME}",
        f"module.base_model.model.{NAME}",
        f"base_model._fsdp_wrapped_module.model._orig_mod.{NAME}",
        "base_model.model.model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.base_layer.weight",
        "model.layers.0.self_attn.q_proj.modules_to_save.default.weight",
        "model.layers.0.self_attn.q_proj._fsdp_wrapped_module.modules_to_save.default.module.weight",
        "base_model.model.base_model.model.model.layers.0.self_attn.q_proj.base_layer.base_layer.weight",
    ],
)
def test_peft_segments_lead_to_the_module_itself(raw: str) -> None:
    assert resolve([raw], KNOWN).names == {raw: NAME}


def test_only_the_modules_that_have_a_base_layer_segment_lose_it() -> None:
    mixed = [name.replace("q_proj", "q_proj.base_layer") for name in sorted(KNOWN)]
    found = resolve(mixed, KNOWN)
    assert {found.names.get(raw, raw) for raw in mixed} == KNOWN
    assert sorted(found.names) == [raw for raw in mixed if "base_layer" in raw]


def test_a_segment_of_the_engines_own_names_stays_and_what_is_around_it_goes() -> None:
    known = {"module.encoder.weight", "head.base_layer.weight", "model.module"}
    meant = {
        "_orig_mod.module.encoder.weight": "module.encoder.weight",
        "module.module.encoder.weight": "module.encoder.weight",
        "head.base_layer._orig_mod.weight": "head.base_layer.weight",
        "model._orig_mod.module": "model.module",
    }
    assert resolve(sorted(known), known).names == {}
    assert {raw: resolve([raw], known).names[raw] for raw in meant} == meant


def test_a_name_that_may_mean_two_of_the_engines_is_not_guessed() -> None:
    found = resolve(["module.encoder.module.weight"], ["encoder.module.weight", "module.encoder.weight"])
    assert found.ambiguous == {"module.encoder.module.weight": ["encoder.module.weight", "module.encoder.weight"]}
    assert found.names == {}


def test_two_names_that_mean_one_are_both_named() -> None:
    raw = [NAME, f"_orig_mod.{NAME}", f"module.{NAME}", "lm_head.weight"]
    assert resolve(raw, KNOWN).collapsed == {NAME: raw[:3]}
    unknown = ["a.modules_to_save.one.weight", "a.modules_to_save.two.weight"]  # two adapters, and a module the checkpoint has not
    assert resolve(unknown, KNOWN).collapsed == {"a.weight": unknown}


def test_parts_of_an_adapter_and_untrained_copies_are_told_apart() -> None:
    kinds = ["lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight", "lora_embedding_A.default"]
    parts = [f"base_model.model.model.layers.0.self_attn.q_proj.{kind}" for kind in kinds]
    copies = ["base_model.model.lm_head.original_module.weight"]
    found = resolve([*parts, *copies, "base_model.model.lm_head.modules_to_save.default.weight"], KNOWN)
    assert (found.adapter, found.untrained) == (parts, copies)
    assert list(found.names.values()) == ["lm_head.weight"]
    own = {"time.lora_A.weight", "original_module.weight"}  # a checkpoint may have such names itself
    assert resolve(own, own) == resolve([], own)
    assert set(resolve([f"module.{name}" for name in own], own).names.values()) == own


@pytest.mark.parametrize(
    ("unknown", "known", "said"),
    [
        (sorted(KNOWN), {f"language_model.{name}" for name in KNOWN}, "7 of 7 unknown names lack the prefix 'language_model.'"),
        ([f"policy.{name}" for name in sorted(KNOWN)], KNOWN, "7 of 7 unknown names have the prefix 'policy.', which the engine's"),
        (
            [name for name in sorted(KNOWN) if name.startswith("model.")],
            {name.replace("model.", "model.language_model.") for name in KNOWN},
            "6 of 6 unknown names have the prefix 'model.' where the engine's checkpoint has 'model.language_model.'",
        ),
    ],
)
def test_a_prefix_that_differs_is_named_with_an_example(unknown: list[str], known: set[str], said: str) -> None:
    advice = prefix_advice(unknown, known)
    assert advice.startswith(said)
    assert repr(unknown[0]) in advice or repr(unknown[-1]) in advice


@pytest.mark.parametrize("unknown", [[], ["weight"], ["other.thing", NAME + "x"], [f"a.{NAME}", "x.y", "z.w"], [f"a.{NAME}"]])
def test_names_without_a_common_prefix_get_no_advice(unknown: list[str]) -> None:
    assert prefix_advice(unknown, KNOWN) == ""


@given(NAMES)
def test_taking_wrappers_off_twice_is_taking_them_off_once(name: str) -> None:
    plain = canonical(name)
    assert canonical(plain) == plain
    assert plain.split(".")[-1] == name.split(".")[-1]
    assert not WRAPPERS & set(plain.split(".")[:-1])


@given(st.sets(NAMES, max_size=6), st.lists(NAMES, max_size=6))
def test_a_name_that_the_engine_knows_is_never_changed(known: set[str], others: list[str]) -> None:
    found = resolve([*known, *others], known)
    assert not known & set(found.names)
    assert not known & {*found.ambiguous, *found.adapter, *found.untrained}


@given(st.sets(NAMES, max_size=6), st.sets(NAMES, max_size=8))
def test_names_that_collapse_are_always_found(known: set[str], offered: set[str]) -> None:
    found = resolve(sorted(offered), known)
    meant = [found.names.get(name, name) for name in sorted(offered)]
    assert (len(set(meant)) < len(meant)) == bool(found.collapsed)
    for name, raw in found.collapsed.items():
        assert sorted(raw) == [one for one in sorted(offered) if found.names.get(one, one) == name]


@given(st.sets(NAMES, min_size=1, max_size=6), st.data())
def test_wrapping_a_known_name_leads_back_to_it_or_is_said_to_be_ambiguous(known: set[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(known)))
    *path, own = name.split(".")
    for wrapper in data.draw(st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1, max_size=3)):
        path.insert(data.draw(st.integers(0, len(path))), wrapper)
    raw = ".".join([*path, own])
    assume(raw not in known and "modules_to_save" not in path)  # a wrapper right behind that stands where the adapter's name does
    found = resolve([raw], known)
    assert found.names.get(raw) == name or name in found.ambiguous[raw]
