"""Child processes of the demo: started in groups of their own, logged, and surely ended.

`Child` is one process whose standard output arrives as lines on a shared queue and
whose log keeps everything. `Interrupts` turns SIGINT and SIGTERM into the exception
`Interrupted`, but never between a child's start and the moment it is on record.

When the demo itself is killed, each child gets its first stop signal from the kernel
(Linux alone); `main` here is the launcher that asks for that.

Not covered: a child that ignores its signals when nobody is left to kill it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """SIGINT or SIGTERM came; `signum` says which."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


class ChildFailed(RuntimeError):
    """A child ended, or said something wrong; the message has the tail of its log."""


class Interrupts:
    """While entered, the first SIGINT or SIGTERM raises `Interrupted` in the main thread, inside `held` at its end.

    Only the first: the ending of children must not be cut short by a second Ctrl-C.
    """

    def __init__(self) -> None:
        self._held = 0
        self._pending: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self._held:
            self._pending = signum
        else:
            self.ignore()
            raise Interrupted(signum)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put a signal off until the end of the block."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._pending is not None and not self._held:
            signum, self._pending = self._pending, None
            self.ignore()
            raise Interrupted(signum)

    def ignore(self) -> None:
        """No signal raises from now on."""
        self._held += 1


class Child:
    """A process in its own group.

    Args:
        name: short; the log is `<name>.log`.
        argv: the command.
        logs: folder of the logs.
        events: gets `(name, line)` for each line of standard output and `(name, None)` at its end.
        environment: added to this process's own.
        stop_signals: sent one after another by `stop`, each with the seconds it is given; the first also if this process dies.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        logs: Path,
        events: queue.SimpleQueue[tuple[str, str | None]],
        environment: Mapping[str, str] | None = None,
        stop_signals: Sequence[tuple[signal.Signals, float]] = ((signal.SIGTERM, 10.0),),
    ) -> None:
        self.name, self.log = name, logs / f"{name}.log"
        self._stop_signals = stop_signals
        self.log.write_bytes(b"")
        with self.log.open("ab") as log:  # appending, because `_read` writes to it as well
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weightsync.demo.processes", str(os.getpid()), str(int(stop_signals[0][0])), *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, args=(events,), name=f"read-{name}", daemon=True)
        self._reader.start()

    def _read(self, events: queue.SimpleQueue[tuple[str, str | None]]) -> None:
        assert self.process.stdout is not None
        with self.log.open("ab", buffering=0) as log:
            for raw in self.process.stdout:
                log.write(raw)
                events.put((self.name, raw.decode(errors="replace").rstrip("\n")))
        events.put((self.name, None))

    def stop(self) -> None:
        """End it, gently first; whatever is left of its group is killed. May be called again."""
        for signum, seconds in self._stop_signals:
            if self.process.poll() is not None:
                break
            self.process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(timeout=1)

    def failed(self, what: str) -> ChildFailed:
        """An error that shows the end of the log."""
        code = self.process.poll()
        ended = f" (exit code {code})" if code is not None else ""
        return ChildFailed(f"{self.name}: {what}{ended}; the end of {self.log}:\n{tail(self.log)}")


def tail(path: Path, lines: int = 25) -> str:
    """The last lines of a file, indented; a note when there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return "    (no log)"
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (empty)"


def wait_for(events: queue.SimpleQueue[tuple[str, str | None]], deadline: float) -> tuple[str, str | None] | None:
    """The next event, or None when the monotonic `deadline` passes. Signals get through in between."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=min(left, 0.5))
    return None


def main(argv: Sequence[str]) -> None:
    """Become the command `argv[2:]`, and get signal `argv[1]` when the parent, process `argv[0]`, dies."""
    parent, signum, command = int(argv[0]), int(argv[1]), list(argv[2:])
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signum)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
