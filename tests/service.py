"""A service without engines: its HTTP, and receivers that run the worker's own receiving code, all in threads of the test's process.

What a trainer's side does can be tried against it in milliseconds. What was received is kept, update by update.

Not covered: everything that the controller and engines decide (`test_controller.py`, and the tests with fleets).
"""

from __future__ import annotations

import http.server
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from weightsync.codec import decode, encode
from weightsync.errors import Aborted, Refused, WeightSyncError
from weightsync.protocol import (
    Admission,
    BeginOrder,
    CommunicatorInfo,
    EngineState,
    EngineStatus,
    EngineVerdict,
    FleetStatus,
    UpdateRequest,
    UpdateState,
    UpdateStatus,
)
from weightsync.transport import rendezvous
from weightsync.transport.communicator import Communicator
from weightsync.worker.receiver import Receiver

CPU = torch.device("cpu")


class Update:
    """One update: its receivers, and what became of it."""

    def __init__(self, request: UpdateRequest, info: CommunicatorInfo, stage: str) -> None:
        self.request, self.info, self.stage = request, info, stage
        self.state, self.error = UpdateState.RECEIVING, dict[str, Any]()
        self._wires: list[Communicator] = []
        self.receivers = [self._receiver(rank) for rank in range(1, info.world_size)]
        for receiver in self.receivers:
            receiver.start()

    def _receiver(self, rank: int) -> Receiver:
        order = BeginOrder(self.request, self.info, rank - 1, rank, 20.0, stage=self.stage)

        def connect() -> Communicator:
            self._wires.append(Communicator(self.info, rank, CPU, 20.0, 60.0))
            return self._wires[-1]

        return Receiver(order, 0, CPU, CPU, connect)

    def received(self, seconds: float) -> list[dict[str, torch.Tensor]]:
        """Wait for all of it; the tensors of each receiver."""
        names = [spec.name for spec in self.request.manifest.tensors]
        if self.stage == "none":
            return [{name: receiver.held().take(index).clone() for index, name in enumerate(names)} for receiver in self.receivers]
        until = time.monotonic() + seconds
        while not all(receiver.ready for receiver in self.receivers):
            for receiver in self.receivers:
                if receiver.error is not None:
                    raise receiver.error
            if self.state.final or time.monotonic() > until:
                raise Aborted("the update was aborted")
            time.sleep(0.005)
        return [{name: receiver.held().tensor(index).clone() for index, name in enumerate(names)} for receiver in self.receivers]

    def break_off(self, engine: int) -> None:
        """The engine's worker leaves without a word."""
        next(wire for wire in self._wires if wire.rank == engine + 1).close()

    def end(self, error: WeightSyncError | None) -> None:
        if not self.state.final:
            self.state = UpdateState.ABORTED if error else UpdateState.COMMITTED
            self.error = error.to_dict() if error else {}
        for receiver in self.receivers:
            if self.state != UpdateState.COMMITTED:
                receiver.cancel()
            receiver._thread.join(5)
        for wire in self._wires:
            wire.close()

    def status(self) -> UpdateStatus:
        manifest = self.request.manifest
        committed = self.state == UpdateState.COMMITTED  # else nothing was written
        verdicts = tuple(EngineVerdict(at, True, self.request.version, EngineState.SERVING) for at in range(2) if committed)
        return UpdateStatus(
            self.request.update_id, self.request.version, self.state, len(manifest.tensors), manifest.nbytes, 0.0,
            seconds={"apply": 0.0}, verdicts=verdicts, error=self.error or None,
        )  # fmt: skip


class Service:
    """The service; `with Service() as service`.

    Attributes:
        url: where it answers.
        refuse: raised instead of admitting an update.
        stage: as in `BeginOrder`.
        held: what each receiver got, by version.
        engines: as its status shows them.
    """

    def __init__(self, receivers: int = 1, stage: str = "auto") -> None:
        self._world, self.stage = receivers + 1, stage
        self.refuse: WeightSyncError | None = None
        self.held: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.engines: tuple[EngineStatus, ...] = ()
        self.updates: dict[str, Update] = {}
        self._generations = itertools.count(1)
        self._store = rendezvous.host_store("127.0.0.1", 20.0)
        self._server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads, self._server.service = True, self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Service:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for update in self.updates.values():
            update.end(Aborted("the service ends"))
        self._server.shutdown()
        self._server.server_close()

    def latest(self) -> Update:
        return list(self.updates.values())[-1]

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """One call, as the API answers it."""
        match (method, *path.strip("/").split("/")):
            case ("GET", "v1", "status"):
                return encode(FleetStatus("stand-in", max(self.held, default=None), 1, self.engines, None))
            case ("POST", "v1", "updates"):
                return self._begin(decode(UpdateRequest, body))
            case ("GET", "v1", "updates", update_id):
                return encode(self.updates[update_id].status())
            case ("POST", "v1", "updates", update_id, "commit"):
                update = self.updates[update_id]
                try:
                    self.held[update.request.version] = update.received(body["timeout_seconds"])
                    update.end(None)
                except WeightSyncError as exc:
                    update.end(exc)
                return encode(update.status())
            case ("POST", "v1", "updates", update_id, "abort") if update_id not in self.updates:
                raise Refused(f"no update {update_id!r} is known")
            case ("POST", "v1", "updates", update_id, "abort"):
                self.updates[update_id].end(Aborted(body["reason"]))
                return encode(self.updates[update_id].status())
        raise AssertionError((method, path))

    def _begin(self, request: UpdateRequest) -> Any:
        if self.refuse is not None:
            raise self.refuse
        members = {str(engine): engine + 1 for engine in range(self._world - 1)}
        info = CommunicatorInfo("127.0.0.1", self._store.port, next(self._generations), self._world, members, "gloo")
        self.updates[request.update_id] = Update(request, info, self.stage)
        return encode(Admission(request.update_id, request.version, info, tuple(range(self._world - 1)), self.stage != "none"))


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        service: Service = self.server.service  # type: ignore[attr-defined]
        try:
            status, answer = 200, service.answer(self.command, self.path, json.loads(body) if body else {})
        except WeightSyncError as exc:
            status, answer = exc.http_status, {"error": exc.to_dict()}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _answer

    def log_message(self, *_: Any) -> None:
        pass


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Poll until it is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
