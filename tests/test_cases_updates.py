"""Ways in which updates failed elsewhere, without an engine: what is lost, never sent, too large, split, or misread.

Trainer and worker are real and in this process; between them is a queue.

Not covered: the cases that need an engine or a fleet (`test_failure_table.py`, `test_caches.py`, `test_versions.py`).
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import bench, random_models, wires
from tests.test_ledger import engine
from weightsync import WeightSync
from weightsync.client import joined
from weightsync.client.rollouts import Rollouts
from weightsync.client.sender import Sender
from weightsync.client.source import offer
from weightsync.codec import decode, encode
from weightsync.errors import ApplyFailed, BadValues, DigestMismatch, ManifestRefused, MemoryRefused, WeightSyncError
from weightsync.fleet.ledger import Ledger
from weightsync.metrics import Recorder
from weightsync.protocol import (
    BeginOrder,
    CommunicatorInfo,
    EngineState,
    EngineVerdict,
    FleetStatus,
    Manifest,
    TensorSpec,
    UpdateRequest,
    UpdateState,
    UpdateStatus,
)
from weightsync.results import VersionSpan
from weightsync.transport.packing import plan_buckets
from weightsync.worker import staging
from weightsync.worker.receiver import Receiver

CPU = torch.device("cpu")
BUCKET = 4096
INFO = CommunicatorInfo("127.0.0.1", 1, 1, 3, {"0": 1, "1": 2}, "gloo")
GB = 1 << 30


class Wire(wires.Wire):
    """Counts what it sends."""

    nbytes = 0

    def travel(self, tensor: torch.Tensor, deadline: float, cancelled: Callable[[], bool]) -> None:
        super().travel(tensor, deadline, cancelled)
        self.nbytes += tensor.nbytes if self._rank == 0 else 0


class Silent(Wire):
    """Says that it has received, and has not."""

    def travel(self, tensor: torch.Tensor, deadline: float, cancelled: Callable[[], bool]) -> None:
        return


def order_of(manifest: Manifest, stage: str = "auto", bucket_bytes: int = BUCKET) -> BeginOrder:
    plan = plan_buckets(manifest, bucket_bytes)
    request = UpdateRequest("u-1", "trainer", 1, manifest, bucket_bytes, plan.hash, 10.0, "gloo", torch.__version__)
    return BeginOrder(request, INFO, 0, 1, 5.0, stage=stage)


def some_tensors(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"layers.{index}.weight": torch.randn(30 + 500 * index, generator=random) for index in range(5)}


# --- a failure is not forgotten -----------------------------------------------------------------


class Service:
    """The service as a trainer sees it, over the real ledger; engine 0 is a real receiver, and what engine 1 says is made up.

    Attributes:
        said: engine 1's error at the next commit; none when all is well.
        got: what engine 0 was sent last.
    """

    def __init__(self) -> None:
        self.ledger, self.got = Ledger(None, 8), dict[str, torch.Tensor]()
        self.said: WeightSyncError | None = None
        self.through: queue.Queue[torch.Tensor] = queue.Queue()
        for ordinal in (0, 1):
            self.ledger.see(engine(ordinal))

    def get(self, path: str, seconds: float) -> Any:
        ledger = self.ledger
        return encode(FleetStatus("default", ledger.committed_version, ledger.ready, tuple(ledger.engines.values()), None))

    def post(self, path: str, body: Any, seconds: float) -> Any:
        if path == "/v1/updates":
            request = decode(UpdateRequest, body)
            update = self.ledger.admit(request, time.time())
            update.communicator = INFO
            self._receiver = Receiver(BeginOrder(request, INFO, 0, 1, 5.0), 0, CPU, CPU, lambda: Wire(self.through, 1))  # type: ignore[arg-type]
            self._receiver.start()
            for state in (UpdateState.RECEIVING, UpdateState.STAGED, UpdateState.APPLYING):
                update.move(state)
            return encode(update.admission)
        return encode(self._commit()) if path.endswith("/commit") else {}

    def _commit(self) -> UpdateStatus:
        update = self.ledger.current
        assert update is not None
        self._receiver._thread.join(10)
        assert self._receiver.ready and self._receiver.error is None
        tensors = update.request.manifest.tensors
        self.got = {spec.name: self._receiver.held().tensor(index) for index, spec in enumerate(tensors)}
        good = EngineVerdict(0, True, update.request.version, EngineState.SERVING)
        bad = None if self.said is None else EngineVerdict(1, False, None, EngineState.QUARANTINED, error=self.said.to_dict())
        if not self.ledger.conclude(update, [good, bad or replace(good, engine=1)], time.time()):
            update.error = bad and bad.error
        return update.status

    def close(self) -> None:
        """Nothing is open."""


def test_what_one_engine_lost_is_raised_and_the_next_sync_sends_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result was thrown away, and what the trainer had noted as sent was never sent again."""
    service, wires = Service(), list[Wire]()
    monkeypatch.setattr(joined, "join", lambda *_, **__: wires.append(Wire(service.through, 0)) or wires[-1])  # type: ignore[func-returns-value]
    sync = WeightSync("http://service", "token", bucket_bytes=BUCKET)
    sync._http = service  # type: ignore[assignment]
    tensors = some_tensors(1)
    service.said = ApplyFailed("engine 1 is out of registers")
    with pytest.raises(ApplyFailed, match=r"out of registers.*engine 0 serving with version 1, engine 1 quarantined"):
        sync.sync_weights(tensors)
    assert (service.ledger.ready, service.ledger.engines[1].version) == (1, None)
    once = sum(wire.nbytes for wire in wires)
    service.got, service.said = {}, None
    assert sync.sync_weights(tensors).version == 2  # the very same tensors: nothing has changed since
    assert sum(wire.nbytes for wire in wires) == 2 * once >= 2 * sum(tensor.nbytes for tensor in tensors.values())
    assert list(service.got) == list(tensors) and all(torch.equal(service.got[name], tensors[name]) for name in tensors)
    assert (service.ledger.ready, service.ledger.engines[1].version) == (2, 2)


