"""Under `sync.caches = salt`: every request carries the version that it began with as vLLM's `cache_salt`.

vLLM hashes the salt into a request's first block, and every block's hash into
the next one's. So a request finds only what was computed under the same salt,
and an update drops nothing: what begins behind it finds nothing of the old
weights, and requests in flight keep their blocks.

A request begins with the version that its engine holds; while one is being
applied it waits here for the verdict (one that was let through a moment before
counts as in flight). A conversation keeps the version of its
first turn by sending the header `x-weightsync-version` of that turn's answer
with every later turn. A version above the engine's own counts as the engine's
own, since blocks computed now must not be found under a later version. A
client's own `cache_salt` stays in force beside ours.

Not covered: requests that read no prefix cache anyway (prompt log-probabilities);
caches outside vLLM's blocks, which `config` and `vllm_api` refuse under this policy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weightsync.errors import NoEngineReady, Refused
from weightsync.fleet.gate import header
from weightsync.fleet.inside import Receive, Scope, Send, refuse
from weightsync.protocol import MAX_VERSION

HEADER = b"x-weightsync-version"
_LONGEST = 128  # what vLLM takes


class Salt:
    """ASGI middleware behind the gate, which hands on a body as one message.

    Args:
        app: vLLM's application.
        version: waits until no update is being applied; the version that the engine holds then, None if it may not serve.
    """

    def __init__(self, app: Any, version: Callable[[], Awaitable[int | None]]) -> None:
        self._app, self._version = app, version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        message = await receive()
        if message["type"] != "http.request":
            return  # the client left
        try:
            named = _named(scope)
            request = _object(message["body"])
        except Refused as error:
            await refuse(error, send, 400)
            return
        held = await self._version()
        if held is None:
            await refuse(NoEngineReady("the update failed on this engine", hint="Ask another engine, or try again"), send)
            return
        version = held if named is None else min(named, held)
        request["cache_salt"] = salted(request.get("cache_salt"), version)
        body = json.dumps(request).encode()
        waiting = [{**message, "body": body}]

        async def again() -> MutableMapping[str, Any]:
            return waiting.pop() if waiting else await receive()

        async def answer(outgoing: MutableMapping[str, Any]) -> None:
            if outgoing["type"] == "http.response.start":
                outgoing = {**outgoing, "headers": [*outgoing.get("headers", ()), (HEADER, b"%d" % version)]}
            await send(outgoing)

        headers = [(key, value) for key, value in scope["headers"] if key.lower() != b"content-length"]
        await self._app({**scope, "headers": [*headers, (b"content-length", b"%d" % len(body))]}, again, answer)


def salted(own: Any, version: int) -> Any:
    """The salt of a request: the version, and the client's own behind it. What vLLM would refuse stays as it is."""
    if own is None:
        return str(version)
    if not isinstance(own, str) or not 0 < len(own) <= _LONGEST:
        return own
    both = f"{version}.{own}"
    return both if len(both) <= _LONGEST else f"{version}.{hashlib.sha256(own.encode(errors='surrogatepass')).hexdigest()}"


def _named(scope: Scope) -> int | None:
    text = header(scope, HEADER)
    if not text:
        return None
    if not text.isdigit() or len(text) > 16 or int(text) > MAX_VERSION:
        raise Refused(f"{HEADER.decode()}: got {text[:40]!r}, want a version", hint="Send the header of the first turn's answer as it was")
    return int(text)


def _object(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise Refused("the body is not a JSON object", hint="Send JSON, as the OpenAI API has it")
    return request
