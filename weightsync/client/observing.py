"""What a trainer's samples say of the engines that made them, as sums by engine and version. Pure: tensors on the CPU, float64.

Signs and estimators are those of `weightsync.mismatch`: log r = trainer - rollout, k1 = -log r, k3 = (r - 1) - log r.

Not covered: by how many updates a version is behind, which the service knows; and the trainer's own forward pass: its
log-probabilities must be of the temperature and the mask with which the rollout's were taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.errors import SamplesRefused
from weightsync.mismatch import MAX_TALLIES, MOST_LOG_RATIO, Tally
from weightsync.protocol import MAX_VERSION
from weightsync.results import Generation, VersionSpan

#: Above 0 no log-probability lies, but by rounding.
_ROUNDING = 0.01


@dataclass(frozen=True)
class Sample:
    """One completion with what its trainer makes of it. Sequences, arrays or tensors, each of one dimension, as long as `token_ids`.

    Attributes:
        token_ids: that were sampled; the prompt's are no part of it.
        trainer_logprobs: the trainer's log-probability of each, nats.
        rollout_logprobs: the engine's.
        engine: ordinal of the engine that sampled them.
        version: of the weights that it had; spans (`Generation.versions`) where an update fell in between.
    """

    token_ids: Sequence[int] | torch.Tensor
    trainer_logprobs: Any
    rollout_logprobs: Any
    engine: int
    version: int | Sequence[VersionSpan]


def read(samples: Iterable[Any], trainer_logprobs: Sequence[Any] | None) -> list[Sample]:
    """What `observe` was given as samples.

    Args:
        samples: `Sample`s, mappings with their keys, or `Generation`s.
        trainer_logprobs: for each `Generation` the trainer's log-probabilities; None for samples that have their own.

    Raises:
        SamplesRefused: names the sample.
    """
    given = list(samples)
    if trainer_logprobs is not None and len(trainer_logprobs) != len(given):
        raise SamplesRefused(f"{len(given)} samples, and log-probabilities of the trainer for {len(trainer_logprobs)}")
    own = trainer_logprobs if trainer_logprobs is not None else [None] * len(given)
    return [_sample(number, one, logprobs) for number, (one, logprobs) in enumerate(zip(given, own, strict=True))]


def tallies(samples: Sequence[Sample]) -> tuple[Tally, ...]:
    """Sums by engine and version, in that order.

    Raises:
        SamplesRefused: a sample's shapes, lengths, numbers or versions can't be; names it. Or there is no token at all.
    """
    sums: dict[tuple[int, int], list[torch.Tensor]] = {}
    for number, sample in enumerate(samples):
        ratios = _log_ratios(number, sample)
        for version, start, end in _spans(number, sample, len(ratios)):
            if end > start:
                sums.setdefault((sample.engine, version), []).append(ratios[start:end])
    if not sums:
        raise SamplesRefused(f"{len(samples)} samples hold no token", hint="Give completions, with their log-probabilities")
    if len(sums) > MAX_TALLIES:
        raise SamplesRefused(f"samples of {len(sums)} engines and versions, want {MAX_TALLIES} at most", hint="Observe them in parts")
    return tuple(_tally(engine, version, torch.cat(parts)) for (engine, version), parts in sorted(sums.items()))


def estimators(log_ratios: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k1 and k3 of each token.

    Args:
        log_ratios: trainer - rollout, float64. In k3 one counts as `MOST_LOG_RATIO` at most, so that sums stay finite.
    """
    bounded = log_ratios.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    return -log_ratios, torch.expm1(bounded) - bounded


def _tally(engine: int, version: int, log_ratios: torch.Tensor) -> Tally:
    absolute, (k1, k3) = log_ratios.abs(), estimators(log_ratios)
    difference, sum1, sum3 = (float(values.sum()) for values in (absolute, k1, k3))
    return Tally(engine, version, len(log_ratios), difference, sum1, sum3, float(absolute.max()))