def test_updates_that_were_refused_or_failed_are_counted_by_reason() -> None:
    recorder = Recorder()
    recorder.refused(ManifestRefused("1 missing: up_proj"))
    status = UpdateStatus("u-1", 3, UpdateState.ABORTED, 5, 100, 0.0, error=BadValues("1 tensor holds NaN").to_dict())
    recorder.ended(status)
    recorder.ended(replace(status, state=UpdateState.COMMITTED, ended_unix_seconds=1.0))
    lines = set(recorder.text().splitlines())
    assert {
        'weightsync_refused_updates_total{reason="manifest_refused"} 1.0',
        'weightsync_updates_total{outcome="aborted"} 1.0',
        'weightsync_updates_total{outcome="committed"} 1.0',
        "weightsync_sent_bytes_total 100.0",
    } <= lines


# --- nothing was transferred --------------------------------------------------------------------


@pytest.mark.parametrize("found", [0, 0x5A, 0xFF])
@pytest.mark.parametrize("stage", ["host", "none"])
def test_a_transport_that_delivers_nothing_and_says_all_is_well_is_found(stage: str, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote was taken for weights; fresh memory is all zeros, and so is the digest of zeros."""
    stock = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: _filled(stock(*size, **how), found))
    manifest = offer(some_tensors(1)).manifest
    receiver = Receiver(order_of(manifest, stage), 0, CPU, CPU, lambda: Silent(queue.Queue(), 1))  # type: ignore[arg-type]
    receiver.start()
    receiver._thread.join(10)
    assert isinstance(receiver.error, DigestMismatch)
    assert receiver.error.names and set(receiver.error.names) <= {spec.name for spec in manifest.tensors}
    assert receiver.tensors == 0 and (stage == "none" or not receiver.ready)


def _filled(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    tensor.view(torch.uint8).fill_(byte)
    return tensor


# --- where buckets begin and end ----------------------------------------------------------------

PARTS = [random_models.Part(kind, 4) for kind in ("sharded", "experts", "experts", "sharded", "experts")]


@pytest.fixture
def fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bench.Bench]:
    """A worker on layers of stacked experts, and a trainer whose buckets are smaller than such a layer."""
    pytest.importorskip("vllm")
    monkeypatch.setattr(bench, "BUCKET", BUCKET)
    with random_models.running(PARTS, False, random_models.weights(PARTS, 0), tmp_path) as worker:
        made = bench.Bench(lambda name, *args: getattr(worker, name)(*args), worker)
        with made.meeting_here():
            yield made
            made.leave()


def require_loaded(fused: bench.Bench, tensors: dict[str, torch.Tensor], way: str = "staged") -> None:
    """The update is verified, and every tensor equals a cold engine's."""
    assert fused.update(tensors, way=bench.WAYS[way])["state"] == "verified"
    have, want = random_models.held(fused.model), random_models.held(random_models.loaded(PARTS, False, tensors, fused.applier.vllm_config))
    assert {path for path in have.keys() | want.keys() if not random_models.same_bits(have.get(path), want.get(path))} == set()


@pytest.mark.parametrize("way", ["staged", "streamed"])
def test_a_bucket_that_ends_inside_a_group_of_experts_costs_none_of_them(way: str, fused: bench.Bench) -> None:
    """A group that lay in two buckets was never handed to the loader, and its experts stayed old."""
    tensors = random_models.weights(PARTS, 1)
    manifest = offer(tensors).manifest
    plan = plan_buckets(manifest, BUCKET)
    layers = [{manifest.tensors[piece.tensor].name.partition("/")[0] for piece in bucket.pieces} for bucket in plan.buckets]
    assert any(before & behind & {"1", "2", "4"} for before, behind in itertools.pairwise(layers))
    assert any(piece.tensor_offset for bucket in plan.buckets for piece in bucket.pieces), "and inside one tensor"
    require_loaded(fused, tensors, way)


@pytest.mark.parametrize("lost", ["1/3.w3", "2/0.w1"])
def test_an_expert_that_gets_gate_without_up_or_the_reverse_is_refused_and_named(lost: str, fused: bench.Bench) -> None:
    whole = random_models.weights(PARTS, 1)
    part = {name: tensor for name, tensor in whole.items() if name != lost}
    before = random_models.held(fused.model)
    refused = fused.update(part)
    assert (refused["state"], refused["error"]["code"], refused["error"]["names"]) == ("refused", "manifest_refused", [lost])
    assert all(random_models.same_bits(tensor, before[path]) for path, tensor in random_models.held(fused.model).items())
    failed = fused.update(part, bench.Fault(admitted=True))  # should admission ever let it pass
    assert (failed["at"], failed["error"]["code"], failed["wrote"]) == ("apply", "apply_failed", True)
    assert f"layers.{lost[0]} (1408 of 1536 elements)" in failed["error"]["message"]
    require_loaded(fused, random_models.weights(PARTS, 2))


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["auto", "host", "gpu", "none"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_update_larger_than_the_free_memory_is_refused_before_anything_is_allocated(
    stage: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda *size, **_: sizes.append(size[0]))
    monkeypatch.setattr(staging, "free_bytes", lambda _: 24 * GB)
    where = torch.device(device)
    large = Manifest((TensorSpec("experts", "bfloat16", (100 * GB,)), TensorSpec("norm", "bfloat16", (8,))))
    with pytest.raises(MemoryRefused, match=f"{24 * GB} are free") as refused:
        Receiver(order_of(large, stage, GB), 0, where, where, lambda: pytest.fail("must not connect"))
    assert sizes == [] and refused.value.hint


@pytest.mark.parametrize("stage", ["host", "none"])
def test_a_tensor_of_many_buckets_arrives_whole_from_buffers_of_one_bucket(stage: str) -> None:
    tensors = {"small": torch.ones(3), "experts": torch.randn(4 * BUCKET // 4 + 5), "last": torch.ones(2)}
    offered, through = offer(tensors), queue.Queue[torch.Tensor]()
    receiver = Receiver(order_of(offered.manifest, stage), 0, CPU, CPU, lambda: Wire(through, 1))  # type: ignore[arg-type]
    receiver.start()
    wire, sent = Wire(through, 0), list[int]()
    travel = wire.travel
    wire.travel = lambda tensor, *how: sent.append(tensor.untyped_storage().nbytes()) or travel(tensor, *how)  # type: ignore[method-assign,func-returns-value]
    Sender(offered, plan_buckets(offered.manifest, BUCKET), None).send(wire, time.monotonic() + 10, lambda: False, lambda: None)  # type: ignore[arg-type]
    receiver._thread.join(10)
    assert receiver.error is None and len([size for size in sent if size > 100]) == 5 and max(sent) == BUCKET
    into = receiver.held()
    arrived = [into.take(index) for index in range(3)] if stage == "none" else [into.tensor(index) for index in range(3)]
    assert all(torch.equal(got, want) for got, want in zip(arrived, tensors.values(), strict=True))


def test_the_buffer_in_which_buckets_land_may_be_written_over_once_they_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that waited held views of the buffer in which later buckets landed."""
    elsewhere = property(lambda self: torch.device("meta"))  # of another kind than where buckets land, so that they are moved
    monkeypatch.setattr(staging.Whole, "device", elsewhere)
    tensors, through, landed = some_tensors(3), queue.Queue[torch.Tensor](), set[int]()
    offered = offer(tensors)

    class Poisoning(Wire):
        """Fills the buffer first, as a later owner of it would."""

        def post(self, tensors: Sequence[torch.Tensor], *how: Any) -> Sequence[torch.Tensor]:
            for tensor in tensors:
                if tensor.dtype == torch.uint8:
                    landed.add(tensor.data_ptr())
                    tensor.fill_(0xFF)
            return super().post(tensors, *how)

    receiver = Receiver(order_of(offered.manifest), 0, CPU, CPU, lambda: Poisoning(through, 1))  # type: ignore[arg-type]
    held = [receiver.held().tensor(index) for index in range(len(tensors))]  # as a slow consumer does, before all is there
    receiver.start()
    plan = plan_buckets(offered.manifest, BUCKET)
    Sender(offered, plan, None).send(Wire(through, 0), time.monotonic() + 10, lambda: False, lambda: None)  # type: ignore[arg-type]
    receiver._thread.join(10)
    assert receiver.error is None and len(plan.buckets) > 3 and len(landed) == 2
    assert all(torch.equal(got, want) for got, want in zip(held, tensors.values(), strict=True))


# --- versions -----------------------------------------------------------------------------------


def test_a_reply_across_an_update_says_which_tokens_are_of_which_version() -> None:
    """One label for the whole reply was wrong for the tokens on the other side of the update."""
    spans = [{"version": "3", "start": 0, "end": 57}, {"version": "4", "start": 57, "end": 128}]
    choice = {"token_ids": list(range(128)), "weight_versions": spans, "finish_reason": "length"}
    http = SimpleNamespace(request=lambda *_: {"choices": [choice]})
    made = Rollouts(http, lambda: (engine(1, 4),)).generate([1, 2], {}, 1.0, None)  # type: ignore[arg-type]
    assert made.versions == (VersionSpan(3, 0, 57), VersionSpan(4, 57, 128))
    assert (made.version, made.engine, len(made.token_ids), made.finish_reason) == (3, 1, 128, "length")
