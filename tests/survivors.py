"""A whole fleet in processes that are killed or stopped one by one: trainer, API, controller with its store, four engines.

All of it is the real code but Ray, for which a line of JSON over TCP stands, and vLLM, for which a worker stands that
receives as a worker does (`worker.joining`, `worker.receiver`) and keeps what it got.

Not covered: loading (`test_failure_table.py`), and Ray's own restarts (`test_lifecycle.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from tests.peers import Peer
from weightsync import WeightSync, config
from weightsync.codec import decode, encode
from weightsync.errors import ManifestRefused, WeightSyncError
from weightsync.fleet.reports import Inventory
from weightsync.protocol import BeginOrder, WorkerReport
from weightsync.transport.retained import folder_of
from weightsync.worker.held import Held
from weightsync.worker.joining import Joining
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.receiver import Receiver

CPU = torch.device("cpu")
TOKEN = "survivors"
ENGINES = 4
BUCKET = 64 << 10
#: Deadlines of these fleets, seconds; and how long workers may be silent.
UPDATE, CONTROL, SILENCE = 3.0, 1.0, 2.0


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"w{index}": torch.full((16 << 10,), value + index) for index in range(8)}


# --- calls between these processes, in Ray's place ----------------------------------------------


class Method:
    """An actor's method, as `calls.call` uses it."""

    def __init__(self, port: int, name: str) -> None:
        self._port, self._method_name = port, name

    async def remote(self, *args: Any) -> Any:
        import ray.exceptions

        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)
            try:
                writer.write(json.dumps([self._method_name, *args]).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
            return json.loads(line)
        except (OSError, ValueError):
            raise ray.exceptions.RayActorError(error_msg="its process is gone") from None


class Handle:
    def __init__(self, port: int) -> None:
        self._port = port

    def __getattr__(self, name: str) -> Method:
        return Method(self._port, name)


def _serve(port: int, make: Callable[[], Any]) -> Any:
    """Answer calls to what `make` returns, in a thread with a loop of its own; returns when it listens."""
    ready, made = threading.Event(), []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):
            name, *args = json.loads(await reader.readline())
            # Like vLLM's messages it refuses what is not plain, such as a string of a class of its own.
            writer.write(msgspec.json.encode(await getattr(made[0], name)(*args)) + b"\n")
            await writer.drain()
        writer.close()

    async def run() -> None:
        made.append(make())
        server = await asyncio.start_server(answer, "127.0.0.1", port, limit=1 << 26)
        ready.set()
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    assert ready.wait(20)
    return made[0]


# --- engines ------------------------------------------------------------------------------------


class Worker:
    """Receives as a worker does, and keeps the first value of each tensor."""

    def __init__(self) -> None:
        self._joining, self._receiver, self.held = Joining(CPU, 0), None, Held()
        self._state, self.values = "none", dict[str, float]()

    def sign(self, folder: str, number: int) -> WorkerReport:
        return WorkerReport(0, "", "none")

    def begin(self, order: dict[str, Any]) -> WorkerReport:
        begun = decode(BeginOrder, order)
        if self._receiver is not None and self._receiver.order.request.update_id != begun.request.update_id:
            self.abort(self._receiver.order.request.update_id)
        self._receiver = Receiver(begun, 0, CPU, CPU, self._joining.begin(begun))
        self._state = "receiving"
        self._receiver.start()
        return self.poll()

    def poll(self) -> WorkerReport:
        receiver = self._receiver
        if receiver is None:
            return WorkerReport(0, "", "none")
        if self._state == "receiving" and receiver.ready:
            self._state = "staged"
        error = receiver.error.to_dict() if receiver.error and self._state == "receiving" else None
        state = "failed" if error else self._state
        return WorkerReport(0, receiver.order.request.update_id, state, receiver.tensors, receiver.nbytes, error=error)

    def apply(self, update_id: str) -> WorkerReport:
        assert self._receiver is not None and self._receiver.order.request.update_id == update_id
        names = [spec.name for spec in self._receiver.order.request.manifest.tensors]
        self.values = {name: float(self._receiver.held().tensor(index).reshape(-1)[0]) for index, name in enumerate(names)}
        self._state = "applied"
        return self.poll()

    def verdict(self, update_id: str) -> WorkerReport:
        self._state = "verified"
        return self.poll()

    def keep(self, update_id: str) -> WorkerReport:
        receiver = self._receiver
        if receiver is not None and receiver.into is not None:
            staged = replace(receiver.held().update(LoadMap({}), ()), digests=dict(receiver.digests))  # type: ignore[arg-type]
            self.held.settle(receiver.order, 0, staged if receiver.order.keep_in else None)
            receiver.discard()
        return self.poll()

    def abort(self, update_id: str) -> WorkerReport:
        receiver = self._receiver
        if receiver is not None and receiver.order.request.update_id == update_id:
            self._joining.end(receiver.order)
            if self._state != "verified":
                receiver.discard()
                self._joining.leave()
                if (folder := folder_of(receiver.order, 0)) is not None:
                    folder.tidy()
            self._receiver = None
        return self.poll()


