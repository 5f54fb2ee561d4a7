"""Constants that vLLM's FlashInfer CUTLASS experts make anew with each load: captured graphs must keep their memory.

The class is vLLM's own, built directly: the path that leads to all four constants
(MXFP4 weights with MXFP8 activations) needs a Blackwell card. On a CPU the stand-in
graph reads them, on CUDA a captured one.

Not covered: the kernel that these constants are for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.standin import ReadsFreedMemory, StandinGraph, Warm, layer_of, model_of, parameter
from weightsync.worker.guard import Guard

CONSTANTS = ("fake_input_scale", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
VALUES = {"fake_input_scale": 1.0, "gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0}
EXPERTS = 4


@pytest.fixture(autouse=True)
def with_vllm() -> None:
    pytest.importorskip("vllm")


def experts(device: str) -> Any:
    """vLLM's experts as gpt-oss has them on a card that takes MXFP8 activations."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import FlashInferExperts

    scale = torch.ones(EXPERTS, device=device)
    quant = config.mxfp4_mxfp8_moe_quant_config(scale, scale, gemm1_alpha=1.702, gemm1_beta=1.0, gemm1_clamp_limit=7.0)
    alone = config.FusedMoEParallelConfig.make_no_parallel()
    moe = config.FusedMoEConfig(
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        experts_per_token=2,
        hidden_dim=64,
        intermediate_size=64,
        activation=MoEActivation.SWIGLUOAI,
        device=device,
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=alone,
        in_dtype=torch.bfloat16,
        intermediate_size_per_partition=64,
    )
    return FlashInferExperts(moe, quant)


def model(device: str) -> Callable[[], nn.Module]:
    """One layer whose processing builds its experts, as `FusedMoE` does after every load."""

    def process(layer: Any) -> None:
        layer.quant_method.kernel = experts(device)

    return lambda: model_of(moe=layer_of(process, weight=parameter(8)))


def weights(version: float) -> Mapping[str, torch.Tensor]:
    return {"moe.weight": torch.full((8,), version)}


def test_the_same_addresses_hold_the_same_constants_after_each_update() -> None:
    stock = Warm(model("cpu"), weights(1))
    stock.release()  # no contract keeps the memory
    captured = StandinGraph({name: getattr(stock.model.moe.quant_method.kernel, name) for name in CONSTANTS})
    stock.stock(weights(2))
    with pytest.raises(ReadsFreedMemory, match="fake_input_scale, gemm1_alpha, gemm1_beta, gemm1_clamp_limit"):
        captured.replay()

    warm = Warm(model("cpu"), weights(1))
    kernel = warm.model.moe.quant_method.kernel
    graph = StandinGraph({name: getattr(kernel, name) for name in CONSTANTS})
    del kernel
    for version in (2, 3, 1):
        assert {f"model.moe.quant_method.kernel.{name}" for name in CONSTANTS} <= set(warm.ours(weights(version)).adopted)
        seen: Any = graph.replay()
        assert all(torch.equal(seen[name], torch.full((EXPERTS,), VALUES[name])) for name in CONSTANTS)
        assert warm.verdict().ok


@contextmanager
def counted() -> Iterator[None]:
    from weightsync.storage import census

    assert census.install()
    try:
        yield
    finally:
        census.uninstall()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kept", [False, True], ids=["stock", "contract"])
def test_a_captured_graph_reads_its_constants_under_memory_pressure(kept: bool) -> None:
    made = model("cuda")()
    layer: Any = made.moe.cuda()
    layer.quant_method.process_weights_after_loading(layer)
    held = layer.quant_method.kernel
    out = torch.zeros(len(CONSTANTS), EXPERTS, device="cuda")
    with counted():
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for row, name in enumerate(CONSTANTS):
                torch.mul(getattr(held, name), 2.0, out=out[row])
        del held
        guard = Guard(made, object(), torch.device("cuda", 0), graphs=True) if kept else None
        expected = torch.tensor([[VALUES[name] * 2] * EXPERTS for name in CONSTANTS], device="cuda")
        right = []
        for _ in range(3):
            layer.quant_method.process_weights_after_loading(layer)
            gc.collect()  # the old experts are part of a cycle
            if guard is not None:
                repaired = guard.repair()
                assert set(CONSTANTS) <= {path.rsplit(".", 1)[1] for path in repaired.adopted}
                assert guard.broken(repaired, guard.verify(repaired)) is None
            pressure = [torch.full((EXPERTS,), float("nan"), device="cuda") for _ in range(4096)]
            graph.replay()
            torch.cuda.synchronize()
            right.append(torch.equal(out, expected))
            del pressure
        assert all(right) is kept
