"""What the processes of one row saw, judged against cold engines; and the file of results. Pure but for the file.

*Right* means that, after every step of the warm engine,

- every tensor by its owner's path has the bytes that a cold engine of the same
  weights has, and no path is in one engine and not in the other;
- going back to weights gives the outputs and the bytes that they gave before, to the bit;
- tokens are a cold engine's, and log-probabilities lie within the spread of cold engines.

The spread is measured: the warm engines start cold on `a` as well, so there are at
least three. A path whose bytes differ among these holds no weights (scratch that
nobody initialised, a pointer): it is left out and listed as *unstable*.

Not covered: an owner without a path, and memory that no Python object holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

Outputs = Mapping[str, Any]
Contents = Mapping[str, Any]
#: Largest difference in log-probability seen between cold engines with every byte equal; three samples may show less.
KNOWN_SPREAD = 0.032
#: Paths of each kind that are written out; the rest is a number.
_SHOWN, _UNSTABLE_SHOWN = 8, 40
#: Parts of the names of a verdict's counts that the table shows.
_WORK = ("adopted", "rebound", "repacked", "pinned", "refreshed", "recaptured", "lost", "anonymous")


@dataclass(frozen=True)
class Outcome:
    """How one process ended.

    Args:
        record: what it wrote (`matrix_worker.Run.record`); None when it wrote nothing.
        exit_code: negative for a signal.
        timed_out: it was ended at its deadline.
        stderr: its last lines.
    """

    record: dict[str, Any] | None
    exit_code: int
    timed_out: bool = False
    stderr: tuple[str, ...] = ()

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Steps that were seen to their end."""
        return [step for step in (self.record or {}).get("steps", []) if step.get("complete")]

    @property
    def error(self) -> str | None:
        """Why it did not finish; None when it did."""
        said = (self.record or {}).get("error")
        if self.timed_out:
            return "timed out"
        if self.exit_code:
            at = self.steps[-1]["step"] if self.steps else "nothing"
            quoted = _telling(self.stderr)
            return "; ".join(filter(None, [f"the process ended with exit code {self.exit_code} after {at}", said, quoted]))
        return said or (None if self.record else "the process wrote no result")


def _telling(lines: Iterable[str]) -> str:
    """The last line that names an error, or the last line."""
    kept = [line.strip() for line in lines if line.strip()]
    named = [line for line in kept if "error" in line.lower() or "illegal" in line.lower() or "signal" in line.lower()]
    return (named or kept or [""])[-1][:300]


def outputs_gap(left: Outputs, right: Outputs) -> tuple[int, float]:
    """Sequences whose tokens are equal, and the largest difference in log-probability up to the first other token."""
    equal, gap = 0, 0.0
    for one, other, one_logs, other_logs in zip(left["tokens"], right["tokens"], left["logprobs"], right["logprobs"], strict=True):
        equal += one == other
        for a, b, x, y in zip(one, other, one_logs, other_logs, strict=True):
            gap = max(gap, abs(x - y) if x == x and y == y else float("inf"))  # NaN is as far off as can be
            if a != b:
                break
    return equal, gap


def _finite(gap: float) -> float | None:
    """For JSON, which has no infinity; None also marks an engine that answers with NaN."""
    return gap if gap < float("inf") else None


def differing(left: Contents, right: Contents) -> dict[str, str]:
    """Paths that two engines don't agree on, and how: `value`, `only here`, `only there`."""
    found: dict[str, str] = {}
    for kind in ("registered", "owned", "scalars"):
        here, there = left[kind], right[kind]
        found |= {path: "value" for path in here.keys() & there.keys() if here[path] != there[path]}
        found |= {path: "only here" for path in here.keys() - there.keys()}
        found |= {path: "only there" for path in there.keys() - here.keys()}
    return dict(sorted(found.items()))


@dataclass
class Oracle:
    """What cold engines say: their last step by weights, their spread on `a`, and the paths that they don't agree on."""

    cold: dict[str, dict[str, Any]]
    spread: float = 0.0
    tokens_agree: bool = True
    engines: int = 1
    unstable: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, outcomes: Mapping[str, Outcome]) -> Oracle:
        """From the processes of a row; each began with a cold start."""
        oracle = cls({letter: outcomes[f"cold-{letter}"].steps[0] for letter in ("a", "b")})
        starts: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
        for outcome in outcomes.values():
            for step in outcome.steps[:1]:
                starts[step["weights"]].append(step)
        for same in starts.values():
            for one, other in combinations(same, 2):
                equal, gap = outputs_gap(one["outputs"], other["outputs"])
                oracle.spread = max(oracle.spread, gap)
                oracle.tokens_agree &= equal == len(one["outputs"]["tokens"])
                oracle.unstable |= differing(one, other)
        oracle.engines = len(starts["a"])
        return oracle

    @property
    def allowed(self) -> float:
        return max(self.spread, KNOWN_SPREAD)


