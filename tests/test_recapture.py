"""Captured graphs are let go and captured anew when a number that they hold has changed, and only then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.client.source import offer
from weightsync.errors import UnsupportedEngine
from weightsync.storage.adopt import Adoption
from weightsync.transport.packing import plan_buckets
from weightsync.worker.admission import Frozen
from weightsync.worker.held import Held
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.sleep import Sleep
from weightsync.worker.staging import Regions, Whole


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order, with CUDA's calls and vLLM's wrappers of pieces put aside."""
    pytest.importorskip("vllm")
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    from weightsync.worker.vllm_compat import graphs

    happened: list[str] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda *_: happened.append("wait"))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: happened.append("give back"))
    monkeypatch.setattr(CUDAGraphWrapper, "clear_all_graphs", lambda: happened.append("pieces"))
    monkeypatch.setattr(BreakableCUDAGraphWrapper, "clear_all_graphs", lambda: happened.append("breakable"))
    monkeypatch.setattr(graphs, "set_current_vllm_config", lambda _: contextlib.nullcontext())
    return happened


def first_runner(done: list[str]) -> Any:
    @contextlib.contextmanager
    def preserve() -> Iterator[None]:
        done.append("requests aside")
        yield
        done.append("requests back")

    model = SimpleNamespace()
    return SimpleNamespace(
        model=model, preserve_serving_state=preserve, capture_model=lambda: done.append("capture"), encoder_cudagraph_manager=None
    )


def second_runner(done: list[str]) -> Any:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    def manager(name: str) -> Any:
        made = object.__new__(CudaGraphManager)
        made.graphs, made._graphs_captured, made.breakable_cg_runner = {name: object()}, True, None
        return made

    state = SimpleNamespace(supports_mm_inputs=False)
    speculator = SimpleNamespace(prefill=manager("draft"), steps=3)
    runner = SimpleNamespace(req_states=object(), cudagraph_manager=manager("target"), speculator=speculator, model_state=state)
    runner.capture_model = lambda: done.append(f"capture {runner.cudagraph_manager.graphs} {runner.speculator.prefill.graphs}")
    return runner


def test_the_first_runner_lets_go_of_all_graphs_before_it_captures_beside_its_requests(done: list[str]) -> None:
    from weightsync.worker.vllm_compat import graph_holders, recapture

    runner = first_runner(done)
    recapture(runner, None, graph_holders(runner))
    assert done == ["wait", "pieces", "breakable", "give back", "requests aside", "capture", "requests back"]


def test_the_second_runner_lets_go_of_the_drafts_graphs_too(done: list[str]) -> None:
    from weightsync.worker.vllm_compat import graph_holders, recapture

    runner = second_runner(done)
    recapture(runner, None, graph_holders(runner))
    assert done == ["wait", "pieces", "breakable", "give back", "capture {} {}"]
    assert not runner.cudagraph_manager._graphs_captured


@pytest.mark.parametrize("lacking", ["capture_model", "preserve_serving_state"])
def test_a_runner_without_what_is_needed_is_refused_and_keeps_its_graphs(done: list[str], lacking: str) -> None:
    from weightsync.worker.vllm_compat import graph_holders

    runner = first_runner(done)
    delattr(runner, lacking)
    with pytest.raises(UnsupportedEngine, match=lacking):
        graph_holders(runner)
    assert done == []


@pytest.mark.parametrize(("eager", "mode", "captures"), [(True, "FULL", False), (False, "NONE", False), (False, "PIECEWISE", True)])
def test_whether_an_engine_captures_is_read_off_its_configuration(eager: bool, mode: str, captures: bool) -> None:
    pytest.importorskip("vllm")
    from vllm.config import CUDAGraphMode

    from weightsync.worker import vllm_compat

    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode])
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager), compilation_config=compilation)
    assert vllm_compat.captures_graphs(config) is captures


def capture(worker: Any) -> None:
    """As behind an update, in a worker that is alone."""
    if worker._owes_capture():
        worker._recapture()


