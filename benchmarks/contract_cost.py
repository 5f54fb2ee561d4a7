"""What the storage contract costs: one command, one JSON file, medians of several repeats in one run.

    python -m benchmarks.contract_cost [--layers 48 --experts 128] [--device cpu|cuda]

The model is a tree of objects as vLLM's fused MoE models have it (parameters with
loaders, quantisation methods, kernel objects, configurations, partials, tables for
loading), with tensors of a few bytes: the contract's cost goes by the number of
objects and slots, not by bytes. On CUDA it is captured 30 times, each graph reading
every weight, and the whole seal runs as in a worker; on a CPU there are no graphs, so
the sweep for owners is timed by itself and added to the seal.

Not covered: copying what moved (bytes over bandwidth), and vLLM's own reload.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from weightsync.storage import census
from weightsync.storage.sweep import sweep

#: Seconds that the contract may take.
BUDGETS = {"census": 0.1, "seal": 2.0, "check": 0.005}
GRAPHS = 30
REPEATS = 9
_RESULTS = Path(__file__).parent / "results"


class Scheme:
    """Stands for a quantisation method with its kernel."""

    def __init__(self, layer: nn.Module, config: Any) -> None:
        self.config, self.kernel = config, None
        self.shapes = {"w13": (4, 4), "w2": (4, 4)}

    def load(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: str | int | None = None) -> None:
        parameter.data.copy_(loaded)


@dataclasses.dataclass
class QuantDesc:
    dtype: str
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclasses.dataclass
class QuantConfig:
    """What a fused expert kernel is told of its weights; holds the scales a second time."""

    w1: QuantDesc
    w2: QuantDesc
    a1: QuantDesc
    a2: QuantDesc


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    layer: int
    experts: int
    top_k: int = 8
    names: tuple[str, ...] = ("gate", "up", "down")


class Experts:
    """Stands for the experts' part of a modular kernel: strides that exist nowhere else."""

    def __init__(self, config: QuantConfig, experts: int, device: torch.device) -> None:
        self.quant_config, self.num_experts = config, experts
        for name in ("ab_strides1", "ab_strides2", "c_strides1", "c_strides2"):
            setattr(self, name, torch.full((experts,), 4, dtype=torch.int64, device=device))


def _parameter(layer: nn.Module, name: str, shape: tuple[int, ...], device: torch.device, scheme: Scheme) -> None:
    parameter = nn.Parameter(torch.zeros(shape, device=device), requires_grad=False)
    parameter.weight_loader = scheme.load  # type: ignore[attr-defined]
    parameter.output_dim, parameter.input_dim = 0, 1  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)


def _linear(shape: tuple[int, int], device: torch.device, config: Any) -> nn.Module:
    layer: Any = nn.Module()
    layer.quant_method = layer.scheme = Scheme(layer, config)
    _parameter(layer, "weight", shape, device, layer.scheme)
    _parameter(layer, "weight_scale", (shape[0], 1), device, layer.scheme)
    layer.scheme.kernel = SimpleNamespace(config=config, names=("weight", "weight_scale"))
    layer.output_sizes, layer.prefix = [shape[0]] * 3, "model.layers"
    return layer


def _norm(device: torch.device) -> nn.Module:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.ones(4, device=device), requires_grad=False)
    return layer


def _moe(config: LayerConfig, device: torch.device) -> nn.Module:
    mlp: Any = nn.Module()
    mlp.gate = _linear((config.experts, 4), device, config)
    layer: Any = nn.Module()
    layer.quant_method = Scheme(layer, config)
    for name, shape in {"w13_weight": (2, 4), "w2_weight": (4, 2), "w13_weight_scale": (2, 1), "w2_weight_scale": (4, 1)}.items():
        _parameter(layer, name, (config.experts, *shape), device, layer.quant_method)
    layer.register_buffer("e_score_correction_bias", torch.zeros(config.experts, device=device))
    quant = QuantConfig(
        QuantDesc("fp8", layer.w13_weight_scale), QuantDesc("fp8", layer.w2_weight_scale), QuantDesc("fp8"), QuantDesc("fp8")
    )
    fused = Experts(quant, config.experts, device)
    layer.quant_method.kernel = SimpleNamespace(
        fused_experts=fused, prepare_finalize=SimpleNamespace(rank=0), run=functools.partial(print, fused, sep=layer.w13_weight)
    )
    layer.mapping = [
        (f"experts.{shard}_", f"experts.{e}.{name}", e, shard) for e in range(config.experts) for shard, name in enumerate(config.names)
    ]
    layer.router = nn.Module()
    layer.router.select = functools.partial(torch.topk, k=config.top_k)
    layer.router.bias = layer.e_score_correction_bias
    layer.runner = nn.Module()
    layer.runner.routed = SimpleNamespace(layer=layer, quant=quant)
    mlp.experts = layer
    return mlp


