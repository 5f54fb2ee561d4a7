"""One load of an update's tensors into the live model, by the model's own loaders, and whether it was complete.

Not covered: what follows the weights (cached values, repair, graphs); that is the applier's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from weightsync.errors import ApplyFailed, VerdictNotOk, WeightSyncError
from weightsync.storage.contract import Place
from weightsync.storage.owners import Walk
from weightsync.storage.pins import places
from weightsync.worker import vllm_compat
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.staging import Staged
from weightsync.worker.stored import registered
from weightsync.worker.streaming import Streamed


def load(model: torch.nn.Module, vllm_config: Any, fresh: Any, incoming: Staged | Streamed, counts: dict[str, int]) -> None:
    """Write an update into live storage. The engine must be paused.

    Args:
        model: the live model.
        vllm_config: the engine's configuration.
        fresh: the model's blueprint (`vllm_compat.draw`).
        incoming: what to load.
        counts: what was done is added here, also when it fails.

    Raises:
        ApplyFailed: a loader or a layer's processing raised, a tensor came twice or was left behind, or a layer is incomplete.
            No layer is left half restored; values are a mixture of old and new.
    """
    taken: list[str] = []
    loaded = False
    counts["loaders_restored"] = fresh.restore_loaders(model)
    reload = vllm_compat.Reload(model, vllm_config, fresh, incoming.load_map.layers if incoming.load_map.part else None)
    try:
        with reload:
            model.load_weights(receipts(incoming, taken))
            counts |= require_complete(incoming, taken, reload.waiting())
            loaded = True
            reload.finish()
    except WeightSyncError:
        raise
    except Exception as exc:
        if loaded:
            raise ApplyFailed(f"all tensors are loaded, and processing them failed: {type(exc).__name__}: {exc}") from exc
        tensors = incoming.manifest.tensors
        at = tensors[min(len(taken), len(tensors) - 1)].name
        raise ApplyFailed(f"loading stopped at {at!r}: {type(exc).__name__}: {exc}", names=[at]) from exc
    finally:
        counts |= reload.counts


def receipts(incoming: Staged | Streamed, taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """An update's stream, of which each tensor may come once, and no other.

    Raises:
        ApplyFailed: before the loader is given what is too much.
    """
    owed = {incoming.load_map.name(spec.name) for spec in incoming.manifest.tensors}
    for name, tensor in incoming.stream(taken):
        if name not in owed:
            raise ApplyFailed(f"{name!r} came twice, or is no part of the update", names=[name])
        owed.remove(name)
        yield name, tensor


def require_complete(incoming: Staged | Streamed, taken: list[str], waiting: dict[str, int]) -> dict[str, int]:
    """Every tensor was taken from the stream, and every waiting layer has all that the map gives it.

    Args:
        taken: names that the loader has taken.
        waiting: module path to elements loaded, of layers that were not processed.

    Returns:
        How many tensors and layers that was said of.

    Raises:
        ApplyFailed: with the names.
    """
    specs = incoming.manifest.tensors
    came = set(taken)
    if left := [spec.name for spec in specs if spec.name not in came]:
        raise ApplyFailed(f"the loader left {len(left)} tensor(s) behind: {', '.join(left[:20])}", names=left)
    want: dict[str, int] = {}
    for path, count in incoming.load_map.filled().items():
        layer = path.rpartition(".")[0]
        want[layer] = want.get(layer, 0) + count
    short = {
        layer: f"{layer} ({loaded} of {want[layer]} elements)"
        for layer, loaded in waiting.items()
        if 0 < want.get(layer, 0) and loaded < want[layer] and not _loaded_directly(incoming.load_map, layer)
    }
    if short:
        raise _incomplete(incoming, short)
    return {"tensors": len(taken), "layers": len(want)}


def _incomplete(incoming: Staged | Streamed, short: dict[str, str]) -> ApplyFailed:
    """What is missing from layers, by the names of the checkpoint; `short` has the layers, with how to say them."""
    sent = {incoming.load_map.name(spec.name) for spec in incoming.manifest.tensors}
    missing: list[str] = []
    said = []
    for layer, text in short.items():
        into = [name for name, places in incoming.load_map.writes.items() if any(place[0].rpartition(".")[0] == layer for place in places)]
        absent = [name for name in into if name not in sent]
        missing += absent or into
        said.append(f"{text}: {', '.join((absent or into)[:5])} {'did not come' if absent else 'came, and a loader passed over some'}")
    return ApplyFailed(f"{len(short)} layer(s) are incomplete: {'; '.join(said[:20])}", names=list(dict.fromkeys(missing)))


def registered_places(model: torch.nn.Module) -> dict[str, Place]:
    """Where every registered parameter and buffer lies, and how."""
    return places(Walk(registered(model)))


def unfinished(model: torch.nn.Module, seal: Mapping[str, Place]) -> VerdictNotOk | None:
    """Layers that a load has left in pieces, and tensors that lie otherwise than at the start; None when there are none."""
    waiting, now = vllm_compat.reload_waiting(model), registered_places(model)
    changed = sorted(path for path in seal.keys() | now.keys() if seal.get(path) != now.get(path))
    bad = [*waiting, *changed]
    if not bad:
        return None
    return VerdictNotOk(
        f"{len(waiting)} layer(s) unfinished, {len(changed)} tensor(s) moved or changed layout: {', '.join(bad[:20])}",
        hint="Sync again; if it comes back, restart this engine and report its model",
        names=bad,
    )


def rewritten(model: torch.nn.Module, base: LoadMap, left_out: Collection[str]) -> set[int]:
    """Addresses of the storages that every complete update writes.

    Args:
        base: of the engine's checkpoint.
        left_out: tensors that an update may lack.
    """
    paths = {place[0] for name, written in base.writes.items() if name not in left_out for place in written}
    return {tensor.untyped_storage().data_ptr() for path, tensor in registered(model).items() if vllm_compat.plain_path(path) in paths}


def _loaded_directly(load_map: LoadMap, layer: str) -> bool:
    """Whether all that the map sends to this layer goes to tensors which vLLM writes in place, uncounted."""
    paths = [path for path in load_map.filled() if path.rpartition(".")[0] == layer]
    return all(path.rpartition(".")[2] in vllm_compat.WRITTEN_IN_PLACE for path in paths)
