"""SkyRL: weights go to the fleet as a `WeightTransferStrategy`.

    class Policy(FSDPPolicyWorkerBase):                    # of skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker
        async def init_weight_sync_state(self, *given):
            install(URL, TOKEN, rollouts_elsewhere=True)
            await super().init_weight_sync_state(*given)

and `ray.remote(num_gpus=1)(Policy)` in the place of SkyRL's policy worker. SkyRL chooses between its own two strategies by a function
that knows no other, so `install` replaces that function in the worker's process; no class is patched. Rank 0 sends; the others go through
SkyRL's gathers with it and make no call. Names, dtypes and shapes are known beforehand, so tensors pass one by one from the first sync.

SkyRL's own inference servers get no weights from this strategy. So that they don't go on with old ones unnoticed it is refused unless
`rollouts_elsewhere` says that nothing is sampled there (a generator of your own that calls `WeightSync.generate`).

Tested with skyrl 0.3.0 on a CPU: its real base classes, selector and chunks, with real engines behind. A whole run of SkyRL needs
GPUs and was not done. Not covered: Megatron, LoRA adapters (SkyRL loads those from disk by itself).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainer_adapters.fleet import Stream, connect
from weightsync import WeightSync, WeightSyncError


def strategy(url: str, token: str, *, rollouts_elsewhere: bool = False, **options: Any) -> type:
    """A `WeightTransferStrategy` for one fleet.

    Args:
        url, token, options: of `WeightSync`.
        rollouts_elsewhere: see the module.

    Raises:
        WeightSyncError: by `create_sender`, on the rank that sends, what to change: nothing answers there, the token is wrong, the fleet
            has no engine, SkyRL's own servers would keep old weights.
    """
    from skyrl.backends.skyrl_train.weight_sync import WeightSyncInitInfo, WeightTransferSender, WeightTransferStrategy

    class FleetInitInfo(WeightSyncInitInfo):
        def for_servers(self, *_: Any, **__: Any) -> list[Any]:
            """None of SkyRL's servers is told anything."""
            return []

    class FleetSender(WeightTransferSender):
        def __init__(self, sync: WeightSync | None) -> None:
            self._sync = sync
            self._stream: Stream | None = None

        async def send_chunks(self, chunks: Iterable[Any], weight_metadata: dict[str, list[Any]] | None = None) -> None:
            if self._sync is None:
                for _ in chunks:  # take part in the gathers
                    pass
            else:
                self._stream = self._stream or Stream(self._sync, specs=_specs(weight_metadata))
                await asyncio.to_thread(self._stream.send, _pairs(chunks))
            if dist.is_initialized():
                dist.barrier()

        def teardown(self) -> None:
            if self._sync is not None:
                self._sync.close()

    class FleetStrategy(WeightTransferStrategy):
        @staticmethod
        def create_init_info(ie_cfg: Any, inference_world_size: int | None = None) -> FleetInitInfo:
            return FleetInitInfo(override_existing_receiver=False)

        @staticmethod
        def create_sender(init_info: FleetInitInfo, inference_client: Any) -> FleetSender:
            if not rollouts_elsewhere:
                raise WeightSyncError(
                    "SkyRL's own inference servers would go on with old weights: these go to the fleet",
                    hint="Sample from the fleet and say rollouts_elsewhere=True",
                )
            sends = not dist.is_initialized() or dist.get_rank() == 0
            return FleetSender(connect(url, token, **options) if sends else None)

        @staticmethod
        def get_vllm_transfer_engine() -> type:
            raise NotImplementedError("the fleet's engines receive by themselves")

    return FleetStrategy


def install(url: str, token: str, **options: Any) -> None:
    """Have this process's SkyRL choose `strategy(url, token, …)`, whatever its configuration says."""
    from skyrl.backends.skyrl_train import weight_sync

    chosen = strategy(url, token, **options)
    weight_sync.get_transfer_strategy_cls = lambda weight_sync_backend, colocate_all: chosen


def _specs(metadata: dict[str, list[Any]] | None) -> list[tuple[str, torch.dtype, tuple[int, ...]]] | None:
    if metadata is None:
        return None
    rows = zip(metadata["names"], metadata["dtype_names"], metadata["shapes"], strict=True)
    return [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in rows]


def _pairs(chunks: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        yield from zip(chunk.names, chunk.tensors, strict=True)
