"""GRPO in one file: rollouts from the fleet, one clipped step, a sync, and a picture of how it went.

    python examples/grpo_from_scratch.py [CHECKPOINT URL TOKEN_FILE]     # writes grpo_from_scratch.png

The task (`weightsync/demo/task.py`) is to go on in the topic of the prompt; random weights earn about a quarter. The ratio's
denominator is what the engine said when it sampled, so a weight that is wrong there shows as a gap between the two.

Not covered: a KL term, several trainer processes (`fsdp2.py`), rollouts while it trains (`async_grpo.py`).
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import matplotlib
import torch
from serving import fleet
from transformers import AutoModelForCausalLM

from trainer_adapters.fleet import weights
from weightsync import Generation, WeightSync
from weightsync.demo import task

STEPS = int(os.environ.get("STEPS", 20))
PROMPTS, GROUP, TOKENS, LR, CLIP = 8, 8, 8, 3e-4, 0.2


def rollouts(sync: WeightSync, prompts: list[list[int]]) -> list[Generation]:
    asked = [prompt for prompt in prompts for _ in range(GROUP)]
    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(lambda prompt: sync.generate(prompt, max_tokens=TOKENS, ignore_eos=True), asked))


def logprobs(model: torch.nn.Module, prompts: list[list[int]], answers: list[Generation]) -> torch.Tensor:
    """Of the sampled tokens, shape [PROMPTS * GROUP, TOKENS]."""
    rows = torch.tensor([prompts[at // GROUP] + list(answer.token_ids) for at, answer in enumerate(answers)])
    scores = model(rows).logits[:, -TOKENS - 1 : -1].float().log_softmax(-1)
    return scores.gather(-1, rows[:, -TOKENS:, None])[..., 0]


def learn(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, prompts: list[list[int]], answers: list[Generation]
) -> tuple[float, float]:
    """One step; mean reward, and the largest gap between the trainer's log-probabilities and the engine's."""
    rewards = torch.tensor([task.reward(prompts[at // GROUP], answer.token_ids, TOKENS) for at, answer in enumerate(answers)])
    groups = rewards.view(PROMPTS, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    ours, theirs = logprobs(model, prompts, answers), torch.tensor([answer.logprobs for answer in answers])
    ratio = (ours - theirs).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return rewards.mean().item(), (ours - theirs).abs().max().item()


def plot(curve: list[tuple[float, float]]) -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot

    for at, (title, values) in enumerate(zip(("mean reward", "largest log-probability gap"), zip(*curve, strict=True), strict=True)):
        pyplot.subplot(1, 2, at + 1, title=title, xlabel="step", ylim=(0, None)).plot(range(1, len(values) + 1), values)
    pyplot.gcf().set_size_inches(9, 3)
    pyplot.savefig("grpo_from_scratch.png", bbox_inches="tight")


def main() -> None:
    rng = random.Random(0)
    with fleet() as (checkpoint, url, token), WeightSync(url, token) as sync:
        # Trained in float32, since AdamW's steps are smaller than bfloat16 can tell apart; sent in the checkpoint's bfloat16.
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        curve = []
        for number in range(1, STEPS + 1):
            report = sync.sync_weights(weights(model, torch.bfloat16))
            prompts = task.make_prompts(PROMPTS, rng)
            curve.append(learn(model, optimizer, prompts, rollouts(sync, prompts)))
            print(f"step {number}: version {report.version}, reward {curve[-1][0]:.3f}, gap {curve[-1][1]:.4f}", flush=True)
        plot(curve)


if __name__ == "__main__":
    main()
