"""The rows of the reload matrix: a checkpoint, and the engine that serves it.

Rows for CUDA name the kernel that they are about and force it where vLLM would
choose another. Rows for a CPU are the kinds of `tests/checkpoints.py`, by which
the harness itself is tested.

Not covered: rows that need a kernel compiled on first use (FlashInfer CUTLASS), a
draft model or adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import matrix_checkpoints
from tests import checkpoints

#: For every engine of a run, over which a row's own arguments go.
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "cuda": {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.05,  # many engines share one GPU, and vLLM wants this much of it free at start
        "enforce_eager": False,
        "cudagraph_capture_sizes": [1, 2, 4],
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "kernel_config": {"enable_flashinfer_autotune": False},
    },
    "cpu": {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    },
}


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        name: how it is called on the command line and in the results.
        about: what it shows, for the table.
        build: writes the checkpoint of a seed into a folder.
        engine_args: vLLM's; a `kernel_config` here is merged into the common one.
        env: variables of the engine's process.
    """

    name: str
    about: str
    build: Callable[[Path, int], Path]
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, device: str) -> dict[str, Any]:
        """The engine's arguments on a device."""
        common = ENGINE_ARGS[device]
        own = dict(self.engine_args) if device == "cuda" else {k: v for k, v in self.engine_args.items() if k != "kernel_config"}
        if "kernel_config" in own:
            own["kernel_config"] = {**common["kernel_config"], **own["kernel_config"]}
        return {**common, **own}


def _cuda(
    name: str, about: str, kind: str = "", env: Mapping[str, str] | None = None, moe_backend: str = "", **engine_args: Any
) -> tuple[str, Row]:
    if moe_backend:
        engine_args["kernel_config"] = {"moe_backend": moe_backend}
    return name, Row(name, about, lambda folder, seed: matrix_checkpoints.build(kind or name, folder, seed), engine_args, env or {})


ROWS: dict[str, dict[str, Row]] = {
    "cuda": dict(
        [
            _cuda("dense-bf16", "Qwen3 dense, bf16"),
            _cuda("dense-fp8-channel", "Qwen3 dense, FP8 per channel"),
            _cuda("dense-w4a16", "Qwen3 dense, W4A16 g128 (Machete)"),
            _cuda(
                "dense-gptq-bias", "Qwen2.5-like, GPTQ W4A16 with qkv bias (Marlin)", env={"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}
            ),
            _cuda("moe-bf16", "Qwen3-MoE, bf16 (Triton)", moe_backend="triton"),
            _cuda("moe-fp8-channel", "Qwen3-MoE, FP8 per channel (CUTLASS)", moe_backend="cutlass"),
            _cuda("moe-fp8-static", "Qwen3-MoE, FP8 per tensor, static input scales (CUTLASS)", moe_backend="cutlass"),
            _cuda("moe-w4a16", "Qwen3-MoE, W4A16 g128"),
            _cuda("gpt-oss-mxfp4", "gpt-oss, MXFP4 (Triton)"),
            _cuda("mla-bf16", "DeepSeek-V3-like MLA and experts, bf16", moe_backend="triton"),
            _cuda("mla-fp8-channel", "DeepSeek-V3-like MLA and experts, FP8 per channel", moe_backend="cutlass"),
            _cuda("dense-fp8-online", "Qwen3 dense, bf16 quantised to FP8 by the engine", "dense-bf16", quantization="fp8"),
            _cuda("moe-fp8-online", "Qwen3-MoE, bf16 quantised to FP8 by the engine", "moe-bf16", quantization="fp8"),
        ]
    ),
    "cpu": {
        kind: Row(kind, f"{kind}, on a CPU", lambda folder, seed, kind=kind: checkpoints.build(kind, folder, seed))  # type: ignore[misc]
        for kind in checkpoints.KINDS
    },
}
