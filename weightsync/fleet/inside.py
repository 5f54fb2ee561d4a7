"""Requests that have passed an engine's gate and whose answers are not out: counted, waited for, or ended.

A request is ended by telling vLLM's application that its client has left, as vLLM then ends it in the core too; the
client gets the error instead, by its status where no answer has begun, as the last event of a stream that has. So does
one whose vLLM has died: what vLLM says of that is an error of its own, which tells nobody to come again.

Not covered: an answer that is no stream and has begun: it is whole, and goes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from weightsync.errors import WeightSyncError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: How long the application has to end a request whose client has left; then its task is cancelled.
_LEAVE_SECONDS = 1.0
#: How the event begins with which vLLM ends a stream that failed.
_STREAMED_ERROR = b'data: {"error"'


class Request:
    """One request behind the gate.

    Args:
        receive, send: of its client.
        died: what to say when vLLM is dead; None while it lives.

    Attributes:
        began, complete: the answer's head is out; all of it is.
        error: what it was ended with.
    """

    def __init__(self, receive: Receive, send: Send, died: Callable[[], WeightSyncError | None] = lambda: None) -> None:
        self._from_client, self._to_client, self._died = receive, send, died
        self._left = asyncio.get_running_loop().create_future()  # done when the application is to take the client for gone
        self._task: asyncio.Task[None] | None = None
        self._streams = False
        self.began = self.complete = False
        self.error: WeightSyncError | None = None

    async def run(self, app: Any, scope: Scope) -> bool:
        """Have the application answer; says whether the client got something, an error of ours included."""
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))
        try:
            await asyncio.wait([self._task])
        finally:
            if not self._task.done():  # the server gave the request up
                self._task.cancel()
        if self.error is not None:
            if not self._task.cancelled():
                self._task.exception()  # whatever it makes of a client that has left
            await self._tell(self.error)
        elif not self._task.cancelled():
            self._task.result()
        # An answer that has begun and does not go on: the connection breaks off, which its reader can tell from an end.
        return self.began or self.error is not None or not self._task.cancelled()

    @property
    def can_end(self) -> bool:
        return not self.complete and (self._streams or not self.began)

    def end(self, error: WeightSyncError) -> None:
        """Answer with this error, and let vLLM take the client for gone."""
        self.error = error
        if not self._left.done():
            self._left.set_result(None)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _receive(self) -> Message:
        if not self._left.done():
            message = asyncio.ensure_future(self._from_client())
            try:
                await asyncio.wait({message, self._left}, return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    return message.result()
            finally:
                message.cancel()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.error is None and self._fails(message):
            self.error = self._died()
        if self.error is not None:
            return  # what it would tell a client that has left
        if message["type"] == "http.response.start":
            self.began = True
            kinds = [value for key, value in message.get("headers", ()) if key.lower() == b"content-type"]
            self._streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
        await self._to_client(message)
        self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    def _fails(self, message: Message) -> bool:
        """Whether this is vLLM's word that something failed inside."""
        if message["type"] == "http.response.start":
            return int(message["status"]) >= 500
        return self._streams and message.get("body", b"").startswith(_STREAMED_ERROR)

    async def _tell(self, error: WeightSyncError) -> None:
        if self.complete:
            return
        if not self.began:
            await refuse(error, self._to_client)
            return
        event = b"data: " + json.dumps({"error": error.to_dict()}).encode() + b"\n\n"
        await self._to_client({"type": "http.response.body", "body": event, "more_body": True})
        await self._to_client({"type": "http.response.body", "body": b""})


class Inside:
    """All of one engine."""

    def __init__(self) -> None:
        self._requests: set[Request] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    @contextlib.contextmanager
    def holding(self, request: Request) -> Iterator[None]:
        """It is inside as long."""
        self._requests.add(request)
        self._empty.clear()
        try:
            yield
        finally:
            self._requests.discard(request)
            if not self._requests:
                self._empty.set()

    async def drained(self, seconds: float) -> int:
        """Wait, at most so long, until none is left; how many are."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), seconds)
        return len(self)

    async def end(self, error: Callable[[], WeightSyncError]) -> int:
        """End all; how many there were. Returns when they have left the application, or don't."""
        ended = [request for request in self if request.can_end]
        for request in ended:
            request.end(error())
        if await self.drained(_LEAVE_SECONDS):
            for request in self._requests.intersection(ended):
                request.cancel()
            await self.drained(_LEAVE_SECONDS)
        return len(ended)


async def refuse(error: WeightSyncError, send: Send, status: int | None = None) -> None:
    """Answer an HTTP request with an error, under its own status or the one given."""
    body = json.dumps({"error": error.to_dict()}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retryable:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status or error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
