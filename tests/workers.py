"""A worker's applier without vLLM: real admission, load maps and staged bytes; loading copies, and nothing is sealed.

Not covered: what vLLM's loaders and a guard make of an update (the failure table has both); plans (`test_planned`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from weightsync.client.source import offer
from weightsync.errors import ApplyFailed, VerdictNotOk
from weightsync.protocol import Adapter, BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.storage.adopt import Adoption
from weightsync.storage.blocks import Span
from weightsync.transport import digest
from weightsync.transport.packing import plan_buckets
from weightsync.worker import adapting, applier, following
from weightsync.worker.staging import Whole

Tensors = Mapping[str, torch.Tensor]
NAMES = ("body.weight", "tower.weight")
CPU = torch.device("cpu")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((4,), value) for name in NAMES}


class Model(nn.Module):
    """Two layers of one parameter; its loader copies, and fails behind as many tensors as it is told."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        for name in NAMES:
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.zeros(4, device=device), requires_grad=False)
            self.add_module(name.split(".")[0], layer)
        self.fail_behind: list[int] = []

    def load_weights(self, pairs: Any) -> None:
        left = self.fail_behind.pop(0) if self.fail_behind else None
        for number, (name, tensor) in enumerate(pairs):
            if number == left:
                raise ApplyFailed("a fault made for a test")
            self.get_parameter(name).copy_(tensor)

    def values(self) -> dict[str, float]:
        return {name: self.get_parameter(name)[0].item() for name in NAMES}


class Guard:
    """Has nothing against anything, until it is told to."""

    outdated, sealed = False, SimpleNamespace(counts={}, seconds={})

    def __init__(self, *_: Any, **__: Any) -> None:
        self.unproven: tuple[str, ...] = ()
        self.fail: list[bool] = []

    def repair(self) -> Adoption:
        return Adoption()

    def relaid(self, _: Adoption) -> list[str]:
        return []

    def verify(self, _: Adoption) -> Any:
        return SimpleNamespace(counts={}, slots={"weight": 2}, lines=list)

    def broken(self, *_: Any) -> VerdictNotOk | None:
        return VerdictNotOk("a fault made for a test") if self.fail and self.fail.pop(0) else None


class Lazies:
    counts: ClassVar[dict[str, int]] = {}
    unrefreshable = kept = changed = ()

    def __len__(self) -> int:
        return 0


