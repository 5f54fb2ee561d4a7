"""Random models of vLLM's own layers, and of ours that load shards: a worker on each, without an engine.

A model is a tuple of `Part`s. Each part is one layer that one or several tensors of a
checkpoint are loaded into: fused (qkv, gate_up), plain, padded, cut to a
rank's shard, stacked by expert, or with a scale that two tensors share. `running` loads it as a cold engine does and gives
the RPC surface over it, with real admission, transport, reload and proof.

Runs where vLLM's distributed state has been made: in an engine's process.

Not covered: attention layers, quantised ones, several workers.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import nn

from tests.bench import WAYS, Bench, Fault, Tensors, Way
from tests.standin import layer_of, parameter

DTYPE = torch.bfloat16
WIDTH = 32


@dataclass(frozen=True)
class Part:
    """One layer: its kind (a key of `SHAPES`), and a number that its sizes come from, 1 to 4."""

    kind: str
    size: int


#: Kind to the shapes of the tensors that it is loaded from, by the last part of their names.
SHAPES: dict[str, Any] = {
    "qkv": lambda n: {"q_proj": (2 * n * 16, WIDTH), "k_proj": (n * 16, WIDTH), "v_proj": (n * 16, WIDTH)},
    "gate_up": lambda n: {"gate_proj": (32 * n, WIDTH), "up_proj": (32 * n, WIDTH)},
    "plain": lambda n: {"proj": (32 * n, WIDTH)},
    "norm": lambda n: {"norm": (16 * n,)},
    "padded": lambda n: {"embedding": (50 * n, WIDTH)},
    "unfilled": lambda n: {"rows": (4 * n, 8)},
    "shared": lambda n: {"gate_scale": (1,), "up_scale": (1,), "rows": (4 * n, 8), "point": (1,)},
    "sharded": lambda n: {"whole": (4 * n, 8), "scale": (4 * n,)},
    "experts": lambda n: {f"{e}.{w}": (8, 16) for e in range(n) for w in ("w1", "w2", "w3")},
}
#: Of a "shared" part: both are loaded into one element.
_SCALES = ("gate_scale", "up_scale")
_SHARD = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": 0, "up_proj": 1}


def shard_loader(param: nn.Parameter, tensor: torch.Tensor) -> None:
    """The second of two ranks: the lower half."""
    rows = tensor.shape[0] // 2
    param.data.copy_(tensor.narrow(0, rows, rows))


def first_rows_loader(param: nn.Parameter, tensor: torch.Tensor) -> None:
    """What is left stays as the constructor made it."""
    param.data[: tensor.shape[0]].copy_(tensor)


def expert_loader(param: nn.Parameter, tensor: torch.Tensor, expert: int, shard: str) -> None:
    """[E, 2 N, K] takes w1 and w3 of each expert, [E, N, K] w2."""
    target = param.data[expert]
    rows = tensor.shape[0]
    (target if shard == "w2" else target.narrow(0, rows * (shard == "w3"), rows)).copy_(tensor)


def _transposed(layer: Any) -> None:
    """Processing gives the layer's first parameter another layout, as kernels do."""
    name = next(iter(dict(layer.named_parameters(recurse=False))))
    setattr(layer, name, nn.Parameter(getattr(layer, name).data.transpose(-1, -2).contiguous(), requires_grad=False))


