"""What one engine leaves on its machine when its processes are killed, and its removal.

vLLM's processes talk through sockets under a folder of their own here, and through
segments of shared memory whose names are random. A process that is killed removes
neither. So an engine notes the names when it has started; the next start of the
same actor, or its end, removes those that no process has mapped any more.

Not covered: segments that vLLM makes later than its start, and an actor that is
killed and never started again: its folder stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

#: Segments and semaphores as Python's multiprocessing names them.
_SEGMENT = re.compile(r"(psm_|sem\.mp-)[A-Za-z0-9_-]+")
_NOTES = "segments.json"


class Scratch:
    """The folder of one engine.

    Args:
        name: the same over restarts of the engine, and no other's on this machine.
        memory: where segments of shared memory appear as files.
    """

    def __init__(self, name: str, memory: Path = Path("/dev/shm")) -> None:
        own = f"weightsync-{os.getuid()}-{name[:16]}"
        # The path of a socket can have 107 bytes, of which vLLM's names take 37.
        fits = len(tempfile.gettempdir()) + 1 + len(own) + 37 <= 107
        self.folder = Path(tempfile.gettempdir() if fits else "/tmp") / own
        self._memory = memory
        self._owed: set[str] = set()  # noted by an earlier process, some of whose children still live

    def open(self) -> dict[str, str]:
        """Remove what an earlier process left, and make the folder; returns the variables that lead vLLM here."""
        self.close()
        self.folder.mkdir(mode=0o700)
        return {"VLLM_RPC_BASE_PATH": str(self.folder)}

    def note(self) -> None:
        """Write down the segments that this process and its children have mapped."""
        here = psutil.Process()
        names = self._mapped(process.pid for process in (here, *here.children(recursive=True)))
        (self.folder / _NOTES).write_text(json.dumps(sorted(names | self._owed)))

    def close(self) -> None:
        """Remove the folder, and the segments noted in it that no process has mapped."""
        noted: set[str] = set()
        with contextlib.suppress(OSError, ValueError):
            at = self.folder.lstat()
            if stat.S_ISDIR(at.st_mode) and at.st_uid == os.getuid():  # what anybody may have put there names nothing of ours
                noted = set(filter(_SEGMENT.fullmatch, json.loads((self.folder / _NOTES).read_text())))
        if noted:
            self._owed = noted & self._mapped(psutil.pids())
            for name in noted - self._owed:
                with contextlib.suppress(OSError):
                    (self._memory / name).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _mapped(self, pids: Iterable[int]) -> set[str]:
        """Names of the segments that any of these processes has mapped."""
        # By inode: what is mapped of a semaphore bears the name that it had while it was made.
        inodes = {inode for pid in pids for inode in _inodes(pid)}
        found = set()
        for path in self._memory.iterdir():
            with contextlib.suppress(OSError):
                if _SEGMENT.fullmatch(path.name) and path.stat().st_ino in inodes:
                    found.add(path.name)
        return found


def shelf_prefix(home: Path) -> str:
    """What the names of the folders begin with in which one fleet's engines keep updates (`handing`), on every machine.

    Args:
        home: `Settings.home`.
    """
    return f"weightsync-{os.getuid()}-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:10]}-"


def clear_shelves(memory: Path, home: Path) -> None:
    """Let go of what engines of a fleet kept on this machine, when none of them lives any more."""
    for folder in memory.glob(f"{shelf_prefix(home)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _inodes(pid: int) -> set[int]:
    """Of the files in shared memory that a process has mapped; none where it has ended, or is somebody else's."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