class SleepMemory:
    """Stands for the memory of vLLM's sleep mode: blocks of the model's tensors, which are lost when it says so."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.gone = self.kv_gone = False

    def asleep(self) -> bool:
        return self.gone or self.kv_gone

    def weights_asleep(self) -> bool:
        return self.gone

    def blocks(self) -> list[Span]:
        return [Span(address, tensor.nbytes, tensor.nbytes, (3, 0), 0, True) for address, tensor in self.tensors.items()]

    def read(self, address: int, into: torch.Tensor) -> None:
        into.copy_(self.tensors[address].view(torch.uint8))

    def write(self, address: int, data: torch.Tensor) -> None:
        self.tensors[address].view(torch.uint8).copy_(data)

    def hold(self, *tensors: torch.Tensor) -> None:
        self.tensors |= {tensor.untyped_storage().data_ptr(): tensor.data for tensor in tensors}

    def sleep(self, level: int) -> None:
        self.gone = self.kv_gone = True
        for tensor in self.tensors.values() if level > 1 else ():
            tensor.fill_(-77)

    def wake(self) -> None:
        self.gone = self.kv_gone = False


class Received:
    """Stands for a receiver whose bytes are all there."""

    arriving: dict[str, torch.Tensor]

    def __init__(self, order: BeginOrder, *_: Any) -> None:
        self.order, self.error, self.ready, self.tensors, self.nbytes = order, None, True, 0, 0
        self.draining = False
        self.seconds: dict[str, float] = {}
        manifest = order.request.manifest
        self.plan = plan_buckets(manifest, order.request.bucket_bytes)
        data = torch.zeros(self.plan.stream_bytes, dtype=torch.uint8)
        self.into: Whole | None = Whole(manifest, self.plan, data)
        self.digests = {}
        for index, spec in enumerate(manifest.tensors):
            self.into.tensor(index).copy_(Received.arriving[spec.name])
            self.digests[index] = digest.digest_tensor(self.into.tensor(index))

    def start(self) -> None:
        """All is there."""

    def cancel(self) -> None:
        """Nothing goes on."""

    def discard(self) -> None:
        self.into = None

    def drain(self) -> None:
        self.draining = True

    def held(self) -> Whole:
        assert self.into is not None, "the bytes were let go of"
        return self.into


class Worker:
    """One worker of an engine.

    Args:
        frozen: patterns of names that may be left out.
        workers: of the engine.
        rank: this one's.
        retain, stage: of every update's order.
    """

    def __init__(self, frozen: Collection[str] = (), workers: int = 1, retain: bool = True, stage: str = "auto", rank: int = 0) -> None:
        self.model, self._retain, self._stage, self._updates = Model(), retain, stage, 0
        config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(), model="/nowhere"),
            parallel_config=SimpleNamespace(world_size_across_dp=workers),
            told={"frozen": list(frozen)},
        )
        self.applier = applier.Applier(self.model, None, config, CPU, rank)
        self.guard: Guard = self.applier._guard  # type: ignore[assignment]
        self.memory: SleepMemory = self.applier._sleep._memory  # type: ignore[assignment]

    def begin(self, tensors: Tensors, scope: tuple[str, ...] = (), base: str | None = None, adapter: Adapter = Adapter.NONE) -> str:
        """An update whose bytes are there; its id. A partial one builds on the update that counts, if not told otherwise."""
        self._updates += 1
        Received.arriving = dict(tensors)
        manifest = offer(tensors).manifest
        plan = plan_buckets(manifest, 4096)
        update = f"u{self._updates}"
        about = (update, "t", self._updates, manifest, 4096, plan.hash, 10.0, "gloo", torch.__version__)
        request = UpdateRequest(*about, scope=scope, adapter=adapter)
        builds_on = (self._updates - 1, self.applier._held.counts if base is None else base) if request.partial else (None, "")
        meeting = CommunicatorInfo("h", 1, 1, 2, {"0": 1}, "gloo")
        order = BeginOrder(request, meeting, 0, 1, 1.0, "", self._stage, self._retain, *builds_on, plan=False)
        assert self.applier.begin(order).error is None
        return update

    def apply(self, tensors: Tensors, scope: tuple[str, ...] = (), adapter: Adapter = Adapter.NONE) -> tuple[str, Any]:
        update = self.begin(tensors, scope, adapter=adapter)
        report = self.applier.apply(update)
        return update, report

    def update(self, tensors: Tensors, scope: tuple[str, ...] = (), adapter: Adapter = Adapter.NONE) -> str:
        """One that the engine commits."""
        update, report = self.apply(tensors, scope, adapter)
        assert report.error is None
        assert self.applier.verify(update).state == "verified"
        self.applier.keep(update)
        return update

    def go_back(self, update: str) -> Any:
        report = self.applier.rollback(update)
        return report if report.error is not None else self.applier.verify(update)


def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker takes from vLLM is made up."""
    fresh = SimpleNamespace(restore_loaders=lambda model: 0)

    class Reload:
        def __init__(self, *_: Any) -> None:
            self.counts: dict[str, int] = {}

        def __enter__(self) -> Reload:
            return self

        def __exit__(self, *_: Any) -> None:
            """Nothing was taken apart."""

        def waiting(self) -> dict[str, int]:
            return {}

        def finish(self) -> None:
            """Nothing waits."""

    fakes = SimpleNamespace(
        unproved_layers=lambda model: [],
        find_lazies=lambda model, runner: Lazies(),
        captures_graphs=lambda config: False,
        told=lambda config: config.told,
        draw=lambda config: (Model("meta"), fresh),
        meta_twin=lambda config: Model("meta"),
        missing_layers=lambda model, filled: [],
        reload_waiting=lambda model: {},
        whole_only=lambda model: "",
        plain_path=lambda path: path,
        SleepMemory=SleepMemory,
        Reload=Reload,
        together=lambda part: part(),  # workers of one process, called one after the other, can't wait for each other
        WRITTEN_IN_PLACE=(),
    )
    monkeypatch.setattr(applier, "vllm_compat", fakes)
    monkeypatch.setattr(applier.loading, "vllm_compat", fakes)
    monkeypatch.setattr(following, "vllm_compat", fakes)
    monkeypatch.setattr(adapting, "vllm_compat", fakes)
    monkeypatch.setattr(applier.guard, "Guard", Guard)
    monkeypatch.setattr(applier, "Receiver", Received)
    monkeypatch.setattr(applier.loadmap, "checkpoint_specs", lambda folder: list(offer(weights(0)).manifest.tensors))
