"""Every route of the API under every token and every spelling of its path, and blobs that would run if they were unpickled.

A table of its own, made from the application's routes: a route that is added is in it. The controller is a stand-in.

Not covered: what each route does (`test_api.py`), and engines' own applications (`test_gate.py`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from starlette.testclient import TestClient

from tests.test_api import GUARDED, LIMIT, OPEN, TOKEN, Bomb, Controller, error_of
from weightsync.api import app as api

PREFIX = "/behind/a-proxy"
DESCRIPTION = ["/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"]
#: What the controller is not asked for.
PLAIN = ["/", "/livez", *DESCRIPTION]
ROUTES = [*GUARDED, *(("GET", path) for path in dict.fromkeys([*OPEN, *PLAIN]))]
#: A body that each route takes; others are taken without.
BODIES: dict[str, Any] = {
    "/v1/updates": {"update_id": "u-1"},
    "/v1/check": {},
    "/v1/observe": {"tallies": []},
    "/v1/sleep": {},
    "/v1/wake": {},
    "/v1/pause": {},
    "/v1/resume": {},
    "/v1/scale": {"engines": 2},
    "/v1/pin": {"name": "eval", "version": 3},
    "/v1/unpin": {"name": "eval"},
}
TOKENS = {"none": {}, "wrong": {"authorization": "Bearer wrong"}, "right": {"authorization": f"Bearer {TOKEN}"}}
SPELLINGS = {
    "plain": lambda path: path,
    "doubled": lambda path: f"/{path}",
    "slashed": lambda path: f"{path}/",
    "prefixed": lambda path: PREFIX + path,
}


def application(controller: Controller) -> FastAPI:
    return api.build(controller, lambda: TOKEN, min_ready=1, max_request_bytes=LIMIT, control_seconds=5.0)


@pytest.fixture(scope="module", params=["", PREFIX], ids=["at the root", "under a root path"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[TestClient, Controller]]:
    controller = Controller()
    with TestClient(application(controller), raise_server_exceptions=False, root_path=request.param, follow_redirects=False) as made:
        made.prefix = request.param  # type: ignore[attr-defined]
        yield made, controller


@pytest.fixture
def client(served: tuple[TestClient, Controller]) -> TestClient:
    return served[0]


@pytest.fixture
def controller(served: tuple[TestClient, Controller]) -> Controller:
    served[1].calls.clear()
    return served[1]


def test_the_table_has_every_route_that_there_is() -> None:
    found = {
        (method, route.path.replace("{update_id}", "u-1").replace("{ordinal}", "0"))  # type: ignore[attr-defined]
        for route in application(Controller()).routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert found == set(ROUTES)


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_route_with_each_token_in_each_spelling(client: TestClient, controller: Controller, token: str, spelling: str) -> None:
    for method, path in ROUTES:
        controller.calls.clear()
        body = BODIES.get(path) if method == "POST" else None
        response = client.request(method, f"http://testserver{SPELLINGS[spelling](path)}", headers=TOKENS[token], json=body)
        asked, what = [call[0] for call in controller.calls], f"{method} {path}: {response.status_code} {response.text[:200]}"
        # Behind a proxy that takes the prefix away, or does not: either way it is the same route.
        is_route = spelling == "plain" or (spelling == "prefixed" and client.prefix != "")  # type: ignore[attr-defined]
        if (not is_route or path.startswith("/v1")) and token != "right":
            assert (response.status_code, error_of(response).code, asked) == (401, "auth", []), what
        elif is_route:
            assert 200 <= response.status_code < 300, what
            assert len(asked) == (path not in PLAIN), what
        elif spelling == "slashed" and path != "/":
            assert (response.status_code, response.headers["location"], asked) == (307, f"http://testserver{path}", []), what
        else:
            assert (response.status_code, error_of(response).code, asked) == (404, "refused", []), what


def saved(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": bomb}, file)
    return file.getvalue()


BLOBS = {"pickle": lambda bomb: pickle.dumps(bomb), "torch.save": saved}
TYPES = ["application/json", "application/octet-stream", "application/x-pickle", "multipart/form-data; boundary=x", None]


@pytest.mark.parametrize("content_type", TYPES)
@pytest.mark.parametrize("blob", BLOBS)
def test_a_blob_that_is_posted_is_refused_and_nothing_else(
    client: TestClient, controller: Controller, tmp_path: Path, content_type: str | None, blob: str
) -> None:
    marker = tmp_path / "unpickled"
    content = BLOBS[blob](Bomb(marker))
    headers = {**TOKENS["right"], **({"content-type": content_type} if content_type else {})}
    for path in sorted({path for _, path in ROUTES}):
        response = client.post(path, content=content, headers=headers)
        assert 400 <= response.status_code < 500, f"{path}: {response.text[:200]}"
        assert error_of(response).code == "refused"
        assert controller.calls == [] and not marker.exists(), path


@pytest.mark.parametrize("blob", BLOBS)
def test_the_blobs_are_live(blob: str, tmp_path: Path) -> None:
    content = io.BytesIO(BLOBS[blob](Bomb(tmp_path / "unpickled")))
    pickle.load(content) if blob == "pickle" else torch.load(content, weights_only=False)
    assert (tmp_path / "unpickled").exists()
