"""A fleet over hosts of their own: head and engine 0 on the first, engine 1 on the second, the trainer on the third.

What is told leads from one to another, and a host whose link is cut costs an update, not a fleet.

Not covered: NCCL between hosts, and links that lose or delay.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fleets, hosts
from tests.fleets import Fleet, wait_until
from tests.peers import Peer
from weightsync import WeightSync
from weightsync.errors import DeadlineExceeded, EngineDied, WeightSyncError
from weightsync.protocol import EngineState, FleetStatus, UpdateState

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

KIND = "qwen3"
#: Deadlines, seconds.
UPDATE, CONTROL = 15.0, 2.0
#: What a call may take beyond its deadline where nothing answers: asking the service why, and withdrawing the update.
SLACK = 12.0


class Trainer:
    """A trainer on the third host."""

    def __init__(self, network: hosts.Network, fleet: Fleet) -> None:
        self._peer = Peer().ready()
        self._peer.call(hosts.enter, network.namespace("c"))
        self._peer.call(connect, fleet.url, fleet.token)

    def sync(self, weights: Any, at: str = "", meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """One update; what came of it. `meanwhile` is done when it stands at that moment."""
        self._peer.start(train, weights, at)
        began = time.monotonic()
        if at:
            assert self._peer.result(UPDATE) == "here"
            meanwhile()
            self._peer._pipe.send("go")
        outcome: dict[str, Any] = self._peer.result(UPDATE + SLACK + 5)
        return outcome | {"seconds": time.monotonic() - began}

    def bring(self, weights: Any, at: str = "", meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """An update that must succeed."""
        outcome = self.sync(weights, at, meanwhile)
        assert "error" not in outcome, outcome["error"]
        return outcome

    def status(self) -> FleetStatus:
        status: FleetStatus = self._peer.call(status_of)
        return status

    def answers(self, engine: int) -> Any:
        return self._peer.call(answers_of, engine, seconds=60)

    def kill(self) -> None:
        self._peer.kill()


def connect(state: dict[str, Any], url: str, token: str) -> None:
    state["sync"] = WeightSync(url, token, bucket_bytes=60_000, timeout_seconds=UPDATE, interface="eth0")


def train(state: dict[str, Any], weights: Any, at: str) -> dict[str, Any]:
    waited = False

    def stand() -> None:
        nonlocal waited
        if not waited:
            waited = True
            state["pipe"].send((False, "here"))
            state["pipe"].recv()

    try:
        if at == "sent":
            published = state["sync"].publish(weights)
            published._done.wait(UPDATE)
            staged = f"/v1/updates/{published.update_id}"
            wait_until(lambda: state["sync"]._http.get(staged, 5.0)["state"] == "staged", UPDATE, "every engine's bytes")
            stand()
            report = state["sync"].commit(published)
        else:
            report = state["sync"].sync_weights(
                weights, progress=lambda sent, total: stand() if at == "half" and 2 * sent >= total else None
            )
    except WeightSyncError as exc:
        return {"error": exc}
    return {"version": report.version, "verdicts": {v.engine: v for v in report.verdicts}, "sent_again": report.sent_again}


def status_of(state: dict[str, Any]) -> FleetStatus:
    """While Ray gives up a node, which this test waits for, an answer can come later than a client waits for one."""
    until = time.monotonic() + 15
    while True:
        try:
            status: FleetStatus = state["sync"].status()
            return status
        except DeadlineExceeded:
            if time.monotonic() > until:
                raise


def answers_of(state: dict[str, Any], engine: int) -> Any:
    return fleets.answers(state["sync"], engine)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """For Ray's files: where sockets lie the path must be short."""
    folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def network(folder: Path) -> Iterator[hosts.Network]:
    if why := hosts.why_not():
        pytest.skip(why)
    with hosts.Network("abc") as network:
        yield network


