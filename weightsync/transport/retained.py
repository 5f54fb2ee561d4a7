"""The bytes of a committed update in a file, for engines that come later: written by a worker, sent by its engine's actor.

A folder holds one update: its stream of bytes as it was received, the manifest, the
digests that the trainer sent, and a head that names the three. The head is written last and
taken away first, so what is found under a head is whole. The folder lies in shared memory and
outlives the processes of the engine, but not the machine.

Not covered: who may read it (its folder is for its user alone), and two engines in one folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from weightsync.codec import decode, encode
from weightsync.errors import InternalError, Refused
from weightsync.protocol import BeginOrder, Manifest, Retained
from weightsync.transport import digest
from weightsync.transport.channel import Channel, parts, send_all
from weightsync.transport.memory import HostMemory
from weightsync.transport.packing import plan_buckets

logger = logging.getLogger(__name__)

_HEAD = "head.json"
#: Share of the free memory that a kept update may take.
_SHARE = 0.8
#: Bytes of a file that are made at once: some hundredths of a second.
_RUN = 128 << 20


class Folder:
    """The folder of one engine.

    Args:
        path: made when something is first kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def memory(self, update_id: str, nbytes: int, stopped: Callable[[], bool] = lambda: False) -> tuple[HostMemory | None, str]:
        """Shared memory for a stream, and its file's name; None where there is no room for it: then nothing is kept.

        Args:
            stopped: asked now and then, for gigabytes take seconds; then it is None, too.

        Returns:
            Zeros. Its pages are there already, so that writing to it can't fail.
        """
        file = self.path / f"{update_id}.bytes"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if nbytes > psutil.virtual_memory().available * _SHARE:
                raise OSError(errno.ENOMEM, f"{nbytes} bytes are more than {_SHARE:.0%} of the host's free memory")
            with file.open("wb") as stream:
                for start in range(0, nbytes, _RUN):
                    if stopped():
                        file.unlink()
                        return None, ""
                    os.posix_fallocate(stream.fileno(), start, min(_RUN, nbytes - start))
            return HostMemory(nbytes, file), file.name
        except (OSError, ValueError) as exc:
            with contextlib.suppress(OSError):
                file.unlink()
            logger.warning(
                "update %s (%.2f GB) is not kept for engines that come later: %s. Make room in %s, or set sync.retain_engines to 0",
                *(update_id, nbytes / 1e9, exc, self.path.parent),
            )
            return None, ""

    def seal(self, head: Retained, manifest: Manifest, digests: Mapping[int, digest.Digest]) -> None:
        """All bytes of an update are there; what was kept before goes.

        Args:
            digests: of every tensor, by its index.
        """
        names = self.path / f"{head.plan_hash}.manifest"
        if not names.exists():
            _write(names, json.dumps(encode(manifest)).encode())
        packed = digest.pack([digests[index] for index in range(len(manifest.tensors))])
        _write(self.path / f"{head.update_id}.digests", packed.numpy().tobytes())
        _write(self.path / _HEAD, json.dumps(encode(head)).encode())
        self._keep_only(head)

    def unseal(self) -> None:
        """What is kept is about to change."""
        with contextlib.suppress(OSError):
            (self.path / _HEAD).unlink()

    def head(self) -> Retained | None:
        """What is kept; None for nothing."""
        try:
            head = decode(Retained, json.loads((self.path / _HEAD).read_bytes()))
            return head if (self.path / head.data).stat().st_size == head.nbytes else None
        except (OSError, ValueError):
            return None

    def tidy(self) -> None:
        """Let go of bytes that are not under a head, as those of an update that was aborted."""
        if not self.path.is_dir():
            return
        if (head := self.head()) is None:
            self.clear()
        else:
            self._keep_only(head)

    def clear(self) -> None:
        """Let go of everything."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _keep_only(self, head: Retained) -> None:
        kept = {_HEAD, head.data, f"{head.update_id}.digests", f"{head.plan_hash}.manifest"}
        for path in self.path.iterdir():
            if path.name not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()

    def open(self, update_id: str) -> Stream:
        """The update that is kept, to be sent.

        Raises:
            Refused: it is another one, or nothing.
        """
        head = self.head()
        if head is None or head.update_id != update_id:
            raise Refused(f"update {update_id} is not kept here, but {head.update_id if head else 'nothing'}", hint="Sync again")
        try:
            manifest = decode(Manifest, json.loads((self.path / f"{head.plan_hash}.manifest").read_bytes()))
            raw = (self.path / f"{head.update_id}.digests").read_bytes()
            # It stays as it is for whoever sends it, also when a later update takes its place in the folder.
            data = HostMemory(head.nbytes, self.path / head.data).tensor()
            packed = torch.frombuffer(bytearray(raw), dtype=torch.int64).reshape(-1, 2) if raw else torch.empty((0, 2), dtype=torch.int64)
        except (OSError, ValueError, RuntimeError) as exc:
            raise Refused(f"what is kept of update {update_id} can't be read: {exc}", hint="Sync again") from exc
        return Stream(head, manifest, packed, data)


@dataclass(frozen=True)
class Stream:
    """A kept update.

    Attributes:
        digests: shape [tensors, 2], int64, as they are broadcast.
        data: shape [stream bytes], uint8.
    """

    head: Retained
    manifest: Manifest
    digests: torch.Tensor
    data: torch.Tensor

    def send(self, channel: Channel, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Broadcast it, as its trainer did, with the digests that came from there: what has changed since is refused by who gets it.

        Args:
            deadline: `time.monotonic()` value.
            cancelled: asked while waiting.

        Raises:
            TransportFailed, Aborted: see `Channel.post`.
            InternalError: manifest and bytes do not belong together.
        """
        plan = plan_buckets(self.manifest, self.head.bucket_bytes)
        if plan.hash != self.head.plan_hash or len(self.digests) != len(self.manifest.tensors):
            raise InternalError(f"what is kept of update {self.head.update_id} does not fit together", hint="Sync again")
        runs = ((self.data[bucket.start : bucket.start + bucket.nbytes], self.digests[list(bucket.complete)]) for bucket in plan.buckets)
        send_all(channel, (parts(run, digests) for run, digests in runs), deadline, cancelled)


def folder_of(order: BeginOrder, rank: int) -> Folder | None:
    """Where the worker of this rank within its engine keeps an update; None where it does not. One has all of the tensors, for all."""
    return Folder(Path(order.keep_in)) if order.keep_in and not rank else None


def _write(path: Path, data: bytes) -> None:
    """All of a file or none of it."""
    beside = path.with_name(f"{path.name}.{time.monotonic_ns():x}.part")
    beside.write_bytes(data)
    beside.replace(path)
