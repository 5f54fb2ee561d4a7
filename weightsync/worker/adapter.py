"""The adapter that a worker serves with: what of an update is one, whether the engine can take it, what it was before.

A LoRA adapter travels as pairs of tensors for each layer (`manifest.Adapter`) through manifest, staging, digests and
votes as weights do. It is put into the engine's slot when it is applied, whole, so one that is cut over several buckets
is never there in part; and nothing of the weights is touched. What the engine has said counts stays here, to come back to;
it takes some megabytes. A complete update without an adapter empties the slot.

Not covered: layers other than linear ones, and all that is no low-rank pair (DoRA's magnitudes, biases, modules that are trained
as a whole): refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weightsync.errors import ApplyFailed, BaseRefused, ManifestRefused, VerdictNotOk
from weightsync.protocol import Adapter, Manifest, TensorSpec
from weightsync.worker import naming
from weightsync.worker.naming import HALVES, TAKES

_SHOWN = 20
_FLOATS = ("bfloat16", "float16", "float32")
#: (layer of the checkpoint, which half) to the tensor.
Pairs = Mapping[tuple[str, str], torch.Tensor]


class Layer(Protocol):
    """A layer that can be adapted (`vllm_compat.adapters.Target`)."""

    @property
    def inputs(self) -> int: ...

    @property
    def outputs(self) -> int: ...


class Slot(Protocol):
    """What holds an adapter in an engine (`vllm_compat.AdapterSlot`)."""

    max_rank: int
    dtype: torch.dtype

    @property
    def targets(self) -> Mapping[str, Layer]: ...

    def path(self, layer: str) -> str: ...

    def write(self, tensors: Pairs) -> None: ...

    def differing(self, tensors: Pairs) -> tuple[int, list[str]]: ...


@dataclass(frozen=True)
class Parts:
    """A manifest, of which some may be parts of an adapter.

    Attributes:
        weights: the rest.
        adapter: parts of it.
    """

    weights: tuple[TensorSpec, ...]
    adapter: tuple[TensorSpec, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Of the adapter's."""
        return frozenset(spec.name for spec in self.adapter)


def part(manifest: Manifest, known: Mapping[str, TensorSpec], brings: Adapter) -> Parts:
    """Tell an adapter's tensors from weights; what the engine's checkpoint has is a weight, whatever it is called.

    Args:
        known: the engine's checkpoint.
        brings: what the update says of itself.

    Raises:
        ManifestRefused: it brings something else than it says.
    """
    if brings == Adapter.NONE:
        return Parts(manifest.tensors)
    names = set(naming.resolve([spec.name for spec in manifest.tensors], known).adapter)
    found = Parts(
        tuple(spec for spec in manifest.tensors if spec.name not in names), tuple(spec for spec in manifest.tensors if spec.name in names)
    )
    if not found.adapter:
        raise ManifestRefused("the update says that it brings an adapter, and has no part of one", hint="Send it without adapter_only")
    if found.weights and brings == Adapter.ALONE:
        others = [spec.name for spec in found.weights]
        raise ManifestRefused(
            f"{len(others)} tensor(s) are no parts of the adapter, which is sent alone: {_shown(others)}",
            hint="Send the LoRA's tensors and nothing else, or all of the weights with it",
            names=others,
        )
    return found


