"""Layers that are updated without being taken apart: which they are is learned from an update that went the general way.

The general way (`loading`) takes a layer apart, runs its loaders and its processing, and puts the result into captured storage. Many
layers come out of that as they went in: dense ones and experts in the checkpoint's own format, norms, embeddings. Of others, which
vLLM quantises while it loads, a method makes the same from loaded tensors alone (`vllm_compat.doubles`). After an
update that was proved, a layer is *planned* for manifests like that update's when

- its quantisation method is one that stores what is loaded, or one that a double may stand for; it holds nothing outside Python, no
  attention layer absorbs it, and so it is with every layer that shares a parameter with it;
- all that the load map sends to it are copies of elements as they are, and live storage holds exactly those bytes, where the loader
  put them or, in experts whose kernel wants the other order, with the two halves of a parameter's rows changed about; or
  exactly what the method makes of them;
- nothing else that the model holds has changed by that update, or only what belongs to a layer that is not planned;
- it has changed itself, or one of its kind has: of what stays the same nothing can be seen to follow. Layers without a
  quantisation method (norms) have nobody to make anything of them.

The next such update writes planned layers (copies in one go: `storage.plan`) and reloads the others; where none is left nothing
is taken apart. Everything is proved behind it as behind any update, and every `AGAIN`th goes the general way and is learned from
anew. What fails behind a plan forgets it: the second try goes the general way.

Not covered: partial updates and those that aren't staged, which go the general way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightsync.storage.pins import Pin
from weightsync.storage.plan import Plan, Run, View, runs_of
from weightsync.transport import digest
from weightsync.worker import sealing, stored, vllm_compat
from weightsync.worker.doubled import Double, double_of
from weightsync.worker.guard import Guard
from weightsync.worker.loadmap import Copy, LoadMap
from weightsync.worker.staging import Staged

logger = logging.getLogger(__name__)

#: So many updates by one plan, and the next goes the general way.
AGAIN = 64
_PREFIX = f"{sealing.MODEL}."


@dataclass
class Planned:
    """What was learned of one manifest.

    Attributes:
        plan: the copies; None where there are none.
        doubles: layers that are processed.
        config: the engine's configuration.
        layers: how many layers are planned.
        tensors: indices of tensors of which all goes into these.
        rest: the load map of the other layers.
        used: updates by this plan.
    """

    plan: Plan | None
    doubles: tuple[Double, ...]
    config: Any
    layers: int
    tensors: frozenset[int]
    rest: LoadMap
    used: int = 0

    @property
    def on_cuda(self) -> bool:
        written = [*(self.plan.memory if self.plan is not None else ()), *(tensor for one in self.doubles for tensor in one.live.values())]
        return any(tensor.is_cuda for tensor in written)

    def write(self, incoming: Staged) -> Staged:
        """Write the planned layers; returns what is left to be loaded.

        Raises:
            ApplyFailed: a layer makes something else of its weights than it did.
        """
        self.used += 1
        if self.plan is not None:
            self.plan.execute(incoming.data, incoming.offsets)
        if self.doubles:
            with vllm_compat.cold_load_context(self.config), torch.inference_mode(False):
                for double in self.doubles:
                    double.write(incoming)
        if self.on_cuda:  # staged bytes may be let go of as soon as this is told
            torch.cuda.current_stream().synchronize()
        return replace(incoming, load_map=self.rest, unused=self.tensors.union(incoming.unused))


@dataclass
class _Watched:
    """An update that goes the general way, before it was loaded: which layers it may prove, and what else the model holds."""

    key: str
    candidates: dict[str, list[str]]  # layer to the tensors that go into it
    sums: dict[int, digest.Digest]  # address of memory of the model, and its digest
    sealed: object
    changed: set[int] | None = None  # addresses, when it is proved


class Planner:
    """What one worker has learned.

    Args:
        model: the live model.
        guard: its contract, which names all that it holds.
        config: the engine's configuration.
    """

    def __init__(self, model: torch.nn.Module, guard: Guard, config: Any) -> None:
        self._model, self._guard, self._config = model, guard, config
        self._learned: dict[str, Planned] = {}
        self._sealed: object = None
        self._watched: _Watched | None = None

    def find(self, key: str) -> Planned | None:
        """The plan of updates of this key; None where the general way is to be taken.

        Args:
            key: of the manifest and of how it is sent: the bucket plan's hash.
        """
        self._watched = None
        if self._sealed is not self._guard.sealed:  # captured anew: what graphs read may lie elsewhere
            self._learned, self._sealed = {}, self._guard.sealed
        found = self._learned.get(key)
        if found is not None and found.used >= AGAIN:
            del self._learned[key]
            return None
        return found if found is not None and found.layers else None

    def forget(self) -> None:
        """Learn anew."""
        self._learned, self._watched = {}, None

    def watch(self, key: str, incoming: Staged) -> None:
        """An update of this key is about to be loaded the general way."""
        self._watched = None
        if key in self._learned or vllm_compat.whole_only(self._model):
            return
        candidates = dict(_candidates(self._model, incoming))
        self._watched = _Watched(key, candidates, self._sums() if candidates else {}, self._guard.sealed)

    def proved(self) -> None:
        """The update that was watched is proved, and the engine stands still: what has changed by it."""
        if (watched := self._watched) is not None:
            now = self._sums() if watched.candidates else {}
            watched.changed = {address for address in watched.sums if now.get(address) != watched.sums[address]}

    def learn(self, incoming: Staged) -> None:
        """That update counts, and its bytes are there: which of its layers are nothing but copies."""
        watched, self._watched = self._watched, None
        if watched is None or watched.changed is None or watched.sealed is not self._guard.sealed:
            return
        copies: dict[str, list[tuple[Run, torch.Tensor]]] = {}
        doubles: dict[str, Double] = {}
        changed = watched.changed
        memory = self._filled(incoming.load_map)
        doubtful = self._doubtful(changed.difference(*memory.values()), incoming.load_map)
        if doubtful is not None:
            shown = self._shown({layer for layer in watched.candidates if memory[layer] & changed})
            candidates = {layer: names for layer, names in watched.candidates.items() if layer in shown and layer not in doubtful}
            copies, doubles = self._proved(candidates, incoming)
        self._learned = dict([*self._learned.items(), (watched.key, self._planned(copies, doubles, incoming))][-2:])

    def _shown(self, changed: set[str]) -> set[str]:
        """Layers of which it was seen what follows from a change: those that changed, their like, and those without a method."""
        modules = vllm_compat.plain_modules(self._model)
        kinds = {path: (type(module), type(getattr(module, "quant_method", None))) for path, module in modules.items()}
        seen = {kinds[layer] for layer in changed}
        return {path for path, kind in kinds.items() if kind in seen or kind[1] is type(None)}

    def _filled(self, load_map: LoadMap) -> dict[str, set[int]]:
        """Addresses of the memory that each of these layers is loaded into, and of what a double would make."""
        live, modules, found = live_tensors(self._model), vllm_compat.plain_modules(self._model), dict[str, set[int]]()
        doubles = {layer for layer in load_map.layers & modules.keys() if vllm_compat.requantises(modules[layer])}
        for path in load_map.filled().keys() & live.keys() | {path for path in live if _layer(path) in doubles}:
            found.setdefault(_layer(path), set()).add(live[path].untyped_storage().data_ptr())
        return found

    def _doubtful(self, changed: set[int], load_map: LoadMap) -> set[str] | None:
        """Layers that hold something else that has changed; None where it can't be said whose it is.

        Args:
            changed: addresses of what is not copied.
        """
        layers, absorbing, found = load_map.layers, vllm_compat.absorbing(self._model), set()
        for pin in self._pins():
            if pin.address in changed:
                owner = _owner(pin.path, layers | absorbing.keys())
                if owner is None or (owner in absorbing and not absorbing[owner] & layers):
                    logger.info("updates go the general way: %s changed with one, and is no layer's that was loaded", pin.path)
                    return None
                found.add(owner)
        return found

    def _pins(self) -> Iterator[Pin]:
        """What the model holds, but for caches of keys and values."""
        for path, pin in self._guard.pins.items():
            if path.startswith(_PREFIX) and pin.address and vllm_compat.KV_CACHE not in path:
                yield pin

    def _sums(self) -> dict[int, digest.Digest]:
        """Digests of all memory of the model, by its address."""
        others = {pin.address: pin for pin in self._pins()}
        found: dict[int, digest.Digest] = {}
        for device in {pin.device for pin in others.values()}:
            alike = {address: pin for address, pin in others.items() if pin.device == device}
            batch = digest.Batch(len(alike), device)
            for pin in alike.values():
                batch.add(_memory(pin.storage, device))
            found |= dict(zip(alike, batch.results(), strict=True))
        return found

    def _proved(
        self, candidates: dict[str, list[str]], incoming: Staged
    ) -> tuple[dict[str, list[tuple[Run, torch.Tensor]]], dict[str, Double]]:
        """Of layers that hold what was loaded, the runs and where they go; and those that hold what a double makes of it."""
        index = {incoming.load_map.name(spec.name): at for at, spec in enumerate(incoming.manifest.tensors)}
        live, modules = live_tensors(self._model), vllm_compat.plain_modules(self._model)
        found: dict[str, list[tuple[Run, torch.Tensor]]] = {}
        doubles: dict[str, Double] = {}
        with vllm_compat.cold_load_context(self._config), torch.inference_mode(False):
            for layer, names in candidates.items():
                copies = [(index[name], copy) for name in names for copy in incoming.load_map.copies[name] if _layer(copy.path) == layer]
                if vllm_compat.requantises(modules[layer]):
                    if (double := double_of(layer, modules[layer], copies, incoming)) is not None:
                        doubles[layer] = double
                elif (runs := _layer_runs(copies, live, incoming)) is not None:
                    found[layer] = runs
        return found, doubles

    def _planned(self, copies: dict[str, list[tuple[Run, torch.Tensor]]], doubles: dict[str, Double], incoming: Staged) -> Planned:
        load_map, planned = incoming.load_map, copies.keys() | doubles.keys()
        left = {name: [at for at in places if _layer(at[0]) not in planned] for name, places in load_map.writes.items()}
        rest = replace(load_map, writes={name: places for name, places in left.items() if places}, part=True)
        names = [load_map.name(spec.name) for spec in incoming.manifest.tensors]
        tensors = frozenset(index for index, name in enumerate(names) if name in load_map.writes and name not in rest.writes)
        plan = Plan([copy for runs in copies.values() for copy in runs]) if copies else None
        if plan is not None:
            plan.prepare(incoming.data, incoming.offsets)
        text = "of %d layers %d take updates as copies (%d, of %d bytes) and %d as what is made of them beside the layer"
        sizes = (len(plan), plan.nbytes) if plan is not None else (0, 0)
        logger.info(text, len(load_map.layers), len(copies), *sizes, len(doubles))
        return Planned(plan, tuple(doubles.values()), self._config, len(planned), tensors, rest)


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the paths that they have in a model without adapters."""
    return {vllm_compat.plain_path(path): tensor for path, tensor in stored.registered(model).items()}


