"""The guard of one worker, without an engine: seal, repair, check, seal again; graphs and their census are made up."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.codec import decode, encode
from weightsync.errors import UnsupportedEngine
from weightsync.protocol import ContractAnswer, ContractReport
from weightsync.storage import census
from weightsync.storage.adopt import Adoption
from weightsync.storage.blocks import Age
from weightsync.storage.census import Block, Census
from weightsync.storage.contract import Kind, What

ENGINE = """
import json, sys
from vllm import LLM
llm = LLM(model=sys.argv[1], worker_extension_cls="weightsync.worker.extension.WeightSyncExtension", **json.loads(sys.argv[2]))
print("CONTRACT", json.dumps(llm.collective_rpc("weightsync_contract")), flush=True)
import os; os._exit(0)
"""
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


def all_read(model: Any) -> list[Block]:
    return [block(tensor) for tensor in (model.layer.weight, model.layer.bias, model.layer.kernel.scale)]


def test_a_guard_that_is_sealed_again_goes_by_what_it_finds_then(guard: Any, graphs: list[Block]) -> None:
    model = small()
    graphs += all_read(model)
    held = guard.Guard(model, None, CUDA, graphs=True)
    model.layer.kernel = Kernel(3.0)
    model.layer.kernel.scale = torch.full((2, 2), 3.0)
    assert held.scalars_changed() == ["model.layer.kernel.scale_float"]
    done = held.repair()
    assert held.relaid(done) == ["model.layer.kernel.scale"]
    assert held.relaid(Adoption(changed_layout={"model.layer.eager": "no graph reads it"})) == []
    found = held.verify(done)
    assert {(f.what, f.path) for f in found.faults} == {
        (What.CHANGED_LAYOUT, "model.layer.kernel.scale"), (What.SCALAR, "model.layer.kernel.scale_float")
    }  # fmt: skip
    graphs[:] = all_read(model)
    held.seal()
    assert held.scalars_changed() == []
    done = held.repair()
    assert held.verify(done).ok and held.broken(done, held.verify(done)) is None
    model.layer.kernel.scale = model.layer.kernel.scale.clone()
    assert held.repair().adopted == ["model.layer.kernel.scale"], "the repair goes by the new seal"


@pytest.mark.parametrize(
    ("change", "what", "path"),
    [
        (lambda m: setattr(m.layer.weight, "data", torch.zeros(4, 4)), What.MOVED, "weight"),
        (lambda m: setattr(m.layer, "weight", nn.Parameter(torch.zeros(4, 4))), What.MOVED, "weight"),
        (lambda m: setattr(m.layer.weight, "data", m.layer.weight.data.t()), What.CHANGED_LAYOUT, "weight"),
        (lambda m: delattr(m.layer, "bias"), What.LOST, "bias"),
        (lambda m: delattr(m.layer, "kernel"), What.LOST, "kernel.scale"),
        (lambda m: setattr(m.layer.kernel, "scale_float", 3.0), What.SCALAR, "kernel.scale_float"),
    ],
)
def test_without_a_repair_every_change_is_a_fault(guard: Any, graphs: list[Block], change: Any, what: What, path: str) -> None:
    model = small()
    graphs += all_read(model)
    held = guard.Guard(model, None, CUDA, graphs=True)
    assert held.verify(Adoption()).ok
    change(model)
    verdict = held.verify(Adoption())
    assert [fault.path for fault in verdict.of(what)] == [f"model.layer.{path}"]
    assert f"model.layer.{path}" in str(held.broken(Adoption(), verdict))


def test_a_number_that_is_gone_has_changed_and_without_graphs_none_counts(guard: Any, graphs: list[Block]) -> None:
    model = small()
    graphs += all_read(model)
    held, eager = guard.Guard(model, None, CUDA, graphs=True), guard.Guard(model, None, CPU, graphs=False)
    del model.layer.kernel.scale_float
    assert held.scalars_changed() == ["model.layer.kernel.scale_float"]
    assert eager.scalars_changed() == [] and eager.verify(Adoption()).ok


def test_only_what_a_graph_reads_counts_and_a_new_census_is_taken_at_each_seal(guard: Any, graphs: list[Block]) -> None:
    model, runner = small(), SimpleNamespace(inputs=torch.zeros(8), other=torch.zeros(8))
    graphs += [block(model.layer.weight), block(runner.inputs)]
    held = guard.Guard(model, runner, CUDA, graphs=True)
    assert {slot.name: slot.watched for slot in held.contract.slots} == {"model.layer.weight": True, "runner.inputs": False}
    assert held.sealed.counts["graphs"] == 2
    graphs[:] = [block(model.layer.kernel.scale)]
    held.seal()
    assert set(held.contract.places) == {"model.layer.kernel.scale"}


def test_what_only_the_engines_runs_hold_may_be_laid_anew_and_what_the_model_reaches_too_may_not(guard: Any, graphs: list[Block]) -> None:
    model, runner = small(), SimpleNamespace(indices=torch.zeros(8), caches=[torch.zeros(16)])
    model.layer.kv_cache = runner.caches[0].view(4, 4)
    graphs += [block(model.layer.weight), block(runner.indices), block(runner.caches[0])]
    held = guard.Guard(model, runner, CUDA, graphs=True)
    runner.indices = runner.indices[:4]
    assert held.verify(Adoption()).ok
    model.layer.kv_cache = torch.zeros(4, 4)
    (fault,) = held.verify(Adoption()).faults
    assert (fault.what, fault.path) == (What.MOVED, "model.layer.kv_cache")


def test_names_that_are_new_after_every_update_are_counted_together_when_there_are_too_many(guard: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(guard, "MAX_NEW_NAMES", 2)
    model = small()
    held = guard.Guard(model, None, CPU, graphs=False)
    for update in range(5):
        held.note("followed", [f"model.table[{update}]", "model.layer.weight"])
    held.note("followed", ["model.table[0]"])
    assert held.report().repaired == {
        "model.layer.weight": {"followed": 5}, "<other new paths>": {"followed": 3},
        "model.table[0]": {"followed": 2}, "model.table[1]": {"followed": 1},
    }  # fmt: skip


def test_memory_that_is_not_the_allocators_counts_where_it_has_an_owner(guard: Any, graphs: list[Block]) -> None:
    """As weights do that are offloaded to pinned host memory, which kernels read across the bus."""
    model, foreign = small(), torch.zeros(64)
    scale = model.layer.kernel.scale
    graphs += [replace(block(tensor), kind="unknown", memory="host") for tensor in (scale, foreign)]
    held = guard.Guard(model, None, CUDA, graphs=True)
    assert [slot.name for slot in held.contract.slots] == ["model.layer.kernel.scale"], "and what nobody owns is no slot"
    model.layer.kernel.scale = scale.clone()
    assert held.verify(Adoption()).of(What.MOVED)
    done = held.repair()
    assert done.adopted == ["model.layer.kernel.scale"] and held.verify(done).ok


def test_an_engine_with_graphs_of_which_none_was_counted_is_refused(guard: Any, graphs: list[Block], monkeypatch: Any) -> None:
    monkeypatch.setattr(census, "take", lambda: Census(0, {}, {}, 0, ()))
    with pytest.raises(UnsupportedEngine, match="counted none") as refused:
        guard.Guard(small(), None, CUDA, graphs=True)
    assert "enforce_eager" in refused.value.hint
    assert not guard.Guard(small(), None, CUDA, graphs=False).outdated


def test_captures_that_came_after_the_seal_and_those_that_outlived_it_are_told(guard: Any, graphs: list[Block], monkeypatch: Any) -> None:
    model = small()
    graphs += all_read(model)
    alive = {1, 2}
    monkeypatch.setattr(census, "captures", lambda: frozenset(alive))
    held = guard.Guard(model, None, CUDA, graphs=True)
    assert not held.outdated
    alive.discard(1)
    assert not held.outdated, "what is gone reads nothing"
    alive.add(3)
    assert held.outdated
    assert held.seal() == 1 and not held.outdated
    alive.clear()
    alive.add(4)
    assert held.seal() == 0


def test_memory_that_a_graph_still_reads_is_held_over_a_new_seal(guard: Any, graphs: list[Block]) -> None:
    model = small()
    graphs.append(block(model.layer.kernel.scale))
    held = guard.Guard(model, None, CUDA, graphs=True)
    model.layer.kernel = Kernel(2.0)
    held.seal()  # without a repair, and the graph that reads the old scale is still there
    (slot,) = held.contract.unowned
    assert slot.address == graphs[0].address and slot.where == "<once model.layer.kernel.scale>"
    assert held.verify(Adoption()).of(What.ANONYMOUS), "it had an owner once, so it is no scratch"
    held.seal()
    assert held.contract.unowned == (slot,), "and over another one"
    assert [pin.address for pin in held._adopter.pins.anonymous] == [slot.address]
    graphs[:] = [block(model.layer.kernel.scale)]
    held.seal()
    assert not held.contract.unowned and not held._adopter.pins.anonymous


def test_a_seal_that_fails_leaves_the_earlier_one_in_force(guard: Any, graphs: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    graphs.append(block(model.layer.weight))
    held = guard.Guard(model, None, CUDA, graphs=True)
    monkeypatch.setattr(census, "active", lambda: False)
    with pytest.raises(UnsupportedEngine, match="census is not in place"):
        held.seal()
    model.layer.weight.data = torch.zeros(4, 4)
    (fault,) = held.verify(Adoption()).faults
    assert (fault.what, fault.path) == (What.MOVED, "model.layer.weight")


NOBODYS = 0x7F00_0000_0000


@pytest.mark.parametrize(
    ("age", "active", "strict", "kind", "ok"),
    [
        (Age.LOADED, True, False, Kind.DERIVED, False),
        (Age.LOADED, True, True, Kind.DERIVED, False),
        (Age.LATER, True, False, Kind.SCRATCH, True),
        (Age.LATER, True, True, Kind.SCRATCH, True),
        (Age.UNKNOWN, True, False, Kind.ANONYMOUS, True),
        (Age.UNKNOWN, True, True, Kind.ANONYMOUS, False),
        (Age.UNKNOWN, False, False, Kind.ANONYMOUS, True),
        (Age.UNKNOWN, False, True, Kind.ANONYMOUS, False),
    ],
)
def test_what_nobody_owns_is_refused_if_it_may_be_derived_from_weights(
    guard: Any, graphs: list[Block], caplog: Any, age: Age, active: bool, strict: bool, kind: Kind, ok: bool
) -> None:
    model = small()
    graphs += [
        block(model.layer.weight),
        Block("external", NOBODYS, 4096, 4000, (0, 64), ("splitk",), 2, active, age=age, where="a.py:1 f"),
    ]
    held = guard.Guard(model, None, CUDA, graphs=True, strict=strict)
    verdict, report = held.verify(Adoption()), held.report()
    assert verdict.ok is ok and report.possibly_derived == held.sealed.counts["slots_possibly_derived"] == (0 if ok else 1)
    (slot,) = report.anonymous
    assert (slot.kind, slot.nbytes, slot.address, slot.kernel, slot.paths) == (kind, 4096, NOBODYS, "splitk", 0)
    assert "a.py:1 f" in slot.where and ("freed" in slot.where) is not active
    said = [record for record in caplog.records if "nobody owns" in record.message]
    assert [record.levelno for record in said] == ([] if kind is Kind.SCRATCH else [logging.WARNING if ok else logging.ERROR])
    broken = held.broken(Adoption(), verdict)
    assert (broken is None) is ok
    if not ok:
        assert "4096 bytes" in said[0].message and "no update will pass" in said[0].message
        assert "splitk" in str(broken) and "a.py:1 f" in str(broken)


def test_a_tensor_that_no_path_leads_to_is_held_and_says_by_what(guard: Any, graphs: list[Block]) -> None:
    model, loose = small(), {torch.zeros(16)}
    graphs += [block(tensor, age=Age.LATER) for tensor in loose]
    held = guard.Guard(model, None, CUDA, graphs=True)
    address = graphs[0].address
    (slot,) = held.report().anonymous
    assert not held.report().truncated, "what is deep in globals that hold nothing is nobody's business"
    assert (slot.address, slot.kind, slot.where) == (address, "scratch", "<held by set>")
    loose.clear()
    (kept,) = held._adopter.pins.anonymous
    assert kept.intact and kept.address == address


def test_the_engines_own_memory_is_told_from_the_models(guard: Any, graphs: list[Block]) -> None:
    model = small()
    runner = SimpleNamespace(model=model, inputs=torch.zeros(8), drafter=SimpleNamespace(model=small()))
    draft, runner.head = runner.drafter.model.layer, model.layer.weight
    graphs += [block(t) for t in (model.layer.weight, model.layer.kernel.scale, runner.inputs, draft.weight, draft.kernel.scale)]
    graphs.append(Block("unknown", 1 << 45, 64, 64, (0,), ("memcpy",), 1, memory="host"))
    report = guard.Guard(model, runner, CUDA, graphs=True).report()
    kinds = {slot.name: slot.kind for slot in report.named}
    assert kinds == {
        "model.layer.weight": "weight", "model.layer.kernel.scale": "derived", "runner.inputs": "engine",
        "runner.drafter.model.layer.weight": "weight", "runner.drafter.model.layer.kernel.scale": "derived",
    }  # fmt: skip
    assert report.slots == {"weight": 2, "derived": 2, "static": 0, "scratch": 0, "engine": 1, "anonymous": 0}
    assert report.nbytes["weight"] == 2 * 64 and report.nbytes["engine"] == 32
    assert (
        report.graphs == 2 and report.outside == {"host": 1} and next(s for s in report.named if s.name == "model.layer.weight").paths == 2
    )


def test_a_strict_guard_fails_what_had_to_be_repaired(guard: Any) -> None:
    model = small()
    held = guard.Guard(model, None, CPU, graphs=False, strict=True)
    done = held.repair()
    assert held.verify(done).ok
    model.layer.kernel = Kernel(2.0)
    done = held.repair()
    verdict = held.verify(done)
    assert not verdict.ok and not verdict.faults
    assert "model.layer.kernel.scale: repaired, and strict is set" in str(held.broken(done, verdict))


def test_a_repaired_path_is_told_once_and_counted_always(guard: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    model = small()
    held = guard.Guard(model, None, CPU, graphs=False)
    for number in range(4):
        if number == 2:
            held.seal()
        model.layer.kernel = Kernel(2.0)
        model.layer.kernel.scale += number == 3
        done = held.repair()
        assert held.verify(done).ok
    held.note("rebound", ["model.layer.bias"])
    report = held.report()
    assert report.repaired == {"model.layer.kernel.scale": {"adopted": 4, "refreshed": 1}, "model.layer.bias": {"rebound": 1}}
    assert next(iter(report.repaired)) == "model.layer.kernel.scale" and (report.seals, report.checks) == (2, 4)
    assert len([record for record in caplog.records if "adopted: model.layer.kernel.scale" in record.message]) == 1


def test_the_report_says_what_is_wrong_and_how_much_it_leaves_out(guard: Any) -> None:
    model = small()
    held = guard.Guard(model, None, CPU, graphs=False, unproven=["model.layer.a", "model.layer.b", "model.layer.c"])
    first = held.report()
    assert (first.lost, first.faults, first.checks, first.left_out) == ((), (), 0, 0)
    assert [slot.name for slot in first.named] == ["model.layer.kernel.scale", "model.layer.bias", "model.layer.weight"]
    assert first.vllm_version and first.device == "cpu" and not first.strict and set(first.seconds) == {"census", "owners", "seal"}
    del model.layer.kernel
    held.verify(held.repair())
    short = held.report(limit=1)
    assert short.lost == ("model.layer.kernel.scale",) and "lost" in short.faults[0]
    assert len(short.named) == 1 and short.left_out == 2
    assert short.unproven == ("model.layer.a", "and 2 more")
    assert {"repair", "check"} <= set(short.seconds)
    assert decode(ContractReport, encode(short)) == short


def test_where_the_search_for_owners_stopped_is_reported(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.storage.owners.MAX_DEPTH", 0)
    monkeypatch.setattr("weightsync.storage.owners.Walker.__init__.__defaults__", ((), 3, 32))
    assert guard.Guard(small(), None, CPU, graphs=False).report().truncated


def test_a_path_that_only_a_walk_finds_is_checked_by_a_walk(guard: Any) -> None:
    model = small()
    model.__dict__["layer"] = SimpleNamespace(table=torch.zeros(4))  # of the same name as the child
    held = guard.Guard(model, None, CPU, graphs=False)
    assert held._walked == ["model.layer.table"] and held.verify(Adoption()).ok
    model.__dict__["layer"].table = torch.zeros(4)
    assert [fault.path for fault in held.verify(Adoption()).faults] == ["model.layer.table"]


def test_the_call_from_outside_answers_and_never_raises(guard: Any) -> None:
    from weightsync.worker.extension import WeightSyncExtension

    held = guard.Guard(small(), None, CPU, graphs=False)
    worker: Any = WeightSyncExtension()
    worker.rank, worker._weightsync_applier = 1, SimpleNamespace(contract=held.report)
    # The second worker of the second data-parallel copy.
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=1, world_size=2))
    answer = decode(ContractAnswer, worker.weightsync_contract())
    assert answer == ContractAnswer(3, held.report(), None)
    for failure, code in ((UnsupportedEngine("no census"), "unsupported_engine"), (KeyError("odd"), "internal")):
        worker._weightsync_applier = SimpleNamespace(contract=lambda failure=failure: (_ for _ in ()).throw(failure))
        answer = decode(ContractAnswer, worker.weightsync_contract())
        assert answer.rank == 3 and answer.contract is None and answer.error is not None and answer.error["code"] == code


@pytest.mark.engine
def test_a_real_engine_tells_its_contract(checkpoint: Any) -> None:
    from tests.fleets import ENGINE_ARGS
    from weightsync.demo.cold import COLD_ENV

    command = [sys.executable, "-c", ENGINE, str(checkpoint("qwen3-tied", 1)), json.dumps(ENGINE_ARGS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **COLD_ENV})
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("CONTRACT "))
    (plain,) = json.loads(line.removeprefix("CONTRACT "))
    answer = decode(ContractAnswer, plain)
    assert answer.error is None and answer.contract is not None
    contract = answer.contract
    assert contract.graphs == 0 and contract.seals == 1 and not contract.faults and not contract.truncated
    assert contract.slots["weight"] > 10 and contract.slots["derived"] > 0 and not contract.anonymous
    assert any(slot.kind == "weight" and slot.name == "model.model.embed_tokens.weight" and slot.paths > 1 for slot in contract.named)
