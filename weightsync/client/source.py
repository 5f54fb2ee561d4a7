"""What a trainer offers: a manifest, and tensors that are read one after the other.

    module, mapping, pairs ─▶ TensorSource ─▶ Offer: manifest · read(0), read(1), …
    of Tensor, DTensor, Lazy   specs, read

Names, shapes and dtypes must be those of the engine's checkpoint. A tensor is made whole
only when it is its turn: shards are gathered, a `Lazy` is called, what lies on another
device is moved. What every rank has a part in is read in runs of at most half a bucket (a
larger tensor is a run of its own); gathering one takes twice its bytes for a moment. So the
trainer never holds the whole model, but a bucket, or its largest tensor.

Not covered: adapters that have not been merged (the engines refuse them by name), and reading an
iterator again: it is gone through once, when the update is offered.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from weightsync.client import sharded
from weightsync.errors import ConfigError, ManifestRefused, TransportFailed, UpdateFailed, WeightSyncError
from weightsync.protocol import DTYPE_BYTES, Manifest, TensorSpec
from weightsync.transport.packing import bucket_bytes_for

_PAIRS_HINT = "Pass a module, a mapping, or pairs as model.named_parameters() gives them"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class SourceSpec:
    """One tensor that a source has, before it is read.

    Attributes:
        name, dtype, shape: as `read` will give it.
        device: where `read` leaves it.
        collective: reading it is something that all ranks of the trainer do together.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device = CPU
    collective: bool = False


@runtime_checkable
class TensorSource(Protocol):
    """What an update is read from; all else that `sync_weights` takes is made into one.

    Of an update each tensor is read once, in order, in a thread of its own and when the engines have
    agreed to take it. Neighbours that are `collective` are asked for together, a bucket at a time, by
    every rank of the trainer at the same place in the order; what ranks other than the first get is dropped.

    Room for more: a source of which every rank sends its own shards, as vLLM's `WeightSource.iter_local`
    gives them, has one more method beside `read`, which returns this rank's piece and its placement.
    The manifest and the bucket plan speak of whole tensors and stay as they are.
    """

    def specs(self) -> Sequence[SourceSpec]:
        """Every tensor, in the order of sending; the same on every rank."""

    def read(self, indices: Sequence[int]) -> Sequence[torch.Tensor]:
        """These tensors, whole and dense: one, or several that are collective."""


