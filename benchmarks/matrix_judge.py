"""What the processes of one row saw, judged against cold engines; and the file of results. Pure but for the file.

*Right* means that, after every step of the warm engine,

- every tensor by its owner's path has the bytes that a cold engine of the same
  weights has, and no path is in one engine and not in the other;
- going back to weights gives the outputs and the bytes that they gave before, to the bit;
- tokens are a cold engine's, and log-probabilities, and the mean loss on fixed streams,
  lie within the spread of cold engines;
- overwriting scratch changes no output.

The spread is measured, and nothing is added to it: two cold engines of each set of
weights, and the starts of the warm engines, which are cold on `a`; each answers twice.
An engine whose answers differ does not repeat itself (its kernels add in any
order): such a row is judged by bytes, and by the spread where it says *to the bit*.
A path whose bytes differ among cold engines holds no weights (scratch that
nobody initialised, a pointer): it is left out and listed as *unstable*.

Not covered: an owner without a path, and memory that no Python object holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from weightsync.check.contents import differing

Outputs = Mapping[str, Any]
#: Paths of each kind that are written out; the rest is a number.
_SHOWN, _UNSTABLE_SHOWN = 8, 40
#: In a file that shows the table; it lies between them.
MARKS = ("<!-- matrix -->", "<!-- /matrix -->")


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
        if not said and (self.record or {}).get("blanked"):
            return None  # every step was seen; what came then was to find out what the engine bears
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
            gap = max(gap, _apart(x, y))
            if a != b:
                break
    return equal, gap


def _finite(gap: float) -> float | None:
    """For JSON, which has no infinity; None also marks an engine that answers with NaN."""
    return gap if gap < float("inf") else None


@dataclass
class Oracle:
    """What cold engines say.

    Args:
        cold: by weights, the first step of every engine that did nothing but start.
        starts: by weights, the first step of every engine.
        spread: largest difference in log-probability between two answers of any of these with the same weights.
        loss_spread: the same of the mean loss.
        tokens_agree: whether all answers with the same weights have the same tokens.
        repeatable: whether every engine always gives the same answer.
        unstable: paths that these engines don't agree on, and how.
    """

    cold: dict[str, list[dict[str, Any]]]
    starts: dict[str, list[dict[str, Any]]]
    spread: float = 0.0
    loss_spread: float = 0.0
    tokens_agree: bool = True
    repeatable: bool = True
    unstable: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, outcomes: Mapping[str, Outcome]) -> Oracle:
        """From the processes of a row; each began with a cold start."""
        oracle = cls({"a": [], "b": []}, {"a": [], "b": []})
        for mode, outcome in outcomes.items():
            for step in outcome.steps[:1]:
                oracle.starts[step["weights"]].append(step)
                if mode.startswith("cold-"):
                    oracle.cold[step["weights"]].append(step)
        for same in oracle.starts.values():
            answers = [answer for step in same for answer in _answers(step)]
            for one, other in combinations(answers, 2):
                equal, gap = outputs_gap(one, other)
                oracle.spread = max(oracle.spread, gap)
                oracle.tokens_agree &= equal == len(one["tokens"])
            losses = [loss for step in same for loss in step["losses"]]
            oracle.loss_spread = max([oracle.loss_spread, *(_apart(x, y) for x, y in combinations(losses, 2))])
            oracle.repeatable &= all(step["outputs"] == again for step in same for again in step["again"])
            for left, right in combinations(same, 2):
                oracle.unstable |= differing(left, right)
        return oracle

    def nearest(self, step: Mapping[str, Any]) -> tuple[int, float, float]:
        """Equal sequences, and how far outputs and loss are apart: each answer at a step from the cold answer most like it.

        An engine that repeats itself has one answer. For one that does not, this is
        whether each of its answers lies where cold engines' answers lie.
        """
        colds = self.cold[step["weights"]]
        answers, losses = [answer for cold in colds for answer in _answers(cold)], [loss for cold in colds for loss in cold["losses"]]
        gaps = [min((outputs_gap(mine, its) for its in answers), key=lambda gap: (-gap[0], gap[1])) for mine in _answers(step)]
        apart = [min(_apart(mine, its) for its in losses) for mine in step["losses"]]
        return min(equal for equal, _ in gaps), max(gap for _, gap in gaps), max(apart)


def _answers(step: Mapping[str, Any]) -> list[Outputs]:
    """All that an engine has said at a step."""
    return [step["outputs"], *step["again"]]


def _apart(one: float, other: float) -> float:
    """Distance of two numbers; NaN is as far off as can be."""
    return abs(one - other) if one == one and other == other else float("inf")


def judge_step(step: dict[str, Any], start: dict[str, Any], oracle: Oracle) -> dict[str, Any]:
    """One step of a warm engine against the cold engines of the same weights."""
    colds = oracle.cold[step["weights"]]
    equal, gap, loss_gap = oracle.nearest(step)
    wrong = {path: how for path, how in differing(step, colds[0]).items() if path not in oracle.unstable}
    total = sum(len(step[kind]) for kind in ("registered", "owned"))
    moved = sorted(path for path, at in start["addresses"].items() if step["addresses"].get(path) != at)
    judged = {
        "step": step["step"],
        "weights": step["weights"],
        "tokens_equal": equal,
        "largest_logprob_difference": _finite(gap),
        "bit_equal_to_cold": any(all(answer == cold["outputs"] for answer in _answers(step)) for cold in colds),
        "perplexity": _perplexity(step["losses"][0]),
        "loss_difference": _finite(loss_gap),
        "tensors": total,
        "tensors_differing": len(wrong),
        "moved": len(moved),
        "checks": {key: count for key, count in step.get("checks", {}).items() if count},
        "seconds": {key: round(seconds, 4) for key, seconds in step.get("seconds", {}).items()},
    }
    for key, shown in (("differing", dict(list(wrong.items())[:_SHOWN])), ("moved_paths", moved[:_SHOWN])):
        if shown:
            judged[key] = shown
    judged |= {key: step[key] for key in ("pressed_bytes",) if key in step}
    if "refilled" in step:
        judged |= {"refilled": dict(list(step["refilled"].items())[:_SHOWN]), "refilled_count": len(step["refilled"])}
    return judged


def judge_mode(outcome: Outcome, oracle: Oracle) -> dict[str, Any]:
    """A warm engine: `right` or `wrong`, with the reasons and the numbers."""
    steps, record = outcome.steps, outcome.record or {}
    judged = [judge_step(step, steps[0], oracle) for step in steps]
    reasons = [outcome.error] if outcome.error else []
    if not steps and not outcome.error:
        reasons.append("no step was seen")
    reasons += [f"{step['step']}: {why}" for step in judged for why in _against_cold(step, oracle)]
    reasons += _not_returned(steps, oracle)
    gaps = [step["largest_logprob_difference"] for step in judged[1:]]
    return {
        "verdict": "wrong" if reasons else "right",
        "reasons": reasons,
        "tokens_equal": min((step["tokens_equal"] for step in judged[1:]), default=None),
        "largest_logprob_difference": None if None in gaps else max(gaps, default=None),
        "largest_loss_difference": max((step["loss_difference"] or 0.0 for step in judged[1:]), default=None),
        "bit_equal_to_cold": bool(judged[1:]) and all(step["bit_equal_to_cold"] for step in judged),
        "tensors_equal": bool(judged[1:]) and not any(step["tensors_differing"] for step in judged),
        "returns_to_the_bit": len(steps) > 2 and not _not_returned(steps, replace(oracle, repeatable=True)),
        "moved": max((step["moved"] for step in judged), default=0),
        "checks": _largest(step["checks"] for step in judged),
        **{key: record[key] for key in ("load_seconds", "seal_seconds", "graphs", "contract", "blanked") if key in record},
        "steps": judged,
        **({"error": outcome.error, "exit_code": outcome.exit_code} if outcome.error else {}),
    }


def _against_cold(step: Mapping[str, Any], oracle: Oracle) -> Iterator[str]:
    """What tells a judged step from cold engines of the same weights."""
    if step["tensors_differing"]:
        first = ", ".join(f"{path} ({how})" for path, how in list(step["differing"].items())[:3])
        yield f"{step['tensors_differing']} tensor(s) differ from a cold engine's: {first}"
    count = len(oracle.cold["a"][0]["outputs"]["tokens"])
    if step["tokens_equal"] < count and oracle.tokens_agree:
        yield f"{step['tokens_equal']} of {count} sequences equal a cold engine's"
    difference, loss = step["largest_logprob_difference"], step["loss_difference"]
    if difference is None or loss is None:
        yield "log-probabilities are not numbers"
        return
    if difference > oracle.spread:
        yield f"log-probabilities differ by {difference:.3g}, cold engines by {oracle.spread:.3g} at most"
    if loss > oracle.loss_spread:
        yield f"the mean loss differs by {loss:.3g}, cold engines by {oracle.loss_spread:.3g} at most"


def _perplexity(loss: float) -> float | None:
    return round(math.exp(loss), 4) if loss < 100 else None


def _not_returned(steps: list[dict[str, Any]], oracle: Oracle) -> list[str]:
    """Steps at which an engine that held these weights before answers or holds something else than then."""
    first: dict[str, dict[str, Any]] = {}
    found = []
    for step in steps:
        before = first.setdefault(step["weights"], step)
        _, gap = outputs_gap(step["outputs"], before["outputs"])
        if step["outputs"] != before["outputs"] and (oracle.repeatable or gap > oracle.spread):
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
    cold = oracle.cold["a"][0]
    equal, _ = outputs_gap(cold["outputs"], oracle.cold["b"][0]["outputs"])
    scratch = {path: [held["rule"], held["nbytes"]] for path, held in cold["scratch"].items()}
    evidence = {
        "prompts": len(cold["outputs"]["tokens"]),
        "tokens_each": len(cold["outputs"]["tokens"][0]),
        "sequences_that_a_and_b_share": equal,
        "cold_engines": {letter: len(steps) for letter, steps in oracle.starts.items()},
        "cold_spread": _finite(oracle.spread),
        "cold_loss_spread": _finite(oracle.loss_spread),
        "repeatable": oracle.repeatable,
        "perplexity": {letter: _perplexity(steps[0]["losses"][0]) for letter, steps in oracle.cold.items()},
        "tensors": {kind: len(cold[kind]) for kind in ("registered", "owned")},
        "unstable": dict(list(oracle.unstable.items())[:_UNSTABLE_SHOWN]),
        "unstable_count": len(oracle.unstable),
        "unstable_registered": sorted(oracle.unstable.keys() & cold["registered"].keys()),  # ought to be empty
        "scratch": dict(list(scratch.items())[:_UNSTABLE_SHOWN]),
        "scratch_count": len(scratch),
        "scratch_bytes": sum(nbytes for _, nbytes in scratch.values()),
        "graphs": first.get("graphs"),
        "kernels": first.get("kernels"),
    }
    if contract := judged.get("weightsync", {}).get("contract"):
        evidence |= {"unowned": contract["anonymous"][:_SHOWN], **{key: contract[key] for key in ("possibly_derived", "unproven")}}
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
    lines = ["| checkpoint | stock `reload_weights` | weightsync | repaired | apply |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        if row["verdict"] == "blocked":
            lines.append(f"| {row['about']} | does not start: {_cell(row['evidence']['error'])} | blocked | | |")
            continue
        count, ours = row["evidence"]["prompts"], row.get("weightsync")
        lines.append(f"| {row['about']} | {_verdict(row.get('stock'), count)} | {_verdict(ours, count)} | {_work(ours)} |")
    return "\n".join(lines)


def put_table(text: str, made: str) -> str:
    """A text with the table put between its two marks.

    Raises:
        ValueError: the marks are not there, once each and in order.
    """
    before, first, rest = text.partition(MARKS[0])
    _, second, after = rest.partition(MARKS[1])
    if not (first and second) or any(mark in part for mark in MARKS for part in (before, after)):
        raise ValueError(f"want {MARKS[0]} and behind it {MARKS[1]}, once each")
    return f"{before}{first}\n{made}\n{second}{after}"


def _verdict(mode: Mapping[str, Any] | None, prompts: int) -> str:
    if mode is None:
        return "not run"
    if mode["verdict"] == "right":
        return "right, equal to the bit" if mode["bit_equal_to_cold"] else f"right, within {mode['largest_logprob_difference']:.2g}"
    if error := mode.get("error"):
        at, _, said = error.partition(": ")
        if "illegal memory access" in error:
            said = "illegal memory access"
        return f"**{_cell(said or at)}**" + (" at the start" if at == "start" else "")
    if mode["tensors_equal"] and mode["returns_to_the_bit"]:
        return "**bytes equal, outputs not**"
    return f"**no error; {mode['tokens_equal']} of {prompts} sequences match**"


def _work(mode: Mapping[str, Any] | None) -> str:
    """Two cells: tensors brought back to the captured storage in one update, and the shortest time an update was applied in."""
    if mode is None or not mode["steps"][1:]:
        return " |"
    seconds = [step["seconds"]["apply"] for step in mode["steps"] if "apply" in step["seconds"]]
    repaired = mode["checks"].get("paths_repaired", 0)
    return f"{f'{repaired} tensors' if repaired else ''} | {f'{1000 * min(seconds):.0f} ms' if seconds else ''}"


def _cell(text: str) -> str:
    """Short enough for a table; a bracket of advice and what follows a line's end are left out."""
    return text.split(" / ")[0].replace("|", "/").replace("\n", " ")[:110].strip()
