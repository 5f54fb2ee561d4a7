"""GRPO: group-relative policy optimisation, as small as it can be and still be real.

    prompts × group_size completions ─▶ rewards ─▶ advantages within each group
    log-probabilities by the engine  ─┐
    log-probabilities by the trainer ─┴▶ ratio ─▶ clipped loss ─▶ AdamW on float32 weights

The pure part is `group_advantages`, `clipped_loss` and `token_logprobs`; `Learner`
holds the model and the optimiser. The ratio's denominator is what the *engine* said
when it sampled, not a second forward here, so a wrong weight in the engine shows.

Not covered: a KL term to a reference model, a value function, several devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Sample:
    """One completion.

    Attributes:
        prompt: token ids.
        completion: sampled token ids, at least one.
        logprobs: the engine's log-probability of each sampled token at temperature 1, nats.
        reward: in [0, 1].
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float


@dataclass(frozen=True)
class Batch:
    """`B` samples padded to length `T`; position `t` of the last three speaks of token `t + 1`.

    Attributes:
        input_ids: int64 [B, T], padded on the right.
        attention_mask: int64 [B, T], 1 on real tokens.
        engine_logprobs: float32 [B, T-1], 0 where the mask is 0.
        mask: float32 [B, T-1], 1 where token `t + 1` was sampled.
        advantages: float32 [B].
    """

    input_ids: Tensor
    attention_mask: Tensor
    engine_logprobs: Tensor
    mask: Tensor
    advantages: Tensor

    def to(self, device: str) -> Batch:
        """The same on a device."""
        return Batch(*(getattr(self, part.name).to(device) for part in fields(self)))

    def rows(self, index: Tensor) -> Batch:
        """The samples at `index`, int64 [b]."""
        return Batch(
            self.input_ids[index], self.attention_mask[index], self.engine_logprobs[index], self.mask[index], self.advantages[index]
        )


def group_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """Each reward against its own group.

    Args:
        rewards: float [G, S], G groups of S completions of one prompt.
        eps: keeps a group whose rewards are all equal at 0.

    Returns:
        float [G, S]: `(reward - mean) / (std + eps)` over the group's S, population std.
    """
    mean = rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True, correction=0)
    return (rewards - mean) / (std + eps)


def clipped_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2) -> Tensor:
    """The clipped policy-gradient loss, mean over sampled tokens.

    Args:
        logprobs: float [B, T], under the weights being trained, nats.
        old_logprobs: float [B, T], under the weights that sampled.
        advantages: float [B].
        mask: float [B, T], 1 on sampled tokens.
        clip: how far the ratio may leave 1 and still give a gradient.

    Returns:
        float []: to be minimised.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - clip, 1 + clip) * advantages[:, None])
    return -(gain * mask).sum() / mask.sum().clamp(min=1)


def token_logprobs(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Log-probability of each next token.

    Args:
        logits: float [B, T, V].
        input_ids: int64 [B, T].

    Returns:
        float32 [B, T-1]: position `t` is that of `input_ids[:, t + 1]`, nats.
    """
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    return logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def collate(samples: Sequence[Sample], group_size: int, pad: int) -> Batch:
    """Pad samples, which come group after group, into one batch, with their advantages."""
    length = max(len(s.prompt) + len(s.completion) for s in samples)
    input_ids = torch.full((len(samples), length), pad)
    attention_mask = torch.zeros(len(samples), length, dtype=torch.int64)
    engine_logprobs = torch.zeros(len(samples), length - 1)
    mask = torch.zeros(len(samples), length - 1)
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt), len(sample.prompt) + len(sample.completion)
        input_ids[row, :end] = torch.tensor([*sample.prompt, *sample.completion])
        attention_mask[row, :end] = 1
        engine_logprobs[row, start - 1 : end - 1] = torch.tensor(sample.logprobs)
        mask[row, start - 1 : end - 1] = 1
    rewards = torch.tensor([s.reward for s in samples]).view(-1, group_size)
    return Batch(input_ids, attention_mask, engine_logprobs, mask, group_advantages(rewards).flatten())


class Learner:
    """A policy in float32 and its optimiser.

    Args:
        model: the policy; its parameters are the master weights and must be float32.
        lr: AdamW's learning rate, reached after `warmup` calls of `step` by equal rises.
        warmup: see `lr`; AdamW's first steps have the full size of `lr` in every parameter, whatever the gradient.
        epochs: how often each sample is used. More than one makes this small policy overshoot.
        minibatches: optimiser steps per epoch; from the second on, the ratio differs from 1.
        clip: see `clipped_loss`.
        seed: of the order of minibatches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        lr: float,
        warmup: int = 10,
        epochs: int = 1,
        minibatches: int = 4,
        clip: float = 0.2,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.lr, self.warmup, self.steps = lr, warmup, 0
        self.epochs, self.minibatches, self.clip = epochs, minibatches, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(seed)

    def logprobs(self, batch: Batch, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """float32 [B, T-1]: log-probability of each next token, under the master weights or under `weights`."""
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
        if weights is None:
            logits = self.model(**inputs).logits
        else:
            logits = torch.func.functional_call(self.model, dict(weights), kwargs=inputs).logits
        return token_logprobs(logits, batch.input_ids)

    @torch.no_grad()
    def logprob_gap(self, batch: Batch, synced: Mapping[str, Tensor]) -> float:
        """Largest |trainer - engine| log-probability over the sampled tokens, nats.

        The trainer's side computes in float32 from `synced`, what the tensors that were sent are worth
        (`formats.from_checkpoint`). So the figure is what the engine adds to them: its arithmetic, its
        kernels, activations that it quantises, and any weight that is not what was sent. The master
        weights would add how far they have moved below what the sent form can tell, which early in
        training is ten times as much and says nothing of a sync.
        """
        return float(((self.logprobs(batch, synced) - batch.engine_logprobs).abs() * batch.mask).max())

    def step(self, batch: Batch) -> float:
        """Learn from one batch of rollouts; returns the mean loss."""
        losses = []
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, self.steps / max(1, self.warmup))
        for _ in range(self.epochs):
            order = torch.randperm(len(batch.input_ids), generator=self.generator)
            for index in order.chunk(self.minibatches):
                part = batch.rows(index)
                loss = clipped_loss(self.logprobs(part), part.engine_logprobs, part.advantages, part.mask, self.clip)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                losses.append(float(loss.detach()))
        return sum(losses) / len(losses)
