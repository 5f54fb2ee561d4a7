"""verl: weights go to the fleet as a checkpoint engine, by its official registry and configuration.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=trainer_adapters.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weightsync={url: URL, token_file: FILE, rollouts_elsewhere: true}

Rank 0 of the actors sends; the others go through verl's gathers with it and make no call. verl hands over an iterator and no names before
it, so the first sync is copied to host memory, whole; later ones pass tensor by tensor (`fleet.Stream`). The version is the fleet's next.

verl's own rollout workers get no weights from this engine. So that they don't go on with old ones unnoticed, an update is refused while
there are any, unless `rollouts_elsewhere` says that nothing is sampled there: `verl_rollouts` samples from the fleet.

verl imports this module by its name, so it imports verl. Tested with verl 0.9.1 on a CPU: the registry, and the engine's calls in the
manager's order with real engines behind. A whole run of verl needs GPUs and was not done. Not covered: adapter-only syncs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from trainer_adapters.fleet import Stream, connect
from weightsync import WeightSyncError


@CheckpointEngineRegistry.register("weightsync")
class FleetCheckpointEngine(CheckpointEngine):
    """The fleet as a checkpoint engine.

    Args:
        bucket_size: of verl's own engines; not used here, where `bucket_bytes` of `options` is.
        url: the service.
        token_file: holds its token.
        is_master: whether this process sends; verl says so.
        rollouts_elsewhere: see the module.
        dtype: cast weights to it on the way, where the actors hold float32 and the engines' checkpoint does not (`bfloat16`).
        options: of `WeightSync`.

    Raises:
        WeightSyncError: what to change: nothing answers there, the token is wrong, the fleet has no engine.
    """

    def __init__(
        self,
        bucket_size: int,
        url: str,
        token_file: str,
        is_master: bool = False,
        rollouts_elsewhere: bool = False,
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        self._elsewhere = rollouts_elsewhere
        self._stream: Stream | None = None
        if is_master:
            sync = connect(url, Path(token_file).read_text().strip(), **options)
            self._stream = Stream(sync, None if dtype is None else getattr(torch, dtype))

    def prepare(self) -> dict[str, Any]:
        """Nothing to allocate: buckets are the client's own."""
        return {"rollouts_elsewhere": self._elsewhere}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Who is who is the service's business.

        Raises:
            WeightSyncError: verl's own rollout workers would keep old weights.
        """
        if rollout_world_size and not metadata[0]["rollouts_elsewhere"]:
            raise WeightSyncError(
                f"{rollout_world_size} rollout worker(s) of verl's own would go on with old weights: these go to the fleet",
                hint="Sample from the fleet (trainer_adapters.verl_rollouts) and say engine_kwargs.weightsync.rollouts_elsewhere=true",
            )
        return {"rank": list(range(actor_wg_world_size))}, {"rank": [-1] * rollout_world_size}

    def init_process_group(self, rank: int) -> None:
        """The client meets the engines by itself."""

    def finalize(self) -> None:
        """Kept for the next update."""

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict[str, float]:
        """One update of the whole fleet; every rank calls this.

        Returns:
            For the trainer's log, from the rank that sends.
        """
        if self._stream is None:
            for _ in weights:  # take part in the gathers
                pass
            return {}
        report = await asyncio.to_thread(self._stream.send, weights)
        figures = {"version": report.version, "bytes": report.nbytes, "pause_seconds": report.pause_seconds}
        return {f"weightsync/{name}": float(value) for name, value in (figures | {"seconds": report.seconds["total"]}).items()}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Nothing: see the module."""
        none: list[tuple[str, torch.Tensor]] = []
        for pair in none:
            yield pair
