"""A thread that still sends for an update that was given up does nothing to the next one."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync import WeightSync
from weightsync.client import joined as module
from weightsync.client.joined import Joined
from weightsync.client.published import Published
from weightsync.client.ranks import Kind
from weightsync.errors import Aborted

CPU = torch.device("cpu")


class Channel:
    open = True

    def __init__(self, info: Any = None) -> None:
        self.info = info

    def close(self) -> None:
        self.open = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Channel]:
    channels: list[Channel] = []
    monkeypatch.setattr(module, "join", lambda info, *_, **__: channels.append(Channel(info)) or channels[-1])  # type: ignore[func-returns-value]
    return channels


def connect(held: Joined, info: Any, cancelled: bool = False) -> Any:
    return held.connect(info, CPU, time.monotonic() + 5, lambda: cancelled)


def test_what_an_earlier_update_leaves_is_its_own_channel(made: list[Channel]) -> None:
    held = Joined(30.0, "")
    first, second = connect(held, 1), connect(held, 2)
    assert not first.open and second.open
    held.leave(first)
    assert second.open and connect(held, 2) is second
    held.leave(second)
    assert not second.open and connect(held, 2) is made[2]
    held.leave()
    assert not made[2].open


def test_a_channel_that_is_there_only_when_its_update_was_given_up_is_closed(made: list[Channel]) -> None:
    with pytest.raises(Aborted, match="given up before"):
        connect(Joined(30.0, ""), 1, cancelled=True)
    assert [channel.open for channel in made] == [False]


def test_a_sending_thread_that_ends_late_leaves_the_next_updates_channel(made: list[Channel]) -> None:
    go_on = threading.Event()

    def send(*_: Any) -> None:
        go_on.wait(5)
        raise Aborted("given up")

    published = Published(SimpleNamespace(communicator=1, update_id="u"), 0.0, time.monotonic() + 9)  # type: ignore[arg-type]
    published._go.set()
    with WeightSync("http://127.0.0.1:9", "token") as sync:
        arguments = (published, SimpleNamespace(device=CPU), SimpleNamespace(seconds={}, send=send))
        thread = threading.Thread(target=sync._send, args=arguments)
        thread.start()
        while not made:
            time.sleep(0.01)
        second = connect(sync._joined, 2)
        go_on.set()
        thread.join(5)
        assert second.open and not made[0].open


@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.READ])
def test_an_update_that_was_given_up_tells_other_ranks_nothing_more(kind: Kind) -> None:
    said: list[Any] = []
    published = Published(SimpleNamespace(communicator=1, update_id="u"), 0.0, time.monotonic() + 9)  # type: ignore[arg-type]
    with WeightSync("http://127.0.0.1:9", "token") as sync:
        sync._ranks = SimpleNamespace(tell=lambda *told: said.append(told), close=lambda: None)  # type: ignore[assignment]
        sync._tell(published, kind, 7)
        published._cancelled.set()
        with pytest.raises(Aborted):
            sync._tell(published, kind, 7)
        sync._ranks = None
    assert said == [(kind, 7, published._deadline)]
