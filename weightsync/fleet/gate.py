"""What stands before an engine's OpenAI-compatible application: an allow-list, a key, readiness.

vLLM's application has some three dozen routes, among them ones that generate
without a key and ones that change the engine. Only the four below pass, only
with the fleet's token, and only while the engine holds a committed version.
While an update is applied requests pass and wait inside vLLM.

Not covered: rate limits.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weightsync.errors import AuthError, NoEngineReady, Refused, WeightSyncError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

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
        max_request_bytes: largest body, as announced by its length.
    """

    def __init__(self, app: Any, token: str, refusal: Callable[[], str | None], max_request_bytes: int) -> None:
        self._app, self._token, self._refusal, self._limit = app, token.encode(), refusal, max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets pass
        error = self._check(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await refuse(error, send)

    def _check(self, scope: Scope) -> WeightSyncError | None:
        headers = {key.lower(): value for key, value in scope["headers"]}
        if not has_token(headers, self._token):
            return AuthError("this engine wants the fleet's bearer token", hint="Send `Authorization: Bearer <token>`")
        if (scope["method"], scope["path"]) not in ALLOWED:
            return Refused(
                f"{scope['method']} {scope['path'][:100]} is not served here", hint=f"Served: {sorted(path for _, path in ALLOWED)}"
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limit:
            return Refused(f"the request is larger than {self._limit} bytes")
        reason = self._refusal()
        if reason is not None:
            return NoEngineReady(f"this engine does not serve now: {reason}", hint="Ask another engine, or try again after the next update")
        return None


def has_token(headers: MutableMapping[bytes, bytes], token: bytes) -> bool:
    """Whether `Authorization: Bearer` carries the token; compared in constant time."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token)


async def refuse(error: WeightSyncError, send: Send) -> None:
    """Answer an HTTP request with an error."""
    body = json.dumps({"error": error.to_dict()}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retryable:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
