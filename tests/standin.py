"""A stand-in for a captured CUDA graph, on a CPU; and a small model that vLLM's own code reloads.

Like a graph the stand-in keeps addresses and no references: capture notes where each tensor
lies, replay reads the bytes that are there now. Where a graph would read memory that
was given back, and crash or return somebody else's values, the stand-in says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync.storage.adopt import Adopter, Adoption
from weightsync.storage.contract import Contract, Verdict, compare
from weightsync.storage.owners import Walk, walk
from weightsync.storage.pins import Read, pin, places, slots_of


class ReadsFreedMemory(Exception):
    """The replay would read memory that nobody holds any more."""


class StandinGraph:
    """Captures tensors by address.

    Args:
        reads: name to contiguous tensor; what a kernel of the graph is given. Numbers are passed by value.
    """

    def __init__(self, reads: Mapping[str, torch.Tensor | float]) -> None:
        self._scalars = {name: value for name, value in reads.items() if not isinstance(value, torch.Tensor)}
        self._tensors: dict[str, tuple[int, int, torch.dtype, torch.Size, StorageWeakRef]] = {}
        for name, tensor in reads.items():
            if isinstance(tensor, torch.Tensor):
                assert tensor.is_contiguous()
                alive = StorageWeakRef(tensor.untyped_storage())
                self._tensors[name] = (tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.shape, alive)

    def replay(self) -> dict[str, torch.Tensor | float]:
        """What the kernels see now, as copies.

        Raises:
            ReadsFreedMemory: names what lies in memory that was given back.
        """
        freed = [name for name, captured in self._tensors.items() if captured[4].expired()]
        if freed:
            raise ReadsFreedMemory(", ".join(freed))
        out: dict[str, torch.Tensor | float] = dict(self._scalars)
        for name, (address, nbytes, dtype, shape, _) in self._tensors.items():
            raw = bytearray(ctypes.string_at(address, nbytes))
            out[name] = torch.frombuffer(raw, dtype=dtype).reshape(shape)
        return out

    def census(self) -> list[Read]:
        """The addresses that the kernels were given."""
        return [Read(address, nbytes, f"kernel_of_{name}") for name, (address, nbytes, *_) in self._tensors.items()]


class Warm:
    """A small model that vLLM's own code loads and reloads, its storage sealed and repaired as a worker does it.

    vLLM is imported when one is made: loading it takes seconds.

    Args:
        make: builds the model; layers load through the loaders on their parameters and
            are processed by their `quant_method`.
        weights: what to load first, parameter path to tensor, in the form of a checkpoint.
        dtype: the model's, torch's default while layers are made and processed.
    """

    def __init__(self, make: Callable[[], nn.Module], weights: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        from vllm.config import VllmConfig
        from vllm.model_executor.model_loader.reload import layerwise

        from weightsync.worker import lazies, vllm_compat
        from weightsync.worker.vllm_compat import blueprint

        self._layerwise, self._compat, self._lazies_of = layerwise, vllm_compat, lazies.Lazies
        self.config = VllmConfig()
        self.config.model_config = SimpleNamespace(dtype=dtype)
        with vllm_compat.cold_load_context(self.config):
            with blueprint.Constants() as constants, torch.device("meta"):
                self._fresh = blueprint.read(make(), constants)
            self.model: Any = make()
            layerwise.record_metadata_for_reloading(self.model)
            load(self.model, weights)
            for layer in self.model.modules():
                if (method := getattr(layer, "quant_method", None)) is not None:
                    method.process_weights_after_loading(layer)
        self._loaded = lazies.Snapshot(self.model)
        self.first_run(lambda _: None)

    def first_run(self, run: Callable[[Any], Any]) -> None:
        """Run the model, which may cache things then, and seal it; an update makes it run again so."""
        self._run = run
        run(self.model)
        self._lazies = self._lazies_of(self.model, self._loaded)
        self.seal()

    def seal(self) -> None:
        """Fix what must hold from now on; done when the model is cold, and again by who captures then or anew."""
        found = walk(self.model, "model")
        self.pins = pin(found)
        self.contract = Contract.seal(slots_of(self.pins), found.scalars)
        self._adopter = Adopter(self.pins)

    def release(self) -> None:
        """Hold nothing of the model's any more, as an engine without a contract."""
        self.pins = pin(Walk())
        self._adopter = Adopter(self.pins)

    def stock(self, weights: Mapping[str, torch.Tensor]) -> None:
        """vLLM's own reload."""
        with torch.device("cpu"), torch.no_grad():
            self._layerwise.initialize_layerwise_reload(self.model)
            load(self.model, weights)
            self._layerwise.finalize_layerwise_reload(self.model, self.config.model_config)

    def ours(self, weights: Mapping[str, torch.Tensor], layers: Collection[str] | None = None) -> Adoption:
        """A worker's reload, of some layers or of all, and its repair."""
        self._fresh.restore_loaders(self.model)
        with self._compat.Reload(self.model, self.config, self._fresh, layers) as reload:
            load(self.model, weights)
            reload.finish()
        self._lazies.reset()
        self._run(self.model)
        self._lazies.settle()
        return self.repair()

    def repair(self) -> Adoption:
        """Bring back what has moved since the seal."""
        return self._adopter.adopt(walk(self.model, "model"))

    def verdict(self) -> Verdict:
        """Whether the contract holds now."""
        found = walk(self.model, "model")
        return compare(self.contract, places(found, self.contract.places), scalars=found.scalars)


def load(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give each tensor to its parameter's own loader, as a model's `load_weights` does."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    for path, tensor in weights.items():
        layer, _, name = path.rpartition(".")
        parameter = getattr(model.get_submodule(layer), name)
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, **attributes: Any) -> nn.Parameter:
    """As `create_weights` makes them."""
    made = nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def layer_of(process: Callable[[nn.Module], None], **parameters: nn.Parameter) -> nn.Module:
    """A layer whose quantisation method does `process` after loading."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Method(QuantizeMethodBase):
        def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            process(layer)

        def apply(self, layer: nn.Module, *_: Any, **__: Any) -> torch.Tensor:
            raise NotImplementedError

    layer: Any = nn.Module()
    for name, made in parameters.items():
        layer.register_parameter(name, made)
    layer.quant_method = Method()
    return layer


def model_of(**layers: nn.Module) -> nn.Module:
    """A model of these layers."""
    model = nn.Module()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model
