"""What the demo claims at its end, as pure functions of what its processes reported.

Not covered: judging how fast anything was; the figures are shown, not asserted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

#: From so many steps on, the reward must have risen.
STEPS_TO_LEARN = 10
MIN_GAIN = 0.2
_WINDOW = 5


def gain(rewards: Sequence[float]) -> float:
    """Mean of the last five rewards less the mean of the first five (or of all, when fewer)."""
    if not rewards:
        return 0.0
    first, last = rewards[:_WINDOW], rewards[-_WINDOW:]
    return sum(last) / len(last) - sum(first) / len(first)


def spread(cold: Sequence[Mapping[str, Any]]) -> float:
    """Largest difference between log-probabilities of cold engines of the same weights, nats, as long as their tokens agree."""
    worst = 0.0
    for one, other in itertools.combinations(cold, 2):
        for index, tokens in enumerate(one["tokens"]):
            for position, token in enumerate(tokens):
                if token != other["tokens"][index][position]:
                    break
                worst = max(worst, abs(one["logprobs"][index][position] - other["logprobs"][index][position]))
    return worst


def differences(fleet: Mapping[str, Any], cold: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where engines of the fleet differ from the cold engines by more than these among themselves; empty when nowhere.

    With one cold engine, or several that agree, that is to the bit.

    Args:
        fleet: `outputs.json` of the trainer: `engines`, each with `engine`, `version`, and `tokens`
            and `logprobs` per prompt; and the `version` that each must hold.
        cold: of each run, `tokens` and `logprobs` per prompt.
    """
    found = [] if fleet["engines"] else ["no engine answered"]
    allowed = spread(cold)
    for engine in fleet["engines"]:
        name = f"engine {engine['engine']}"
        if engine["version"] != fleet["version"]:
            found.append(f"{name} holds version {engine['version']}, not {fleet['version']}")
        for index in range(len(fleet["prompts"])):
            alike = [run["logprobs"][index] for run in cold if run["tokens"][index] == engine["tokens"][index]]
            off = [max(abs(a - b) for a, b in zip(engine["logprobs"][index], logprobs, strict=True)) for logprobs in alike]
            if not off:
                found.append(f"{name}, prompt {index}: other tokens")
            elif not min(off) <= allowed:
                found.append(f"{name}, prompt {index}: log-probabilities differ by up to {min(off):.3g}")
    return found


def summarise(
    lines: Sequence[Mapping[str, Any]], fleet: Mapping[str, Any], cold: Sequence[Mapping[str, Any]], steps: int
) -> dict[str, Any]:
    """The demo's result as `--json` prints it.

    Args:
        lines: the trainer's lines, first sync included.
        fleet, cold: see `differences`.
        steps: how many were asked for.
    """
    rewards = [float(line["reward"]) for line in lines if line["reward"] is not None]
    different = differences(fleet, cold)
    learned = steps < STEPS_TO_LEARN or gain(rewards) >= MIN_GAIN
    return {
        "ok": not different and learned and len(rewards) == steps,
        "engines": len(fleet["engines"]),
        "steps": steps,
        "reward": rewards,
        "gain": gain(rewards),
        "updates": [
            {
                "version": line["version"],
                "bytes": line["bytes"],
                "seconds": line["sync_seconds"],
                "pause_seconds": line["pause_seconds"],
                "stored_tensors": line["stored_tensors"],
            }
            for line in lines
        ],
        "cold_equal": not different,
        "cold_spread": spread(cold),
        "differences": different,
        "max_logprob_gap": max((float(line["logprob_gap"]) for line in lines if line["logprob_gap"] is not None), default=None),
    }
