"""What becomes of an engine's requests when it is written: at the gate, and in one engine's actor. Without Ray and vLLM (`workers`).

With real engines: `test_draining_on_vllm.py`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from tests.test_engine_update import Engine
from tests.test_gate import LIMIT, TOKEN, Answer
from tests.workers import weights, without_vllm
from weightsync.errors import EngineUpdating, WeightSyncError
from weightsync.fleet import inside as inside_module
from weightsync.fleet.gate import Gate
from weightsync.fleet.salt import Salt
from weightsync.protocol import EngineState

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
PLAIN = [(b"content-type", b"application/json")]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    monkeypatch.setattr(inside_module, "_LEAVE_SECONDS", 0.1)


class Vllm:
    """Stands for vLLM's application: answers when it is told to, streams word after word, and ends what its client has left.

    As vLLM's it generates in a task that a cancelled request does not take with it, so leaving is the only end of that.
    """

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.running: list[str] = []
        self.ended: list[str] = []
        self.ignores_leaving = False
        self.frozen = lambda: False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = (await receive()).get("body", b"").decode()
        self.running.append(name)
        streams, half = name.startswith("stream"), name.startswith("half")
        if streams or half:
            await send({"type": "http.response.start", "status": 200, "headers": SSE if streams else PLAIN})
            await send({"type": "http.response.body", "body": b"data: one\n\n", "more_body": True})
        finished, left = asyncio.ensure_future(self._finished()), asyncio.ensure_future(self._left(receive))
        await asyncio.wait([finished, left], return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()
        left.cancel()
        self.running.remove(name)
        if not self.finish.is_set():
            self.ended.append(name)
        if not (streams or half):
            await send({"type": "http.response.start", "status": 200, "headers": PLAIN})
        await send({"type": "http.response.body", "body": name.encode()})

    async def _finished(self) -> None:
        await self.finish.wait()
        while self.frozen():
            await asyncio.sleep(0.005)

    async def _left(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect" or self.ignores_leaving:
            await asyncio.sleep(0.005)


def ask(gate: Gate, name: str, method: str = "POST") -> asyncio.Task[Answer]:
    """A request of this name, whose client stays."""
    incoming = [{"type": "http.request", "body": name.encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def request() -> Answer:
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        path = "/v1/completions" if method == "POST" else "/v1/models"
        await gate(
            {"type": "http", "method": method, "path": path, "headers": [(b"authorization", f"Bearer {TOKEN}".encode())]}, receive, send
        )
        return Answer(sent)

    return asyncio.create_task(request())


async def moment() -> None:
    await asyncio.sleep(0.03)


def in_time(run: Coroutine[Any, Any, None]) -> None:
    """A gate that never opens fails its test."""
    asyncio.run(asyncio.wait_for(run, 10))


# --- the gate -----------------------------------------------------------------------------------


def test_the_gate_counts_what_has_not_been_answered_whole() -> None:
    async def run() -> None:
        vllm = Vllm()
        gate = Gate(vllm, TOKEN, lambda: None, LIMIT)
        asked = [ask(gate, name) for name in ("plain", "stream", "half")]
        await moment()
        assert len(gate.inside) == 3 and await gate.inside.drained(0.05) == 3
        vllm.finish.set()
        assert await gate.inside.drained(1.0) == 0
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 3

    in_time(run())


def test_a_request_that_fails_in_the_application_is_not_counted_for_ever() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("vLLM")

    async def run() -> None:
        gate = Gate(broken, TOKEN, lambda: None, LIMIT)
        with pytest.raises(RuntimeError, match="vLLM"):
            await ask(gate, "x")
        assert len(gate.inside) == 0 and await gate.inside.drained(0.05) == 0

    in_time(run())


def test_new_requests_wait_at_the_gate_and_pass_when_it_opens() -> None:
    async def run() -> None:
        vllm, reason = Vllm(), list[str | None]([None])
        gate = Gate(vllm, TOKEN, lambda: reason[0], LIMIT)
        vllm.finish.set()
        gate.hold("wait", EngineUpdating("x"))
        asked, models = ask(gate, "new"), ask(gate, "", "GET")
        await moment()
        assert (await models).status == 200, "what generates nothing passes"
        assert not asked.done() and vllm.running == [] and len(gate.inside) == 0
        gate.release()
        assert (await asked).body == b"new"
        gate.hold("wait", EngineUpdating("x"))
        out = ask(gate, "another")
        await moment()
        reason[0] = "apply_failed"
        gate.release()
        assert ((await out).status, (await out).error.code) == (503, "no_engine_ready"), "the update failed on this engine"

    in_time(run())


def test_new_requests_are_refused_with_a_code_of_their_own() -> None:
    async def run() -> None:
        vllm = Vllm()
        gate = Gate(vllm, TOKEN, lambda: None, LIMIT)
        vllm.finish.set()
        gate.hold("refuse", EngineUpdating("it is updated", hint="Come again"))
        answer = await ask(gate, "new")
        assert (answer.status, answer.headers[b"retry-after"], answer.error.code) == (503, b"1", "engine_updating")
        assert isinstance(answer.error, EngineUpdating) and answer.error.retryable and answer.error.hint
        assert (await ask(gate, "", "GET")).status == 200
        gate.release()
        assert (await ask(gate, "new")).status == 200

    in_time(run())


@pytest.mark.parametrize("ignores", [False, True])
def test_requests_are_ended_with_an_error_that_says_to_come_again(ignores: bool) -> None:
    async def run() -> None:
        vllm = Vllm()
        gate = Gate(vllm, TOKEN, lambda: None, LIMIT)
        asked = {name: ask(gate, name) for name in ("plain", "stream", "half")}
        await moment()
        vllm.ignores_leaving = ignores
        assert await gate.inside.end(lambda: EngineUpdating("ended", engine=0)) == 2
        plain, stream = await asked["plain"], await asked["stream"]
        assert (plain.status, plain.error.code, plain.headers[b"retry-after"]) == (503, "engine_updating", b"1")
        assert stream.status == 200 and stream.messages[-1] == {"type": "http.response.body", "body": b""}, "ended, not broken off"
        events = stream.body.split(b"\n\n")
        assert events[0] == b"data: one" and events[2:] == [b""]
        error = WeightSyncError.from_dict(json.loads(events[1].removeprefix(b"data: "))["error"])
        assert (error.code, error.retryable) == ("engine_updating", True)
        assert not asked["half"].done(), "an answer that has begun goes out"
        assert ignores or sorted(vllm.ended) == ["plain", "stream"], "vLLM was told"
        vllm.finish.set()
        assert (await asked["half"]).body == b"data: one\n\nhalf"

    in_time(run())


# --- one engine ---------------------------------------------------------------------------------


class Served(Engine):
    """An engine with a gate, at version 1; its requests stand still while its core is paused."""

    def __init__(self, folder: Path, **sync: Any) -> None:
        super().__init__(folder, workers=1, rollback="off", **sync)
        self.vllm = Vllm()
        self.vllm.frozen = lambda: not self.core.running
        application = Salt(self._unsalted, self.actor._settled_version) if sync.get("caches") == "salt" else self.vllm
        self.gate = self.actor._gate = Gate(application, TOKEN, self.actor._refusal, LIMIT)

    async def _unsalted(self, scope: Any, receive: Any, send: Any) -> None:
        async def name() -> Any:
            message = await receive()
            return message | {"body": json.loads(message["body"])["name"].encode()} if "body" in message else message

        await self.vllm(scope, name, send)

    def commit(self, version: int) -> asyncio.Task[dict[str, Any]]:
        update = self.workers[0].begin(weights(version))

        async def verdict() -> dict[str, Any]:
            answer: dict[str, Any] = (await self.actor.commit(update, version, 0))["value"]
            return answer

        return asyncio.create_task(verdict())


async def served(folder: Path, **sync: Any) -> Served:
    engine = Served(folder, **sync)
    assert (await engine.commit(1))["committed"]
    return engine


def test_keep_freezes_requests_and_lets_new_ones_into_vllm(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await served(tmp_path)
        asked = ask(engine.gate, "plain")
        await moment()
        verdict = await engine.commit(2)
        assert verdict["committed"] and "drain" not in verdict["seconds"] and not asked.done()
        engine.vllm.finish.set()
        assert (await asked).body == b"plain" and engine.vllm.ended == []

    in_time(run())


@pytest.mark.parametrize("caches", ["reset", "salt"])
def test_wait_lets_requests_end_before_the_pause_and_new_ones_in_behind_it(caches: str, tmp_path: Path) -> None:
    async def run() -> None:
        engine = await served(tmp_path, in_flight="wait", caches=caches)
        name = "plain" if caches == "reset" else json.dumps({"name": "plain"})
        passed = ask(engine.gate, name)
        if caches == "reset":
            await moment()
        else:  # it has passed the gate, and stands before vLLM when the commit begins
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        commit = engine.commit(2)
        await moment()
        new = ask(engine.gate, name)
        await moment()
        assert engine.actor._state == EngineState.UPDATING and engine.core.running, "not paused"
        assert engine.vllm.running == ["plain"] and not commit.done()
        engine.vllm.finish.set()
        assert (await passed).body == b"plain" and engine.actor._version == 1
        verdict = await commit
        assert verdict["committed"] and 0.05 < verdict["seconds"]["drain"] < 1.0
        assert verdict["pause_seconds"] < verdict["seconds"]["drain"], "it generated meanwhile"
        assert "requests_kept" not in verdict["checks"]
        assert (await new).status == 200 and engine.vllm.ended == []

    in_time(run())


def test_wait_has_an_end_and_keeps_what_is_left(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await served(tmp_path, in_flight="wait", drain_timeout_seconds=0.2)
        asked, stream = ask(engine.gate, "plain"), ask(engine.gate, "stream")
        await moment()
        began = time.monotonic()
        verdict = await engine.commit(2)
        assert 0.2 <= time.monotonic() - began < 1.0
        assert verdict["committed"] and verdict["checks"]["requests_kept"] == 2
        assert not asked.done() and engine.vllm.ended == []
        engine.vllm.finish.set()
        assert [(await asked).body, (await stream).body] == [b"plain", b"data: one\n\nstream"]
        engine.require(2)

    in_time(run())


@pytest.mark.parametrize("new_requests", ["wait", "refuse"])
def test_abort_ends_requests_before_the_pause(new_requests: str, tmp_path: Path) -> None:
    async def run() -> None:
        engine = await served(tmp_path, in_flight="abort", new_requests=new_requests)
        asked, stream = ask(engine.gate, "plain"), ask(engine.gate, "stream")
        await moment()
        applied = asyncio.Event()
        stock = engine.core.rpc

        async def rpc(method: str, *args: Any) -> Any:
            if method == "weightsync_apply":
                assert engine.vllm.running == [] and len(engine.gate.inside) == 0
                applied.set()
                await asyncio.sleep(0.1)
            return await stock(method, *args)

        engine.core.rpc = rpc  # type: ignore[method-assign]
        commit = engine.commit(2)
        await applied.wait()
        new = ask(engine.gate, "new")
        await moment()
        engine.vllm.finish.set()
        verdict = await commit
        assert verdict["committed"] and verdict["checks"]["requests_ended"] == 2
        assert (await asked).error.code == "engine_updating" and b"engine_updating" in (await stream).body
        assert sorted(engine.vllm.ended) == ["plain", "stream"]
        assert (await new).status == (200 if new_requests == "wait" else 503)
        assert (await ask(engine.gate, "later")).body == b"later"

    in_time(run())


@pytest.mark.parametrize(("in_flight", "new_requests"), [("wait", "wait"), ("abort", "wait"), ("keep", "refuse")])
@pytest.mark.parametrize("step", ["pause", "load"])
def test_the_gate_opens_whatever_becomes_of_the_update(step: str, in_flight: str, new_requests: str, tmp_path: Path) -> None:
    async def run() -> None:
        engine = await served(tmp_path, in_flight=in_flight, new_requests=new_requests)
        engine.vllm.finish.set()
        if step == "load":
            engine.workers[0].model.fail_behind = [1, 1]
        else:

            async def refuses() -> bool:
                return False

            engine.core.pause = refuses  # type: ignore[method-assign]
        assert not (await engine.commit(2))["committed"]
        answer = await ask(engine.gate, "next")
        if step == "load":
            assert (answer.status, answer.error.code) == (503, "no_engine_ready")
            engine.require_out()
            assert (await engine.commit(3))["committed"]
            answer = await ask(engine.gate, "next")
        assert answer.body == b"next"

    in_time(run())


def test_an_engine_that_serves_nothing_waits_for_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await served(tmp_path, in_flight="wait")
        engine.workers[0].model.fail_behind = [1, 1]
        assert not (await engine.commit(2))["committed"]
        began = time.monotonic()
        assert (await engine.commit(3))["committed"] and time.monotonic() - began < 1.0
        engine.require(3)

    in_time(run())