def _candidates(model: torch.nn.Module, incoming: Staged) -> Iterator[tuple[str, list[str]]]:
    """Layers that may turn out to be copies, and the tensors that go into them."""
    load_map = incoming.load_map
    modules, live = vllm_compat.plain_modules(model), live_tensors(model)
    absorbed = set().union(*vllm_compat.absorbing(model).values())
    unfit = {path for path, module in modules.items() if path in absorbed or not _fits(module)}
    sharing: dict[int, set[str]] = {}
    for path, tensor in live.items():
        sharing.setdefault(tensor.untyped_storage().data_ptr(), set()).add(_layer(path))
    into: dict[str, list[str]] = {}
    for name, places in load_map.writes.items():
        for layer in {_layer(place[0]) for place in places}:
            into.setdefault(layer, []).append(name)
    for layer, names in into.items():
        own = {place[0] for name in names for place in load_map.writes[name] if _layer(place[0]) == layer}
        if layer not in modules or not own <= live.keys():
            continue
        sharers = set().union(*(sharing[live[path].untyped_storage().data_ptr()] for path in own))
        if sharers & unfit or any(name in incoming.skipped or name in load_map.twice for name in names):
            continue
        if all(_only_copies(load_map, name, layer) for name in names):
            yield layer, names


def _fits(module: torch.nn.Module) -> bool:
    return vllm_compat.keeps_what_is_loaded(module) or vllm_compat.requantises(module)


