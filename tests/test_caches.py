"""What becomes of caches and of requests in flight at an update, on real engines: one that resets, one that salts."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleets import Fleet, wait_until
from weightsync import WeightSync
from weightsync.errors import ManifestRefused, VerdictNotOk
from weightsync.protocol import EngineState

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3"
BLOCK = 32  # tokens; a prompt is cached block by block
PROMPT = [3 + (7 * n) % 500 for n in range(200)]
CACHED = 192  # tokens of the prompt that lie in full blocks
#: Tokens that take longer than a commit of what is staged does on its way to an engine that is busy with them, on a quiet machine too.
LONG = 1700
ROUND = 300


def start(checkpoint: Any, home: Path, policy: str, connector: str = "") -> Fleet:
    extra: dict[str, Any] = {"block_size": BLOCK}
    if connector:
        config = {"kv_connector": connector, "kv_connector_module_path": "tests.recording_connector", "kv_role": "kv_both"}
        extra["kv_transfer_config"] = {**config, "kv_connector_extra_config": {"folder": str(home)}}
    flags = [
        f"--sync.caches={policy}", f"--engine.extra={json.dumps(extra)}", "--engine.max_model_len=2048", "--sync.retain_engines=0",
        "--sync.probe=off",  # a connector sees its requests too
    ]  # fmt: skip
    return Fleet(checkpoint(KIND, 1), home, flags=flags, env={"PYTHONPATH": str(Path(__file__).parent.parent)})


@pytest.fixture(scope="module")
def resetting(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = start(checkpoint, tmp_path_factory.mktemp("resetting"), "reset", "RecordingConnector").ready()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def salting(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = start(checkpoint, tmp_path_factory.mktemp("salting"), "salt").ready()
    yield running
    assert running.stop() == 0


class Asked:
    """Requests to a fleet's only engine.

    Attributes:
        begun: tokens that the stream under way has brought, for each of `in_flight`.
    """

    def __init__(self, fleet: Fleet, sync: WeightSync) -> None:
        self.url, self.headers = sync.engines()[0].url, {"authorization": f"Bearer {fleet.token}"}
        self.begun: dict[int, int] = {}
        self._streams = httpx.Client(headers=self.headers, timeout=120)  # making one takes a while, in which another stream would go on

    def once(self, prompt: list[int], max_tokens: int = 8, named: str | None = None) -> tuple[list[int], int, str | None]:
        """Greedy tokens, how many tokens of the prompt came from the cache, and the version named by the answer."""
        choice, cached, version = self.choice(prompt, max_tokens, named)
        return choice["token_ids"], cached, version

    def choice(self, prompt: list[int], max_tokens: int = 8, named: str | None = None) -> tuple[dict[str, Any], int, str | None]:
        """As `once`, with vLLM's whole choice."""
        headers = self.headers | ({} if named is None else {"x-weightsync-version": named})
        response = httpx.post(self.url + "/inference/v1/generate", json=_body(prompt, max_tokens), headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        answer = response.json()
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0], details.get("cached_tokens") or 0, response.headers.get("x-weightsync-version")

    def in_flight(self, number: int, max_tokens: int = LONG) -> dict[str, Any]:
        """One long generation, streamed: tokens, version spans, why it ended."""
        self.begun[number] = 0
        made: dict[str, Any] = {"tokens": [], "spans": None, "reason": None}
        body = {**_body(PROMPT[number:] + PROMPT[:number], max_tokens), "stream": True}
        with self._streams.stream("POST", self.url + "/inference/v1/generate", json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    made["tokens"] += choice["token_ids"] or ()
                    made["spans"] = choice.get("weight_versions") or made["spans"]
                    made["reason"] = choice.get("finish_reason") or made["reason"]
                self.begun[number] = len(made["tokens"])
        return made


def _body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return {"token_ids": prompt, "sampling_params": sampling, "model": "policy"}


@pytest.fixture
def reset(resetting: Fleet, tensors: Any) -> Iterator[tuple[WeightSync, Asked, Path]]:
    """A trainer, who asks, and the connector's log, empty; the engine serves A."""
    with resetting.client() as sync:
        sync.sync_weights(tensors(KIND, 1))
        log = resetting.home / "log"
        log.write_text("")
        yield sync, Asked(resetting, sync), log


def across_an_update(sync: WeightSync, asked: Asked, weights: Any, count: int) -> list[dict[str, Any]]:
    """This many generations that are all under way when the update comes."""
    published = sync.publish(weights)  # staged before they begin, so that only the applying falls into them
    status = f"/v1/updates/{published.update_id}"
    wait_until(lambda: sync._http.get(status, 5.0)["state"] == "staged", what="the engine's bytes")
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(asked.in_flight, number) for number in range(count)]
        wait_until(lambda: len(asked.begun) == count and all(n >= 8 for n in asked.begun.values()), what="tokens of every request")
        sync.commit(published)
        return [request.result() for request in running]


