"""Rollouts: a completion from an engine that serves the committed version.

Requests go straight to the engines' own addresses; the service is asked for
them once and again when an engine refuses or is gone, or falls behind: it may be pinned now. One
that is being updated, and takes none meanwhile or has ended this one, is asked again in a moment
if no other engine serves.

Not covered: streaming, and text (token ids in, token ids out).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from weightsync.client.http import Http
from weightsync.errors import EngineDied, EngineUpdating, GenerationFailed, NoEngineReady, ServiceUnreachable, WeightSyncError
from weightsync.protocol import EngineState, EngineStatus
from weightsync.results import Generation, VersionSpan

#: How long a request waits before it goes to engines again that are being updated: at first, and at most.
_FIRST_WAIT_SECONDS, _MOST_WAIT_SECONDS = 0.05, 1.0


class Rollouts:
    """Spreads requests over the engines that serve.

    Args:
        http: carries the token.
        engines: asks the service for the engines.
    """

    def __init__(self, http: Http, engines: Callable[[], tuple[EngineStatus, ...]]) -> None:
        self._http, self._ask = http, engines
        self._known: tuple[EngineStatus, ...] = ()
        self._newest = -1  # version that an engine was seen to answer with since they were asked for
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Ask anew before the next request (an update has ended)."""
        with self._lock:
            self._known, self._newest = (), -1

    def generate(
        self, token_ids: Sequence[int], sampling: dict[str, Any], timeout_seconds: float, engine: int | None, pin: str | None = None
    ) -> Generation:
        """One completion; tries each serving engine at most once, and again those that are being updated.

        Args:
            timeout_seconds: of one answer; no engine is tried again behind it.
            engine: ask this one alone.
            pin: ask those alone that this pin holds.

        Raises:
            NoEngineReady: none serves, or the one asked for does not, or no engine bears the pin.
            EngineUpdating: all that serve are being updated, and time is over.
            EngineDied: the engine asked for went away during the request; or a second one did, where any would do.
            GenerationFailed: an engine answered with an error of its own.
        """
        tried, updating = set[int](), _Updating(time.monotonic() + timeout_seconds)
        while True:
            try:
                chosen = self._choose(engine, pin, tried)
            except NoEngineReady as exc:
                tried -= updating.wait(exc)
                continue
            tried.add(chosen.engine)
            body = {"token_ids": list(token_ids), "sampling_params": sampling, "model": chosen.model}
            try:
                answer = self._http.request("POST", f"{chosen.url}/inference/v1/generate", body, timeout_seconds)
            except EngineUpdating as exc:
                updating.met(chosen.engine, exc)
            except (ServiceUnreachable, NoEngineReady) as exc:
                self.forget()
                if engine is not None:
                    if isinstance(exc, ServiceUnreachable) and self._moved(chosen):
                        tried.discard(chosen.engine)
                        continue
                    kind = EngineDied if isinstance(exc, ServiceUnreachable) else NoEngineReady
                    raise kind(exc.message, engine=chosen.engine, hint=exc.hint) from None
                continue
            except WeightSyncError as exc:
                vllms = type(exc) is WeightSyncError  # its own form of error, of which a 5xx may be a dying engine's
                # A prompt that kills engines must not be passed around, so once only.
                if (isinstance(exc, EngineDied) or (vllms and " answered 5" in exc.message)) and engine is None and len(tried) == 1:
                    self.forget()
                    continue
                if vllms:
                    raise GenerationFailed(exc.message, engine=chosen.engine, hint="Check the prompt and the sampling parameters") from None
                raise
            else:
                made = _generation(answer, chosen.engine)
                if pin is not None and any(span.version != chosen.version for span in made.versions):
                    self.forget()  # it was unpinned, or its process has restarted, and it serves something else
                    continue
                if pin is None and engine is None:
                    self._note(made)
                return made

    def _moved(self, engine: EngineStatus) -> bool:
        """Whether an engine that can't be reached has started anew under another address: nothing was asked of it yet."""
        with contextlib.suppress(WeightSyncError):
            return any(e.engine == engine.engine and e.url not in ("", engine.url) for e in self._ask())
        return False

    def _note(self, made: Generation) -> None:
        with self._lock:
            behind = made.version is not None and made.version < self._newest
            self._newest = max(self._newest, -1 if made.version is None else made.version)
        if behind:
            self.forget()

    def _choose(self, engine: int | None, pin: str | None, tried: set[int]) -> EngineStatus:
        if pin is not None and not any(e.pinned == pin for e in self._known):
            self.forget()  # it may be new
        with self._lock:
            old, self._known = self._known, self._known or self._ask()
            able = self._able(engine, pin, tried)
            if not able and old:  # one may have come back since
                self._known = self._ask()
                able = self._able(engine, pin, tried)
            known = self._known
        if not able:
            self.forget()
            states = ", ".join(f"{e.engine} {e.state}{f' (pin {e.pinned!r})' if e.pinned else ''}" for e in known) or "none"
            which = ("" if engine is None else f" as engine {engine}") + ("" if pin is None else f" under pin {pin!r}")
            raise NoEngineReady(f"no engine serves{which}: {states}", hint="Sync weights first, or see `weightsync status`")
        return able[next(self._turn) % len(able)]

    def _able(self, engine: int | None, pin: str | None, tried: set[int]) -> list[EngineStatus]:
        # While an update is applied requests wait inside the engine, so one that is updating will do.
        able = [e for e in self._known if e.url and e.version is not None and e.state in (EngineState.SERVING, EngineState.UPDATING)]
        able = [e for e in able if e.engine not in tried and engine in (None, e.engine)]
        return able if pin is None and engine is not None else [e for e in able if e.pinned == (pin or "")]


class _Updating:
    """Engines that one request met while they were being updated.

    Args:
        until: `time.monotonic()` value behind which none is tried again.
    """

    def __init__(self, until: float) -> None:
        self._until, self._seconds = until, _FIRST_WAIT_SECONDS
        self._met: dict[int, EngineUpdating] = {}

    def met(self, engine: int, error: EngineUpdating) -> None:
        self._met[engine] = EngineUpdating(error.message, engine=engine, hint=error.hint)

    def wait(self, no_other: NoEngineReady) -> set[int]:
        """No other engine is left: wait a little. Those to try again.

        Raises:
            NoEngineReady: what is given, when there are none.
            EngineUpdating: time is over.
        """
        if not self._met:
            raise no_other
        if time.monotonic() + self._seconds > self._until:
            raise next(iter(self._met.values())) from None
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _MOST_WAIT_SECONDS)
        again, self._met = set(self._met), {}
        return again


def _generation(answer: dict[str, Any], engine: int) -> Generation:
    choice = answer["choices"][0]
    tokens = tuple(choice["token_ids"] or ())
    entries = (choice.get("logprobs") or {}).get("content") or []
    spans = choice.get("weight_versions") or []
    return Generation(
        token_ids=tokens,
        logprobs=tuple(float(entry["logprob"]) for entry in entries),
        versions=tuple(VersionSpan(_version(s["version"]), int(s["start"]), int(s["end"])) for s in spans),
        engine=engine,
        finish_reason=str(choice.get("finish_reason")),
    )


def _version(label: str) -> int | None:
    return int(label) if label.isdigit() else None