def _only_copies(load_map: LoadMap, name: str, layer: str) -> bool:
    writes = sum(_layer(place[0]) == layer for place in load_map.writes[name])
    return writes == sum(_layer(copy.path) == layer for copy in load_map.copies.get(name, ()))


def _layer_runs(
    copies: Sequence[tuple[int, Copy]], live: dict[str, torch.Tensor], incoming: Staged
) -> list[tuple[Run, torch.Tensor]] | None:
    """All copies of a layer as runs; None where its parameters hold something else than what they bring."""
    found: list[tuple[Run, torch.Tensor]] = []
    for path in dict.fromkeys(copy.path for _, copy in copies):
        parameter = live[path]
        own = [(index, copy) for index, copy in copies if copy.path == path]
        sent = [incoming.tensor(index) for index, _ in own]
        if all(stored.holds(parameter, copy, tensor) for (_, copy), tensor in zip(own, sent, strict=True)):
            placed = [copy for _, copy in own]
        else:
            placed = [_halves_changed(copy, parameter) for _, copy in own]
            if not all(stored.holds(parameter, copy, tensor) for copy, tensor in zip(placed, sent, strict=True)):
                return None
        into, first = _memory(parameter.untyped_storage(), parameter.device), parameter.storage_offset()
        for (index, _), copy in zip(own, placed, strict=True):
            view: View = (first + copy.into[0], *copy.into[1:])
            if (runs := runs_of(index, copy.source, view, parameter.element_size())) is None:
                return None
            found += [(run, into) for run in runs]
    return found


def _halves_changed(copy: Copy, parameter: torch.Tensor) -> Copy:
    """The same copy into the other half of the rows of each expert: kernels differ in whether gate or up comes first."""
    if parameter.dim() != 3 or parameter.shape[1] % 2:
        return copy
    offset, shape, stride = copy.into
    half, step = parameter.shape[1] // 2, parameter.stride(1)
    row = offset % parameter.stride(0) // step if step and parameter.stride(0) else 0
    return replace(copy, into=(offset + (half if row < half else -half) * step, shape, stride))


def _memory(storage: Any, device: torch.device) -> torch.Tensor:
    """All bytes of a storage, shape [bytes], uint8."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def _layer(path: str) -> str:
    return path.rpartition(".")[0]


def _owner(path: str, layers: Collection[str]) -> str | None:
    """Which of these layers a path of the contract lies in: the innermost."""
    at = vllm_compat.plain_path(path.removeprefix(_PREFIX))
    while at:
        if at in layers:
            return at
        at = at[: max(at.rfind("."), at.rfind("["), 0)]
    return None
