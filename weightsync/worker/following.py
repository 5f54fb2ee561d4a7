"""What follows loaded weights in a worker: values that the model had cached, the captured storage, graphs; and what stands against them.

A part of `Applier`, and of its state; for the order in which things happen see there.
Not in its `apply`: a run of the model, and a capture, wait for the other workers, which
may have failed to load.

Not covered: cached values that can't be taken back (`unrefreshable`, logged at the start).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weightsync.errors import UnsupportedEngine, VerdictNotOk
from weightsync.storage.adopt import Adoption
from weightsync.worker import guard, loading, vllm_compat

logger = logging.getLogger(__name__)


class Following:
    """Attributes are those of `Applier`."""

    model: torch.nn.Module
    vllm_config: Any
    _runner: Any
    _seal: Any
    _lazies: Any
    _guard: guard.Guard
    _alone: bool
    _repaired: Adoption
    _recaptured: bool
    _released: bool
    _untouched: bool
    _seconds: dict[str, float]
    _checks: dict[str, int]

    def _follow(self) -> None:
        """Cached values, storage and graphs follow the weights.

        Not in `apply`: a run of the model, and a capture, wait for the other workers, which may have failed to load.
        """
        self._count(self._refresh())
        self._guard.unproven = (*self._lazies.unrefreshable, *self._lazies.kept)
        if self._together(self._repair):
            self._recapture()

    def _prove(self) -> VerdictNotOk | None:
        """What stands against the update as it is now; None when it holds."""
        verdict = self._guard.verify(self._repaired)
        self._count({"addresses": len(self._seal), **verdict.counts})
        unfinished = None if self._untouched else loading.unfinished(self.model, self._seal)
        return unfinished or self._guard.broken(self._repaired, verdict)

    def _count(self, counts: dict[str, int]) -> None:
        self._checks |= {key: count for key, count in counts.items() if count}

    def _refresh(self) -> dict[str, int]:
        """Have the model fill in again what its first run had filled in. Costs a run only where there is something in a worker."""

        def take_back() -> bool:
            if found := bool(len(self._lazies)):
                self._lazies.reset()
            return found

        def run() -> bool:
            vllm_compat.run_once(self._runner)
            return False

        try:
            if self._together(take_back):
                self._together(run)  # also behind it: one that failed alone tells the others at once
        finally:
            counts = self._lazies.settle() if len(self._lazies) else {}
        return counts

    def _together(self, part: Callable[[], bool]) -> bool:
        return part() if self._alone else vllm_compat.together(part)

    def _repair(self) -> bool:
        """Bring what moved back; whether graphs must be captured anew."""
        if self._untouched:  # no object was made anew that could lie elsewhere, and no number is another; the verdict says if one is
            self._repaired = Adoption()
            return self._released or self._guard.outdated or bool(len(self._lazies) and self._changed())
        self._repaired = self._guard.repair()
        self._count(self._repaired.counts)
        return self._owes_capture()

    def _owes_capture(self) -> bool:
        """Whether a number or a layout has changed that captured graphs hold, or an earlier capture did not end well."""
        if not self._guard.sealed.counts.get("graphs"):
            if self._guard.relaid(self._repaired):  # nothing captured goes by the old layout: a table that a long prompt made grow
                self._guard.seal()
                self._repaired = replace(self._repaired, changed_layout={})
            return False
        # Graphs that were captured while an update was half done read what nobody had sealed.
        return bool(self._changed()) or self._released or self._guard.outdated

    def _changed(self) -> list[str]:
        return sorted({*self._guard.scalars_changed(), *self._lazies.changed, *self._guard.relaid(self._repaired)})

    def _recapture(self) -> None:
        """Capture graphs anew."""
        changed = self._changed()
        logger.log(
            logging.DEBUG if self._recaptured else logging.WARNING,
            "capturing CUDA graphs anew: %d number(s) or layout(s) that they hold have changed (%s)",
            *(len(changed), ", ".join(changed[:5])),
        )
        began = time.monotonic()
        release = vllm_compat.graph_holders(self._runner)
        self._released = True  # until all are there again: with its old numbers back, an engine would have no graphs
        vllm_compat.recapture(self._runner, self.vllm_config, release)
        if kept := self._guard.seal():
            raise UnsupportedEngine(
                f"{kept} captured graph(s) were not let go of and hold the old numbers or layouts",
                hint="Restart this engine on the new weights, or start it with enforce_eager",
                names=changed,
            )
        # What could not be brought back to the old captures' storage is where the new ones read it.
        self._repaired = replace(self._repaired, changed_layout={}, conflicts={}, failed={})
        self._lazies.note_captured()
        self._recaptured, self._released = True, False
        self._checks["recaptured"] = len(changed)
        self._seconds["recapture"] = time.monotonic() - began
