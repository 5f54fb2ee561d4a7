"""One layerwise reload of a model, run as a cold load runs, with what vLLM's own leaves out.

Not covered: values derived from weights outside the layers' own post-processing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.model_executor.model_loader.reload import layerwise

from weightsync.storage.adopt import rebind_temporaries
from weightsync.worker.vllm_compat.layers import experts_of, holds_foreign, own_parameters
from weightsync.worker.vllm_compat.twin import cold_load_context

#: Memory of temporaries that a layer's foreign objects may hold addresses of; replaced when the layer is processed again.
_PINNED: WeakKeyDictionary[torch.nn.Module, list[torch.UntypedStorage]] = WeakKeyDictionary()


class Reload:
    """One layerwise reload of a model, with what the stock one leaves out.

    vLLM's own reload restores the checkpoint's format on meta, buffers what is
    loaded, processes each layer when it is complete, and copies the result into
    the storage that the kernel had. Missing there, and done here for every layer:

    - A kernel that was kept packs its weights again. Stock code packs only when
      it builds the kernel, so a kept one reads the unpacked layout.
    - Kernel objects rebuilt by the processing hold its temporary parameters; those
      are pointed at the registered storage, so that there is one copy, not two.
    - An object that holds something outside Python (it has a destructor, as a
      oneDNN handler does) may hold raw addresses of the temporaries: their memory
      is kept until the layer is processed again.
    - Layers tied to a loaded one are processed too (see `finish`).

    Use as a context manager: on the way out after an error the structure is put
    back (no tensor left on meta, nothing buffered), values of layers that were
    processed stay new.

    Args:
        model: the live model.
        vllm_config: the engine's configuration.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model, self._config = model, vllm_config
        self._experts: dict[int, Any] = {}
        self._context = contextlib.ExitStack()
        self.counts = {"layers_repacked": 0, "temporaries_rebound": 0, "layers_pinned": 0, "tied_layers_refreshed": 0, "layers_put_back": 0}

    def __enter__(self) -> Reload:
        device = next(iter(self._model.parameters())).device
        self._context.enter_context(cold_load_context(self._config))
        self._context.enter_context(device)
        self._experts = {id(layer): experts_of(layer) for layer in self._model.modules()}
        stock = layerwise._copy_and_restore_kernel_tensors
        layerwise._copy_and_restore_kernel_tensors = self._place(stock)
        self._context.callback(setattr, layerwise, "_copy_and_restore_kernel_tensors", stock)
        try:
            layerwise.initialize_layerwise_reload(self._model)
        except BaseException as exc:  # a failing __enter__ gets no __exit__
            self.__exit__(type(exc), exc, exc.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        if exc is not None:
            self.counts["layers_put_back"] = self._put_back()
        self._context.close()

    def waiting(self) -> dict[str, int]:
        """Layers that have not been processed yet: module path to elements loaded so far."""
        return reload_waiting(self._model)

    def finish(self) -> None:
        """Process what waits for the end: attention layers, layers with padding, layers tied to a loaded one.

        Stock code puts a tied layer (an output head that is the embedding) back
        without processing it, since nothing was loaded into it by name; what its
        kernel derived from the old weights, on a CPU a packed copy, would stay.
        """
        named = dict(self._model.named_modules())
        before = {path: layerwise.get_layerwise_info(layer) for path, layer in named.items()}
        unloaded = {path for path, info in before.items() if info.can_load() and info.load_numel == 0}
        layerwise.finalize_layerwise_reload(self._model, self._config.model_config)
        loaded = {id(p) for path, layer in named.items() if path not in unloaded for p in own_parameters(layer)}
        for path in sorted(unloaded):
            method = getattr(named[path], "quant_method", None)
            if method is not None and any(id(p) in loaded for p in own_parameters(named[path])):
                method.process_weights_after_loading(named[path])
                self.counts["tied_layers_refreshed"] += 1

    def _place(self, stock: Callable[[torch.nn.Module, Any], None]) -> Callable[[torch.nn.Module, Any], None]:
        """vLLM's step behind a layer's processing, with the three repairs around it."""

        def place(layer: torch.nn.Module, info: Any) -> None:
            kept = self._experts.get(id(layer))
            if kept is not None and kept is experts_of(layer):
                kept.process_weights_after_loading(layer)
                self.counts["layers_repacked"] += 1
            parameters, buffers = info.kernel_tensors
            temporaries = {name: t for name in (*parameters, *buffers) if isinstance(t := getattr(layer, name, None), torch.Tensor)}
            pinned = [t.untyped_storage() for t in temporaries.values()] if holds_foreign(layer) else []
            stock(layer, info)
            registered = {name: getattr(layer, name) for name in temporaries}
            self.counts["temporaries_rebound"] += len(rebind_temporaries(temporaries, registered).rebound)
            _PINNED[layer] = pinned
            self.counts["layers_pinned"] += bool(pinned)

        return place

    def _put_back(self) -> int:
        count = 0
        for layer in self._model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()
                count += 1
        layerwise.LOADING_LAYERS.clear()
        return count


def reload_waiting(model: torch.nn.Module) -> dict[str, int]:
    """Layers that a reload has not processed yet: module path to elements loaded so far."""
    waiting: dict[str, int] = {}
    for path, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            waiting[path] = int(info.load_numel)
    return waiting
