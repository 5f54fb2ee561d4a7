"""One trainer's calls: when its parameters may change, what it leaves behind when an update fails, what a push passes on.

Not covered: what the service does with it (`test_controller.py`), trainers of several ranks (`test_ranks.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.service import Service, until
from weightsync import SyncReport, WeightSync, cli
from weightsync.client.published import failure
from weightsync.client.source import Lazy
from weightsync.codec import encode
from weightsync.errors import (
    ApplyFailed,
    DeadlineExceeded,
    EngineDied,
    ManifestRefused,
    ServiceUnreachable,
    TransportFailed,
    UpdateConflict,
    UpdateFailed,
)
from weightsync.protocol import Admission, CommunicatorInfo, EngineState, EngineVerdict, UpdateState, UpdateStatus
from weightsync.results import SentAgain

BUCKET = 8192


@pytest.mark.parametrize("error", [DeadlineExceeded, ServiceUnreachable, KeyboardInterrupt])
def test_an_update_whose_beginning_got_no_answer_is_withdrawn(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been admitted, and would stand in the way of the next one until its deadline."""
    posted: list[tuple[str, Any]] = []

    def post(path: str, body: Any, timeout_seconds: float) -> Any:
        posted.append((path, body))
        raise error("no answer")

    with WeightSync("http://127.0.0.1:9", "token") as sync:
        monkeypatch.setattr(sync._http, "post", post)
        with pytest.raises(error, match="no answer"):
            sync.publish({"a": torch.ones(1)}, version=1)
    assert [path for path, _ in posted] == ["/v1/updates", f"/v1/updates/{posted[0][1]['update_id']}/abort"]