def build(layers: int, experts: int, device: torch.device) -> nn.Module:
    """The model."""
    model: Any = nn.Module()
    model.embed = nn.Embedding(8, 4, device=device)
    model.layers = nn.ModuleList()
    rotary: Any = nn.Module()
    rotary.register_buffer("cos_sin_cache", torch.zeros(16, 4, device=device), persistent=False)
    for number in range(layers):
        config = LayerConfig(number, experts)
        layer, attention, kernel = (nn.Module() for _ in range(3))
        attention.qkv_proj, attention.o_proj = _linear((12, 4), device, config), _linear((4, 4), device, config)
        attention.q_norm, attention.k_norm, attention.rotary_emb = _norm(device), _norm(device), rotary
        for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            kernel.register_buffer(name, torch.ones((), device=device))
            setattr(kernel, f"{name}_float", 1.0)
        kernel.kv_cache, kernel.impl = [torch.zeros(2, 4, device=device)], SimpleNamespace(scale=0.5, heads=4, alibi=None)
        attention.attn, layer.self_attn = kernel, attention
        layer.input_layernorm, layer.post_attention_layernorm = _norm(device), _norm(device)
        layer.mlp = _moe(config, device)
        model.layers.append(layer)
    model.norm = _norm(device)
    return model


def capture(model: nn.Module, count: int) -> list[Any]:
    """Graphs that each read every tensor of the model that a kernel would be given."""
    kernels = (module.quant_method.kernel for module in model.modules() if hasattr(module, "quant_method"))
    strides = (kernel.fused_experts.ab_strides1 for kernel in kernels if hasattr(kernel, "fused_experts"))
    read = [*model.parameters(), *model.buffers(), *strides]
    for tensor in read:  # kernels are loaded on first use, which a capture may not allow
        torch.neg(tensor)
    torch.cuda.synchronize()
    graphs = []
    for _ in range(count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for tensor in read:
                torch.neg(tensor)
        graphs.append(graph)
    return graphs


def _time(call: Callable[[], Any], repeats: int = REPEATS) -> dict[str, float]:
    """Medians of several runs: what the clock says, and what this process used of it, which on a busy machine is less."""
    wall, cpu = [], []
    for _ in range(repeats):
        began, used = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    return {"wall": round(statistics.median(wall), 6), "cpu": round(statistics.median(cpu), 6)}


def measure(layers: int, experts: int, device: torch.device) -> dict[str, Any]:
    """Seconds and counts of one run."""
    census.install()
    from weightsync.worker.guard import Guard  # loads vLLM, whose modules the sweep has to go through

    model = build(layers, experts, device)
    runner = SimpleNamespace(model=model, inputs=torch.zeros(8, device=device), caches=[torch.zeros(8, device=device)])
    loose = {torch.zeros(8, device=device)}  # nobody owns it: the sweep goes through all globals in its search, as it must at worst
    graphs = capture(model, GRAPHS) if device.type == "cuda" else []
    guard = Guard(model, runner, device, graphs=bool(graphs))
    seconds = {"seal": _time(guard.seal), "sweep": _time(lambda: sweep({"model": model, "runner": runner}, lambda tensor: tensor in loose))}
    if graphs:  # a part of the seal, by itself as well
        seconds["census"] = _time(census.take)
    else:
        seconds["seal"] = {clock: round(took + seconds["sweep"][clock], 6) for clock, took in seconds["seal"].items()}
    repaired = guard.repair()
    seconds["repair"] = _time(guard.repair)
    seconds["check"] = _time(lambda: guard.verify(repaired), 10 * REPEATS)
    assert loose and guard.verify(repaired).ok
    return {
        "seconds": seconds,
        "within_budget": {name: seconds[name]["wall"] <= most for name, most in BUDGETS.items() if name in seconds},
        "counts": {
            "modules": sum(1 for _ in model.modules()),
            "slots": len(guard.contract.slots),
            "paths": len(guard.contract.places),
            "numbers": len(guard.contract.scalars),
            "graphs": len(graphs),
            "graph_nodes": sum(guard.report().nodes.values()),
            "python_modules": len(sys.modules),
        },
    }


def main() -> int:
    """Measure, write the file, print it; the exit status says whether every budget was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    before = os.getloadavg()[0]
    result = measure(given.layers, given.experts, torch.device(given.device))
    name = torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or platform.machine()
    result = {
        "device": name, "layers": given.layers, "experts": given.experts, "repeats": REPEATS, "budgets_seconds": BUDGETS,
        "cores": os.cpu_count(), "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "versions": {"python": platform.python_version(), "torch": torch.__version__}, **result,
    }  # fmt: skip
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"contract-cost-{given.device}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if all(result["within_budget"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
