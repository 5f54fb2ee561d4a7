"""The gate before an engine's application: four routes, one key, one limit, and only while the engine may serve."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Iterable, MutableMapping
from typing import Any

import httpx
import pytest

from weightsync.errors import EngineDied, WeightSyncError
from weightsync.fleet.gate import ALLOWED, Gate, http_settings

TOKEN = "right-token"
LIMIT = 1000


class Application:
    """Stands for vLLM's: remembers what reached it, and reads the whole body."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.after_body: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append((scope["type"], scope.get("path", "")))
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                self.after_body.append(message["type"])
                return
            body, more = body + message["body"], message.get("more_body", False)
        self.bodies.append(body)
        self.after_body.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})


class Answer:
    def __init__(self, messages: list[MutableMapping[str, Any]]) -> None:
        self.messages = messages
        self.status: int | None = messages[0]["status"] if messages else None
        self.headers: dict[bytes, bytes] = dict(messages[0]["headers"]) if messages else {}
        self.body = b"".join(message.get("body", b"") for message in messages)

    @property
    def error(self) -> WeightSyncError:
        assert int(self.headers[b"content-length"]) == len(self.body)
        return WeightSyncError.from_dict(json.loads(self.body)["error"])


def ask(
    application: Application,
    method: str = "POST",
    path: str = "/v1/completions",
    *,
    token: str | None = TOKEN,
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: Iterable[bytes] = (b"{}",),
    kind: str = "http",
    refusal: str | None = None,
    gate_token: str = TOKEN,
    limit: int = LIMIT,
) -> Answer:
    """One request; `body` comes in these pieces."""
    sent: list[MutableMapping[str, Any]] = []
    pieces = list(body)
    incoming: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces) - 1} for number, piece in enumerate(pieces)
    ]

    async def receive() -> dict[str, Any]:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    all_headers = [*([(b"authorization", f"Bearer {token}".encode())] if token is not None else []), *headers]
    scope = {"type": kind, "method": method, "path": path, "raw_path": path.encode(), "headers": all_headers}
    asyncio.run(Gate(application, gate_token, lambda: refusal, limit)(scope, receive, send))
    return Answer(sent)


# --- connections -------------------------------------------------------------------------------


def test_clients_close_idle_connections_before_the_server_does() -> None:
    # At the same age, a request sent at that moment meets a server that is just closing: refused by nobody, and lost.
    theirs = httpx.Limits().keepalive_expiry
    assert theirs is not None and http_settings(Application(), 1).timeout_keep_alive > 5 * theirs


@pytest.mark.parametrize("module", ["weightsync.api.server", "weightsync.fleet.engine_actor"])
def test_both_servers_are_set_so(module: str) -> None:
    source = inspect.getsource(importlib.import_module(module))
    assert "http_settings(" in source and "uvicorn.Config" not in source


# --- routes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), sorted(ALLOWED))
def test_what_rollouts_need_passes(method: str, path: str) -> None:
    application = Application()
    answer = ask(application, method, path)
    assert (answer.status, answer.body) == (200, b"served")
    assert application.reached == [("http", path)]


def test_no_more_than_four_routes_pass() -> None:
    assert {
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("POST", "/inference/v1/generate"),
    } == ALLOWED


