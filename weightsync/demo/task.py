"""The toy task: go on in the topic of the prompt.

Every word of the vocabulary belongs to one of four topics. A prompt is a few
words of one topic; the reward is the share of the completion's tokens that are
of the same topic. A model of random weights gets about a quarter, a perfect one
gets 1, and one that ignores the prompt can't beat a quarter on average, since
all topics are asked for equally often.

Pure functions over token ids; no torch, no tokenizer.
Not covered: anything that resembles language.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

VOCAB_SIZE = 512
PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_WORDS = ("<pad>", "<bos>", "<eos>", "<unk>", "<s4>", "<s5>", "<s6>", "<s7>")
TOPICS = ("sea", "sky", "fire", "wood")
WORDS_PER_TOPIC = (VOCAB_SIZE - len(SPECIAL_WORDS)) // len(TOPICS)
PROMPT_WORDS = 5


def vocabulary() -> list[str]:
    """All words, in order of their token ids: the special ones, then topic after topic."""
    return [*SPECIAL_WORDS, *(f"{topic}{number}" for topic in TOPICS for number in range(WORDS_PER_TOPIC))]


def topic_of(token_id: int) -> int | None:
    """Index into `TOPICS`; None for a special token."""
    if not len(SPECIAL_WORDS) <= token_id < VOCAB_SIZE:
        return None
    return (token_id - len(SPECIAL_WORDS)) // WORDS_PER_TOPIC


def make_prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Prompts of `1 + PROMPT_WORDS` token ids: the begin token, then words of one topic.

    Topics take turns, so a batch whose size is a multiple of four asks for each equally often.
    """
    prompts = []
    for index in range(count):
        first = len(SPECIAL_WORDS) + (index % len(TOPICS)) * WORDS_PER_TOPIC
        prompts.append([BOS, *(first + rng.randrange(WORDS_PER_TOPIC) for _ in range(PROMPT_WORDS))])
    return prompts


def reward(prompt: Sequence[int], completion: Sequence[int], max_tokens: int) -> float:
    """Share of `max_tokens` that are words of the prompt's topic, in [0, 1].

    The divisor is what could have been said, not what was: stopping early earns nothing.
    """
    wanted = topic_of(prompt[-1])
    if wanted is None:
        raise ValueError(f"prompt ends with token {prompt[-1]}, which has no topic")
    return sum(topic_of(token) == wanted for token in completion[:max_tokens]) / max_tokens
