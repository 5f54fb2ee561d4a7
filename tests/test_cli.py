"""What the command line shows and how it ends, against a service without engines or with answers that are given.

Not covered: `serve`, `demo` and `stop` (`test_lifecycle.py`), `check` (`test_check.py`).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.service import Service
from tests.test_api import engine, fleet
from weightsync import WeightSync, cli
from weightsync.client import Lazy
from weightsync.codec import encode
from weightsync.errors import Aborted, ApplyFailed, Refused, VersionRefused
from weightsync.place import Retained
from weightsync.protocol import (
    EngineCheck,
    EngineState,
    EngineStatus,
    EngineVerdict,
    FleetCheck,
    FleetStatus,
    UpdateState,
    UpdateStatus,
    WorkerCheck,
)

Shows = Callable[..., str]


class Halved(Service):
    """A service where engine 1 does not commit, and need not."""

    lost = ApplyFailed("no room", engine=1, update_id="u", phase="apply", hint="See its log")

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        answer = super().answer(method, path, body)
        if path.endswith("/commit"):
            answer["verdicts"][1] = encode(EngineVerdict(1, False, None, EngineState.QUARANTINED, error=self.lost.to_dict()))
        return answer


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A checkpoint folder, and a file with the token."""
    (tmp_path / "checkpoint").mkdir()
    save_file({"w": torch.ones(25)}, tmp_path / "checkpoint" / "model.safetensors")
    (tmp_path / "token").write_text("token")
    return str(tmp_path / "checkpoint"), str(tmp_path / "token")


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shows:
    """What `weightsync status` prints of a fleet."""

    def shown(status: FleetStatus, *flags: str, width: int = 200, code: int = 0) -> str:
        class Client:
            def __enter__(self) -> Client:
                return self

            def __exit__(self, *_: object) -> None: ...

            def status(self) -> FleetStatus:
                return status

        monkeypatch.setattr(cli, "_client", lambda _: Client())
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.main(["status", *flags]) == code
        return capsys.readouterr().out

    return shown


def test_a_status_says_why_an_engine_that_serves_failed_its_last_update(shows: Shows) -> None:
    failed = ApplyFailed("no room [x]", engine=0, update_id="u-1", phase="apply", hint="See its log").to_dict()
    status = fleet(replace(engine(0, version=2), failed=failed), engine(1))
    said = shows(status, code=3)
    assert "engine 0, last update: apply_failed: no room [x] [update u-1, engine 0, phase apply]. See its log\n" in said
    assert "engine 1," not in said
    assert json.loads(shows(status, "--json", code=3)) == encode(status)
    entries: list[Any] = json.loads(shows(status, "--json", code=3))["engines"]
    assert [entry["failed"] for entry in entries] == [failed, None]


