"""A KV connector for tests that keeps nothing and writes down what it is asked; loaded inside the engine by its module's name.

In the folder that `kv_connector_extra_config` names it appends to `log` a line for
each reset and for each request that begins, and answers "not done" to as many
resets as the file `refusals` says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole


class RecordingConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._folder = Path(vllm_config.kv_transfer_config.get_from_extra_config("folder", ""))

    def _note(self, line: str) -> None:
        with (self._folder / "log").open("a") as log:
            log.write(line + "\n")

    def reset_cache(self) -> bool:
        left = self._folder / "refusals"
        refusals = int(left.read_text()) if left.exists() else 0
        left.write_text(str(max(0, refusals - 1)))
        self._note("refused" if refusals else "reset")
        return not refusals

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._note(f"begin {request.num_tokens} tokens, {num_computed_tokens} from the cache")
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class ForgetfulConnector(RecordingConnector):
    """One that can't be reset: vLLM takes its silence for success."""

    reset_cache = KVConnectorBase_V1.reset_cache