def test_an_update_that_was_refused_needs_no_withdrawal(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[str] = []

    def post(path: str, body: Any, timeout_seconds: float) -> Any:
        posted.append(path)
        raise UpdateConflict("another one is under way")

    with WeightSync("http://127.0.0.1:9", "token") as sync:
        monkeypatch.setattr(sync._http, "post", post)
        with pytest.raises(UpdateConflict):
            sync.publish({"a": torch.ones(1)}, version=1)
    assert posted == ["/v1/updates"]


@pytest.mark.parametrize(("flags", "expected"), [([], (False, False)), (["--rewind", "--allow-nonfinite"], (True, True))])
def test_a_push_passes_its_flags_on_and_says_what_was_sent_again(
    flags: list[str], expected: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    asked: dict[str, Any] = {}

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None: ...

        def sync_weights(self, source: Any, version: int | None, **flags: Any) -> SyncReport:
            asked.update(flags)
            return SyncReport("u", 3, 8, 1, {"total": 0.5}, 0.01, (), (SentAgain("before", 1, EngineDied("gone").to_dict(), 0.25),))

    monkeypatch.setattr(cli, "_client", lambda _: Client())
    assert cli.main(["push", str(tmp_path), *flags]) == 0
    assert (asked["rewind"], asked["allow_nonfinite"]) == expected
    assert "engine 1 was lost after 0.25 s (engine_died): sent again to the others\n" in capsys.readouterr().out


def test_an_update_that_can_not_be_sent_is_withdrawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody had it to commit: this trainer was refused every update until a commit of it had waited for its deadline."""
    posted: list[str] = []

    def post(path: str, body: Any, timeout_seconds: float) -> Any:
        posted.append(path)
        return encode(Admission("u", 1, CommunicatorInfo("h", 1, 1, 2, {"0": 1}, "gloo"), (0,)))

    with WeightSync("http://127.0.0.1:9", "token") as sync:
        monkeypatch.setattr(sync._http, "post", post)
        monkeypatch.setattr("weightsync.client.sync.Sender", _raises(RuntimeError("an error of the device")))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="an error of the device"):
                sync.publish({"w": torch.ones(3)}, version=1)
    assert posted == ["/v1/updates", "/v1/updates/u/abort"] * 2


# --- a commit that is asked for again -------------------------------------------------------------


def _raises(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize("failed", [False, True])
def test_a_commit_that_is_asked_for_again_leaves_the_next_update_alone(failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closed the communicator below the one that was being sent, and `close` would have left that one under way."""
    go = threading.Event()

    def slow() -> torch.Tensor:
        assert go.wait(10)
        return torch.ones(3)

    with Service() as service, WeightSync(service.url, "token") as sync:
        expected = pytest.raises(ApplyFailed, match="out of registers") if failed else contextlib.nullcontext()
        first = sync.publish({"w": torch.zeros(3)})
        with monkeypatch.context() as patch, expected:
            if failed:
                patch.setattr(type(service.latest()), "received", _raises(ApplyFailed("out of registers")))
            sync.commit(first)
        second = sync.publish({"w": Lazy(torch.float32, (3,), slow)})
        until(lambda: "connect" in second._seconds)
        with expected:
            sync.commit(first)
        go.set()
        assert sync.commit().version == second.version
        assert torch.equal(service.held[second.version][0]["w"], torch.ones(3))


# --- when parameters may change -------------------------------------------------------------------


def test_what_changes_once_tensors_are_read_never_reaches_the_engines() -> None:
    """Twenty updates; behind each `tensors_read` every parameter is overwritten at once, while bytes are still on their way."""
    parameters = {f"w{at}": torch.zeros(1500 + 7 * at) for at in range(8)}
    on_their_way = 0
    with Service(receivers=2) as service, WeightSync(service.url, "token", bucket_bytes=BUCKET) as sync:
        for version in range(1, 21):
            for tensor in parameters.values():
                tensor.fill_(version)
            published = sync.publish(parameters)
            assert published.tensors_read(10.0)
            for tensor in parameters.values():
                tensor.fill_(-1)
            on_their_way += not published._done.is_set()
            assert sync.commit(published).version == version
            for held in service.held[version]:
                assert {name: set(tensor.tolist()) for name, tensor in held.items()} == {name: {float(version)} for name in parameters}
    assert on_their_way > 0, "or nothing was put to the test"


def test_what_changes_before_tensors_are_read_may_reach_the_engines() -> None:
    """As it is documented: in the last bucket here, which waits for the first to have been sent."""
    weight, sent = torch.zeros(5 * BUCKET // 4), threading.Event()
    changed = threading.Event()

    def progress(*_: int) -> None:
        if not sent.is_set():
            sent.set()
            assert changed.wait(10)

    with Service() as service, WeightSync(service.url, "token", bucket_bytes=BUCKET) as sync:
        published = sync.publish({"w": weight}, progress=progress)
        assert sent.wait(10)
        assert not published.tensors_read(0.0)
        weight.fill_(1)
        changed.set()
        report = sync.commit(published)
        assert published.tensors_read(0.0)
        (held,) = service.held[report.version]
    assert held["w"][0] == 0 and held["w"][-1] == 1


def test_publish_returns_while_tensors_are_still_to_be_made() -> None:
    go = threading.Event()
    source = {"w": Lazy(torch.float32, (3,), lambda: torch.ones(3) if go.wait(10) else torch.zeros(3))}
    with Service() as service, WeightSync(service.url, "token") as sync:
        published = sync.publish(source)
        assert not published.tensors_read(0.3)
        go.set()
        report = sync.commit(published)
        assert torch.equal(service.held[report.version][0]["w"], torch.ones(3))
        assert report.seconds["export"] > 0.25 > report.seconds["pack"], "what making it took is told apart"


def test_a_tensor_that_cannot_be_made_ends_the_update_and_the_next_one_goes_well() -> None:
    def fails() -> torch.Tensor:
        raise KeyError("no adapter of that name")

    with Service() as service, WeightSync(service.url, "token") as sync:
        with pytest.raises(UpdateFailed, match="'w' could not be read: KeyError: 'no adapter of that name'"):
            sync.sync_weights({"w": Lazy(torch.float32, (3,), fails)})
        assert service.latest().state.final and not service.held
        with pytest.raises(ManifestRefused, match=r"'w' was offered as float32 \(3,\) and is torch.float64 \(4,\) now"):
            sync.sync_weights({"w": Lazy(torch.float32, (3,), lambda: torch.ones(4, dtype=torch.float64))})
        sync.sync_weights({"w": torch.ones(3)})


def test_a_fault_of_the_trainers_own_is_raised_though_the_service_saw_its_broadcast_break_off() -> None:
    """Without staging the commit is under way by then: "the trainer died; sync again" was raised in its place, to come again for ever."""

    def fails() -> torch.Tensor:
        raise KeyError("my own bug")

    with Service() as service, WeightSync(service.url, "token") as sync:
        published = sync.publish({"w": Lazy(torch.float32, (3,), fails)})
        assert published._done.wait(10)
        word = TransportFailed("the trainer (rank 0) died or left", hint="Sync again").to_dict()
        status = UpdateStatus(published.update_id, 1, UpdateState.ABORTED, 1, 12, 0.0, error=word)
        with pytest.raises(UpdateFailed, match="my own bug") as caught:
            sync._report(published, status)
        assert not caught.value.retryable


def test_an_engines_failure_says_where_each_engine_stands_and_what_to_do() -> None:
    verdicts = (
        EngineVerdict(0, False, 14, EngineState.SERVING, 0.1, error=ApplyFailed("loading stopped").to_dict()),
        EngineVerdict(1, True, 15, EngineState.SERVING, 0.1),
    )
    status = UpdateStatus("u", 15, UpdateState.ABORTED, 1, 12, 0.0, verdicts=verdicts, error=ApplyFailed("loading stopped").to_dict())
    error = failure(status)
    assert str(error).startswith("loading stopped (engine 0 serving with version 14, engine 1 serving with version 15)")
    assert "Sync again, with this version too" in error.hint and error.retryable


def test_a_dtype_that_changed_since_the_last_update_that_was_committed_is_refused() -> None:
    with Service() as service, WeightSync(service.url, "token") as sync:
        sync.sync_weights({"w": torch.ones(3)})
        with pytest.raises(ManifestRefused, match="w is bfloat16, was float32") as caught:
            sync.sync_weights({"w": torch.ones(3, dtype=torch.bfloat16)})
        assert caught.value.names == ("w",) and len(service.updates) == 1, "the service was not even asked"
        sync.sync_weights({"w": torch.ones(3)})
        with WeightSync(service.url, "token") as meant:
            meant.sync_weights({"w": torch.ones(3, dtype=torch.bfloat16)})


def test_a_dtype_of_an_update_that_failed_is_not_remembered() -> None:
    with Service() as service, WeightSync(service.url, "token") as sync:
        service.refuse = UpdateConflict("another one is under way")
        with pytest.raises(UpdateConflict):
            sync.sync_weights({"w": torch.ones(3)})
        service.refuse = None
        sync.sync_weights({"w": torch.ones(3, dtype=torch.bfloat16)})
