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
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

#: Segments and semaphores as Python's multiprocessing names them.
_SEGMENT = re.compile(r"/dev/shm/((?:psm_|sem\.mp-)[A-Za-z0-9_-]+)(?: \(deleted\))?$")
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
        names = segments(path for process in (here, *here.children(recursive=True)) for path in _mapped(process))
        (self.folder / _NOTES).write_text(json.dumps(sorted(names | self._owed)))

    def close(self) -> None:
        """Remove the folder, and the segments noted in it that no process has mapped."""
        noted: set[str] = set()
        with contextlib.suppress(OSError, ValueError):
            noted = set(json.loads((self.folder / _NOTES).read_text()))
        if noted:
            used = segments(path for process in psutil.process_iter() for path in _mapped(process))
            self._owed = noted & used
            for name in noted - used:
                with contextlib.suppress(OSError):
                    (self._memory / name).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


def segments(paths: Iterable[str]) -> set[str]:
    """Names of multiprocessing's segments among mapped files."""
    return {match[1] for path in paths if (match := _SEGMENT.match(path))}


def _mapped(process: psutil.Process) -> list[str]:
    try:
        return [region.path for region in process.memory_maps(grouped=True)]
    except (psutil.Error, OSError):  # it has ended, or is somebody else's
        return []
