"""What a fleet of one engine must do around vLLM's two sleep levels, whatever runs it: on CUDA, or with a sleep that is made up.

Not covered: several engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import httpx
import pytest
import torch

from tests.fleets import Fleet, answers
from weightsync import WeightSync
from weightsync.errors import BaseRefused, NoEngineReady
from weightsync.protocol import EngineState, EngineStatus

Sent = Callable[[int], Mapping[str, torch.Tensor]]
LAYER = ["model.layers.0.*"]


def through_a_light_sleep(fleet: Fleet, sync: WeightSync, sent: Sent) -> None:
    """Level 1: no update, no request, and then all as it was."""
    sync.sync_weights(sent(1))
    said, version = answers(sync, 0), sync.engines()[0].version
    engine = _one(sync.sleep(1).engines)
    assert (engine.state, engine.reason, engine.version) == (EngineState.ASLEEP, "asleep", version)
    _require_out(fleet, sync, "asleep")
    with pytest.raises(NoEngineReady, match=r"1 engine\(s\) are asleep: 0"):
        sync.sync_weights(sent(2))
    engine = _one(sync.wake().engines)
    assert (engine.state, engine.reason, engine.version) == (EngineState.SERVING, "", version)
    assert answers(sync, 0) == said, "the same weights, to the bit"
    report = sync.sync_weights(sent(2), scope=LAYER)
    assert report.version == (version or 0) + 1, "it holds what it held, and a partial update may build on it"
    sync.sync_weights(sent(1), scope=LAYER)
    assert answers(sync, 0) == said


def through_a_deep_sleep(fleet: Fleet, sync: WeightSync, sent: Sent) -> dict[int, tuple[list[list[int]], list[list[float]]]]:
    """Level 2: behind it nothing is served before a complete update, and then all is right; what the engine says, by seed."""
    said = {}
    for seed in (1, 2, 1):
        sync.sync_weights(sent(seed))
        said[seed] = answers(sync, 0)
    assert said[1] != said[2]
    for seed in (2, 1):
        url = sync.engines()[0].url
        engine = _one(sync.sleep(2).engines)
        assert (engine.state, engine.reason, engine.version) == (EngineState.ASLEEP, "asleep", None)
        engine = _one(sync.wake().engines)
        assert (engine.state, engine.reason, engine.version) == (EngineState.PENDING, "pending_weights", None)
        _require_out(fleet, sync, "pending_weights")
        with pytest.raises(BaseRefused, match="engine 0 is pending with no version"):
            sync.sync_weights(sent(seed), scope=LAYER)
        report = sync.sync_weights(sent(seed))  # whose verdict says that the storage contract holds
        print("constants restored:", report.verdicts[0].checks["constants_restored"], "paused", round(report.pause_seconds, 3))
        assert report.verdicts[0].checks["constants_restored"] > 0
        assert answers(sync, 0) == said[seed]
        assert sync.engines()[0].url == url, "it did not restart"
        assert "constants_restored" not in sync.sync_weights(sent(seed)).verdicts[0].checks
    return said


def _one(engines: tuple[EngineStatus, ...]) -> EngineStatus:
    assert len(engines) == 1
    return engines[0]


def _require_out(fleet: Fleet, sync: WeightSync, reason: str) -> None:
    """Neither the service, the client nor the engine's own application takes a request for it."""
    ready = fleet.get("/readyz")
    assert ready.status_code == 503 and f"engine_{reason.removesuffix('_weights')}" in ready.json()["reasons"]
    with pytest.raises(NoEngineReady):
        sync.generate([1, 5, 9], max_tokens=2, engine=0)
    body = {"model": "policy", "prompt": [1, 5, 9], "max_tokens": 2}
    headers = {"authorization": f"Bearer {fleet.token}"}
    answer = httpx.post(sync.engines()[0].url + "/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 503 and reason in answer.json()["error"]["message"]
