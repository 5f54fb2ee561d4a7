"""A fleet's status on a terminal, and how far a sending is.

Not covered: the status as data, which `--json` prints.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from rich.console import Console, Group
from rich.measure import Measurement
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from weightsync.errors import WeightSyncError
from weightsync.mismatch import BEHIND, standing_out
from weightsync.protocol import EngineState, EngineStatus, FleetCheck, FleetStatus

#: Columns as they are shown.
_COLUMNS = ("engine", "state", "version", "pin", "update", "address", "workers", "vLLM", "keeps", "reason")
#: Which of them come first where there is no room for all; without the first three a line says nothing.
_BY_WEIGHT = ("engine", "state", "version", "reason", "pin", "address", "keeps", "update", "workers", "vLLM")
_LEAST = 3
#: Columns of what is no terminal, and says nothing of its width: room for everything.
_WIDE = 1000


def terminal() -> Console:
    """Standard output: as wide as the terminal, or as `COLUMNS` says; in a pipe or a file nothing is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=shutil.get_terminal_size((_WIDE, 24)).columns)


def show_status(status: FleetStatus, console: Console | None = None) -> None:
    """Print the fleet as a table, as many columns as the terminal has room for in full, and what the table can't hold below it."""
    console = console or terminal()
    table, below = _parts(status, console)
    console.print(table)
    for line in below:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def picture(status: FleetStatus, console: Console) -> Group:
    """The same as one thing that can be drawn again in its place."""
    table, below = _parts(status, console)
    return Group(table, *map(Text, below))


def _parts(status: FleetStatus, console: Console) -> tuple[Table, list[str]]:
    rows = [_cells(engine) for engine in status.engines]
    filled = {column for column in _COLUMNS if any(row[column] for row in rows)}
    columns = _that_fit(status, rows, filled, console)
    return _table(status, rows, columns), list(_below(status, [c for c in _COLUMNS if c in filled.difference(columns)]))


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


def show_check(found: FleetCheck, console: Console | None = None) -> None:
    """Print what a check of live engines found: a line for each worker, and what stands against it below."""
    console = console or terminal()
    table = Table(title=f"fleet at version {found.committed_version}: {'all is as it was sent' if found.ok else 'NOT as it should be'}")
    for column in ("engine", "worker", "version", "as sent", "unchanged", "first seen", "unreadable", "slots", "read", "seconds", ""):
        table.add_column(column, overflow="fold")
    below = []
    for engine in found.engines:
        version = "-" if engine.version is None else str(engine.version)
        if engine.error:
            table.add_row(str(engine.engine), "-", version, *[""] * 7, "not checked")
            below.append(f"engine {engine.engine}: {engine.error['code']}: {WeightSyncError.from_dict(engine.error)}")
        for w in engine.workers:
            counts = w.equal, w.unchanged, w.first_seen, w.unreadable, w.slots
            read = f"{w.nbytes / 1e9:.2f} GB", f"{w.seconds:.2f}"
            table.add_row(str(engine.engine), str(w.rank), version, *map(str, counts), *read, "ok" if w.ok else "NOT ok")
            about = f"engine {engine.engine}, worker {w.rank}"
            below += [f"{about}: {name} is not what it was" for name in w.differs] + [f"{about}: {fault}" for fault in w.faults]
            below += [f"{about}: {w.left_out} more"] if w.left_out else []
            below += [f"{about}: {w.error['code']}: {WeightSyncError.from_dict(w.error)}"] if w.error else []
    console.print(table)
    for line in below:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


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
