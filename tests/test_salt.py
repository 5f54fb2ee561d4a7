"""The version that a request begins with: named in its answer; under the policy `salt` also what it carries on, and what an engine drops.

Without an engine.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_gate import Answer
from weightsync import config
from weightsync.errors import ConfigError, VerdictNotOk, WeightSyncError
from weightsync.fleet.engine_actor import EngineActor
from weightsync.fleet.gate import Gate
from weightsync.fleet.salt import salted, versioned
from weightsync.fleet.vllm_api import Engine
from weightsync.protocol import EngineState, EngineVerdict

ROUTES = ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"]
GOOD = {"model": "policy", "prompt": [1, 2, 3], "temperature": 0.0, "seed": 2**60, "text": "ü\ud800"}


class Application:
    """Stands for vLLM's: keeps what reached it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"] if scope["method"] == "POST" else b"{}"
        self.requests.append(json.loads(body))
        self.headers.append(dict(scope["headers"]))
        if scope["method"] == "POST":
            lengths = [value for key, value in scope["headers"] if key.lower() == b"content-length"]
            assert lengths == [str(len(body)).encode()]
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-of-vllm", b"1")]})
        await send({"type": "http.response.body", "body": b"served"})


def ask(
    application: Application,
    body: Any = GOOD,
    held: int | None = 57,
    path: str = ROUTES[0],
    method: str = "POST",
    named: str | None = None,
    policy: str = "salt",
) -> Answer:
    """One request through the gate and what a policy puts behind it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": content, "more_body": False}] if method == "POST" else []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def version() -> int | None:
        assert method == "POST", "what generates nothing need not wait"
        await asyncio.sleep(0)
        return held

    headers = [(b"authorization", b"Bearer t"), (b"Content-Length", str(len(content)).encode())]
    if named is not None:
        headers.append((b"x-weightsync-version", named.encode()))
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(Gate(versioned(application, policy, version, lambda: held), "t", lambda: None, 10_000_000)(scope, receive, send))
    return Answer(sent)


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_carries_the_version_it_begins_with_and_the_answer_names_it(path: str) -> None:
    application = Application()
    answer = ask(application, path=path)
    assert (answer.status, answer.body) == (200, b"served")
    assert application.requests == [{**GOOD, "cache_salt": "57"}]
    assert answer.headers[b"x-weightsync-version"] == b"57" and answer.headers[b"x-of-vllm"] == b"1"


@pytest.mark.parametrize(("named", "salt"), [("0", "0"), ("41", "41"), ("57", "57"), ("58", "57"), ("9007199254740991", "57")])
def test_a_later_turn_keeps_the_version_of_the_first_and_none_is_ahead_of_the_engine(named: str, salt: str) -> None:
    # Blocks computed with version 57 must not be what a request that begins with 58 finds.
    application = Application()
    answer = ask(application, named=named)
    assert application.requests[0]["cache_salt"] == salt
    assert answer.headers[b"x-weightsync-version"] == salt.encode()


@pytest.mark.parametrize("named", ["-1", "x", "5.0", "5, 6", "99999999999999999", "9007199254740992", "\u0665"])
def test_a_header_that_names_no_version_is_refused(named: str) -> None:
    application = Application()
    answer = ask(application, named=named)
    assert answer.status == 400 and "x-weightsync-version" in answer.error.message
    assert application.requests == []


def test_a_clients_own_salt_stays_in_force_beside_the_version() -> None:
    application = Application()
    for own, salt in ((None, "57"), ("secret", "57.secret"), ("x" * 125, "57." + "x" * 125)):
        ask(application, {**GOOD, "cache_salt": own})
        assert application.requests[-1]["cache_salt"] == salt
    # Two clients, or two versions, never share a salt, however long theirs are; and vLLM takes at most 128 characters.
    made = {salted(own, version) for own in (None, "5", "a" * 127, "a" * 128, "a" * 127 + "b") for version in (5, 55)}
    assert len(made) == 10 and max(map(len, made)) <= 128


@pytest.mark.parametrize("own", ["", 5, True, ["a"], {"a": 1}, "x" * 129])
def test_a_salt_that_vllm_refuses_reaches_it_as_it_is(own: Any) -> None:
    application = Application()
    ask(application, {**GOOD, "cache_salt": own})
    assert application.requests[0]["cache_salt"] == own


def test_a_salt_with_characters_that_vllm_refuses_keeps_them() -> None:
    assert all(char in salted(f"a{char}b", 3) for char in "@/\\\0")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'"a"', b"\xff\xfe", b"[" * 200_000, b'{"a":' * 200_000])
def test_what_can_not_be_salted_does_not_pass(body: bytes) -> None:
    application = Application()
    answer = ask(application, body)
    assert answer.status == 400 and "JSON" in answer.error.message
    assert application.requests == []


def test_an_engine_that_lost_its_version_in_the_update_serves_nothing() -> None:
    application = Application()
    answer = ask(application, held=None)
    assert answer.status == 503 and answer.error.retryable and answer.headers[b"retry-after"] == b"1"
    assert application.requests == []


def test_what_generates_nothing_passes_at_once() -> None:
    application = Application()
    assert ask(application, path="/v1/models", method="GET").status == 200
    assert application.requests == [{}]


# --- without a salt ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["reset", "retain"])
@pytest.mark.parametrize("path", ROUTES)
def test_without_a_salt_the_answer_names_the_version_too_and_the_request_stays_as_it_is(policy: str, path: str) -> None:
    application = Application()
    answer = ask(application, path=path, policy=policy, named="41")
    assert application.requests == [GOOD]
    assert answer.headers[b"x-weightsync-version"] == b"57" and answer.headers[b"x-of-vllm"] == b"1"
    assert answer.body == b"served"


def test_the_version_is_the_one_held_when_the_request_came() -> None:
    held = [5]
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        held[0] = 6  # an update goes by
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def settled() -> int | None:
        raise AssertionError("without a salt nothing waits")

    app = versioned(application, "reset", settled, lambda: held[0])
    asyncio.run(app({"type": "http", "method": "POST"}, None, send))
    assert sent[0]["headers"] == [(b"x-weightsync-version", b"5")]


def test_what_generates_nothing_names_no_version() -> None:
    answer = ask(Application(), path="/v1/models", method="GET", policy="reset")
    assert answer.status == 200 and b"x-weightsync-version" not in answer.headers
    assert ask(Application(), held=None, policy="reset").headers == {b"x-of-vllm": b"1"}


# --- the engine actor ---------------------------------------------------------------------------


class Calls:
    """Stands for the engine: what it was told, in order."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    async def reset_caches(self) -> None:
        self.made.append("reset")

    async def set_version(self, version: int, adapter: str) -> None:
        assert adapter == "a name"
        self.made.append(version)

    async def resume(self) -> None:
        self.made.append("resume")


