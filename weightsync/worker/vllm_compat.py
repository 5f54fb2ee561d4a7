"""Every touch of vLLM's internals, for the versions that were proved.

vLLM renames and moves these between releases, so nothing else here imports
vLLM. `require_supported` refuses an unknown version at start; importing this
module in a worker registers the weight-transfer backend under our name, which
makes vLLM turn off the layouts that can't be updated.

Not covered: kernels whose captured storage or derived values a stock reload
leaves behind (`unproved_layers` names them, and the engine then refuses to start).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

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

#: Versions on which the reload functions used here were read and run.
PROVED_VERSIONS = ("0.32.0", "0.33.0")
BACKEND = "weightsync"
#: Tensors that layerwise reload writes straight into live storage and does not count.
WRITTEN_IN_PLACE = frozenset(SKIP_LOAD_TENSORS)


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


def unproved_layers(model: torch.nn.Module, device: torch.device) -> list[str]:
    """Layers that this version's reload is known to leave stale, as `path (why)`; empty when all is well.

    On a CPU a mixture of experts keeps its packed layout, and an INT8 kernel
    keeps the address of a freed scale; on CUDA a quantised mixture of experts
    can leave captured graphs reading old storage.
    """
    found: list[str] = []
    owners: dict[int, str] = {}
    tied = set()
    for path, layer in model.named_modules():
        for parameter in layer._parameters.values():
            if parameter is not None and owners.setdefault(id(parameter), path) != path:
                tied.add(path)
    for path, layer in model.named_modules():
        kind = type(layer).__name__
        scheme = type(getattr(layer, "scheme", None)).__name__
        method = type(getattr(layer, "quant_method", None)).__name__
        if kind == "RoutedExperts" and (device.type == "cpu" or not method.startswith("Unquantized")):
            found.append(f"{path} (mixture of experts, {method} on {device.type})")
        elif device.type == "cpu" and "W8A8Int8" in scheme:
            found.append(f"{path} ({scheme} on cpu)")
        elif path in tied and not method.startswith(("Unquantized", "NoneType")):
            found.append(f"{path} (tied, {method}: its post-processing may not run twice)")
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
        return initialize_model(vllm_config=config)


def reload_begin(model: torch.nn.Module) -> None:
    """Put every layer's parameters on meta and wrap its loaders (vLLM's layerwise reload)."""
    layerwise.initialize_layerwise_reload(model)


def reload_finish(model: torch.nn.Module, model_config: Any) -> list[str]:
    """Process what waits for the end: attention layers, layers with padding, layers tied to a loaded one.

    vLLM puts a tied layer (an output head that is the embedding) back without
    post-processing it, since nothing was loaded into it by name. What its kernel
    derived from the old weights, on a CPU the packed copy inside oneDNN, would stay.

    Returns:
        Paths of the tied layers that were post-processed here.
    """
    named = dict(model.named_modules())
    waiting = {path: layerwise.get_layerwise_info(layer) for path, layer in named.items()}
    unloaded = {path for path, info in waiting.items() if info.can_load() and info.load_numel == 0}
    layerwise.finalize_layerwise_reload(model, model_config)
    loaded = {id(p) for path, layer in named.items() if path not in unloaded for p in layer._parameters.values() if p is not None}
    tied = [path for path in sorted(unloaded) if any(id(p) in loaded for p in named[path]._parameters.values() if p is not None)]
    for path in tied:
        method = getattr(named[path], "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(named[path])
    return tied


def reload_waiting(model: torch.nn.Module) -> dict[str, int]:
    """Layers that have not been processed yet: module path to elements loaded so far."""
    waiting: dict[str, int] = {}
    for path, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            waiting[path] = int(info.load_numel)
    return waiting


def reload_restore(model: torch.nn.Module) -> int:
    """Undo a reload that stopped half way: live tensors back in place, buffered ones dropped.

    Values of layers that were already processed stay new. Returns how many
    layers were put back.
    """
    count = 0
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
            count += 1
    layerwise.LOADING_LAYERS.clear()
    return count
