"""One engine of a check: `python -m weightsync.check.probe JOB.json` starts it, looks, writes a report and ends.

    cold    start on the job's weights; write down the digests of everything the model holds
    warm    start on A; seal; send A: no slot may change. With weights B and a cold engine's digests of them:
            send B: every tensor must equal the cold engine's by path; poison what was written; send A:
            what does not hold A's bytes again is unrefreshed. Then both once more, for the outputs:
            they also tell of values that no tensor holds (on a CPU those in oneDNN's handles)

The report is an object with `failures`, plain sentences, each of which says that
such an engine must not serve, and `unproven`, what this run can't tell. A typed
error of the worker's ends the run and is the report's `error`.

Not covered: several workers; what `storage.selftest`, `contents` and `under_test` leave
out; values that differ between any two cold engines, which are taken for stale ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weightsync.check.contents import contents, differing, scratch_rule
from weightsync.check.engine import OURS, Trainer, contract_report, generate, sealed_memory
from weightsync.check.inputs import OTHER_VALUES, read_tensors
from weightsync.errors import BadValues, ConfigError, EngineDied, WeightSyncError
from weightsync.storage.contract import Contract, Fault, Kind, Slot
from weightsync.storage.selftest import SelfTest
from weightsync.worker import tiles

#: How a failure ends that is none without `strict`.
STRICT_IS_SET = "and strict is set"
#: Of tokens that every vocabulary has.
PROMPTS = [[1, 5, 9, 30], [7, 7, 7], [10, 20, 30, 40, 50, 11, 12, 13]]
_MAX_TOKENS = 16
_SHOWN = 20


@dataclass(frozen=True)
class Job:
    """What a process is to do.

    Args:
        task: `cold` or `warm`.
        model: folder of the weights to start on.
        other: folder of the weights B; empty for none.
        digests: file of the cold engine's: written by `cold`, read by `warm` when there is a B.
        out: file for the report.
        device: `cpu` or `cuda`.
        engine_args: vLLM's.
        strict: whether a repair is a failure.
        identity: nothing is asked but that the engine's own weights change nothing; then there is no B.
    """

    task: str
    model: str
    other: str
    digests: str
    out: str
    device: str
    engine_args: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    identity: bool = False

    def dump(self, path: Path) -> None:
        """Write it to where a process is to read it."""
        path.write_text(json.dumps(asdict(self)))


def cold(job: Job) -> dict[str, Any]:
    """What an engine holds that was started on the weights."""
    llm = _start(job, {})
    outputs = generate(llm, PROMPTS, _MAX_TOKENS)  # before the look: now what is made on first use is made
    Path(job.digests).write_text(json.dumps({"outputs": outputs, **contents(_model(llm))}))
    return {}


def warm(job: Job) -> dict[str, Any]:
    """The whole check of one engine; its report."""
    return Warm(job).run()


def under_test(contract: Contract) -> list[Slot]:
    """Slots that hold what weights bring: neither caches and workspaces, nor the engine's own.

    An update may run the model or capture its graphs, and that writes the engine's
    inputs; a step would take poison in them for an index.
    """
    return [slot for slot in contract.slots if slot.kind is not Kind.ENGINE and not any(scratch_rule(path) for path in slot.paths)]


def contract_failures(contract: Mapping[str, Any], strict: bool) -> list[str]:
    """What stands against a sealed contract, before anything was sent."""
    found = {
        "graph node(s) could not be read": sum(contract["nodes_unread"].values()),
        "slot(s) that nobody owns may derive from weights, and nothing could refresh them": contract["possibly_derived"],
        f"slot(s) are owned by nobody and of unknown age, {STRICT_IS_SET}": contract["slots"].get("anonymous", 0) if strict else 0,
    }
    return [f"{count} {what}" for what, count in found.items() if count]


class Warm:
    """An engine that was started on A, and what is found out about it.

    Args:
        job: with `task` warm.
    """

    def __init__(self, job: Job) -> None:
        began = time.monotonic()
        self._job = job
        self._llm = _start(job, OURS)
        started = time.monotonic()
        self._trainer = Trainer(self._llm)
        self.report: dict[str, Any] = {"contract": contract_report(self._llm), "failures": [], "unproven": [], "repaired": 0}
        self.report["seconds"] = {"start": started - began, "seal": time.monotonic() - started}
        self.report["unproven"] += self.report["contract"]["unproven"]
        self.report["unproven"] += [f"owners may be missing: the search stopped at {path}" for path in self.report["contract"]["truncated"]]
        self.report["failures"] += contract_failures(self.report["contract"], job.strict)

    def run(self) -> dict[str, Any]:
        """Identity, then the proof, then whether the engine answers as before."""
        before, again = (generate(self._llm, PROMPTS, _MAX_TOKENS) for _ in range(2))
        contract, pins = sealed_memory(self._llm)
        test = SelfTest(under_test(contract), pins)
        self._identity(test)
        if not self.report["failures"] and self._job.other:
            self._proof(test)
        elif not self._job.other and not self._job.identity:
            self.report["unproven"].append("whether every value follows the weights: there is no second set of weights (--other)")
        if not self.report["failures"]:
            self._outputs(before, again)
        if self._job.strict and self.report["repaired"]:
            self._fail(f"an update needed {self.report['repaired']} repair(s), {STRICT_IS_SET}")
        self.report["contract"] = contract_report(self._llm)
        return self.report

    def _identity(self, test: SelfTest) -> None:
        count = test.remember()
        self._send("identity", self._job.model)
        changed = test.unrefreshed()
        self.report["identity"] = {"slots": count, "left_out": len(test.left_out), "changed": _lines(changed)}
        if changed:
            self._fail(f"sending the weights that it holds changed {len(changed)} slot(s): {_named(changed)}")

    def _proof(self, test: SelfTest) -> None:
        self._send("new", self._job.other)
        written = test.changed()
        wrong = differing(contents(_model(self._llm)), json.loads(Path(self._job.digests).read_text()))
        if not written and not wrong:  # one engine's values are the other's
            raise ConfigError(
                "--other: this engine holds the same values with either weights, in the dtypes that it keeps, so nothing can be told",
                hint=OTHER_VALUES,
            )
        poisoned = test.poison(written)
        self._send("back", self._job.model)
        stale = test.unrefreshed()
        self.report["proof"] = {
            "written": len(written),
            "poisoned_bytes": poisoned,
            "differing": dict(list(wrong.items())[:_SHOWN]),
            "differing_count": len(wrong),
            "unrefreshed": _lines(stale),
            "restored": test.restore(),
        }
        if wrong:
            first = ", ".join(f"{path} ({how})" for path, how in list(wrong.items())[:_SHOWN])
            self._fail(f"with the other weights {len(wrong)} tensor(s) differ from a cold engine's: {first}")
        if stale:
            self._fail(f"{len(stale)} slot(s) are unrefreshed: {_named(stale)}")
        if not written:
            self._fail("the other weights changed no slot: nothing was written")

    def _outputs(self, before: dict[str, Any], again: dict[str, Any]) -> None:
        """Whether the engine answers as it did with A, and as a cold engine with B. Nothing is poisoned now."""
        if before != again:
            said = "outputs: this engine does not give the same answer twice"
            self.report["failures" if self._job.identity else "unproven"].append(said)
            return
        if generate(self._llm, PROMPTS, _MAX_TOKENS) != before:
            self._fail("with its first weights again, and every slot as it was, the engine answers otherwise")
        if "proof" in self.report:
            self._send("outputs", self._job.other)
            expected = json.loads(Path(self._job.digests).read_text())["outputs"]
            same = generate(self._llm, PROMPTS, _MAX_TOKENS) == expected
            self.report["proof"]["outputs"] = "equal to the bit" if same else "others"
            if not same and self._job.device == "cpu":  # where kernels add in one order
                self._fail("with the other weights, and every tensor equal to a cold engine's, the engine answers otherwise")
            elif not same:
                self.report["unproven"].append(
                    "outputs with the other weights: not a cold engine's to the bit; two cold ones may differ too"
                )

    def _send(self, name: str, folder: str) -> None:
        try:
            done = self._trainer.sync(read_tensors(Path(folder)))
        except BadValues as exc:
            exc.message = f"{folder}: {exc.message}"
            exc.hint = "Give a checkpoint without such values, from before the step that made them: among NaN no stale value can be found"
            raise
        self.report["repaired"] = max(self.report["repaired"], done["checks"].get("paths_repaired", 0))
        self.report["seconds"][name] = done["seconds"].get("apply", 0.0) + done["seconds"].get("verify", 0.0)

    def _fail(self, said: str) -> None:
        self.report["failures"].append(said)


def _lines(faults: list[Fault]) -> list[str]:
    return [str(fault) for fault in faults[:_SHOWN]]


def _named(faults: list[Fault]) -> str:
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(_lines(faults)) + more


def _start(job: Job, ours: Mapping[str, Any]) -> Any:
    import vllm

    tiles.ask()
    try:
        return vllm.LLM(model=job.model, **{**ours, **job.engine_args})
    except Exception as exc:
        raise EngineDied(
            f"vLLM {vllm.__version__} does not start on {job.model}: {type(exc).__name__}: {exc}",
            hint="Start it without weightsync, with the same arguments, and see what it says",
            retryable=False,
        ) from exc


def _model(llm: Any) -> Any:
    return llm.collective_rpc(lambda worker: worker.get_model())[0]


def main() -> None:
    """Do the job that the only argument names."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        report = {"cold": cold, "warm": warm}[job.task](job)
    except WeightSyncError as exc:
        traceback.print_exc()
        report = {"error": exc.to_dict()}
    Path(job.out).write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # vLLM's and gloo's threads can hold up an ordinary exit


if __name__ == "__main__":
    main()
