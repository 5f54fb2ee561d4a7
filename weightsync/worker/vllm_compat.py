"""Every touch of vLLM's internals, for the versions that were proved.

vLLM renames and moves these between releases, so nothing else here imports
vLLM. `require_supported` refuses an unknown version at start; importing this
module in a worker registers the weight-transfer backend under our name, which
makes vLLM turn off the layouts that can't be updated.

Not covered: loaders that read values while they load (static input scales of FP8
experts), which neither a meta twin nor vLLM's own reload can run; and layers that
`unproved_layers` names: the engine then refuses to start.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from weightsync.errors import UnsupportedEngine
from weightsync.storage.adopt import rebind_temporaries

#: Versions on which the reload functions used here were read and run.
PROVED_VERSIONS = ("0.32.0", "0.33.0")
BACKEND = "weightsync"
#: Tensors that layerwise reload writes straight into live storage and does not count.
WRITTEN_IN_PLACE = frozenset(SKIP_LOAD_TENSORS)
#: Functions of vLLM that `Reload` replaces or leans on, by the SHA-256 of their source.
PROVED_SOURCES = {
    "initialize_layerwise_reload": {"4c6218fa7fce5c7d"},
    "finalize_layerwise_processing": {"db59bf9798b9eaed"},
    "_layerwise_process": {"fde7490d7e642b34"},
    "_copy_and_restore_kernel_tensors": {"c98331c098210ea3"},
    "_place_kernel_tensors": {"9a7d866d7e5dcac8"},
}
#: Names of tensors that hold a raw pointer of C++'s, and no value.
FOREIGN_HANDLES = (".handler_tensor",)
#: How deep `_holds_foreign` looks: layer → quantisation method → scheme → kernel → handler.
_DEPTH = 5


class _ManagedByWeightsync(WeightTransferEngine):
    """Holds the backend's place: updates come through the worker extension, never through vLLM's own calls."""

    init_info_cls = dict
    update_info_cls = dict

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise UnsupportedEngine("this engine's weights are managed by weightsync", hint="Call sync_weights() on the service")

    init_transfer_engine = start_weight_update = receive_weights = finish_weight_update = _refuse

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        raise UnsupportedEngine("use weightsync.client.WeightSync to send weights")


with contextlib.suppress(ValueError):  # registered already in this process
    WeightTransferEngineFactory.register_engine(BACKEND, _ManagedByWeightsync)


def vllm_version() -> str:
    """The installed version without its local part, for example `0.32.0`."""
    return str(vllm.__version__).split("+")[0]


def require_supported() -> None:
    """Refuse a vLLM whose reload code was not read.

    Raises:
        UnsupportedEngine: names the version found and those proved.
    """
    if vllm_version() not in PROVED_VERSIONS:
        raise UnsupportedEngine(
            f"vLLM {vllm_version()} has not been proved; proved are {', '.join(PROVED_VERSIONS)}",
            hint="Install one of those",
        )
    for name, proved in PROVED_SOURCES.items():
        try:
            source = inspect.getsource(getattr(layerwise, name))
        except OSError:  # replaced at run time by something that has none
            source = ""
        if hashlib.sha256(source.encode()).hexdigest()[:16] not in proved:
            raise UnsupportedEngine(
                f"vLLM {vllm_version()}: {name} in {layerwise.__name__} is not the one that was proved",
                hint="Install an unchanged vLLM of a proved version",
            )


def unproved_layers(model: torch.nn.Module) -> list[str]:
    """Layers that may be stale after an update, as `path (why)`; empty when all is well.

    A tied layer is post-processed once more after an update, which only unquantised
    ones are known to bear.
    """
    found: list[str] = []
    owners: dict[int, str] = {}
    for path, layer in model.named_modules():
        method = type(getattr(layer, "quant_method", None)).__name__
        unquantised = method.startswith(("Unquantized", "NoneType"))
        tied = [p for p in _own(layer) if owners.setdefault(id(p), path) != path]
        if tied and not unquantised:
            found.append(f"{path} (tied, {method})")
    return found


@contextlib.contextmanager
def cold_load_context(vllm_config: Any) -> Iterator[None]:
    """What a cold load runs in: the engine's config set, the model's dtype as default, no gradients."""
    with torch.no_grad(), set_current_vllm_config(vllm_config), set_default_torch_dtype(vllm_config.model_config.dtype):
        yield


def meta_twin(vllm_config: Any) -> torch.nn.Module:
    """The engine's model once more, on the meta device: no memory, same loaders.

    Takes 0.01 to 0.3 s. Must run in the worker's own thread: it sets torch's
    default dtype for the moment.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    # Layers register themselves by name here; the twin's must not replace the engine's.
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with cold_load_context(config), torch.device("meta"):
        twin = initialize_model(vllm_config=config)
    # Online quantisation wraps loaders to process each layer when it is complete; on meta there is nothing to process.
    for layer in twin.modules():
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            if getattr(getattr(tensor, "weight_loader", None), "__name__", "") == "online_process_loader":
                tensor.weight_loader = layerwise._get_original_loader(tensor)
        layerwise.get_layerwise_info(layer).reset()
    return twin


