"""A check's report on a terminal.

Not covered: the report as data, which `--json` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

#: Keys of a contract that the table of kinds shows.
_BY_KIND = ("slots", "bytes")


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the contract, what was tried, and what came out."""
    contract = report["contract"]
    table = Table(title=f"contract of {report['model']}", title_justify="left")
    table.add_column("slots")
    for column in _BY_KIND:
        table.add_column("count" if column == "slots" else column, justify="right")
    for kind, count in contract.get("slots", {}).items():
        table.add_row(kind, str(count), f"{contract.get('bytes', {}).get(kind, 0):,}")
    console.print(table)
    for line in _lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    for key, value in report["contract"].items():
        if key not in _BY_KIND:
            yield f"{key.replace('_', ' ')}: {_plain(value)}"
    yield f"repaired in one update: {report['repaired']}"
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
        yield "ok: the contract holds" + (", values are unproven" if "proof" not in report else ", and every value follows the weights")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return "; ".join(_plain(item) for item in value) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
