"""A trainer of several ranks, real processes over gloo, and receivers without engines.

Functions whose first argument is `state` run in a rank's process (`peers.Peer`).

Not covered: NCCL between ranks (`tests/gpu`), and real engines (`test_fsdp2_example.py`).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.peers import Peer
from tests.service import Service, until
from weightsync.client import ranks
from weightsync.client.source import Lazy
from weightsync.client.sync import WeightSync
from weightsync.errors import DeadlineExceeded, ManifestRefused, Refused, TransportFailed, UpdateConflict, UpdateFailed, WeightSyncError

WIDTH, LAYERS, BUCKET = 64, 6, 40_000


class Model(torch.nn.Module):
    """Layers, uneven shards, a tied head, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(101, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.odd = torch.nn.Linear(WIDTH, 3)
        self.head = torch.nn.Linear(WIDTH, 101, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(5.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden) + self.odd(hidden).sum()


def model_of(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


# --- in the ranks ---------------------------------------------------------------------------------


def join(state: dict[str, Any], folder: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    state["rank"] = rank


def gather_one_by_one(state: dict[str, Any], small: int) -> None:
    """What is larger than so many bytes is gathered by a collective of its own."""
    from weightsync.client import sharded

    sharded._SMALL_BYTES = small


def shard(state: dict[str, Any], mesh: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model_of(1)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if mesh is not None:
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    state["model"] = model.to(dtype)


def connect(state: dict[str, Any], url: str, seconds: float = 20.0, **options: Any) -> None:
    state["sync"] = WeightSync(url, "token", bucket_bytes=BUCKET, timeout_seconds=seconds, group=dist.group.WORLD, **options)


def sync(state: dict[str, Any], version: int | None = None) -> tuple[int, int, dict[str, float]]:
    report = state["sync"].sync_weights(state["model"], version)
    return report.version, report.nbytes, report.seconds


def step(state: dict[str, Any]) -> None:
    """Forward, backward, and an optimizer's step: collectives in the group that gathers use."""
    model = state["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def publish_and_go_on(state: dict[str, Any]) -> int:
    published = state["sync"].publish(state["model"])
    assert published.tensors_read(0.0) is True, "publish returns when everything was gathered"
    assert state["ended"] == state["gathers"], "and when this rank has no part in it any more"
    step(state)
    return state["sync"].commit(published).version


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor as the ranks have it together."""
    named = {**dict(state["model"].named_parameters()), **dict(state["model"].named_buffers())}
    with torch.no_grad():
        return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in named.items()}


def watch_gathers(state: dict[str, Any]) -> None:
    """Note what is gathered, and how much of it is held at any time; `killed_at` ends this process inside a gather."""
    import weakref

    from weightsync.client import sharded

    gather, alive = sharded.gather, weakref.WeakSet[torch.Tensor]()
    state["gathers"], state["most"] = 0, 0

    def watched(tensors: Any) -> list[torch.Tensor]:
        state["gathers"] += 1
        if state["gathers"] == state.get("killed_at"):
            import os

            os.kill(os.getpid(), signal.SIGKILL)
        if state["gathers"] == state.get("stopped_at"):
            time.sleep(60)
        if state["gathers"] == state.get("raises_at"):
            raise MemoryError("no room")
        made = gather(tensors)
        time.sleep(state.get("dawdles", 0.0))
        state["ended"] = state["gathers"]
        alive.update(made)
        state["most"] = max(state["most"], sum(each.nbytes for each in alive))
        return made

    sharded.gather = watched


def set_in(state: dict[str, Any], key: str, value: Any) -> None:
    state[key] = value


def get_from(state: dict[str, Any], key: str) -> Any:
    return state[key]


# --- from outside -----------------------------------------------------------------------------------


class Trainer:
    """So many ranks."""

    def __init__(self, folder: Path, world: int = 2) -> None:
        self.ranks = [Peer() for _ in range(world)]
        for peer in self.ranks:
            peer.ready()
        self.all(join, lambda rank: (str(folder), rank, world))

    def all(self, function: Any, arguments: Any = lambda rank: (), seconds: float = 30.0) -> list[Any]:
        """Call it in every rank at once; what each returned or raised."""
        for rank, peer in enumerate(self.ranks):
            peer.start(function, *(arguments(rank) if callable(arguments) else arguments))
        return [self.result(rank, seconds) for rank in range(len(self.ranks))]

    def result(self, rank: int, seconds: float = 30.0) -> Any:
        try:
            return self.ranks[rank].result(seconds)
        except WeightSyncError as exc:
            return exc
        except EOFError:
            return None  # killed

    def kill(self) -> None:
        for peer in self.ranks:
            peer.kill()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(receivers=2) as running:
        yield running


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[Trainer]:
    """Two ranks with an FSDP2 model, connected; for tests that leave them in order."""
    trainer = Trainer(tmp_path_factory.mktemp("pair"))
    trainer.all(shard)
    trainer.all(connect, (service.url,))
    trainer.all(watch_gathers)
    yield trainer
    trainer.kill()


@pytest.fixture
def service_and_ranks(tmp_path: Path) -> Iterator[Any]:
    """`make(world, …)`: a service and ranks of its own, for tests that harm them."""
    made: list[Any] = []

    def make(world: int = 2, seconds: float = 20.0, stage: str = "auto", mesh: tuple[int, ...] | None = None) -> tuple[Service, Trainer]:
        service = Service(stage=stage).__enter__()
        made.append(lambda: service.__exit__())
        trainer = Trainer(tmp_path, world)
        made.append(trainer.kill)
        trainer.all(shard, (mesh,))
        trainer.all(connect, (service.url, seconds))
        trainer.all(watch_gathers)
        return service, trainer

    yield make
    for end in reversed(made):
        end()


def require_received(service: Service, version: int, tensors: dict[str, torch.Tensor]) -> None:
    assert len(service.held[version]) == service._world - 1
    for held in service.held[version]:
        assert held.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), name


def test_shards_of_two_ranks_arrive_whole_and_every_rank_gets_the_report(pair: Trainer, service: Service) -> None:
    expected = pair.all(whole)[0]
    assert "head.weight" not in expected, "tied weights are one tensor"
    first, second = pair.all(sync)
    assert first == second
    require_received(service, first[0], expected)
    assert first[1] == sum(tensor.nbytes for tensor in expected.values())
    assert 0 < first[2]["export"] < first[2]["total"] and "pack" in first[2] and "broadcast" in first[2]


def test_large_shards_that_are_gathered_one_by_one_arrive_as_small_ones_that_are_gathered_together(pair: Trainer, service: Service) -> None:
    expected = pair.all(whole)[0]
    pair.all(gather_one_by_one, (1000,))
    version = pair.all(sync)[0][0]
    pair.all(gather_one_by_one, (1 << 20,))
    require_received(service, version, expected)


def test_no_rank_ever_holds_more_than_its_largest_tensor_and_half_a_bucket_of_gathered_ones(pair: Trainer) -> None:
    largest = 101 * WIDTH * 4
    pair.all(set_in, ("most", 0))
    reports = pair.all(sync)
    total = reports[0][1]
    for most in pair.all(get_from, ("most",)):
        # One run, beside it the tensor of the run before that is still being packed.
        assert largest <= most <= BUCKET // 2 + largest < total / 2


def test_the_trainer_goes_on_between_publish_and_commit_and_engines_get_what_was_published(pair: Trainer, service: Service) -> None:
    expected = pair.all(whole)[0]
    pair.ranks[1].call(set_in, "dawdles", 0.05)
    first, second = pair.all(publish_and_go_on)
    pair.ranks[1].call(set_in, "dawdles", 0.0)
    assert first == second
    require_received(service, first, expected)
    assert not torch.equal(pair.all(whole)[0]["odd.bias"], expected["odd.bias"])


def evaluate(state: dict[str, Any]) -> list[str]:
    """Leaves FSDP2's outermost module with whole parameters in the dtype that it computes in."""
    with torch.no_grad():
        state["model"](torch.arange(8))
    return sorted({f"{type(p).__name__} {p.dtype}" for p in state["model"].parameters()})


def test_what_a_forward_pass_left_whole_and_in_another_dtype_is_sent_as_it_is_trained(pair: Trainer, service: Service) -> None:
    expected = pair.all(whole)[0]
    kinds = pair.all(evaluate)
    assert any("bfloat16" in kind for kind in kinds[0]), "what this test is about"
    version = pair.all(sync)[0][0]
    require_received(service, version, expected)


def test_a_refusal_reaches_every_rank_as_what_it_is(pair: Trainer, service: Service) -> None:
    service.refuse = UpdateConflict("another update is under way", hint="Wait", names=["a"], update_id="u-7")
    try:
        first, second = pair.all(sync)
    finally:
        service.refuse = None
    assert type(first) is type(second) is UpdateConflict
    assert first.to_dict() == second.to_dict() and first.update_id == "u-7"
    assert [type(result) for result in pair.all(sync)] == [tuple, tuple], "and the next one goes well"


def cast(state: dict[str, Any], dtype: torch.dtype) -> None:
    state["model"].to(dtype)


def test_a_model_that_was_cast_since_its_last_update_is_refused_on_every_rank(pair: Trainer, service: Service) -> None:
    pair.all(sync)
    pair.all(cast, (torch.bfloat16,))
    first, second = pair.all(sync)
    pair.all(cast, (torch.float32,))
    assert type(first) is type(second) is ManifestRefused
    assert "embed.weight is bfloat16, was float32" in first.message and "odd.bias" in first.names
    assert [type(result) for result in pair.all(sync)] == [tuple, tuple]


def send_lazy(state: dict[str, Any]) -> Any:
    """A merge, of shards on every rank: a matrix and what an adapter adds to it."""
    layer = state["model"].layers[0]
    made: list[str] = []

    def merged() -> torch.Tensor:
        made.append("merged")
        return (layer.weight.detach() + 1).to(torch.bfloat16)

    source = {"merged": Lazy(torch.bfloat16, (WIDTH, WIDTH), merged, collective=True), "plain": torch.ones(3)}
    with WeightSync(state["url"], "token", group=dist.group.WORLD) as sync:
        sync.sync_weights(source)
    return made


def test_what_is_made_of_shards_while_it_is_sent_is_made_on_every_rank(pair: Trainer, service: Service) -> None:
    pair.all(set_in, ("url", service.url))
    assert pair.all(send_lazy) == [["merged"], ["merged"]]
    expected = (pair.all(whole)[0]["layers.0.weight"] + 1).to(torch.bfloat16)
    version = max(service.held)
    require_received(service, version, {"merged": expected, "plain": torch.ones(3)})


CUTS: dict[str, tuple[int, ...]] = {"rows": (7, 4), "columns": (6, 5), "copies": (3,), "one row": (1, 9), "no rows": (0, 4), "bytes": (9,)}


def cut_tensors() -> dict[str, torch.Tensor]:
    return {name: torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(torch.bfloat16) for name, shape in CUTS.items()}


def send_cut(state: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    placements = {"columns": Shard(1), "copies": Replicate()}
    tensors = {name: distribute_tensor(tensor, mesh, [placements.get(name, Shard(0))]) for name, tensor in cut_tensors().items()}
    with WeightSync(state["url"], "token", group=mesh) as sync:
        sync.sync_weights(tensors)


def test_tensors_cut_by_rows_by_columns_and_not_at_all_are_gathered_in_one_run(pair: Trainer, service: Service) -> None:
    pair.all(set_in, ("url", service.url))
    assert pair.all(send_cut) == [None, None]
    require_received(service, max(service.held), cut_tensors())


def offer_different(state: dict[str, Any], kind: str) -> None:
    rank, sync = state["rank"], state["sync"]
    if kind == "shapes":
        sync.sync_weights({"w": torch.ones(3 + rank)})
    elif kind == "names":
        sync.sync_weights({f"w{rank}": torch.ones(3)})
    elif kind == "calls":
        published = sync.publish(state["model"])
        try:
            sync.commit(published) if rank else sync.publish(state["model"])
        finally:
            sync.commit(published)  # as nothing came of it
    elif kind == "nothing":
        sync.commit()
    elif kind == "raises":

        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            if rank:
                raise KeyError("mine")
            yield "w", torch.ones(3)

        sync.sync_weights(pairs())
    else:
        sync.sync_weights({"w": torch.ones(3) if not rank else torch.eye(3).to_sparse()})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("names", "ranks 0 and 1 call publish() for different tensors"),
        ("shapes", "ranks 0 and 1 call publish() for different tensors"),
        ("calls", "ranks 0 and 1 call publish() and commit()"),
        ("nothing", "nothing has been published"),
        ("sparse", "'w' has layout"),
    ],
)
def test_ranks_that_do_not_call_for_the_same_are_all_told(kind: str, words: str, pair: Trainer) -> None:
    first, second = pair.all(offer_different, (kind,))
    assert isinstance(first, Refused) and isinstance(second, Refused)
    assert words in first.message and words in second.message
    assert [type(result) for result in pair.all(sync)] == [tuple, tuple]


def test_what_one_ranks_own_iterator_raises_ends_the_call_on_all(pair: Trainer) -> None:
    for peer in pair.ranks:
        peer.start(offer_different, "raises")
    assert "rank 1: KeyError: 'mine'" in str(pair.result(0))
    with pytest.raises(RuntimeError, match="KeyError: 'mine'"):
        pair.ranks[1].result()
    assert [type(result) for result in pair.all(sync)] == [tuple, tuple]


def test_an_update_that_the_service_ends_while_ranks_gather_ends_on_every_rank(pair: Trainer, service: Service) -> None:
    pair.all(set_in, ("slow", True))
    for peer in pair.ranks:
        peer.start(sync_slowly)
    until(lambda: service.latest().receivers[0].nbytes > 0 and not service.latest().state.final)
    service.answer("POST", f"/v1/updates/{service.latest().request.update_id}/abort", {"reason": "the step was skipped"})
    first, second = pair.result(0), pair.result(1)
    assert type(first) is type(second) and isinstance(first, UpdateFailed), (first, second)
    assert "the step was skipped" in first.message and first.message == second.message
    assert [type(result) for result in pair.all(sync)] == [tuple, tuple]


def sync_slowly(state: dict[str, Any]) -> None:
    state["sync"].sync_weights(state["model"], progress=lambda *_: time.sleep(0.5))


@pytest.mark.parametrize(
    "error",
    [
        ManifestRefused("short", hint="h", names=["a"]),
        ManifestRefused("x" * 9000, hint="h" * 9000, names=["n" * 500] * 20),
        ManifestRefused("ы" * 9000, names=["ж" * 500] * 20),
    ],
    ids=["short", "long", "not ASCII"],
)
def test_an_error_of_any_length_fits_into_what_a_rank_says_of_itself(error: WeightSyncError) -> None:
    said = ranks._packed({"call": "publish", "left": 1.0, "error": ranks._short(error.to_dict())})
    assert said.nbytes == ranks._STATE_BYTES and said[-1] != 0
    told = WeightSyncError.from_dict(json.loads(bytes(said.tolist()))["error"])
    assert type(told) is ManifestRefused and told.message[:5] == error.message[:5]


# --- harm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_a_gather_ends_the_call_of_the_others(world: int, service_and_ranks: Any) -> None:
    service, trainer = service_and_ranks(world)
    trainer.ranks[1].call(set_in, "killed_at", 3)
    began = time.monotonic()
    results = trainer.all(sync, seconds=20)
    assert time.monotonic() - began < 12
    assert results[1] is None
    for rank in {*range(world)} - {1}:
        assert isinstance(results[rank], TransportFailed), (rank, results[rank])
    assert not service.held and service.latest().state.final
    again = trainer.ranks[0]
    again.start(sync)
    assert isinstance(trainer.result(0), TransportFailed), "and the next call says at once what is wrong"


def test_the_sending_rank_is_killed_in_a_gather(service_and_ranks: Any) -> None:
    _, trainer = service_and_ranks(3)
    trainer.ranks[0].call(set_in, "killed_at", 3)
    began = time.monotonic()
    results = trainer.all(sync, seconds=20)
    assert time.monotonic() - began < 12
    assert results[0] is None and all(isinstance(result, TransportFailed) for result in results[1:]), results


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_gather_costs_the_others_their_deadline_and_no_more(service_and_ranks: Any) -> None:
    service, trainer = service_and_ranks(2, 3.0)
    trainer.ranks[1].call(set_in, "stopped_at", 3)
    began = time.monotonic()
    results = trainer.all(sync, seconds=20)
    assert 2.5 < time.monotonic() - began < 8
    assert all(isinstance(result, (DeadlineExceeded, TransportFailed)) for result in results), results
    assert service.latest().state.final


def test_a_rank_whose_gather_raises_ends_the_call_on_all(service_and_ranks: Any) -> None:
    _, trainer = service_and_ranks(2)
    trainer.ranks[1].call(set_in, "raises_at", 3)
    began = time.monotonic()
    first, second = trainer.all(sync, seconds=20)
    assert time.monotonic() - began < 10
    assert type(first) is type(second) is UpdateFailed and first.message == second.message, (first, second)
    assert "rank 1:" in first.message and "MemoryError: no room" in first.message
    trainer.ranks[0].start(sync)
    trainer.ranks[1].start(sync)
    again = [trainer.result(rank) for rank in range(2)]
    assert all(isinstance(result, TransportFailed) and "still being read" in result.message for result in again), again


@pytest.mark.slow
def test_a_rank_that_does_not_come_costs_the_others_their_deadline(service_and_ranks: Any) -> None:
    _, trainer = service_and_ranks(2, 1.0)
    trainer.ranks[0].start(sync)
    error = trainer.result(0)
    assert isinstance(error, DeadlineExceeded) and "every rank to call publish()" in error.message


def publish_step_commit(state: dict[str, Any]) -> int:
    published = state["sync"].publish(state["model"])
    assert not published.tensors_read(0.2)
    step(state)
    return state["sync"].commit(published).version


def test_for_engines_that_stage_nothing_ranks_gather_while_they_commit(service_and_ranks: Any) -> None:
    service, trainer = service_and_ranks(2, stage="none")
    expected = trainer.all(whole)[0]
    first, second = trainer.all(sync)
    assert first == second
    require_received(service, first[0], expected)
    # Before the commit the ranks' group is the trainer's own, and what it makes of its weights is what is sent.
    first, second = trainer.all(publish_step_commit)
    assert first == second
    require_received(service, first, trainer.all(whole)[0])


@pytest.mark.slow
def test_shards_of_a_two_dimensional_mesh(service_and_ranks: Any) -> None:
    service, trainer = service_and_ranks(4, mesh=(2, 2))
    expected = trainer.all(whole)[0]
    results = trainer.all(sync)
    assert all(result == results[0] for result in results)
    require_received(service, results[0][0], expected)