def judge_step(step: dict[str, Any], start: dict[str, Any], oracle: Oracle) -> dict[str, Any]:
    """One step of a warm engine against the cold engine of the same weights."""
    cold = oracle.cold[step["weights"]]
    equal, gap = outputs_gap(step["outputs"], cold["outputs"])
    wrong = {path: how for path, how in differing(step, cold).items() if path not in oracle.unstable}
    total = sum(len(step[kind]) for kind in ("registered", "owned"))
    moved = sorted(path for path, at in start["addresses"].items() if step["addresses"].get(path) != at)
    judged = {
        "step": step["step"],
        "weights": step["weights"],
        "tokens_equal": equal,
        "largest_logprob_difference": _finite(gap),
        "bit_equal_to_cold": step["outputs"] == cold["outputs"],
        "tensors": total,
        "tensors_differing": len(wrong),
        "moved": len(moved),
        "checks": {key: count for key, count in step.get("checks", {}).items() if count},
        "seconds": {key: round(seconds, 4) for key, seconds in step.get("seconds", {}).items()},
    }
    for key, shown in (("differing", dict(list(wrong.items())[:_SHOWN])), ("moved_paths", moved[:_SHOWN])):
        if shown:
            judged[key] = shown
    if "pressed_bytes" in step:
        judged["pressed_bytes"] = step["pressed_bytes"]
    return judged


def judge_mode(outcome: Outcome, oracle: Oracle) -> dict[str, Any]:
    """A warm engine: `right` or `wrong`, with the reasons and the numbers."""
    steps = outcome.steps
    judged = [judge_step(step, steps[0], oracle) for step in steps]
    reasons = [outcome.error] if outcome.error else []
    if not steps and not outcome.error:
        reasons.append("no step was seen")
    for step in judged:
        count = len(oracle.cold["a"]["outputs"]["tokens"])
        if step["tensors_differing"]:
            first = ", ".join(f"{path} ({how})" for path, how in list(step["differing"].items())[:3])
            reasons.append(f"{step['step']}: {step['tensors_differing']} tensor(s) differ from a cold engine's: {first}")
        if step["tokens_equal"] < count and oracle.tokens_agree:
            reasons.append(f"{step['step']}: {step['tokens_equal']} of {count} sequences equal a cold engine's")
        difference = step["largest_logprob_difference"]
        if difference is None:
            reasons.append(f"{step['step']}: log-probabilities are not numbers")
        elif difference > oracle.allowed:
            reasons.append(f"{step['step']}: log-probabilities differ by {difference:.3g}, cold engines by {oracle.allowed:.3g} at most")
    reasons += _not_returned(steps, oracle)
    gaps = [step["largest_logprob_difference"] for step in judged[1:]]
    return {
        "verdict": "wrong" if reasons else "right",
        "reasons": reasons,
        "tokens_equal": min((step["tokens_equal"] for step in judged[1:]), default=None),
        "largest_logprob_difference": None if None in gaps else max(gaps, default=None),
        "bit_equal_to_cold": bool(judged[1:]) and all(step["bit_equal_to_cold"] for step in judged),
        "tensors_equal": bool(judged[1:]) and not any(step["tensors_differing"] for step in judged),
        "returns_to_the_bit": len(steps) > 2 and not _not_returned(steps, oracle),
        "moved": max((step["moved"] for step in judged), default=0),
        "checks": _largest(step["checks"] for step in judged),
        "load_seconds": (outcome.record or {}).get("load_seconds"),
        "graphs": (outcome.record or {}).get("graphs"),
        "steps": judged,
        **({"error": outcome.error, "exit_code": outcome.exit_code} if outcome.error else {}),
    }


def _not_returned(steps: list[dict[str, Any]], oracle: Oracle) -> list[str]:
    """Steps at which an engine that held these weights before answers or holds something else than then."""
    first: dict[str, dict[str, Any]] = {}
    found = []
    for step in steps:
        before = first.setdefault(step["weights"], step)
        if step["outputs"] != before["outputs"]:
            found.append(f"{step['step']}: other outputs than at {before['step']}, with the same weights")
        if set(differing(step, before)) - set(oracle.unstable):
            found.append(f"{step['step']}: other bytes than at {before['step']}, with the same weights")
    return found


