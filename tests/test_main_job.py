"""The main job on a real fleet of two engines: sync, serve, prove, refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.fleets import PROMPTS, Fleet, answers, wait_until
from weightsync import WeightSync
from weightsync.errors import (
    AuthError,
    InternalError,
    ManifestRefused,
    NoEngineReady,
    Refused,
    ServiceUnreachable,
    UpdateConflict,
    VersionRefused,
    WeightSyncError,
)
from weightsync.protocol import EngineState, UpdateState

pytestmark = pytest.mark.engine

KIND = "qwen3"
BUCKET = 60_000  # many buckets, tensors over their borders


@pytest.fixture
def sync(fleet: Fleet, tensors: Any) -> Any:
    """A trainer of its own; the fleet serves A when a test begins."""
    with fleet.client(bucket_bytes=BUCKET) as client:
        client.sync_weights(tensors(KIND, 1))
        yield client


def test_pending_engines_serve_nothing_until_the_first_update(checkpoint: Any, fleet: Fleet) -> None:
    # The first test of the shared fleet; later ones find it committed.
    with fleet.client() as client:
        if client.status().committed_version is None:
            ready = fleet.get("/readyz")
            assert ready.status_code == 503 and "no_committed_version" in ready.json()["reasons"]
            with pytest.raises(NoEngineReady):
                client.generate(PROMPTS[0])


def test_every_engine_equals_a_cold_one_to_new_weights_and_back(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    assert cold(KIND, 1) != cold(KIND, 2)
    for seed in (1, 2, 1):
        report = sync.sync_weights(tensors(KIND, seed))
        assert [v.committed for v in report.verdicts] == [True, True]
        assert report.nbytes == sum(t.nbytes for t in tensors(KIND, seed).values())
        assert {"admit", "receive", "apply", "verify", "total"} <= set(report.seconds)
        for engine in (0, 1):
            assert answers(sync, engine) == cold(KIND, seed)


@pytest.mark.slow
def test_twenty_updates_in_a_row(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    first = sync.status().committed_version or 0
    for n in range(1, 21):
        assert sync.sync_weights(tensors(KIND, 1 + n % 2)).version == first + n
    assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 1)


def test_a_module_is_a_source_and_versions_may_jump(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any, checkpoint: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint(KIND, 2), dtype=torch.bfloat16)
    version = (sync.status().committed_version or 0) + 100
    assert sync.sync_weights(model, version).version == version
    assert answers(sync, 1) == cold(KIND, 2)


def test_tokens_carry_the_version_that_sampled_them(fleet: Fleet, sync: WeightSync, tensors: Any) -> None:
    version = sync.status().committed_version
    generation = sync.generate(PROMPTS[0], max_tokens=5, temperature=0.0)
    assert generation.version == version
    assert [(s.start, s.end) for s in generation.versions] == [(0, 5)]
    assert len(generation.logprobs) == len(generation.token_ids) == 5


def test_a_request_in_flight_survives_an_update_and_carries_both_versions(fleet: Fleet, sync: WeightSync, tensors: Any) -> None:
    old = sync.status().committed_version
    with ThreadPoolExecutor(1) as pool:
        longest = pool.submit(sync.generate, PROMPTS[0], max_tokens=490, temperature=0.0, ignore_eos=True, engine=0)
        sync.sync_weights(tensors(KIND, 2))
        spans = longest.result().versions
    assert longest.result().finish_reason == "length" and spans[-1].end == 490
    assert [s.version for s in spans] in ([old, old + 1], [old], [old + 1])  # the last two: it fell on one side
    if len(spans) == 2:
        assert spans[0].end == spans[1].start


class _Streams:
    """Open streams on every engine; counts tokens that come."""

    def __init__(self, fleet: Fleet, sync: WeightSync, per_engine: int) -> None:
        self.counts: dict[tuple[int, int], int] = {}
        self._stop = threading.Event()
        self._threads = []
        for engine in sync.engines():
            for number in range(per_engine):
                key = (engine.engine, number)
                self.counts[key] = 0
                thread = threading.Thread(target=self._read, args=(key, engine.url, fleet.token), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _read(self, key: tuple[int, int], url: str, token: str) -> None:
        while not self._stop.is_set():  # a stream that has reached its length is opened again
            body = {
                "token_ids": PROMPTS[key[1] % len(PROMPTS)],
                "sampling_params": {"max_tokens": 480, "temperature": 0.0, "ignore_eos": True, "detokenize": False},
                "model": "policy",
                "stream": True,
            }
            headers = {"authorization": f"Bearer {token}"}
            with httpx.stream("POST", f"{url}/inference/v1/generate", json=body, headers=headers, timeout=60) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.counts[key] += sum(len(c["token_ids"] or ()) for c in json.loads(line[6:])["choices"])
                    if self._stop.is_set():
                        return

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)


def test_generation_goes_on_while_the_trainer_is_held_between_two_buckets(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    streams = _Streams(fleet, sync, per_engine=2)
    held, go_on = threading.Event(), threading.Event()

    def hold(sent: int, total: int) -> None:
        if 0 < sent < total and not held.is_set():
            held.set()
            assert go_on.wait(60)

    try:
        published = sync.publish(tensors(KIND, 2), progress=hold)
        assert held.wait(30)
        before = dict(streams.counts)
        wait_until(lambda: all(streams.counts[k] > before[k] for k in before), what="further tokens on every open stream")
        assert not published.tensors_read(0)
        status = fleet.get(f"/v1/updates/{published.update_id}").json()
        assert status["state"] == "receiving"
        go_on.set()
        assert published.tensors_read()
        sync.commit()
    finally:
        go_on.set()
        streams.close()
    assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 2)


def test_parameters_may_change_after_tensors_read(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    mine = {name: tensor.clone() for name, tensor in tensors(KIND, 2).items()}
    published = sync.publish(mine)
    assert published.tensors_read(30)
    for tensor in mine.values():
        tensor.zero_()
    sync.commit(published)
    assert answers(sync, 0) == cold(KIND, 2)


def _refusals(good: dict[str, torch.Tensor]) -> dict[str, tuple[Any, type[WeightSyncError], str]]:
    some = "model.layers.1.mlp.up_proj.weight"
    return {
        "unknown": ({**good, "model.layers.9.mlp.up_proj.weight": good[some]}, ManifestRefused, "model.layers.9.mlp.up_proj.weight"),
        "missing": ({k: v for k, v in good.items() if k != some}, ManifestRefused, some),
        "misshapen": ({**good, some: good[some][:-1]}, ManifestRefused, some),
        "dtype": ({**good, some: good[some].float()}, ManifestRefused, "is float32, was bfloat16"),
        "prefixed": ({f"policy.{k}": v for k, v in good.items()}, ManifestRefused, "have the prefix 'policy.'"),
        "empty": ({}, ManifestRefused, "empty"),
        "twice": ([*good.items(), (some, good[some])], ManifestRefused, some),
        "not a tensor": ({**good, some: 3}, ManifestRefused, some),
    }


@pytest.mark.parametrize("case", ["unknown", "missing", "misshapen", "dtype", "prefixed", "empty", "twice", "not a tensor"])
def test_wrong_tensors_are_refused_by_name_and_nothing_changes(case: str, fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    source, error, text = _refusals(tensors(KIND, 1))[case]
    before = sync.status()
    with pytest.raises(error) as caught:
        sync.sync_weights(source)
    assert text in str(caught.value) and caught.value.hint
    # What is kept for other engines is written behind an update, and shows in the heartbeat after that, as what workers hold does.
    later: dict[str, Any] = {"retained": None, "memory": {}, "slots": {}, "committed_unix_seconds": None}
    assert [replace(engine, **later) for engine in sync.status().engines] == [replace(engine, **later) for engine in before.engines]
    assert answers(sync, 0) == cold(KIND, 1)
    sync.sync_weights(tensors(KIND, 1))  # and the next one works


def test_a_version_that_does_not_rise_is_refused(fleet: Fleet, sync: WeightSync, tensors: Any) -> None:
    version = sync.status().committed_version
    for wrong in (version, 0):
        with pytest.raises(VersionRefused, match=f"committed version {version}"):
            sync.sync_weights(tensors(KIND, 2), wrong)
    with pytest.raises(WeightSyncError, match="version -1"):
        sync.sync_weights(tensors(KIND, 2), -1)


def test_a_second_update_at_once_gets_a_conflict_that_names_the_first(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    go_on = threading.Event()
    published = sync.publish(tensors(KIND, 2), progress=lambda sent, total: go_on.wait(60) and None)
    try:
        with fleet.client() as other, pytest.raises(UpdateConflict, match=published.update_id):
            other.sync_weights(tensors(KIND, 1), published.version + 1)
        with pytest.raises(Refused, match="still being sent"):
            sync.publish(tensors(KIND, 1))
    finally:
        go_on.set()
    sync.commit(published)
    assert answers(sync, 1) == cold(KIND, 2)


def test_a_progress_callback_that_raises_aborts_the_update_and_the_next_one_works(
    fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any
) -> None:
    def fail(sent: int, total: int) -> None:
        raise RuntimeError("a bug of the trainer")

    with pytest.raises(InternalError, match="a bug of the trainer"):
        sync.sync_weights(tensors(KIND, 2), progress=fail)
    assert answers(sync, 0) == cold(KIND, 1)
    sync.sync_weights(tensors(KIND, 2))
    assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 2)


def test_an_aborted_update_releases_the_trainer(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(sent: int, total: int) -> None:
        reached.set()
        go_on.wait(60)

    published = sync.publish(tensors(KIND, 2), progress=hold)
    assert reached.wait(30)
    answer = fleet.post(f"/v1/updates/{published.update_id}/abort", {"reason": "an operator said so"})
    assert answer.json()["state"] == UpdateState.ABORTED
    go_on.set()
    with pytest.raises(WeightSyncError, match="an operator said so"):
        sync.commit(published)
    assert answers(sync, 0) == cold(KIND, 1)
    sync.sync_weights(tensors(KIND, 1))


def test_a_trainer_that_hangs_is_left_at_the_deadline(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    go_on = threading.Event()
    with fleet.client(bucket_bytes=BUCKET) as slow:
        began = time.monotonic()
        published = slow.publish(tensors(KIND, 2), timeout_seconds=3.0, progress=lambda sent, total: go_on.wait(60) and None)
        wait_until(lambda: fleet.get(f"/v1/updates/{published.update_id}").json()["state"] == "aborted", 10, "the abort at the deadline")
        assert time.monotonic() - began < 6
        assert answers(sync, 0) == cold(KIND, 1)
        with fleet.client() as other:
            other.sync_weights(tensors(KIND, 2))
        go_on.set()
        with pytest.raises(WeightSyncError):
            slow.commit(published)
    assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 2)


def test_a_killed_trainer_costs_nothing_and_a_new_one_just_syncs(
    fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any, checkpoint: Any, tmp_path: Any
) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import sys, time\nfrom safetensors.torch import load_file\nfrom weightsync import WeightSync\n"
        "sync = WeightSync(sys.argv[1], sys.argv[2], bucket_bytes=60000)\n"
        "def hold(sent, total):\n"
        "    if sent * 2 > total:\n        print('half', flush=True)\n        time.sleep(600)\n"
        "sync.sync_weights(load_file(sys.argv[3]), progress=hold)\n"
    )
    command = [sys.executable, str(script), fleet.url, fleet.token, str(checkpoint(KIND, 2) / "model.safetensors")]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline().strip() == "half"
    trainer.kill()
    trainer.wait()
    update = fleet.get("/v1/updates").json()[0]
    wait_until(lambda: fleet.get(f"/v1/updates/{update['update_id']}").json()["state"] == "aborted", 10, "the abort")
    assert answers(sync, 0) == cold(KIND, 1)
    sync.sync_weights(tensors(KIND, 2))
    assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 2)


def test_wrong_tokens_and_no_service(fleet: Fleet, sync: WeightSync, tensors: Any) -> None:
    with WeightSync(fleet.url, "wrong") as stranger, pytest.raises(AuthError):
        stranger.sync_weights(tensors(KIND, 1))
    with WeightSync("http://127.0.0.1:9", "any") as nobody, pytest.raises(ServiceUnreachable, match=r"127\.0\.0\.1:9"):
        nobody.sync_weights(tensors(KIND, 1), 5)


def test_the_service_shows_health_versions_and_metrics(fleet: Fleet, sync: WeightSync) -> None:
    version = sync.status().committed_version
    assert fleet.get("/livez", token="none").status_code == 200
    ready = fleet.get("/readyz", token="none")
    assert ready.status_code == 200 and ready.json() == {"ready": True, "reasons": [], "engines": {"0": "serving", "1": "serving"}}
    metrics = wait_until(
        lambda: (
            (text := fleet.get("/metrics", token="none").text)
            and f'weightsync_engine_version{{engine="1"}} {float(version)}' in text
            and text
        )
    )
    assert f"weightsync_committed_version {float(version)}" in metrics
    assert 'weightsync_engines{state="serving"} 2.0' in metrics
    assert "policy" not in metrics and "127.0.0.1" not in metrics
    engines = fleet.get("/v1/engines").json()
    assert [e["version"] for e in engines] == [version, version] and all(e["state"] == EngineState.SERVING for e in engines)
    latest = fleet.get("/v1/updates").json()[0]
    assert latest["version"] == version and latest["state"] == "committed" and len(latest["verdicts"]) == 2
    assert all(v["checks"]["tensors"] > 0 and v["checks"]["addresses"] > 0 for v in latest["verdicts"])


def test_an_engine_lets_only_four_routes_and_the_token_pass(fleet: Fleet, sync: WeightSync) -> None:
    url = sync.engines()[0].url
    right = {"authorization": f"Bearer {fleet.token}"}
    completion = {"model": "policy", "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0}
    assert httpx.get(f"{url}/v1/models", headers=right).json()["data"][0]["id"] == "policy"
    answered = httpx.post(f"{url}/v1/completions", json=completion, headers=right, timeout=30)
    assert answered.status_code == 200 and answered.json()["usage"]["completion_tokens"] == 4
    assert httpx.post(f"{url}/v1/completions", json=completion).status_code == 401
    assert httpx.post(f"{url}/v1/completions", json=completion, headers={"authorization": "Bearer x"}).status_code == 401
    for method, path in [
        ("POST", "/invocations"),
        ("POST", "/scale_elastic_ep"),
        ("POST", "//v1/completions"),
        ("GET", "/metrics"),
        ("POST", "/v1/completions/"),
    ]:
        assert httpx.request(method, url + path, json=completion, headers=right).status_code == 404, path


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_quickstart_push_and_status(fleet: Fleet, sync: WeightSync, cold: Any, checkpoint: Any, tmp_path: Any) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(fleet.token)
    version = sync.status().committed_version or 0
    example = Path(__file__).parent.parent / "examples" / "quickstart.py"
    said = _run(sys.executable, str(example), str(checkpoint(KIND, 2)), fleet.url, str(token_file))
    assert f"version {version + 1}" in said
    assert answers(sync, 0) == cold(KIND, 2)
    cli = [sys.executable, "-m", "weightsync.cli"]
    pushed = _run(*cli, "push", str(checkpoint(KIND, 1)), "--url", fleet.url, "--token-file", str(token_file))
    assert f"version {version + 2}" in pushed
    status = json.loads(_run(*cli, "status", "--json", "--url", fleet.url, "--token-file", str(token_file)))
    assert status["committed_version"] == version + 2 and status["ready"] == 2
    assert "serving" in _run(*cli, "status", "--url", fleet.url, "--token-file", str(token_file))
