"""Partial updates on vLLM's real reload, in an engine's process: what is in the scope follows, and nothing else is touched.

For each kind of model one engine is started on checkpoint A, and a cold one on a mixture: B's
tensors within a scope, A's outside. Behind an update of the scope the first must hold and
answer what the second does, to the bit; layers outside of it are neither taken apart
nor processed, and hold the bytes that they held.

Not covered: a fleet's part (`test_ledger.py`, `test_scope.py`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file

from tests import faulty
from tests.bench import Way
from tests.fleets import ENGINE_ARGS
from tests.peers import Peer, engine_process
from weightsync.check.engine import OURS
from weightsync.worker.stored import registered

pytestmark = pytest.mark.engine

#: Kind to a scope, and to what is processed outside of its layers since it derives from them.
KINDS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "qwen3": (("model.layers.0.*", "model.norm.weight"), set()),
    "qwen3-tied": (("model.embed_tokens.*", "model.layers.1.mlp.*"), {"lm_head"}),
    "qwen3-moe": (("model.layers.1.mlp.experts.*",), set()),
    "int8-channel": (("model.layers.1.*",), set()),
    "mla": (("model.layers.0.self_attn.*",), {"model.layers.0.self_attn.mla_attn.mla_attn"}),
}
QUICK = "qwen3-moe"
SECONDS = 200.0
PROCESS = "process_weights_after_loading"


def mixed(folder: Path, base: Path, other: Path, scope: tuple[str, ...]) -> Path:
    """A checkpoint with the other's tensors within a scope."""
    shutil.copytree(base, folder)
    new = within(load_file(other / "model.safetensors"), scope)
    save_file(load_file(base / "model.safetensors") | new, folder / "model.safetensors", {"format": "pt"})
    return folder


def within(tensors: dict[str, Any], scope: tuple[str, ...]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in scope)}


# --- in the engine's process ------------------------------------------------------------------------


@contextlib.contextmanager
def watched(model: Any, prepared: set[str], processed: set[str]) -> Iterator[None]:
    """Notes which layers a reload takes apart and which are processed."""
    from vllm.model_executor.model_loader.reload import layerwise

    paths = {layer: path for path, layer in model.named_modules()}
    restore = layerwise.restore_layer_on_meta

    def noting(stock: Callable[..., Any], path: str | None) -> Callable[..., Any]:
        def process(*args: Any, **kwargs: Any) -> Any:
            processed.add(paths.get(args[0], "") if path is None else path)
            return stock(*args, **kwargs)

        return process

    with contextlib.ExitStack() as stack:
        note = lambda layer, info: prepared.add(paths[layer]) or restore(layer, info)  # type: ignore[func-returns-value]  # noqa: E731
        stack.enter_context(patch.object(layerwise, "restore_layer_on_meta", note))
        # Some methods are modules too; each is asked to process a layer.
        both = [*paths.items(), *((getattr(layer, "quant_method", None), None) for layer in paths)]
        owners = {id(owner): (owner, path) for owner, path in both if callable(getattr(owner, PROCESS, None))}
        for owner, at in owners.values():
            vars(owner)[PROCESS] = noting(getattr(owner, PROCESS), at)
            stack.callback(vars(owner).pop, PROCESS)
        yield


def partial(
    state: dict[str, Any], weights: str, scope: tuple[str, ...], fault: str, way: Way, derived: Collection[str] = ()
) -> dict[str, Any]:
    """One update of a scope; which layers were taken apart and processed, and what changed outside of the layers that it fills.

    Args:
        derived: layers outside of it that derive from those.
    """
    bench, prepared, processed = state["bench"], set[str](), set[str]()
    before = faulty.look(state)
    with watched(state["model"], prepared, processed):
        report = bench.update(within(state["tensors"][weights], scope), faulty.FAULTS[fault], way)
    after = faulty.look(state)
    layers = bench.applier._map.layers
    follow = tuple(f"model.{layer}." for layer in {*layers, *derived})
    tensors = registered(state["model"])
    # A parameter may have several paths: an embedding that is the head, a norm that attention refers to.
    filled = {tensor.data_ptr() for path, tensor in tensors.items() if path.rpartition(".")[0] in {*layers, *derived}}
    outside = [path for path, tensor in tensors.items() if tensor.data_ptr() not in filled]
    changed = [path for path in outside if before["registered"][path] != after["registered"][path]]
    changed += [path for path in before["owned"] if not path.startswith(follow) and before["owned"][path] != after["owned"].get(path)]
    return {**report, "layers": layers, "prepared": prepared, "processed": processed, "changed": changed, "after": after}


