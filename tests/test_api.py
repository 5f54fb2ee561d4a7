"""The HTTP service: what needs the token, what errors look like, and that nothing hostile gets through.

The controller is a stand-in with the one method that the API calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from weightsync import errors
from weightsync.api import app as api
from weightsync.api.health import readiness
from weightsync.codec import decode, encode
from weightsync.errors import ServiceUnreachable, WeightSyncError
from weightsync.protocol import ContractAnswer, EngineState, EngineStatus, FleetStatus
from weightsync.storage.contract import Kind

TOKEN = "right-token"
LIMIT = 1 << 16
URL, MODEL = "http://10.1.2.3:4567", "secret-model"
OPEN = ["/livez", "/readyz", "/metrics"]
GUARDED = [
    ("GET", "/v1/status"),
    ("GET", "/v1/engines"),
    ("GET", "/v1/engines/0/contract"),
    ("GET", "/v1/targets"),
    ("GET", "/v1/updates"),
    ("GET", "/v1/updates/u-1"),
    ("POST", "/v1/updates"),
    ("POST", "/v1/updates/u-1/commit"),
    ("POST", "/v1/updates/u-1/abort"),
    ("POST", "/v1/check"),
    ("POST", "/v1/sleep"),
    ("POST", "/v1/wake"),
    ("POST", "/v1/pause"),
    ("POST", "/v1/resume"),
    ("POST", "/v1/scale"),
    ("POST", "/v1/pin"),
    ("POST", "/v1/unpin"),
    ("POST", "/v1/observe"),
]
each_guarded = pytest.mark.parametrize(("method", "path"), GUARDED, ids=[f"{method} {path}" for method, path in GUARDED])


def engine(ordinal: int, state: EngineState = EngineState.SERVING, version: int | None = 3) -> EngineStatus:
    return EngineStatus(ordinal, state, version, "u-0", URL, MODEL, 1, "0.32.0", "")


def fleet(*engines: EngineStatus, committed: int | None = 3) -> FleetStatus:
    ready = sum(e.state == EngineState.SERVING and e.version == committed is not None for e in engines)
    return FleetStatus("default", committed, ready, engines, None)


class Controller:
    """Remembers the calls; answers with `answers[method]`, or raises it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {
            "status": encode(fleet(engine(0), engine(1))),
            "metrics": "weightsync_ready_engines 2.0\n",
            "updates": [{"update_id": "u-1"}],
        }

    async def ask(self, method: str, *args: Any, timeout_seconds: float) -> Any:
        self.calls.append((method, *args, timeout_seconds))
        answer = self.answers.get(method, {"method": method})
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        return answer


@pytest.fixture
def controller() -> Controller:
    return Controller()


class _Relay:
    """Asks the controller of the test that runs: an application takes a fifth of a second to build, and there are hundreds of tests."""

    def __init__(self) -> None:
        self.controller = Controller()

    async def ask(self, method: str, *args: Any, timeout_seconds: float) -> Any:
        return await self.controller.ask(method, *args, timeout_seconds=timeout_seconds)


@pytest.fixture(scope="module")
def relay() -> _Relay:
    return _Relay()


@pytest.fixture(scope="module")
def application(relay: _Relay) -> Any:
    return api.build(relay, lambda: TOKEN, min_ready=1, max_request_bytes=LIMIT, control_seconds=5.0)


