"""A worker in which two values go stale, as a kernel's cached copy would: one at the second update, one at the third.

Not covered: anything but a Qwen3 of two layers.
"""

from __future__ import annotations

from typing import Any

from weightsync.worker.extension import WeightSyncExtension

#: Number of the update, and what it leaves as it was.
LEFT = {2: "model.layers.0.input_layernorm.weight", 3: "model.layers.1.input_layernorm.weight"}


class StaleExtension(WeightSyncExtension):
    """Everything is proved but the values, and they are old."""

    def weightsync_apply(self, update_id: str) -> dict[str, Any]:
        worker: Any = self
        self._applied = getattr(self, "_applied", 0) + 1
        left = dict(worker.get_model().named_parameters()).get(LEFT.get(self._applied, ""))
        old = left.detach().clone() if left is not None else None
        report = super().weightsync_apply(update_id)
        if left is not None and old is not None:
            left.data.copy_(old)
        return report
