"""Release an engine's captured CUDA graphs and capture them anew.

For numbers that a kernel takes by value: a graph has the old one baked in, and
nothing but a new capture changes it. Done as vLLM does when it scales an engine:
graphs are dropped, their memory is given back, and the runner captures its own list
of sizes again. Takes as long as at the start of the engine.

Not covered: numbers that torch.compile has made constants of its code; adapters
without a path (vLLM drops all after a capture, and loads them again by their path).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, set_current_vllm_config

from weightsync.errors import UnsupportedEngine


def recapture(runner: Any, vllm_config: Any, release: Sequence[Callable[[], object]]) -> None:
    """Capture all graphs of a runner anew. The engine must be paused.

    Args:
        runner: vLLM's.
        vllm_config: the engine's configuration.
        release: of `graph_holders`. Once the first was called, only a capture that ends well makes the engine whole again.
    """
    second = hasattr(runner, "req_states")
    torch.cuda.synchronize()
    for let_go in release:
        let_go()
    gc.collect()
    torch.cuda.empty_cache()
    # The first runner captures with the blocks of whatever requests it has; the second has blocks for that.
    kept = contextlib.nullcontext() if second else runner.preserve_serving_state()
    with kept, set_current_vllm_config(vllm_config):
        runner.capture_model()


def captures_graphs(vllm_config: Any) -> bool:
    """Whether an engine was configured to capture graphs."""
    eager = vllm_config.model_config.enforce_eager
    return not eager and vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE


def graph_holders(runner: Any) -> list[Callable[[], object]]:
    """What lets go of each kind of graph, all looked up before the first is called.

    Raises:
        UnsupportedEngine: this runner has not what a new capture needs.
    """
    second = hasattr(runner, "req_states")
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    wanted = [(CUDAGraphWrapper, "clear_all_graphs"), (BreakableCUDAGraphWrapper, "clear_all_graphs"), (runner, "capture_model")]
    owners: list[Any] = [runner, getattr(runner, "speculator", None)] if second else []
    managers = [value for owner in owners if owner is not None for value in vars(owner).values() if isinstance(value, CudaGraphManager)]
    wanted += [(manager, "release_graphs") for manager in managers]
    if not second:
        wanted.append((runner, "preserve_serving_state"))
        if hasattr(type(runner.model), "clear_graphs"):  # microbatches have graphs of their own
            wanted.append((runner.model, "clear_graphs"))
    encoder = runner.model_state.encoder_runner if second and runner.model_state.supports_mm_inputs else None
    encoder = encoder or getattr(runner, "encoder_cudagraph_manager", None)
    if encoder is not None:
        wanted.append((encoder, "clear"))
    missing = [f"{type(owner).__name__}.{name}" for owner, name in wanted if not callable(getattr(owner, name, None))]
    if missing or (second and not managers):
        lacking = ", ".join(missing) or "CudaGraphManager"
        raise UnsupportedEngine(
            f"a number that captured graphs hold has changed, and they can't be captured anew: no {lacking}",
            hint="Restart this engine, or start it with enforce_eager",
        )
    return [getattr(owner, name) for owner, name in wanted if name not in ("capture_model", "preserve_serving_state")]