@pytest.mark.parametrize(
    "path",
    [
        "//v1/completions",
        "/v1//completions",
        "/v1/completions/",
        "/v1/completions//",
        "/v1/%63ompletions",
        "/v1/%2e/completions",
        "/v1/./completions",
        "/v1/../v1/completions",
        "/v1/models/../completions",
        "/V1/completions",
        "/v1/completions;x",
        "/v1/completions?x",
        "/v1/completions\0",
        "/v1/completions ",
        " /v1/completions",
        "v1/completions",
        "",
        "/",
        "*",
        "http://engine/v1/completions",
        "/v1/completions/render",
        "/v1/embeddings",
        "/v1/responses",
        "/metrics",
        "/health",
        "/version",
        "/docs",
        "/openapi.json",
        "/tokenize",
        "/sleep",
        "/collective_rpc",
        "/pause",
        "/reset_prefix_cache",
        "/update_weights",
        "/init_weight_transfer_engine",
        "/invocations",
        "/generative_scoring",
    ],
)
def test_nothing_else_passes_however_it_is_spelt(path: str) -> None:
    application = Application()
    answer = ask(application, "POST", path)
    assert answer.status == 404
    assert answer.error.code == "refused"
    assert application.reached == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("post", "/v1/completions"),
        ("Post", "/v1/completions"),
        ("GET", "/v1/completions"),
        ("PUT", "/v1/completions"),
        ("OPTIONS", "/v1/completions"),
        ("HEAD", "/v1/models"),
        ("get", "/v1/models"),
        ("POST", "/v1/models"),
        ("CONNECT", "/inference/v1/generate"),
    ],
)
def test_a_route_passes_with_its_own_method_alone(method: str, path: str) -> None:
    application = Application()
    assert ask(application, method, path).status == 404
    assert application.reached == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/realtime"])
def test_no_websocket_passes(path: str) -> None:
    application = Application()
    ask(application, "GET", path, kind="websocket")
    assert application.reached == []


def test_the_applications_start_and_end_pass() -> None:
    application = Application()
    ask(application, kind="lifespan")
    assert [kind for kind, _ in application.reached] == ["lifespan"]


# --- the key -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Bearer right-token2",
        b"Bearer right-toke",
        b"Bearer RIGHT-TOKEN",
        b"Basic right-token",
        b"right-token",
        b"Bearer right-token, Bearer x",
        b"Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/sleep")])
def test_nothing_passes_without_the_token(header: bytes | None, method: str, path: str) -> None:
    application = Application()
    headers = [] if header is None else [(b"authorization", header)]
    answer = ask(application, method, path, token=None, headers=headers)
    assert answer.status == 401
    assert answer.error.code == "auth"
    assert application.reached == []
    assert TOKEN.encode() not in answer.body


def test_the_refusal_of_a_wrong_token_does_not_say_which_routes_there_are() -> None:
    application = Application()
    assert ask(application, path="/sleep", token="wrong").body == ask(application, path="/v1/completions", token="wrong").body


@pytest.mark.parametrize("given", [None, "", " ", "x"])
def test_an_engine_with_an_empty_token_serves_nobody(given: str | None) -> None:
    application = Application()
    assert ask(application, token=given, gate_token="").status == 401
    assert application.reached == []


@pytest.mark.parametrize("header", [b"Bearer right-token", b"bearer right-token", b"BEARER  right-token "])
def test_the_schemes_spelling_does_not_matter(header: bytes) -> None:
    assert ask(Application(), token=None, headers=[(b"authorization", header)]).status == 200


# --- readiness ---------------------------------------------------------------------------------


def test_an_engine_that_must_not_serve_says_to_come_back() -> None:
    application = Application()
    answer = ask(application, refusal="pending_weights")
    assert answer.status == 503
    assert answer.headers[b"retry-after"] == b"1"
    assert answer.error.code == "no_engine_ready"
    assert answer.error.retryable
    assert "pending_weights" in answer.error.message
    assert application.reached == []


def test_readiness_is_asked_for_each_request_and_told_to_nobody_without_the_token() -> None:
    application = Application()
    reasons: list[str | None] = [None, "quarantined", None]
    assert [ask(application, refusal=reason).status for reason in reasons] == [200, 503, 200]
    answer = ask(application, refusal="quarantined", token="wrong")
    assert answer.status == 401
    assert b"quarantined" not in answer.body


def test_other_refusals_do_not_say_to_come_back() -> None:
    assert b"retry-after" not in ask(Application(), token="wrong").headers
    assert b"retry-after" not in ask(Application(), path="/sleep").headers


# --- the body ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [b"1001", b"99999999999999999999", b"9" * 5000, b"-1", b"1e3", b"abc", b"0x10", b" 5"])
def test_a_body_announced_as_too_large_or_wrongly_is_refused_unread(length: bytes) -> None:
    application = Application()
    answer = ask(application, headers=[(b"content-length", length)])
    assert answer.status == 413
    assert answer.error.message == f"the request is larger than {LIMIT} bytes"
    assert application.reached == []


