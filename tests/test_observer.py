"""A vLLM that nobody has proved: refused, or only observed, as configured. On our extension around a small model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker with our extension, of a vLLM whose version is unknown."""
    from weightsync.worker.extension import WeightSyncExtension
    from weightsync.worker.vllm_compat import versions

    monkeypatch.setattr(versions, "PROVED_VERSIONS", ("0.0.1",))
    model = nn.Linear(4, 4)

    class Worker(WeightSyncExtension):
        rank, device, model_runner = 3, "cpu", SimpleNamespace()
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=True), additional_config={}, parallel_config=SimpleNamespace(world_size=4)
        )

        def get_model(self) -> nn.Module:
            return model

    return Worker()


def test_an_unknown_vllm_is_refused_by_name(worker: Any) -> None:
    answer = worker.weightsync_describe()
    assert answer["state"] == "failed" and answer["error"]["code"] == "unknown_vllm"
    assert "proved are 0.0.1" in answer["error"]["message"]
    assert worker.weightsync_contract()["error"]["code"] == "unknown_vllm"


def test_it_is_observed_when_so_configured_and_takes_no_update(worker: Any) -> None:
    worker.vllm_config.additional_config = {"weightsync": {"strict": False, "unknown_vllm": "observe"}}
    before = {name: tensor.clone() for name, tensor in worker.get_model().named_parameters()}
    described = worker.weightsync_describe()
    assert (described["state"], described["error"], described["rank"]) == ("none", None, 3)
    assert described["checks"]["slots_weight"] == 2
    contract = worker.weightsync_contract()["contract"]
    assert {slot["name"] for slot in contract["named"]} == {"model.weight", "model.bias"}
    for call in (worker.weightsync_apply, worker.weightsync_verdict, worker.weightsync_abort):
        answer = call("u-1")
        assert answer["error"]["code"] == "unsupported_engine" and "only observed" in answer["error"]["message"]
    assert worker.weightsync_poll()["state"] == "none"
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.get_model().named_parameters())


def test_a_worker_whose_report_raises_answers_that_it_wrote(worker: Any) -> None:
    def report() -> Any:
        raise KeyError("digest")

    worker._weightsync_applier = SimpleNamespace(report=report, wrote=True)
    answer = worker.weightsync_poll()
    assert (answer["state"], answer["wrote"], answer["error"]["code"]) == ("failed", True, "internal")


def test_strict_reaches_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsync.worker import vllm_compat

    assert vllm_compat.told(SimpleNamespace(additional_config=None)) == {}
    assert vllm_compat.told(SimpleNamespace(additional_config={"weightsync": {"strict": True}}))["strict"] is True


def test_a_twin_has_nothing_on_a_device() -> None:
    from weightsync.worker.vllm_compat.twin import _to_meta

    with torch.device("meta"):
        twin = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own = nn.Parameter(torch.ones(2))
    own.weight_loader = "kept"  # type: ignore[attr-defined]
    twin[0].bias = twin[1].bias = own
    _to_meta(twin)
    assert all(tensor.is_meta for tensor in twin.parameters())
    assert twin[0].bias is twin[1].bias and twin[0].bias.weight_loader == "kept" and isinstance(twin[0].bias, nn.Parameter)
