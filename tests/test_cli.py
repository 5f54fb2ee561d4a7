"""What the command line shows and how it ends, against a service without engines or with answers that are given.

Not covered: `serve`, `demo` and `stop` (`test_lifecycle.py`), `check` (`test_check.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.test_api import engine, fleet
from weightsync import cli
from weightsync.codec import encode
from weightsync.errors import ApplyFailed
from weightsync.protocol import FleetStatus

Shows = Callable[..., str]


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shows:
    """What `weightsync status` prints of a fleet."""

    def shown(status: FleetStatus, *flags: str, width: int = 200) -> str:
        class Client:
            def __enter__(self) -> Client:
                return self

            def __exit__(self, *_: object) -> None: ...

            def status(self) -> FleetStatus:
                return status

        monkeypatch.setattr(cli, "_client", lambda _: Client())
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.main(["status", *flags]) == 0
        return capsys.readouterr().out

    return shown


def test_a_status_says_why_an_engine_that_serves_failed_its_last_update(shows: Shows) -> None:
    failed = ApplyFailed("no room [x]", engine=0, update_id="u-1", phase="apply", hint="See its log").to_dict()
    status = fleet(replace(engine(0, version=2), failed=failed), engine(1))
    said = shows(status)
    assert "engine 0, last update: apply_failed: no room [x] [update u-1, engine 0, phase apply]. See its log\n" in said
    assert "engine 1," not in said
    assert json.loads(shows(status, "--json")) == encode(status)
    entries: list[Any] = json.loads(shows(status, "--json"))["engines"]
    assert [entry["failed"] for entry in entries] == [failed, None]