class Core:
    """Stands for vLLM around one worker."""

    alive = True

    def __init__(self) -> None:
        self.worker, self.slow_seconds, self.hangs, self.inventory = Worker(), 0.0, False, Inventory()
        self.writes: dict[str, int] = {}

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        name = method.removeprefix("weightsync_")
        while self.hangs:
            await asyncio.sleep(0.01)
        if name == "apply":
            self.writes[args[0]] = self.writes.get(args[0], 0) + 1
            await asyncio.sleep(self.slow_seconds)
        try:
            report = getattr(self.worker, name)(*args)
        except WeightSyncError as exc:
            report = WorkerReport(0, "", "failed", error=exc.to_dict())
        return [encode(report)]

    async def pause(self) -> bool:
        return True

    async def nothing(self, *_: Any) -> None:
        """What an engine without requests does."""

    resume = end_requests = reset_caches = set_version = nothing


def settings(folder: str, engines: int = ENGINES, **more: Any) -> dict[str, Any]:
    sync = {
        "require": min(3, engines),
        "retain_engines": 0,
        "control_timeout_seconds": CONTROL,
        "rendezvous_timeout_seconds": UPDATE,
        "apply_timeout_seconds": UPDATE,
        **more,
    }
    engine = {"engine.model": folder, "engine.count": engines, "engine.silence_seconds": SILENCE}
    return config.dump(config.load({**engine, **{f"sync.{key}": v for key, v in sync.items()}}))


def run_engine(state: dict[str, Any], ordinal: int, port: int, told: dict[str, Any]) -> None:
    from weightsync.fleet.engine_actor import EngineActor
    from weightsync.fleet.scratch import Scratch

    class Watched(EngineActor):
        """Notes when it goes into which state, by the clock that all processes share."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_state":
                state.setdefault("states", []).append((time.monotonic(), str(value)))

    def make() -> Any:
        actor: Any = Watched(ordinal, told)
        actor._engine, actor._url, actor._reason, actor._places = Core(), f"http://127.0.0.1:{port}", "pending_weights", [None]
        actor._starting = asyncio.get_running_loop().create_future()
        actor._starting.set_result(None)
        actor._scratch = Scratch(f"survivor-{ordinal}")
        actor._begin_watch()
        if actor._settings.sync.retain_engines:
            actor._open_shelf(f"actor-{ordinal}")
        return actor

    state["actor"] = _serve(port, make)


def held(state: dict[str, Any]) -> tuple[str, int | None, dict[str, float]]:
    actor = state["actor"]
    return str(actor._state), actor._version, actor._engine.worker.values


def states(state: dict[str, Any]) -> list[tuple[float, str]]:
    """Every state that this process's engine went into, and when."""
    return list(state["states"])


def slow_down(state: dict[str, Any], seconds: float) -> None:
    state["actor"]._engine.slow_seconds = seconds


def hang(state: dict[str, Any], hangs: bool) -> None:
    """The worker answers nothing, or does again; its engine's actor answers all the time."""
    state["actor"]._engine.hangs = hangs


