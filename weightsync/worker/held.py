"""Which update a worker holds, and the bytes of the last one that counts, to come back to.

A partial update builds on an update that live storage was proved to hold. Where bytes are
kept, its tensors take the place of the kept ones, so that what is kept is all of the
weights as they are: a way back restores the last state that counted, not one part of it.

Not covered: a partial update in another layout than the kept one (experts stacked against one by
one): nothing is kept then until the next complete update, and a failure ends in quarantine.
"""

from __future__ import annotations

import logging

from weightsync.errors import BaseRefused
from weightsync.protocol import BeginOrder
from weightsync.worker.staging import Staged

logger = logging.getLogger(__name__)


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

    def require_base(self, order: BeginOrder) -> None:
        """Refuse a partial update that builds on something else than what is held.

        Raises:
            BaseRefused: names both.
        """
        if order.request.scope and (not self.proved or self.proved != order.base_update):
            raise BaseRefused(
                f"the update builds on version {order.base_version} (update {order.base_update}), and this worker holds "
                + (f"update {self.proved}" if self.proved else "no proved update"),
                hint="Send a complete update, without a scope",
            )

    def settle(self, update_id: str, incoming: Staged | None) -> None:
        """An update counts.

        Args:
            incoming: its bytes, where they are to be kept.
        """
        kept, self.kept, self.counts = self.kept, None, update_id
        if incoming is not None:
            self.kept = _merged(kept, incoming) if incoming.load_map.part else incoming.on_host()
            if self.kept is None:
                logger.warning("update %s can't be merged into what is kept: no way back before the next complete update", update_id)

    def lose(self) -> None:
        """Live storage holds nothing any more."""
        self.proved, self.kept = "", None


def _merged(kept: Staged | None, part: Staged) -> Staged | None:
    """All of the weights behind a partial update, in the memory of those before it; None where the two don't fit together."""
    if kept is None:
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
    return kept
