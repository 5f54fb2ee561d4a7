"""The version that a request begins with: named in the head of its answer, and under `sync.caches = salt` carried into vLLM.

Under every policy the header `x-weightsync-version` of an answer says which version the engine
held when the request came, and no token of the answer is older. `/inference/v1/generate` says
more: which version sampled which token.

Under `salt` every request carries that version as vLLM's `cache_salt`. vLLM hashes the salt
into a request's first block, and every block's hash into the next one's. So a request finds only
what was computed under the same salt, and an update drops nothing: what begins behind it finds
nothing of the old weights, and requests in flight keep their blocks.

Such a request begins with the version that its engine holds; while one is being
applied it waits here for the verdict (one that was let through a moment before
counts as in flight). A conversation keeps the version of its
first turn by sending the header `x-weightsync-version` of that turn's answer
with every later turn. A version above the engine's own counts as the engine's
own, since blocks computed now must not be found under a later version. A
client's own `cache_salt` stays in force beside ours.

Not covered: later versions that an answer of OpenAI's routes reaches into; requests that read no
prefix cache anyway (prompt log-probabilities); caches outside vLLM's blocks, which `config` and
`vllm_api` refuse under `salt`.
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


def versioned(app: Any, policy: str, settled: Callable[[], Awaitable[int | None]], held: Callable[[], int | None]) -> Any:
    """vLLM's application behind the middleware that a policy in `sync.caches` takes.

    Args:
        settled: see `Salt`.
        held: see `Stamp`.
    """
    return Salt(app, settled) if policy == "salt" else Stamp(app, held)


class Stamp:
    """ASGI middleware behind the gate, for policies without a salt. Requests pass at once, also while an update is applied.

    Args:
        app: vLLM's application.
        version: the one that tokens are stamped with, None before the first; it is another before an update's requests go on, whatever
            else the engine still does for that update.
    """

    def __init__(self, app: Any, version: Callable[[], int | None]) -> None:
        self._app, self._version = app, version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "http" and scope["method"] == "POST"
        version = self._version() if generates else None
        await self._app(scope, receive, send if version is None else _naming(version, send))


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

        headers = [(key, value) for key, value in scope["headers"] if key.lower() != b"content-length"]
        await self._app({**scope, "headers": [*headers, (b"content-length", b"%d" % len(body))]}, again, _naming(version, send))


def _naming(version: int, send: Send) -> Send:
    """A `send` that names the version in the answer's head."""

    async def answer(outgoing: MutableMapping[str, Any]) -> None:
        if outgoing["type"] == "http.response.start":
            outgoing = {**outgoing, "headers": [*outgoing.get("headers", ()), (HEADER, b"%d" % version)]}
        await send(outgoing)

    return answer


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
