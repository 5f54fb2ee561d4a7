"""Requests of a soak: several threads that ask all the time, and an account of every request.

Two of them use the client's `generate` over all engines. One for each engine takes turns between `/inference/v1/generate`, whole
and streamed completions, by plain HTTP with nothing tried twice. A request that was told to try again, or
whose connection broke, counts as `retryable`. What got neither an answer in full nor an error in time is `lost`.

Not covered: text, chat.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from weightsync import WeightSync
from weightsync.errors import DeadlineExceeded, NoEngineReady, WeightSyncError
from weightsync.protocol import FleetStatus

ANSWER_SECONDS = 90.0
VERSION = "x-weightsync-version"
_WAYS = ("generate", "whole", "streamed")
#: Tokens asked for, in turns: short ones, and ones that updates go by.
_TOKENS = (16, 200)
_BETWEEN_SECONDS = 0.05
#: Before another try of a way that has just failed, seconds.
_PATIENCE = 0.5


@dataclass
class Request:
    """One request; times are `time.monotonic()`.

    Attributes:
        engine: asked for; None when any would do.
        result: answered, retryable, failed or lost.
        code, said: of the error.
        by: engine that answered.
        versions: the first and the last that its tokens are known to be from.
    """

    way: str
    engine: int | None
    began: float
    ended: float = 0.0
    result: str = "lost"
    code: str = ""
    said: str = ""
    tokens: int = 0
    by: int | None = None
    versions: tuple[int, int] | None = None


@dataclass
class Account:
    """All requests, and versions that fell within a thread."""

    requests: list[Request] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def summed(self) -> dict[str, Any]:
        """How many of each result, by way and in all, and failures by code."""
        ways = sorted({request.way for request in self.requests})
        results = ("answered", "retryable", "failed", "lost")
        count = {way: {r: sum(one.result == r for one in self.requests if one.way == way) for r in results} for way in ways}
        codes = sorted({request.code for request in self.requests if request.code})
        return {
            "sent": len(self.requests),
            **{result: sum(count[way][result] for way in ways) for result in results},
            "tokens": sum(request.tokens for request in self.requests),
            "ways": count,
            "codes": {code: sum(request.code == code for request in self.requests) for code in codes},
        }


class Load:
    """The threads; `close` ends them behind the requests that are under way.

    Args:
        url: the service.
        token: the fleet's.
        engines: how many there are.
        status: the service's last word, None while it has none.
    """

    def __init__(self, url: str, token: str, engines: int, status: Callable[[], FleetStatus | None]) -> None:
        self._status = status
        self._client = WeightSync(url, token)
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=5.0)
        self._http = httpx.Client(headers={"authorization": f"Bearer {token}"}, timeout=timeout, trust_env=False)
        self.account = Account()
        self._over = threading.Event()
        self._urls: dict[int, str] = {}  # the last that the service told
        which = [None, None, *range(engines)]
        self._threads = [threading.Thread(target=self._run, args=(engine,), daemon=True) for engine in which]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS + 10)
        self._http.close()
        self._client.close()

    def _run(self, engine: int | None) -> None:
        seen: dict[int | None, int] = {}
        for number in itertools.count():
            if self._over.wait(_BETWEEN_SECONDS):
                return
            request = Request("client" if engine is None else _WAYS[number % len(_WAYS)], engine, time.monotonic())
            self.account.requests.append(request)  # at once: a thread that hangs has lost it
            self._ask(request, [3 + (number + 7 * n) % 500 for n in range(8 + number % 9)], _TOKENS[number % len(_TOKENS)])
            request.ended = time.monotonic()
            if request.versions is not None:
                if request.versions[0] < seen.get(request.by, -1):
                    self.account.faults.append(f"engine {request.by} answered with version {request.versions[0]} after {seen[request.by]}")
                seen[request.by] = request.versions[1]
            if request.result != "answered":
                self._over.wait(_PATIENCE)

    def _ask(self, request: Request, prompt: list[int], tokens: int) -> None:
        """Whatever becomes of it is in the request."""
        try:
            got = self._by_client(request, prompt, tokens) if request.engine is None else self._direct(request, prompt, tokens)
        except (DeadlineExceeded, httpx.ReadTimeout):
            request.code = "no answer"
        except WeightSyncError as exc:
            request.result, request.code, request.said = "retryable" if exc.retryable else "failed", exc.code, str(exc)[:200]
        except httpx.HTTPError as exc:
            request.result, request.code, request.said = "retryable", type(exc).__name__, str(exc)[:200]
        except Exception as exc:  # an answer that is none
            request.code, request.said = "no sense", repr(exc)[:200]
        else:
            request.tokens = got
            told = bool(request.code)  # that it ended before its length
            request.result = "answered" if got == tokens else "failed" if told else "lost"
            request.code = request.code or ("" if got == tokens else f"{got} of {tokens} tokens")

    def _by_client(self, request: Request, prompt: list[int], tokens: int) -> int:
        made = self._client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, timeout_seconds=ANSWER_SECONDS)
        request.by = made.engine
        request.versions = _range([(span.version, span.start, span.end) for span in made.versions], self.account.faults)
        _note_end(request, made.finish_reason)
        return len(made.token_ids)

    def _direct(self, request: Request, prompt: list[int], tokens: int) -> int:
        """Tokens that came.

        Raises:
            WeightSyncError: what the engine answered, or that it has no address now.
            httpx.HTTPError: the connection.
        """
        if (status := self._status()) is not None:
            self._urls |= {engine.engine: engine.url for engine in status.engines if engine.url}
        assert request.engine is not None
        if request.engine not in self._urls:
            raise NoEngineReady("it has no address yet")
        request.by = request.engine
        got: int = getattr(self, f"_{request.way}")(request, self._urls[request.engine], prompt, tokens)
        return got

    def _post(self, request: Request, url: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(url, json=body)
        _require_success(response.status_code, response.content)
        self._floor(request, response)
        choice: dict[str, Any] = response.json()["choices"][0]
        _note_end(request, choice["finish_reason"])
        return choice

    def _generate(self, request: Request, url: str, prompt: list[int], tokens: int) -> int:
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        choice = self._post(request, f"{url}/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling, "model": "policy"})
        if spans := choice.get("weight_versions"):
            floor = request.versions[0] if request.versions else -1
            request.versions = _range([(int(span["version"]), span["start"], span["end"]) for span in spans], self.account.faults)
            if request.versions and request.versions[0] < floor:
                self.account.faults.append(f"a token of version {request.versions[0]} in an answer whose head says {floor}")
        return len(choice["token_ids"] or ())

    def _whole(self, request: Request, url: str, prompt: list[int], tokens: int) -> int:
        return len(self._post(request, f"{url}/v1/completions", _completion(prompt, tokens))["token_ids"] or ())

    def _streamed(self, request: Request, url: str, prompt: list[int], tokens: int) -> int:
        got, body = 0, {**_completion(prompt, tokens), "stream": True}
        with self._http.stream("POST", f"{url}/v1/completions", json=body) as response:
            if not response.is_success:
                _require_success(response.status_code, response.read())
            self._floor(request, response)
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise WeightSyncError(str(event["error"]))
                for choice in event["choices"]:
                    got += len(choice.get("token_ids") or ())
                    _note_end(request, choice.get("finish_reason"))
        return got

    def _floor(self, request: Request, response: httpx.Response) -> None:
        version = int(response.headers[VERSION])
        request.versions = version, version


def _completion(prompt: list[int], tokens: int) -> dict[str, Any]:
    body = {"model": "policy", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {**body, "return_token_ids": True}


def _note_end(request: Request, reason: str | None) -> None:
    if reason not in (None, "length"):
        request.code = f"ended: {reason}"


def _range(spans: list[tuple[int | None, int, int]], faults: list[str]) -> tuple[int, int] | None:
    """The first and last version of spans, which must rise and leave nothing out."""
    if not spans:
        return None
    versions = [version for version, _, _ in spans if version is not None]
    if len(versions) != len(spans) or versions != sorted(set(versions)) or any(a[2] != b[1] for a, b in itertools.pairwise(spans)):
        faults.append(f"spans {spans}")
        return None
    return versions[0], versions[-1]


def _require_success(status: int, content: bytes) -> None:
    """Raise what an engine answered: the service's own form of error, or vLLM's."""
    if status < 300:
        return
    with contextlib.suppress(ValueError):
        error = json.loads(content)["error"]
        if "retryable" in error:
            raise WeightSyncError.from_dict(error)
    raise WeightSyncError(f"{status}: {content[:200]!r}")
