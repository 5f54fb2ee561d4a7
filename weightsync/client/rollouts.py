"""Rollouts: a completion from an engine that serves the committed version.

Requests go straight to the engines' own addresses; the service is asked for
them once and again when an engine refuses or is gone, or falls behind: it may be pinned now.

Not covered: streaming, and text (token ids in, token ids out).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from weightsync.client.http import Http
from weightsync.errors import EngineDied, GenerationFailed, NoEngineReady, ServiceUnreachable, WeightSyncError
from weightsync.protocol import EngineState, EngineStatus
from weightsync.results import Generation, VersionSpan


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
        """One completion; tries each serving engine at most once.

        Args:
            engine: ask this one alone.
            pin: ask those alone that this pin holds.

        Raises:
            NoEngineReady: none serves, or the one asked for does not, or no engine bears the pin.
            EngineDied: the engine asked for went away during the request.
            GenerationFailed: an engine answered with an error of its own.
        """
        tried: set[int] = set()
        while True:
            chosen = self._choose(engine, pin, tried)
            tried.add(chosen.engine)
            body = {"token_ids": list(token_ids), "sampling_params": sampling, "model": chosen.model}
            try:
                answer = self._http.request("POST", f"{chosen.url}/inference/v1/generate", body, timeout_seconds)
            except (ServiceUnreachable, NoEngineReady) as exc:
                self.forget()
                if engine is not None:
                    kind = EngineDied if isinstance(exc, ServiceUnreachable) else NoEngineReady
                    raise kind(exc.message, engine=chosen.engine, hint=exc.hint) from None
                continue
            except WeightSyncError as exc:
                if type(exc) is WeightSyncError:  # vLLM's own form of error
                    # Its 5xx is how a dying engine looks; a prompt that kills engines must not be passed around, so once only.
                    if " answered 5" in exc.message and engine is None and len(tried) == 1:
                        self.forget()
                        continue
                    raise GenerationFailed(exc.message, engine=chosen.engine, hint="Check the prompt and the sampling parameters") from None
                raise
            made = _generation(answer, chosen.engine)
            if pin is not None and any(span.version != chosen.version for span in made.versions):
                self.forget()  # it was unpinned, or its process has restarted, and it serves something else
                continue
            if pin is None and engine is None:
                self._note(made)
            return made

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