def actor(folder: Path, policy: str) -> EngineActor:
    (folder / "config.json").write_text("{}")
    return EngineActor(0, config.dump(config.load({"engine.model": folder, "sync.caches": policy})))


@pytest.mark.parametrize(
    ("policy", "made"),
    [
        ("reset", ["reset", 5, "resume", "reset", 6, "resume", "reset", 6, "resume", "reset", 1, "resume", "reset", 2, "resume"]),
        ("retain", [5, "resume", 6, "resume", 6, "resume", 1, "resume", 2, "resume"]),
        # A version that comes again, by a second try or behind a rewind, names other weights than the first time.
        ("salt", [5, "resume", 6, "resume", "reset", 6, "resume", "reset", 1, "resume", "reset", 2, "resume"]),
    ],
)
def test_caches_go_before_the_version_and_the_version_before_requests(policy: str, made: list[Any], tmp_path: Path) -> None:
    one, engine = actor(tmp_path, policy), Calls()

    async def run() -> None:
        for version in (5, 6, 6, 1, 2):
            await one._go_on(engine, version, "a name")  # type: ignore[arg-type]

    asyncio.run(run())
    assert engine.made == made


def test_a_request_that_comes_while_an_update_is_applied_begins_with_the_version_of_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = actor(tmp_path, "salt")
    one._version = 5
    applied = asyncio.Event()

    async def apply(update_id: str, version: int) -> EngineVerdict:
        await applied.wait()
        one._version = version if version == 6 else None
        return EngineVerdict(0, version == 6, one._version, EngineState.SERVING)

    async def run() -> None:
        monkeypatch.setattr(one, "_commit", apply)
        assert await one._settled_version() == 5
        for version, holds, rewinds in ((6, 6, 3), (7, None, 3)):
            applied.clear()
            commit = asyncio.create_task(one.commit(f"u{version}", version, version - 3))
            await asyncio.sleep(0.01)
            waiting = asyncio.create_task(one._settled_version())
            await asyncio.sleep(0.01)
            assert not waiting.done()
            applied.set()
            assert await waiting == holds
            await commit
            assert one._rewinds == rewinds  # what failed leaves the engine where it was

    asyncio.run(run())


