"""A real fleet of one tied engine, and what happens to it at bad moments: every next update must just work.

Not covered: killed actors and killed services (`test_lifecycle.py`).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import torch

from tests.fleets import Fleet, answers, engine_pid, trainer, wait_until
from weightsync import WeightSync
from weightsync.client.source import offer
from weightsync.codec import encode
from weightsync.errors import DeadlineExceeded, EngineDied, InternalError, ManifestRefused, NoEngineReady, WeightSyncError
from weightsync.protocol import EngineState

pytestmark = pytest.mark.engine

KIND = "qwen3-tied"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def one(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("faults"), flags=["--engine.max_model_len=2048"]).ready()
    yield running
    assert running.stop() == 0


@pytest.fixture
def sync(one: Fleet, tensors: Any) -> Iterator[WeightSync]:
    """A trainer of its own; the engine serves A when a test begins."""
    with trainer(one, tensors(KIND, 1)) as client:
        yield client


def _process(fleet: Fleet, title: str) -> int:
    """A process of the fleet by what it calls itself; vLLM's by descent: in some environments they can't change what `ps` shows."""
    if title.startswith("ray::"):
        return next(pid for pid, command in fleet.processes().items() if command.startswith(title))
    (core,) = _children(psutil.Process(engine_pid(fleet, 0)))
    return int(core.pid if title == "VLLM::EngineCore" else _children(core)[0].pid)


def _children(process: Any) -> list[Any]:
    return [child for child in process.children() if "resource_tracker" not in " ".join(child.cmdline())]


#: Tokens of a request that is under way when its engine dies, on a quiet machine too.
_LONG = 2000


class _Stream:
    """Requests to the fleet's engine by plain HTTP; one is streamed from now on."""

    def __init__(self, fleet: Fleet, sync: WeightSync, pool: ThreadPoolExecutor) -> None:
        self._url = f"{sync.engines()[0].url}/v1/completions"
        self._client = httpx.Client(headers={"authorization": f"Bearer {fleet.token}"}, timeout=60)
        self._body = {"model": "policy", "prompt": [1, 5, 9], "max_tokens": _LONG, "ignore_eos": True, "return_token_ids": True}
        self.tokens, self._last = 0, ""
        self._reading = pool.submit(self._read)

    def _read(self) -> None:
        with self._client.stream("POST", self._url, json={**self._body, "stream": True}) as response:
            for line in filter(None, response.iter_lines()):
                self.tokens, self._last = self.tokens + 1, line

    def post(self) -> httpx.Response:
        return self._client.post(self._url, json=self._body)

    def error(self) -> WeightSyncError:
        """With which the stream ended."""
        self._reading.result(60)
        assert self.tokens < _LONG
        return WeightSyncError.from_dict(json.loads(self._last.removeprefix("data: "))["error"])


def require_told(whole: httpx.Response, streamed: WeightSyncError, asked: BaseException | None) -> None:
    """That whoever had a request in an engine whose vLLM died is told so in a form that says to come again."""
    assert (whole.status_code, whole.headers["retry-after"]) == (503, "1")
    for error in (WeightSyncError.from_dict(whole.json()["error"]), streamed):
        assert (error.code, error.engine, error.retryable) == ("engine_died", 0, True)
    assert isinstance(asked, (EngineDied, NoEngineReady)) and asked.retryable, "by the client, which finds no other engine"


def _state(fleet: Fleet, update_id: str) -> str:
    return str(fleet.get(f"/v1/updates/{update_id}").json()["state"])


@pytest.mark.slow
def test_a_head_equal_to_its_embedding_may_come_with_it_and_another_one_is_refused(sync: WeightSync, tensors: Any, cold: Any) -> None:
    a, b = tensors(KIND, 1), tensors(KIND, 2)
    with pytest.raises(ManifestRefused, match=HEAD):
        sync.sync_weights({**b, HEAD: a[EMBEDDING]})
    with pytest.raises(ManifestRefused, match=HEAD):
        sync.sync_weights({**b, HEAD: b[EMBEDDING][:3]})
    assert answers(sync, 0) == cold(KIND, 1)
    for head_first in ({HEAD: b[EMBEDDING], **b}, {**b, HEAD: b[EMBEDDING].clone()}):
        sync.sync_weights(a)
        sync.sync_weights(head_first)
        assert answers(sync, 0) == cold(KIND, 2)


def test_a_value_that_the_engines_own_checkpoint_leaves_alone_is_refused(sync: WeightSync, tensors: Any) -> None:
    scale = "model.layers.0.self_attn.attn._k_scale"  # the loader takes it, and no later update would put it back
    with pytest.raises(ManifestRefused, match=scale):
        sync.sync_weights({**tensors(KIND, 1), scale: torch.tensor(3.0)})