@pytest.fixture(scope="module")
def fleet(network: hosts.Network, folder: Path, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    for host in "ab":
        network.start_ray(host, folder / host, cpus=1)  # room for one engine on each
    flags = [
        f"--ray.address={network.ray_address}", f"--sync.store_host={network.address('a')}", "--api.host=0.0.0.0",
        "--sync.interface=eth0", "--sync.require=1", f"--sync.control_timeout_seconds={CONTROL}",
    ]  # fmt: skip
    home = tmp_path_factory.mktemp("hosts")
    running = Fleet(checkpoint(KIND, 1), home, 2, flags, hosts.ray_environment(), network.on("a"))
    try:
        yield running.ready()
    finally:
        code = running.stop()
    assert code == 0


@pytest.fixture(scope="module")
def trainer(network: hosts.Network, fleet: Fleet) -> Iterator[Trainer]:
    made = Trainer(network, fleet)
    yield made
    made.kill()


@pytest.fixture
def uncut(network: hosts.Network) -> Iterator[hosts.Network]:
    yield network
    for host in "abc":
        network.mend(host)


def back(trainer: Trainer) -> bool:
    """Whether every engine answers, and has ended what reached it late."""
    return all(engine.state in (EngineState.SERVING, EngineState.QUARANTINED) for engine in trainer.status().engines)


def ended(trainer: Trainer) -> bool:
    """Whether the service answers, and the last update was aborted."""
    try:
        update = trainer.status().update
    except WeightSyncError:
        return False
    return update is not None and update.state == UpdateState.ABORTED


def engines_of(network: hosts.Network) -> dict[str, list[int]]:
    """Processes of engine actors, by host."""
    return {host: [p for p in network.processes(host) if _title(p).startswith("ray::EngineActor")] for host in "ab"}


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    except OSError:
        return ""


def test_an_update_reaches_engines_on_two_hosts_from_a_third(
    network: hosts.Network, fleet: Fleet, trainer: Trainer, tensors: Any, cold: Any
) -> None:
    assert fleet.url.startswith(f"http://{network.address('a')}:"), "an address to call, not one to listen on"
    for seed in (1, 2):
        report = trainer.bring(tensors(KIND, seed))
        assert {o: v.committed for o, v in report["verdicts"].items()} == {0: True, 1: True}
        assert trainer.answers(0) == trainer.answers(1) == cold(KIND, seed)
    where = {engine.url.removeprefix("http://").partition(":")[0] for engine in trainer.status().engines}
    assert where == {network.address("a"), network.address("b")}
    assert all(engines_of(network).values()), "one on each"
    assert any(_title(pid).startswith("ray::Controller") for pid in network.processes("a")), "where its store's address is"


def test_a_link_that_is_cut_in_a_broadcast_costs_the_other_engine_no_call(
    uncut: hosts.Network, trainer: Trainer, tensors: Any, cold: Any
) -> None:
    far = far_engine(uncut, trainer)
    version = trainer.bring(tensors(KIND, 1))["version"]
    engines, processes = trainer.status().engines, engines_of(uncut)

    near = 1 - far
    went_on = trainer.bring(tensors(KIND, 2), "half", lambda: uncut.cut("b"))
    assert went_on["version"] == version + 1 and went_on["seconds"] < UPDATE
    assert [sent.engine for sent in went_on["sent_again"]] == [far] and f"engine {far}" in went_on["sent_again"][0].error["message"]
    assert {o: v.committed for o, v in went_on["verdicts"].items()} == {near: True, far: False}
    assert trainer.answers(near) == cold(KIND, 2) and trainer.status().committed_version == version + 1

    following = trainer.bring(tensors(KIND, 2))
    assert following["version"] == version + 2 and following["sent_again"] == ()
    assert {o: v.committed for o, v in following["verdicts"].items()} == {near: True, far: False}
    assert following["seconds"] < UPDATE / 3, "it waits no longer for one that is known not to answer"
    assert trainer.answers(near) == cold(KIND, 2)
    assert {e.engine: e.state for e in trainer.status().engines} == {near: EngineState.SERVING, far: EngineState.DEAD}

    uncut.mend("b")
    wait_until(lambda: back(trainer), 40, "the engine that was cut off")
    wait_until(lambda: trainer.status().ready == 2, 20, "the version, from the one that keeps it")
    assert trainer.answers(far) == cold(KIND, 2)
    both = trainer.bring(tensors(KIND, 2))
    assert {o: v.committed for o, v in both["verdicts"].items()} == {0: True, 1: True}
    assert trainer.answers(far) == trainer.answers(near) == cold(KIND, 2)
    assert engines_of(uncut) == processes and [e.url for e in trainer.status().engines] == [e.url for e in engines], "nobody restarted"


def test_a_link_that_is_cut_before_the_commit_costs_its_engine_alone(
    uncut: hosts.Network, trainer: Trainer, tensors: Any, cold: Any
) -> None:
    far, processes = far_engine(uncut, trainer), engines_of(uncut)
    trainer.bring(tensors(KIND, 1))

    went_on = trainer.bring(tensors(KIND, 2), "sent", lambda: uncut.cut("b"))
    verdicts = went_on["verdicts"]
    assert verdicts[1 - far].committed and not verdicts[far].committed
    assert verdicts[far].error["code"] == "deadline" and went_on["seconds"] < UPDATE
    assert trainer.answers(1 - far) == cold(KIND, 2)
    assert {o: v.committed for o, v in trainer.bring(tensors(KIND, 1))["verdicts"].items()} == {1 - far: True, far: False}

    uncut.mend("b")
    wait_until(lambda: back(trainer), 40, "the engine that was cut off")
    both = trainer.bring(tensors(KIND, 2))
    assert {o: v.committed for o, v in both["verdicts"].items()} == {0: True, 1: True}
    assert trainer.answers(far) == trainer.answers(1 - far) == cold(KIND, 2)
    assert engines_of(uncut) == processes


def test_a_trainer_whose_link_is_cut_in_a_broadcast_is_told_at_its_deadline(
    uncut: hosts.Network, trainer: Trainer, tensors: Any, cold: Any
) -> None:
    processes = engines_of(uncut)
    version = trainer.bring(tensors(KIND, 1))["version"]
    broken = trainer.sync(tensors(KIND, 2), "half", lambda: uncut.cut("c"))
    assert isinstance(broken["error"], WeightSyncError) and broken["seconds"] < UPDATE + SLACK
    uncut.mend("c")
    wait_until(lambda: ended(trainer), UPDATE + SLACK, "the end of the update")
    assert trainer.status().committed_version == version
    assert trainer.answers(0) == trainer.answers(1) == cold(KIND, 1)
    assert {o: v.committed for o, v in trainer.bring(tensors(KIND, 2))["verdicts"].items()} == {0: True, 1: True}
    assert trainer.answers(0) == trainer.answers(1) == cold(KIND, 2)
    assert engines_of(uncut) == processes


def test_a_host_that_ray_gave_up_comes_back_as_a_new_node_and_its_engine_with_it(
    uncut: hosts.Network, folder: Path, fleet: Fleet, trainer: Trainer, tensors: Any, cold: Any
) -> None:
    """Ray gives a node up about a minute after its link was cut, and a node that was given up ends itself. Nothing is moved: no room."""
    far = far_engine(uncut, trainer)
    version = trainer.bring(tensors(KIND, 1))["version"]
    near = engines_of(uncut)["a"]
    uncut.cut("b")
    log = folder / "a" / "session_latest" / "logs" / "gcs_server.out"
    wait_until(lambda: "Node is dead because the health check failed" in log.read_text(), 120, "Ray's word that the node is gone")
    wait_until(lambda: reason(trainer, far) == EngineDied.code, 15, "that its engine is")
    assert trainer.bring(tensors(KIND, 2))["version"] == version + 1
    uncut.mend("b")
    wait_until(lambda: not uncut.processes("b"), 120, "the end of what was given up")
    assert reason(trainer, far) == EngineDied.code and trainer.answers(1 - far) == cold(KIND, 2)

    uncut.start_ray("b", folder / "b-again", cpus=1)
    wait_until(lambda: far_engine(uncut, trainer) == far and reason(trainer, far) == "pending_weights", 90, "the engine's restart")
    both = trainer.bring(tensors(KIND, 1))
    assert {o: v.committed for o, v in both["verdicts"].items()} == {0: True, 1: True}
    assert trainer.answers(0) == trainer.answers(1) == cold(KIND, 1)
    assert engines_of(uncut)["a"] == near


def reason(trainer: Trainer, engine: int) -> str:
    return next(e.reason for e in trainer.status().engines if e.engine == engine)


def far_engine(network: hosts.Network, trainer: Trainer) -> int:
    """The engine on the second host: Ray gives ordinals no place."""
    found = [e.engine for e in trainer.status().engines if f"//{network.address('b')}:" in e.url]
    return found[0] if found else -1
