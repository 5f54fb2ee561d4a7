"""What is kept to come back to behind partial updates."""

from __future__ import annotations

import pytest
import torch

from weightsync.client.source import offer
from weightsync.transport.packing import plan_buckets
from weightsync.worker.held import Held
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.staging import Staged

FULL = {"q": 1.0, "k": 1.0, "v": 1.0, "rotary": 1.0}


def staged(values: dict[str, float], load_map: LoadMap, unused: frozenset[int] = frozenset()) -> Staged:
    tensors = {name: torch.full((3,), value) for name, value in values.items()}
    manifest = offer(tensors).manifest
    plan = plan_buckets(manifest, 4096)
    data = torch.zeros(plan.stream_bytes, dtype=torch.uint8)
    for offset, tensor in zip(plan.offsets, tensors.values(), strict=True):
        data[offset : offset + tensor.nbytes] = tensor.view(torch.uint8)
    return Staged(manifest, plan.offsets, data, load_map, frozenset(), unused)


def values(kept: Staged | None) -> dict[str, float]:
    assert kept is not None
    return {spec.name: float(kept.tensor(index)[0]) for index, spec in enumerate(kept.manifest.tensors)}


@pytest.mark.parametrize("writes", [{"q": [], "k": []}, {"k": []}])
def test_all_that_loaders_touched_of_a_partial_update_is_kept_whoever_is_said_to_have_written_it(writes: dict[str, list[object]]) -> None:
    """A loader that joins q and k before it stores them writes under the name of the second."""
    held = Held()
    held.settle("u1", staged(FULL, LoadMap({})))
    part = LoadMap({}, writes, touched={"q", "k"}, part=True)  # type: ignore[arg-type]
    held.settle("u2", staged({"q": 2.0, "k": 2.0, "rotary": 2.0}, part))
    assert values(held.kept) == {"q": 2.0, "k": 2.0, "v": 1.0, "rotary": 1.0}
    assert held.counts == "u2"


def test_what_another_worker_needs_alone_is_not_merged_and_what_does_not_fit_ends_the_keeping() -> None:
    held = Held()
    held.settle("u1", staged(FULL, LoadMap({}), frozenset({0})))
    part = LoadMap({}, {"q": [], "k": []}, touched={"q", "k"}, part=True)
    held.settle("u2", staged({"q": 2.0, "k": 2.0}, part, frozenset({0})))
    assert values(held.kept)["q"] == 1.0 and values(held.kept)["k"] == 2.0
    held.settle("u3", staged({"q": 3.0, "k": 3.0}, part))
    assert held.kept is None, "the kept one lacks q's bytes"
