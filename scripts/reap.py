"""Run a command, then end every process that descends from it and still lives.

Ray's and vLLM's processes start sessions of their own, so a process group or a
session does not find what a failed test left. As a child subreaper this process
becomes the parent of each orphan below it (Linux).

Usage: python scripts/reap.py COMMAND [ARGUMENT...]; exits as the command does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 10.0  # Ray takes a few seconds to come down after its driver has ended


def children() -> list[int]:
    """Processes whose parent is this one and that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name, in parentheses, may hold spaces: split behind it.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # ended while we looked
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(folder.name))
    return found


def reap_ended() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def name_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = ""
    return words[:120]


def end_descendants() -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := children()) and time.monotonic() < deadline:
        time.sleep(0.1)
        reap_ended()
    # Each one killed may hand its own children over to us.
    while left := children():
        for pid in left:
            print(f"reap: ended process {pid}: {name_of(pid)}", file=sys.stderr)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.1)
        reap_ended()


def main(command: list[str]) -> int:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    child = subprocess.Popen(command)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: child.send_signal(got))
    code = child.wait()
    end_descendants()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