# --- reset --------------------------------------------------------------------------------------


def test_behind_an_update_nothing_cached_is_used_and_none_is_reported(reset: Any, tensors: Any) -> None:
    sync, asked, _ = reset
    old, cached, _ = asked.once(PROMPT)
    again = asked.once(PROMPT)
    assert again[:2] == (old, CACHED)
    sync.sync_weights(tensors(KIND, 2))
    new, cached, _ = asked.once(PROMPT)
    assert cached == 0 and new != old
    sync.sync_weights(tensors(KIND, 2))  # the same weights once more, and nothing cached: what a cold engine says
    assert asked.once(PROMPT)[:2] == (new, 0)
    assert asked.once(PROMPT)[:2] == (new, CACHED)


def test_a_connector_is_reset_once_an_update_and_before_the_first_new_request(reset: Any, tensors: Any) -> None:
    sync, asked, log = reset
    asked.once(PROMPT)
    for seed in (2, 1, 2):
        sync.sync_weights(tensors(KIND, seed))
        asked.once(PROMPT)
    begin = f"begin {len(PROMPT)} tokens, 0 from the cache"
    assert log.read_text().splitlines() == [begin, *["reset", begin] * 3]


def test_an_update_that_is_refused_or_aborted_resets_nothing(reset: Any, tensors: Any) -> None:
    sync, _, log = reset
    with pytest.raises(ManifestRefused, match="lm_head"):
        sync.sync_weights({k: v for k, v in tensors(KIND, 2).items() if k != "lm_head.weight"})
    published = sync.publish(tensors(KIND, 2))
    assert published.tensors_read()
    sync.close()
    assert log.read_text() == ""


def test_requests_in_flight_let_their_blocks_go_and_go_on_with_the_new_weights(reset: Any, tensors: Any) -> None:
    sync, asked, log = reset
    old = sync.status().committed_version
    made = across_an_update(sync, asked, tensors(KIND, 2), 2)
    for one in made:
        assert one["reason"] == "length" and len(one["tokens"]) == LONG
        first, second = one["spans"]
        assert (first["version"], second["version"]) == (str(old), str(old + 1))
        assert (first["start"], second["end"]) == (0, LONG) and 8 <= first["end"] == second["start"] < LONG
    lines = log.read_text().splitlines()
    at = lines.index("reset")
    assert lines.count("reset") == 1
    # Both begin anew behind the reset, with all their tokens and none of them from a cache.
    assert len(lines[:at]) == len(lines[at + 1 :]) == 2 and all(line.endswith(" 0 from the cache") for line in lines[at + 1 :])
    # What follows the update is what a request of the same tokens gets that never saw the old weights.
    cut = made[0]["spans"][0]["end"]
    alone = asked.once(PROMPT + made[0]["tokens"][:cut], max_tokens=8)
    assert alone[0] == made[0]["tokens"][cut : cut + 8]