@pytest.fixture
def bare(application: Any, relay: _Relay, controller: Controller) -> Iterator[TestClient]:
    """A client without the token."""
    relay.controller = controller
    with TestClient(application, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def client(bare: TestClient) -> TestClient:
    bare.headers["authorization"] = f"Bearer {TOKEN}"
    return bare


def error_of(response: Any) -> WeightSyncError:
    """The error of an answer, which must be in our one form."""
    assert response.status_code >= 400
    data = response.json()
    assert set(data) == {"error"}
    assert set(data["error"]) == set(WeightSyncError("x").to_dict())
    return WeightSyncError.from_dict(data["error"])


# --- the token ---------------------------------------------------------------------------------


def test_the_routes_tried_here_are_all_there_are(bare: TestClient) -> None:
    paths = bare.get("/openapi.json").json()["paths"]
    found = {
        (method.upper(), path.replace("{update_id}", "u-1").replace("{ordinal}", "0"))
        for path, methods in paths.items()
        for method in methods
    }
    assert found == set(GUARDED) | {("GET", path) for path in OPEN}


@each_guarded
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \u00ff"]
)
def test_every_route_of_v1_wants_the_token(bare: TestClient, controller: Controller, method: str, path: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = bare.request(method, path, headers=headers, json={} if method == "POST" else None)
    assert response.status_code == 401
    assert error_of(response).code == "auth"
    assert controller.calls == []
    assert TOKEN not in response.text


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "get"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v1/",
        "/v1/status",
        "/v1/status/",
        "/v1//status",
        "//v1/status",
        "/v1/%73tatus",
        "/%761/status",
        "/V1/status",
        "/v1/../v1/status",
        "/v1/x",
    ],
)
def test_no_odd_method_or_path_gets_past_the_token(bare: TestClient, controller: Controller, method: str, path: str) -> None:
    response = bare.request(method, f"http://testserver{path}")
    assert response.status_code in (401, 404, 405)
    assert controller.calls == []
    assert URL not in response.text


def test_a_body_is_not_even_parsed_without_the_token(bare: TestClient) -> None:
    for path in ("/v1/updates", "/v1/updates/u-1/commit", "/v1/updates/u-1/abort"):
        assert bare.post(path, content=b"{not json", headers={"content-type": "application/json"}).status_code == 401
        assert bare.post(path, content=b"x" * (LIMIT + 1)).status_code == 401


def test_the_token_that_is_valid_now_counts(controller: Controller) -> None:
    tokens = ["old"]
    application = api.build(controller, lambda: tokens[0], 1, LIMIT, 5.0)
    with TestClient(application) as client:
        assert client.get("/v1/status", headers={"authorization": "Bearer old"}).status_code == 200
        tokens[0] = "new"
        assert client.get("/v1/status", headers={"authorization": "Bearer old"}).status_code == 401
        assert client.get("/v1/status", headers={"authorization": "Bearer new"}).status_code == 200


def test_an_empty_token_opens_nothing(controller: Controller) -> None:
    with TestClient(api.build(controller, lambda: "", 1, LIMIT, 5.0)) as client:
        assert client.get("/v1/status", headers={"authorization": "Bearer "}).status_code == 401


# --- health ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*OPEN, "/openapi.json"])
def test_health_needs_no_token_and_discloses_neither_address_nor_model(bare: TestClient, path: str) -> None:
    response = bare.get(path)
    assert response.status_code == 200
    for word in (URL, "10.1.2.3", MODEL, TOKEN, "u-0"):
        assert word not in response.text


@pytest.mark.parametrize("path", ["/readyz", "/metrics"])
@pytest.mark.parametrize(
    "failure",
    [ServiceUnreachable(f"the controller is gone: actor at {URL} with {MODEL}", hint=URL, names=[MODEL]), ValueError(f"{URL} {MODEL}")],
    ids=repr,
)
def test_health_discloses_nothing_when_the_controller_fails_either(
    bare: TestClient, controller: Controller, path: str, failure: Exception
) -> None:
    controller.answers |= {"status": failure, "metrics": failure}
    response = bare.get(path)
    assert response.status_code in (500, 503)
    for word in (URL, "10.1.2.3", MODEL):
        assert word not in response.text


def test_health_discloses_nothing_of_an_answer_it_cannot_read(bare: TestClient, controller: Controller) -> None:
    controller.answers["status"] = encode(fleet(engine(0))) | {"fleet": [URL], "committed_version": MODEL}
    response = bare.get("/readyz")
    assert response.status_code == 500
    assert MODEL not in response.text
    assert URL not in response.text


def test_readyz_says_why_in_codes(bare: TestClient, controller: Controller) -> None:
    ready = bare.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "reasons": [], "engines": {"0": "serving", "1": "serving"}})
    controller.answers["status"] = encode(fleet(engine(0, EngineState.QUARANTINED, None)))
    not_ready = bare.get("/readyz")
    assert not_ready.status_code == 503
    assert not_ready.json() == {"ready": False, "reasons": ["too_few_engines_ready", "engine_quarantined"], "engines": {"0": "quarantined"}}
    controller.answers["status"] = ServiceUnreachable("gone")
    gone = bare.get("/readyz")
    assert (gone.status_code, gone.json()) == (503, {"ready": False, "reasons": ["controller_unreachable"], "engines": {}})