def _largest(checks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for each in checks:
        result |= {key: max(value, result.get(key, value)) for key, value in each.items()}
    return result


def judge_row(name: str, about: str, seed: int, outcomes: Mapping[str, Outcome]) -> dict[str, Any] | None:
    """A row of the results; None when a cold engine only ran out of time, which says nothing."""
    row: dict[str, Any] = {"row": name, "about": about, "seed": seed}
    colds = {mode: outcome for mode, outcome in outcomes.items() if mode.startswith("cold-")}
    first = next(iter(colds.values())).record or {}
    row |= {"versions": first.get("versions", {})}
    failed = {mode: outcome for mode, outcome in colds.items() if outcome.error or not outcome.steps}
    if any(outcome.timed_out for outcome in failed.values()):
        return None
    if failed:
        mode, outcome = next(iter(failed.items()))
        error = outcome.error or "no step was seen"
        return row | {"verdict": "blocked", "evidence": {"error": f"{mode}: {error}", "stderr": list(outcome.stderr)[-5:]}}
    oracle = Oracle.of(outcomes)
    judged = {mode: judge_mode(outcomes[mode], oracle) for mode in ("stock", "weightsync") if mode in outcomes}
    cold = oracle.cold["a"]
    equal, _ = outputs_gap(cold["outputs"], oracle.cold["b"]["outputs"])
    evidence = {
        "prompts": len(cold["outputs"]["tokens"]),
        "tokens_each": len(cold["outputs"]["tokens"][0]),
        "sequences_that_a_and_b_share": equal,
        "cold_engines": oracle.engines,
        "cold_spread": _finite(oracle.spread),
        "allowed_spread": _finite(oracle.allowed),
        "tensors": {kind: len(cold[kind]) for kind in ("registered", "owned")},
        "unstable": dict(list(oracle.unstable.items())[:_UNSTABLE_SHOWN]),
        "unstable_count": len(oracle.unstable),
        "unstable_registered": sorted(oracle.unstable.keys() & cold["registered"].keys()),  # ought to be empty
        "scratch_bytes": sum(cold["scratch"].values()),
        "graphs": first.get("graphs"),
        "kernels": first.get("kernels"),
    }
    verdict = judged["weightsync"]["verdict"] if "weightsync" in judged else "wrong"
    if equal == evidence["prompts"]:  # then nothing that the engine says tells old weights from new
        verdict, evidence["void"] = "wrong", "a and b give the same outputs"
    return row | {"verdict": verdict, "evidence": evidence, **judged}


# --- the file ----------------------------------------------------------------------------------


def merge(results: Mapping[str, Any], row: Mapping[str, Any], order: Iterable[str] = ()) -> dict[str, Any]:
    """Results with one row put in, in place of an older one of its name; other rows stay."""
    rows = {old["row"]: old for old in results.get("rows", [])} | {row["row"]: dict(row)}
    rank = {name: number for number, name in enumerate(order)}
    ordered = sorted(rows.values(), key=lambda each: rank.get(each["row"], len(rank)))
    return {"gpu": row["versions"].get("gpu", "cpu"), "versions": row["versions"], "seed": row["seed"], "rows": ordered}


def merge_into(path: Path, row: Mapping[str, Any], order: Iterable[str] = ()) -> None:
    """`merge` with a file, made if missing."""
    results = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(merge(results, row, order), indent=1) + "\n")
    part.replace(path)


def table(results: Mapping[str, Any]) -> str:
    """The results as a table in Markdown."""
    lines = ["| checkpoint | stock `reload_weights` | weightsync | by weightsync |", "|---|---|---|---|"]
    for row in results["rows"]:
        if row["verdict"] == "blocked":
            lines.append(f"| {row['about']} | does not start: {_cell(row['evidence']['error'])} | blocked | |")
            continue
        count = row["evidence"]["prompts"]
        stock, ours = row.get("stock"), row.get("weightsync")
        lines.append(f"| {row['about']} | {_verdict(stock, count)} | {_verdict(ours, count)} | {_work(ours)} |")
    return "\n".join(lines)


def _verdict(mode: Mapping[str, Any] | None, prompts: int) -> str:
    if mode is None:
        return "not run"
    if mode["verdict"] == "right":
        return "right, equal to the bit" if mode["bit_equal_to_cold"] else f"right, within {mode['largest_logprob_difference']:.2g}"
    if mode.get("error"):
        return f"**{_cell(mode['error'])}**"
    return f"**wrong, no error: {mode['tokens_equal']} of {prompts} sequences match**"


def _work(mode: Mapping[str, Any] | None) -> str:
    if mode is None or not mode["steps"][1:]:
        return ""
    seconds = [step["seconds"].get("apply", 0.0) for step in mode["steps"][1:]]
    words = [f"{count} {key.replace('_', ' ')}" for key, count in sorted(mode["checks"].items()) if any(word in key for word in _WORK)]
    return ", ".join([f"apply {1000 * min(seconds):.0f} ms", f"{mode['moved']} moved", *words])


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:160]
