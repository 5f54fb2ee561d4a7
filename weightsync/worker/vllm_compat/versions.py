"""Which vLLM was proved: its version, and the source of every function that is replaced or leaned on.

Not covered: functions that are merely called; a change of theirs shows in the tests.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import vllm
from vllm.model_executor.model_loader.reload import layerwise, meta

from weightsync.errors import UnknownVllm

#: Versions on which the reload functions used here were read and run.
PROVED_VERSIONS = ("0.32.0", "0.33.0")
#: Functions of vLLM that are replaced or leaned on, by module, with the SHA-256 of their source.
PROVED_SOURCES = {
    layerwise: {
        "initialize_layerwise_reload": {"4c6218fa7fce5c7d"},
        "finalize_layerwise_processing": {"db59bf9798b9eaed"},
        "_layerwise_process": {"fde7490d7e642b34"},
        "_copy_and_restore_kernel_tensors": {"c98331c098210ea3"},
        "_place_kernel_tensors": {"9a7d866d7e5dcac8"},
        # Calls what counts elements, and drops what comes after a layer was processed.
        "make_online_process_loader": {"69f7eddcc51ba195"},
        "_wrap_parameters_weight_loader": {"a6cfd5539e68b7f1"},
        "_get_original_loader": {"451476e6c046a6b1"},
        "_finalize_attention_layer": {"6d4d9b2613914d1d"},
        "_reload_attention_scales": {"a214bc0d105903eb"},
    },
    meta: {
        "materialize_layer": {"4684fdc8b9d6e6cf"},
        "restore_layer_on_meta": {"6f38d66d15f04188"},
        "get_numel_loaded": {"03a702f458ad8cb5"},
    },
}


def told(vllm_config: Any) -> dict[str, Any]:
    """What the service told this engine's workers: `strict`, `unknown_vllm`, `frozen`; empty where all are at their defaults."""
    found: dict[str, Any] = (vllm_config.additional_config or {}).get("weightsync", {})
    return found


def vllm_version() -> str:
    """The installed version without its local part, for example `0.32.0`."""
    return str(vllm.__version__).split("+")[0]


def require_supported() -> None:
    """Refuse a vLLM whose reload code was not read.

    Raises:
        UnknownVllm: names the version found and those proved.
    """
    if vllm_version() not in PROVED_VERSIONS:
        raise UnknownVllm(
            f"vLLM {vllm_version()} has not been proved; proved are {', '.join(PROVED_VERSIONS)}",
            hint="Install one of those",
        )
    for module, functions in PROVED_SOURCES.items():
        require_sources(module, functions)


def require_sources(owner: ModuleType | type, functions: Mapping[str, set[str]]) -> None:
    """Refuse functions that are not those that were read.

    Args:
        owner: module or class that has them.
        functions: name to the hashes of sources that were proved.

    Raises:
        UnknownVllm: names the function.
    """
    for name, proved in functions.items():
        try:
            source = inspect.getsource(_unwrapped(getattr(owner, name)))
        except (OSError, AttributeError, TypeError):  # replaced at run time by something that has none, or gone
            source = ""
        if hashlib.sha256(source.encode()).hexdigest()[:16] not in proved:
            raise UnknownVllm(
                f"vLLM {vllm_version()}: {name} in {owner.__name__} is not the one that was proved",
                hint="Install an unchanged vLLM of a proved version",
            )


def _unwrapped(function: Any) -> Any:
    """The function below the decorators that it was proved with. `inspect` would look through anybody's, and show what isn't run."""
    while hasattr(function, "__wrapped__"):
        if str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0] not in ("torch", "vllm", "contextlib"):
            raise AttributeError("wrapped by somebody else")
        function = function.__wrapped__
    return function
