"""OpenRLHF: the fleet follows the policy, beside OpenRLHF's own engines.

    import runpy, openrlhf.trainer.ray.ppo_actor as ppo_actor
    ppo_actor.PolicyModelActor = policy(URL, TOKEN)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")     # with its usual arguments

OpenRLHF has no hook for it: `policy` makes a subclass of its Ray actor, whose `broadcast_to_vllm` does what it did and then syncs the
fleet. Its own engines sample its rollouts as before; the fleet serves the same weights for evaluation, agents and other users. Rank 0
sends; with ZeRO-3 all ranks take part in the gathers, and without it the others make no call.

Tested with openrlhf 0.11.2 on a CPU: its real classes, where flash-attn, which they import and a CPU can't build, was stood in for by empty
modules; the sync itself with real engines behind. A whole run of OpenRLHF needs GPUs and was not done, nor was ZeRO-3. Not covered:
DeepSpeed's tensor parallelism (refused).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainer_adapters.fleet import bring, connect
from weightsync import SyncReport, WeightSyncError


class Follower:
    """Brings the policy of an `ActorPPOTrainer` to the fleet; every rank makes one.

    Args:
        trainer: OpenRLHF's.
        url, token, options: of `WeightSync`.
        dtype: cast weights to it on the way; OpenRLHF's `param_dtype` is most often that of the checkpoint.

    Raises:
        WeightSyncError: what to change: nothing answers there, the token is wrong, the fleet has no engine; weights that tensor
            parallelism has cut.
    """

    def __init__(self, trainer: Any, url: str, token: str, *, dtype: torch.dtype | None = None, **options: Any) -> None:
        settings = trainer.strategy.args.ds
        if settings.tensor_parallel_size > 1:
            raise WeightSyncError("weights that DeepSpeed's tensor parallelism has cut can't be sent", hint="Use ds.tensor_parallel_size=1")
        partitioned = settings.zero_stage == 3
        self._trainer, self._dtype = trainer, dtype
        sends = partitioned or dist.get_rank() == 0
        self._sync = connect(url, token, group=dist.group.WORLD if partitioned else None, **options) if sends else None

    def follow(self) -> SyncReport | None:
        """One update of the whole fleet; None in a process that makes no calls."""
        return None if self._sync is None else bring(self._sync, self._trainer.actor.model.module, self._dtype)


def policy(url: str, token: str, **options: Any) -> Any:
    """A Ray actor class to take the place of `PolicyModelActor`. Arguments as in `Follower`."""
    import ray
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor

    class Policy(PolicyModelActor.__ray_metadata__.modified_class.__ray_actor_class__):
        def init_model_from_pretrained(self, *given: Any, **named: Any) -> None:
            super().init_model_from_pretrained(*given, **named)
            self._fleet = Follower(self.trainer, url, token, **options)

        def broadcast_to_vllm(self) -> None:
            super().broadcast_to_vllm()
            self._fleet.follow()

    return ray.remote(num_gpus=1)(Policy)
