"""Waves and requests in flight on two real engines, of which one must always serve: requests end first, or are ended.

Not covered: engines that die in a wave (`test_waves_on_fleet.py`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleets import Fleet, answers, wait_until
from weightsync import WeightSync
from weightsync.client.published import Published
from weightsync.errors import WeightSyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3"
#: Tokens of a request that ends some seconds behind its beginning, and of one that outlasts what else happens here, on a quiet machine too.
LONG, ENDLESS = 1900, 2000


def start(checkpoint: Any, home: Path, *flags: str) -> Fleet:
    return Fleet(checkpoint(KIND, 1), home, 2, ["--sync.min_available=1", "--engine.max_model_len=2048", *flags]).ready()


def staged(fleet: Fleet, sync: WeightSync, weights: Any) -> Published:
    """An update that all engines have and nobody has committed: what requests are to outlast is the rest."""
    published = sync.publish(weights)
    wait_until(lambda: fleet.get(f"/v1/updates/{published.update_id}").json()["state"] == "staged", 60, "the engines to have it")
    return published


class Stream:
    """A long generation on one engine: tokens, the versions they are of, why it ended, and the error it was told."""

    def __init__(self, fleet: Fleet, url: str, pool: ThreadPoolExecutor, max_tokens: int = LONG) -> None:
        self.tokens: list[int] = []
        self.versions: set[str] = set()
        self.reason = self.error = None
        self._times: list[float] = []
        self._body = {**body(max_tokens), "stream": True}
        self._asked = pool.submit(self._read, url, {"authorization": f"Bearer {fleet.token}"})
        wait_until(lambda: len(self.tokens) >= 8, what="tokens")

    def _read(self, url: str, headers: dict[str, str]) -> None:
        with httpx.stream("POST", f"{url}/inference/v1/generate", json=self._body, headers=headers, timeout=120) as response:
            for line in response.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                self._times.append(time.monotonic())
                self.error = event.get("error") or self.error
                for choice in event.get("choices", ()):
                    self.tokens += choice["token_ids"] or ()
                    self.versions |= {span["version"] for span in choice.get("weight_versions") or ()}
                    self.reason = choice.get("finish_reason") or self.reason

    def end(self) -> None:
        self._asked.result(60)

    @property
    def token_seconds(self) -> float:
        return (self._times[-1] - self._times[0]) / len(self.tokens)


def body(max_tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return {"token_ids": [1, 5, 9, 300], "sampling_params": sampling, "model": "policy"}


class Rollouts:
    """Short completions of whoever serves, one after the other."""

    def __init__(self, sync: WeightSync) -> None:
        self._sync, self._stop = sync, threading.Event()
        self.made: list[tuple[int, int | None, float]] = []  # engine, version, seconds
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            made = self._sync.generate([7, 7, 7], max_tokens=2)
            self.made.append((made.engine, made.versions[0].version, time.monotonic() - began))

    def __enter__(self) -> Rollouts:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join(60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_requests_end_before_their_engine_is_written_and_the_other_one_serves(
    checkpoint: Any, tensors: Any, cold: Any, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    fleet = start(checkpoint, tmp_path, "--sync.in_flight=wait", "--sync.new_requests=refuse")
    with fleet.client() as sync, fleet.client() as asking:
        old = sync.sync_weights(tensors(KIND, 1)).version  # nobody serves yet, and nobody is missed
        published = staged(fleet, sync, tensors(KIND, 2))
        streams = [Stream(fleet, engine.url, pool) for engine in sync.engines()]
        with Rollouts(asking) as rollouts:
            report = sync.commit(published)
            for stream in streams:
                stream.end()
        for stream in streams:
            assert (len(stream.tokens), stream.versions, stream.reason, stream.error) == (LONG, {str(old)}, "length", None)
        drained = [verdict.seconds["drain"] for verdict in report.verdicts]
        assert drained[0] > 1.0 and all("requests_kept" not in verdict.checks for verdict in report.verdicts)
        assert all(verdict.committed and verdict.pause_seconds < 1.0 for verdict in report.verdicts), "it generated while it drained"
        assert max(seconds for *_, seconds in rollouts.made) < drained[0], "none waited for an engine to drain"
        assert {(engine, version) for engine, version, _ in rollouts.made} >= {(1, old), (0, report.version)}
        assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 2)
    assert fleet.stop() == 0


def test_requests_are_ended_for_an_update_and_come_again(
    checkpoint: Any, tensors: Any, cold: Any, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    fleet = start(checkpoint, tmp_path, "--sync.in_flight=abort", "--engine.max_num_seqs=1")
    # Made before: it takes a while, in which the stream would go on.
    client = httpx.Client(headers={"authorization": f"Bearer {fleet.token}"}, timeout=120)
    with fleet.client() as sync, fleet.client() as asking, client:
        sync.sync_weights(tensors(KIND, 1))
        engines = sync.engines()
        published = staged(fleet, sync, tensors(KIND, 2))
        stream = Stream(fleet, engines[0].url, pool, ENDLESS)
        plain = [pool.submit(client.post, f"{engine.url}/inference/v1/generate", json=body(ENDLESS)) for engine in engines]
        time.sleep(0.5)  # each engine runs one, and has no place for another
        again: Future[Any] = pool.submit(asking.generate, [1, 5, 9, 300], max_tokens=32, temperature=0.0, ignore_eos=True)
        time.sleep(0.1)
        began = time.monotonic()
        report = sync.commit(published)
        assert time.monotonic() - began < ENDLESS / 2 * stream.token_seconds, "nobody waited for them"
        stream.end()
        error = WeightSyncError.from_dict(stream.error or {})
        assert (error.code, error.retryable, stream.reason) == ("engine_updating", True, None)
        assert len(stream.tokens) < ENDLESS
        refused = [asked.result(60) for asked in plain]
        assert [response.status_code for response in refused] == [503, 503]
        assert all(r.headers["retry-after"] == "1" and r.json()["error"]["code"] == "engine_updating" for r in refused)
        assert sum(verdict.checks["requests_ended"] for verdict in report.verdicts) >= 3
        assert len(again.result(60).token_ids) == 32, "the client sends it again by itself"
        began = time.monotonic()
        made, took = [answers(sync, engine.engine) for engine in engines], time.monotonic() - began
        assert took < ENDLESS / 2 * stream.token_seconds, "vLLM has ended them too: none waited for a place"
        assert made == [cold(KIND, 2)] * 2
        assert "weightsync_requests_at_commit_total" in fleet.get("/metrics").text
    assert fleet.stop() == 0
