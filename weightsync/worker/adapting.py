"""An update's weights and its adapter in one worker: both admitted before a byte moves, and the adapter put into its slot.

A part of `Applier`, and of its state. Not covered: what adapters an engine takes (`adapter`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from weightsync.errors import ManifestRefused, VerdictNotOk
from weightsync.protocol import Adapter, BeginOrder, Manifest
from weightsync.worker import adapter, admission, vllm_compat
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.staging import Staged
from weightsync.worker.streaming import Streamed


class Adapting:
    """Attributes are those of `Applier`."""

    model: torch.nn.Module
    vllm_config: Any
    _adapters: adapter.Adapters
    _alone: bool
    _back: Staged | None
    _base: LoadMap
    _frozen: admission.Frozen
    _map: LoadMap
    _tied: bool

    def _count(self, counts: dict[str, int]) -> None:
        raise NotImplementedError

    def _admitted(self, order: BeginOrder) -> tuple[LoadMap, dict[str, list[str]]]:
        """Where everything of an update goes, and its output heads that must be copies of an embedding.

        Raises:
            ManifestRefused, BaseRefused: it can't be taken.
        """
        request = order.request
        if request.scope and (why := vllm_compat.whole_only(self.model)):
            raise ManifestRefused(f"no part of this model can be updated by itself: {why}", hint="Send a complete update, without a scope")
        if request.scope and self._adapters.counts is not None:
            raise ManifestRefused("a scope would change weights that an adapter lies on", hint="Send them all, with the adapter or merged")
        parts = adapter.part(request.manifest, self._base.specs, request.adapter)
        strange = self._adapters.require(parts.adapter, request.adapter, order.stage) if parts.adapter else {}
        if strange and self._alone:
            said = ", ".join(dict.fromkeys(strange.values()))
            raise ManifestRefused(f"the adapter is of layers that this engine can't adapt: {said[:2000]}", names=list(strange))
        if request.adapter == Adapter.ALONE:
            found, heads = LoadMap({spec.name: spec for spec in parts.adapter}, part=True), dict[str, list[str]]()
        else:
            found, heads = self._admitted_weights(Manifest(parts.weights), order)
        names = parts.names
        if not names and not found.adapter:
            return found, heads
        # The map may be the last update's, which had an adapter.
        return dataclasses.replace(found, adapter=names, touched=found.touched | names, unclaimed=found.unclaimed | strange), heads

    def _admitted_weights(self, manifest: Manifest, order: BeginOrder) -> tuple[LoadMap, dict[str, list[str]]]:
        twin, scope = (lambda: vllm_compat.meta_twin(self.vllm_config)), order.request.scope
        found = admission.admit(manifest, self._base, twin, self._tied, self._frozen, scope, self._alone, self._map)
        heads = admission.tied_heads(found) if self._tied else {}
        if heads and order.stage == "none":
            raise ManifestRefused(
                f"{', '.join(heads)}: this model's output head is its embedding; whether both are equal shows only in staged bytes",
                hint="Leave it out, or set sync.stage to auto",
                names=list(heads),
            )
        return found, heads

    def _loaded_as(self, found: LoadMap) -> dict[str, str]:
        """Dtype of what each tensor of an update comes to lie in, by the trainer's name."""
        return found.loaded_as() | dict.fromkeys(found.adapter, self._adapters.dtype)

    def _bring_adapter(self, incoming: Staged | Streamed) -> None:
        """Put the adapter of an update into the slot, or none; on the way back the one that counts.

        Raises:
            ApplyFailed: vLLM did not take it.
        """
        if self._back is not None:
            self._adapters.put_back()
        elif isinstance(incoming, Staged) and incoming.load_map.adapter:
            specs = incoming.manifest.tensors
            self._adapters.put((spec.name, incoming.tensor(at)) for at, spec in enumerate(specs) if spec.name in incoming.load_map.adapter)
        else:
            self._adapters.put(())

    def _adapter_wrong(self) -> VerdictNotOk | None:
        error, counts = self._adapters.wrong()
        self._count(counts)
        return error