def loaders_of(twin: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Parameter path to what its module's own loader needs to find on it: the method's name, and plain attributes."""
    found: dict[str, dict[str, Any]] = {}
    for path, layer in twin.named_modules():
        for name, parameter in layer._parameters.items():
            loader: Any = getattr(parameter, "weight_loader", None)
            if getattr(loader, "__self__", None) is layer:
                plain = {key: value for key, value in vars(parameter).items() if isinstance(value, (bool, int, str))}
                found[f"{path}.{name}"] = {**plain, "weight_loader": str(loader.__name__)}
    return found


def restore_loaders(model: torch.nn.Module, loaders: dict[str, dict[str, Any]]) -> int:
    """Give parameters that post-processing has made anew their loader back; how many.

    A kernel that replaces a parameter may drop its loader (Marlin's bias), and a
    second load would then fall back to a plain copy.
    """
    count = 0
    live = dict(model.named_modules())
    for path, attributes in loaders.items():
        layer_path, _, name = path.rpartition(".")
        layer = live.get(layer_path)
        parameter = layer._parameters.get(name) if layer is not None else None
        if parameter is not None and not hasattr(parameter, "weight_loader"):
            for key, value in attributes.items():
                setattr(parameter, key, getattr(layer, value) if key == "weight_loader" else value)
            count += 1
    return count


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
        self._experts = {id(layer): _experts_of(layer) for layer in self._model.modules()}
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
        loaded = {id(p) for path, layer in named.items() if path not in unloaded for p in _own(layer)}
        for path in sorted(unloaded):
            method = getattr(named[path], "quant_method", None)
            if method is not None and any(id(p) in loaded for p in _own(named[path])):
                method.process_weights_after_loading(named[path])
                self.counts["tied_layers_refreshed"] += 1

    def _place(self, stock: Callable[[torch.nn.Module, Any], None]) -> Callable[[torch.nn.Module, Any], None]:
        """vLLM's step behind a layer's processing, with the three repairs around it."""

        def place(layer: torch.nn.Module, info: Any) -> None:
            kept = self._experts.get(id(layer))
            if kept is not None and kept is _experts_of(layer):
                kept.process_weights_after_loading(layer)
                self.counts["layers_repacked"] += 1
            parameters, buffers = info.kernel_tensors
            temporaries = {name: t for name in (*parameters, *buffers) if isinstance(t := getattr(layer, name, None), torch.Tensor)}
            pinned = [t.untyped_storage() for t in temporaries.values()] if _holds_foreign(layer) else []
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


#: Memory of temporaries that a layer's foreign objects may hold addresses of; replaced when the layer is processed again.
_PINNED: WeakKeyDictionary[torch.nn.Module, list[torch.UntypedStorage]] = WeakKeyDictionary()


def reload_waiting(model: torch.nn.Module) -> dict[str, int]:
    """Layers that a reload has not processed yet: module path to elements loaded so far."""
    waiting: dict[str, int] = {}
    for path, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            waiting[path] = int(info.load_numel)
    return waiting


def _own(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that a layer's post-processing works on; routing tables and biases are shared between layers as they are."""
    return [p for name, p in layer._parameters.items() if p is not None and name not in WRITTEN_IN_PLACE]


def _experts_of(layer: torch.nn.Module) -> Any:
    """The experts implementation inside a mixture-of-experts layer's kernel; None in other layers."""
    return getattr(getattr(getattr(layer, "quant_method", None), "moe_kernel", None), "fused_experts", None)


def _holds_foreign(layer: torch.nn.Module) -> bool:
    """Whether an object of this layer owns something outside Python, by its destructor."""
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(value, 0) for value in vars(layer).values()]
    while todo:
        value, depth = todo.pop()
        if id(value) in seen or isinstance(value, (torch.nn.Module, torch.Tensor, type)):
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple)):
            todo += [(item, depth) for item in value]
        elif isinstance(value, dict):
            todo += [(item, depth) for item in value.values()]
        elif hasattr(type(value), "__del__"):
            return True
        elif depth < _DEPTH and type(value).__module__.startswith("vllm.model_executor"):
            todo += [(item, depth + 1) for item in vars(value).values()] if hasattr(value, "__dict__") else []
        elif closure := getattr(value, "__closure__", None):
            todo += [(cell.cell_contents, depth + 1) for cell in closure if _filled(cell)]
    return False


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
