"""What a trainer leaves behind when the beginning of an update fails, and what a push passes on. Without a service.

Not covered: what the service does with it (`test_controller.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightsync import SyncReport, WeightSync, cli
from weightsync.errors import DeadlineExceeded, ServiceUnreachable, UpdateConflict, WeightSyncError


@pytest.mark.parametrize("error", [DeadlineExceeded, ServiceUnreachable])
def test_an_update_whose_beginning_got_no_answer_is_withdrawn(error: type[WeightSyncError], monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_push_passes_its_flags_on(flags: list[str], expected: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    asked: dict[str, Any] = {}

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None: ...

        def sync_weights(self, source: Any, version: int | None, **flags: Any) -> SyncReport:
            asked.update(flags)
            return SyncReport("u", 3, 8, 1, {"total": 0.5}, 0.01, ())

    monkeypatch.setattr(cli, "_client", lambda _: Client())
    assert cli.main(["push", str(tmp_path), *flags]) == 0
    assert (asked["rewind"], asked["allow_nonfinite"]) == expected
