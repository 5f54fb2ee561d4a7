"""The rows of the reload matrix: a checkpoint, and the engine that serves it.

Rows for CUDA name the kernel that they are about and force it where vLLM would
choose another. Rows for a CPU are the kinds of `tests/checkpoints.py`, by which
the harness itself is tested.

Rows with FlashInfer need its kernels compiled beforehand; see each row.

Not covered: adapters in use (only an engine that can take them); drafts in a folder
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import build
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

#: vLLM measures what else the GPU holds while it profiles: such an engine must have the GPU to itself (`--jobs 1`).
PROFILED: dict[str, Any] = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.06}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16}
#: On Hopper the default is FlashInfer's, which is compiled on first use.
GDN: dict[str, Any] = {"gdn_prefill_backend": "triton"}
#: vLLM turns FlashInfer off on a machine without nvcc, also where what a row needs was compiled elsewhere; this says it is there.
COMPILED = {"VLLM_HAS_FLASHINFER_CUBIN": "1"}
DRAFT: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


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
    name: str,
    about: str,
    kind: str = "",
    env: Mapping[str, str] | None = None,
    moe: str = "",
    linear: str = "",
    **engine_args: Any,
) -> tuple[str, Row]:
    """A row whose checkpoint is of the kind `kind`, by default of its own name; `moe` and `linear` force a kernel."""
    backends = {key: value for key, value in (("moe_backend", moe), ("linear_backend", linear)) if value}
    if backends:
        engine_args["kernel_config"] = backends
    return name, Row(name, about, lambda folder, seed: build(kind or name, folder, seed), engine_args, env or {})


_DENSE = (
    _cuda("dense-bf16", "Qwen3 dense, bf16"),
    _cuda("dense-bf16-profiled", "Qwen3 dense, bf16, KV cache sized by vLLM's profiling", "dense-bf16", **PROFILED),
    _cuda("dense-fp8-channel", "Qwen3 dense, FP8 per channel"),
    _cuda("dense-fp8-online", "Qwen3 dense, bf16 quantised to FP8 by the engine", "dense-bf16", quantization="fp8"),
    _cuda(
        "dense-fp8-kv", "Qwen3 dense, FP8 KV cache with the checkpoint's scales (FlashInfer)",
        env=COMPILED, linear="cutlass", kv_cache_dtype="fp8",
        attention_config={"backend": "FLASHINFER", "use_trtllm_attention": False},
    ),
    _cuda(
        "dense-fp8-kv-xqa", "Qwen3 dense, FP8 KV cache with the checkpoint's scales (FlashInfer, XQA)", "dense-fp8-kv",
        env=COMPILED, linear="cutlass", kv_cache_dtype="fp8", attention_config={"backend": "FLASHINFER"},
    ),
    _cuda(
        "dense-fp8-kv-fa", "Qwen3 dense, FP8 KV cache with the checkpoint's scales (FlashAttention 3)", "dense-fp8-kv",
        linear="cutlass", kv_cache_dtype="fp8", attention_config={"backend": "FLASH_ATTN"},
    ),
    _cuda("dense-w4a16", "Qwen3 dense, W4A16 g128 (Machete)", linear="machete"),
    _cuda("dense-w4a8", "Qwen3 dense, W4A8 g128 (CUTLASS)", linear="cutlass"),
    _cuda("dense-wna8o8", "Qwen3 dense, W4 g128 with static INT8 inputs and outputs (Machete)", linear="machete"),
    _cuda("dense-gptq-marlin-bias", "Qwen2.5-like, GPTQ W4A16 with qkv bias (Marlin)", "dense-gptq-bias", linear="marlin"),
    _cuda("dense-awq-marlin-bias", "Qwen2.5-like, AWQ W4A16 with qkv bias (Marlin)", "dense-awq-bias", linear="marlin"),
    _cuda("dense-humming", "Qwen2.5-like, GPTQ W4A16 with qkv bias (Humming)", "dense-gptq-bias", linear="humming"),
    _cuda("dense-nvfp4-marlin", "Qwen3 dense, NVFP4 weights (Marlin)", "dense-nvfp4", linear="marlin"),
    _cuda("dense-lora", "Qwen3 dense, bf16, in an engine that takes LoRA adapters", "dense-bf16", **LORA),
)  # fmt: skip

_MOE = (
    _cuda("moe-bf16", "Qwen3-MoE, bf16 (Triton)", moe="triton"),
    _cuda("moe-fp8-channel", "Qwen3-MoE, FP8 per channel (CUTLASS)", moe="cutlass"),
    _cuda("moe-fp8-static", "Qwen3-MoE, FP8 per tensor, static input scales (CUTLASS)", moe="cutlass"),
    _cuda("moe-fp8-online", "Qwen3-MoE, bf16 quantised to FP8 by the engine", "moe-bf16", quantization="fp8"),
    _cuda("moe-fp8-block", "Qwen3-MoE, FP8 in blocks of 128 x 128 (Triton)", moe="triton", linear="triton"),
    _cuda("moe-w4a16", "Qwen3-MoE, W4A16 g128 (Humming)", moe="humming", linear="machete"),
    _cuda("moe-w4a16-marlin", "Qwen3-MoE, W4A16 g128 (Marlin)", "moe-w4a16", moe="marlin", linear="machete"),
    _cuda("moe-w4a8", "Qwen3-MoE, W4A8 g128 (CUTLASS)", moe="cutlass", linear="cutlass"),
    _cuda("moe-nvfp4-marlin", "Qwen3-MoE, NVFP4 weights (Marlin)", "moe-nvfp4", moe="marlin", linear="marlin"),
    _cuda("moe-shared-gate", "Qwen3-Next, a shared expert's gate joined to the router", moe="triton", **GDN),
    _cuda("gpt-oss-mxfp4", "gpt-oss, MXFP4 (Triton)"),
    _cuda("mla-bf16", "DeepSeek-V3-like MLA and experts, bf16", moe="triton"),
    _cuda("mla-fp8-channel", "DeepSeek-V3-like MLA and experts, FP8 per channel", moe="cutlass"),
)

#: These need FlashInfer's library for mixtures of experts on SM90, `fused_moe_90`; compiling it takes nvcc many minutes.
_MOE_FLASHINFER = (
    _cuda(
        "moe-fp8-tensor-flashinfer", "EXAONE-MoE, FP8 per tensor, static input scales, limited activation (FlashInfer CUTLASS)",
        "moe-fp8-static-limit", COMPILED, moe="flashinfer_cutlass", linear="cutlass",
    ),
    _cuda(
        "moe-fp8-block-flashinfer", "Qwen3-MoE, FP8 in blocks of 128 x 128 (FlashInfer CUTLASS)",
        "moe-fp8-block", COMPILED | {"TRTLLM_DG_ENABLED": "0"},  # its DeepGEMM part calls nvcc while the engine runs
        moe="flashinfer_cutlass", linear="triton",
    ),
    _cuda(
        "gpt-oss-mxfp4-flashinfer", "gpt-oss, MXFP4, bf16 activations (FlashInfer CUTLASS)",
        "gpt-oss-mxfp4", COMPILED, moe="flashinfer_cutlass",
    ),
)  # fmt: skip

_OTHER = (
    _cuda("hybrid-mamba", "Nemotron-H: Mamba2, MLP, attention, bf16"),
    _cuda("hybrid-gdn", "Qwen3-Next: gated delta net, attention, experts, bf16 (Triton)", moe="triton", **GDN),
    _cuda("mtp-draft", "DeepSeek-V3-like, with its own layer that drafts a token, bf16", moe="triton", **DRAFT),
)

ROWS: dict[str, dict[str, Row]] = {
    "cuda": dict([*_DENSE, *_MOE, *_MOE_FLASHINFER, *_OTHER]),
    "cpu": {
        kind: Row(kind, f"{kind}, on a CPU", lambda folder, seed, kind=kind: checkpoints.build(kind, folder, seed))  # type: ignore[misc]
        for kind in checkpoints.KINDS
    },
}
