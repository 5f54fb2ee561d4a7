"""TRL's experimental asynchronous GRPO, by its two official hooks: weights go to the fleet, and rollouts come from it.

    rollouts = FleetRollouts(url, token, dataset=…, reward_funcs=[…], processing_class=tokenizer, num_generations=8)
    trainer = AsyncGRPOTrainer(model, …, weight_transfer=FleetTransfer(url, token), rollout_worker=rollouts)    # and token_budget in args

`pause` and `resume` do nothing: engines serve while the bytes travel, and the service has each stand still for the moment in which it
is written. An update that fails raises, and the engines serve the version they had.

TRL hands over an iterator and no names before it, so the first sync is copied to host memory, whole; later ones pass
tensor by tensor (`fleet.Stream`). With several processes the first one sends; the others go through TRL's own gathers. Adapters of PEFT are
merged by TRL, in place, before it calls this.

Tested with trl 1.16.0 on a CPU: its trainer with real engines, where a few lines of torch stood in for the attention kernel that it loads
for a GPU. Not covered: adapter-only syncs; tools, environments and images in rollouts.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from trainer_adapters.fleet import Stream, connect
from weightsync import Generation, SyncReport, WeightSyncError


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


class FleetRollouts:
    """TRL's `RolloutWorkerProtocol`: groups of completions, sampled and scored in a thread of this process.

    Args:
        url, token, options: of `WeightSync`.
        dataset: rows with a `prompt`, text or messages; gone through again and again.
        reward_funcs: as TRL calls them: with `prompts`, `completions`, `completion_ids` and the other columns; summed.
        processing_class: the tokenizer.
        num_generations: completions of a prompt.
        max_tokens: of a completion.
        sampling: more of vLLM's parameters.
        samples_ahead: that wait for the trainer at most.

    Raises:
        WeightSyncError: as `FleetTransfer`.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        dataset: Sequence[Any],
        reward_funcs: Sequence[Callable[..., list[float]]],
        processing_class: Any,
        num_generations: int = 8,
        max_tokens: int = 256,
        sampling: dict[str, Any] | None = None,
        samples_ahead: int = 64,
        **options: Any,
    ) -> None:
        self._sync, self._dataset, self._rewards, self._tokenizer = connect(url, token, **options), dataset, reward_funcs, processing_class
        self._group, self._max_tokens, self._sampling = num_generations, max_tokens, sampling
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(samples_ahead)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._version, self._beat, self._error = 0, time.monotonic(), WeightSyncError("")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weightsync-rollouts", daemon=True)

    def start(self) -> None:
        """TRL calls this behind the first sync."""
        self._beat = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """TRL calls this when training ends."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._sync.close()

    def update_model_version(self, model_version: int) -> None:
        """TRL's count of syncs; samples carry the one that held when they were asked for."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the thread, or that nothing has come of it for so long."""
        if not self._thread.is_alive() and not self._stopped.is_set():
            raise RuntimeError(f"rollouts from the fleet have ended: {self._error}") from self._error
        if time.monotonic() - self._beat > stale_after_s:
            raise RuntimeError(f"no rollout has come from the fleet for {stale_after_s:.0f} s: see `weightsync status`")

    def _work(self) -> None:
        try:
            with ThreadPoolExecutor(max_workers=self._group) as pool:
                number = 0
                while not self._stopped.is_set():
                    for sample in self._sampled(pool, self._dataset[number % len(self._dataset)], number):
                        self._put(sample)
                    number += 1
        except Exception as exc:  # `check_health` tells the trainer
            self._error = exc if isinstance(exc, WeightSyncError) else WeightSyncError(f"{type(exc).__name__}: {exc}")

    def _put(self, sample: Any) -> None:
        while not self._stopped.is_set():
            self._beat = time.monotonic()
            try:
                sample.enqueued_at = time.time()
                return self.rollout_buffer.put(sample, timeout=0.5)
            except queue.Full:
                pass

    def _sampled(self, pool: ThreadPoolExecutor, row: Any, number: int) -> list[Any]:
        """One group."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        prompt, version, talks = row["prompt"], self._version, not isinstance(row["prompt"], str)
        render = self._tokenizer.apply_chat_template
        ids = list(render(prompt, add_generation_prompt=True, return_dict=False) if talks else self._tokenizer(prompt)["input_ids"])

        def complete(_: int) -> Generation:
            return self._sync.generate(ids, max_tokens=self._max_tokens, extra=self._sampling)

        answers = list(pool.map(complete, range(self._group)))
        texts = [self._tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]
        said = [[{"role": "assistant", "content": text}] for text in texts] if talks else texts
        columns = {key: [value] * self._group for key, value in dict(row).items() if key != "prompt"}
        given = {"prompts": [prompt] * self._group, "completions": said, "completion_ids": [list(a.token_ids) for a in answers], **columns}
        rewards = torch.tensor([function(**given) for function in self._rewards], dtype=torch.float64).sum(0)
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)
        return [
            RolloutSample(
                prompt=prompt,
                completion=said[at],
                input_ids=torch.tensor(ids + list(answer.token_ids)).numpy(),
                completion_mask=torch.tensor([0] * len(ids) + [1] * len(answer.token_ids)).numpy(),
                old_log_probs=torch.tensor([0.0] * len(ids) + list(answer.logprobs)).numpy(),
                advantage=advantages[at].item(),
                model_version=version,
                group_id=number,
                metrics={"reward": rewards[at].item(), "reward_std": rewards.std(correction=0).item()},
            )
            for at, answer in enumerate(answers)
        ]