def _layer(part: Part) -> Any:
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    n = part.size
    if part.kind == "qkv":
        return linear.QKVParallelLinear(WIDTH, 16, 2 * n, n, bias=False)
    if part.kind == "gate_up":
        return linear.MergedColumnParallelLinear(WIDTH, [32 * n, 32 * n], bias=False)
    if part.kind == "plain":
        return linear.ColumnParallelLinear(WIDTH, 32 * n, bias=False)
    if part.kind == "norm":
        return RMSNorm(16 * n)
    if part.kind == "padded":
        return VocabParallelEmbedding(50 * n, WIDTH)  # rows up to the next multiple of 64
    if part.kind == "sharded":
        halves = {name: parameter(shape[0] // 2, *shape[1:], dtype=DTYPE, weight_loader=shard_loader) for name, shape in _shapes(part)}
        return layer_of(_transposed, **halves)
    if part.kind == "unfilled":
        return layer_of(_transposed, rows=parameter(4 * n + 3, 8, dtype=DTYPE, weight_loader=first_rows_loader))
    if part.kind == "shared":
        return layer_of(
            _transposed, rows=parameter(4 * n, 8, dtype=DTYPE), scale=parameter(1, dtype=DTYPE), point=parameter(1, dtype=DTYPE)
        )
    stacks = {"w13": parameter(n, 16, 16, dtype=DTYPE), "w2": parameter(n, 8, 16, dtype=DTYPE)}
    for stack in stacks.values():
        stack.weight_loader = expert_loader  # type: ignore[attr-defined]
    return layer_of(_transposed, **stacks)


def _shapes(part: Part) -> list[tuple[str, tuple[int, ...]]]:
    return list(SHAPES[part.kind](part.size).items())


class Model(nn.Module):
    """The parts as one model, with a `load_weights` as vLLM's models have it.

    Args:
        late: parameters are looked up tensor by tensor, not once at the start; vLLM's loaders do the one or the other.
    """

    def __init__(self, parts: Sequence[Part], late: bool) -> None:
        super().__init__()
        self.parts, self.late = tuple(parts), late
        self.layers = nn.ModuleList(_layer(part) for part in parts)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        found = dict(self.named_parameters())
        for name, tensor in weights:
            layer, _, rest = name.partition("/")
            kind = self.parts[int(layer)].kind
            arguments: tuple[Any, ...] = (_SHARD[rest],) if rest in _SHARD else ()
            target = "scale" if rest in _SCALES else rest if kind in ("sharded", "unfilled", "shared") else "weight"
            if kind == "experts":
                expert, _, shard = rest.partition(".")
                arguments, target = (int(expert), shard), "w2" if shard == "w2" else "w13"
            path = f"layers.{layer}.{target}"
            into = self.get_parameter(path) if self.late else found[path]
            getattr(into, "weight_loader", default_weight_loader)(into, tensor, *arguments)


def weights(parts: Sequence[Part], seed: int) -> Tensors:
    """A checkpoint of the model; names say which layer a tensor belongs to."""
    random = torch.Generator().manual_seed(seed)
    made = {
        f"{index}/{name}": torch.randn(shape, generator=random).to(DTYPE)
        for index, part in enumerate(parts)
        for name, shape in _shapes(part)
    }
    return {name: made[name.replace("up_scale", "gate_scale")].clone() for name in made}


def lacking(parts: Sequence[Part], names: Iterable[str]) -> set[str]:
    """Tensors that are missing among these names, and whose places no other fills."""
    there = {name.replace("up_scale", "gate_scale") for name in names}
    return {name for name in weights(parts, 0) if name.replace("up_scale", "gate_scale") not in there}


def _config(folder: Path) -> Any:
    from vllm.config import VllmConfig

    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(
        dtype=DTYPE, enforce_eager=True, model=str(folder), hf_config=SimpleNamespace(tie_word_embeddings=False)
    )
    return config


def loaded(parts: Sequence[Part], late: bool, tensors: Tensors, config: Any) -> Model:
    """The model as a cold engine loads it."""
    from vllm.model_executor.model_loader.reload import layerwise

    from weightsync.worker import vllm_compat

    with vllm_compat.cold_load_context(config):
        model = Model(parts, late)
        layerwise.record_metadata_for_reloading(model)
        model.load_weights(tensors.items())
        for layer in model.modules():
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)
    return model


def held(model: nn.Module) -> Tensors:
    """Every tensor that a model holds, by path; numbers that are addresses of oneDNN's are left out."""
    from weightsync.storage.owners import walk

    found = walk(model, "model").tensors
    return {path: tensor.detach().clone() for path, tensor in found.items() if not path.endswith(".handler_tensor")}


@contextlib.contextmanager
def running(parts: Sequence[Part], late: bool, tensors: Tensors, folder: Path) -> Iterator[Any]:
    """A worker whose model was loaded from `tensors`; its checkpoint is written to `folder`."""
    from weightsync.worker import vllm_compat
    from weightsync.worker.extension import WeightSyncExtension
    from weightsync.worker.vllm_compat import twin

    save_file(tensors, folder / "model.safetensors")
    config = _config(folder)
    model = loaded(parts, late, tensors, config)
    vllm_compat.note_loaded(model)

    class Worker(WeightSyncExtension):
        rank, device, vllm_config, model_runner = 0, "cpu", config, SimpleNamespace()

        def get_model(self) -> nn.Module:
            return model

    with patch.object(twin, "initialize_model", lambda vllm_config: Model(parts, late)):
        yield Worker()


def through_updates(
    _: dict[str, Any], parts: list[tuple[str, int]], late: bool, order: list[str], subset: list[str], way: str
) -> list[str]:
    """A complete update in some order, a part of one twice (offered, and admitted), a complete one again: what went wrong."""
    made = [Part(*part) for part in parts]
    sets = [weights(made, seed) for seed in range(3)]
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, running(made, late, sets[0], Path(folder)) as worker:
        bench = Bench(lambda name, *args: getattr(worker, name)(*args), worker)

        def complete(tensors: Tensors) -> None:
            report = bench.update({name: tensors[name] for name in order}, way=WAYS[way])
            have = held(bench.model)
            want = held(loaded(made, late, tensors, worker.vllm_config))
            wrong.extend([f"not verified: {report['error']}"] if report["state"] != "verified" else [])
            wrong.extend(path for path in have.keys() | want.keys() if not same_bits(have.get(path), want.get(path)))

        with bench.meeting_here():
            complete(sets[1])
            if 0 < len(subset) < len(order):
                wrong += _part_fails(bench, made, sets[2], subset, WAYS[way])
            complete(sets[2])
            bench.leave()
    return wrong


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is not None and right is not None and left.dtype == right.dtype and torch.equal(left, right)


def _part_fails(bench: Bench, parts: list[Part], tensors: Tensors, subset: list[str], way: Way) -> list[str]:
    wrong: list[str] = []
    before = held(bench.model)
    part, missing = {name: tensors[name] for name in subset}, lacking(parts, subset)
    if missing:
        report = bench.update(part, way=way)
        told = set(report["error"]["names"]) if report["error"] else set()
        if report["state"] != "refused" or not told <= missing or len(told) != min(len(missing), 20):
            wrong.append(f"without {sorted(missing)}: {report}")
        wrong += [path for path, tensor in held(bench.model).items() if not same_bits(tensor, before[path])]
    report = bench.update(part, Fault(admitted=True), way)
    told = set(report["error"]["names"]) if report["error"] else set()
    # Of a layer that came short all that did not come is told, also where another tensor could have filled the same place.
    layers = [{name.partition("/")[0] for name in names} for names in (told, missing)]
    if not missing <= told or layers[0] != layers[1] or told & set(subset) or report["at"] != ("apply" if missing else "verify"):
        wrong.append(f"admitted without {sorted(missing)}: {report}")
    return wrong