def _sample(number: int, given: Any, trainer_logprobs: Any) -> Sample:
    if isinstance(given, Generation):
        if trainer_logprobs is None:
            raise _refused(number, "is a Generation without the trainer's log-probabilities", "Give observe(generations, trainer_logprobs)")
        return Sample(given.token_ids, trainer_logprobs, given.logprobs, given.engine, given.versions)
    if trainer_logprobs is not None:
        raise _refused(number, "is no Generation, and has log-probabilities of the trainer of its own", "Leave trainer_logprobs out")
    if isinstance(given, Sample):
        return given
    if not isinstance(given, Mapping) or set(given) != set(Sample.__dataclass_fields__):
        is_it = f"has the keys {sorted(map(str, given))}" if isinstance(given, Mapping) else f"is a {type(given).__name__}"
        raise _refused(number, is_it, f"Want a Sample, a Generation, or a mapping with {', '.join(Sample.__dataclass_fields__)}")
    return Sample(**given)


def _log_ratios(number: int, sample: Sample) -> torch.Tensor:
    """The trainer's less the rollout's, float64."""
    trainer = _logprobs(number, "trainer_logprobs", sample.trainer_logprobs)
    rollout = _logprobs(number, "rollout_logprobs", sample.rollout_logprobs)
    lengths = len(sample.token_ids), len(trainer), len(rollout)
    if len(set(lengths)) > 1:
        what = f"has {lengths[0]} token ids, {lengths[1]} log-probabilities of the trainer and {lengths[2]} of the rollout"
        raise _refused(number, what, "Cut off prompt and padding: one each for every sampled token")
    if not isinstance(sample.engine, int) or isinstance(sample.engine, bool) or not 0 <= sample.engine <= MAX_VERSION:
        raise _refused(number, f"has engine {sample.engine!r}", "Give the engine's ordinal, as `Generation.engine`")
    return trainer - rollout


def _logprobs(number: int, name: str, values: Any) -> torch.Tensor:
    try:
        read = values.detach() if isinstance(values, torch.Tensor) else values
        tensor = torch.as_tensor(read, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as exc:
        raise _refused(number, f"has no numbers as {name}: {exc}", "Give one number for each token, nats") from None
    if tensor.dim() != 1:
        raise _refused(number, f"has {name} of shape {tuple(tensor.shape)}", "Give one dimension: the sample's tokens")
    if not bool(torch.isfinite(tensor).all()):
        at = int((~torch.isfinite(tensor)).nonzero()[0])
        raise _refused(number, f"has {float(tensor[at])} as {name} of token {at}", "Leave such a sample out")
    if len(tensor) and float(tensor.max()) > _ROUNDING:
        at = int(tensor.argmax())
        raise _refused(
            number, f"has {float(tensor[at]):g} as {name} of token {at}", "Want log-probabilities: natural logarithms, 0 at most"
        )
    return tensor


def _spans(number: int, sample: Sample, length: int) -> Iterator[tuple[int, int, int]]:
    """(version, start, end) over all tokens of a sample."""
    if isinstance(sample.version, int) and not isinstance(sample.version, bool):
        spans: Sequence[Any] = [VersionSpan(sample.version, 0, length)]
    elif isinstance(sample.version, Sequence) and all(isinstance(span, VersionSpan) for span in sample.version):
        spans = sample.version
    else:
        raise _refused(number, f"has version {sample.version!r}", "Give an integer, or `Generation.versions`")
    covered = 0
    for span in spans:
        if span.version is None or not 0 <= span.version <= MAX_VERSION:
            raise _refused(number, f"has tokens of version {span.version}", "Leave out what was sampled before the first sync")
        if span.start != covered or span.end < span.start:
            break
        covered = span.end
        yield span.version, span.start, span.end
    if covered != length:
        raise _refused(
            number, f"has versions for {covered} of {length} tokens in a row", "Give spans that follow one another over all of them"
        )


def _refused(number: int, what: str, hint: str) -> SamplesRefused:
    return SamplesRefused(f"sample {number} {what}", hint=hint)
