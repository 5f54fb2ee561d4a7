"""The census: which memory the captured CUDA graphs of this process read and write.

A captured graph has device addresses baked in. A tensor that moves leaves it
reading the old place, and nothing in torch or vLLM says which tensors that
concerns. The graphs themselves do: `install` puts a subclass in the place of
`torch.cuda.CUDAGraph` that keeps every capture readable, and `take` reads the
nodes of all graphs alive (`graph_nodes`) and joins the words found with the
allocator's blocks.

    install()              before anything is captured: when a worker's extension is imported
    note_loaded()          when the model is loaded: what is handed out later is no weight
    … vLLM captures …
    seen = take()          once, at the seal; a few tens of milliseconds
    seen.external          blocks outside the graphs' own pools: weights, KV cache, inputs, constants
    seen.unread            must be empty for the census to be complete

A block is `private_pool` if it lies in a pool that a live graph allocates from
(temporaries of the capture, graph outputs), `external` if the allocator has it
elsewhere, `unknown` if the driver knows the address and the allocator doesn't
(pinned host memory, communication buffers, globals of a module). Where a small
external block holds addresses itself, as the pointer arrays of grouped GEMMs do,
their targets are found too, one step deep.

Any word that happens to fall in a block counts as a pointer, so a block too many
may be listed, never one too few, save for what is not covered:

- TMA descriptors (`CUtensorMap`) are opaque; whether the base address lies in them in the clear is undocumented.
- Host scalars passed by value: they are no addresses, and change unseen.
- Pointers kept in device blocks above 64 KiB, in private pools, in host memory, or behind a second pointer array.
- Pointers that are not at a multiple of 8 in the parameters, and those a kernel computes itself from others.
- Graphs captured by other means than `torch.cuda.CUDAGraph`, or by a reference to that class taken before `install`.

The template of each graph stays in host memory until the graph is reset, since
torch has no call to drop it alone; `kept_host_bytes` says how much that is.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from weightsync.storage.blocks import Age, Loaded, MemoryMap, Span, last_handed_out, where
from weightsync.storage.graph_nodes import NodeReader, Touch, aligned_words, host_bytes_of, load_driver, locate, read_device

Kind = Literal["private_pool", "external", "unknown"]

#: Numbers outside of this range are no addresses of a 64-bit process; used where no allocator block settles it.
ADDRESSES = range(1 << 32, 1 << 57)
#: External blocks up to this size are looked into for pointer arrays.
SECOND_LOOK_BYTES = 64 << 10
#: Words outside of the allocator's blocks that the driver is asked about, at most.
MAX_STRAYS = 16_384

_MARK = "_weightsync_counted"
_captured: weakref.WeakSet[Any] = weakref.WeakSet()
_numbers = itertools.count(1)
_loaded: Loaded | None = None


def install() -> bool:
    """Put the counting class in the place of `torch.cuda.CUDAGraph`; again is harmless.

    Touches no driver. Returns whether it is in place: False on a torch built without CUDA.
    """
    if active():
        return True
    if not torch.backends.cuda.is_built():
        return False
    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = counted(torch.cuda.CUDAGraph)
    return True


def active() -> bool:
    """Whether graphs captured from now on are seen."""
    return hasattr(torch.cuda.CUDAGraph, _MARK)


def uninstall() -> None:
    """Put torch's own class back. Graphs that were captured stay in the census."""
    stock = getattr(torch.cuda.CUDAGraph, _MARK, None)
    if stock is not None:
        torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = stock


def captured_graphs() -> tuple[Any, ...]:
    """Graphs that hold a capture now, in no order; those that were reset or collected are gone."""
    return tuple(_captured)


def captures() -> frozenset[int]:
    """The captures alive now, each by a number of its own: a graph that is captured again has another."""
    return frozenset(graph._weightsync_number for graph in _captured)


def counted(stock: Any) -> Any:
    """A subclass of torch's graph class that keeps each capture readable and is otherwise the same to its user."""

    class CUDAGraph(stock):
        # torch binds the flag in `__init__`, from the caller's arguments, and its own `__new__` takes it as well.
        def __new__(cls, keep_graph: bool = False) -> Any:
            return super().__new__(cls, True)

        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(True)
            self._caller_keeps_graph = keep_graph

        def capture_end(self) -> None:
            super().capture_end()
            # At once, as torch does without `keep_graph`: whoever measures memory around a capture must see it.
            if not self._caller_keeps_graph:
                self.instantiate()
            self._weightsync_number = next(_numbers)
            _captured.add(self)

        def reset(self) -> None:
            _captured.discard(self)
            super().reset()

    setattr(CUDAGraph, _MARK, stock)
    CUDAGraph.__qualname__, CUDAGraph.__module__, CUDAGraph.__doc__ = "CUDAGraph", stock.__module__, stock.__doc__
    return CUDAGraph