def test_metrics_are_plain_text(bare: TestClient) -> None:
    response = bare.get("/metrics")
    assert response.text == "weightsync_ready_engines 2.0\n"
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_livez_answers_while_a_call_to_the_controller_hangs(controller: Controller) -> None:
    async def scenario() -> None:
        hanging = asyncio.Event()
        controller.answers["status"] = hanging
        transport = httpx.ASGITransport(api.build(controller, lambda: TOKEN, 1, LIMIT, 5.0))
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://service", headers=headers) as client:
            calls = [asyncio.create_task(client.get(path)) for path in ("/v1/status", "/readyz")]
            while len(controller.calls) < 2:
                await asyncio.sleep(0)
            began = time.monotonic()
            assert (await asyncio.wait_for(client.get("/livez"), 1.0)).json() == {"status": "alive"}
            assert time.monotonic() - began < 0.5
            assert not any(call.done() for call in calls)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(scenario())


CASES = [
    # (engines, committed, min_ready) → (ready, reasons)
    ((), None, 1, False, ("no_committed_version", "too_few_engines_ready")),
    ((), 3, 1, False, ("too_few_engines_ready",)),
    ((engine(0),), 3, 1, True, ()),
    ((engine(0),), 3, 2, False, ("too_few_engines_ready",)),
    ((engine(0), engine(1)), 3, 2, True, ()),
    ((engine(0, EngineState.PENDING, None),), None, 1, False, ("no_committed_version", "too_few_engines_ready", "engine_pending")),
    ((engine(0), engine(1, EngineState.PENDING, None)), 3, 1, True, ("engine_pending",)),
    ((engine(0), engine(1, EngineState.DEAD, 3)), 3, 1, True, ("engine_dead",)),
    ((engine(0), engine(1, EngineState.DEAD, 3)), 3, 2, False, ("too_few_engines_ready", "engine_dead")),
    ((engine(0), engine(1, EngineState.QUARANTINED, None)), 3, 1, True, ("engine_quarantined",)),
    ((engine(0), engine(1, EngineState.SERVING, 2)), 3, 1, True, ("engine_behind",)),
    ((engine(0), engine(1, EngineState.ASLEEP, 3)), 3, 1, True, ("engine_asleep",)),
    ((engine(0, EngineState.ASLEEP, None),), 3, 1, False, ("too_few_engines_ready", "engine_asleep")),
    ((engine(0), engine(1, EngineState.PAUSED, 3)), 3, 2, False, ("too_few_engines_ready", "engine_paused")),
    ((engine(0), engine(1, EngineState.SILENT, 3)), 3, 1, True, ("engine_silent",)),
    ((engine(0, EngineState.SILENT, 3),), 3, 1, False, ("too_few_engines_ready", "engine_silent")),
    ((engine(0, EngineState.UPDATING, 3),), 3, 1, False, ("too_few_engines_ready",)),
    ((engine(0, EngineState.SERVING, 0),), 0, 1, True, ()),
    ((engine(0), dataclasses.replace(engine(1, EngineState.SERVING, 2), pinned="eval")), 3, 1, True, ()),
]


@pytest.mark.parametrize(("engines", "committed", "min_ready", "ready", "reasons"), CASES)
def test_readiness(engines: tuple[EngineStatus, ...], committed: int | None, min_ready: int, ready: bool, reasons: tuple[str, ...]) -> None:
    verdict = readiness(fleet(*engines, committed=committed), min_ready)
    assert (verdict.ready, verdict.reasons) == (ready, reasons)
    assert verdict.engines == {str(e.engine): str(e.state) for e in engines}
    assert all(re.fullmatch("[a-z_]+", reason) for reason in verdict.reasons)


def test_no_fleet_is_ready_before_its_first_version() -> None:
    assert not readiness(dataclasses.replace(fleet(engine(0), committed=None), ready=1), 1).ready


# --- what reaches the controller ----------------------------------------------------------------


