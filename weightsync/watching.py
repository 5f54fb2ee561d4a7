"""A fleet's status, once or again and again, and what it means as an exit code.

On a terminal it is drawn again in its place. Elsewhere it is printed when it has
changed, so that a script that reads lines of `--json` gets one for each change. A service
that is lost is asked on: what was seen last stays, with what is wrong below it.

Not covered: what a status looks like (`shown`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from rich.console import Group
from rich.live import Live
from rich.text import Text

from weightsync.codec import encode
from weightsync.errors import AuthError, ConfigError, WeightSyncError
from weightsync.protocol import FleetStatus
from weightsync.shown import picture, show_status, terminal

#: Exit codes: every engine that no pin holds serves the committed version; the service could not be asked; not every one does.
ALL_SERVE, UNASKED, NOT_ALL_SERVE = 0, 1, 3


class Watching:
    """Looks at one service.

    Args:
        ask: gets the status; raises `WeightSyncError`.
        as_json: print data.
    """

    def __init__(self, ask: Callable[[], FleetStatus], *, as_json: bool = False) -> None:
        self._ask, self._json, self._console = ask, as_json, terminal()
        self._status: FleetStatus | None = None
        self._lost: WeightSyncError | None = None
        self._printed: object = None

    @property
    def code(self) -> int:
        """What was seen last, as an exit code."""
        status = self._status
        if self._lost is not None or status is None:
            return UNASKED
        following = sum(not engine.pinned for engine in status.engines)
        serve = status.committed_version is not None and 0 < following <= status.ready
        return ALL_SERVE if serve else NOT_ALL_SERVE

    def once(self) -> int:
        """Print it; the exit code. Raises what asking raises."""
        self._status = self._ask()
        self._print()
        return self.code

    def until_ended(self, seconds: float) -> int:
        """Look every so many seconds until the user ends it; the exit code of what was seen last.

        Raises:
            AuthError: the token is not the service's; asking again would not help.
        """
        try:
            if self._json or not self._console.is_terminal:
                while True:
                    self._look()
                    self._print()
                    time.sleep(seconds)
            with Live(console=self._console, auto_refresh=False) as live:
                while True:
                    self._look()
                    live.update(self._drawn(seconds), refresh=True)
                    time.sleep(seconds)
        except KeyboardInterrupt:
            return self.code

    def _look(self) -> None:
        try:
            self._status, self._lost = self._ask(), None
        except (AuthError, ConfigError):
            raise
        except WeightSyncError as exc:
            self._lost = exc

    def _print(self) -> None:
        """To what is no terminal, or once: what has changed since it was printed last."""
        seen = encode(self._status) if self._lost is None else {"error": self._lost.to_dict()}
        if seen == self._printed:
            return
        self._printed = seen
        if self._json:
            print(json.dumps(seen), flush=True)
        elif self._lost is not None:
            print(f"lost: {self._lost.code}: {self._lost}", flush=True)
        elif self._status is not None:
            show_status(self._status, self._console)

    def _drawn(self, seconds: float) -> Group:
        at = time.strftime("%H:%M:%S")
        shown = [picture(self._status, self._console)] if self._status is not None else []
        if self._lost is None:
            return Group(*shown, Text(f"seen at {at}, every {seconds:g} s until Ctrl-C", "dim"))
        above = "; what is above was seen before" if shown else ""
        return Group(*shown, Text(f"lost at {at}: {self._lost.code}: {self._lost}{above}", "bold red"))
