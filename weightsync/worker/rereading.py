"""Reads a worker's live storage again, while the engine serves, and compares it with what was sent.

Three ways, the strongest that fits each tensor. One that the loader copied whole, and that the engine keeps as it is, must have the digest
that the trainer sent behind it. What is kept in another form (packed, sharded by columns, converted) can't be compared
with what was sent: it must have the digest that the check before found, under the same update. And every slot of the storage contract
must lead where it was sealed. Which tensors are kept as they are shows when they are first read: from then on they must be equal.

A call reads a bounded number of bytes, since a worker's RPC stands in the way of the engine's steps.

Not covered: what kernels keep inside (oneDNN's packed weights), and buffers, which running a model may change. A change to what is kept
in another form between an update and the first check behind it is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from weightsync.errors import Refused
from weightsync.protocol import Manifest, WorkerCheck
from weightsync.storage.adopt import Adoption
from weightsync.transport.digest import Batch, Digest, as_bytes
from weightsync.worker.guard import Guard
from weightsync.worker.loadmap import LoadMap, View
from weightsync.worker.stored import live_view, registered

#: Bytes, and pieces, that one call reads at most; on a CPU some 20 ms, on a GPU less.
_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
_PIECES = 256
_LISTED = 20


@dataclass(frozen=True)
class _Sent:
    """A tensor as it was sent: its digest, and the parameters that it was written to; `into` where it lies there whole and in order."""

    digest: Digest | None
    paths: tuple[str, ...]
    into: tuple[tuple[str, str, View], ...] = ()


@dataclass(frozen=True)
class _Piece:
    """What is read at once: `name` is a tensor's (with `sent`) or a parameter's path."""

    name: str
    data: torch.Tensor
    sent: Digest | None = None


@dataclass
class _Run:
    """A check under way."""

    pieces: Iterator[_Piece]
    found: WorkerCheck


class Rereading:
    """Of one worker; see the module.

    Args:
        model: the live model.
        guard: of its contract.
        rank: of the worker.
    """

    def __init__(self, model: torch.nn.Module, guard: Guard, rank: int) -> None:
        self._model, self._guard, self._rank = model, guard, rank
        self._sent: dict[str, _Sent] = {}
        self._kept: set[str] = set()  # tensors that were once found as they were sent
        self._before: dict[str, Digest] = {}  # by piece, what the last check of this update read
        self._run: _Run | None = None
        self._live: dict[str, torch.Tensor] = {}  # while something is read

    def note(self, load_map: LoadMap, manifest: Manifest, digests: dict[int, Digest]) -> None:
        """An update counts: from now on its tensors are what live storage is compared with; others', of a partial one, stay."""
        sent = {}
        for index, spec in enumerate(manifest.tensors):
            if spec.name in load_map.adapter:
                continue
            name = load_map.name(spec.name)
            copies, writes = load_map.copies.get(name, ()), load_map.writes.get(name, ())
            whole = (0, spec.shape, _strides(spec.shape))
            overlaps = name in load_map.twice or name in load_map.twice.values()
            in_order = not overlaps and len(copies) == len(writes) and all(copy.source == whole for copy in copies)
            into = tuple((copy.path, spec.dtype, copy.into) for copy in copies) if in_order else ()
            sent[name] = _Sent(digests.get(index), tuple(dict.fromkeys(place[0] for place in writes)), into)
        self._sent = {**self._sent, **sent} if load_map.part else sent
        self._before, self._run = {}, None

    def step(self, update_id: str, anew: bool) -> WorkerCheck:
        """Read some more; what was found so far.

        Args:
            update_id: the update that live storage was proved to hold, and that counts; empty where there is none.
            anew: begin from the start.

        Raises:
            Refused: there is none, or another one has come since the check began.
        """
        if not update_id:
            raise Refused("this worker holds no update that live storage could be compared with", hint="Check again behind the next update")
        began, self._live = time.monotonic(), registered(self._model)
        try:
            return self._step(update_id, anew, began)
        finally:
            self._live = {}

    def _step(self, update_id: str, anew: bool, began: float) -> WorkerCheck:
        if anew:
            verdict = self._guard.verify(Adoption())
            lines = list(verdict.lines())
            found = WorkerCheck(self._rank, update_id, faults=tuple(lines[:_LISTED]), left_out=max(0, len(lines) - _LISTED))
            self._run = _Run(self._pieces(), replace(found, slots=sum(verdict.slots.values()), unreadable=self._unreadable()))
        run = self._run
        if run is None or run.found.update_id != update_id:
            raise Refused("another update has come since this check began", hint="Check again", retryable=True)
        if not run.found.done:
            self._read(run)
        run.found = replace(run.found, seconds=run.found.seconds + time.monotonic() - began)
        return run.found

    def _pieces(self) -> Iterator[_Piece]:
        """What there is to read, as it lies when it is its turn."""
        others: dict[str, None] = {}
        for name, sent in self._sent.items():
            views = [self._view(path, dtype, view) for path, dtype, view in sent.into]
            if sent.digest is None or not views or any(view is None for view in views):
                others |= dict.fromkeys(sent.paths)
                continue
            for number, view in enumerate(views):
                assert view is not None
                yield _Piece(name if len(views) == 1 else f"{name} at {sent.into[number][0]}", view, sent.digest)
        for path in others:
            parameter = self._live.get(path)
            if parameter is not None and _readable(parameter):
                yield _Piece(path, parameter)

    def _view(self, path: str, dtype: str, at: View) -> torch.Tensor | None:
        """Where a tensor lies in a live parameter; None where that is not laid out as it was loaded."""
        parameter = self._live.get(path)
        return live_view(parameter, getattr(torch, dtype), at) if parameter is not None and _readable(parameter) else None

    def _unreadable(self) -> int:
        return sum(not any(path in self._live and _readable(self._live[path]) for path in sent.paths) for sent in self._sent.values())

    def _read(self, run: _Run) -> None:
        device, taken, nbytes = None, list[_Piece](), 0
        done = False
        while nbytes < _BYTES.get(device.type if device else "cpu", 1 << 25) and len(taken) < _PIECES:
            piece = next(run.pieces, None)
            if piece is None:
                done = True
                break
            device = piece.data.device
            taken.append(piece)
            nbytes += piece.data.nbytes
        if taken and device is not None:
            batch = Batch(len(taken), device)
            for piece in taken:
                batch.add(as_bytes(piece.data))
            for piece, digest in zip(taken, batch.results(), strict=True):
                self._judge(run, piece, digest)
        run.found = replace(run.found, done=done, nbytes=run.found.nbytes + nbytes)

    def _judge(self, run: _Run, piece: _Piece, digest: Digest) -> None:
        found, before = run.found, self._before.get(piece.name)
        self._before[piece.name] = digest
        if piece.sent == digest:
            self._kept.add(piece.name)
            run.found = replace(found, equal=found.equal + 1)
        elif piece.name in self._kept or before not in (None, digest):
            listed = len(found.differs) < _LISTED
            differs = (*found.differs, piece.name) if listed else found.differs
            run.found = replace(found, differs=differs, left_out=found.left_out + (not listed))
            self._before[piece.name] = before or digest  # it differs in the next check too
        elif before is None:
            run.found = replace(found, first_seen=found.first_seen + 1)
        else:
            run.found = replace(found, unchanged=found.unchanged + 1)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor, as torch has them."""
    return tuple(torch.empty(shape, device="meta").stride())


def _readable(parameter: torch.Tensor) -> bool:
    return parameter.numel() > 0 and parameter.layout == torch.strided and not parameter.is_meta
