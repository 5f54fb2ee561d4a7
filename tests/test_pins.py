"""Pins over updates, over engines that come later, and over processes that are killed: a fleet of processes.

Not covered: whom a pin holds (`test_pinning.py`), vLLM and Ray (`test_pins_on_fleet.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleets import wait_until
from tests.survivors import ENGINES, TOKEN, Survivors, go, weights
from weightsync import WeightSync
from weightsync.cli import main
from weightsync.errors import PinRefused, UpdateConflict, WeightSyncError


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Survivors]:
    fleet = Survivors(tmp_path, retain_engines=1, retain_folder=str(tmp_path / "memory"))
    wait_until(lambda: "error" not in fleet.update(), 30, "a first update, behind everybody's imports")
    wait_until(lambda: fleet.status().engines[0].retained is not None, 5, "what engine 0 keeps")
    yield fleet
    fleet.end()


@pytest.fixture
def sync(fleet: Survivors) -> Iterator[WeightSync]:
    with WeightSync(fleet.url, TOKEN) as client:
        yield client


def holds(fleet: Survivors, ordinal: int, version: int) -> bool:
    return fleet.held(ordinal) == ("serving", version, {name: float(tensor[0]) for name, tensor in weights(version).items()})


def update(fleet: Survivors) -> None:
    done = fleet.update()
    assert "error" not in done, done


def test_a_pinned_engine_stays_over_updates_and_a_rewind_and_gets_what_it_missed_when_it_is_unpinned(
    fleet: Survivors, sync: WeightSync
) -> None:
    at = fleet.version
    status = sync.pin("eval", at)
    assert [e.pinned for e in status.engines] == ["", "", "", "eval"] and status.ready == 3
    update(fleet)
    update(fleet)
    status = sync.status()
    assert [e.version for e in status.engines] == [at + 2] * 3 + [at] and status.ready == 3
    assert holds(fleet, 3, at) and holds(fleet, 0, at + 2)
    with pytest.raises(PinRefused, match=rf"'eval' holds version {at} on engine 3, and is asked for at version {at + 2}"):
        sync.pin("eval", at + 2)
    with pytest.raises(PinRefused, match=r"would leave 2 for updates, which take 3 \(sync.require\)"):
        sync.pin("other", at + 2)
    assert sync.pin("eval", at) == sync.status()
    sync.unpin("eval")
    # No trainer sends it: engine 0 kept it.
    wait_until(lambda: holds(fleet, 3, at + 2), 10, "what it missed")
    wait_until(lambda: sync.status().ready == ENGINES, 3, "the fleet")
    update(fleet)
    assert all(holds(fleet, ordinal, at + 3) for ordinal in range(ENGINES))


def test_a_pin_outlives_controller_and_trainer_and_ends_with_its_engines_process(fleet: Survivors, sync: WeightSync) -> None:
    at = fleet.version
    sync.pin("eval", at)
    update(fleet)
    fleet.roles["controller"].kill()
    fleet.replace("controller")
    status = wait_until(lambda: status_of(sync), 10, "a new controller")
    assert ([e.pinned for e in status.engines], status.committed_version, status.ready) == (["", "", "", "eval"], at + 1, 3)
    fleet.replace("trainer")
    update(fleet)
    # Another engine that comes later is brought up, and the pinned one is not.
    fleet.replace("engine 1")
    wait_until(lambda: holds(fleet, 1, at + 2), 10, "engine 1")
    assert holds(fleet, 3, at)

    fleet.replace("engine 3")
    wait_until(lambda: holds(fleet, 3, at + 2), 10, "engine 3, with the committed version")
    status = wait_until(lambda: (found := sync.status()).ready == ENGINES and found, 3, "the fleet")
    assert all(not e.pinned for e in status.engines)
    assert sync.unpin("eval").ready == ENGINES


def status_of(sync: WeightSync) -> object:
    try:
        return sync.status()
    except WeightSyncError:
        return None


def test_while_an_update_is_under_way_a_pin_waits(fleet: Survivors, sync: WeightSync) -> None:
    at = fleet.version
    sync.pin("eval", at)
    trainer = fleet.start("half")
    for call in (lambda: sync.pin("other", at), lambda: sync.unpin("eval")):
        with pytest.raises(UpdateConflict, match=rf"to version {at + 1} is under way \(receiving\)"):
            call()
    sync.pin("eval", at)
    go(trainer)
    assert "error" not in trainer.result()
    assert holds(fleet, 3, at) and all(holds(fleet, ordinal, at + 1) for ordinal in range(3))


def test_pins_from_the_command_line(fleet: Survivors, sync: WeightSync, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    at = str(fleet.version)

    def run(*command: str) -> tuple[int, str]:
        code = main([*command, "--url", fleet.url, "--token-file", str(token)])
        said = capsys.readouterr()
        return code, said.out + said.err

    for _ in range(2):
        assert run("pin", "eval", at) == (0, f"pinned as eval: version {at} on engine 3\n")
    shown = run("status")[1]
    assert "3 of 4 engines ready, 1 pinned" in shown.replace("\n", " ") and "eval" in shown
    code, said = run("pin", "more", at, "--engines", "2")
    assert code == 1 and "pin 'more' of 2 engine(s) would leave 1 for updates" in said
    assert run("unpin", "evil") == (0, "no engine was pinned as evil; pins: eval\n")
    assert run("unpin", "eval") == (0, "unpinned: engine 3\n")
    assert run("unpin", "eval") == (0, "no engine was pinned as eval; pins: none\n")
    assert sync.status().ready == ENGINES


@pytest.mark.slow
def test_a_fleet_goes_back_and_a_pinned_engine_does_not(fleet: Survivors, sync: WeightSync) -> None:
    at = fleet.version
    sync.pin("eval", at)
    update(fleet)
    with WeightSync(fleet.url, TOKEN, timeout_seconds=5) as trainer:
        other = {name: tensor + 100 for name, tensor in weights(at).items()}
        assert [v.engine for v in trainer.sync_weights(other, at, rewind=True).verdicts] == [0, 1, 2]
        status = trainer.status()
        assert ([e.version for e in status.engines], status.ready, status.rewinds) == ([at] * 4, 3, 1)
        assert holds(fleet, 3, at), "the same number, and what it was pinned at"
        found = trainer.attach_run(at)
        assert not found.needed and found.behind == ()
        trainer.unpin("eval")
        wait_until(lambda: trainer.status().ready == ENGINES, 10, "what the others hold under that number")
    assert fleet.held(3) == fleet.held(0)