@dataclass(frozen=True)
class Lazy:
    """Stands for a tensor in a mapping or in pairs, and makes it when it is sent: cast, merged, gathered.

    Attributes:
        dtype, shape, device, collective: see `SourceSpec`.
        read: makes it; called once whenever it is sent, in another thread than the one that offered it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    device: torch.device = CPU
    collective: bool = False


#: Anything `sync_weights` takes.
Source: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor | Lazy] | Iterable[tuple[str, torch.Tensor | Lazy]] | TensorSource


class Offer:
    """A source as it is sent. Read by one thread.

    Attributes:
        manifest: what is sent.
        device: where every tensor is when it has been read.
        runs: indices that all ranks read together, run after run.
        go: called before each run, where other ranks wait to take part; raises when the update has ended.
        most_gathered: bytes of the largest run, as it was read.
        bucket_bytes: unit of broadcast.
        model: whose adapter it has; None for none.
    """

    model: torch.nn.Module | None = None

    def __init__(self, source: TensorSource, specs: Sequence[SourceSpec], manifest: Manifest, device: torch.device, bucket: int) -> None:
        self.manifest, self.device, self.bucket_bytes = manifest, device, bucket
        self._source = source
        self.runs = _runs(specs, manifest, bucket // 2)
        self.go: Callable[[int], None] = lambda run: None
        self.most_gathered = 0
        self._run_of = {index: run for run, indices in enumerate(self.runs) for index in indices}
        self._gathered: dict[int, torch.Tensor] = {}
        self._held: Callable[[int], torch.Tensor | None] = source.held if isinstance(source, (_Pairs, _Part)) else lambda index: None

    @property
    def transport(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def fingerprint(self) -> str:
        """Equal on all ranks whose reads fit together."""
        return hashlib.sha256(f"{self.manifest.hash}:{self.runs}".encode()).hexdigest()

    def read(self, index: int) -> torch.Tensor:
        """One tensor, whole, dense and on `device`. Each once, in order.

        Raises:
            TransportFailed: a rank that has a part in it is gone.
            UpdateFailed: the source raised, or gave something else than a tensor of that kind.
        """
        if (held := self._held(index)) is not None and held.device == self.device:
            return held
        run = self._run_of.get(index)
        if run is None:
            return self._whole(index, self._from_source([index])[0])
        if index not in self._gathered:
            self.go(run)
            indices = self.runs[run]
            self._gathered = {at: self._whole(at, made) for at, made in zip(indices, self._from_source(indices), strict=True)}
            self._count(self._gathered.values())
            _settle(self.device)
        return self._gathered.pop(index)

    def resident(self, index: int) -> bool:
        """Whether reading a tensor makes nothing: it is there, and stays."""
        return (held := self._held(index)) is not None and held.device == self.device

    def take_part(self, run: int) -> None:
        """Another rank reads a run: give it this rank's part."""
        given = self._from_source(self.runs[run])
        self._count(given)
        for device in {tensor.device for tensor in given}:
            _settle(device)

    def _whole(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        name = self.manifest.tensors[index].name
        try:
            _require_whole(name, tensor)
        except ManifestRefused as exc:
            raise UpdateFailed(exc.message, hint=exc.hint, names=[name], retryable=False) from None
        return tensor.detach().to(self.device)

    @torch.no_grad()
    def _from_source(self, indices: Sequence[int]) -> Sequence[torch.Tensor]:
        names = [self.manifest.tensors[index].name for index in indices]
        shown = repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        try:
            return self._source.read(indices)
        except WeightSyncError:
            raise
        except Exception as exc:
            if isinstance(exc, RuntimeError) and indices[0] in self._run_of:  # as torch's collectives do when a rank is gone
                raise TransportFailed(
                    f"{shown} could not be gathered from the trainer's ranks: {str(exc)[:300]}",
                    hint="If a rank of the trainer died, start the trainer again; the engines serve what they had",
                    names=names,
                ) from exc
            raise UpdateFailed(f"{shown} could not be read: {type(exc).__name__}: {exc}", names=names, retryable=False) from exc

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        self.most_gathered = max(self.most_gathered, sum(tensor.nbytes for tensor in tensors))


def _settle(device: torch.device) -> None:
    # What was gathered is there when it is handed on, and the gather's time is its own.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def offer(
    source: Source,
    device: torch.device | None = None,
    members: Collection[int] | None = None,
    bucket_bytes: int | None = None,
    scope: Sequence[str] | None = None,
) -> Offer:
    """Take stock of a source; nothing is gathered or moved yet.

    Args:
        device: where tensors travel from; where they are when None.
        members: the trainer's ranks that will take part; None when this process is alone.
        bucket_bytes: unit of broadcast, and the most that gathering takes at once, where no tensor is larger; by size and device when None.
        scope: patterns of names; only tensors that match one are offered.

    Raises:
        ConfigError: a scope without a pattern, or that is no list.
        ManifestRefused: it is empty, holds something else than dense tensors or shards that can be
            gathered, a dtype that can't travel, a name twice, or tensors on several GPUs.
    """
    taken = source if isinstance(source, TensorSource) else _Pairs(_pairs(source), members)
    specs = taken.specs()
    if not specs:
        raise ManifestRefused("the model is empty: it has no tensor to send", hint="Pass a module with parameters, or (name, tensor) pairs")
    if scope is not None:
        taken = _Part(taken, scope)
        specs = taken.specs()
    if members is None and sharded.has_company() and (together := [spec.name for spec in specs if spec.collective]):
        raise ManifestRefused(
            f"{len(together)} tensor(s) are read by all ranks of the trainer together: {', '.join(together[:20])}",
            hint=sharded.GROUP_HINT,
            names=together,
        )
    try:
        manifest = Manifest(tuple(_travelling(spec) for spec in specs))
    except ValueError as exc:
        raise ManifestRefused(str(exc), hint="Give each tensor once, under one name") from None
    on = device or _common_device(specs)
    bucket = bucket_bytes_for(manifest.nbytes, on.type == "cuda") if bucket_bytes is None else bucket_bytes
    made = Offer(taken, specs, manifest, on, bucket)
    if torch.cuda.is_initialized():
        # Tensors are read in another thread: there behind what this one has asked for on the offer's device; on others all is done now.
        busy = {spec.device for spec in specs if spec.device.type == "cuda"} | {torch.device("cuda", torch.cuda.current_device())}
        for other in busy - {made.device}:
            _settle(other)
    return made