# --- dropping -----------------------------------------------------------------------------------


class Llm:
    """Stands for AsyncLLM: answers to a reset of the prefix cache, one after the other."""

    def __init__(self, *answers: Any, multimodal: bool = False, errored: bool = False) -> None:
        self.answers, self.errored = list(answers), errored
        model = type("Model", (), {"is_multimodal_model": multimodal})
        self.vllm_config = type("Config", (), {"model_config": model})
        self.made: list[str] = []

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests and reset_connector
        self.made.append("prefix")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    async def reset_mm_cache(self) -> None:
        self.made.append("multimodal")

    async def reset_encoder_cache(self) -> None:
        self.made.append("encoder")


def reset(llm: Llm) -> None:
    engine = Engine.__new__(Engine)
    engine.llm = llm  # type: ignore[assignment]
    asyncio.run(engine.reset_caches())


HELD = Exception("Call to reset_prefix_cache method failed: Failed to reset KV cache")


def test_a_reset_that_is_done_is_made_once() -> None:
    llm = Llm(True)
    reset(llm)
    assert llm.made == ["prefix"]


def test_a_multimodal_engine_drops_what_its_encoder_made_too() -> None:
    llm = Llm(True, multimodal=True)
    reset(llm)
    assert llm.made == ["prefix", "multimodal", "encoder"]


@pytest.mark.parametrize("answers", [[False, True], [HELD, True], [HELD, False, HELD, False, True]])
def test_a_reset_that_is_not_done_is_followed_up(answers: list[Any]) -> None:
    llm = Llm(*answers)
    reset(llm)
    assert llm.made == ["prefix"] * len(answers)


@pytest.mark.parametrize(("answer", "cache"), [(False, "the KV connector's cache"), (HELD, "the prefix cache")])
def test_a_reset_that_is_never_done_fails_the_update_and_names_the_cache(answer: Any, cache: str) -> None:
    # vLLM raises where requests hold blocks, and answers False where the connector did not let go.
    llm = Llm(answer, multimodal=True)
    with pytest.raises(VerdictNotOk, match=f"{cache}.* could not be dropped in 5 tries"):
        reset(llm)
    assert llm.made == ["prefix"] * 5


def test_an_engine_that_died_meanwhile_is_not_asked_again() -> None:
    llm = Llm(HELD, errored=True)
    with pytest.raises(Exception, match="reset_prefix_cache") as caught:
        reset(llm)
    assert not isinstance(caught.value, WeightSyncError) and llm.made == ["prefix"]


# --- settings -----------------------------------------------------------------------------------


def test_the_policy_is_one_of_three(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert config.load({"engine.model": tmp_path}).sync.caches == "reset"
    with pytest.raises(ConfigError, match=r"sync\.caches: got 'keep', want 'reset', 'retain' or 'salt'"):
        config.load({"engine.model": tmp_path, "sync.caches": "keep"})


def test_a_connector_may_not_heed_a_salt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = {"engine.model": tmp_path, "engine.extra": {"kv_transfer_config": {"kv_connector": "ExampleConnector"}}}
    config.load({**given, "sync.caches": "retain"})
    with pytest.raises(
        ConfigError,
        match=r"^sync\.caches: got 'salt' with a kv_transfer_config, want reset or retain: not every connector heeds cache_salt\.",
    ):
        config.load({**given, "sync.caches": "salt"})
