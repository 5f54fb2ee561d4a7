"""TRL's experimental asynchronous GRPO: weights go to the fleet by its official hook, `weight_transfer=`.

    trainer = AsyncGRPOTrainer(model, …, weight_transfer=FleetTransfer(url, token), rollout_worker=…)

`pause` and `resume` do nothing: engines serve while the bytes travel, and the service has each stand still for the moment in which it
is written. An update that fails raises, and the engines serve the version they had.

TRL hands over an iterator and no names before it, so the first sync is copied to host memory, whole; later ones pass
tensor by tensor (`fleet.Stream`). With several processes the first one sends; the others go through TRL's own gathers. Adapters of PEFT are
merged by TRL, in place, before it calls this.

Rollouts: TRL's own worker posts to a server without a token, which engines of a fleet refuse; `rollout_worker=` takes one that calls
`WeightSync.generate`.

Tested with trl 1.16.0: the protocol's calls in their order with a real fleet. TRL's asynchronous trainer itself
needs a GPU for its attention kernels and was not run. Not covered: adapter-only syncs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainer_adapters.fleet import Stream, connect
from weightsync import SyncReport


class FleetTransfer:
    """TRL's `WeightTransferProtocol`.

    Args:
        url, token, options: of `WeightSync`.
        dtype: cast weights to it on the way, where the trainer holds float32 and the engines' checkpoint does not.

    Attributes:
        report: of the last sync.

    Raises:
        WeightSyncError: what to change: nothing answers there, the token is wrong, the fleet has no engine.
    """

    def __init__(self, url: str, token: str, *, dtype: torch.dtype | None = None, **options: Any) -> None:
        self._sync = connect(url, token, **options)
        self._stream = Stream(self._sync, dtype)
        self.report: SyncReport | None = None

    def init_weight_transfer(self) -> None:
        """TRL calls this when training begins, before the first sync."""
        self._sync.status()

    def pause(self) -> None:
        """Nothing to do: see the module."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """One update of the whole fleet; its version rises by one."""
        self.report = self._stream.send(iterator)

    def resume(self) -> None:
        """Nothing to do: see the module."""

    def destroy(self) -> None:
        """TRL calls this when training ends."""
        self._sync.close()