def test_a_reset_that_is_not_done_at_first_is_followed_up(reset: Any, tensors: Any) -> None:
    sync, asked, log = reset
    (log.parent / "refusals").write_text("3")
    sync.sync_weights(tensors(KIND, 2))
    assert log.read_text().splitlines() == ["refused"] * 3 + ["reset"]
    assert asked.once(PROMPT)[1] == 0


def test_a_reset_that_is_never_done_fails_the_update_names_the_cache_and_the_next_one_repairs(reset: Any, tensors: Any) -> None:
    sync, asked, log = reset
    (log.parent / "refusals").write_text("1000")
    with pytest.raises(VerdictNotOk, match="the KV connector's cache could not be dropped") as caught:
        sync.sync_weights(tensors(KIND, 2))
    assert caught.value.phase == "resume" and caught.value.engine == 0
    assert sync.engines()[0].state == EngineState.QUARANTINED and sync.status().ready == 0
    (log.parent / "refusals").write_text("0")
    sync.sync_weights(tensors(KIND, 2))
    assert sync.status().ready == 1 and asked.once(PROMPT)[1] == 0


def test_publishing_a_version_ends_no_running_request(reset: Any, tensors: Any) -> None:
    sync, asked, _ = reset
    stop = threading.Event()
    made: list[dict[str, Any]] = []
    streamed: list[dict[str, Any]] = []

    def ask(number: int) -> None:
        while not stop.is_set():  # so that sixteen are under way whenever the update comes
            if number:
                made.append(asked.choice(PROMPT[number:] + PROMPT[:number], ROUND)[0])
            else:
                streamed.append(asked.in_flight(number, ROUND))

    def spanning() -> int:
        return sum(len(one["weight_versions"]) == 2 for one in made)

    with ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(ask, number) for number in range(16)]
        try:
            for seed in (1, 2, 1, 2):  # one may come just between two rounds of theirs
                published = sync.publish(tensors(KIND, seed))
                assert published.tensors_read(60)
                # They keep step with each other, so the one that is streamed tells how far all are.
                wait_until(lambda: len(made) >= 15 and 8 <= asked.begun[0] < ROUND // 2, 60, "some tokens of every request")
                before = len(made)
                sync.commit(published)
                wait_until(lambda before=before: len(made) >= before + 16, 60, "the end of all that were under way")
                if spanning() >= 8:
                    break
        finally:
            stop.set()
    assert [one.exception() for one in asking] == [None] * 16
    assert {one["finish_reason"] for one in made} | {one["reason"] for one in streamed} == {"length"}
    assert all(len(one["token_ids"]) == one["weight_versions"][-1]["end"] == ROUND for one in made)
    assert spanning() >= 8


def test_a_connector_that_can_not_be_reset_is_refused_at_the_start(checkpoint: Any, tmp_path: Path) -> None:
    refused = start(checkpoint, tmp_path / "home", "reset", "ForgetfulConnector")
    try:
        assert refused.process.wait(120) == 1
    except subprocess.TimeoutExpired:
        refused.stop()
        raise
    assert "the KV connector ForgetfulConnector has no reset_cache" in refused.log.read_text()


# --- salt ---------------------------------------------------------------------------------------


@pytest.fixture
def salt(salting: Fleet, tensors: Any) -> Iterator[tuple[WeightSync, Asked]]:
    with salting.client() as sync:
        sync.sync_weights(tensors(KIND, 1))
        yield sync, Asked(salting, sync)


def test_under_salt_a_new_request_finds_nothing_old_and_a_conversation_keeps_its_own(salt: Any, tensors: Any) -> None:
    sync, asked = salt
    version = sync.status().committed_version
    old, cached, named = asked.once(PROMPT)
    assert (cached, named) == (0, str(version))
    assert asked.once(PROMPT)[:2] == (old, CACHED)
    sync.sync_weights(tensors(KIND, 2))
    new, cached, now = asked.once(PROMPT)
    assert (cached, now) == (0, str(version + 1)) and new != old
    # A later turn of the first conversation, which sends the header back: its blocks are still there.
    assert asked.once([*PROMPT, *old], named=named)[1:] == (CACHED, named)
    # One that claims a version to come begins with the engine's own.
    assert asked.once(PROMPT, named=str(version + 2))[1:] == (CACHED, now)
    sync.sync_weights(tensors(KIND, 1))
    assert asked.once(PROMPT) == (old, 0, str(version + 2))


def test_under_salt_completions_know_versions_and_clients_salts(salt: Any, tensors: Any) -> None:
    sync, asked = salt

    def cached(**more: Any) -> int:
        body = {"model": "policy", "max_tokens": 2, "temperature": 0.0, "prompt": PROMPT, **more}
        response = httpx.post(asked.url + "/v1/completions", json=body, headers=asked.headers, timeout=60)
        assert response.status_code == 200, response.text
        return int((response.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    assert [cached(), cached(), cached(cache_salt="mine"), cached(cache_salt="mine")] == [0, CACHED, 0, CACHED]
    sync.sync_weights(tensors(KIND, 2))
    assert [cached(), cached(), cached(cache_salt="mine"), cached(cache_salt="mine")] == [0, CACHED, 0, CACHED]
    refused = httpx.post(
        asked.url + "/v1/completions", json={"model": "policy", "prompt": PROMPT, "cache_salt": "a/b"}, headers=asked.headers
    )
    assert refused.status_code == 400 and "cache_salt" in refused.text


def test_under_salt_requests_in_flight_keep_their_blocks_and_none_ends(salt: Any, tensors: Any) -> None:
    sync, asked = salt
    old = sync.status().committed_version
    one = across_an_update(sync, asked, tensors(KIND, 2), 1)[0]
    assert one["reason"] == "length" and [span["version"] for span in one["spans"]] == [str(old), str(old + 1)]
    # Its blocks, of both weights, answer for its own conversation; a new one starts from nothing.
    conversation = PROMPT + one["tokens"][: LONG - 10]
    full = len(conversation) // BLOCK * BLOCK
    assert asked.once(conversation, named=str(old))[1] == full
    assert asked.once(conversation)[1] == 0


def test_under_salt_a_version_that_comes_again_finds_nothing_of_the_first_time(salt: Any, tensors: Any) -> None:
    sync, asked = salt
    version = sync.status().committed_version
    assert asked.once(PROMPT)[1] == 0 and asked.once(PROMPT)[1] == CACHED
    sync.sync_weights(tensors(KIND, 2), version, rewind=True)
    tokens, cached, named = asked.once(PROMPT)
    assert (cached, named) == (0, str(version))
    sync.sync_weights(tensors(KIND, 2))
    assert asked.once(PROMPT)[:2] == (tokens, 0)


def test_under_salt_every_answer_of_one_version_is_that_of_a_cold_engine(salt: Any, tensors: Any) -> None:
    sync, asked = salt
    cold: dict[int, list[int]] = {}
    for seed in (2, 1):
        sync.sync_weights(tensors(KIND, seed))
        cold[seed] = asked.once(PROMPT)[0]
    assert cold[1] != cold[2]
    stop, first = threading.Event(), sync.status().committed_version
    answers: list[tuple[dict[str, Any], str]] = []

    def ask() -> None:
        while not stop.is_set():
            choice, _, named = asked.choice(PROMPT)
            answers.append((choice, str(named)))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for number in range(10):
            sync.sync_weights(tensors(KIND, 2 - number % 2))
            before = len(answers)
            wait_until(lambda before=before: len(answers) > before + 2)  # type: ignore[misc]
    finally:
        stop.set()
        thread.join(60)
    # What is found under a version's salt was computed with that version, so every answer of one version is a cold engine's.
    whole = [(c, named) for c, named in answers if [span["version"] for span in c["weight_versions"]] == [named]]
    assert len({named for _, named in whole}) >= 10
    for choice, named in whole:
        assert choice["token_ids"] == cold[1 + (int(named) - first) % 2], named
