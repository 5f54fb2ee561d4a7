"""Where an update waits, by the memory that is free.

Not covered: memory of a real device (`tests/gpu`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.client.source import offer
from weightsync.errors import MemoryRefused
from weightsync.transport.packing import plan_buckets
from weightsync.worker import staging
from weightsync.worker.loadmap import LoadMap

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TENSORS = {"a": torch.arange(100, dtype=torch.float32), "b": torch.ones(3, dtype=torch.uint8), "c": torch.arange(9.0).reshape(3, 3)}
OFFER = offer(TENSORS)
PLAN = plan_buckets(OFFER.manifest, 128)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes by kind of device; what would be allocated on CUDA is so on the host."""
    found = {"cpu": 1 << 20, "cuda": 1 << 20}
    monkeypatch.setattr(staging, "free_bytes", lambda device: found[device.type])
    stock = torch.empty

    def empty(*args: Any, device: torch.device = CPU, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs)
        return SimpleNamespace(device=device, numel=made.numel, data=made) if device.type == "cuda" else made

    monkeypatch.setattr(torch, "empty", empty)
    return found


@pytest.mark.parametrize(
    ("stage", "device", "cuda_free", "expected"),
    [
        ("auto", CPU, 0, "cpu"),
        ("gpu", CPU, 0, "cpu"),
        ("host", CUDA, 1 << 20, "cpu"),
        ("auto", CUDA, 2 * PLAN.stream_bytes, "cuda"),
        ("auto", CUDA, 2 * PLAN.stream_bytes - 1, "cpu"),
        ("gpu", CUDA, 2 * PLAN.stream_bytes - 1, "cuda"),
    ],
)
def test_where_an_update_waits(stage: str, device: torch.device, cuda_free: int, expected: str, free: dict[str, int]) -> None:
    free["cuda"] = cuda_free
    made = staging.allocate(PLAN, stage, device, CPU)
    assert made.device.type == expected and made.numel() == PLAN.stream_bytes


@pytest.mark.parametrize(
    ("stage", "kind", "most"),
    [("host", "host", int(PLAN.stream_bytes / 0.8)), ("gpu", "device", int(PLAN.stream_bytes / 0.8))],
)
def test_what_would_not_fit_is_refused_with_what_is_free(stage: str, kind: str, most: int, free: dict[str, int]) -> None:
    where = {"host": "cpu", "device": "cuda"}[kind]
    free[where] = most - 1
    with pytest.raises(MemoryRefused, match=f"staging needs {PLAN.stream_bytes} bytes of {kind} memory and {most - 1} are free"):
        staging.allocate(PLAN, stage, CUDA, CPU)
    free[where] = most + 1
    assert staging.allocate(PLAN, stage, CUDA, CPU).numel() == PLAN.stream_bytes


def test_buckets_that_would_not_fit_where_they_land_are_refused(free: dict[str, int]) -> None:
    free["cuda"] = 150
    with pytest.raises(MemoryRefused, match="two buckets take 256 bytes of device memory and 150 are free"):
        staging.allocate(PLAN, "host", CUDA, CUDA)
    assert staging.allocate(PLAN, "host", CUDA, CPU).numel() == PLAN.stream_bytes, "gloo lands on the host"


def test_a_staged_update_gives_its_tensors_and_leaves_out_what_is_skipped() -> None:
    data = torch.zeros(PLAN.stream_bytes, dtype=torch.uint8)
    whole = staging.Whole(OFFER.manifest, PLAN, data)
    for index, tensor in enumerate(TENSORS.values()):
        whole.tensor(index).copy_(tensor)
    taken: list[str] = []
    staged = whole.update(LoadMap({}), ["b"])
    found = dict(staged.stream(taken))
    assert list(found) == ["a", "c"] and taken == ["a", "b", "c"]
    assert all(torch.equal(found[name], TENSORS[name]) for name in found)
    assert staged.on_host() is staged
