"""Real engines of several workers on a CPU: tensor, pipeline and data parallel.

Not covered: experts that lie in different workers, and a mixture of experts over data-parallel copies: vLLM's kernel for
a CPU crashes in the first, and has no form of the second (`tests/gpu` has both).
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.fleets import ENGINE_ARGS, MAX_TOKENS, PROMPTS, Fleet, answers, engine_pid, order_fault, trainer, wait_until, with_faults
from weightsync import WeightSync
from weightsync.demo.cold import ColdEngine
from weightsync.errors import ApplyFailed, ManifestRefused, UpdateFailed, VerdictNotOk, WeightSyncError
from weightsync.protocol import EngineState

pytestmark = pytest.mark.engine

KIND = "qwen3"
SAID = "a fault made for a test"
TENSOR = {"tensor_parallel_size": 2}
Cold = Callable[[int], tuple[Any, Any]]


def flags_of(arguments: dict[str, Any]) -> list[str]:
    """What `serve` is told: sizes are settings, the rest is vLLM's own."""
    sizes = {key: value for key, value in arguments.items() if key.endswith("_parallel_size")}
    rest = {key: value for key, value in arguments.items() if key not in sizes}
    return [f"--engine.{key}={value}" for key, value in sizes.items()] + [f"--engine.extra={json.dumps(rest)}"]


def cold_of(engine: ColdEngine, checkpoint: Any, kind: str, arguments: dict[str, Any], seeds: Sequence[int] = (1, 2)) -> Cold:
    """Answers of cold engines with the same workers, which are started at once, by seed; each waited for when asked for."""
    for seed in seeds:
        engine.submit(checkpoint(kind, seed), PROMPTS, MAX_TOKENS, {**ENGINE_ARGS, **arguments, "distributed_executor_backend": "mp"})
    known: dict[int, tuple[Any, Any]] = {}

    def get(seed: int) -> tuple[Any, Any]:
        for other in seeds[len(known) : seeds.index(seed) + 1]:
            result = engine.result()
            known[other] = result["tokens"], result["logprobs"]
        return known[seed]

    return get


def follows(fleet: Fleet, kind: str, tensors: Any, cold: Cold, workers: int) -> list[Any]:
    """A → B → A, each compared with a cold engine; the verdicts."""
    verdicts = []
    with fleet.client(bucket_bytes=60_000) as sync:
        for seed in (1, 2, 1):
            (verdict,) = sync.sync_weights(tensors(kind, seed)).verdicts
            assert sync.engines()[0].workers == workers
            assert verdict.ranks == {str(rank): "verified" for rank in range(workers)}
            assert answers(sync, 0) == cold(seed), f"seed {seed}"
            verdicts.append(verdict)
    assert cold(1) != cold(2)
    return verdicts


@pytest.mark.slow
def test_an_engine_of_two_tensor_parallel_workers_equals_a_cold_one_to_new_weights_and_back(
    checkpoint: Any, tensors: Any, tmp_path: Path
) -> None:
    with ColdEngine(tmp_path / "cold.log") as engine:
        cold = cold_of(engine, checkpoint, KIND, TENSOR, [2])
        fleet = Fleet(checkpoint(KIND, 1), tmp_path / "fleet", flags=flags_of(TENSOR)).ready()
        try:
            with fleet.client(bucket_bytes=60_000) as sync:
                at_first = None
                for seed in (1, 2, 1):  # the engine was started on 1; that it answers as a cold one of it is a slow test's
                    (verdict,) = sync.sync_weights(tensors(KIND, seed)).verdicts
                    assert verdict.ranks == {"0": "verified", "1": "verified"} and sync.engines()[0].workers == 2
                    at_first = at_first or answers(sync, 0)
                    assert answers(sync, 0) == (at_first if seed == 1 else cold(seed))
                assert at_first != cold(2)
        finally:
            assert fleet.stop() == 0


STAGES = {"pipeline_parallel_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), [("qwen3", "none"), ("qwen3-tied", "auto"), ("qwen3-moe", "auto"), ("int8-channel", "auto")])
def test_workers_that_share_layers_follow(kind: str, stage: str, checkpoint: Any, tensors: Any, tmp_path: Path) -> None:
    flags = [*flags_of(TENSOR), f"--sync.stage={stage}"]
    with ColdEngine(tmp_path / "cold.log") as engine:
        cold = cold_of(engine, checkpoint, kind, TENSOR)
        fleet = Fleet(checkpoint(kind, 1), tmp_path / "fleet", flags=flags).ready()
        try:
            for verdict in follows(fleet, kind, tensors, cold, 2):
                assert "not_kept" not in verdict.checks, "each takes a part of every tensor"
        finally:
            assert fleet.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "not_kept"), [("qwen3", 25), ("qwen3-tied", 23)])
