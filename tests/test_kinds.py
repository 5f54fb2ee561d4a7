"""After sync A → B → A an engine answers to the bit as one that was started on the same weights.

One real fleet per kind; tokens and log-probabilities, greedy. The dense untied
kind runs in `test_main_job.py`, with two engines.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fleets import Fleet, answers

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen3-tied", "w4a16", "fp8-channel", "mla", "int8-channel"])
def test_engine_equals_a_cold_one_to_new_weights_and_back(kind: str, checkpoint: Any, tensors: Any, cold: Any, tmp_path: Any) -> None:
    fleet = Fleet(checkpoint(kind, 1), tmp_path / "fleet").ready()
    try:
        with fleet.client(bucket_bytes=100_000) as sync:  # several buckets, and tensors over their borders
            assert cold(kind, 1) != cold(kind, 2), "the two seeds must be told apart by their outputs"
            for version, seed in enumerate([1, 2, 1], start=1):
                report = sync.sync_weights(tensors(kind, seed))
                assert report.version == version
                assert answers(sync, 0) == cold(kind, seed), f"version {version}"
    finally:
        assert fleet.stop() == 0
