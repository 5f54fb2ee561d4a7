"""Where the demo's processes run: everything on the CPU, or engines with CUDA graphs and the trainer on GPUs. Pure.

    GPUs            engines                            trainer              transport
    --------------  ---------------------------------  -------------------  -------------------------------------------
    none            CPU                                CPU                  gloo
    one             a share of it each                 the same GPU         shared memory of the GPU
    as many as       one each                          GPU 0                shared memory to the engine there, else NCCL
    engines, or fewer
    more            one each                           a GPU of its own     NCCL

Not covered: machines with GPUs of several kinds, and engines over several GPUs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

#: What the fleet's engines and the cold engine are both started with.
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
}
ENGINE_EXTRA: dict[str, Any] = {"max_num_batched_tokens": 1024, "enable_prefix_caching": False}
#: On a GPU that others share: what vLLM wants to see free at its start, few graphs, and no search for the fastest kernel.
CUDA_EXTRA: dict[str, Any] = {
    "gpu_memory_utilization": 0.2,
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    "kernel_config": {"enable_flashinfer_autotune": False},
}


@dataclass(frozen=True)
class Place:
    """One division of a machine.

    Attributes:
        device: of the engines, `cpu` or `cuda`.
        trainer: torch's name of the trainer's device.
        gpus: what Ray reserves for one engine.
        extra: vLLM's further arguments.
    """

    device: str = "cpu"
    trainer: str = "cpu"
    gpus: float = 0.0
    extra: dict[str, Any] = field(default_factory=lambda: dict(ENGINE_EXTRA))

    @property
    def cold_args(self) -> dict[str, Any]:
        """vLLM's arguments of the cold engine: as the fleet's, graphs included."""
        return ENGINE_ARGS | self.extra | {"enforce_eager": self.device == "cpu"}

    @property
    def flags(self) -> dict[str, str]:
        """Settings of `weightsync serve`."""
        flags = {f"engine.{key}": str(value) for key, value in ENGINE_ARGS.items()}
        flags |= {"engine.device": self.device, "engine.extra": json.dumps(self.extra)}
        if self.device == "cuda":
            # Says of every tensor that engines keep as it is loaded whether it holds the bytes that were sent.
            flags |= {"engine.gpus": str(self.gpus), "sync.verify_stored": "true"}
        return flags


def divide(engines: int, gpus: int) -> Place:
    """Divide a machine with so many GPUs, none for the CPU."""
    if not gpus:
        return Place()
    on_one = -(-engines // gpus)  # engines that share a GPU, in the fullest
    trainer = gpus - 1 if gpus > engines else 0
    # Ray gives whole GPUs out from the first on, and hundredths of one.
    return Place("cuda", f"cuda:{trainer}", 1.0 if on_one == 1 else int(100 / on_one) / 100, ENGINE_EXTRA | CUDA_EXTRA)