def test_each_route_asks_for_its_own(client: TestClient, controller: Controller) -> None:
    assert client.get("/v1/status").json()["committed_version"] == 3
    assert [e["engine"] for e in client.get("/v1/engines").json()] == [0, 1]
    assert client.get("/v1/updates").json() == [{"update_id": "u-1"}]
    assert client.get("/v1/updates?limit=12").json() == [{"update_id": "u-1"}]
    assert client.get("/v1/updates/u-1").json() == {"method": "update"}
    begun = client.post("/v1/updates", json={"update_id": "u-1", "größe": [1]})
    assert (begun.status_code, begun.json()) == (201, {"method": "begin"})
    assert client.post("/v1/updates/u-1/commit", json={"timeout_seconds": 12.5}).json() == {"method": "commit"}
    assert client.post("/v1/updates/u-1/abort", json={"reason": "skipped"}).json() == {"method": "abort"}
    assert client.post("/v1/sleep", json={"level": 2, "engines": [1], "timeout_seconds": 9}).json() == {"method": "rest"}
    assert client.post("/v1/wake", json={}).json() == {"method": "rest"}
    assert client.post("/v1/pause", json={"engines": [1], "timeout_seconds": 9}).json() == {"method": "pause"}
    assert client.post("/v1/resume", json={}).json() == {"method": "resume"}
    assert client.get("/v1/engines/1/contract").json() == {"method": "contract"}
    assert client.post("/v1/check", json={"engines": [1], "timeout_seconds": 9}).json() == {"method": "check"}
    assert client.post("/v1/scale", json={"engines": 3}).json() == {"method": "scale"}
    assert client.post("/v1/pin", json={"name": "eval", "version": 3}).json() == {"method": "pin"}
    assert client.post("/v1/pin", json={"name": "eval-2.x_Y", "version": 3, "engines": 2}).json() == {"method": "pin"}
    assert client.post("/v1/unpin", json={"name": "eval"}).json() == {"method": "unpin"}
    assert [call[:-1] for call in controller.calls] == [
        ("status",),
        ("status",),
        ("updates", 10_000),
        ("updates", 12),
        ("update", "u-1"),
        ("begin", {"update_id": "u-1", "größe": [1]}, ""),
        ("commit", "u-1", 12.5),
        ("abort", "u-1", "skipped"),
        ("rest", [1], 2, 9.0),
        ("rest", [], 0, 300.0),
        ("pause", [1], 9.0),
        ("resume", [], 300.0),
        ("contract", 1),
        ("check", [1], 9.0),
        ("scale", 3, "wait", 60.0),
        ("pin", "eval", 3, 1),
        ("pin", "eval-2.x_Y", 3, 2),
        ("unpin", "eval"),
    ]
    assert all(call[-1] > 0 for call in controller.calls)
    # The controller's own deadline comes first, so that its answer gets out.
    assert controller.calls[6][-1] > 12.5


def test_bodies_of_commit_and_abort_may_be_left_out(client: TestClient, controller: Controller) -> None:
    assert client.post("/v1/updates/u-1/commit").status_code == 200
    assert client.post("/v1/updates/u-1/abort").status_code == 200
    assert [call[:-1] for call in controller.calls] == [("commit", "u-1", 300.0), ("abort", "u-1", "asked for")]


def test_routers_and_scrapers_find_every_engine_that_has_an_address(client: TestClient, controller: Controller) -> None:
    starting = dataclasses.replace(engine(2, EngineState.PENDING, None), url="")
    old = dataclasses.replace(engine(1, version=2), url="http://10.0.0.2:8001")
    controller.answers["status"] = encode(fleet(dataclasses.replace(engine(0), url="http://10.0.0.1:8000"), old, starting))
    found = client.get("/v1/targets").json()
    assert [group["targets"] for group in found] == [["10.0.0.1:8000"], ["10.0.0.2:8001"]]
    assert [group["labels"]["__meta_weightsync_version"] for group in found] == ["3", "2"]
    assert [group["labels"]["__meta_weightsync_ready"] for group in found] == ["true", "false"]
    assert all(isinstance(value, str) for group in found for value in group["labels"].values()), "Prometheus takes strings alone"


def test_a_pinned_engine_is_told_and_is_not_ready_for_what_comes_without_asking_for_it(client: TestClient, controller: Controller) -> None:
    controller.answers["status"] = encode(fleet(engine(0), dataclasses.replace(engine(1), pinned="eval")))
    labels = [group["labels"] for group in client.get("/v1/targets").json()]
    assert [(one["__meta_weightsync_pin"], one["__meta_weightsync_ready"]) for one in labels] == [("", "true"), ("eval", "false")]


