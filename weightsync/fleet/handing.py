"""What an engine's actor does for engines that come later: it owns what was kept of the last update, and sends it as a trainer would.

The bytes are a file in shared memory that a worker writes (`transport.retained`). It outlives
the engine's processes, so an engine that was restarted can be its own giver. The actor sends
from its own process, over gloo, while its engine serves or starts.

Not covered: which engine gives, and to whom (`rejoin`).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import Any

import torch

from weightsync.codec import decode, encode
from weightsync.config import Settings
from weightsync.errors import Refused
from weightsync.fleet import scratch
from weightsync.fleet.calls import answers
from weightsync.protocol import Adapter, CommunicatorInfo, Retained, UpdateRequest
from weightsync.transport.communicator import Communicator
from weightsync.transport.retained import Folder, Stream

_CPU = torch.device("cpu")


class Handing:
    """One engine's. Coroutines marked `answers` are methods of its actor.

    Attributes:
        _ordinal, _settings: the actor's.
    """

    _ordinal: int
    _settings: Settings
    _folder: Folder | None = None
    _stream: Stream | None = None
    _sending: Communicator | None = None
    _sends = ""  # the update that is being sent; none when it was called off

    def _open_shelf(self, actor: str) -> None:
        """Find what an earlier process of this actor kept; that of other actors under this ordinal is an earlier fleet's.

        Args:
            actor: name of the actor over its restarts.
        """
        own = f"{scratch.shelf_prefix(self._settings.home)}{self._ordinal}-"
        memory = self._settings.sync.retain_folder
        self._folder = Folder(memory / f"{own}{actor[:16]}")
        for other in memory.glob(f"{own}*"):
            if other != self._folder.path:
                shutil.rmtree(other, ignore_errors=True)
        self._folder.tidy()

    def _clear_shelf(self) -> None:
        if self._folder is not None:
            self._folder.clear()

    def _kept(self) -> Retained | None:
        return self._folder.head() if self._folder is not None else None

    def _place(self, order: dict[str, Any]) -> dict[str, Any]:
        """An order with the folder, where it asks to keep the update."""
        return order | {"keep_in": str(self._folder.path)} if order["hand_on"] and self._folder else order

    @answers
    async def offer(self, update_id: str, name: str, seconds: float) -> dict[str, Any]:
        """What this engine keeps, as the request of an update.

        Args:
            update_id: which must be kept here.
            name: of the update that brings it again.
            seconds: the deadline of that one.

        Raises:
            Refused: another one is kept, or nothing.
        """
        if self._folder is None:
            raise Refused(f"engine {self._ordinal} has not started", engine=self._ordinal)
        self._stream = stream = await asyncio.to_thread(self._folder.open, update_id)
        request = UpdateRequest(
            update_id=name,
            trainer_id=f"engine-{self._ordinal}",
            version=stream.head.version,
            manifest=stream.manifest,
            bucket_bytes=stream.head.bucket_bytes,
            plan_hash=stream.head.plan_hash,
            timeout_seconds=seconds,
            transport="gloo",
            torch_version=str(torch.__version__),  # a class of torch's own, which vLLM's messages don't take
            adapter=Adapter.WITH_BASE if stream.head.adapted else Adapter.NONE,
            allow_nonfinite=True,  # the update has passed, with whatever its trainer allowed
        )
        plain: dict[str, Any] = await asyncio.to_thread(encode, request)
        return plain

    @answers
    async def hand_on(self, name: str, info: dict[str, Any], seconds: float) -> None:
        """Send what was offered; returns when it is out.

        Args:
            name: of the update.
            info: `CommunicatorInfo`.
            seconds: deadline.
        """
        stream, self._sends = self._stream, name
        if stream is None:
            raise Refused(f"engine {self._ordinal} has offered nothing", engine=self._ordinal)
        await asyncio.to_thread(self._send, stream, name, decode(CommunicatorInfo, info), time.monotonic() + seconds)

    def _send(self, stream: Stream, name: str, info: CommunicatorInfo, deadline: float) -> None:
        def cancelled() -> bool:
            return self._sends != name

        sync = self._settings.sync
        left = max(0.1, deadline - time.monotonic())
        made = Communicator(info, 0, _CPU, min(left, sync.rendezvous_timeout_seconds), left, sync.interface, cancelled)
        self._sending = made
        try:
            stream.send(made, deadline, cancelled)
        except BaseException:
            made.close()
            raise

    @answers
    async def call_off(self, name: str) -> None:
        """That update has ended, in whatever way: stop sending, and leave its workers."""
        if self._sends == name:
            sending, self._sending, self._stream, self._sends = self._sending, None, None, ""
            if sending is not None:
                await asyncio.to_thread(sending.close)