class TestAnUpdate:
    """The worker's order of work: values, then graphs, then the seal, then the proof."""

    @pytest.fixture
    def worker(self, done: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
        from weightsync.worker import applier, vllm_compat

        monkeypatch.setattr(vllm_compat, "run_once", lambda runner: done.append("run"))
        monkeypatch.setattr(vllm_compat, "recapture", lambda runner, config, release: done.append("recapture"))
        monkeypatch.setattr(vllm_compat, "graph_holders", lambda runner: [])
        made = object.__new__(applier.Applier)
        lazies = SimpleNamespace(
            reset=lambda: done.append("reset"),
            settle=lambda: done.append("settle") or {"lazies_refreshed": 1},
            changed=[],
            unrefreshable=["model.grown"],
            kept=["model.scratch"],
        )
        lazies.note_captured = lazies.changed.clear
        guard = SimpleNamespace(
            sealed=SimpleNamespace(counts={"graphs": 3}),
            scalars_changed=lambda: ["model.k_scale_float"],
            relaid=lambda repaired: list(repaired.changed_layout),
            outdated=False,
            seal=lambda: done.append("seal"),
        )
        vars(made).update(
            _lazies=_Sized(1, lazies),
            _guard=guard,
            _runner=None,
            vllm_config=None,
            _recaptured=False,
            _released=False,
            _untouched=False,
            _checks={},
            _seconds={},
            _repaired=Adoption(),
            _stored=None,
            _back=None,
            _map=LoadMap({}),
            _heads={},
            _held=Held(),
            _regions=Regions(),
            _alone=True,
            _planner=SimpleNamespace(forget=lambda: None, proved=lambda: None),
        )
        return made

    def test_a_changed_number_costs_a_capture_and_a_new_seal(self, worker: Any, done: list[str]) -> None:
        assert worker._refresh() == {"lazies_refreshed": 1}
        capture(worker)
        assert done == ["reset", "run", "settle", "recapture", "seal"]
        assert worker._checks["recaptured"] == 1

    def test_a_number_that_only_a_first_run_caches_counts_too(self, worker: Any, done: list[str]) -> None:
        worker._guard.scalars_changed = list
        capture(worker)
        assert done == []
        worker._lazies.changed.append("model.impl.bmm1_scale")
        capture(worker)
        assert done == ["recapture", "seal"]

    def test_graphs_that_came_in_the_middle_of_an_update_are_captured_anew(self, worker: Any, done: list[str]) -> None:
        worker._guard.scalars_changed = list
        worker._guard.outdated = True
        capture(worker)
        assert done == ["recapture", "seal"]

    def test_a_changed_layout_costs_a_capture_too_and_what_stood_against_the_old_seal_is_over(self, worker: Any, done: list[str]) -> None:
        worker._guard.scalars_changed = list
        worker._repaired = Adoption(
            adopted=["model.b"], changed_layout={"model.a": "was"}, conflicts={"model.c": "two"}, failed={"model.d": "meta"}
        )
        capture(worker)
        assert done == ["recapture", "seal"]
        assert worker._repaired == Adoption(adopted=["model.b"])
        capture(worker)
        assert done == ["recapture", "seal"]

    def test_a_graph_that_outlives_the_capture_holds_the_old_number_and_fails_the_update(self, worker: Any, done: list[str]) -> None:
        worker._guard.seal = lambda: done.append("seal") or 1
        with pytest.raises(UnsupportedEngine, match=r"1 captured graph.*were not let go of") as refused:
            capture(worker)
        assert refused.value.names == ("model.k_scale_float",) and "Restart" in refused.value.hint
        worker._guard.scalars_changed, worker._guard.seal = list, lambda: done.append("seal")
        capture(worker)
        assert done == ["recapture", "seal", "recapture", "seal"], "the capture is owed until it ends well"

    def test_a_capture_that_failed_is_made_up_for_though_the_numbers_are_back(self, worker: Any, done: list[str], monkeypatch: Any) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="out of memory"):
            failing.setattr("weightsync.worker.vllm_compat.recapture", fail)
            capture(worker)
        worker._guard.scalars_changed = list
        capture(worker)
        capture(worker)
        assert done == ["recapture", "seal"]

    def test_a_runner_that_keeps_its_graphs_needs_no_capture_once_the_numbers_are_back(
        self, worker: Any, done: list[str], monkeypatch: Any
    ) -> None:
        def refuse(_: Any) -> None:
            raise UnsupportedEngine("no capture_model")

        monkeypatch.setattr("weightsync.worker.vllm_compat.graph_holders", refuse)
        with pytest.raises(UnsupportedEngine):
            capture(worker)
        worker._guard.scalars_changed = list
        capture(worker)
        assert done == []

    def test_without_graphs_a_changed_number_is_nothing(self, worker: Any, done: list[str]) -> None:
        worker._guard.sealed.counts = {}
        capture(worker)
        assert done == []

    def test_without_graphs_a_changed_layout_costs_a_new_seal(self, worker: Any, done: list[str]) -> None:
        worker._guard.sealed.counts = {}
        worker._repaired = Adoption(changed_layout={"model.a": "was"}, conflicts={"model.c": "two"})
        capture(worker)
        capture(worker)
        assert done == ["seal"] and worker._repaired == Adoption(conflicts={"model.c": "two"})

    def test_what_was_taken_back_is_put_there_again_when_the_run_fails(self, worker: Any, done: list[str], monkeypatch: Any) -> None:
        def fail(_: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr("weightsync.worker.vllm_compat.run_once", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            worker._refresh()
        assert done == ["reset", "settle"]

    @pytest.mark.parametrize("step", ["run_once", "graph_holders", "recapture"])
    def test_what_fails_behind_the_writing_is_the_verdict_and_the_engine_counts_as_written(
        self, worker: Any, done: list[str], monkeypatch: Any, step: str
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(f"weightsync.worker.vllm_compat.{step}", fail)
        worker._guard.repair = lambda: done.append("repair") or Adoption()
        receiver = staged(discard=lambda: done.append("discard"))
        vars(worker).update(rank=0, _receiver=receiver, _state="applied", _error=None, _wrote=True)
        report = worker.verify("u")
        assert report.state == "failed" and report.wrote
        assert report.error is not None and "out of memory" in report.error["message"]
        assert "seal" not in done and "discard" not in done, "another try needs the staged bytes"
        if step != "run_once":
            assert worker._guard.unproven == ("model.grown", "model.scratch")


@pytest.mark.parametrize("outdated", [False, True])
def test_an_update_is_loaded_by_every_worker_before_any_runs_the_model_or_captures(outdated: bool) -> None:
    """A worker that failed to load would not be there for the others' collectives, and they would wait for it in an RPC."""
    pytest.importorskip("vllm")
    from weightsync.worker.applier import Applier

    reload = _Reload()
    made = object.__new__(Applier)  # without a runner, a repair or a run: whatever touches those raises
    receiver = staged()
    model = SimpleNamespace(load_weights=list)
    fresh = SimpleNamespace(restore_loaders=lambda _: 0)
    vars(made).update(rank=0, model=model, vllm_config=None, _receiver=receiver, _state="staged", _error=None, _fresh=fresh)
    sealed: list[bool] = []
    lazies = SimpleNamespace(note_captured=lambda: sealed.append(made._wrote))
    guard = SimpleNamespace(outdated=outdated, seal=lambda: sealed.append(made._wrote))
    vars(made).update(
        _guard=guard, _lazies=lazies, _wrote=False, _heads={}, _checks={}, _seconds={}, _map=LoadMap({}), _frozen=Frozen([], LoadMap({}))
    )
    vars(made).update(_held=Held(), _sleep=Sleep(SimpleNamespace(asleep=lambda: False)), _regions=Regions())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightsync.worker.vllm_compat.Reload", lambda *_: reload)
        report = made.apply("u")
    assert report.state == "applied" and report.wrote and reload.finished
    assert sealed == [False, False] * outdated, "what somebody captured meanwhile is sealed before the first write"


def staged(**more: Any) -> Any:
    """What a worker has of an update that is all there."""
    offered = offer({"w": torch.ones(1)})
    plan = plan_buckets(offered.manifest, 64)
    order = SimpleNamespace(request=SimpleNamespace(update_id="u", scope=(), partial=False), stage="host", retain=False, plan=False)
    whole = Whole(offered.manifest, plan, torch.zeros(plan.stream_bytes, dtype=torch.uint8))
    return SimpleNamespace(order=order, tensors=1, nbytes=4, seconds={}, error=None, held=lambda: whole, into=None, **more)


class _Reload(contextlib.nullcontext[Any]):
    """A reload of a model without layers."""

    def __init__(self) -> None:
        self.enter_result, self.counts, self.finished = self, dict[str, int](), False

    def waiting(self) -> dict[str, int]:
        return {}

    def finish(self) -> None:
        self.finished = True


class _Sized:
    """Something with a length, and otherwise what it is given."""

    def __init__(self, length: int, inner: Any) -> None:
        self._length, self._inner = length, inner

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
