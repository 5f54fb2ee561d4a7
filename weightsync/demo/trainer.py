"""The trainer, in a process of its own: GRPO against a running fleet.

    python -m weightsync.demo.trainer --url URL --token-file FILE --model FOLDER --like FOLDER --save FOLDER

The initial weights are synced first, then each step is

    prompts ─▶ rollouts by the engines ─▶ reward ─▶ GRPO step ─▶ sync_weights()

and every rollout must come from the version synced last. It trains in float32 from `--model`, and
sends what the engines' checkpoint `--like` holds, in its form (`formats.py`). Standard output carries
one JSON object per line: step 0 is the first sync, without a reward. At the end the
weights that were synced last are saved as a checkpoint, beside `outputs.json` with
every engine's greedy answers to fixed prompts, for comparison with a cold engine.

Not covered: resuming, several trainer processes, rollouts that overlap with training.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from weightsync.demo import MODELS, formats, task
from weightsync.demo.checkpoint import checkpoint_tensors, save_like
from weightsync.demo.grpo import Learner, Sample, collate

if TYPE_CHECKING:
    from weightsync import WeightSync

logger = logging.getLogger(__name__)

PROBE_PROMPTS = 4
PROBE_TOKENS = 16
OUTPUTS_FILE = "outputs.json"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The trainer's flags."""
    parser = argparse.ArgumentParser(prog="python -m weightsync.demo.trainer", description="GRPO against a running fleet")
    parser.add_argument("--url", required=True, help="the service")
    parser.add_argument("--token-file", type=Path, required=True, help="file that holds the service's token")
    parser.add_argument("--model", type=Path, required=True, help="bfloat16 checkpoint to start from")
    parser.add_argument("--like", type=Path, required=True, help="checkpoint that the engines started from")
    parser.add_argument("--kind", choices=MODELS, default="qwen3", help="form of that checkpoint")
    parser.add_argument("--save", type=Path, required=True, help="folder for the weights synced last, and outputs.json")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    parser.add_argument("--max-tokens", type=int, default=8, help="length of a completion")
    parser.add_argument("--lr", type=float, default=1.5e-4, help="AdamW's learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the policy is trained, as torch names it")
    parser.add_argument("--concurrency", type=int, default=32, help="rollout requests in flight")
    return parser.parse_args(argv)


class Trainer:
    """One run of the loop.

    Args:
        sync: the client.
        arguments: see `parse_arguments`.
    """

    def __init__(self, sync: WeightSync, arguments: argparse.Namespace) -> None:
        self.sync, self.arguments = sync, arguments
        # In float32: AdamW's steps are smaller than bfloat16 can tell apart.
        self.model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device)
        self.model.train()
        self.learner = Learner(self.model, lr=arguments.lr, seed=arguments.seed)
        self.rng = random.Random(arguments.seed)
        self.version = sync.status().committed_version or 0
        self.sent: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """All steps, then `save`; prints as it goes."""
        _print({"step": 0, "reward": None, "logprob_gap": None, **self._push({})})
        for step in range(1, self.arguments.steps + 1):
            _print(self.step(step))
        self.save()

    def step(self, number: int) -> dict[str, Any]:
        """Rollouts, one GRPO step, one sync; the line to print."""
        began = time.perf_counter()
        samples = self.rollouts(number)
        rolled = time.perf_counter()
        batch = collate(samples, self.arguments.group_size, task.PAD).to(self.arguments.device)
        gap = self.learner.logprob_gap(batch, formats.from_checkpoint(self.sent, self.arguments.kind))
        self.learner.step(batch)
        trained = time.perf_counter()
        line = {"step": number, "reward": sum(s.reward for s in samples) / len(samples), "logprob_gap": gap}
        return line | self._push({"rollout": rolled - began, "train": trained - rolled})

    def rollouts(self, step: int) -> list[Sample]:
        """`groups * group_size` samples, group after group, all from the version synced last."""
        args = self.arguments
        prompts = [prompt for prompt in task.make_prompts(args.groups, self.rng) for _ in range(args.group_size)]

        def complete(index: int) -> Sample:
            seed = (args.seed * 1_000_003 + step) * 100_003 + index
            answer = self.sync.generate(prompts[index], max_tokens=args.max_tokens, temperature=1.0, seed=seed % 2**31)
            if {span.version for span in answer.versions} != {self.version}:
                raise RuntimeError(f"engine {answer.engine} sampled from {answer.versions}; the newest version is {self.version}")
            reward = task.reward(prompts[index], answer.token_ids, args.max_tokens)
            return Sample(tuple(prompts[index]), answer.token_ids, answer.logprobs, reward)

        with ThreadPoolExecutor(max_workers=args.concurrency) as pool:
            return list(pool.map(complete, range(len(prompts))))

    def _push(self, seconds: dict[str, float]) -> dict[str, Any]:
        """Sync the weights as the next version; what a line says of it, with the seconds of the step so far."""
        self.sent = checkpoint_tensors(self.model, self.arguments.kind)
        began = time.perf_counter()
        report = self.sync.sync_weights(self.sent.items(), version=self.version + 1)
        self.version = report.version
        logger.info("synced version %d, %d bytes, seconds %s", report.version, report.nbytes, report.seconds)
        return {
            "version": report.version,
            "bytes": report.nbytes,
            "seconds": seconds | {"sync": time.perf_counter() - began},
            "sync_seconds": report.seconds,
            "pause_seconds": report.pause_seconds,
            "stored_tensors": min(verdict.checks.get("stored", 0) for verdict in report.verdicts if verdict.committed),
        }

    def save(self) -> None:
        """Write the weights synced last, and what every engine answers greedily on them."""
        prompts = task.make_prompts(PROBE_PROMPTS, random.Random(self.arguments.seed + 1))
        engines = []
        for status in self.sync.engines():
            # One at a time, as the cold engine does: a batch may use other kernels, and end in other last bits.
            answers = [
                self.sync.generate(prompt, max_tokens=PROBE_TOKENS, temperature=0.0, ignore_eos=True, engine=status.engine)
                for prompt in prompts
            ]
            engines.append(
                {
                    "engine": status.engine,
                    "version": status.version,
                    "tokens": [list(answer.token_ids) for answer in answers],
                    "logprobs": [list(answer.logprobs) for answer in answers],
                }
            )
        save_like(self.arguments.like, self.arguments.save, {name: tensor.cpu() for name, tensor in self.sent.items()})
        outputs = {"version": self.version, "max_tokens": PROBE_TOKENS, "prompts": prompts, "engines": engines}
        (self.arguments.save / OUTPUTS_FILE).write_text(json.dumps(outputs))


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # An orderly exit closes the client, so that an update under way is aborted at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the engines want the other cores
    torch.manual_seed(arguments.seed)

    from weightsync import WeightSync

    token = arguments.token_file.read_text().strip()
    with WeightSync(arguments.url, token=token, timeout_seconds=300.0) as sync:
        Trainer(sync, arguments).run()


if __name__ == "__main__":
    main()
