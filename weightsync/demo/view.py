"""What the demo shows: a live table, or plain lines, and a picture.

Rich and matplotlib are imported when needed. Not covered: Windows consoles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from weightsync.protocol import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE_COLUMN = "sync phases, ms"
_COLUMNS = ("step", "reward", "version", "MB", "rollout s", "train s", "sync s", _WIDE_COLUMN, "pause ms", "logprob gap")
#: Consoles of fewer characters do without the wide column.
_WIDE = 132
_ROWS = 25
#: The phases of a sync that are shown; the pause has a column of its own. They overlap, so they don't add up to the whole.
PHASES = (Phase.ADMIT, Phase.RECEIVE, Phase.APPLY, Phase.VERIFY)


class View:
    """Shows the trainer's lines as they come.

    Args:
        console: where to; standard error when standard output is for a program.
        plain: one line per step instead of a table that is redrawn.
    """

    def __init__(self, console: Console, *, plain: bool) -> None:
        self.console = console
        self.plain = plain or not console.is_terminal
        self.lines: list[Mapping[str, Any]] = []
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """One line of plain text."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def table(self) -> Iterator[None]:
        """While entered, `add` redraws the table."""
        if self.plain:
            yield
            return
        with Live(self._table(), console=self.console, refresh_per_second=4) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def add(self, line: Mapping[str, Any]) -> None:
        """One of the trainer's lines."""
        self.lines.append(line)
        if self._live is not None:
            self._live.update(self._table())
        elif self.plain:
            self.say("  ".join(f"{name} {cell}" for name, cell in zip(_COLUMNS, cells(line), strict=True) if cell))

    def _table(self) -> Table:
        shown = [index for index, name in enumerate(_COLUMNS) if name != _WIDE_COLUMN or self.console.width >= _WIDE]
        table = Table(*(_COLUMNS[index] for index in shown), title="GRPO on a fleet of vLLM engines")
        for line in self.lines[-_ROWS:]:
            row = cells(line)
            table.add_row(*(row[index] for index in shown))
        return table


def cells(line: Mapping[str, Any]) -> list[str]:
    """One row of the table, in the order of its columns."""
    seconds = line["seconds"]
    phases = " ".join(f"{name} {1000 * line['sync_seconds'][name]:.0f}" for name in PHASES if name in line["sync_seconds"])
    return [
        str(line["step"]),
        "" if line["reward"] is None else f"{line['reward']:.3f}",
        str(line["version"]),
        f"{line['bytes'] / 1e6:.2f}",
        f"{seconds['rollout']:.2f}" if "rollout" in seconds else "",
        f"{seconds['train']:.2f}" if "train" in seconds else "",
        f"{seconds['sync']:.3f}",
        phases,
        f"{1000 * line['pause_seconds']:.1f}",
        "" if line["logprob_gap"] is None else f"{line['logprob_gap']:.4f}",
    ]


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture: reward, sync time by phase, and log-probability gap, over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    steps = [line for line in lines if line["reward"] is not None]
    numbers = [line["step"] for line in steps]
    left.plot(numbers, [line["reward"] for line in steps], marker="o")
    left.set(title="Reward", xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    _draw_phases(middle, lines)
    right.plot(numbers, [line["logprob_gap"] for line in steps], marker="o", color="tab:red")
    right.set(title="Trainer against engine", xlabel="step", ylabel="largest log-probability gap, nats", ylim=(0, None))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_phases(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    """The whole call, its phases, and the pause of the engines, in ms on a logarithmic scale."""
    numbers = [line["step"] for line in lines]
    axes.plot(numbers, [1000 * line["seconds"]["sync"] for line in lines], color="black", linewidth=2, label="whole call")
    for phase in PHASES:
        axes.plot(numbers, [1000 * line["sync_seconds"].get(phase, float("nan")) for line in lines], linewidth=1, label=str(phase))
    axes.plot(numbers, [1000 * line["pause_seconds"] for line in lines], linestyle="--", label="engines paused")
    axes.set(title="sync_weights()", xlabel="step (0: first sync)", ylabel="ms", yscale="log")
    axes.legend(fontsize="small")
