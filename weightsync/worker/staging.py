"""One update's bytes beside the live weights: where they lie, and the tensors in them.

`host` is the worker's host memory, `gpu` its device's. `auto` takes the device when
the bytes leave most of its free memory free, and the host otherwise: an engine that
reserved nearly all of its GPU for the KV cache stages on the host.

Where an engine has several workers, each proves every tensor and keeps those that its own
loaders touch: not other stages' layers, nor other workers' experts. On the host their
memory goes back as soon as they are proved; the layout stays the stream's.

What comes from a trainer on the same host (`transport.link`) lies in memory that the trainer can be lent, to write
into it (`Regions`), unless that would have to go back in part while the trainer writes, or it is not where buckets land.

On the host it lies in memory that stays for the next update, unless some of it goes back; a CUDA engine's driver knows it.

Not covered: memory shared by the workers of a node: a tensor of which each of them takes a
part lies whole in each; and on a GPU the whole stream does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import psutil
import torch

from weightsync.errors import MemoryRefused, TransportFailed, WeightSyncError
from weightsync.protocol import Manifest
from weightsync.transport.digest import Digest
from weightsync.transport.memory import HostMemory, huge_pages, let_go, small_pages
from weightsync.transport.packing import Bucket, BucketPlan, Piece
from weightsync.transport.segment import Segment, Spare, create, of_file
from weightsync.worker.loadmap import LoadMap

#: Where a stream is staged: what nobody else maps, what a trainer can be lent, what a GPU's driver knows.
Memory: TypeAlias = torch.Tensor | Segment | HostMemory
#: Share of the free memory that staging may take: of the host's, and of a device's that was asked for.
_SHARE = 0.8
#: Of a device's, when nobody asked for it: the engine allocates there while it serves.
_AUTO_SHARE = 0.5


@dataclass(frozen=True)
class Staged:
    """A complete update that live storage does not depend on.

    Attributes:
        manifest: names, dtypes, shapes, in the order of the stream.
        offsets: first byte of each tensor in `data`.
        data: shape [stream bytes], uint8.
        load_map: where its tensors go.
        skipped: the engine's names that the loader is not given (output heads that are the embedding).
        unused: indices of tensors that are not kept, as no loader of this worker touches them.
        digests: of the tensors by their index, where the update is kept; those that the trainer sent.
        file: name of the file that `data` is, where it is one (`retained`).
    """

    manifest: Manifest
    offsets: tuple[int, ...]
    data: torch.Tensor
    load_map: LoadMap
    skipped: Collection[str]
    unused: Collection[int] = frozenset()
    digests: dict[int, Digest] = field(default_factory=dict)
    file: str = ""

    def tensor(self, index: int) -> torch.Tensor:
        """The tensor at this index of the manifest; a view."""
        return view_of(self.data, self.manifest, self.offsets, index)

    def stream(self, taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """What the model's loader is given, by the engine's names; the trainer's goes into `taken` when it asks for the next."""
        for index, spec in enumerate(self.manifest.tensors):
            name = self.load_map.name(spec.name)
            if name not in self.skipped and index not in self.unused and spec.name not in self.load_map.adapter:
                yield name, self.tensor(index)
            taken.append(spec.name)

    def on_host(self, memory: HostMemory | None = None, file: str = "", stopped: Callable[[], bool] = lambda: False) -> Staged:
        """The same in host memory; itself if it is there already.

        Args:
            memory, file: where to, for what is to be `retained`.
            stopped: asked between tensors; then the rest is not copied.
        """
        if self.data.device.type == "cpu":
            return self
        memory = memory or HostMemory(self.data.numel())
        data = memory.tensor()
        if self.unused:
            small_pages(data)
        else:
            memory.show(self.data.device)
        for index, spec in enumerate(self.manifest.tensors):
            if index not in self.unused and not stopped():
                run = slice(self.offsets[index], self.offsets[index] + spec.nbytes)
                data[run].copy_(self.data[run])
        return replace(self, data=data, file=file)


