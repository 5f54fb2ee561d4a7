"""Values that an engine must not get, on a real engine in float16 that follows a trainer in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.fleets import Fleet, answers, wait_until
from weightsync import WeightSync
from weightsync.errors import BadValues, ConfigError
from weightsync.protocol import EngineState

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3"
DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def half(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("half"), flags=["--engine.dtype=float16"]).ready()
    yield running
    assert running.stop() == 0


@pytest.fixture
def sync(half: Fleet) -> Iterator[WeightSync]:
    with half.client(bucket_bytes=60_000) as client:
        yield client


def with_value(tensors: dict[str, torch.Tensor], name: str, value: float) -> dict[str, torch.Tensor]:
    changed = tensors[name].clone()
    changed.view(-1)[-1] = value
    return {**tensors, name: changed}


def test_bad_values_reach_the_trainer_by_name_and_the_engine_serves_what_it_had(half: Fleet, sync: WeightSync, tensors: Any) -> None:
    good = tensors(KIND, 1)
    sync.sync_weights(good)
    before = answers(sync, 0)
    engines = wait_until(lambda: (told := sync.engines())[0].retained and told, what="what it keeps")  # told a moment later
    cases = {
        float("nan"): "1 NaN of",
        float("-inf"): "1 infinite of",
        70_000.0: "1 beyond 65504, the most that float16 holds of",
    }
    for value, said in cases.items():
        with pytest.raises(BadValues) as caught:
            sync.sync_weights(with_value(with_value(tensors(KIND, 2), DOWN, value), NORM, value))
        assert set(caught.value.names) == {DOWN, NORM}
        assert f"{DOWN} ({said} {good[DOWN].numel()})" in caught.value.message
        assert (caught.value.engine, caught.value.phase, caught.value.retryable) == (0, "receive", False)
        assert half.get("/v1/updates").json()[0]["error"]["code"] == "bad_values"
        assert sync.engines() == engines and engines[0].state == EngineState.SERVING
        assert answers(sync, 0) == before
    sync.sync_weights(tensors(KIND, 2))  # and the next one just works
    assert answers(sync, 0)[0] != before[0]
    sync.sync_weights(good)
    assert answers(sync, 0) == before


def test_what_becomes_infinite_is_let_through_when_the_trainer_says_so(half: Fleet, sync: WeightSync, tensors: Any) -> None:
    # A token that no prompt holds: the engine's answers do not show it, and nothing else can be hurt.
    source = with_value(tensors(KIND, 2), "model.embed_tokens.weight", 70_000.0)
    with pytest.raises(BadValues):
        sync.sync_weights(source)
    assert sync.sync_weights(source, allow_nonfinite=True).verdicts[0].committed
    with half.client(allow_nonfinite=True) as permissive:
        assert permissive.sync_weights(source).verdicts[0].committed
        with pytest.raises(BadValues):
            permissive.sync_weights(source, allow_nonfinite=False)
    with pytest.raises(ConfigError, match="allow_nonfinite"):
        sync.sync_weights(source, allow_nonfinite="yes")  # type: ignore[arg-type]
    sync.sync_weights(tensors(KIND, 1))
