"""The storage contract of one worker: sealed after capture, repaired and checked after each update.

At the seal every tensor that the model reaches is named and held, the addresses
that captured graphs read are taken by the census, and both are joined. After an
update's reload whatever moved is brought back to the captured storage; then every
slot must lie where it lay, or the verdict says which does not. The repair walks the
model once; the check goes by the sealed paths.

Memory that a graph reads and nobody owns makes every verdict fail if it was there
when the model's loading had ended: it may hold what was made from weights, and
nothing could bring new values to it. What the engine's runs took later is scratch.
If nobody noted when loading ended, only a strict guard refuses it.

On a CPU there are no graphs to read: every storage that the walk finds counts.

Not covered: values (digests and the load map answer for those; `applier` has derived
ones computed anew), and module globals that moved: they are a fault, and not repaired.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.errors import VerdictNotOk
from weightsync.protocol import ContractReport
from weightsync.storage import census
from weightsync.storage.adopt import MAX_NEW_NAMES, Adopter, Adoption
from weightsync.storage.contract import Contract, Kind, Place, Slot, Verdict, What, compare, same_number
from weightsync.storage.lookup import Lookup
from weightsync.storage.owners import resolve_global, rewalk
from weightsync.storage.pins import Pin, Pins, pin, places, slots_of
from weightsync.storage.sweep import sweep
from weightsync.worker import sealing, vllm_compat

logger = logging.getLogger(__name__)

_LOGGED = 20
#: What became of a path in a repair; kept for the report.
_DONE = ("adopted", "refreshed", "followed", "strays")
#: Stands for paths that were never sealed, once there have been too many to keep.
_OTHERS = "<other new paths>"


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
        strict: let a repair fail the verdict, and memory of unknown age that nobody owns.
        unproven: paths or layers whose refresh nobody could prove; only reported.

    Raises:
        UnsupportedEngine: graphs are captured and the census was not in place.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        runner: object,
        device: torch.device,
        graphs: bool,
        *,
        strict: bool = False,
        unproven: Sequence[str] = (),
    ) -> None:
        self._model = {sealing.MODEL: model}
        self._runner, self._device, self._graphs = runner, device, graphs
        self.strict, self.unproven = strict, tuple(unproven)
        self._adopter = Adopter(Pins({}))
        self._repaired: dict[str, Counter[str]] = {}
        self._verdict: Verdict | None = None
        self._times: dict[str, float] = {}
        self._captures: frozenset[int] = frozenset()
        self._seals = self._checks = self._new_names = 0
        self.seal()

    def seal(self) -> int:
        """Take the census and fix what must hold from now on; again after graphs were captured anew.

        Returns:
            How many captures of the seal before are still alive.

        Raises:
            UnsupportedEngine: as at the start. What was sealed before still holds then.
        """
        began = time.monotonic()
        if self._seals:
            gc.collect()  # a graph that was let go of counts as alive until it is collected
        captures, seen = census.captures(), sealing.take_census(self._device, self._graphs)
        counted = time.monotonic()
        roots: dict[str, object] = dict(self._model)
        if seen is None:
            # Without graphs nothing outside the model counts: globals and buffers of a runner come and go.
            found, globals_ = sealing.without_handles(rewalk(roots)), tuple[str, ...]()
            pins, kinds, reads = pin(found), dict[str, Kind](), None
        else:
            roots[sealing.RUNNER] = self._runner
            swept = sweep(roots, lambda tensor: sealing.is_read(tensor, seen))
            found, globals_ = sealing.only_read(swept.everything, seen), swept.globals
            pins, kinds = sealing.pins_of(found, swept, seen, self._adopter.pins)
            reads = sealing.reads(seen, pins)
        owned = time.monotonic()
        # Without graphs no kernel keeps a number.
        contract = Contract.seal(sealing.watch(slots_of(pins, reads, kinds)), found.scalars if seen is not None else {})
        lookup = Lookup(found, contract.places, contract.scalars)
        self.contract, self._lookup, self._adopter.pins = contract, lookup, pins
        self._roots, self._globals, self._seen, self._truncated = roots, globals_, seen, tuple(found.truncated)
        self._walked = lookup.differs(lookup.find(self._live()), found)
        self._seals += 1
        kept, self._captures = len(captures & self._captures), captures
        self.sealed = Sealed(self._counts(), {"census": counted - began, "owners": owned - counted, "seal": time.monotonic() - counted})
        self._tell()
        return kept

    def _counts(self) -> dict[str, int]:
        counts = {f"slots_{kind}": self.contract.kinds.get(kind, 0) for kind in Kind}
        if self._seen is not None:
            counts |= {"graphs": self._seen.graphs, "graph_nodes_unread": sum(self._seen.unread.values())}
            counts["slots_possibly_derived"] = len(self._stand())
        return counts

    def _stand(self) -> list[Slot]:
        """Slots without an owner that make every verdict fail."""
        return [slot for slot in self.contract.unowned if self.strict or slot.kind is not Kind.ANONYMOUS]

    def _tell(self) -> None:
        refused = {id(slot) for slot in self._stand()}
        for slot in self.contract.unowned[:_LOGGED]:
            # What comes of it: an engine that can't be updated, or memory whose age nobody knows.
            level, comes = (logging.ERROR, "; no update will pass") if id(slot) in refused else (logging.WARNING, "")
            text = "a captured graph reads %s (%d bytes, %s), which nobody owns%s%s"
            logger.log(level, text, slot.name, slot.nbytes, slot.kernel, f", from {slot.where}" if slot.where else "", comes)
        if self._truncated:
            logger.warning("owners may be missing: the search stopped at %d place(s), first %s", len(self._truncated), self._truncated[0])

    @property
    def pins(self) -> Mapping[str, Pin]:
        """What was sealed, by path."""
        return self._adopter.pins.by_path

    @property
    def outdated(self) -> bool:
        """Whether graphs were captured since the seal: what they read was not sealed."""
        return self._seen is not None and not census.captures() <= self._captures

    def scalars_changed(self) -> list[str]:
        """Paths of sealed host numbers that have another value now, or none: a captured kernel keeps the old one."""
        now = self._now()[1]
        return [path for path, value in self.contract.scalars.items() if not same_number(value, now.get(path))]

    def relaid(self, repaired: Adoption) -> list[str]:
        """Sealed paths that a repair found with another layout: a captured kernel goes by the old one."""
        return [path for path in repaired.changed_layout if path in self.contract.places]

    def repair(self) -> Adoption:
        """Bring back what a reload has moved. The engine must be paused."""
        began = time.monotonic()
        done = self._adopter.adopt(sealing.without_handles(rewalk(self._model)))
        for what in _DONE:
            self.note(what, getattr(done, what))
        self._times["repair"] = time.monotonic() - began
        return done

    def note(self, what: str, paths: Iterable[str]) -> None:
        """Count what was done to some paths, here or by somebody else, for the report."""
        for path in paths:
            if path not in self._repaired and path not in self._adopter.pins.by_path:
                path = path if self._new_names < MAX_NEW_NAMES else _OTHERS
                self._new_names += path is not _OTHERS
            self._repaired.setdefault(path, Counter())[what] += 1

    def verify(self, repaired: Adoption) -> Verdict:
        """Whether every slot lies where it was sealed."""
        began = time.monotonic()
        now, numbers = self._now()
        verdict = compare(
            self.contract, now, scalars=numbers, repaired=repaired.adopted, strict=self.strict, allow_anonymous=not self.strict
        )
        self._checks, self._verdict = self._checks + 1, verdict
        self._times["check"] = time.monotonic() - began
        return verdict

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

    def report(self, limit: int = 200) -> ContractReport:
        """The contract as plain data.

        Args:
            limit: entries of each list, at most; the rest is counted.
        """
        seen, verdict = self._seen, self._verdict
        named, anonymous, left_out = sealing.slot_lists(self.contract, limit)
        counted = {kind: [slot for slot in self.contract.slots if slot.kind is kind] for kind in Kind}
        # What was repaired most often first: a path that every update moves costs something every time.
        repaired = sorted(self._repaired.items(), key=lambda item: (-item[1].total(), item[0]))
        return ContractReport(
            vllm_version=vllm_compat.vllm_version(),
            device=str(self._device),
            strict=self.strict,
            graphs=seen.graphs if seen else 0,
            nodes=dict(seen.nodes_by_type) if seen else {},
            nodes_unread=dict(seen.unread) if seen else {},
            outside=dict(Counter(block.memory for block in seen.blocks if block.kind == "unknown")) if seen else {},
            graph_host_bytes=seen.kept_host_bytes if seen else None,
            slots={str(kind): len(slots) for kind, slots in counted.items()},
            nbytes={str(kind): sum({slot.address: slot.nbytes for slot in slots}.values()) for kind, slots in counted.items()},
            named=named,
            anonymous=anonymous,
            left_out=left_out,
            possibly_derived=len(self._stand()),
            repaired={path: dict(counts) for path, counts in repaired[:limit]},
            repaired_left_out=max(len(repaired) - limit, 0),
            lost=sealing.bounded([fault.path for fault in verdict.of(What.LOST)] if verdict else [], limit),
            faults=tuple(verdict.lines()) if verdict else (),
            unproven=sealing.bounded(self.unproven, limit),
            truncated=sealing.bounded(self._truncated, limit),
            seals=self._seals,
            checks=self._checks,
            seconds={**self.sealed.seconds, **self._times},
        )
