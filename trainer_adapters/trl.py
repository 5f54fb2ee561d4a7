"""TRL's `GRPOTrainer` with rollouts and weights through the fleet.

    trainer = GRPOTrainer(model, reward_funcs, GRPOConfig(use_vllm=False, …), train_dataset=…)
    attach(trainer, url, token)
    trainer.train()

The trainer then works as with TRL's vLLM server: it syncs before it generates when its step has changed, takes the engines'
log-probabilities for its importance sampling correction, and logs how far its own are from them (`sampling/sampling_logp_difference`).
No class is patched: `trainer.vllm_generation` is TRL's own `VLLMGeneration`, whose client is the fleet. The trainer's environment
needs no vLLM. Weights are synced once when this is called, so that a model which does not fit the engines is refused here.

Several processes: with DDP the first one sends and the others make no call; with FSDP2 and DeepSpeed's ZeRO-3 all take part in the
gathers, a bucket at a time. PEFT's adapters are merged a layer at a time, and the model is left alone.

At temperatures other than 1 engines have to say what they sampled from: `engine.extra='{"logprobs_mode": "processed_logprobs"}'`.

Tested with trl 1.16.0 on a CPU: one process, and two with DDP. FSDP2 and ZeRO-3 by `fleet.weights` alone. Not covered: images, FSDP1,
 a vLLM that shares the trainer's GPU and sleeps. TRL's asynchronous GRPO is `trl_async`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from trainer_adapters.fleet import bring, connect
from weightsync import Generation, SyncReport, WeightSync, WeightSyncError

#: How often a completion is asked for that came from older weights, of an engine that was left out of the sync.
_TRIES = 8
#: What TRL's `VLLMGeneration` is told of a trainer's settings.
_TAKEN = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_completion_length")


class FleetClient:
    """What `VLLMGeneration` asks of its client, answered by the fleet.

    Args:
        sync: the connection.
        concurrency: requests in flight.

    Attributes:
        report: of the last sync; completions come from its version.
    """

    def __init__(self, sync: WeightSync, concurrency: int) -> None:
        self._sync, self._concurrency = sync, concurrency
        self.report: SyncReport | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        features: Any = None,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """As TRL's own: `n` completions of each prompt, prompt after prompt.

        Returns:
            `prompt_ids` of each prompt; of each completion `completion_ids`, and the sampled tokens' `logprobs` and
            `logprob_token_ids`, shape [tokens, 1].

        Raises:
            WeightSyncError: see `WeightSync.generate`; or every answer came from other weights than those synced last.
        """
        if features is not None or logprobs not in (0, None):
            raise WeightSyncError("images, and log-probabilities of more than the sampled token, are not covered by this adapter")
        if structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": structured_outputs_regex}
        more = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_tokens": max_tokens,
            **sampling,
            **(generation_kwargs or {}),
        }
        asked = [list(prompt) for prompt in prompts for _ in range(n)]
        with ThreadPoolExecutor(max_workers=max(1, min(self._concurrency, len(asked)))) as pool:
            answers = list(pool.map(lambda prompt: self._complete(prompt, more), asked))
        return {
            "prompt_ids": [list(prompt) for prompt in prompts],
            "completion_ids": [list(answer.token_ids) for answer in answers],
            "logprobs": [[[value] for value in answer.logprobs] for answer in answers],
            "logprob_token_ids": [[[token] for token in answer.token_ids] for answer in answers],
        }

    def _complete(self, prompt: Sequence[int], sampling: dict[str, Any]) -> Generation:
        version = None if self.report is None else self.report.version
        for _ in range(_TRIES):
            answer = self._sync.generate(prompt, extra=sampling)
            if version is None or {span.version for span in answer.versions} <= {version}:
                return answer
        raise WeightSyncError(
            f"engine {answer.engine} samples from version {answer.version}, and the trainer synced {version}",
            hint="Does another trainer sync this fleet? See `weightsync status` for engines that were left behind",
        )


def attach(
    trainer: Any,
    url: str,
    token: str,
    *,
    dtype: torch.dtype | None = None,
    adapter_only: bool = False,
    concurrency: int = 64,
    **options: Any,
) -> WeightSync | None:
    """Have a `GRPOTrainer` sync its weights to the fleet and sample from it. Every process of the trainer calls this.

    Args:
        trainer: made with `use_vllm=False`.
        url, token: the service.
        dtype: cast weights to it on the way, where the trainer holds float32 and the engines' checkpoint does not (`torch.bfloat16`).
        adapter_only: of a `peft_config` the LoRA alone, to engines that take adapters (`sync_weights`).
        concurrency: rollout requests in flight.
        options: of `WeightSync`, such as `timeout_seconds`.

    Returns:
        The connection, to close at the end; None in a process that makes no calls.

    Raises:
        WeightSyncError: what to change: nothing answers there, the token is wrong, the fleet has no engine, the model's tensors
            are not those of the engines' checkpoint.
    """
    from trl.generation.vllm_generation import VLLMGeneration

    if trainer.use_vllm:
        raise WeightSyncError("this trainer was made with use_vllm=True and talks to a vLLM of TRL's", hint="Make it with use_vllm=False")
    sync = _connected(trainer, url, token, options)

    class FleetGeneration(VLLMGeneration):
        def _init_vllm(self) -> None:
            if sync is not None:
                self.vllm_client = FleetClient(sync, concurrency)
            self.sync_weights()

        def sync_weights(self) -> None:
            if sync is not None:
                self.vllm_client.report = bring(sync, self.accelerator.unwrap_model(self.model), dtype, adapter_only)

    try:
        trainer.vllm_generation = FleetGeneration(
            model=trainer.model,
            accelerator=trainer.accelerator,
            processing_class=trainer.processing_class,
            mode="server",
            structured_outputs_regex=trainer.args.vllm_structured_outputs_regex,
            generation_kwargs=trainer.args.generation_kwargs,
            logprobs=0,
            **{name: getattr(trainer, name) for name in _TAKEN},
        )
    except WeightSyncError:
        if sync is not None:
            sync.close()
        raise
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    return sync


def _connected(trainer: Any, url: str, token: str, options: dict[str, Any]) -> WeightSync | None:
    """The connection of a process that makes calls: of all where they hold shards, else of the first."""
    sharded = trainer._dist.is_fsdp or trainer._dist.is_zero3
    if not (sharded or trainer.accelerator.is_main_process):
        return None
    return connect(url, token, group=dist.group.WORLD if sharded else None, **options)