def say_no(state: dict[str, Any], why: str) -> None:
    """The worker refuses what it receives."""
    receiver = state["actor"]._engine.worker._receiver
    receiver._fail(ManifestRefused(why))
    receiver._fail = lambda _: None  # what its thread says of being cancelled
    receiver.cancel()


def hold_sending(state: dict[str, Any], seconds: float) -> None:
    """What this engine hands on waits before its first byte."""
    from weightsync.transport.retained import Stream

    send = Stream.send
    Stream.send = lambda self, channel, deadline, cancelled: (time.sleep(seconds), send(self, channel, deadline, cancelled))[1]  # type: ignore[method-assign]


def spoil(state: dict[str, Any]) -> None:
    """One bit of what this engine keeps flips."""
    folder = state["actor"]._folder
    data = folder.open(folder.head().update_id).data
    data[len(data) // 2] ^= 1


def writes(state: dict[str, Any]) -> list[int]:
    """How often each update was written, in order."""
    return list(state["actor"]._engine.writes.values())


# --- controller, API, trainer --------------------------------------------------------------------


def run_controller(state: dict[str, Any], port: int, engines: list[int], told: dict[str, Any]) -> None:
    import ray

    from weightsync.fleet import controller, roster

    roster._TIMEOUT_SECONDS, controller._HEARTBEAT_SECONDS = 0.5, 0.2  # of these fleets, as all their deadlines
    ray.util.list_named_actors = lambda **_: [{"name": f"engine-{o}", "namespace": "weightsync-default"} for o in range(len(engines))]
    ray.get_actor = lambda name, namespace: Handle(engines[int(name.split("-")[1])])
    _serve(port, lambda: controller.Controller(told))


def run_api(state: dict[str, Any], port: int, controller: int, seconds: float = CONTROL) -> None:
    import uvicorn

    from weightsync.api import app
    from weightsync.fleet.calls import call

    async def ask(method: str, *args: Any, timeout_seconds: float) -> Any:
        return await call(Method(controller, method), *args, timeout_seconds=timeout_seconds)

    built = app.build(SimpleNamespace(ask=ask), lambda: TOKEN, 1, 1 << 24, seconds)  # type: ignore[arg-type]
    sock = socket.create_server(("127.0.0.1", port), reuse_port=False)
    server = uvicorn.Server(uvicorn.Config(built, log_level="warning", lifespan="off"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True).start()


def train(state: dict[str, Any], url: str, version: int, moment: str, seconds: float = UPDATE) -> dict[str, Any]:
    """One update; at `moment` it says so and waits for a word. What came of it."""
    sync = state.setdefault("sync", WeightSync(url, TOKEN, bucket_bytes=BUCKET, timeout_seconds=UPDATE))
    waited = False

    def stand() -> None:
        nonlocal waited
        if not waited:
            waited = True
            state["pipe"].send((False, "here"))
            state["pipe"].recv()

    connect = type(sync._joined).connect
    sync._joined.connect = lambda *args: (stand() if moment == "before" else None, connect(sync._joined, *args))[1]  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        published = sync.publish(
            weights(version),
            version,
            timeout_seconds=seconds,
            progress=lambda sent, total: stand() if moment == "half" and 2 * sent >= total else None,
        )
        if moment == "after":
            published._done.wait(seconds)
            stand()
        committed = sync.commit(published).version
    except WeightSyncError as exc:
        return {"error": exc, "seconds": time.monotonic() - began}
    return {"version": committed, "seconds": time.monotonic() - began}


def bring(state: dict[str, Any], url: str, version: int | None, source: str, seconds: float) -> dict[str, Any]:
    """`sync_weights`; half way through each sending it says so and waits for a word. What came of it."""
    with WeightSync(url, TOKEN, bucket_bytes=BUCKET, timeout_seconds=seconds) as sync:
        stood, before = False, 0

        def stand(sent: int, total: int) -> None:
            nonlocal stood, before
            stood, before = stood and sent > before, sent  # bytes begin anew with each sending
            if not stood and 2 * sent >= total:
                stood = True
                state["pipe"].send((False, "here"))
                state["pipe"].recv()

        number = sync.status().committed_version or 0
        tensors = weights(number + 1 if version is None else version)
        began = time.monotonic()
        try:
            report = sync.sync_weights(iter(tensors.items()) if source == "iterator" else tensors, version, progress=stand)
        except WeightSyncError as exc:
            return {"error": exc, "seconds": time.monotonic() - began}
        return {"report": report, "seconds": time.monotonic() - began}


def commit_thrice(state: dict[str, Any], url: str, version: int) -> tuple[list[str], int | None, int]:
    """A commit with a deadline shorter than the writing, asked for again; what it answered, the fleet's version, updates begun."""
    with WeightSync(url, TOKEN, bucket_bytes=BUCKET, timeout_seconds=UPDATE + 2) as sync:
        published = sync.publish(weights(version), version)
        published._done.wait(UPDATE)
        answers = []
        for seconds in (0.7, 0.3, 5.0):
            try:
                body = sync._http.post(f"/v1/updates/{published.update_id}/commit", {"timeout_seconds": seconds}, seconds + 3)
                answers.append(body["state"])
            except WeightSyncError as exc:
                answers.append(exc.code)
        sync._published = None
        listed = sync._http.get("/v1/updates", 5.0)
        return answers, sync.status().committed_version, sum(update["version"] == version for update in listed)


def free_port() -> int:
    """A port that nobody has, below those that are given to who asks for none: it is bound only later."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := random.randint(15_000, 30_000)))
            return port


class Survivors:
    """The fleet.

    Args:
        folder: for a checkpoint that nobody reads.
        whole: engine 0 and the trainer as interpreters of their own, for how processes end.
        engines: how many.
        run: what an engine's process runs.
    """

    def __init__(
        self, folder: Path, *, whole: bool = False, engines: int = ENGINES, run: Callable[..., None] = run_engine, **sync: Any
    ) -> None:
        (folder / "config.json").write_text("{}")
        self._told, self.version, self._whole, self._run_engine = settings(str(folder), engines, **sync), 0, whole, run
        self._control_seconds = sync.get("control_timeout_seconds", CONTROL)
        self._ports = [free_port() for _ in range(engines)]
        self._controller_port, self._api_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._api_port}"
        self.roles: dict[str, Peer] = {}
        names = [*(f"engine {ordinal}" for ordinal in range(engines)), "controller", "api", "trainer"]
        for name in names:
            self.roles[name] = Peer(whole=whole and name in ("engine 0", "trainer"))
        for name in names:
            self._run(name)
        for name in names[:-1]:
            self.roles[name].result(60)

    def _run(self, name: str) -> None:
        peer = self.roles[name].ready()
        if name.startswith("engine"):
            peer.start(self._run_engine, int(name[-1]), self._ports[int(name[-1])], self._told)
        elif name == "controller":
            peer.start(run_controller, self._controller_port, self._ports, self._told)
        elif name == "api":
            peer.start(run_api, self._api_port, self._controller_port, self._control_seconds)

    def replace(self, name: str) -> None:
        """Start a killed process again, as Ray and whoever runs `serve` do."""
        self.roles[name].kill()
        self.roles[name] = Peer()
        self._run(name)
        if name != "trainer":
            self.roles[name].result()

    def start(self, moment: str, trainer: Peer | None = None) -> Peer:
        """Begin an update; returns when it stands at this moment. `go` lets it go on."""
        self.version += 1
        trainer = trainer or self.roles["trainer"]
        trainer.start(train, self.url, self.version, moment)
        assert trainer.result() == "here"
        return trainer

    def update(self, trainer: Peer | None = None, seconds: float = 20.0) -> dict[str, Any]:
        self.version += 1
        done: dict[str, Any] = (trainer or self.roles["trainer"]).call(train, self.url, self.version, "", seconds=seconds)
        return done

    def held(self, ordinal: int) -> tuple[str, int | None, dict[str, float]]:
        state: tuple[str, int | None, dict[str, float]] = self.roles[f"engine {ordinal}"].call(held)
        return state

    def status(self) -> Any:
        with WeightSync(self.url, TOKEN) as sync:
            return sync.status()

    def end(self) -> None:
        for peer in self.roles.values():
            peer.kill()


def go(trainer: Peer) -> None:
    trainer._pipe.send("go")