def test_a_push_names_the_engines_that_it_succeeded_without(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with Halved() as service:
        push = ["push", files[0], "--url", service.url, "--token-file", files[1]]
        for flags in ([], ["--json"]):
            assert cli.main([*push, *flags]) == 0
            out, err = capsys.readouterr()
            assert (
                "engine 1 did not commit and is quarantined: apply_failed: no room [update u, engine 1, phase apply]. See its log\n" in err
            )
            assert "engine 0" not in err
            if flags:
                report = json.loads(out)
                assert [(v["engine"], v["committed"]) for v in report["verdicts"]] == [(0, True), (1, False)]
                assert report["verdicts"][1]["error"] == Halved.lost.to_dict() and report["version"] == 2
            else:
                assert out.startswith("version 1: 1 tensors, 100 bytes in ")


def test_an_update_is_aborted_by_its_id_and_its_trainer_is_told_why(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    go = threading.Event()

    def slow() -> torch.Tensor:
        assert go.wait(10)
        return torch.ones(3)

    with Service() as service, WeightSync(service.url, "token") as sync:
        abort = ["abort", "--url", service.url, "--token-file", files[1]]
        published = sync.publish({"w": Lazy(torch.float32, torch.Size([3]), slow, torch.device("cpu"))}, version=7)
        for _ in range(2):  # aborted already, it stays so
            assert cli.main([*abort, published.update_id, "--reason", "the node is needed"]) == 0
            assert capsys.readouterr().out == f"update {published.update_id} to version 7 is aborted: the node is needed\n"
        go.set()
        with pytest.raises(Aborted, match="the node is needed"):
            sync.commit(published)
        done = sync.sync_weights({"w": torch.ones(3)}, version=8)
        assert cli.main([*abort, done.update_id]) == 1
        assert f"update {done.update_id} to version 8 has ended (committed): there is nothing to abort" in capsys.readouterr().err
        assert cli.main([*abort, "../status?"]) == 1
        assert "no update '..%2Fstatus%3F' is known" in capsys.readouterr().err
        assert cli.main([*abort[:-1], files[1] + "-none", done.update_id]) == 2


def test_a_status_names_an_update_that_is_under_way_and_none_that_has_ended(shows: Shows) -> None:
    update = UpdateStatus("u-9", 4, UpdateState.RECEIVING, 1, 8, 0.0)
    said = "update u-9 to version 4 is under way (receiving)"
    assert said in shows(replace(fleet(engine(0)), update=update))
    assert "u-9" not in shows(replace(fleet(engine(0)), update=replace(update, state=UpdateState.COMMITTED)))


@pytest.mark.parametrize(("ranks", "who"), [((), "its workers do"), ((1, 3), "worker 1, 3 of 4 does")])
def test_a_status_says_whose_workers_are_silent_and_for_how_long(shows: Shows, ranks: tuple[int, ...], who: str) -> None:
    hangs = replace(engine(1, EngineState.SILENT), workers=4, reason="workers_silent", silence_seconds=75.3, silent_workers=ranks)
    shown = shows(fleet(engine(0), hangs), width=200, code=3)
    assert f"engine 1: {who} not answer, for 75 s" in shown and "workers_silent" in shown and "engine 0:" not in shown


OF_AN_UPDATE = "3f2b8c1e9d6a4f0b8c7d5e6f7a8b9c0d"
HEALTHY = replace(
    engine(0, version=120), update_id=OF_AN_UPDATE, url="http://127.0.0.1:34567", retained=Retained("u", 3, 0, 1, "h", 16 * 10**9, "u")
)
FAILED = replace(engine(1, EngineState.QUARANTINED, None), update_id=OF_AN_UPDATE, url="http://[fd00::17]:4568", reason="verdict_not_ok")
PINNED = replace(engine(2, version=118), update_id=OF_AN_UPDATE, url="http://127.0.0.1:34569", pinned="eval")
FIRST = ["engine", "state", "version"]


@pytest.mark.parametrize(
    ("engines", "width", "columns", "left_out"),
    [
        ((HEALTHY,), 60, [*FIRST, "address"], "update, workers, vLLM, keeps"),
        ((HEALTHY,), 80, [*FIRST, "address", "workers", "keeps"], "update, vLLM"),
        ((HEALTHY, FAILED, PINNED), 60, [*FIRST, "pin", "reason"], "update, address, workers, vLLM, keeps"),
        ((HEALTHY, FAILED, PINNED), 80, [*FIRST, "pin", "workers", "keeps", "reason"], "update, address, vLLM"),
        ((HEALTHY, FAILED, PINNED), 200, [*FIRST, "pin", "update", "address", "workers", "vLLM", "keeps", "reason"], None),
    ],
)
def test_a_terminal_gets_the_columns_it_has_room_for_in_full(
    shows: Shows, engines: tuple[EngineStatus, ...], width: int, columns: list[str], left_out: str | None
) -> None:
    lines = shows(fleet(*engines, committed=120), width=width, code=3 if FAILED in engines else 0).splitlines()
    table = [re.split("[┃│]", line)[1:-1] for line in lines if line[0] in "┃│"]
    assert [cell.strip() for cell in table[0]] == columns
    rows = [dict(zip(columns, (cell.strip() for cell in row), strict=True)) for row in table[1:]]
    assert len(rows) == len(engines) and all(len(line) <= width for line in lines if line[0] in "┏┃┡│└")
    for row, e in zip(rows, engines, strict=True):
        kept, version = "16.00 GB" if e.retained else "", "-" if e.version is None else str(e.version)
        cells = (str(e.engine), str(e.state), version, e.pinned, OF_AN_UPDATE, e.url, "1", "0.32.0", kept, e.reason)
        names = ("engine", "state", "version", "pin", "update", "address", "workers", "vLLM", "keeps", "reason")
        assert row == {name: cell for name, cell in zip(names, cells, strict=True) if name in columns}
    said = [line for line in lines if line.startswith("no room for")]
    assert said == ([] if left_out is None else [f"no room for: {left_out} (widen the terminal, or --json)"])


def test_a_push_that_is_refused_shows_no_progress(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """It said `sending 0/100 bytes` of bytes that nobody had let it send."""
    with Service() as service:
        push = ["push", files[0], "--url", service.url, "--token-file", files[1]]
        service.refuse = VersionRefused("version 3 does not rise")
        assert cli.main(push) == 1
        assert capsys.readouterr() == ("", "weightsync: version 3 does not rise\n")
        service.refuse = None
        assert cli.main(push) == 0
        out, err = capsys.readouterr()
        assert "100/100 bytes" in err and out.startswith("version 1: ") and out.count("\n") == 1


class Checked(Service):
    """Engine 0 is as it should be; in engine 1 a tensor is not; engine 2 can't be checked."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        if path != "/v1/check":
            return super().answer(method, path, body)
        fine = WorkerCheck(0, "u", True, equal=7, slots=9, nbytes=5_000_000_000, seconds=0.5)
        engines = [
            EngineCheck(0, 3, True, (fine,)),
            EngineCheck(1, 3, False, (replace(fine, equal=6, differs=("model.norm.weight",), faults=("model.x: moved",), left_out=4),)),
            EngineCheck(2, None, False, error=Refused("this worker holds no update", hint="Check again").to_dict()),
        ]
        chosen = tuple(e for e in engines if e.engine in body["engines"] or not body["engines"])
        return encode(FleetCheck(3, all(e.ok for e in chosen), chosen))


def test_a_check_of_the_fleet_names_what_is_wrong_and_fails(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with Checked() as service:
        check = ["check", "--url", service.url, "--token-file", files[1]]
        assert cli.main([*check, "--engine", "0"]) == 0
        assert "all is as it was sent" in capsys.readouterr().out
        assert cli.main(check) == 1
        said = capsys.readouterr().out
        for line in (
            "engine 1, worker 0: model.norm.weight is not what it was",
            "engine 1, worker 0: model.x: moved",
            "engine 1, worker 0: 4 more",
            "engine 2: refused: this worker holds no update. Check again",
        ):
            assert f"\n{line}\n" in said
        assert cli.main([*check, "--json"]) == 1
        assert [e["ok"] for e in json.loads(capsys.readouterr().out)["engines"]] == [True, False, False]
        assert cli.main([*check, "--strict"]) == cli.main([*check, "--model", files[0], "--engine", "0"]) == 2


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (fleet(HEALTHY, replace(HEALTHY, engine=1), committed=120), 0),
        (fleet(HEALTHY, PINNED, committed=120), 0),
        (fleet(HEALTHY, FAILED, committed=120), 3),
        (fleet(HEALTHY, replace(HEALTHY, engine=1, version=119), committed=120), 3),
        (fleet(PINNED, committed=120), 3),
        (fleet(engine(0, EngineState.PENDING, None), committed=None), 3),
        (fleet(committed=None), 3),
    ],
    ids=["all", "one pinned", "one quarantined", "one behind", "pinned ones alone", "before the first", "no engine"],
)
def test_a_script_learns_from_the_exit_code_whether_all_serve(shows: Shows, status: FleetStatus, code: int) -> None:
    status = replace(status, ready=sum(not e.pinned and e.version == status.committed_version for e in status.engines))
    for flags in ([], ["--json"]):
        assert shows(status, *flags, code=code)


def test_a_script_learns_from_the_exit_code_that_the_service_cannot_be_asked(files: tuple[str, str]) -> None:
    assert cli.main(["status", "--url", "http://127.0.0.1:9", "--token-file", files[1]]) == 1
    assert cli.main(["status", "--url", "http://127.0.0.1:9", "--token-file", files[1] + "-none"]) == 2
    for wrong in ("0", "-1", "nan", "1e9"):
        assert cli.main(["status", "--token-file", files[1], "--watch", wrong]) == 2


def test_the_token_is_the_one_of_the_file_that_is_named_or_else_the_one_that_serve_here_would_take(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the API's pod, whose variable holds it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WEIGHTSYNC_API__TOKEN", raising=False)
    kept = tmp_path / "home/.weightsync/default/token"
    kept.parent.mkdir(parents=True)
    kept.write_text("of-serve\n")

    def sent(*flags: str) -> str:
        with cli._client(cli._parser().parse_args(["status", *flags])) as client:
            return str(client._http._client.headers["authorization"])

    assert sent() == "Bearer of-serve"
    monkeypatch.setenv("WEIGHTSYNC_API__TOKEN", "of-the-pod")
    assert sent() == "Bearer of-the-pod"
    assert sent("--token-file", files[1]) == "Bearer token"
