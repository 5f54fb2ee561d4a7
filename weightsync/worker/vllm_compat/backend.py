"""The weight-transfer backend under our name, so that vLLM makes room for updates and leaves them to us.

Not covered: vLLM's own update calls; each is refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from weightsync.errors import UnsupportedEngine

BACKEND = "weightsync"


class _ManagedByWeightsync(WeightTransferEngine):
    """Holds the backend's place: updates come through the worker extension, never through vLLM's own calls."""

    init_info_cls = dict
    update_info_cls = dict

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise UnsupportedEngine("this engine's weights are managed by weightsync", hint="Call sync_weights() on the service")

    init_transfer_engine = start_weight_update = receive_weights = finish_weight_update = _refuse

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        raise UnsupportedEngine("use weightsync.client.WeightSync to send weights")


with contextlib.suppress(ValueError):  # registered already in this process
    WeightTransferEngineFactory.register_engine(BACKEND, _ManagedByWeightsync)