# --- errors ------------------------------------------------------------------------------------

ERRORS = sorted(errors.BY_CODE.values(), key=lambda cls: cls.code)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("retryable", [True, False])
def test_an_error_has_its_status_and_comes_through_whole(
    client: TestClient, controller: Controller, cls: type[WeightSyncError], retryable: bool
) -> None:
    error = cls("it broke", hint="Do that", update_id="u-1", engine=1, phase="apply", names=["a"], retryable=retryable)
    controller.answers["begin"] = error
    response = client.post("/v1/updates", json={})
    assert response.status_code == cls.http_status
    assert response.headers.get("retry-after") == ("1" if retryable else None)
    again = error_of(response)
    assert type(again) is cls
    assert again.to_dict() == error.to_dict()


def test_a_fault_of_ours_is_an_internal_error(client: TestClient, controller: Controller) -> None:
    controller.answers["update"] = RuntimeError("a bug")
    response = client.get("/v1/updates/u-1")
    assert response.status_code == 500
    assert error_of(response).to_dict() == errors.InternalError("RuntimeError: a bug").to_dict()


@pytest.mark.parametrize("path", ["/page.html", "/nothing", "/v1/nothing", "/v1/updates/u-1/nothing", "/v1/updates/../../x", "/metrics/x"])
def test_an_unknown_route_is_404_in_the_same_form(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert error_of(response).code == "refused"


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/v1/status"), ("GET", "/v1/updates/u-1/commit"), ("POST", "/livez")])
def test_a_wrong_method_is_405_in_the_same_form(client: TestClient, method: str, path: str) -> None:
    response = client.request(method, path)
    assert response.status_code == 405
    assert error_of(response).code == "refused"
    assert response.headers["allow"] == ("POST" if path.endswith("commit") else "GET")


# --- bodies ------------------------------------------------------------------------------------

POSTS = [path for method, path in GUARDED if method == "POST"]
JSON = {"content-type": "application/json"}
DEEP = b"[" * 30_000 + b"]" * 30_000


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", [b"{", b"{'a': 1}", b"\xff\xfe", b"nonsense", b'{"a": }', b"\x00"], ids=repr)
def test_a_body_that_is_no_json_is_refused(client: TestClient, controller: Controller, path: str, body: bytes) -> None:
    response = client.post(path, content=body, headers=JSON)
    assert 400 <= response.status_code < 500
    assert error_of(response).code == "refused"
    assert controller.calls == []


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", [DEEP, b'{"a":' * 10_000 + b"1" + b"}" * 10_000], ids=["lists", "objects"])
def test_deeply_nested_json_is_refused(client: TestClient, controller: Controller, path: str, body: bytes) -> None:
    response = client.post(path, content=body, headers=JSON)
    assert 400 <= response.status_code < 500
    assert error_of(response).code == "refused"
    assert controller.calls == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/updates/u-1/commit", {"timeout_seconds": 0}),
        ("/v1/updates/u-1/commit", {"timeout_seconds": -1}),
        ("/v1/updates/u-1/commit", {"timeout_seconds": 86_401}),
        ("/v1/updates/u-1/commit", {"timeout_seconds": "soon"}),
        ("/v1/updates/u-1/commit", {"timeout": 5}),
        ("/v1/updates/u-1/commit", [1]),
        ("/v1/updates/u-1/abort", {"reason": "x" * 301}),
        ("/v1/updates/u-1/abort", {"reason": 1}),
        ("/v1/updates/u-1/abort", {"why": "x"}),
        ("/v1/sleep", {"level": 0}),
        ("/v1/sleep", {"level": 3}),
        ("/v1/wake", {"level": 1}),
        ("/v1/wake", {"engines": "all"}),
        ("/v1/pause", {"level": 1}),
        ("/v1/pause", {"engines": [0.5]}),
        ("/v1/pause", {"engines": [False]}),
        ("/v1/check", {"engines": ["0"]}),
        ("/v1/pin", {"version": True}),
        ("/v1/resume", {"timeout_seconds": 0}),
        ("/v1/pin", {"version": -1, "name": ""}),
        ("/v1/pin", {"version": 2**53, "name": "a b"}),
        ("/v1/pin", {"name": "eval\n"}),
        ("/v1/pin", {"name": "x" * 65}),
        ("/v1/pin", {"engines": 0}),
        ("/v1/unpin", {"version": 3}),
        ("/v1/unpin", {"name": "größe"}),
        ("/v1/scale", {"engines": 0}),
        ("/v1/scale", {"drain": "never"}),
    ],
)
def test_a_field_that_is_not_valid_is_named(client: TestClient, controller: Controller, path: str, body: Any) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 422
    error = error_of(response)
    assert error.code == "refused"
    assert "body" in error.message
    for key in body if isinstance(body, dict) else ():
        assert key in error.message
    assert controller.calls == []


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_refused_announced_or_not(client: TestClient, controller: Controller, path: str, announced: bool) -> None:
    body = b'{"reason": "' + b"x" * LIMIT + b'"}'
    pieces = (body[i : i + 4096] for i in range(0, len(body), 4096))
    response = client.post(path, content=body if announced else pieces, headers=JSON)
    assert response.status_code == 413
    assert f"{LIMIT} bytes" in error_of(response).message
    assert controller.calls == []


