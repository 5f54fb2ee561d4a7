"""What a worker tells of itself when it is asked, beside how an update stands: what it is, its contract, a check of live storage.

A part of `Applier`, and of its state. Not covered: updates (`Applier.report`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weightsync.protocol import ContractReport, TensorSpec, WorkerCheck, WorkerReport
from weightsync.storage import plan
from weightsync.transport import digest
from weightsync.transport.local import place_of
from weightsync.worker import vllm_compat
from weightsync.worker.adapter import Adapters
from weightsync.worker.guard import Guard
from weightsync.worker.held import Held
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.rereading import Rereading
from weightsync.worker.sleep import Sleep
from weightsync.worker.stored import Stored, checkpoint_tensors


class Telling:
    """Attributes are those of `Applier`."""

    model: torch.nn.Module
    device: torch.device
    rank: int
    vllm_config: Any
    _adapters: Adapters
    _base: LoadMap
    _folder: Path
    _guard: Guard
    _held: Held
    _lazies: Any
    _rereading: Rereading
    _runner: Any
    _seal: Any
    _sleep: Sleep
    _stored: Stored | None
    _wrote: bool

    def _unused(self, load_map: LoadMap, specs: Sequence[TensorSpec]) -> frozenset[int]:
        raise NotImplementedError

    def describe(self, verify_stored: bool = False, carried: bool = False) -> WorkerReport:
        """What was sealed at the start, and how many bytes of a complete update this worker needs.

        Args:
            verify_stored: find out which parameters hold the checkpoint's bytes, to compare them after updates.
            carried: all requests of the engine will go with the adapter that updates bring, where it takes one.
        """
        takes = self._adapters.open(vllm_compat.adapter_slot(self._runner, self.vllm_config)) if carried else {}
        if verify_stored and self._stored is None:
            self._stored = Stored(self.model, self._base, checkpoint_tensors(self._folder))
        digest.prepare(self.device, (spec.dtype for spec in self._base.specs.values()))
        plan.prepare(self.device)
        sealed = self._guard.sealed
        unused = self._unused(self._base, tuple(self._base.specs.values()))
        nbytes = sum(spec.nbytes for index, spec in enumerate(self._base.specs.values()) if index not in unused)
        counts = {"addresses": len(self._seal), "checkpoint_bytes": nbytes, **sealed.counts, **self._lazies.counts, **takes}
        return WorkerReport(self.rank, "", "none", seconds=sealed.seconds, checks=counts, place=place_of(self.device))

    def contract(self) -> ContractReport:
        """What was sealed, and what became of it since."""
        return self._guard.report()

    def check(self, anew: bool) -> WorkerCheck:
        """Read some of the live storage again, and compare it with the update that it was proved to hold; raises as `Rereading.step`."""
        self._sleep.require_awake()
        found = self._rereading.step(self._held.counts if not self._wrote and self._held.proved == self._held.counts else "", anew)
        error, _ = self._adapters.wrong() if found.done else (None, {})
        return found if error is None else replace(found, differs=(*found.differs, *(f"the adapter of {name}" for name in error.names)))