@dataclass(frozen=True)
class Block:
    """A piece of memory that live graphs touch.

    Attributes:
        kind: `external`, `private_pool` or `unknown`.
        address: where it begins. For memory that not even the driver knows, the pointer itself.
        nbytes: its size; 0 if not known.
        requested_bytes: what was asked of the allocator, without rounding; `nbytes` where that isn't known.
        offsets: every place in it that a graph holds a pointer to, relative to `address`, ascending.
        kernels: names of what was given a pointer into it: kernels, `memcpy`, `memset`.
        graphs: how many live graphs hold a pointer into it.
        active: False for memory that has been freed and that a graph still holds a pointer to.
        device: index of the device; -1 if not known.
        pool_id: the allocator's pool; (0, 0) is the ordinary one.
        via: addresses of pointer arrays through which it was found; empty if kernels have it directly.
        memory: `device`, `host` or `unclear`.
        age: whether it was there when the model's loading had ended.
        where: what asked for it, if torch recorded that.
    """

    kind: Kind
    address: int
    nbytes: int
    requested_bytes: int
    offsets: tuple[int, ...]
    kernels: tuple[str, ...]
    graphs: int
    active: bool = True
    device: int = -1
    pool_id: tuple[int, int] = (0, 0)
    via: tuple[int, ...] = ()
    memory: str = "device"
    age: Age = Age.UNKNOWN
    where: str = ""


@dataclass(frozen=True)
class Census:
    """What the graphs alive at one moment touch.

    Attributes:
        graphs: graphs that were read.
        nodes_by_type: their nodes, those of child graphs included.
        unread: reason to count of what could not be read. Not empty means that `blocks` may lack some.
        pointers: words found to point into a block, one per node and address, and those inside pointer arrays.
        blocks: all memory touched, by address.
        seconds: how long it took.
        kept_host_bytes: estimate of the host memory that keeping graphs readable costs; None if it can't be told.
    """

    graphs: int
    nodes_by_type: Mapping[str, int]
    unread: Mapping[str, int]
    pointers: int
    blocks: tuple[Block, ...]
    seconds: float = 0.0
    kept_host_bytes: int | None = None

    @property
    def external(self) -> tuple[Block, ...]:
        """Blocks that a reload must leave where they are."""
        return tuple(block for block in self.blocks if block.kind == "external")

    def find(self, address: int) -> Block | None:
        """The block in which `address` lies, if a graph touches it."""
        at = bisect.bisect_right(self.blocks, address, key=lambda block: block.address) - 1
        block = self.blocks[at] if at >= 0 else None
        return block if block is not None and address < block.address + max(block.nbytes, 1) else None


@dataclass
class _Uses:
    """What is known of one block, or of one stray word, while touches are joined."""

    span: Span | None = None
    offsets: set[int] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)
    graphs: set[int] = field(default_factory=set)
    via: set[int] = field(default_factory=set)
    certain: bool = False

    def block(self, kind: Kind, address: int, nbytes: int, requested: int, **more: Any) -> Block:
        offsets, kernels, via = tuple(sorted(self.offsets)), tuple(sorted(self.kernels)), tuple(sorted(self.via))
        return Block(kind, address, nbytes, requested, offsets, kernels, len(self.graphs), via=via, **more)


#: Reads bytes of device memory: address, size.
ReadDevice = Callable[[int, int], bytes]
#: What the driver knows of an address: start and size of its allocation, `device` or `host`. None: no address.
Locate = Callable[[int], tuple[int, int, str] | None]


