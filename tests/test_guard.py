"""The guard of one worker, without an engine: seal, repair, check, seal again; graphs and their census are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.storage import census
from weightsync.storage.adopt import Adoption
from weightsync.storage.census import Block, Census
from weightsync.storage.contract import What

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def guard() -> Any:
    """Imported late: loading vLLM takes seconds."""
    pytest.importorskip("vllm")
    from weightsync.worker import guard

    return guard


class Kernel:
    def __init__(self, scale: float) -> None:
        self.scale = torch.full((4,), scale)
        self.scale_float = scale


def small() -> Any:
    model: Any = nn.Module()
    model.layer = nn.Linear(4, 4)
    model.layer.kernel = Kernel(2.0)
    return model


def block(tensor: torch.Tensor, **more: Any) -> Block:
    nbytes = tensor.untyped_storage().nbytes()
    return Block("external", tensor.untyped_storage().data_ptr(), nbytes, nbytes, (0,), ("gemm",), 1, **more)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """What the next census finds that graphs read."""
    reads: list[Block] = []
    monkeypatch.setattr(census, "active", lambda: True)
    monkeypatch.setattr(census, "take", lambda: Census(2, {}, {}, len(reads), tuple(sorted(reads, key=lambda b: b.address))))
    return reads


def test_a_guard_that_is_sealed_again_goes_by_what_it_finds_then(guard: Any) -> None:
    model = small()
    held = guard.Guard(model, None, CPU, graphs=False)
    model.layer.kernel = Kernel(3.0)
    model.layer.kernel.scale = torch.full((2, 2), 3.0)
    assert held.scalars_changed() == ["model.layer.kernel.scale_float"]
    done = held.repair()
    found = held.verify(done)
    assert {(f.what, f.path) for f in found.faults} == {
        (What.CHANGED_LAYOUT, "model.layer.kernel.scale"), (What.SCALAR, "model.layer.kernel.scale_float")
    }  # fmt: skip
    held.seal()
    assert held.scalars_changed() == []
    done = held.repair()
    assert held.verify(done).ok and held.broken(done, held.verify(done)) is None
    model.layer.kernel.scale = model.layer.kernel.scale.clone()
    assert held.repair().adopted == ["model.layer.kernel.scale"], "the repair goes by the new seal"


def test_a_number_that_is_gone_has_changed(guard: Any) -> None:
    model = small()
    held = guard.Guard(model, None, CPU, graphs=False)
    del model.layer.kernel.scale_float
    assert held.scalars_changed() == ["model.layer.kernel.scale_float"]


def test_only_what_a_graph_reads_counts_and_a_new_census_is_taken_at_each_seal(guard: Any, graphs: list[Block]) -> None:
    model, runner = small(), SimpleNamespace(inputs=torch.zeros(8), other=torch.zeros(8))
    graphs += [block(model.layer.weight), block(runner.inputs)]
    held = guard.Guard(model, runner, CUDA, graphs=True)
    assert set(held.contract.places) == {"model.layer.weight", "runner.inputs"}
    assert held.sealed.counts["graphs"] == 2
    graphs[:] = [block(model.layer.kernel.scale)]
    held.seal()
    assert set(held.contract.places) == {"model.layer.kernel.scale"}


def test_memory_that_a_graph_still_reads_is_held_over_a_new_seal(guard: Any, graphs: list[Block]) -> None:
    model = small()
    graphs.append(block(model.layer.kernel.scale))
    held = guard.Guard(model, None, CUDA, graphs=True)
    model.layer.kernel = Kernel(2.0)
    held.seal()  # without a repair, and the graph that reads the old scale is still there
    (slot,) = held.contract.unowned
    assert slot.address == graphs[0].address
    assert [pin.address for pin in held._adopter.pins.anonymous] == [slot.address]
    graphs[:] = [block(model.layer.kernel.scale)]
    held.seal()
    assert not held.contract.unowned and not held._adopter.pins.anonymous


def test_a_seal_that_fails_leaves_the_earlier_one_in_force(guard: Any, graphs: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    graphs.append(block(model.layer.weight))
    held = guard.Guard(model, None, CUDA, graphs=True)
    monkeypatch.setattr(census, "active", lambda: False)
    with pytest.raises(guard.UnsupportedEngine, match="census is not in place"):
        held.seal()
    model.layer.weight.data = torch.zeros(4, 4)
    (fault,) = held.verify(Adoption()).faults
    assert (fault.what, fault.path) == (What.MOVED, "model.layer.weight")
