"""Which engines fit on which nodes.

Not covered: what Ray does with them.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from weightsync.config import EngineSettings
from weightsync.errors import ConfigError
from weightsync.fleet.placement import require_gpus


def nodes(*gpus: int) -> list[dict[str, Any]]:
    """One node for each number of GPUs, and one more that is gone."""
    alive = [{"Alive": True, "Resources": {"CPU": 4.0} | ({"GPU": float(count)} if count else {})} for count in gpus]
    return [*alive, {"Alive": False, "Resources": {"GPU": 64.0}}]


def settings(count: int) -> EngineSettings:
    return EngineSettings.model_construct(count=count)


@pytest.mark.parametrize(
    ("count", "gpus", "there"),
    [(1, 0, ()), (9, 0, (0,)), (2, 1, (2,)), (2, 4, (8,)), (2, 4, (4, 0, 4)), (3, 0.3, (1,)), (6, 0.3, (1, 1)), (10, 0.1, (1,))],
)
def test_what_fits_is_taken(count: int, gpus: float, there: tuple[int, ...]) -> None:
    require_gpus(settings(count), gpus, nodes(*there), may_grow=False)


@pytest.mark.parametrize(
    ("count", "gpus", "there", "most"),
    [(1, 1, (0,), 0), (3, 1, (2,), 2), (2, 4, (6,), 1), (1, 2, (1, 1), 0), (4, 0.3, (1,), 3), (3, 0.6, (1, 1), 2)],
)
def test_what_does_not_fit_is_refused_with_what_there_is(count: int, gpus: float, there: tuple[int, ...], most: int) -> None:
    with pytest.raises(ConfigError, match=f"got {count}, want at most {most}: .*{gpus:g}.*{list(there)}".replace("[", r"\[")):
        require_gpus(settings(count), gpus, nodes(*there), may_grow=False)


def test_a_cluster_that_may_grow_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        require_gpus(settings(2), 8, nodes(8), may_grow=True)
    assert "want at most 1" in caplog.text