class Adapters:
    """Of one worker.

    Attributes:
        live: what the slot was given last; None for none.
        counts: what the engine has said counts.
    """

    def __init__(self) -> None:
        self._slot: Slot | None = None
        self.live: Pairs | None = None
        self.counts: Pairs | None = None

    def open(self, slot: Slot | None) -> dict[str, int]:
        """All requests of the engine go with what this slot holds from now on; None where it takes no adapters. Returns a count of it."""
        self._slot = slot
        return {} if slot is None else {TAKES: 1}

    @property
    def dtype(self) -> str:
        """Of what the slot holds."""
        return "" if self._slot is None else str(self._slot.dtype).removeprefix("torch.")

    def require(self, specs: Sequence[TensorSpec], brings: Adapter, stage: str) -> dict[str, str]:
        """See that an adapter can be taken, before a byte moves.

        Args:
            specs: its tensors.
            brings: whether the weights that it lies on come with it.
            stage: where the update is staged.

        Returns:
            Those that this worker has no layer for, with how to say it; others of the engine may have.

        Raises:
            ManifestRefused: the engine takes no adapters, or none such; with the names.
            BaseRefused: it comes alone, and what this worker holds came without one.
        """
        if self._slot is None:
            raise ManifestRefused(
                "this engine takes no adapters",
                hint='Start it with engine.extra={"enable_lora": true, "max_lora_rank": 16}, or send merged weights',
            )
        if stage == "none":
            raise ManifestRefused(
                "an adapter has to be whole before any of it counts, and sync.stage is none", hint="Set sync.stage to auto"
            )
        if brings == Adapter.ALONE and self.counts is None:
            raise BaseRefused(
                "the adapter comes alone, and the weights that this worker holds came without one: they may have one merged in already",
                hint="Send the adapter with the weights that it lies on, once",
            )
        return self._require_layers(specs, self._slot)

    def _require_layers(self, specs: Sequence[TensorSpec], slot: Slot) -> dict[str, str]:
        halves: dict[str, dict[str, TensorSpec]] = {}
        unknown: list[str] = []
        for spec in specs:
            layer, half = naming.adapted(spec.name)
            if not half:
                unknown.append(spec.name)
            elif half in halves.setdefault(layer, {}):
                raise ManifestRefused(f"{halves[layer][half].name} and {spec.name} are both {half} of {layer}", names=[spec.name])
            else:
                halves[layer][half] = spec
        wrong: dict[str, list[str]] = {"no half of a low-rank pair, which is all that an engine's adapter has": unknown}
        strange: dict[str, str] = {}
        names = list(unknown)
        for layer, found in halves.items():
            for kind, said in self._faults(layer, found, slot).items():
                wrong.setdefault(kind, []).append(said)
                names += [spec.name for spec in found.values()]
            if (path := slot.path(layer)) not in slot.targets:
                close = next(iter(naming.closest([path], slot.targets)))
                says = f"{layer} (closest: {close})" if close else layer
                strange |= {spec.name: says for spec in found.values()}
        if any(wrong.values()):
            said = "; ".join(f"{len(those)} {kind}: {_shown(those)}" for kind, those in wrong.items() if those)
            raise ManifestRefused(f"the adapter can't be taken: {said}", hint="Train it on linear layers by plain LoRA", names=names)
        return strange

    def _faults(self, layer: str, found: Mapping[str, TensorSpec], slot: Slot) -> dict[str, str]:
        """What is wrong with one layer's pair, by its kind."""
        if lacking := [half for half in HALVES if half not in found]:
            return {"of which one half is missing": f"{layer} ({lacking[0]})"}
        one, other = (found[half] for half in HALVES)
        if one.dtype not in _FLOATS or other.dtype not in _FLOATS:
            return {f"of a dtype that is none of {', '.join(_FLOATS)}": layer}
        shapes = f"{list(one.shape)} and {list(other.shape)}"
        if len(one.shape) != 2 or len(other.shape) != 2 or one.shape[0] != other.shape[1] or not one.shape[0]:
            return {"whose halves do not fit together": f"{layer} ({shapes})"}
        if one.shape[0] > slot.max_rank:
            return {f"above the engine's max_lora_rank of {slot.max_rank}": f"{layer} (rank {one.shape[0]})"}
        target = slot.targets.get(slot.path(layer))
        if target is not None and (one.shape[1], other.shape[0]) != (target.inputs, target.outputs):
            return {
                "of another shape than the engine's layer": f"{layer} ({shapes}, want inputs {target.inputs}, outputs {target.outputs})"
            }
        return {}

    def put(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put an update's adapter into the slot; nothing empties it. The engine must be paused.

        Args:
            named: its tensors by the trainer's names, anywhere.

        Raises:
            ApplyFailed: vLLM did not take it; the slot may hold a part.
        """
        dtype = torch.float32 if self._slot is None else self._slot.dtype
        self._write({naming.adapted(name): tensor.detach().to("cpu", dtype, copy=True) for name, tensor in named} or None)

    def put_back(self) -> None:
        """Put what counts into the slot again; raises as `put`."""
        self._write(self.counts)

    def _write(self, pairs: Pairs | None) -> None:
        self.live = pairs
        if self._slot is None:
            return
        try:
            self._slot.write(self._own(self._slot))
        except Exception as exc:
            raise ApplyFailed(f"vLLM did not take the adapter: {type(exc).__name__}: {exc}") from exc

    def _own(self, slot: Slot) -> Pairs:
        """What is live of layers that this worker has."""
        return {key: tensor for key, tensor in (self.live or {}).items() if slot.path(key[0]) in slot.targets}

    def wrong(self) -> tuple[VerdictNotOk | None, dict[str, int]]:
        """What stands against what lies in the slot, and how many layers of an adapter were compared."""
        if self._slot is None:
            return None, {}
        layers, wrong = self._slot.differing(self._own(self._slot))
        if wrong:
            error = VerdictNotOk(
                f"the adapter in the engine is not the one that was sent, in {len(wrong)} layer(s): {_shown(wrong)}",
                hint="Sync again; if it comes back, restart this engine and report its model",
                names=wrong,
            )
            return error, {}
        return None, {"adapted_layers": layers} if self.live else {}

    def settle(self) -> None:
        """The engine says that what was put there counts."""
        self.counts = self.live


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
