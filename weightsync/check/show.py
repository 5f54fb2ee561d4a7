"""A check's report on a terminal.

Not covered: the report as data, which `--json` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_SHOWN = 10


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the contract, what was tried, and what came out."""
    contract = report["contract"]
    table = Table(title=f"contract of {report['model']}", title_justify="left")
    for column, justify in (("slots", "left"), ("count", "right"), ("bytes", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for kind, count in contract["slots"].items():
        if count:
            table.add_row(kind, str(count), f"{contract['nbytes'][kind]:,}")
    console.print(table)
    for line in (*_contract(contract), *_tried(report)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _contract(contract: Mapping[str, Any]) -> Iterator[str]:
    nodes, unread = sum(contract["nodes"].values()), sum(contract["nodes_unread"].values())
    graphs = f"{contract['graphs']} captured graphs, {nodes} nodes, {unread} of them unread"
    yield f"vLLM {contract['vllm_version']} on {contract['device']}; {graphs if contract['graphs'] else 'no captured graphs'}"
    yield from _some("read and owned by nobody", [_slot(slot) for slot in contract["anonymous"]])
    repaired = [f"{path} ({_counts(done)})" for path, done in contract["repaired"].items()]
    yield from _some("repaired so far", repaired, contract["repaired_left_out"])
    yield from _some("lost", contract["lost"])
    yield from _some("the search for owners stopped at", contract["truncated"])
    yield f"sealed {contract['seals']} time(s); seconds: {_counts(contract['seconds'])}"


def _slot(slot: Mapping[str, Any]) -> str:
    said = ", ".join(filter(None, [f"{slot['nbytes']:,} bytes", slot["kernel"], slot["where"]]))
    return f"{slot['name']} ({said})"


def _some(what: str, entries: Sequence[str], more: int = 0) -> Iterator[str]:
    """A line for each of the first entries, under one that counts all; nothing when there are none."""
    if entries:
        yield f"{what}: {len(entries) + more}"
        yield from (f"    {entry}" for entry in entries[:_SHOWN])


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.3g}" for key, value in counts.items())


def _tried(report: Mapping[str, Any]) -> Iterator[str]:
    if identity := report.get("identity"):
        yield f"its own weights sent again: {len(identity['changed'])} of {identity['slots']} slots changed"
    if proof := report.get("proof"):
        yield f"other weights: {proof['differing_count']} tensors differ from a cold engine's"
        yield f"and back: {proof['written']} slots poisoned ({proof['poisoned_bytes']:,} bytes), {len(proof['unrefreshed'])} unrefreshed"
        if "outputs" in proof:
            yield f"outputs with the other weights, against a cold engine: {proof['outputs']}"
    yield from (f"unproven: {what}" for what in report["unproven"])
    yield from (f"FAILED: {what}" for what in report["failures"])
    if report["ok"]:
        values = ", and every value follows the weights" if "proof" in report else ", values are unproven"
        yield "ok: the contract holds" + (", and its own weights change nothing" if report["identity_alone"] else values)