def test_stages_of_a_pipeline_follow_and_answer_as_one_worker_does(
    kind: str, not_kept: int, checkpoint: Any, tensors: Any, cold: Any, tmp_path: Path
) -> None:
    # Where an update is kept for engines that come later, the first worker has all of it.
    fleet = Fleet(checkpoint(kind, 1), tmp_path / "fleet", flags=[*flags_of(STAGES), "--sync.retain_engines=0"]).ready()
    try:
        for verdict in follows(fleet, kind, tensors, lambda seed: cold(kind, seed), 2):
            assert verdict.checks["not_kept"] == not_kept, "tensors of the other stage"
    finally:
        assert fleet.stop() == 0


@pytest.mark.slow
def test_every_data_parallel_copy_of_an_engine_gets_the_update(checkpoint: Any, tensors: Any, cold: Any, tmp_path: Path) -> None:
    fleet = Fleet(checkpoint(KIND, 1), tmp_path / "fleet", flags=["--engine.data_parallel_size=2"]).ready()
    try:
        follows(fleet, KIND, tensors, lambda seed: cold(KIND, seed), 2)
        with fleet.client() as sync:
            for seed in (2, 1):
                version = sync.sync_weights(tensors(KIND, seed)).version
                # vLLM hands requests to its copies in turn.
                got = [sync.generate(PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True) for _ in range(4)]
                assert [list(g.token_ids) for g in got] == [cold(KIND, seed)[0][0]] * 4
                assert [[s.version for s in g.versions] for g in got] == [[version]] * 4
    finally:
        assert fleet.stop() == 0


# --- two engines of two workers, of which one fails ----------------------------------------------


@pytest.fixture(scope="module")
def fault_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "fault.json"


@pytest.fixture(scope="module")
def two(checkpoint: Any, fault_of_two: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Cold]]:
    """Two engines of two workers, which keep their last update; and cold engines like them."""
    home = tmp_path_factory.mktemp("two")
    with ColdEngine(home / "cold.log") as engine:
        cold = cold_of(engine, checkpoint, KIND, TENSOR)
        running = Fleet(checkpoint(KIND, 1), home, 2, [*flags_of(TENSOR), "--sync.rollback=host"], with_faults(fault_of_two)).ready()
        yield running, cold
        assert running.stop() == 0


@pytest.fixture
def sync(two: tuple[Fleet, Cold], fault_of_two: Path, tensors: Any) -> Iterator[WeightSync]:
    """A trainer; both engines serve A when a test begins."""
    fault_of_two.unlink(missing_ok=True)
    with trainer(two[0], tensors(KIND, 1)) as client:
        yield client
        fault_of_two.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", ["apply", "verify"])
def test_one_worker_that_fails_once_is_tried_again_with_the_other(
    step: str, rank: int, two: Any, sync: WeightSync, fault_of_two: Path, tensors: Any
) -> None:
    order_fault(fault_of_two, 1, step, rank=rank)
    verdicts = sync.sync_weights(tensors(KIND, 2)).verdicts
    assert [v.checks.get("second_tries", 0) for v in verdicts] == [1, 0]
    assert answers(sync, 0) == answers(sync, 1) == two[1](2)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", ["apply", "verify"])
def test_one_worker_that_fails_twice_brings_both_back(
    step: str, rank: int, two: Any, sync: WeightSync, fault_of_two: Path, tensors: Any
) -> None:
    held = sync.engines()[0].version
    order_fault(fault_of_two, 2, step, rank=rank)
    with pytest.raises(ApplyFailed if step == "apply" else VerdictNotOk, match=f"worker {rank} of 2: .*{SAID}"):
        sync.sync_weights(tensors(KIND, 2))
    (back, on), (failed, went) = sync.engines(), sync.status().update.verdicts  # type: ignore[union-attr]
    assert SAID in failed.ranks[str(rank)]
    assert failed.ranks[str(1 - rank)] == ("applied" if step == "apply" else "verified")
    assert went.ranks == {"0": "verified", "1": "verified"}
    assert (back.state, back.version, on.state) == (EngineState.SERVING, held, EngineState.SERVING)
    assert answers(sync, 0) == two[1](1) and answers(sync, 1) == two[1](2)
    sync.sync_weights(tensors(KIND, 2))
    assert answers(sync, 0) == answers(sync, 1) == two[1](2)


