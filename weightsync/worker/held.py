"""Which update a worker holds, and the bytes of the last one that counts: to come back to, and for engines that come later.

A partial update builds on an update that live storage was proved to hold. Where bytes are
kept, its tensors take the place of the kept ones, so that what is kept is all of the
weights as they are: a way back restores the last state that counted, not one part of it.

What is kept for other engines is a file (`transport.retained`). Bytes that were staged on a GPU
are copied there by a thread, behind the update; the next update ends it where it still runs.

Not covered: a partial update in another layout than the kept one (experts stacked against one by
one; an adapter of other layers or another rank): nothing is kept then until the next complete update, and a failure ends in quarantine.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from weightsync.errors import BaseRefused
from weightsync.protocol import BeginOrder, Retained
from weightsync.transport.beside import now, on_stream
from weightsync.transport.packing import plan_buckets
from weightsync.transport.retained import Folder, folder_of
from weightsync.worker.staging import Staged

logger = logging.getLogger(__name__)

_STOP_SECONDS = 1.0


class Held:
    """See the module.

    Attributes:
        proved: the update that live storage was proved to hold; empty where that can't be said.
        counts: the update that the engine has said counts.
        kept: its bytes, those of earlier ones included where it was partial; None where they are not kept.
    """

    def __init__(self) -> None:
        self.proved = self.counts = ""
        self.kept: Staged | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def require_base(self, order: BeginOrder) -> None:
        """Refuse a partial update that builds on something else than what is held.

        Raises:
            BaseRefused: names both.
        """
        if order.request.partial and (not self.proved or self.proved != order.base_update):
            raise BaseRefused(
                f"the update builds on version {order.base_version} (update {order.base_update}), and this worker holds "
                + (f"update {self.proved}" if self.proved else "no proved update"),
                hint="Send a complete update, without a scope; an adapter with the weights that it lies on",
            )

    def settle(self, order: BeginOrder, rank: int, incoming: Staged | None) -> None:
        """An update counts.

        Args:
            rank: this worker's within its engine.
            incoming: its bytes with their digests, where they are to be kept.
        """
        self.stop()
        before, self.kept, self.counts = self.kept, None, order.brings
        if incoming is None:
            return
        folder = folder_of(order, rank)
        if incoming.load_map.part:
            if folder is not None:
                folder.unseal()
            self.kept = _merged(before, incoming)
            if self.kept is None:
                logger.warning("update %s can't be merged into what is kept: nothing is kept before the next complete update", order.brings)
        elif order.retain:
            moves = folder is not None and incoming.data.device.type != "cpu"
            self.kept = incoming.on_host(*folder.memory(order.brings, incoming.data.numel())) if folder and moves else incoming.on_host()
        else:
            self.kept = incoming if incoming.file else None
        if folder is not None:
            self._begin(folder, order, self.kept or (None if incoming.load_map.part else incoming))

    def stop(self) -> None:
        """End the copying of an update for other engines: its memory is wanted."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join(_STOP_SECONDS)
            self._thread = None

    def lose(self) -> None:
        """Live storage holds nothing any more."""
        self.proved, self.kept = "", None

    # --- for other engines -------------------------------------------------------------------------

    def _begin(self, folder: Folder, order: BeginOrder, staged: Staged | None) -> None:
        if staged is None:
            folder.clear()
            return
        self._stopped = threading.Event()
        work = (folder, order, staged, self._stopped)
        self._thread = threading.Thread(target=self._write, args=work, name="weightsync-retain", daemon=True)
        self._thread.start()

    def _write(self, folder: Folder, order: BeginOrder, staged: Staged, stopped: threading.Event) -> None:
        """Body of the thread: from the GPU to the file, if they are not there, and the head."""
        try:
            if not staged.file and staged.data.device.type != "cpu":
                memory, file = folder.memory(order.brings, staged.data.numel(), stopped.is_set)
                if memory is not None:
                    with on_stream(staged.data.device, now(staged.data.device)):
                        staged = staged.on_host(memory, file, stopped.is_set)
            if stopped.is_set() or not staged.file:  # no room, or no time
                folder.tidy()
                return
            plan = plan_buckets(staged.manifest, order.request.bucket_bytes)
            head = Retained(
                order.brings,
                order.request.version,
                order.rewinds,
                plan.bucket_bytes,
                plan.hash,
                plan.stream_bytes,
                staged.file,
                adapted=bool(staged.load_map.adapter),
            )
            folder.seal(head, staged.manifest, staged.digests)
            if self.counts == order.brings and not stopped.is_set():
                self.kept = staged
        except Exception:  # what other engines may come to need must not fail what this one holds
            logger.exception("update %s is not kept for engines that come later", order.brings)


def _merged(kept: Staged | None, part: Staged) -> Staged | None:
    """All of the weights behind a partial update, in the memory of those before it; None where the two don't fit together."""
    if kept is None or (part.load_map.adapter and part.load_map.adapter != kept.load_map.adapter):  # what it lacks would stay
        return None
    index = {kept.load_map.name(spec.name): number for number, spec in enumerate(kept.manifest.tensors)}
    pairs = []
    for number, spec in enumerate(part.manifest.tensors):
        name = part.load_map.name(spec.name)
        # A loader that holds tensors back and stores what it makes of them writes under the name of the last.
        if number in part.unused or name not in part.load_map.writes.keys() | part.load_map.touched:
            continue
        at = index.get(name)
        if (
            at is None
            or at in kept.unused
            or (kept.manifest.tensors[at].dtype, kept.manifest.tensors[at].shape) != (spec.dtype, spec.shape)
        ):
            return None
        pairs.append((at, number))
    for at, number in pairs:
        kept.tensor(at).copy_(part.tensor(number))
    return replace(kept, digests=kept.digests | {at: part.digests[number] for at, number in pairs if number in part.digests})
