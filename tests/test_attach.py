"""What a restarted trainer finds, and which versions it goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.service import Service
from tests.test_api import engine, fleet
from weightsync import WeightSync
from weightsync.client.attach import attachment
from weightsync.errors import ConfigError
from weightsync.place import Retained
from weightsync.protocol import EngineState, EngineStatus, FleetStatus

PINNED = replace(engine(1, version=1), pinned="eval")
OUT = EngineState.QUARANTINED
KEPT, LONG_AGO = (Retained(f"u-{version}", version, 0, 1 << 20, "hash", 8, f"u-{version}") for version in (3, 2))

CASES: list[tuple[tuple[EngineStatus, ...], int | None, tuple[int, ...], bool, bool, str]] = [
    # engines, committed; what step 3 finds: behind, needed, rewind, a part of the advice
    ((engine(0), engine(1)), 3, (), False, False, ""),
    ((engine(0), PINNED), 3, (), False, False, ""),
    ((), None, (), True, False, "no version: sync_weights(…, version=3) brings it to step 3"),
    ((engine(0, EngineState.PENDING, None),), None, (0,), True, False, "sync_weights(…, version=3)"),
    ((engine(0, version=2), engine(1, version=2)), 2, (0, 1), True, False, "committed version 2: sync_weights(…, version=3)"),
    ((engine(0, version=2), engine(1)), 3, (0,), True, True, "engine(s) 0 do not serve it"),
    ((engine(0, OUT, None), replace(engine(1), retained=KEPT)), 3, (0,), True, True, "by themselves from engine 1, which keeps it"),
    ((replace(engine(0, OUT, None), retained=KEPT), engine(1)), 3, (0,), True, True, "by themselves from engine 0, which keeps it"),
    # With sync.stage=none, or sync.retain_engines=0, nothing is kept; and what a dead engine or one from before keeps nobody gets.
    ((engine(0, OUT, None), engine(1)), 3, (0,), True, True,
     "no engine keeps it for them, so they get it with sync_weights(…, version=3, rewind=True)"),
    ((engine(0, OUT, None), replace(engine(1), retained=LONG_AGO)), 3, (0,), True, True, "no engine keeps it for them"),
    ((replace(engine(0, EngineState.DEAD, None), retained=KEPT), engine(1)), 3, (0,), True, True, "no engine keeps it for them"),
    ((replace(engine(0), rewinds=1), engine(1)), 3, (0,), True, True, "engine(s) 0 do not serve it"),
    ((engine(0, version=5), engine(1, version=5)), 5, (0, 1), True, True,
     "above step 3: sync_weights(…, version=3, rewind=True) takes it back; else versions go on from 6"),
    ((engine(0, version=5), engine(1)), 5, (0,), True, True, "above step 3"),
]  # fmt: skip


@pytest.mark.parametrize(("engines", "committed", "behind", "needed", "rewind", "advice"), CASES)
def test_a_restarted_trainer_finds(
    engines: tuple[EngineStatus, ...], committed: int | None, behind: tuple[int, ...], needed: bool, rewind: bool, advice: str
) -> None:
    found = attachment(fleet(*engines, committed=committed), 3)
    assert (found.step, found.committed_version, found.versions) == (3, committed, {e.engine: e.version for e in engines})
    assert (found.behind, found.needed, found.rewind) == (behind, needed, rewind)
    assert advice in found.advice and bool(found.advice) == needed


def test_behind_a_rewind_those_are_behind_that_missed_it() -> None:
    status = replace(fleet(engine(0), replace(engine(1), rewinds=1)), rewinds=1)
    assert attachment(status, 3).behind == (0,)


@pytest.mark.parametrize("step", [-1, 2**53, 1.0, True, None, "3"])
def test_a_step_that_no_version_can_be_is_named(step: Any) -> None:
    with pytest.raises(ConfigError, match=r"step: got .*, want 0 to"):
        attachment(fleet(), step)


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as running:
        yield running


def train(sync: WeightSync, version: int | None = None, **more: Any) -> int:
    return sync.sync_weights({"w": torch.ones(3)}, version, **more).version


@pytest.mark.parametrize(("committed", "versions"), [(None, [121, 122]), (119, [121, 122]), (120, [121, 122]), (125, [126, 127])])
def test_versions_go_on_from_the_step_or_the_fleets_version(service: Service, committed: int | None, versions: list[int]) -> None:
    if committed is not None:
        with WeightSync(service.url, "token") as earlier:
            train(earlier, committed)
    with WeightSync(service.url, "token") as sync:
        assert sync.attach_run(120).committed_version == committed
        assert [train(sync) for _ in versions] == versions


def test_what_it_says_to_do_brings_the_fleet_to_the_step_and_versions_go_on_from_there(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightSync(service.url, "token") as sync:
        train(sync, 125)
        found = sync.attach_run(120)
        assert (found.needed, found.rewind) == (True, True)
        assert train(sync, found.step, rewind=found.rewind) == 120
        # The fleet is at 120 from here on, which this service, that never goes back, does not say by itself.
        monkeypatch.setattr(sync, "status", lambda: FleetStatus("default", 120, 1, (), None, rewinds=1))
        assert train(sync) == 121


def test_a_step_counts_until_this_trainers_first_update(service: Service) -> None:
    with WeightSync(service.url, "token") as sync:
        sync.attach_run(120)
        assert [train(sync, 7), train(sync)] == [7, 8]
