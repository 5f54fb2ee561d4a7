"""Engines that follow `transformers.Trainer`, and any trainer that takes its callbacks (TRL's SFT and DPO, Axolotl).

    trainer = Trainer(model, args, train_dataset=…, callbacks=[follow(url, token, every_steps=10)])

Weights are synced when training begins, behind every so many optimizer steps, and when it ends; the version is the fleet's next one.
A sync that fails ends training with its error; engines serve the version they had. With DDP the first process sends and the others
make no call; with FSDP2 and DeepSpeed's ZeRO-3 all take part in the gathers. PEFT's adapters are merged on the way.

Tested with transformers 5.19.0 and accelerate 1.15.0, one process on a CPU. Sharded models by
`fleet.weights` alone (FSDP2, ZeRO-3). Not covered: FSDP1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainer_adapters.fleet import bring, connect
from weightsync import SyncReport, WeightSync, WeightSyncError


def follow(
    url: str,
    token: str,
    *,
    every_steps: int = 1,
    dtype: torch.dtype | None = None,
    adapter_only: bool = False,
    model: Any = None,
    **options: Any,
) -> Any:
    """A `transformers.TrainerCallback`, to make in every process.

    Args:
        url, token, options: of `WeightSync`.
        every_steps: optimizer steps between syncs.
        dtype: cast weights to it on the way, where the trainer holds float32 and the engines' checkpoint does not.
        adapter_only: send the model's LoRA alone, to engines that take adapters (`sync_weights`).
        model: when given it is synced now, so that one which does not fit the engines is refused before training.

    Returns:
        The callback. Its `report` is of the last sync, None in a process that makes no calls.

    Raises:
        WeightSyncError: what to change: nothing answers there, a wrong token, no engine, tensors that the engines' checkpoint has not.
    """
    from transformers import TrainerCallback

    if every_steps < 1:
        raise WeightSyncError(f"every_steps={every_steps}: want 1 or more")
    if not dist.is_initialized() or dist.get_rank() == 0:
        with connect(url, token, **options) as tried:
            if model is not None:
                bring(tried, model, dtype, adapter_only)

    class Follow(TrainerCallback):
        def __init__(self) -> None:
            self.report: SyncReport | None = None
            self._sync: WeightSync | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            shards = any(hasattr(p, "ds_tensor") or hasattr(p, "device_mesh") for p in model.parameters())
            if shards or state.is_world_process_zero:
                self._sync = connect(url, token, group=dist.group.WORLD if shards else None, **options)
            self._bring(model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            if state.global_step % every_steps == 0:
                self._bring(model)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            if state.global_step % every_steps:
                self._bring(model)
            if self._sync is not None:
                self._sync.close()

        def _bring(self, model: Any) -> None:
            if self._sync is not None:
                self.report = bring(self._sync, model, dtype, adapter_only)

    return Follow()
