"""A `serve` that finds engines goes on with them only if they were started with what it asks for.

Engine actors are the real ones, in this process. Not covered: actors of a cluster (`test_lifecycle.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightsync
from weightsync import config
from weightsync.errors import ConfigError
from weightsync.fleet import adopting
from weightsync.fleet.engine_actor import EngineActor
from weightsync.fleet.fixed import differences, fixed


class Handle:
    """An actor, called as Ray's handles are."""

    def __init__(self, actor: EngineActor) -> None:
        self.started_with = Remote(actor.started_with)


class Remote:
    _method_name = "started_with"

    def __init__(self, method: Callable[[], Any]) -> None:
        self.remote = method


class Silent:
    """One that waits for its place."""

    def __init__(self) -> None:
        async def never() -> None:
            await asyncio.sleep(60)

        self.started_with = Remote(never)


def settings(folder: Path, **more: Any) -> config.Settings:
    (folder / "config.json").write_text("{}")
    return config.load({"engine.model": folder, "api.token": "secret", "sync.control_timeout_seconds": 0.2, **more})


def adopt(wanted: config.Settings, *handles: Any) -> None:
    asyncio.run(adopting.require_same(dict(enumerate(handles)), wanted))


def engine(ordinal: int, running: config.Settings) -> Handle:
    return Handle(EngineActor(ordinal, config.dump(running)))


@pytest.mark.parametrize(
    "more",
    [
        {"engine.count": 4},  # it may have been scaled
        {"ray.address": "head:6379"},  # another name of the same cluster
        {"sync.require": 1, "api.min_ready": 2, "sync.history": 3},  # what the API and a new controller read
    ],
)
def test_what_may_change_under_live_engines_is_adopted(tmp_path: Path, more: dict[str, Any]) -> None:
    adopt(settings(tmp_path, **more), engine(0, settings(tmp_path)), engine(1, settings(tmp_path)))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"engine.max_model_len": 64}, "engine.max_model_len: the running fleet has 2048, asked for 64 (engine 1)"),
        ({"sync.caches": "retain"}, "sync.caches: the running fleet has 'reset', asked for 'retain' (engine 1)"),
        ({"api.token": "other"}, "api.token: the running engines have another one (engine 1)"),
    ],
)
def test_what_engines_keep_is_compared_with_each_of_them(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    wanted = settings(tmp_path, **more)
    with pytest.raises(ConfigError) as caught:
        adopt(wanted, engine(0, wanted), engine(1, settings(tmp_path)))
    assert said in str(caught.value) and "secret" not in str(caught.value)


def test_an_engine_that_does_not_answer_is_taken_on_trust_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = settings(tmp_path)
    adopt(wanted, Silent(), engine(1, wanted))
    assert "engine 0 is adopted without a look at its settings" in caplog.text and "engine 1" not in caplog.text
    with pytest.raises(ConfigError):
        adopt(settings(tmp_path, **{"engine.strict": True}), Silent(), engine(1, wanted))


def test_engines_of_another_release_are_not_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, there = settings(tmp_path), engine(0, settings(tmp_path))
    running = asyncio.run(there.started_with.remote())["value"]
    monkeypatch.setattr(weightsync, "__version__", "99.0")
    assert differences(fixed(wanted), running) == [f"the running engines are of weightsync {running['release']}, this is 99.0"]
    assert "(unknown)" in differences(fixed(wanted), {**running, "release": None})[0]


def test_what_goes_wrong_here_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    class Broken:
        started_with = Remote(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        adopt(settings(tmp_path), Broken())
