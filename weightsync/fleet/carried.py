"""The adapter that every request of an engine goes with, named by the update that brought it; nobody asks for it by name.

Of an engine that takes adapters all requests go with one and the same (`worker.vllm_compat.adapters`), zeros before the first and behind
an update without one. So those in flight go on with what is committed, as they do with weights. vLLM has the name in the hash of
what it caches of prompts: what was computed with another adapter is not found again, whatever `sync.caches` says.

Not covered: requests for adapters of a client's own, which no route of an engine loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsync.protocol import Adapter, WorkerReport
from weightsync.worker.naming import ADAPTER_NUMBER, ADAPTER_PATH, TAKES

#: Of an engine without an adapter.
_NONE = "weightsync"


class Carried:
    """Stands before `AsyncLLM.add_request`, the way of every request.

    Args:
        llm: an `AsyncLLM`.

    Attributes:
        name: of the adapter; empty where there is none.
    """

    def __init__(self, llm: Any) -> None:
        self.name = ""
        self._llm, self._stock = llm, llm.add_request
        self._request: Any = None  # vLLM's, with which all go

    def open(self, reports: Sequence[WorkerReport]) -> None:
        """From now on, if that is what the workers have a slot for."""
        if all(report.checks.get(TAKES) for report in reports):
            self._llm.add_request = self._add_request
            self._name()

    def carry(self, name: str) -> None:
        """Requests that come from now on go with the adapter of this name; with none where it is empty."""
        self.name = name
        if self._request is not None:
            self._name()

    def _name(self) -> None:
        from vllm.lora.request import LoRARequest

        self._request = LoRARequest(self.name or _NONE, ADAPTER_NUMBER, ADAPTER_PATH)

    async def _add_request(self, *args: Any, lora_request: Any = None, **more: Any) -> Any:
        return await self._stock(*args, lora_request=lora_request or self._request, **more)


def name_of(version: int, update_id: str, brings: str) -> str:
    """What an adapter is called: no two updates' are alike, also where a version comes again; empty for none.

    Args:
        brings: what the update brings of one (`Adapter`).
    """
    return "" if brings == Adapter.NONE else f"weightsync-{version}-{update_id[-12:]}"