def require_same_dtypes(manifest: Manifest, before: Mapping[str, str]) -> None:
    """See that no tensor has another dtype than it had in the update before.

    Args:
        before: dtypes by name.

    Raises:
        ManifestRefused: some have, with their names.
    """
    changed = [spec for spec in manifest.tensors if before.get(spec.name, spec.dtype) != spec.dtype]
    if changed:
        shown = ", ".join(f"{spec.name} is {spec.dtype}, was {before[spec.name]}" for spec in changed[:20])
        raise ManifestRefused(
            f"{len(changed)} tensor(s) have another dtype than in this trainer's last update: {shown}",
            hint="Was the model cast, or are these an optimizer's master weights? Cast them back; if it is meant, make WeightSync anew",
            names=[spec.name for spec in changed],
        )


class _Pairs:
    """Names and what stands for their tensors, as a `TensorSource`."""

    def __init__(self, pairs: Iterable[tuple[str, Any]], members: Collection[int] | None) -> None:
        self._values: list[torch.Tensor | Lazy] = []
        self._whole: list[torch.Tensor | None] = []
        self._specs: list[SourceSpec] = []
        for name, value in pairs:
            if isinstance(value, Lazy) and isinstance(name, str):
                spec = SourceSpec(name, value.dtype, tuple(value.shape), value.device, value.collective)
            else:
                sharded.refuse_partitioned(name, value)
                if sharded.is_sharded(value):
                    sharded.require_members(name, value, members)
                else:
                    _require_whole(name, value)
                value = value.detach()
                collective = sharded.is_sharded(value) and value.device_mesh.size() > 1
                spec = SourceSpec(name, value.dtype, tuple(value.shape), sharded.device_of(value), collective)
            self._values.append(value)
            self._whole.append(None if isinstance(value, Lazy) or sharded.is_sharded(value) else value)
            self._specs.append(spec)

    def specs(self) -> Sequence[SourceSpec]:
        return self._specs

    def held(self, index: int) -> torch.Tensor | None:
        """A tensor that is there, whole and dense, and need not be made: reading it costs next to nothing, and there may be many."""
        return self._whole[index]

    def read(self, indices: Sequence[int]) -> Sequence[torch.Tensor]:
        tensors = [value.read() if isinstance(value, Lazy) else value for value in map(self._values.__getitem__, indices)]
        shards = [at for at, tensor in enumerate(tensors) if sharded.is_sharded(tensor)]
        for at in shards:
            spec = self._specs[indices[at]]
            if not spec.collective and tensors[at].device_mesh.size() > 1:
                hint = "Say Lazy(…, collective=True)"
                raise UpdateFailed(f"{spec.name!r} turned out to be sharded", hint=hint, names=[spec.name], retryable=False)
        for at, whole in zip(shards, sharded.gather([tensors[at] for at in shards]), strict=True):
            tensors[at] = whole
        return tensors