class Whole:
    """Memory for all of a stream, in the stream's own layout: what has landed is in place.

    Args:
        plan, manifest: of the update.
        data: from `Regions.allocate`.
        unused: indices of tensors that need not be kept once they are proved.

    Attributes:
        lent: what `data` is, where a trainer may be lent it.
        nbytes: of memory, without what goes back as it is proved.
    """

    def __init__(self, manifest: Manifest, plan: BucketPlan, data: Memory, unused: Collection[int] = ()) -> None:
        self._manifest, self._offsets, self._unused = manifest, plan.offsets, frozenset(unused)
        self.lent = data if isinstance(data, Segment) else None
        self._host = data if isinstance(data, HostMemory) else None
        if isinstance(data, torch.Tensor):
            self.data = data
        else:
            whole = data.tensor() if isinstance(data, HostMemory) else data.tensor
            self.data = whole[: plan.stream_bytes]
        self._file = ""
        self.nbytes = plan.stream_bytes
        if self.data.device.type == "cpu":
            self.nbytes -= sum(manifest.tensors[index].nbytes for index in self._unused)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def move(self, memory: HostMemory | None, file: Path) -> HostMemory | None:
        """Before the first byte: have it come to lie in a file (`retained.Folder.memory`), where there is room for that.

        Returns:
            What it does not lie in any more.
        """
        if memory is None:
            return None
        left, self._host = self._host, memory
        self.data, self._file = memory.tensor(), file.name
        if self.lent is not None:
            self.lent = of_file(file, self.data) if memory.nbytes else None  # nothing of a file can't be mapped
        return left

    def show(self, device: torch.device) -> None:
        """Before the first byte: have the worker's GPU know the memory, where it is the host's (`HostMemory.show`)."""
        if self._host is not None and not self._unused:
            self._host.show(device)

    def lend(self) -> Segment | None:
        """What a trainer may be lent now, its pages there; None where there is nothing to lend.

        Raises:
            TransportFailed: there is not so much memory.
        """
        if self.lent is not None and self.device.type == "cpu" and not self._file:  # a file has its pages
            self.lent.take_pages()
        return self.lent

    def window(self, bucket: Bucket) -> torch.Tensor:
        """Where a bucket lands, shape [its bytes], uint8."""
        return self.data[bucket.start : bucket.start + bucket.nbytes]

    def landed(self, bucket: Bucket) -> None:
        """Nothing is left to do."""

    def run(self, bucket: Bucket, piece: Piece) -> torch.Tensor:
        """Where a piece of a bucket that has landed is now, shape [its bytes], uint8."""
        return self.window(bucket)[piece.bucket_offset : piece.bucket_offset + piece.nbytes]

    def tensor(self, index: int) -> torch.Tensor:
        """The tensor at this index of the manifest; a view."""
        return view_of(self.data, self._manifest, self._offsets, index)

    def hand_over(self, indices: Collection[int]) -> None:
        """Tensors that are proved: they stay where they are, or their memory goes."""
        for index in self._unused.intersection(indices):
            start = self._offsets[index]
            let_go(self.data[start : start + self._manifest.tensors[index].nbytes])

    def fail(self, error: WeightSyncError) -> None:
        """Nobody waits."""

    def let_go(self) -> None:
        """Give the memory back though somebody may hold on to it, as a broadcast does that was left in the middle of a message.

        The addresses stay taken until that one ends, so that nothing else can come to lie there; what they hold is undefined.
        What a trainer was lent goes with the last who has it mapped: taken away under one that still writes, it would have to be
        found anew, and where there is none left the system ends the trainer. What a GPU's driver knows stays, for the next update: no
        broadcast goes there.
        """
        if self.lent is None and not (self._host is not None and self._host.shown):
            let_go(self.data)

    def update(self, load_map: LoadMap, skipped: Collection[str]) -> Staged:
        """All that has arrived, with where it goes."""
        return Staged(self._manifest, self._offsets, self.data, load_map, frozenset(skipped), self._unused, file=self._file)


def view_of(data: torch.Tensor, manifest: Manifest, offsets: tuple[int, ...], index: int) -> torch.Tensor:
    """A tensor of a stream of bytes that has all of it."""
    spec = manifest.tensors[index]
    flat = data[offsets[index] : offsets[index] + spec.nbytes].view(getattr(torch, spec.dtype))
    return flat.reshape(spec.shape)


