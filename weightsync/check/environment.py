"""Variables for a process that hosts one engine, by kind of device; set before torch and vLLM are imported.

Not covered: anything that picks a kernel.
"""

from __future__ import annotations

_COMMON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where its memory can be looked at
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

ENGINE_ENV: dict[str, dict[str, str]] = {
    "cuda": {
        **_COMMON,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled on first use
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    },
    "cpu": {
        **_COMMON,
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
}