class _Part:
    """Those tensors of a source whose names match a pattern."""

    def __init__(self, source: TensorSource, scope: Sequence[str]) -> None:
        if isinstance(scope, str) or not scope:
            hint = 'Such as ["model.layers.0.*"]; leave it out to send all'
            raise ConfigError(f"scope: got {scope!r}, want a list of patterns", hint=hint)
        specs, self._source = source.specs(), source
        self._chosen = [at for at, spec in enumerate(specs) if any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in scope)]
        self._specs = [specs[at] for at in self._chosen]
        if not self._chosen:
            raise ManifestRefused(
                f"scope: none of {len(specs)} tensors matches {', '.join(map(repr, scope))}",
                hint=f"Patterns go by names such as {specs[0].name!r}",
            )

    def specs(self) -> Sequence[SourceSpec]:
        return self._specs

    def held(self, index: int) -> torch.Tensor | None:
        """See `_Pairs.held`."""
        return self._source.held(self._chosen[index]) if isinstance(self._source, _Pairs) else None

    def read(self, indices: Sequence[int]) -> Sequence[torch.Tensor]:
        return self._source.read([self._chosen[index] for index in indices])


def _pairs(source: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(source, torch.nn.Module):
        sharded.refuse_fsdp1(source)
        # This also has FSDP2's modules show their shards: after a forward pass some keep whole parameters, in the dtype that they
        # compute in.
        persistent = source.state_dict(keep_vars=True).keys()
        yield from ((n, p) for n, p in source.named_parameters())
        yield from ((n, b) for n, b in source.named_buffers() if n in persistent)
    elif isinstance(source, Mapping):
        yield from source.items()
    elif not isinstance(source, Iterable):
        raise ManifestRefused(f"want weights, got {type(source).__name__}", hint=_PAIRS_HINT)
    else:
        for item in source:
            if not (isinstance(item, tuple) and len(item) == 2):
                raise ManifestRefused(f"want (name, tensor) pairs, got {type(item).__name__}", hint=_PAIRS_HINT)
            yield item


def _require_whole(name: Any, tensor: Any) -> None:
    if not isinstance(name, str):
        raise ManifestRefused(f"a tensor's name is {type(name).__name__}, want str", hint=_PAIRS_HINT)
    if not isinstance(tensor, torch.Tensor):
        raise ManifestRefused(f"{name!r} is {type(tensor).__name__}, want a tensor", names=[name], hint=_PAIRS_HINT)
    if sharded.is_sharded(tensor):
        raise ManifestRefused(f"{name!r} is sharded", names=[name], hint="A source's read() returns whole tensors")
    if tensor.is_sparse or tensor.layout != torch.strided:
        raise ManifestRefused(f"{name!r} has layout {tensor.layout}", names=[name], hint="Send tensor.to_dense() instead")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ManifestRefused(f"{name!r} is on device {tensor.device}", names=[name], hint="Load or gather it first")


def _travelling(spec: SourceSpec) -> TensorSpec:
    try:
        return TensorSpec(spec.name, str(spec.dtype).removeprefix("torch."), tuple(spec.shape))
    except ValueError as exc:
        hint = f"dtypes that travel: {', '.join(sorted(DTYPE_BYTES))}"
        raise ManifestRefused(str(exc), names=[str(spec.name)[:200]], hint=hint) from None


def _common_device(specs: Sequence[SourceSpec]) -> torch.device:
    """The one GPU that tensors are on, to which those in host memory are then moved; the CPU when all are there."""
    first: dict[torch.device, str] = {}
    for spec in specs:
        first.setdefault(spec.device, spec.name)
    gpus = [device for device in first if device.type != "cpu"]
    if len(gpus) > 1:
        shown = ", ".join(f"{first[device]!r} on {device}" for device in gpus)
        hint = "Say with WeightSync(…, device=…) from which one they travel; they are moved there one after the other"
        raise ManifestRefused(f"tensors are on several devices: {shown}", names=[first[device] for device in gpus], hint=hint)
    return gpus[0] if gpus else CPU


def _runs(specs: Sequence[SourceSpec], manifest: Manifest, most: int) -> tuple[tuple[int, ...], ...]:
    """Indices that are read together: neighbours, of at most so many bytes in all where none is larger alone."""
    runs: list[list[int]] = []
    held = 0
    for index, spec in enumerate(specs):
        if not spec.collective:
            continue
        nbytes = manifest.tensors[index].nbytes
        if runs and runs[-1][-1] == index - 1 and held + nbytes <= most:
            runs[-1].append(index)
            held += nbytes
        else:
            runs.append([index])
            held = nbytes
    return tuple(map(tuple, runs))
