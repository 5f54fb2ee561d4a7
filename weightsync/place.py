"""Where a process and its weights are: who can hand memory to whom. Plain data; standard library only.

Not covered: whether two places really reach each other. Joining a link finds out, and says what to set.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where weights lie.

    Attributes:
        host: the same for processes that reach each other by an abstract unix socket: one kernel and one
            network namespace. Empty where that can't be said.
        device: `cpu`, or the GPU's UUID.
        nccl_host: what NCCL takes for this host's name, when somebody set it (`NCCL_HOSTID`).
    """

    host: str
    device: str
    nccl_host: str = ""

    def reaches(self, other: Place) -> bool:
        """Whether a process there can be handed memory."""
        return bool(self.host) and self.host == other.host

    def same_to_nccl(self, other: Place) -> bool:
        """Whether NCCL would take both for one device of one host, and refuse."""
        return self.device != "cpu" and self.device == other.device and self.nccl_host == other.nccl_host


def here(device: str) -> Place:
    """This process's place.

    Args:
        device: `cpu`, or the UUID of the GPU where its weights lie.
    """
    host = ""
    with contextlib.suppress(OSError):  # no /proc, or not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        host = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    return Place(host, device, os.environ.get("NCCL_HOSTID", ""))


@dataclass(frozen=True)
class Retained:
    """An update that an engine keeps in a file, for engines that come later (`transport.retained`).

    Attributes:
        update_id, version, rewinds: of the update, as the ledger knows it.
        bucket_bytes, plan_hash: of the bucket plan whose stream the bytes are.
        nbytes: length of the stream.
        data: name of the file that has it; another update's where a partial one was written into it.
        adapted: an adapter is a part of it.
    """

    update_id: str
    version: int
    rewinds: int
    bucket_bytes: int
    plan_hash: str
    nbytes: int
    data: str
    adapted: bool = False