class Regions:
    """Memory for whole streams, from update to update.

    On a GPU it is such that a trainer can be lent it, and is kept for the next update, as torch's allocator keeps its blocks: making,
    exporting and mapping gigabytes there takes milliseconds, about what copying them does. Unlike torch's it does not go by itself when the
    process runs short. Only what the trainer has unmapped is kept: one that hangs and comes back could write to what it still has mapped.

    Of the host it is kept as well, unless a trainer is lent it or some of it goes back: taking its pages costs more than what is copied
    into them, many times as much where the system first has to make room for huge ones; and telling a GPU's driver of it takes seconds.

    It goes when the engine sleeps, and when the next update is staged elsewhere or does not fit.
    """

    def __init__(self) -> None:
        self._spare: Spare | None = None
        self._host: list[HostMemory] = []  # two at most: of the update that is kept to come back to, and of the next

    def allocate(
        self, plan: BucketPlan, stage: str, device: torch.device, landing: torch.device, spared: int = 0, lent: bool = True
    ) -> Memory:
        """Memory for a whole stream.

        Args:
            plan: of the update.
            stage: `auto`, `host` or `gpu`.
            device: the worker's.
            landing: where the transport puts buckets.
            spared: bytes of tensors that are not kept, where they lie on the host.
            lent: whether it comes from a trainer on this host; a segment then, where it can write what lands on `landing`.

        Returns:
            Of at least the stream's bytes, uninitialised.

        Raises:
            MemoryRefused: it would not fit, or a bucket would not fit on the device where buckets land.
        """
        fits = landing.type == device.type and stage != "host" and self._spare is not None and self._spare.nbytes >= plan.stream_bytes
        again = self._spare.segment() if lent and fits and self._spare is not None else None
        self._spare = None  # before it is looked what is free
        if again is not None:
            self._host = []
            return again
        self._host = [memory for memory in self._host if not memory.free or memory.nbytes >= plan.stream_bytes]
        ready = next((memory for memory in self._host if memory.free), None)
        where = _place(plan, stage, device, landing, spared, ready.nbytes if ready else 0)
        on_segment = lent and where.type == landing.type and not (spared and where.type == "cpu")
        if where.type == "cpu" and not spared and not on_segment:
            if ready is None:
                ready = HostMemory(plan.stream_bytes)
                huge_pages(ready.tensor())
                self._host = [*self._host[-1:], ready]
            return ready
        self._host = [memory for memory in self._host if not memory.free]
        return _segment(plan, where) if on_segment else _memory(plan, where, spared)

    def keep(self, segment: Segment) -> None:
        """Nobody writes to this any more but its worker: keep its memory, for when it is let go of here as well."""
        self._spare = segment.spare()

    def forget(self, memory: HostMemory | None) -> None:
        """Do not keep this for the next update, which would not lie there either."""
        self._host = [other for other in self._host if other is not memory]

    @property
    def nbytes(self) -> int:
        """Of memory that is kept for the next update: a GPU's, in use or not, and the host's that nobody uses."""
        spare = self._spare.nbytes if self._spare is not None else 0
        return spare + sum(memory.nbytes for memory in self._host if memory.free)

    def drop(self) -> None:
        """Give back what is kept."""
        self._spare, self._host = None, []


def _segment(plan: BucketPlan, where: torch.device) -> Segment:
    try:
        return create(max(1, plan.stream_bytes), where)
    except TransportFailed as exc:
        hint = "Set sync.stage to host, or sync.local to off"
        raise MemoryRefused(f"staging needs {plan.stream_bytes} bytes that a trainer can map: {exc.message}", hint=hint) from exc


def _place(plan: BucketPlan, stage: str, device: torch.device, landing: torch.device, spared: int, ready: int) -> torch.device:
    """Where the stream goes; `ready` bytes of the host are there for it already."""
    on_device = _on_device(plan.stream_bytes, stage, device)
    two_buckets = min(2 * plan.bucket_bytes, plan.stream_bytes)  # one is moved while the next arrives
    if landing.type == "cuda" and not on_device:
        require_room(two_buckets, landing, "two buckets take", "Send smaller buckets (bucket_bytes)")
    where = device if on_device else torch.device("cpu")
    kept = plan.stream_bytes if on_device else min(plan.stream_bytes, plan.stream_bytes - spared + two_buckets) - ready
    require_room(kept, where, "staging needs", "Set sync.stage to host, or give the KV cache less")
    return where


def _memory(plan: BucketPlan, where: torch.device, spared: int) -> torch.Tensor:
    data = torch.empty(plan.stream_bytes, dtype=torch.uint8, device=where)
    return small_pages(data) if spared else data


def require_room(nbytes: int, where: torch.device, what: str, hint: str) -> None:
    """Refuse what would take more than its share of the free memory.

    Args:
        what: begins the message.
        hint: what to do where the memory is a device's.

    Raises:
        MemoryRefused: with what is free.
    """
    free, on_device = free_bytes(where), where.type == "cuda"
    if nbytes > free * _SHARE:
        raise MemoryRefused(
            f"{what} {nbytes} bytes of {'device' if on_device else 'host'} memory and {free} are free",
            hint=hint if on_device else "Give the engine's host more memory, or run fewer engines on it",
        )


def _on_device(nbytes: int, stage: str, device: torch.device) -> bool:
    if device.type != "cuda" or stage == "host":
        return False
    return stage == "gpu" or nbytes <= free_bytes(device) * _AUTO_SHARE


def free_bytes(device: torch.device) -> int:
    """Memory that nobody has: of the host, or of a CUDA device what the driver has and what torch keeps for this process.

    Without the latter the memory of the last update, which the next one gets, would count as taken, and that one would go to the host.
    """
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    counts = torch.cuda.memory_stats(device)
    # What is left of a block of which something is in use can't go back to the driver.
    kept = counts["reserved_bytes.all.current"] - counts["active_bytes.all.current"] - counts["inactive_split_bytes.all.current"]
    return int(torch.cuda.mem_get_info(device)[0]) + max(0, int(kept))
