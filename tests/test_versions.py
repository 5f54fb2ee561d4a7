"""Versions and update ids on a real fleet: two trainers at once, a trainer that starts again, every call made twice."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.fleets import PROMPTS, Fleet, answers, wait_until
from weightsync import WeightSync
from weightsync.client.source import offer
from weightsync.codec import encode
from weightsync.errors import VersionRefused

pytestmark = pytest.mark.engine

KIND = "qwen3"


@pytest.fixture
def sync(fleet: Fleet, tensors: Any) -> Iterator[WeightSync]:
    """A trainer of its own; the fleet serves A when a test begins."""
    with fleet.client() as client:
        client.sync_weights(tensors(KIND, 1))
        yield client


TRAINER = """
import sys, time
from safetensors.torch import load_file
from weightsync import WeightSync
from weightsync.errors import UpdateConflict, VersionRefused
url, token, weights, version = sys.argv[1:]
sync, tensors = WeightSync(url, token), load_file(weights)
print("here", flush=True)
time.sleep(max(0, float(sys.stdin.readline()) - time.time()))
for number in range(10):
    try:
        print("committed", sync.sync_weights(tensors, int(version) + number, timeout_seconds=60).update_id, flush=True)
    except (UpdateConflict, VersionRefused) as error:
        print(error.code, error.message, flush=True)
"""


@pytest.mark.slow
def test_two_trainers_at_once_both_get_an_answer_each_time(fleet: Fleet, sync: WeightSync, checkpoint: Any, cold: Any) -> None:
    version, seen = (sync.status().committed_version or 0) + 1, {u["update_id"] for u in fleet.get("/v1/updates").json()}
    trainers = []
    for seed in (1, 2):
        command = [sys.executable, "-c", TRAINER, fleet.url, fleet.token, str(checkpoint(KIND, seed) / "model.safetensors"), str(version)]
        trainers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for trainer in trainers:
        assert trainer.stdout is not None and trainer.stdout.readline() == "here\n"
    begin = time.time() + 0.5
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda trainer: trainer.communicate(f"{begin}\n", timeout=120)[0].splitlines(), trainers))
    assert [trainer.returncode for trainer in trainers] == [0, 0]
    lines = [line.split(maxsplit=1) for one in said for line in one]
    assert [len(one) for one in said] == [10, 10]
    committed = [text for word, text in lines if word == "committed"]
    assert {word for word, _ in lines} >= {"committed", "update_conflict"}
    new = {u["update_id"]: u for u in fleet.get("/v1/updates").json() if u["update_id"] not in seen}
    assert sorted(new) == sorted(committed) and len({u["version"] for u in new.values()}) == len(committed)
    for word, text in lines:  # a conflict names the update that was under way
        assert word != "update_conflict" or any(f"update {update_id} " in text for update_id in new)
    assert answers(sync, 0) == answers(sync, 1) in (cold(KIND, 1), cold(KIND, 2))


def test_a_restarted_trainer_takes_the_fleet_back_only_when_it_says_so(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    before = sync.status()
    assert before.committed_version is not None
    with pytest.raises(VersionRefused, match=f"committed version {before.committed_version}.*rewind=True"):
        sync.sync_weights(tensors(KIND, 2), 0)
    assert answers(sync, 0) == cold(KIND, 1)
    sampled = sync.generate(PROMPTS[0], max_tokens=2).version
    assert before.staleness(sampled) == 0
    assert sync.sync_weights(tensors(KIND, 2), 0, rewind=True).version == 0
    after = sync.status()
    assert after.staleness(sampled) is None and after.staleness(0) == 0
    assert (after.committed_version, after.rewinds, after.ready) == (0, before.rewinds + 1, 2)
    assert [engine.version for engine in after.engines] == [0, 0]
    assert fleet.get("/v1/updates").json()[0]["rewind"] is True
    assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 2)
    assert sync.generate(PROMPTS[0], max_tokens=2).version == 0

    def shown() -> bool:
        lines = fleet.get("/metrics").text.splitlines()
        return {"weightsync_committed_version 0.0", f"weightsync_rewinds {float(after.rewinds)}"} <= set(lines)

    wait_until(shown, what="the rewind in the metrics")
    assert sync.sync_weights(tensors(KIND, 1)).version == 1  # and from here on it rises
    sync.sync_weights(tensors(KIND, 1), before.committed_version + 1)


def test_every_call_may_be_made_again(fleet: Fleet, sync: WeightSync, tensors: Any) -> None:
    request, _ = sync._request(offer(tensors(KIND, 2)), None, 60.0, False)
    path = f"/v1/updates/{request.update_id}"
    first = fleet.post("/v1/updates", encode(request))
    assert first.status_code == 201 and fleet.post("/v1/updates", encode(request)).json() == first.json()
    other = fleet.post("/v1/updates", encode(replace(request, version=request.version + 1)))
    assert other.status_code == 409 and "another request of that id" in other.json()["error"]["message"]
    ended = [fleet.post(f"{path}/abort", {"reason": "no trainer"}).json() for _ in range(2)]
    assert ended[0] == ended[1] and ended[0]["state"] == "aborted"
    assert fleet.post(f"{path}/commit", {}).json() == ended[0]
    again = fleet.post("/v1/updates", encode(request))
    assert again.status_code == 409 and "has ended (aborted)" in again.json()["error"]["message"]


def test_a_commit_made_twice_is_one_and_what_follows_it_changes_nothing(fleet: Fleet, sync: WeightSync, tensors: Any, cold: Any) -> None:
    published = sync.publish(tensors(KIND, 2))
    path, made = f"/v1/updates/{published.update_id}", []
    threads = [threading.Thread(target=lambda: made.append(fleet.post(f"{path}/commit", {}).json())) for _ in range(3)]
    for thread in threads:
        thread.start()
    report = sync.commit(published)
    for thread in threads:
        thread.join(60)
    made += [fleet.post(f"{path}/commit", {}).json(), fleet.post(f"{path}/abort", {"reason": "late"}).json()]
    assert len(made) == 5 and all(one == made[0] for one in made) and made[0]["state"] == "committed"
    assert [v["pause_seconds"] for v in made[0]["verdicts"]] == [v.pause_seconds for v in report.verdicts]
    assert fleet.get("/v1/updates").json()[0] == made[0]
    request, _ = sync._request(offer(tensors(KIND, 2)), published.version, 60.0)
    again = fleet.post("/v1/updates", encode(replace(request, update_id=published.update_id)))
    assert again.status_code == 409 and "has ended (committed)" in again.json()["error"]["message"]
    assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 2)
