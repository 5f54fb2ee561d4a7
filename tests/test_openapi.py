"""Schemathesis asks the API what its own description allows and what it forbids: every answer is as described, and none a fault of ours.

Updates go through the real controller, whose engines are made up; so do sleep, pauses and samples. Pins, scaling and contracts are answered
by a stand-in. Not covered: order of calls by links between them; bodies near the limit (`test_api.py`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.pages import TOKEN, served
from tests.test_controller import Roster
from tests.test_ledger import verdict
from weightsync import config
from weightsync.api import app as api
from weightsync.api import examples
from weightsync.codec import decode
from weightsync.errors import Refused, WeightSyncError
from weightsync.fleet.controller import Controller
from weightsync.fleet.ledger import Update
from weightsync.protocol import (
    Admission,
    EngineStatus,
    EngineVerdict,
    FleetCheck,
    FleetStatus,
    Observation,
    Tallies,
    UpdateRequest,
    UpdateStatus,
)

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
checks = pytest.importorskip("schemathesis.checks")


class Engines(Roster):
    """Two engines that do as they are told."""

    async def abort(self, update_id: str, ordinals: Any = ()) -> None:
        await super().abort(update_id)

    async def halt(self, order: str, engines: list[int], timeout_seconds: float) -> None:
        if set(engines) - {0, 1}:
            raise Refused("no such engine")

    async def commit(self, update: Update, ordinal: int) -> EngineVerdict:
        return verdict(ordinal, update.request.version)


class Asked:
    """The real controller, made in the loop that asks it; what needs Ray is answered from the examples."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._controller = folder, None
        self.methods: set[str] = set()

    async def ask(self, method: str, *args: Any, timeout_seconds: float) -> Any:
        self.methods.add(method)
        if method in ("pin", "unpin", "scale"):
            return examples.STATUS
        if method in ("contract", "check"):
            return {"contract": examples.CONTRACT, "check": examples.CHECK}[method]
        if self._controller is None:
            self._controller = Controller(config.dump(config.load({"engine.model": self._folder})))
            self._controller._roster = Engines(self._controller)  # type: ignore[assignment]
        answer = await getattr(self._controller, method)(*args)
        if "error" in answer:
            raise WeightSyncError.from_dict(answer["error"])
        return answer["value"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Asked]]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    asked = Asked(folder)
    with served(asked) as url:
        yield url, asked


class Nobody:
    async def ask(self, method: str, *args: Any, timeout_seconds: float) -> Any:
        raise AssertionError("the description is made without the fleet")


DOCUMENT = api.build(Nobody(), lambda: TOKEN, 1, 1 << 16, 5.0).openapi()
described = schemathesis.openapi.from_dict(DOCUMENT)
#: What a described request may be refused for by the controller, which knows more than its form; and routes are called in no order.
LEFT_OUT = [checks.CHECKS.get_one(name) for name in ("positive_data_acceptance", "use_after_free", "ensure_resource_availability")]


@described.auth()
class Token:
    """Given, and left out where schemathesis sees whether it may be."""

    def get(self, case: Any, context: Any) -> str:
        return TOKEN

    def set(self, case: Any, data: str, context: Any) -> None:
        case.headers["authorization"] = f"Bearer {data}"


def _answers(path: str, method: str) -> Any:
    """The test of one route, under a name of its own: schemathesis gives all that it makes of one function the same, and pytest-xdist
    runs one test of each name."""

    @described.include(path=path, method=method).parametrize()
    @settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    def test(case: Any, service: tuple[str, Asked]) -> None:
        # That the fleet is not ready is told with 503.
        left_out = [*LEFT_OUT, checks.not_a_server_error] if case.path == "/readyz" else LEFT_OUT
        case.call_and_validate(base_url=service[0], excluded_checks=left_out)

    return test


ROUTES = [(found.ok().path, found.ok().method) for found in described.get_all_operations()]
for path, method in ROUTES:
    name = re.sub(r"\W+", "_", f"{method} {path}").strip("_").lower()
    globals()[f"test_every_answer_is_as_described_and_none_is_a_fault_{name}"] = _answers(path, method)


def test_the_controller_was_really_asked(service: tuple[str, Asked]) -> None:
    """Behind the others: an API that refused everything would pass them."""
    assert {"status", "metrics", "updates", "update", "begin", "commit", "abort", "rest", "pause", "resume", "pin", "observe"} <= service[
        1
    ].methods
    assert threading.active_count() > 1


@pytest.mark.parametrize(
    ("message", "example"),
    [
        (FleetStatus, examples.STATUS),
        (EngineStatus, examples.ENGINE),
        (UpdateStatus, examples.UPDATE),
        (UpdateRequest, examples.REQUEST),
        (Admission, examples.ADMISSION),
        (FleetCheck, examples.CHECK),
        (Tallies, examples.TALLIES),
        (Observation, examples.OBSERVATION),
    ],
)
def test_an_example_is_one(message: type[Any], example: dict[str, Any]) -> None:
    decode(message, example)


def test_every_answer_that_has_content_has_an_example_or_is_plain() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                content = answer.get("content", {}).get("application/json", {})
                if path.startswith("/v1") and status.startswith("2"):
                    assert content["example"], path
                    assert operation["security"] == [{"HTTPBearer": []}]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            assert not body or "example" in body or "$ref" in str(body["schema"]), path
