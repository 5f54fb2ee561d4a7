"""Signs of life in the store, where the transport gives none: NCCL waits for a peer that was killed as for one that is slow.

Between two GPUs of one host a broadcast goes by their memory, and no connection breaks when a
process dies. So each member of a communicator counts in the store, once a second and in a thread
of its own, and looks whether those that it waits for still do. One that is stopped (SIGSTOP), or
whose host is gone, is found the same way.

Not covered: who hangs in NCCL while its process lives. Where the store itself does not answer nobody is
judged: the controller is gone then, and the update with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import torch.distributed as dist

#: How often a member counts, seconds.
PERIOD = 1.0
#: Without a sign for so long a member is taken for dead, seconds. Long enough for a call that keeps Python to itself meanwhile.
SILENCE = 15.0


class Pulse:
    """One member's sign of life, and its look at others'.

    Args:
        store: of the communicator's generation.
        rank: whose sign this is.
        watched: the ranks that are looked at; each has counted once already, or does soon.
        period: seconds.
        silence: seconds without a sign.
    """

    def __init__(self, store: dist.Store, rank: int, watched: Iterable[int], period: float = PERIOD, silence: float = SILENCE) -> None:
        self._store, self._rank, self._period, self._silence = store, rank, period, silence
        began = time.monotonic()
        self._signs: dict[int, tuple[bytes, float]] = {other: (b"", began) for other in watched}
        self._looked = began
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightsync-pulse", daemon=True)
        self._thread.start()

    def silent(self) -> list[int]:
        """Watched ranks without a sign of life for too long. Waits for nothing."""
        looked = self._looked
        if time.monotonic() - looked > 3 * self._period:  # this thread itself was kept from looking
            return []
        return [rank for rank, (_, heard) in list(self._signs.items()) if looked - heard > self._silence]

    def stop(self) -> None:
        """Count no more. Does not wait for the thread."""
        self._stopped.set()

    def _run(self) -> None:
        count = 0
        try:
            while not self._stopped.is_set():
                count += 1
                self._store.set(f"alive/{self._rank}", str(count))
                self._look()
                self._stopped.wait(self._period)
        except RuntimeError:  # the store's process is gone
            return

    def _look(self) -> None:
        for rank, (sign, _) in list(self._signs.items()):
            key = f"alive/{rank}"
            now = self._store.get(key) if self._store.check([key]) else b""
            if now != sign:
                self._signs[rank] = now, time.monotonic()
        self._looked = time.monotonic()
