"""GRPO of a LoRA adapter: it is merged on the way to the engines, a layer at a time, and the trainer's own model stays as it is.

    pip install peft
    python examples/peft_lora.py [CHECKPOINT URL TOKEN_FILE]
    ADAPTER_ONLY=1 python examples/peft_lora.py          # the adapter alone is sent, to engines that take one

Sent as it is such a model is refused before a byte moves: the engines' checkpoint has no adapters.
"""

import os
import random

import torch
from grpo_from_scratch import PROMPTS, STEPS, learn, rollouts
from peft import LoraConfig, get_peft_model
from serving import fleet
from transformers import AutoModelForCausalLM

from trainer_adapters.fleet import bring
from weightsync import WeightSync, WeightSyncError
from weightsync.demo import task

PROBE = [task.BOS, 20, 21, 22]
ALONE = os.environ.get("ADAPTER_ONLY") == "1"


def main() -> None:
    rng = random.Random(0)
    with fleet(adapters=ALONE) as (checkpoint, url, token), WeightSync(url, token) as sync:
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        try:
            sync.sync_weights(model)
        except WeightSyncError as exc:
            print(f"refused as it is: {exc.message[:120]}", flush=True)
        before: list[float] = []
        for number in range(1, STEPS + 1):
            report = bring(sync, model, torch.bfloat16, adapter_only=ALONE)
            answer = sync.generate(PROBE, max_tokens=8, temperature=0.0, ignore_eos=True)
            before = before or list(answer.logprobs)
            prompts = task.make_prompts(PROMPTS, rng)
            reward, gap = learn(model, optimizer, prompts, rollouts(sync, prompts))
            print(f"step {number}: version {report.version}, {report.nbytes} bytes, reward {reward:.3f}, gap {gap:.4f}", flush=True)
        moved = max(abs(a - b) for a, b in zip(before, answer.logprobs, strict=True))
        print(f"log-probabilities of a fixed prompt have moved by up to {moved:.3f}")


if __name__ == "__main__":
    main()
