"""A fleet's status on a terminal, and how far a sending is.

Not covered: the status as data, which `--json` prints.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from weightsync.errors import WeightSyncError
from weightsync.mismatch import BEHIND, standing_out
from weightsync.protocol import EngineState, EngineStatus, FleetStatus

#: Columns as they are shown.
_COLUMNS = ("engine", "state", "version", "pin", "update", "address", "workers", "vLLM", "keeps", "reason")
#: Which of them come first where there is no room for all; without the first three a line says nothing.
_BY_WEIGHT = ("engine", "state", "version", "reason", "pin", "address", "keeps", "update", "workers", "vLLM")
_LEAST = 3


def show_status(status: FleetStatus, console: Console | None = None) -> None:
    """Print the fleet as a table, as many columns as the terminal has room for in full, and what the table can't hold below it."""
    console = console or Console()
    rows = [_cells(engine) for engine in status.engines]
    filled = {column for column in _COLUMNS if any(row[column] for row in rows)}
    columns = _that_fit(status, rows, filled, console)
    console.print(_table(status, rows, columns))
    for line in _below(status, [column for column in _COLUMNS if column in filled.difference(columns)]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _that_fit(status: FleetStatus, rows: list[dict[str, str]], filled: set[str], console: Console) -> list[str]:
    chosen = list(_BY_WEIGHT[:_LEAST])
    for column in sorted(_BY_WEIGHT[_LEAST:], key=lambda column: column not in filled):
        table = _table(status, rows, [*chosen, column])
        if Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width:
            chosen.append(column)
    return [column for column in _COLUMNS if column in chosen]


def _table(status: FleetStatus, rows: list[dict[str, str]], columns: list[str]) -> Table:
    pinned = sum(bool(e.pinned) for e in status.engines)
    ready = f"{status.ready} of {len(status.engines)} engines ready" + (f", {pinned} pinned" if pinned else "")
    table = Table(title=f"fleet {status.fleet}: version {status.committed_version}, {ready}")
    for column in columns:
        table.add_column(column, overflow="fold")  # what is cut short is of no use
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))  # in a plain string the brackets of an IPv6 address are markup
    return table


def _cells(e: EngineStatus) -> dict[str, str]:
    kept = f"{e.retained.nbytes / 1e9:.2f} GB" if e.retained else ""
    values = (e.engine, e.state, e.version, e.pinned, e.update_id, e.url, e.workers, e.vllm_version, kept, e.reason)
    return {column: "-" if value is None else str(value) for column, value in zip(_COLUMNS, values, strict=True)}


def _below(status: FleetStatus, left_out: list[str]) -> Iterator[str]:
    if left_out:
        yield f"no room for: {', '.join(left_out)} (widen the terminal, or --json)"
    if (update := status.update) is not None and not update.state.final:
        yield f"update {update.update_id} to version {update.version} is under way ({update.state})"
    yield from _mismatch(status)
    for engine in status.engines:
        if engine.state == EngineState.SILENT:
            who = ", ".join(map(str, engine.silent_workers))
            about = f"worker {who} of {engine.workers} does" if who else "its workers do"
            yield f"engine {engine.engine}: {about} not answer, for {engine.silence_seconds:.0f} s"
        if engine.failed:
            error = WeightSyncError.from_dict(engine.failed)
            yield f"engine {engine.engine}, last update: {error.code}: {error}"


def _mismatch(status: FleetStatus) -> Iterator[str]:
    """What probes and trainers' samples say of engines."""
    if status.probe is not None:
        yield from (f"probe of version {status.probe.version}: {said}" for said in status.probe.said)
    named = standing_out(status.observed)
    for behind in BEHIND:
        of = [f"engine {m.engine} {m.difference:.3g}" + " (!)" * (m.engine in named) for m in status.observed if m.behind == behind]
        if of:
            yield f"trainer and rollout differ, {behind} updates behind, nats a token: {', '.join(of)}"


class Sending:
    """A bar on standard error from the first bytes on, as the `progress` of a sync: an update that is refused sends none."""

    def __init__(self) -> None:
        self._bar = Progress("sending", BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def __call__(self, sent: int, total: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task("send", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=sent, total=total)