def test_a_deadline_that_passes_while_the_weights_are_written_costs_the_next_update_nothing(
    one: Fleet, sync: WeightSync, tensors: Any, cold: Any
) -> None:
    worker = _process(one, "VLLM::Worker")
    published = sync.publish(tensors(KIND, 2), timeout_seconds=3.0)
    wait_until(lambda: _state(one, published.update_id) == "staged", 3, "staging")
    os.kill(worker, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded, match="still being applied"):
            sync.commit(published)
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_until(lambda: _state(one, published.update_id) == "committed", 10, "the commit")
    assert answers(sync, 0) == cold(KIND, 2)
    sync.sync_weights(tensors(KIND, 1))
    assert answers(sync, 0) == cold(KIND, 1)


def test_an_abort_while_the_engine_is_still_asked_ends_the_request_as_aborted(one: Fleet, sync: WeightSync, tensors: Any) -> None:
    worker = _process(one, "VLLM::Worker")
    request, _ = sync._request(offer(tensors(KIND, 2)), None, 60.0)
    os.kill(worker, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        try:
            begun = pool.submit(one.post, "/v1/updates", encode(request))
            wait_until(lambda: one.get("/v1/updates").json()[0]["update_id"] == request.update_id, 10, "the request")
            aborted = pool.submit(one.post, f"/v1/updates/{request.update_id}/abort", {"reason": "changed my mind"})
            wait_until(lambda: _state(one, request.update_id) == "aborted", 10, "the abort")
        finally:
            os.kill(worker, signal.SIGCONT)
        assert aborted.result().status_code == 200
        error = begun.result().json()["error"]
    assert error["code"] == "aborted" and "changed my mind" in error["message"]
    sync.sync_weights(tensors(KIND, 1))


def test_waiting_for_tensors_to_be_read_ends_with_the_sending(sync: WeightSync, tensors: Any) -> None:
    def fail(sent: int, total: int) -> None:
        raise RuntimeError("a bug of the trainer")

    published = sync.publish(tensors(KIND, 2), timeout_seconds=60.0, progress=fail)
    began = time.monotonic()
    with pytest.raises(InternalError, match="a bug of the trainer"):
        published.tensors_read()
    assert time.monotonic() - began < 20
    with pytest.raises(InternalError):
        sync.commit(published)


@pytest.mark.parametrize("where", ["receiving", "staged"])
def test_a_controller_that_dies_in_mid_update_leaves_engines_that_take_the_next_one(
    where: str, one: Fleet, sync: WeightSync, tensors: Any, cold: Any
) -> None:
    go_on = threading.Event()
    published = sync.publish(tensors(KIND, 2), progress=(lambda sent, total: go_on.wait(60) and None) if where == "receiving" else None)
    wait_until(lambda: _state(one, published.update_id) == where, 10, where)
    os.kill(_process(one, "ray::Controller"), signal.SIGKILL)
    go_on.set()
    with pytest.raises(WeightSyncError):
        sync.commit(published)
    wait_until(lambda: one.get("/readyz").status_code == 200, 30, "a new controller")
    assert answers(sync, 0) == cold(KIND, 1)
    sync.sync_weights(tensors(KIND, 2))
    assert answers(sync, 0) == cold(KIND, 2)


@pytest.mark.parametrize("title", ["VLLM::Worker", pytest.param("VLLM::EngineCore", marks=pytest.mark.slow)])
def test_an_engine_whose_vllm_dies_restarts_and_takes_the_next_update(
    title: str, one: Fleet, sync: WeightSync, tensors: Any, cold: Any
) -> None:
    victim = _process(one, title)  # finding it takes a while
    with ThreadPoolExecutor(3) as pool:
        streamed = _Stream(one, sync, pool)
        whole = pool.submit(streamed.post)
        asked = pool.submit(sync.generate, [1, 5, 9], max_tokens=_LONG, ignore_eos=True)
        wait_until(lambda: streamed.tokens, 20, "tokens")
        os.kill(victim, signal.SIGKILL)
        require_told(whole.result(60), streamed.error(), asked.exception(60))
    wait_until(lambda: sync.engines()[0].state == EngineState.DEAD, 20, "its death")
    wait_until(lambda: sync.engines()[0].state == EngineState.PENDING, 60, "the restart")
    if not sync.engines()[0].workers:
        with pytest.raises(NoEngineReady):  # on its way up: neither asked, nor a fault of ours
            sync.sync_weights(tensors(KIND, 2))
    wait_until(lambda: sync.engines()[0].workers, 90, "vLLM")
    sync.sync_weights(tensors(KIND, 2))
    assert answers(sync, 0) == cold(KIND, 2)
