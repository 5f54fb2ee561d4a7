"""What other users of memory may do to it, and what kernels' scratch must bear.

`press` overwrites what was freed, `refill` what is scratch by a path or by the
contract, `blank` what captured graphs read and nobody owns. Only floats are ever
filled with ones (NaN), all else with zero: a lock with anything but zero in it can
hang a GPU.

Not covered: a lock kept in a float's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.check.contents import scratch_rule
from weightsync.storage.blocks import MemoryMap
from weightsync.storage.contract import Contract, Kind, Slot
from weightsync.storage.graph_nodes import load_driver
from weightsync.storage.owners import walk
from weightsync.storage.pins import Pins, fill_with_ones

_SMALL_BLOCK = 1 << 20  # torch serves requests up to this size from segments of their own
#: A step leaves the first to the next; the second is an address; the third counts up from zero, and nobody writes it again.
_KEPT = ("kv_cache", "handler_tensor", "token_expert_indices")


def press(device: str, model: torch.nn.Module) -> int:
    """Fill memory that the process has freed and not given back with ones; bytes filled."""
    if device == "cpu":
        # The C heap keeps no list that can be read: many blocks of the sizes that tensors of this model have.
        sizes = sorted({tensor.nbytes for tensor in model.state_dict().values() if 0 < tensor.nbytes <= 8 << 20})
        held = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes for _ in range(16)]
        return sum(tensor.nbytes for tensor in held)
    torch.cuda.synchronize()
    held = []
    for _ in range(4):  # what is left of a block after a smaller request was served from it is found the next time
        blocks = [
            (segment["stream"], block["size"], segment["segment_type"] == "small")
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)  # not the graphs' own pool
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
        for stream, size, small in sorted(blocks, reverse=True):
            with torch.cuda.stream(torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()):
                for part in [_SMALL_BLOCK] * (size // _SMALL_BLOCK) + [size % _SMALL_BLOCK] if small else [size]:
                    if part and (small or part > _SMALL_BLOCK):
                        held.append(torch.full((part,), 255, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return sum(tensor.nbytes for tensor in held)


def scratch_of(model: torch.nn.Module, contract: Contract, pins: Pins) -> dict[str, torch.Tensor]:
    """Tensors by path that hold nothing from one step to the next.

    Inside the model those that a rule excludes from the comparison; outside of it
    also what the contract calls scratch.
    """
    rules = {path: tensor for path, tensor in walk(model, "model").tensors.items() if scratch_rule(path)}
    outside = {
        path: pins.by_path[path].view()
        for slot in contract.slots
        for path in slot.paths
        if path in pins.by_path and not path.startswith("model.") and (slot.kind is Kind.SCRATCH or scratch_rule(path))
    }
    return {path: tensor for path, tensor in (rules | outside).items() if not any(part in path for part in _KEPT)}


def refill(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Fill floats with NaN, byte by byte, and all else with zero; path to what it was filled with."""
    done = {}
    with torch.no_grad():
        for path, held in tensors.items():
            tensor = held.detach()  # an inference tensor may not be written to, a detached one may
            if tensor.is_floating_point():
                fill_with_ones(tensor)
            else:
                tensor.zero_()
            done[path] = f"{'NaN' if tensor.is_floating_point() else 'zero'}, {tensor.nbytes} bytes"
    return done


def unowned(contract: Contract, scratch: bool) -> list[Slot]:
    """Slots without an owner: those that the contract calls scratch, or the others."""
    return [slot for slot in contract.slots if not slot.paths and (slot.kind is Kind.SCRATCH) == scratch]


def blank(slots: Sequence[Slot]) -> dict[str, str]:
    """Zero the allocator's blocks in which slots without an owner lie; slot to what was done."""
    if not slots:
        return {}
    torch.cuda.synchronize()
    driver, memory, done = load_driver(), MemoryMap.from_snapshot(torch.cuda.memory_snapshot()), {}
    for slot in slots:
        block = memory.find(slot.address)
        if block is None:
            done[slot.name] = "left alone, not the allocator's"
            continue
        (error,) = driver.cuMemsetD8(block.address, 0, block.nbytes)
        done[slot.name] = f"zero, {block.nbytes} bytes, {slot.kernel}" if int(error) == 0 else f"refused: {error}"
    torch.cuda.synchronize()
    return done