def test_a_body_up_to_the_limit_passes_whole() -> None:
    application = Application()
    body = bytes(range(256)) * 3 + b"x" * (LIMIT - 768)
    assert ask(application, headers=[(b"Content-Length", b"1000")], body=[body]).status == 200
    assert ask(application, body=[body]).status == 200
    assert application.bodies == [body, body]


@pytest.mark.parametrize("pieces", [[b"x" * 1001], [b"x" * 600, b"x" * 600], [b"x"] * 1001, [b"x" * 1000, b"", b"x"]])
def test_a_body_that_grows_too_large_unannounced_is_refused(pieces: list[bytes]) -> None:
    # Chunked encoding announces no length.
    application = Application()
    answer = ask(application, body=pieces)
    assert answer.status == 413
    assert application.reached == []


def test_a_body_longer_than_announced_is_refused() -> None:
    application = Application()
    assert ask(application, headers=[(b"content-length", b"5")], body=[b"x" * 2000]).status == 413
    assert application.reached == []


def test_a_body_in_pieces_arrives_whole_and_what_comes_behind_it_too() -> None:
    application = Application()
    assert ask(application, body=[b"ab", b"", b"cd", b"e"]).status == 200
    assert application.bodies == [b"abcde"]
    # vLLM ends a request when its client leaves, so it must go on hearing of that.
    assert application.after_body == ["http.disconnect"]


def test_a_client_that_leaves_in_mid_body_leaves_the_application_too() -> None:
    application = Application()
    ask(application, body=[])
    assert application.after_body == ["http.disconnect"]
    assert application.bodies == []


def test_an_engine_that_is_out_when_the_body_has_come_does_not_get_the_request() -> None:
    """It is paused, and would keep the request until the next update."""
    application, sent, reasons = Application(), list[MutableMapping[str, Any]](), list[str | None]([None, "apply_failed"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"authorization", f"Bearer {TOKEN}".encode())]}
    asyncio.run(Gate(application, TOKEN, lambda: reasons.pop(0), LIMIT)(scope, receive, send))
    answer = Answer(sent)
    assert (answer.status, application.reached) == (503, [])
    assert answer.error.message == "this engine does not serve now: apply_failed" and answer.error.retryable


# --- out of service -----------------------------------------------------------------------------


class Vllm:
    """Stands for vLLM: a request is tokenised, then waits in the core; the core ends those that it has when it is told to."""

    def __init__(self) -> None:
        self.tokenised, self.core_ends = asyncio.Event(), asyncio.Event()
        self.resumed = asyncio.Event()
        self.cancelled: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind = (await receive())["body"].decode()
        try:
            if kind == "tokenising":
                await self.tokenised.wait()
                await self.resumed.wait()  # it reached the core behind the end of all others
            elif kind == "streaming":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await self.resumed.wait()
            else:
                await self.core_ends.wait()
            if kind != "streaming":
                await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": kind.encode()})
        except asyncio.CancelledError:
            self.cancelled.append(kind)
            raise


async def pass_through(gate: Gate, kind: str) -> Answer:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": kind.encode()}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"authorization", f"Bearer {TOKEN}".encode())]}
    await gate(scope, receive, send)
    return Answer(sent)


def out_of_service(monkeypatch: pytest.MonkeyPatch, updated: bool) -> tuple[Vllm, dict[str, Answer]]:
    """What becomes of requests that have passed when the engine goes out; `updated` again before they are ended."""
    monkeypatch.setattr("weightsync.fleet.gate._ANSWERED_SECONDS", 0.1)
    vllm, reason = Vllm(), [None, "apply_failed"]

    async def run() -> dict[str, Answer]:
        gate = Gate(vllm, TOKEN, lambda: reason[0], LIMIT)
        kinds = ("running", "tokenising", "streaming")
        asked = [asyncio.create_task(pass_through(gate, kind)) for kind in kinds]
        await asyncio.sleep(0.02)
        reason.reverse()
        vllm.core_ends.set()  # finish reason abort, for those that it has
        gate.end_soon()
        vllm.tokenised.set()
        if updated:
            reason.reverse()
            asyncio.get_running_loop().call_later(0.2, vllm.resumed.set)
        answers = await asyncio.wait_for(asyncio.gather(*asked), 2)
        return dict(zip(kinds, answers, strict=True))

    return vllm, asyncio.run(run())


