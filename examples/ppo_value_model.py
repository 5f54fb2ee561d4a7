"""PPO with a value model: the engines follow the policy alone.

    python examples/ppo_value_model.py [CHECKPOINT URL TOKEN_FILE]

Policy and value function are two heads on one trunk, as many trainers have it. What is sent is the policy, under its checkpoint's names;
sent as one module the value head would be refused, as a tensor that the engines' checkpoint has not.
The reward comes with each token, and advantages are those of GAE.
"""

import random

import torch
from grpo_from_scratch import CLIP, GROUP, LR, PROMPTS, STEPS, TOKENS, rollouts
from serving import fleet
from transformers import AutoModelForCausalLM

from trainer_adapters.fleet import weights
from weightsync import Generation, WeightSync, WeightSyncError
from weightsync.demo import task

DISCOUNT, GAE, EPOCHS = 1.0, 0.9, 2


class ActorCritic(torch.nn.Module):
    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value = torch.nn.Linear(policy.config.hidden_size, 1)
        torch.nn.init.zeros_(self.value.weight)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each sampled token, and the value of the state before it; both [rows, TOKENS]."""
        out = self.policy(rows, output_hidden_states=True)
        scores = out.logits[:, -TOKENS - 1 : -1].float().log_softmax(-1)
        values = self.value(out.hidden_states[-1][:, -TOKENS - 1 : -1])
        return scores.gather(-1, rows[:, -TOKENS:, None])[..., 0], values[..., 0]


def advantages(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """GAE over the tokens of each answer, shape [rows, TOKENS]."""
    made, later = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for at in reversed(range(TOKENS)):
        following = values[:, at + 1] if at + 1 < TOKENS else torch.zeros(len(rewards))
        later = rewards[:, at] + DISCOUNT * following - values[:, at] + DISCOUNT * GAE * later
        made[:, at] = later
    return made


def learn(model: ActorCritic, optimizer: torch.optim.Optimizer, prompts: list[list[int]], answers: list[Generation]) -> tuple[float, float]:
    """A few passes over one batch; mean reward of an answer, and the value function's error."""
    asked = [prompts[at // GROUP] for at in range(len(answers))]
    rows = torch.tensor([prompt + list(answer.token_ids) for prompt, answer in zip(asked, answers, strict=True)])
    theirs = torch.tensor([answer.logprobs for answer in answers])
    rewards = torch.tensor([[task.reward(p, [t], TOKENS) for t in a.token_ids] for p, a in zip(asked, answers, strict=True)])
    with torch.no_grad():
        _, values = model(rows)
        gains = advantages(rewards, values)
        returns, gains = gains + values, (gains - gains.mean()) / (gains.std() + 1e-6)
    for _ in range(EPOCHS):
        ours, values = model(rows)
        ratio = (ours - theirs).exp()
        policy_loss = -torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains).mean()
        value_loss = (values - returns).square().mean()
        optimizer.zero_grad()
        (policy_loss + value_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return rewards.sum(1).mean().item(), value_loss.item()


def main() -> None:
    rng = random.Random(0)
    with fleet() as (checkpoint, url, token), WeightSync(url, token) as sync:
        model = ActorCritic(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        try:
            sync.sync_weights(weights(model, torch.bfloat16))
        except WeightSyncError as exc:
            print(f"refused as one module: {exc.message[:200]}", flush=True)
        for number in range(1, STEPS + 1):
            report = sync.sync_weights(weights(model.policy, torch.bfloat16))
            prompts = task.make_prompts(PROMPTS, rng)
            reward, error = learn(model, optimizer, prompts, rollouts(sync, prompts))
            print(f"step {number}: version {report.version}, reward {reward:.3f}, value error {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