# --- the tests --------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(kind: str, scope: tuple[str, ...], checkpoint: Any, folder: Path) -> Iterator[tuple[Peer, Any]]:
    """An engine on A that holds A, and what cold ones on A (`a`) and on the mixture (`b`) hold and say."""
    first, second, third = (checkpoint(kind, seed) for seed in (1, 2, 3))
    folders = {"a": first, "b": mixed(folder / "mixed", first, second, scope), "c": third}
    arguments = {**ENGINE_ARGS, "enable_prefix_caching": False}
    with engine_process() as peer:
        yield peer, peer.call(faulty.start, folders, arguments, OURS, seconds=SECONDS)


def require_equal(seen: Any, cold: Any) -> None:
    assert seen["outputs"] == cold["outputs"]
    assert {path for part in ("registered", "owned") for path in seen[part] if seen[part][path] != cold[part].get(path)} == set()


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == QUICK else pytest.mark.slow) for kind in KINDS])
def test_a_scope_follows_to_the_bit_and_nothing_outside_of_it_is_touched(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    scope, derived = KINDS[kind]
    with started(kind, scope, checkpoint, tmp_path) as (peer, cold):
        assert cold["a"]["outputs"] != cold["b"]["outputs"]
        for way in (Way(scope=scope, retain=True, compared=True), Way(scope=scope, stage="none", tries=1)):
            for weights, name in (("b", "b"), ("a", "a")):
                done = peer.call(partial, weights, scope, "none", way, derived, seconds=SECONDS)
                assert done["state"] == "verified", done["error"]
                assert done["changed"] == [], "outside of the scope"
                assert {path.replace(".base_layer", "") for path in done["prepared"]} <= done["layers"] | derived
                assert done["processed"] and done["processed"] <= done["layers"] | derived
                assert derived <= done["processed"]
                require_equal(done["after"], cold[name])
        after = peer.call(faulty.after, True, False)
        assert after["changed"] == {} and after["ours"] == []


@pytest.mark.slow
def test_going_back_behind_partial_updates_restores_all_that_counted(checkpoint: Any, tmp_path: Path) -> None:
    """What is kept is the complete update with the partial one merged into it, whichever of the two failed behind."""
    scope = KINDS["qwen3"][0]
    with started("qwen3", scope, checkpoint, tmp_path) as (peer, cold):
        kept = Way(retain=True)
        assert peer.call(partial, "a", ("*",), "none", kept)["state"] == "verified"
        within_scope = Way(retain=True, scope=scope)
        assert peer.call(partial, "b", scope, "none", within_scope)["state"] == "verified"
        for part, way in (("*",), kept), (scope, within_scope):
            done = peer.call(partial, "c", part, "verify raises", way)
            assert done["state"] == "failed" and done["checks"]["rolled_back"] == 1 and not done["wrote"]
            require_equal(done["after"], cold["b"])
        assert peer.call(faulty.after, False, True)["staging"] == 1, "one copy is kept, not one for each update"
        done = peer.call(partial, "a", scope, "none", within_scope)
        require_equal(done["after"], cold["a"])


@pytest.mark.slow
def test_a_partial_update_that_failed_leaves_no_mixture_that_counts(checkpoint: Any, tmp_path: Path) -> None:
    """Half of it written, and no way back: nothing partial is taken before a complete update has been proved."""
    scope = KINDS["qwen3"][0]
    with started("qwen3", scope, checkpoint, tmp_path) as (peer, cold):
        way = Way(scope=scope)
        done = peer.call(partial, "c", scope, "loader raises at n/2", way)
        assert done["state"] == "failed" and done["wrote"] and done["changed"] == []
        for _ in range(2):
            refused = peer.call(partial, "b", scope, "none", way)
            assert refused["state"] == "refused" and refused["error"]["code"] == "base_refused"
            assert "this worker holds no proved update" in refused["error"]["message"]
        assert peer.call(partial, "a", ("*",), "none", Way())["state"] == "verified"
        done = peer.call(partial, "b", scope, "none", way)
        require_equal(done["after"], cold["b"])


REFUSED = {
    "half of a fused layer": (("model.layers.0.self_attn.q_proj.weight",), "k_proj.weight"),
    "half of two": (("*.mlp.up_proj.*",), "gate_proj.weight"),
    "another scope than is sent": (("model.layers.1.*", "model.norm.weight"), ""),
}


@pytest.mark.slow
def test_a_scope_that_tears_a_layer_is_refused_with_names_and_changes_nothing(checkpoint: Any, tmp_path: Path) -> None:
    with started("qwen3", ("model.norm.weight",), checkpoint, tmp_path) as (peer, cold):
        for scope, named in REFUSED.values():
            sent = scope if named else ("model.layers.0.*",)
            done = peer.call(partial, "b", sent, "none", Way(scope=scope))
            assert done["state"] == "refused" and done["error"]["code"] == "manifest_refused"
            assert named in done["error"]["message"] and "outside of the scope" in done["error"]["message"]
            require_equal(done["after"], cold["a"])
