"""Asynchronous GRPO: rollouts go on while the trainer steps and while weights travel; samples that are too old are dropped.

    python examples/async_grpo.py [CHECKPOINT URL TOKEN_FILE]

A thread keeps a queue of groups filled. The trainer takes a group that is at most `STALE` versions old, steps, and publishes: `publish()`
returns at once, and the parameters may change again when `tensors_read()`; the engines serve the old version until `commit()`.
Each sampled token's denominator is the log-probability that its own engine gave it, from the weights which sampled it.

Not covered: correcting for staleness any further than the clipped ratio does.
"""

import queue
import random
import threading

import torch
from grpo_from_scratch import LR, PROMPTS, STEPS, learn, rollouts
from serving import fleet
from transformers import AutoModelForCausalLM

from trainer_adapters.fleet import weights
from weightsync import Generation, WeightSync
from weightsync.demo import task

STALE = 2
Batch = tuple[list[list[int]], list[Generation]]


class Worker(threading.Thread):
    """Samples until it is told to stop; at most one batch waits beside the one that is being made."""

    def __init__(self, sync: WeightSync) -> None:
        super().__init__(daemon=True)
        self.batches: queue.Queue[Batch | Exception] = queue.Queue(maxsize=1)
        self.stopped = threading.Event()
        self._sync, self._rng = sync, random.Random(0)

    def run(self) -> None:
        while not self.stopped.is_set():
            prompts = task.make_prompts(PROMPTS, self._rng)
            try:
                made: Batch | Exception = (prompts, rollouts(self._sync, prompts))
            except Exception as exc:  # the trainer raises it
                made = exc
            while not self.stopped.is_set():
                try:
                    self.batches.put(made, timeout=0.2)
                    break
                except queue.Full:
                    pass

    def fresh(self, version: int) -> tuple[Batch, int]:
        """A batch whose oldest token is at most `STALE` versions behind, and how far that is."""
        while True:
            batch = self.batches.get(timeout=120)
            if isinstance(batch, Exception):
                raise batch
            oldest = min(span.version or 0 for answer in batch[1] for span in answer.versions)
            if version - oldest <= STALE:
                return batch, version - oldest
            print(f"dropped a batch that was {version - oldest} versions old", flush=True)


def main() -> None:
    with fleet() as (checkpoint, url, token), WeightSync(url, token) as sync:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        version = sync.sync_weights(weights(model, torch.bfloat16)).version
        worker = Worker(sync)
        worker.start()
        published = None
        for number in range(1, STEPS + 1):
            (prompts, answers), stale = worker.fresh(version)
            if published is not None:
                published.tensors_read()  # it was sent meanwhile; behind this the parameters may change
            reward, _ = learn(model, optimizer, prompts, answers)
            if published is not None:
                version = sync.commit(published).version
            print(f"step {number}: reward {reward:.3f}, samples {stale} version(s) old, engines have version {version}", flush=True)
            published = sync.publish(weights(model, torch.bfloat16))
        sync.commit()
        worker.stopped.set()
        worker.join()


if __name__ == "__main__":
    main()
