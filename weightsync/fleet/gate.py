"""What stands before an engine's OpenAI-compatible application: an allow-list, a key, readiness.

vLLM's application has some three dozen routes, among them ones that generate
without a key and ones that change the engine. Only the four below pass, only
with the fleet's token, and only while the engine holds a committed version.
While an update is applied requests pass and wait inside vLLM (under
`sync.caches = salt` in `salt`). When an engine goes out of service vLLM ends those that
it knows; one that stands in its tokenisation would reach a paused engine behind that and
wait for the next update. So whatever has not ended shortly after is ended here.

Not covered: rate limits.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weightsync.errors import AuthError, NoEngineReady, Refused, WeightSyncError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: How long vLLM has to answer the requests that it ended.
_ANSWERED_SECONDS = 1.0

ALLOWED = {
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/inference/v1/generate"),
}


class Gate:
    """ASGI middleware.

    Args:
        app: the application behind it.
        token: the only bearer token that passes.
        refusal: None while the engine may serve, else why not.
        max_request_bytes: largest body.
    """

    def __init__(self, app: Any, token: str, refusal: Callable[[], str | None], max_request_bytes: int) -> None:
        self._app, self._token, self._refusal, self._limit = app, token.encode(), refusal, max_request_bytes
        self._inside: set[asyncio.Task[None]] = set()
        self._ending: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets pass
        if not has_token(scope, self._token):
            error: WeightSyncError = AuthError("this engine wants the fleet's bearer token", hint="Send `Authorization: Bearer <token>`")
            await refuse(error, send)
        elif (scope["method"], scope["path"]) not in ALLOWED:
            error = Refused(
                f"{scope['method']} {scope['path'][:100]} is not served here", hint=f"Served: {sorted(path for _, path in ALLOWED)}"
            )
            await refuse(error, send, 404)
        elif (reason := self._refusal()) is not None:
            await _refuse_now(reason, send)
        elif (bounded := await bound(scope, receive, self._limit)) is None:
            await refuse(Refused(f"the request is larger than {self._limit} bytes"), send, 413)
        elif (reason := self._refusal()) is not None:  # since the body began to come; a paused engine would keep the request for ever
            await _refuse_now(reason, send)
        else:
            await self._pass(scope, bounded, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal began
            began = True
            await send(message)

        inside = asyncio.ensure_future(self._app(scope, receive, noting))
        self._inside.add(inside)
        try:
            await asyncio.wait([inside])
        finally:
            self._inside.discard(inside)
            if not inside.done():  # the server gave the request up
                inside.cancel()
        if not inside.cancelled():
            inside.result()
        elif not began:
            await _refuse_now(self._refusal() or "it went out of service", send)
        # An answer that has begun and does not go on: the connection breaks off, which its reader can tell from an end.

    @property
    def inside(self) -> int:
        """Requests that have passed and whose answers are not out."""
        return len(self._inside)

    def end_soon(self) -> None:
        """Out of service: end what has passed and has not been answered when vLLM's own answers are out."""
        if self._ending is not None:
            self._ending.cancel()
        passed = tuple(self._inside)
        self._ending = asyncio.get_running_loop().call_later(_ANSWERED_SECONDS, self._end, passed)

    def _end(self, passed: tuple[asyncio.Task[None], ...]) -> None:
        if self._refusal() is not None:  # else an update has come meanwhile, and they go on
            for inside in passed:
                inside.cancel()


def has_token(scope: Scope, token: bytes) -> bool:
    """Whether `Authorization: Bearer` carries the token; compared in constant time. An empty token fits nobody."""
    scheme, _, given = header(scope, b"authorization").partition(b" ")
    return bool(token) and scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token)


async def bound(scope: Scope, receive: Receive, limit: int) -> Receive | None:
    """Read a request's body; a `receive` that gives it again, None if it is larger than `limit` bytes, announced or not."""
    length = header(scope, b"content-length") or b"0"
    if not length.isdigit() or len(length) > 18 or int(length) > limit:
        return None
    body = bytearray()
    message = await receive()
    while message["type"] == "http.request":
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        if not message.get("more_body", False):
            message = {"type": "http.request", "body": bytes(body), "more_body": False}
            break
        message = await receive()
    waiting = [message]  # the whole body, or that the client left

    async def again() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return again


def header(scope: Scope, name: bytes) -> bytes:
    """A header's value; the first where it comes twice, empty without it."""
    value: bytes = next((value for key, value in scope["headers"] if key.lower() == name), b"")
    return value


async def _refuse_now(reason: str, send: Send) -> None:
    hint = "Ask another engine, or try again after the next update"
    await refuse(NoEngineReady(f"this engine does not serve now: {reason}", hint=hint), send)


async def refuse(error: WeightSyncError, send: Send, status: int | None = None) -> None:
    """Answer an HTTP request with an error, under its own status or the one given."""
    body = json.dumps({"error": error.to_dict()}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retryable:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status or error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