def test_a_body_up_to_the_limit_comes_through(client: TestClient, controller: Controller) -> None:
    value = "x" * (LIMIT - len('{"a":""}'))
    body = json.dumps({"a": value}, separators=(",", ":")).encode()
    assert len(body) == LIMIT
    for content in (body, iter([body[:1000], body[1000:]])):
        assert client.post("/v1/updates", content=content, headers=JSON).status_code == 201
    assert [call[1] for call in controller.calls] == [{"a": value}] * 2


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(("method", "path"), [*GUARDED, *(("GET", path) for path in OPEN)])
@pytest.mark.parametrize(
    "content_type", ["application/json", "application/octet-stream", "application/x-pickle", "application/python-pickle", None]
)
@pytest.mark.parametrize("protocol", [0, 5])
def test_nothing_is_ever_unpickled(
    client: TestClient, tmp_path: Path, method: str, path: str, content_type: str | None, protocol: int
) -> None:
    marker = tmp_path / "unpickled"
    blob = pickle.dumps(Bomb(marker), protocol)
    response = client.request(method, path, content=blob, headers={"content-type": content_type} if content_type else {})
    assert response.status_code < 500
    assert not marker.exists()
    pickle.loads(blob)  # the bomb itself is live
    assert marker.exists()


# --- the description ----------------------------------------------------------------------------


def test_openapi_describes_every_route(bare: TestClient) -> None:
    document = bare.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert document["info"]["title"] == "weightsync"
    operations = [(path, method, operation) for path, methods in document["paths"].items() for method, operation in methods.items()]
    assert len({operation["operationId"] for _, _, operation in operations}) == len(operations)
    for path, _, operation in operations:
        assert operation["summary"]
        assert any(status.startswith("2") for status in operation["responses"])
        assert {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"} == set(re.findall(r"{(\w+)}", path))
    for reference in re.findall(r'"\$ref": ?"#/([^"]+)"', json.dumps(document)):
        node = document
        for part in reference.split("/"):
            node = node[part]
    for name in ("CommitBody", "AbortBody"):
        assert document["components"]["schemas"][name]["additionalProperties"] is False


def test_every_body_and_what_it_is_about_has_an_example(bare: TestClient) -> None:
    document = bare.get("/openapi.json").json()
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Body"):
            assert all(field.get("examples") for field in schema["properties"].values()), name
    contract = document["paths"]["/v1/engines/{ordinal}/contract"]["get"]
    example = contract["responses"]["200"]["content"]["application/json"]["example"]
    answers = [decode(ContractAnswer, worker) for worker in example["workers"]]
    assert answers and all(answer.contract is not None for answer in answers)
    assert set(answers[0].contract.slots) == {str(kind) for kind in Kind}  # type: ignore[union-attr]


@pytest.mark.parametrize("ordinal", ["-1", "x", "1.5", "9" * 30])
def test_an_ordinal_that_is_none_is_refused(client: TestClient, controller: Controller, ordinal: str) -> None:
    response = client.get(f"/v1/engines/{ordinal}/contract")
    assert response.status_code == 422 and "ordinal" in error_of(response).message
    assert controller.calls == []


def test_the_pages_of_the_description_load(bare: TestClient) -> None:
    assert bare.get("/docs").status_code == 200