@pytest.mark.slow
def test_an_engine_with_one_worker_that_can_not_be_brought_back_serves_nothing(
    two: Any, sync: WeightSync, fault_of_two: Path, tensors: Any
) -> None:
    order_fault(fault_of_two, 3, rank=1)
    with pytest.raises(UpdateFailed, match=f"worker 1 of 2: .*{SAID}"):
        sync.sync_weights(tensors(KIND, 2))
    assert [engine.state for engine in sync.engines()] == [EngineState.QUARANTINED, EngineState.SERVING]
    with pytest.raises(WeightSyncError):
        sync.generate([1, 5, 9], max_tokens=4, engine=0)
    sync.sync_weights(tensors(KIND, 1))
    assert answers(sync, 0) == answers(sync, 1) == two[1](1)


def worker_pids(fleet: Fleet, engine: int) -> list[int]:
    """vLLM's workers of an engine."""
    cores = psutil.Process(engine_pid(fleet, engine)).children()
    return [child.pid for core in cores for child in core.children() if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_worker_that_is_killed_while_it_receives_ends_the_update_and_its_engine_alone(
    number: int, two: Any, sync: WeightSync, tensors: Any
) -> None:
    fleet, cold = two
    killed, go_on = worker_pids(fleet, 0), threading.Event()
    assert len(killed) == 2
    half = threading.Event()

    def progress(sent: int, total: int) -> None:
        if sent > total // 2:
            half.set()
            go_on.wait(60)

    published = sync.publish(tensors(KIND, 2), timeout_seconds=60.0, progress=progress)
    assert half.wait(20)
    os.kill(killed[number], signal.SIGKILL)
    go_on.set()
    with pytest.raises(WeightSyncError):
        sync.commit(published)
    assert answers(sync, 1) == cold(1), "the other engine serves what it had"
    wait_until(lambda: sync.engines()[0].state == EngineState.DEAD, 30, "its death")
    wait_until(lambda: (e := sync.engines()[0]).state != EngineState.DEAD and e.workers == 2, 120, "the restart")
    assert not [pid for pid in killed if psutil.pid_exists(pid)]
    sync.sync_weights(tensors(KIND, 2))
    assert answers(sync, 0) == answers(sync, 1) == cold(2)


# --- what only one stage knows --------------------------------------------------------------------


def stacked(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """One projection of every layer's experts in one tensor, as transformers 5 has it."""
    layers = sorted({key.split(".experts.")[0] for key in tensors if ".experts." in key})
    into = {f"{layer}.experts.{name}": [key for key in tensors if key.startswith(f"{layer}.experts.") and name in key] for layer in layers}
    gone = {key for keys in into.values() for key in keys}
    rest = {key: tensor for key, tensor in tensors.items() if key not in gone}
    return rest | {key: torch.stack([tensors[part] for part in sorted(parts)]) for key, parts in into.items()}


@pytest.mark.slow
def test_a_name_is_unknown_when_no_stage_knows_it(checkpoint: Any, tensors: Any, tmp_path: Path) -> None:
    kind = "qwen3-moe"
    fleet = Fleet(checkpoint(kind, 1), tmp_path / "fleet", flags=flags_of(STAGES)).ready()
    try:
        with fleet.client() as sync:
            sync.sync_weights(tensors(kind, 2))
            want = answers(sync, 0)
            sync.sync_weights(tensors(kind, 1))
            other = stacked(tensors(kind, 2), "down_proj")
            assert len(other) < len(tensors(kind, 2))
            sync.sync_weights(other)  # each stage passes over the other one's stacks
            assert answers(sync, 0) == want
            strange = {"model.layers.0.mlp.strange.weight": torch.zeros(4), "model.layers.1.strange.weight": torch.zeros(4)}
            with pytest.raises(ManifestRefused, match="strange") as caught:
                sync.sync_weights(other | strange)
            assert set(caught.value.names) == strange.keys()
            missing = "model.layers.1.self_attn.o_proj.weight"
            with pytest.raises(ManifestRefused, match=f"worker 1 of 2: 1 missing: {missing}"):
                sync.sync_weights({key: tensor for key, tensor in other.items() if key != missing})
            assert answers(sync, 0) == want
    finally:
        assert fleet.stop() == 0
