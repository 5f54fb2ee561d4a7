"""Two minutes of the soak, and how it judges: what is told of a run that went wrong.

Not covered: slopes over hours (`python -m benchmarks.soak`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.soak import Soak
from benchmarks.soak_actions import Blow
from benchmarks.soak_load import Account, Request, _range, _require_success
from benchmarks.soak_watch import ENOUGH, WARM_UP, Life, slope
from weightsync.errors import NoEngineReady, WeightSyncError

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(560)
def test_two_minutes_of_kills_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "2", "--out", str(out), "--folder", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    told = json.loads(out.read_text())
    assert told["faults"] == [] and told["requests"]["lost"] == 0 and told["requests"]["answered"] > 100
    assert told["updates"]["committed"] > 5  # between kills, rejoins and scaling, on a machine that does other things too
    assert [blow["action"] for blow in told["blows"]][:2] == ["kill_controller", "rejoin"]  # more where the machine is quick
    assert all(done["recovered"] == done["done"] > 0 for done in told["actions"].values())
    assert "without a trainer" in told["blows"][1]["notes"][0]
    assert all("engine 2 served after" in blow["notes"][0] for blow in told["blows"] if blow["action"] == "scale")
    assert all(blow["recovered_seconds"] is not None for blow in told["blows"])


# --- how it judges ------------------------------------------------------------------------------


def judged(requests: list[Request], updates: list[dict[str, Any]] = [], lives: list[Life] = []) -> dict[str, Any]:  # noqa: B006
    """What is told of a run with these: engine 1 was hit from 10 to 20 s, the controller from 30 to 31 s; scaled from 40 to 60 s."""
    soak = Soak.__new__(Soak)
    soak.blows = [Blow("kill_engine_core", 10.0, frozenset({1}), until=20.0), Blow("kill_controller", 30.0, service=True, until=31.0)]
    soak.blows.append(Blow("scale", 40.0, frozenset({2}), updates=False, until=60.0))
    soak.load = SimpleNamespace(account=Account(requests))  # type: ignore[assignment]
    soak.watch = SimpleNamespace(lives=dict(enumerate(lives)), faults=[])  # type: ignore[assignment]
    soak.faults, soak.segments = [], 0
    soak._trainers = [SimpleNamespace(updates=updates)]  # type: ignore[list-item]
    return soak.told()


def asked(engine: int | None, began: float, ended: float, result: str) -> Request:
    return Request("generate", engine, began, ended, result, "some")


@pytest.mark.parametrize(
    ("request_", "fine"),
    [
        (asked(0, 11, 12, "answered"), True),
        (asked(1, 9, 11, "retryable"), True),
        (asked(1, 19, 25, "failed"), True),
        (asked(1, 12, 14, "lost"), False),
        (asked(0, 11, 12, "retryable"), False),  # nothing was done to this one
        (asked(1, 21, 22, "retryable"), False),  # it was back
        (asked(1, 1, 9, "failed"), False),
        (asked(None, 11, 12, "retryable"), False),  # the other one was there
        (asked(None, 30, 30.5, "retryable"), True),
        (asked(0, 30, 30.5, "retryable"), False),  # an engine answers whatever the controller does
    ],
)
def test_a_failure_is_explained_by_what_was_done_to_who_should_have_answered(request_: Request, fine: bool) -> None:
    told = judged([request_])
    assert told["requests"]["unexplained"] == (not fine) and bool(told["faults"]) is not fine


def test_an_update_may_fail_while_something_was_done_to_somebody() -> None:
    fails = {"code": "transport_failed", "retryable": True, "message": "", "version": 3}
    told = judged([], [{"began": 1.0, "ended": 2.0, "version": 2, "seconds": {}}, {**fails, "began": 11.0, "ended": 12.0}])
    assert told["faults"] == [] and (told["updates"]["committed"], told["updates"]["failed"]) == (1, 1)
    assert told["updates"]["errors"][0]["behind"] == "kill_engine_core" and told["updates"]["errors"][0]["seconds"] == 1.0
    assert told["actions"] == {name: {"done": 1, "recovered": 1} for name in ("kill_controller", "kill_engine_core", "scale")}
    assert judged([], [{**fails, "began": 25.0, "ended": 26.0}])["updates"]["unexplained"] == 1
    scaled = judged([asked(None, 41, 42, "retryable")], [{**fails, "began": 41.0, "ended": 42.0}])
    assert (scaled["updates"]["unexplained"], scaled["requests"]["unexplained"]) == (1, 1), "nothing fails of scaling"


def test_memory_that_grows_with_updates_is_a_fault_and_the_first_updates_are_not_looked_at() -> None:
    def life(per_update: float) -> Life:
        warm = [(n, 100.0 + 10 * n, 20, 9) for n in range(0, WARM_UP, 5)]
        return Life("trainer", 7, warm + [(n, 500.0 + per_update * n, 20, 9) for n in range(WARM_UP, WARM_UP + ENOUGH + 1, 5)])

    assert judged([], [], [life(0.09)])["faults"] == []
    assert judged([], [], [life(0.11)])["faults"] == ["trainer grows: mb_per_update 0.11"]
    short = Life("serve", 8, [(n, 100.0 * n, 20, 9) for n in range(0, WARM_UP + ENOUGH, 5)])
    assert short.fitted()["mb_per_update"] is None and judged([], [], [short])["faults"] == []


def test_a_slope_is_of_the_line_through_the_points() -> None:
    assert slope([(0.0, 5.0), (1.0, 7.0), (2.0, 9.0)]) == pytest.approx(2.0)
    assert slope([(10.0, 1.0), (20.0, 3.0), (30.0, 2.0)]) == pytest.approx(0.05)


def test_spans_that_do_not_rise_or_leave_tokens_out_are_faults() -> None:
    faults: list[str] = []
    assert _range([(3, 0, 4), (5, 4, 9)], faults) == (3, 5) and faults == []
    for wrong in ([(5, 0, 4), (3, 4, 9)], [(3, 0, 4), (4, 5, 9)], [(None, 0, 4)]):
        assert _range(wrong, faults) is None
    assert len(faults) == 3


def test_an_engines_answer_is_an_error_of_the_service_or_vllms() -> None:
    _require_success(200, b"")
    with pytest.raises(NoEngineReady):
        _require_success(503, json.dumps({"error": NoEngineReady("not now").to_dict()}).encode())
    with pytest.raises(WeightSyncError, match="500") as caught:
        _require_success(500, b'{"error": {"message": "EngineCore died"}}')
    assert not caught.value.retryable
