"""The benchmark of an update's way: it sends what it says, and its shares are of the right row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import transport
from benchmarks.transport import GOALS, SHAPES, WAYS


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gigabytes", [1.2, 4.0, 20.0])
def test_a_shape_has_about_the_bytes_that_are_asked_for(shape: str, gigabytes: float) -> None:
    tensors = SHAPES[shape].tensors(gigabytes)
    assert sum(2 * torch.Size(one).numel() for one in tensors) / 1e9 == pytest.approx(gigabytes, rel=0.2)
    assert len(tensors) > 12


def test_a_shape_at_its_own_size_is_the_model() -> None:
    whole = SHAPES["qwen3-0.6b"].tensors(1.192)
    assert sum(2 * torch.Size(one).numel() for one in whole) == pytest.approx(1.192e9, rel=0.001) and len(whole) == 1 + 28 * 11 + 1
    assert sum(2 * torch.Size(one).numel() for one in SHAPES["qwen3-8b"].tensors(16.38)) == pytest.approx(16.38e9, rel=0.001)


def row(mb: int, way: str, median: float, best: float) -> dict[str, Any]:
    return {"bucket_mb": mb, "way": way, "gigabytes_per_second": {"median": median, "best": best}}


def test_a_share_is_of_the_bare_row_of_the_same_bucket() -> None:
    rows = [row(1, "bare", 4.0, 5.0), row(1, "all", 2.0, 4.0), row(2, "bare", 8.0, 8.0), row(2, "all", 2.0, 6.0)]
    transport.shares(rows)
    assert [(one["of_bare"], one["best_of_bare"]) for one in rows] == [(1.0, 1.0), (0.5, 0.8), (1.0, 1.0), (0.25, 0.75)]


@pytest.mark.parametrize("over", ["gloo", "local"])
def test_all_ways_are_measured_in_one_run(over: str) -> None:
    small = ["--gigabytes=0.01", "--bucket-mb=1,4", "--repeats=1", "--warm-up=0", "--threads=1"]
    given = transport.options([f"--transport={over}", *small])
    rows, facts = transport.measure(given)
    assert [(one["bucket_mb"], one["way"]) for one in rows] == [(mb, way) for mb in (1, 4) for way in WAYS]
    assert all(one["gigabytes_per_second"]["median"] > 0 for one in rows)
    assert facts["bytes"] > 9e6 and GOALS[over][0] in WAYS
    whole = rows[WAYS.index("all")]["seconds"]
    assert set(whole["trainer"]) == {"ground", "export", "pack", "await_pack", "broadcast", "settle"} and whole["worker"]["receive"] > 0
    transport.shares(rows)
    assert len(transport.table(rows).splitlines()) == 2 + 2 * len(WAYS)
