"""The storage contract of one worker: sealed after capture, repaired and checked after each update.

At the seal every tensor that the model reaches is named and held, the addresses
that captured graphs read are taken by the census, and both are joined. After an
update's reload whatever moved is brought back to the captured storage; then every
slot must lie where it lay, or the verdict says which does not.

On a CPU there are no graphs to read: every storage that the walk finds counts.

Not covered: values (digests and the load map answer for those), and derived values
that the layers' own post-processing does not compute anew.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightsync.errors import UnsupportedEngine, VerdictNotOk
from weightsync.storage import census
from weightsync.storage.adopt import Adopter, Adoption
from weightsync.storage.contract import Contract, Kind, Place, Verdict, compare, same_number
from weightsync.storage.lookup import Lookup
from weightsync.storage.owners import Walk, resolve_global, rewalk
from weightsync.storage.pins import Pins, Read, pin, place, places, slots_of
from weightsync.storage.sweep import sweep
from weightsync.worker import vllm_compat

logger = logging.getLogger(__name__)

_ROOT = "model"
_LOGGED = 20


@dataclass(frozen=True)
class Sealed:
    """What the seal found; numbers for the report."""

    counts: dict[str, int]
    seconds: dict[str, float]


class Guard:
    """Holds the contract of one model.

    Args:
        model: the live model, after graphs were captured.
        runner: what else graphs may read from (input buffers, caches); only named, never repaired.
        device: the worker's device.
        graphs: whether this engine captures CUDA graphs.

    Raises:
        UnsupportedEngine: graphs are captured and the census was not in place.
    """

    def __init__(self, model: torch.nn.Module, runner: object, device: torch.device, graphs: bool) -> None:
        self._model = {_ROOT: model}
        self._runner, self._device, self._graphs = runner, device, graphs
        self._adopter = Adopter(Pins({}))
        self.seal()

    def seal(self) -> None:
        """Take the census and fix what must hold from now on; again after graphs were captured anew.

        Raises:
            UnsupportedEngine: as at the start. What was sealed before still holds then.
        """
        began = time.monotonic()
        seen = _census(self._device, self._graphs)
        counted = time.monotonic()
        if seen is None:
            # Without graphs nothing outside the model counts: globals and buffers of a runner come and go.
            roots: dict[str, object] = dict(self._model)
            globals_: tuple[str, ...] = ()
            found, reads = _without_handles(rewalk(roots)), None
        else:
            roots = {**self._model, "runner": self._runner}
            swept = sweep(roots)
            globals_ = swept.globals
            reads = [Read(b.address + offset, b.nbytes, ", ".join(b.kernels[:3])) for b in seen.external for offset in b.offsets]
            found = _only_read(swept.everything, seen)
        owned = time.monotonic()
        pins = _with_earlier(pin(found), self._adopter.pins, seen)
        # Without graphs no kernel keeps a number.
        self.contract = Contract.seal(slots_of(pins, reads), found.scalars if seen is not None else {})
        self._roots, self._globals, self._adopter.pins = roots, globals_, pins
        self._lookup = Lookup(found, self.contract.places, self.contract.scalars)
        self._walked = self._lookup.differs(self._lookup.find(self._live()), found)
        counts = {f"slots_{kind}": self.contract.kinds.get(kind, 0) for kind in Kind}
        if seen is not None:
            counts |= {"graphs": seen.graphs, "graph_nodes_unread": sum(seen.unread.values())}
        self.sealed = Sealed(counts, {"census": counted - began, "owners": owned - counted, "seal": time.monotonic() - counted})
        for slot in self.contract.unowned[:_LOGGED]:
            logger.warning("a captured graph reads %s (%d bytes, %s), which nobody owns", slot.name, slot.nbytes, slot.kernel)

    def scalars_changed(self) -> list[str]:
        """Paths of sealed host numbers that have another value now, or none: a captured kernel keeps the old one."""
        now = self._now()[1]
        return [path for path, value in self.contract.scalars.items() if not same_number(value, now.get(path))]

    def repair(self) -> Adoption:
        """Bring back what a reload has moved. The engine must be paused."""
        return self._adopter.adopt(_without_handles(rewalk(self._model)))

    def verify(self, repaired: Adoption) -> Verdict:
        """Whether every slot lies where it was sealed."""
        now, numbers = self._now()
        return compare(
            self.contract,
            now,
            scalars=numbers,
            repaired=repaired.adopted,
            allow_anonymous=True,  # counted and logged at the seal; what they hold can't be told from here
        )

    def _now(self) -> tuple[dict[str, Place], dict[str, float]]:
        """Where each sealed path leads, and the sealed numbers, as they are now."""
        if self._walked:
            found = rewalk(self._roots, self._globals)
            return places(found, self.contract.places), found.scalars
        values = self._lookup.find(self._live())
        return self._lookup.places(values), self._lookup.numbers(values)

    def _live(self) -> dict[str, object]:
        """What a look-up starts from: the roots, and the globals that are still there."""
        return self._roots | {name: value for name in self._globals for value in resolve_global(name)}

    def broken(self, repaired: Adoption, verdict: Verdict) -> VerdictNotOk | None:
        """What a broken contract means, with the slots, the kernels that read them, and their bytes; None when it holds."""
        # Two owners that want different bytes in one storage may both lie in their place: only the repair saw it.
        unrepaired = {**repaired.changed_layout, **repaired.conflicts, **repaired.failed}
        lines = [*verdict.lines(), *(f"{path}: {why}" for path, why in unrepaired.items() if path in self.contract.places)]
        if not lines:
            return None
        return VerdictNotOk(
            f"the storage contract does not hold: {'; '.join(lines[:_LOGGED])}",
            hint="Sync again; if it comes back, restart this engine and report its model",
            names=[*(fault.path for fault in verdict.faults), *unrepaired],
        )


def _without_handles(found: Walk) -> Walk:
    """Leave out tensors that hold a number of somebody else's, not values.

    vLLM keeps the pointer of a oneDNN handler in a tensor, and its owner frees what
    the tensor says when it ends: such a number must not be moved between owners.
    """
    for path in [path for path in found.tensors if path.endswith(vllm_compat.FOREIGN_HANDLES)]:
        del found.tensors[path]
    return found


def _only_read(found: Walk, seen: census.Census) -> Walk:
    """Leave out what lies outside the model and no graph reads: it may come and go, and must not be held."""
    ours = (f"{_ROOT}.", f"{_ROOT}[")
    found.scalars = {path: value for path, value in found.scalars.items() if path.startswith(ours)}
    for path, tensor in list(found.tensors.items()):
        if path.startswith(ours):
            continue
        at = place(tensor)
        if at is None or not at[0] or seen.find(at[0]) is None:
            del found.tensors[path]
    return found


def _with_earlier(pins: Pins, earlier: Pins, seen: census.Census | None) -> Pins:
    """Keep what was held before and a graph still reads, though no path leads there now: its memory must not be handed out."""
    if seen is None:
        return pins
    now = {held.address for held in (*pins.by_path.values(), *pins.anonymous)}
    left = {held.address: held for held in (*earlier.by_path.values(), *earlier.anonymous) if held.address not in now}
    still = (replace(held, path=f"<once {held.path}>") for address, held in left.items() if address and seen.find(address))
    return replace(pins, anonymous=(*pins.anonymous, *still))


def _census(device: torch.device, graphs: bool) -> Any:
    if device.type != "cuda" or not graphs:
        return None
    if not census.active():
        raise UnsupportedEngine(
            "this engine captures CUDA graphs and their census is not in place",
            hint="Start it with worker_extension_cls=weightsync.worker.extension.WeightSyncExtension, or with enforce_eager",
        )
    seen = census.take()
    if unread := {reason: count for reason, count in seen.unread.items() if count}:
        logger.warning("%d graph node(s) could not be read: %s", sum(unread.values()), unread)
    return seen
