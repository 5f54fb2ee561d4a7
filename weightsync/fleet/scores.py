"""A few fixed prompts, scored by a running vLLM engine beside whatever else it does.

Requests of the engine's own, with no part in its prefix cache: they read none (`skip_reading_prefix_cache`, which
connectors heed as well), and what they leave there has a salt that no client has. Greedy; `logit_bias`
forces the tokens, so that every engine goes on with the same ones, and the log-probabilities are those before it. (Of fixed
token ids vLLM could say them too, `logprob_token_ids`; in its first sampler that takes top log-probabilities away from other requests of
the same step. Log-probabilities of a prompt take memory for all of its positions, which nobody has set aside.)

Short prompts go through whatever an engine captures. One that is longer than the largest capture is computed without graphs; one
token more behind it is either a step of its own, by a graph, or a part of the prompt, without: the same tokens at the same position, twice.

Not covered: which of its kinds of graphs a step took (other requests of the step may make it larger than any); engines that
draft tokens or diffuse, in which no token can be forced: they score one token of each prompt, and compare no graphs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from weightsync.mismatch import ProbeAnswer

_PROMPTS, _PROMPT_TOKENS = 4, 8
#: Tokens that are scored behind each prompt, the first by its prefill and one by decoding, and the likeliest ones that are told at each.
_STEPS, _TOP = 2, 4
_BIAS = 100.0
#: How long a prompt must be beyond the largest capture, and what is put behind it.
_BEYOND, _BEHIND = 1, 1
_SALT = "weightsync-probe"

_serial = itertools.count()


async def score(llm: Any) -> ProbeAnswer:
    """Score the prompts in every data-parallel copy of the model.

    Args:
        llm: an `AsyncLLM` that serves.

    Raises:
        Exception: vLLM's own; what has begun is aborted then, and when this is cancelled.
    """
    config = llm.vllm_config
    vocabulary = int(config.model_config.get_vocab_size())
    forced = tokens(vocabulary, 1, seed=_PROMPTS)[0]
    one_step = why_one_step(config)
    long, no_graphs = (0, one_step) if one_step else uncaptured_length(config)
    prompts = [tokens(vocabulary, _PROMPT_TOKENS, seed) for seed in range(_PROMPTS)]
    copies = range(config.parallel_config.data_parallel_size)
    asked = [(prompt, 1 if one_step else _STEPS, copy) for copy in copies for prompt in prompts]
    if long:
        filler = tokens(vocabulary, long, seed=_PROMPTS + 1)
        asked += [(filler, 1 + _BEHIND, copy) for copy in copies]
        asked += [(filler + [forced] * _BEHIND, 1, copy) for copy in copies]
    tasks = [asyncio.ensure_future(_ask(llm, *one, None if one_step else forced)) for one in asked]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # where one has failed the others are of no use
            task.cancel()
    short = len(prompts) * len(copies)
    captured = [positions[-1] for positions in found[short : short + len(copies)]] if long else []
    uncaptured = [positions[-1] for positions in found[short + len(copies) :]]
    scores = tuple(position for positions in found[:short] for position in positions)
    return ProbeAnswer(scores, tuple(captured), tuple(uncaptured), no_graphs)


def tokens(vocabulary: int, count: int, seed: int) -> list[int]:
    """Token ids that are the same everywhere, and none of a tokeniser's special ones where the vocabulary is a large one.

    Those stand at its beginning or at its end, and some of them announce images.
    """
    first, last = (1024, vocabulary // 2) if vocabulary >= 4096 else (0, vocabulary)
    return [first + (104_729 * (seed + 1) + 7_919 * index * (index + seed + 1)) % (last - first) for index in range(count)]


def why_one_step(config: Any) -> str:
    """Why no token can be forced; empty when it can."""
    if config.speculative_config is not None:
        return "this engine drafts tokens"
    if getattr(config.model_config, "is_diffusion", False):
        return "this model diffuses"
    if str(config.model_config.logprobs_mode).startswith("processed"):
        return "log-probabilities are told behind the bias (logprobs_mode)"
    return ""


def uncaptured_length(config: Any) -> tuple[int, str]:
    """Length of a prompt that no captured graph takes, tokens; or 0, and why there is none."""
    compilation = config.compilation_config
    mode, largest = compilation.cudagraph_mode, compilation.max_cudagraph_capture_size
    if mode is None or getattr(mode, "name", str(mode)) == "NONE" or not largest:
        return 0, "this engine captures no graphs"
    length = int(largest) + _BEYOND
    if length + _BEHIND + 1 > config.model_config.max_model_len:
        return 0, f"max_model_len is no longer than the largest capture, {largest} tokens"
    if length + _BEHIND > config.scheduler_config.max_num_batched_tokens:
        return 0, f"a step takes no more than the largest capture, {largest} tokens"
    return length, ""


async def _ask(llm: Any, prompt: Sequence[int], steps: int, copy: int, forced: int | None) -> list[dict[str, float]]:
    """What is said behind a prompt: position after position, log-probabilities by token id.

    Raises:
        RuntimeError: the answer is short.
    """
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    config = llm.vllm_config
    most = config.model_config.max_logprobs
    params = SamplingParams(
        temperature=0.0,
        max_tokens=steps,
        ignore_eos=True,
        detokenize=False,
        logprobs=_TOP if most < 0 else min(_TOP, most),
        logit_bias=None if forced is None else {forced: _BIAS},
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    rank = copy if config.parallel_config.data_parallel_size > 1 else None
    request = tokens_input(list(prompt), cache_salt=_SALT)  # as vLLM's renderers give it, with nothing left to do
    output: Any = None
    async for part in llm.generate(request, params, f"weightsync-probe-{next(_serial)}", data_parallel_rank=rank):
        output = part.outputs[0]
    if output is None or len(output.logprobs or ()) != steps:
        raise RuntimeError(f"the engine scored {len(output.logprobs or ()) if output else 0} of {steps} tokens")
    return [{str(token): float(entry.logprob) for token, entry in at.items()} for at in output.logprobs]
