"""What stands before an engine's OpenAI-compatible application: an allow-list, a key, readiness.

vLLM's application has some three dozen routes, among them ones that generate
without a key and ones that change the engine. Only the four below pass, only
with the fleet's token, and only while the engine holds a committed version.
While an update is applied requests pass and wait inside vLLM (under
`sync.caches = salt` in `salt`), or are held back or refused here (`draining`). When an engine goes out of service those that
wait for an answer get an error that says to come again, and vLLM ends what it knows of them; one that stands in its
tokenisation would reach a paused engine behind that and wait for the next update, so what has not ended shortly after is
cancelled. Where vLLM itself has died its own answers say so in no form that tells a client to come again; ours take their place.

Not covered: rate limits; a client that leaves while its request is held back (vLLM is told when it passes).
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, MutableMapping
from typing import Any, Literal

import uvicorn

from weightsync.errors import AuthError, NoEngineReady, Refused, WeightSyncError
from weightsync.fleet.inside import Inside, Receive, Request, Scope, Send, refuse

#: How long a connection that carries nothing stays open. Clients must be the first to close theirs (httpx and OpenAI's do so after
#: 5 s, which is uvicorn's own limit too): a request that is on its way while the server closes is lost.
KEEP_ALIVE_SECONDS = 75
#: How long vLLM has to answer the requests that it ended.
_ANSWERED_SECONDS = 1.0

ALLOWED = {
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/inference/v1/generate"),
}


def http_settings(app: Any, grace_seconds: int) -> uvicorn.Config:
    """How an application is served: the service's, and each engine's.

    Args:
        grace_seconds: that requests have to end in, when the server ends.
    """
    return uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=grace_seconds
    )


class Gate:
    """ASGI middleware.

    Args:
        app: the application behind it.
        token: the only bearer token that passes.
        refusal: None while the engine may serve, else why not.
        max_request_bytes: largest body.
        died: what to say when vLLM is dead; None while it lives.

    Attributes:
        inside: requests that have passed and have not been answered.
    """

    def __init__(
        self,
        app: Any,
        token: str,
        refusal: Callable[[], str | None],
        max_request_bytes: int,
        died: Callable[[], WeightSyncError | None] = lambda: None,
    ) -> None:
        self._app, self._token, self._refusal, self._limit, self._died = app, token.encode(), refusal, max_request_bytes, died
        self.inside = Inside()
        self._refusing: WeightSyncError | None = None  # what new requests are told
        self._open = asyncio.Event()  # unset while new requests are held back
        self._open.set()
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
        elif (reason := self._closed(scope)) is not None:
            await refuse(reason, send)
        elif (bounded := await bound(scope, receive, self._limit)) is None:
            await refuse(Refused(f"the request is larger than {self._limit} bytes"), send, 413)
        elif (reason := await self._turn(scope)) is not None:  # since the body began to come; a paused engine would keep it for ever
            await refuse(reason, send)
        else:
            await self._pass(scope, bounded, send)

    def _closed(self, scope: Scope) -> WeightSyncError | None:
        """Why a request can't pass now, nor when those pass that are held back."""
        if (reason := self._refusal()) is not None:
            return out_of_service(reason)
        return self._refusing if _generates(scope) else None

    async def _turn(self, scope: Scope) -> WeightSyncError | None:
        """Wait while new requests are held back; then as `_closed`."""
        while (error := self._closed(scope)) is None and _generates(scope) and not self._open.is_set():
            await self._open.wait()
        return error

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(receive, send, self._died)
        with self.inside.holding(request):
            answered = await request.run(self._app, scope)
        if not answered:
            await refuse(self._gone(), send)

    def _gone(self) -> NoEngineReady:
        """What a request is told that was inside when the engine went out of service."""
        return out_of_service(self._refusal() or "it went out of service")

    def hold(self, new_requests: Literal["wait", "refuse"], refusal: WeightSyncError) -> None:
        """Let no new request pass until `release`: they wait, or get this error, which says to come again."""
        self._refusing = refusal if new_requests == "refuse" else None
        self._open.clear()

    def release(self) -> None:
        self._refusing = None
        self._open.set()

    def look_again(self) -> None:
        """Have those that are held back see whether the engine will still serve them; they wait on if so."""
        if not self._open.is_set():
            self._open.set()
            self._open.clear()

    def end_soon(self) -> None:
        """Out of service: who waits for an answer is told to ask elsewhere; what vLLM has not let go of in a moment is cancelled.

        vLLM's own word would be a whole answer of as many tokens as there are, none at all it may be.
        """
        if self._ending is not None:
            self._ending.cancel()
        passed = tuple(self.inside)
        for request in passed:
            if request.can_end:
                request.end(self._gone())
        self._ending = asyncio.get_running_loop().call_later(_ANSWERED_SECONDS, self._end, passed)

    def _end(self, passed: tuple[Request, ...]) -> None:
        if self._refusal() is not None:  # else an update has come meanwhile, and they go on
            for request in passed:
                request.cancel()


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


def _generates(scope: Scope) -> bool:
    return bool(scope["method"] == "POST")


def out_of_service(reason: str) -> NoEngineReady:
    """What a request is told by an engine that takes none."""
    return NoEngineReady(f"this engine does not serve now: {reason}", hint="Ask another engine, or try again after the next update")