def test_requests_in_an_engine_that_goes_out_of_service_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the core had were answered with a 200 and what there was of it, nothing it might be; one on its way into a core
    that had ended all others hung until the next update."""
    vllm, answers = out_of_service(monkeypatch, updated=False)
    for told in (answers["running"], answers["tokenising"]):
        assert (told.status, told.error.code, told.error.retryable) == (503, "no_engine_ready", True)
        assert "apply_failed" in told.error.message and told.headers[b"retry-after"] == b"1"
    assert [message["type"] for message in answers["streaming"].messages] == ["http.response.start"], "broken off, not ended"
    assert sorted(vllm.cancelled) == ["streaming", "tokenising"]


def test_an_answer_that_has_begun_goes_on_where_an_update_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, answers = out_of_service(monkeypatch, updated=True)
    assert [answers[kind].status for kind in ("running", "tokenising")] == [503, 503]
    assert answers["streaming"].body == b"streaming"
    assert vllm.cancelled == []


DIED = EngineDied("vLLM of engine 3 died while it had this request", engine=3)


class Fails:
    """Stands for vLLM, whose own errors these are: whole, or as an event of a stream that has begun."""

    def __init__(self, status: int, *events: bytes) -> None:
        self._status, self._events = status, events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind = b"text/event-stream" if self._status == 200 else b"application/json"
        await send({"type": "http.response.start", "status": self._status, "headers": [(b"content-type", kind)]})
        for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def failing(application: Any, died: WeightSyncError | None) -> Answer:
    return asyncio.run(pass_through(Gate(application, TOKEN, lambda: None, LIMIT, lambda: died), "any"))


def test_what_vllm_answers_when_it_has_died_is_an_error_that_says_to_come_again() -> None:
    """It was vLLM's own 500, which clients take for the end of the matter."""
    vllms = b'{"error": {"message": "EngineCore encountered an issue", "code": 500}}'
    answer = failing(Fails(500, vllms), DIED)
    assert (answer.status, answer.error.code, answer.error.engine, answer.error.retryable) == (503, "engine_died", 3, True)
    assert answer.headers[b"retry-after"] == b"1"
    alive = failing(Fails(500, vllms), None)
    assert (alive.status, alive.body) == (500, vllms), "a fault of its own while it lives is told as it is"
    assert failing(Fails(400, vllms), DIED).status == 400, "and so is the client's"


def test_a_stream_that_has_begun_ends_with_that_error_when_vllm_dies() -> None:
    tokens, failed = b'data: {"choices": []}\n\n', b'data: {"error": {"message": "EngineCore encountered an issue"}}\n\n'
    answer = failing(Fails(200, tokens, tokens, failed, b"data: [DONE]\n\n"), DIED)
    assert answer.status == 200 and answer.body.startswith(tokens * 2)
    (event,) = answer.body.removeprefix(tokens * 2).strip().split(b"\n\n")
    assert WeightSyncError.from_dict(json.loads(event.removeprefix(b"data: "))["error"]).code == "engine_died"
    assert answer.messages[-1] == {"type": "http.response.body", "body": b""}, "an end, not a connection that breaks off"
    assert failing(Fails(200, tokens, b"data: [DONE]\n\n"), DIED).body == tokens + b"data: [DONE]\n\n", "what was whole by then is"


def test_a_request_that_its_server_gives_up_is_given_up_behind_the_gate_too() -> None:
    vllm = Vllm()

    async def run() -> None:
        asked = asyncio.create_task(pass_through(Gate(vllm, TOKEN, lambda: None, LIMIT), "tokenising"))
        await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.wait([asked])
        await asyncio.sleep(0.02)

    asyncio.run(run())
    assert vllm.cancelled == ["tokenising"]
