"""One layerwise reload of a model, run as a cold load runs, with what vLLM's own leaves out.

Not covered: a buffer outside the checkpoint that processing changes relative to its
first value (`x.mul_(2)`), which would be changed again; what a first run of the model
fills in (see `lazies`); model hooks that return at once when they ran before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import layerwise

from weightsync.errors import ApplyFailed
from weightsync.storage.adopt import rebind_temporaries
from weightsync.storage.pins import same_bytes
from weightsync.worker.vllm_compat.blueprint import Alias, Blueprint
from weightsync.worker.vllm_compat.counting import Counter
from weightsync.worker.vllm_compat.layers import experts_of, holds_foreign, own_parameters, plain_path
from weightsync.worker.vllm_compat.twin import cold_load_context

#: Memory of temporaries that a layer's foreign objects may hold addresses of; replaced when the layer is processed again.
_PINNED: WeakKeyDictionary[torch.nn.Module, list[torch.UntypedStorage]] = WeakKeyDictionary()

_Step = Callable[[torch.nn.Module, Any], None]


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
    - What is made for a layer to load into starts as in a fresh model, or from zeros, unless all of
      it was loaded; stock code leaves memory as it comes, in padding and in what nothing is loaded into.
    - Buffers outside the checkpoint that processing computes are brought back like
      others; stock code skips them. Those that it leaves alone keep their value.
    - Tensors and numbers that processing hangs on a parameter are taken over to the one that is put back.
    - What attention let go of when it had absorbed it (AMX's MLA does that with a projection) comes
      for it to absorb again; stock code copies it into the nothing that is left of it, and fails.
    - Where processing makes another dtype than at the start, the reload fails: stock code casts.
    - A buffer that was a view of a parameter, until processing moved the parameter away, is given
      what was loaded, as the view got it in a cold load.
    - Names that a fresh layer registers as None are so again while it is processed.
    - Loaders may read what they load, and each element counts once (`Counter`).
    - The model's own hook behind all layers' processing runs, as in a cold load.

    Of a part of the model's layers (`layers`) the rest is not taken apart, gets nothing and is
    not processed, but for what is derived from loaded layers: attention that holds one of
    them, and layers tied to one. A model with a hook of its own is not reloaded in part
    (`whole_only`): the hook would run over layers that it has been over.

    Use as a context manager: on the way out after an error the structure is put
    back (no tensor left on meta, nothing buffered), values of layers that were
    processed stay new.

    Args:
        model: the live model.
        vllm_config: the engine's configuration.
        fresh: what the model has when it is fresh.
        layers: paths of the layers to reload; all when None.

    Raises:
        ApplyFailed: the model has no layer of such a path.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, fresh: Blueprint, layers: Collection[str] | None = None) -> None:
        self._model, self._config, self._fresh = model, vllm_config, fresh
        self._paths = {layer: plain_path(path) for path, layer in model.named_modules()}
        self._part: Any = model if layers is None else _Part(model, _with_their_attention(self._paths, layers))
        self._experts: dict[int, Any] = {}
        self._made: dict[str, torch.Tensor] = {}  # of the layer that is processed right now
        self._apart: dict[str, tuple[torch.Tensor, Alias]] = {}  # parameter path to a buffer that was its view, and is not
        self._loaded: list[tuple[torch.Tensor, torch.Tensor]] = []  # such a buffer, and the view again, on what is loaded now
        self._context = contextlib.ExitStack()
        counted = ("layers_repacked", "temporaries_rebound", "layers_pinned", "tied_layers_refreshed", "layers_put_back")
        self.counts = dict.fromkeys((*counted, "buffers_recomputed", "model_hooks"), 0)

    def __enter__(self) -> Reload:
        device = next(iter(self._model.parameters())).device
        self._context.enter_context(cold_load_context(self._config))
        self._context.enter_context(device)
        self._experts = {id(layer): experts_of(layer) for layer in self._model.modules()}
        self._apart = self._fresh.apart(self._model)
        layerwise.logger.addFilter(_expected)
        self._context.callback(layerwise.logger.removeFilter, _expected)
        counter = Counter()
        self._replace("get_numel_loaded", lambda _: counter.count)
        self._replace("materialize_layer", self._materialise)
        self._replace("_copy_and_restore_kernel_tensors", self._place)
        try:
            layerwise.initialize_layerwise_reload(self._part)
            self._unset()
        except BaseException as exc:  # a failing __enter__ gets no __exit__
            self.__exit__(type(exc), exc, exc.__traceback__)
            raise
        return self

    def _replace(self, name: str, around: Callable[[Any], Any]) -> None:
        """Put something around a function of vLLM's for the time of this reload."""
        stock = getattr(layerwise, name)
        setattr(layerwise, name, around(stock))
        self._context.callback(setattr, layerwise, name, stock)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        if exc is not None:
            self.counts["layers_put_back"] = self._put_back()
        self._context.close()

    def waiting(self) -> dict[str, int]:
        """Layers that have not been processed yet: module path to elements loaded so far."""
        return reload_waiting(self._model)

    def finish(self) -> None:
        """Process what waits for the end: attention layers, layers with padding, layers tied to a loaded one, the model.

        Stock code puts a tied layer (an output head that is the embedding) back
        without processing it, since nothing was loaded into it by name; what its
        kernel derived from the old weights, on a CPU a packed copy, would stay.
        """
        named = dict(self._model.named_modules())
        part = set(self._part.modules())
        before = {path: layerwise.get_layerwise_info(layer) for path, layer in named.items()}
        unloaded = {path for path, info in before.items() if named[path] not in part or (info.can_load() and info.load_numel == 0)}
        layerwise.finalize_layerwise_reload(self._model, self._config.model_config)
        for buffer, view in self._loaded:
            buffer.data.copy_(view)
        self.counts["buffers_recomputed"] += len(self._loaded)
        loaded = {id(p) for path, layer in named.items() if path not in unloaded for p in own_parameters(layer)}
        for path in sorted(unloaded):
            method = getattr(named[path], "quant_method", None)
            if method is not None and any(id(p) in loaded for p in own_parameters(named[path])):
                method.process_weights_after_loading(named[path])
                self.counts["tied_layers_refreshed"] += 1
        if (hook := getattr(self._model, "process_weights_after_loading", None)) is not None:
            hook()
            self.counts["model_hooks"] += 1

    def _unset(self) -> None:
        """Register as None what a fresh layer has so: vLLM's restore leaves those names out, and processing trips over that."""
        for layer, path in self._paths.items():
            info = layerwise.get_layerwise_info(layer)
            parameters, buffers = info.kernel_tensors or ({}, {})
            for name in self._fresh.unset.get(path, ()):
                if hasattr(layer, name):
                    continue
                if name in parameters:
                    layer.register_parameter(name, None)
                elif name in buffers:
                    layer.register_buffer(name, None, persistent=name not in info.kernel_non_persistent_buffers)

    def _materialise(self, stock: _Step) -> _Step:
        """vLLM's step before a layer's processing, and then what a fresh layer has in it."""

        def materialise(layer: torch.nn.Module, info: Any) -> None:
            meta = [name for name, tensor in layerwise.get_layer_tensors(layer).items() if tensor.is_meta]
            whole = info.load_numel >= (info.load_numel_total or 0)
            stock(layer, info)
            self._made = {name: made for name in meta if not (made := getattr(layer, name)).is_meta}
            loaded = {name for name, _ in info.loaded_weights}
            parameters, buffers = info.kernel_tensors or ({}, {})
            for name, made in self._made.items():
                if (apart := self._apart.get(f"{self._paths[layer]}.{name}".lstrip("."))) is not None:
                    buffer, alias = apart
                    self._loaded.append(
                        (buffer, torch.empty(0, dtype=made.dtype, device=made.device).set_(made.untyped_storage(), *alias.layout))
                    )
                kernel = {**parameters, **buffers}.get(name)
                keeps = name not in loaded and kernel is not None and _layout(kernel) == _layout(made)
                number = self._fresh.fills.get(f"{self._paths[layer]}.{name}".lstrip("."))
                if keeps and (number is None or name in info.kernel_non_persistent_buffers):
                    made.data.copy_(kernel)
                elif number:
                    made.data.fill_(number)
                elif not (whole and name in loaded and made.untyped_storage().nbytes() == made.numel() * made.element_size()):
                    torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage()).zero_()

        return materialise

    def _place(self, stock: _Step) -> _Step:
        """vLLM's step behind a layer's processing, with the repairs around it."""

        def place(layer: torch.nn.Module, info: Any) -> None:
            kept = self._experts.get(id(layer))
            if kept is not None and kept is experts_of(layer):
                kept.process_weights_after_loading(layer)
                self.counts["layers_repacked"] += 1
            parameters, buffers = info.kernel_tensors
            for table, kernel in ((layer._parameters, parameters), (layer._buffers, buffers)):
                for name in [name for name in kernel if name in table and table[name] is None]:
                    del table[name]  # was set by processing once, and not now
            temporaries = {name: t for name in (*parameters, *buffers) if isinstance(t := getattr(layer, name, None), torch.Tensor)}
            for name, made in temporaries.items():
                table = parameters if name in parameters else buffers
                if bool(made.numel()) is not bool(table[name].numel()):
                    # Let go of by who absorbs or packs it: there is no storage to keep, and it will be let go of again. The other way
                    # round it was not let go of by an update that failed.
                    table[name] = made
            pinned = [t.untyped_storage() for t in temporaries.values()] if holds_foreign(layer) else []
            computed = self._computed(info, temporaries)
            left = info.kernel_non_persistent_buffers - {name for name, _ in info.loaded_weights} - computed.keys()
            self._require_dtypes(layer, {**parameters, **buffers}, {n: t for n, t in temporaries.items() if n not in left})
            stock(layer, info)
            for name, value in computed.items():
                buffers[name].data.copy_(value)
            registered = {name: getattr(layer, name) for name in temporaries}
            for name, temporary in temporaries.items():
                # What hangs on a parameter is of the old weights on the one that was put back.
                vars(registered[name]).update({key: value for key, value in vars(temporary).items() if _holds_values(value)})
            self.counts["buffers_recomputed"] += len(computed)
            self.counts["temporaries_rebound"] += len(rebind_temporaries(temporaries, registered).rebound)
            _PINNED[layer] = pinned
            self.counts["layers_pinned"] += bool(pinned)
            self._made = {}

        return place

    def _require_dtypes(self, layer: torch.nn.Module, kernel: dict[str, torch.Tensor], made: dict[str, torch.Tensor]) -> None:
        """That processing has made what it made at the start: stock code would cast another dtype, which rounds without a word."""
        for name, tensor in made.items():
            if tensor.dtype != kernel[name].dtype:
                path = f"{self._paths[layer]}.{name}".lstrip(".")
                raise ApplyFailed(
                    f"processing made {path} of {tensor.dtype}, and captured graphs read {kernel[name].dtype}",
                    hint="Restart this engine on the new weights, and report its model",
                    names=[path],
                )

    def _computed(self, info: Any, temporaries: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Buffers outside the checkpoint that processing gave other values: what it put there, or wrote into what they started from."""
        loaded = {name for name, _ in info.loaded_weights}
        names = [name for name in info.kernel_non_persistent_buffers if name in info.kernel_tensors[1] and name not in loaded]
        found = {}
        for name in names:
            kernel, value = info.kernel_tensors[1][name], temporaries.get(name)
            if value is None or value is kernel:
                continue
            same = _layout(value) == _layout(kernel)
            if (same and not same_bytes(value, kernel)) or (not same and value is not self._made.get(name)):
                found[name] = value
        return found

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


class _Part:
    """A model of which vLLM's functions see some layers; in all else it is the model."""

    def __init__(self, model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        vars(self).update(_model=model, _layers=layers)

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)


def _with_their_attention(paths: dict[torch.nn.Module, str], layers: Collection[str]) -> list[torch.nn.Module]:
    """The modules of some layers, and attention that holds one of them: what it has absorbed of a projection is made anew."""
    found = {layer for layer, path in paths.items() if path in layers}
    if gone := sorted(set(layers) - {paths[layer] for layer in found}):
        raise ApplyFailed(f"{len(gone)} layer(s) are not in the live model: {', '.join(gone[:20])}", names=gone)
    holders = {layer for layer in paths if is_deferred_attention_layer(layer) and not found.isdisjoint(layer.modules())}
    return [layer for layer in paths if layer in found or layer in holders]


def whole_only(model: torch.nn.Module) -> str:
    """Why a model can't be reloaded in part; empty where it can."""
    if getattr(model, "process_weights_after_loading", None) is None:
        return ""
    return f"{type(model).__name__} has a hook of its own that runs over all of its layers when they are loaded"


def _holds_values(value: object) -> bool:
    """Whether something on a parameter may derive from weights: a tensor, a number with a fraction, or a container with either."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_values, value))
    return any(map(_holds_values, value.values())) if isinstance(value, dict) else isinstance(value, (torch.Tensor, float))


def reload_waiting(model: torch.nn.Module) -> dict[str, int]:
    """Layers that a reload has not processed yet: plain module path to elements loaded so far."""
    waiting: dict[str, int] = {}
    for path, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        # What wraps a layer for adapters has none of its weights.
        if info.can_load() and "base_layer" not in layer._modules:
            waiting[plain_path(path)] = int(info.load_numel)
    return waiting


def _expected(record: logging.LogRecord) -> bool:
    """Leave out vLLM's warning of layers that nothing was loaded into: the load map knows which of them ought to get something."""
    return record.msg != "%s: Failed to load weights"


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