class Join:
    """Collects what graphs touch, block by block. Pure but for the functions it is handed.

    Attributes:
        pointers: as in `Census`.
        unread: as in `Census`; added to what the nodes' reading gave.
    """

    def __init__(self, memory: MemoryMap, private_pools: Collection[tuple[int, int]], age: Callable[[Span], Age] | None = None) -> None:
        self.pointers = 0
        self._age = age or (lambda _: Age.UNKNOWN)
        self.unread: Counter[str] = Counter({"allocator: overlapping blocks": memory.overlaps} if memory.overlaps else {})
        self._memory, self._pools = memory, frozenset(private_pools)
        self._known: dict[int, _Uses] = {}
        self._strays: dict[int, _Uses] = {}

    def add(self, graph: int, touches: Iterable[Touch]) -> None:
        """What the nodes of one graph were given."""
        for touch in touches:
            for word in touch.words:
                span = self._memory.find(word)
                if span is not None:
                    uses = self._point_into(span, word)
                elif word and (touch.certain or word in ADDRESSES):
                    uses = self._strays.get(word) or self._strays.setdefault(word, _Uses())
                    uses.certain |= touch.certain
                else:
                    continue
                uses.kernels.add(touch.name)
                uses.graphs.add(graph)

    def second_look(self, read: ReadDevice) -> None:
        """Find what pointer arrays in small external blocks point to."""
        for users in list(self._known.values()):
            array = users.span
            if array is None or self._kind(array) != "external" or not array.active:
                continue
            if not 8 <= array.requested_bytes <= SECOND_LOOK_BYTES:
                continue
            try:
                words = set(aligned_words(read(array.address, array.requested_bytes)))
            except OSError as exc:
                self.unread[f"second look: {exc}"] += 1
                continue
            for word in words:
                span = self._memory.find(word)
                if span is not None and span.active:
                    uses = self._point_into(span, word)
                    uses.kernels |= users.kernels
                    uses.graphs |= users.graphs
                    uses.via.add(array.address)

    def blocks(self, locate: Locate) -> tuple[Block, ...]:
        """Everything found, by address."""
        found = [
            uses.block(
                self._kind(span), span.address, span.nbytes, span.requested_bytes,
                active=span.active, device=span.device, pool_id=span.pool_id, age=self._age(span), where=where(span.frames),
            )
            for uses in self._known.values()
            if (span := uses.span) is not None
        ]  # fmt: skip
        found += self._unknown_blocks(locate)
        return tuple(sorted(found, key=lambda block: block.address))

    def _point_into(self, span: Span, word: int) -> _Uses:
        uses = self._known.get(span.address) or self._known.setdefault(span.address, _Uses(span))
        uses.offsets.add(word - span.address)
        self.pointers += 1
        return uses

    def _kind(self, span: Span) -> Kind:
        return "private_pool" if span.pool_id in self._pools else "external"

    def _unknown_blocks(self, locate: Locate) -> list[Block]:
        # Those of copies and fills first: they are addresses for sure, and must not fall to the limit.
        order = sorted(self._strays, key=lambda word: not self._strays[word].certain)
        if len(order) > MAX_STRAYS:
            self.unread["words: too many outside of the allocator"] += len(order) - MAX_STRAYS
        merged: dict[tuple[int, int, str], _Uses] = {}
        for word in order[:MAX_STRAYS]:
            stray, place = self._strays[word], locate(word)
            if place is None:
                if not stray.certain:
                    continue  # a number
                place = (word, 0, "unclear")
            uses = merged.setdefault(place, _Uses())
            uses.offsets.add(word - place[0])
            uses.kernels |= stray.kernels
            uses.graphs |= stray.graphs
            self.pointers += 1
        return [uses.block("unknown", start, size, size, memory=memory) for (start, size, memory), uses in merged.items()]


def note_loaded() -> None:
    """Remember what the allocator has handed out now, when the model's loading has ended; the last call counts.

    Without it the census can't tell what may have been made from weights. Where no CUDA context exists, nothing is
    noted; nor while captured graphs are alive, when loading is a reload and what is there is not all from the first.
    """
    global _loaded
    if not torch.cuda.is_initialized() or captured_graphs():
        return
    # What is garbage now, and the workspaces that cuBLAS made meanwhile, would count as kept if handed out again.
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    _loaded = Loaded(MemoryMap.from_snapshot(torch.cuda.memory_snapshot()), time.time_ns() // 1000)


def _ages() -> Callable[[Span], Age] | None:
    """How old a block is; None where nobody noted when loading ended."""
    noted = _loaded
    if noted is None:
        return None
    recorded = getattr(torch._C, "_cuda_isHistoryEnabled", bool)()
    handed_out = last_handed_out(torch.cuda.memory._snapshot()["device_traces"]) if recorded else {}
    return lambda span: noted.age(span, handed_out)


def take() -> Census:
    """Read every captured graph of this process that is alive. Waits for the device.

    Raises:
        UnsupportedEngine: cuda-bindings is not installed.
    """
    started = time.perf_counter()
    driver = load_driver()
    # Also makes the device's context current in this thread, which the driver calls below need.
    torch.cuda.synchronize()
    graphs = captured_graphs()
    reader = NodeReader(driver)
    memory = MemoryMap.from_snapshot(torch.cuda.memory_snapshot())
    join = Join(memory, {tuple(graph.pool()) for graph in graphs}, _ages())
    largest = (0, 0)
    for number, graph in enumerate(graphs):
        before, raw = reader.by_type.total(), int(graph.raw_cuda_graph())
        join.add(number, reader.read(raw))
        largest = max(largest, (reader.by_type.total() - before, raw))
    join.second_look(lambda address, nbytes: read_device(driver, address, nbytes))
    blocks = join.blocks(lambda address: locate(driver, address))
    # One graph, the largest, stands for all: cloning each would cost as much as the rest of the census.
    sample = host_bytes_of(driver, largest[1]) if largest[0] else 0
    kept = None if sample is None else sample * reader.by_type.total() // max(largest[0], 1)
    unread = dict(reader.unread + join.unread)
    return Census(len(graphs), dict(reader.by_type), unread, join.pointers, blocks, time.perf_counter() - started, kept)
