"""What a seal is made of: the census of captured graphs, joined with what the sweep names, and nothing that may come and go.

Not covered: telling a draft model's derived tensors from the engine's own by anything but their path.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from weightsync.errors import UnsupportedEngine
from weightsync.protocol import SlotReport
from weightsync.storage import census
from weightsync.storage.blocks import Age
from weightsync.storage.contract import Contract, Kind, Slot
from weightsync.storage.owners import Walk
from weightsync.storage.pins import Pin, Pins, Read, pin, pin_one, place
from weightsync.storage.sweep import Sweep
from weightsync.worker import vllm_compat

logger = logging.getLogger(__name__)

MODEL, RUNNER = "model", "runner"
#: What memory without an owner holds, by when it was handed out.
_KINDS = {Age.LOADED: Kind.DERIVED, Age.LATER: Kind.SCRATCH, Age.UNKNOWN: Kind.ANONYMOUS}


def without_handles(found: Walk) -> Walk:
    """Leave out tensors that hold a number of somebody else's, not values.

    vLLM keeps the pointer of a oneDNN handler in a tensor, and its owner frees what
    the tensor says when it ends: such a number must not be moved between owners.
    """
    for path in [path for path in found.tensors if path.endswith(vllm_compat.FOREIGN_HANDLES)]:
        del found.tensors[path]
    return found


def only_read(found: Walk, seen: census.Census) -> Walk:
    """Leave out what lies outside the model and no graph reads: it may come and go, and must not be held."""
    ours = (f"{MODEL}.", f"{MODEL}[")
    found.scalars = {path: value for path, value in found.scalars.items() if path.startswith(ours)}
    for path, tensor in list(found.tensors.items()):
        if not path.startswith(ours) and not is_read(tensor, seen):
            del found.tensors[path]
    return found


def is_read(tensor: torch.Tensor, seen: census.Census) -> bool:
    """Whether a graph reads the storage of a tensor."""
    at = place(tensor)
    return at is not None and at[0] != 0 and seen.find(at[0]) is not None


def reads(seen: census.Census, pins: Pins) -> list[Read]:
    """What the graphs read outside of their own pools: all of the allocator's, and of other memory what has an owner.

    Other memory is the driver's and everybody's: weights offloaded to pinned host memory, but buffers of NCCL as well.
    """
    ends = {held.address: held.address + held.nbytes for held in pins.by_path.values() if held.address}
    starts = sorted(ends)

    def owned(address: int) -> bool:
        at = bisect.bisect_right(starts, address) - 1
        return at >= 0 and address < ends[starts[at]]

    return [
        Read(block.address + offset, block.nbytes, ", ".join(block.kernels[:3]), block.address, _KINDS[block.age], _origin(block))
        for block in seen.blocks
        for offset in block.offsets
        if block.kind == "external" or (block.kind == "unknown" and owned(block.address + offset))
    ]


def _origin(block: census.Block) -> str:
    return block.where if block.active else f"memory that was freed {block.where}".rstrip()


def pins_of(found: Walk, swept: Sweep, seen: census.Census, earlier: Pins) -> tuple[Pins, dict[str, Kind]]:
    """Hold what was found, what has no path, and what was held before and a graph still reads; and what is known of them."""
    owned = pin(found)
    kinds = _engines_own(owned)
    loose = _loose(swept, seen)
    now = {held.address for held in (*owned.by_path.values(), *loose)}
    for held in (*earlier.by_path.values(), *earlier.anonymous):
        if held.address and held.address not in now and seen.find(held.address):
            now.add(held.address)
            path = held.path if held.path.startswith("<") else f"<once {held.path}>"
            loose.append(replace(held, path=path))
            if path.startswith("<once"):  # it had an owner, so it is no scratch, whenever its memory was handed out
                kinds[path] = Kind.DERIVED
    return replace(owned, anonymous=tuple(loose)), kinds


def _loose(swept: Sweep, seen: census.Census) -> list[Pin]:
    """Tensors without a path that graphs read, with the classes of what holds them for a name."""
    pairs = zip(swept.anonymous, swept.held_by, strict=True)
    found = [(f"<held by {', '.join(by[:3]) or 'unknown'}>", tensor) for tensor, by in pairs if is_read(tensor, seen)]
    return [held for name, tensor in found if (held := pin_one(name, tensor)) is not None]


def _engines_own(pins: Pins) -> dict[str, Kind]:
    """Paths to memory that the runner has and that is no parameter: inputs, the KV cache. A model below the runner is none."""
    of_runner = {held.address for path, held in pins.by_path.items() if path.startswith(RUNNER) and f".{MODEL}." not in path}
    weights = {held.address for held in pins.by_path.values() if held.parameter}
    return {path: Kind.ENGINE for path, held in pins.by_path.items() if held.address in of_runner - weights}


def watch(slots: Sequence[Slot]) -> list[Slot]:
    """The slots, with those left unwatched that the engine's runs have and the model does not reach."""
    engines = (slot.kind is Kind.ENGINE and not any(path.startswith(f"{MODEL}.") for path in slot.paths) for slot in slots)
    return [replace(slot, watched=not own) for slot, own in zip(slots, engines, strict=True)]


def take_census(device: torch.device, graphs: bool) -> census.Census | None:
    """The census; None for an engine without graphs.

    Raises:
        UnsupportedEngine: graphs are captured, and were not seen; or none was.
    """
    if device.type != "cuda" or not graphs:
        return None
    if not census.active():
        raise UnsupportedEngine(
            "this engine captures CUDA graphs and their census is not in place",
            hint="Start it with worker_extension_cls=weightsync.worker.extension.WeightSyncExtension, or with enforce_eager",
        )
    seen = census.take()
    if not seen.graphs:
        raise UnsupportedEngine(
            "this engine captures CUDA graphs and the census has counted none: nothing would be proved",
            hint="Let nothing take the place of torch.cuda.CUDAGraph behind the worker extension, or start with enforce_eager",
        )
    if unread := {reason: count for reason, count in seen.unread.items() if count}:
        logger.warning("%d graph node(s) could not be read: %s", sum(unread.values()), unread)
    return seen


def slot_lists(contract: Contract, limit: int) -> tuple[tuple[SlotReport, ...], tuple[SlotReport, ...], int]:
    """Slots with an owner and without, the telling ones first, and how many both lists leave out."""
    # Thousands of plain weights say least.
    named = sorted((slot for slot in contract.slots if slot.paths), key=lambda slot: (slot.kind is Kind.WEIGHT, slot.name))
    order = [Kind.DERIVED, Kind.ANONYMOUS]
    loose = sorted(
        (slot for slot in contract.slots if not slot.paths), key=lambda s: (s.kind not in order[:1], s.kind not in order, -s.nbytes)
    )
    shown, hidden = _reports(named[:limit]), _reports(loose[:limit])
    return shown, hidden, len(contract.slots) - len(shown) - len(hidden)


def _reports(slots: Sequence[Slot]) -> tuple[SlotReport, ...]:
    return tuple(SlotReport(s.name, str(s.kind), s.nbytes, s.address, len(s.paths), s.kernel, s.where) for s in slots)


def bounded(texts: Iterable[str], limit: int) -> tuple[str, ...]:
    """The first entries, and one that says how many more there are."""
    texts = list(texts)
    return tuple(texts) if len(texts) <= limit else (*texts[:limit], f"and {len(texts) - limit} more")
