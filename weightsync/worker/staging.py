"""One update's bytes beside the live weights: where they lie, and the tensors in them.

`host` is the worker's host memory, `gpu` its device's. `auto` takes the device when
the bytes leave most of its free memory free, and the host otherwise: an engine that
reserved nearly all of its GPU for the KV cache stages on the host.

Where an engine has several workers, each proves every tensor and keeps those that its own
loaders touch: not other stages' layers, nor other workers' experts. On the host their
memory goes back as soon as they are proved; the layout stays the stream's.

What comes from a trainer on the same host (`transport.link`) lies in memory that the trainer can be lent, to write
into it (`Regions`), unless that would have to go back in part while the trainer writes, or it is not where buckets land.

Not covered: memory shared by the workers of a node: a tensor of which each of them takes a
part lies whole in each; and on a GPU the whole stream does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch

from weightsync.errors import MemoryRefused, TransportFailed, WeightSyncError
from weightsync.protocol import Manifest
from weightsync.transport.digest import Digest
from weightsync.transport.memory import huge_pages, let_go, small_pages
from weightsync.transport.packing import Bucket, BucketPlan, Piece
from weightsync.transport.segment import Segment, Spare, create, of_file
from weightsync.worker.loadmap import LoadMap

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
            if name not in self.skipped and index not in self.unused:
                yield name, self.tensor(index)
            taken.append(spec.name)

    def on_host(self, memory: torch.Tensor | None = None, file: str = "", stopped: Callable[[], bool] = lambda: False) -> Staged:
        """The same in host memory; itself if it is there already.

        Args:
            memory, file: where to, for what is to be `retained`.
            stopped: asked between tensors; then the rest is not copied.
        """
        if self.data.device.type == "cpu":
            return self
        data = torch.empty(self.data.numel(), dtype=torch.uint8) if memory is None else memory
        if self.unused:
            small_pages(data)
        for index, spec in enumerate(self.manifest.tensors):
            if index not in self.unused and not stopped():
                run = slice(self.offsets[index], self.offsets[index] + spec.nbytes)
                data[run].copy_(self.data[run])
        return replace(self, data=data, file=file)


class Whole:
    """Memory for all of a stream, in the stream's own layout: what has landed is in place.

    Args:
        plan, manifest: of the update.
        data: from `allocate`; or from `Regions.allocate`, what a trainer may be lent.
        unused: indices of tensors that need not be kept once they are proved.

    Attributes:
        lent: what `data` is, where a trainer may be lent it.
    """

    def __init__(self, manifest: Manifest, plan: BucketPlan, data: torch.Tensor | Segment, unused: Collection[int] = ()) -> None:
        self._manifest, self._offsets, self._unused = manifest, plan.offsets, frozenset(unused)
        self.lent = data if isinstance(data, Segment) else None
        self.data = data.tensor[: plan.stream_bytes] if isinstance(data, Segment) else data
        self._file = ""

    @property
    def device(self) -> torch.device:
        return self.data.device

    def move(self, memory: torch.Tensor | None, file: Path) -> None:
        """Before the first byte: have it come to lie in a file (`retained.Folder.memory`), where there is room for that."""
        if memory is not None:
            self.data, self._file = memory, file.name
            if self.lent is not None:
                self.lent = of_file(file, memory) if memory.numel() else None  # nothing of a file can't be mapped

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
        found anew, and where there is none left the system ends the trainer.
        """
        if self.lent is None:
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
    """Memory for whole streams that a trainer can be lent, from update to update.

    On a GPU it is kept for the next update, as torch's allocator keeps its blocks: making, exporting and mapping gigabytes there takes
    milliseconds, about what copying them does. Unlike torch's it does not go by itself when the process runs short. It goes when the
    engine sleeps, and when the next update is staged elsewhere or does not fit. Only what the trainer has unmapped is kept: one that hangs
    and comes back could write to what it still has mapped. Memory of the host goes with each update, as it always did.
    """

    #: Whether memory of a GPU is kept between updates. A switch, to be set by what is measured.
    KEEP = True

    def __init__(self) -> None:
        self._spare: Spare | None = None

    def allocate(
        self, plan: BucketPlan, stage: str, device: torch.device, landing: torch.device, spared: int = 0
    ) -> torch.Tensor | Segment:
        """As `allocate`, with its errors; a segment where a trainer can write what lands on `landing`."""
        fits = landing.type == device.type and stage != "host" and self._spare is not None and self._spare.nbytes >= plan.stream_bytes
        again = self._spare.segment() if fits and self._spare is not None else None
        self.drop()  # before it is looked what is free
        if again is not None:
            return again
        where = _place(plan, stage, device, landing, spared)
        if where.type != landing.type or (spared and where.type == "cpu"):
            return _memory(plan, where, spared)
        try:
            return create(max(1, plan.stream_bytes), where)
        except TransportFailed as exc:
            hint = "Set sync.stage to host, or sync.local to off"
            raise MemoryRefused(f"staging needs {plan.stream_bytes} bytes that a trainer can map: {exc.message}", hint=hint) from exc

    def keep(self, segment: Segment) -> None:
        """Nobody writes to this any more but its worker: keep its memory, for when it is let go of here as well."""
        if self.KEEP:
            self._spare = segment.spare()

    def drop(self) -> None:
        """Give back what is kept."""
        self._spare = None


def allocate(plan: BucketPlan, stage: str, device: torch.device, landing: torch.device, spared: int = 0) -> torch.Tensor:
    """Memory for a whole stream.

    Args:
        plan: of the update.
        stage: `auto`, `host` or `gpu`.
        device: the worker's.
        landing: where the transport puts buckets.
        spared: bytes of tensors that are not kept, where they lie on the host.

    Returns:
        Shape [stream bytes], uint8, uninitialised.

    Raises:
        MemoryRefused: it would not fit, or a bucket would not fit on the device where buckets land.
    """
    return _memory(plan, _place(plan, stage, device, landing, spared), spared)


def _place(plan: BucketPlan, stage: str, device: torch.device, landing: torch.device, spared: int) -> torch.device:
    on_device = _on_device(plan.stream_bytes, stage, device)
    two_buckets = min(2 * plan.bucket_bytes, plan.stream_bytes)  # one is moved while the next arrives
    if landing.type == "cuda" and not on_device:
        require_room(two_buckets, landing, "two buckets take", "Send smaller buckets (bucket_bytes)")
    where = device if on_device else torch.device("cpu")
    kept = plan.stream_bytes if on_device else min(plan.stream_bytes, plan.stream_bytes - spared + two_buckets)
    require_room(kept, where, "staging needs", "Set sync.stage to host, or give the KV cache less")
    return where


def _memory(plan: BucketPlan, where: torch.device, spared: int) -> torch.Tensor:
    data = torch.empty(plan.stream_bytes, dtype=torch.uint8, device=where)
    return small_pages(data) if spared else huge_pages(data)


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
