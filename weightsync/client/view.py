"""What anybody with the token may ask of a service: its state, completions, and the end of an update; and what trainers tell of samples.

Not covered: bringing weights (`sync`).
"""

from __future__ import annotations

import contextlib
import time
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weightsync.client.attach import attachment
from weightsync.client.http import Http
from weightsync.client.observing import read, tallies
from weightsync.client.rollouts import Rollouts
from weightsync.codec import decode, encode
from weightsync.errors import WeightSyncError
from weightsync.mismatch import Tallies
from weightsync.protocol import EngineStatus, FleetCheck, FleetStatus, Observation, UpdateStatus
from weightsync.results import Attachment, Generation

CONTROL_SECONDS = 30.0
#: How much longer than its own deadline a call waits for the service to say what went wrong.
WORD_SECONDS = 3.0


class View:
    """One service.

    Args:
        url: for example `http://127.0.0.1:8517`.
        token: its bearer token.
    """

    def __init__(self, url: str, token: str) -> None:
        self._http = Http(url, token)
        self._rollouts = Rollouts(self._http, self.engines)
        self._step = 0  # of a run that was attached, until its first update

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 16,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        engine: int | None = None,
        pin: str | None = None,
        timeout_seconds: float = 120.0,
        extra: Mapping[str, Any] | None = None,
    ) -> Generation:
        """One completion from an engine that serves; see `rollouts.Rollouts.generate` for errors.

        Args:
            token_ids: the prompt.
            max_tokens: longest completion, tokens.
            temperature: 0 is greedy.
            seed: makes sampling repeatable.
            engine: ordinal, to ask just this one, pinned or not.
            pin: ask those alone that this pin holds, and only for the version it holds. Without either, pinned engines are not asked.
            extra: more of vLLM's `SamplingParams` (`top_k`, `min_p`, `repetition_penalty` …), over those above.
        """
        sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "logprobs": 0,
            "ignore_eos": ignore_eos,
            "detokenize": False,
            **({} if seed is None else {"seed": seed}),
            **(extra or {}),
        }
        return self._rollouts.generate(token_ids, sampling, timeout_seconds, engine, pin)

    def observe(self, samples: Iterable[Any], trainer_logprobs: Sequence[Any] | None = None) -> Observation:
        """Tell the service how far engines are from this trainer, on samples that the trainer has anyway.

        Sums go out, one set for each engine and version, and never a token. Any rank of a trainer may call it, with its own samples.
        With log r = trainer - rollout: |log r|, k1 = -log r, k3 = (r - 1) - log r (`weightsync.mismatch`).

        Args:
            samples: `Generation`s of `generate`; or `Sample`s, or mappings with their keys: token_ids, trainer_logprobs,
                rollout_logprobs, engine, version. Sequences, arrays or tensors of one dimension, as long as what was sampled.
            trainer_logprobs: for each `Generation`, the trainer's log-probability of each token, with the weights that
                it has now or had then: `behind` counts updates committed since the version that sampled.

        Returns:
            Means by engine and by updates behind, and who stands out.

        Raises:
            SamplesRefused: names the sample; nothing was counted.
        """
        body = encode(Tallies(tallies(read(samples, trainer_logprobs))))
        return decode(Observation, self._http.post("/v1/observe", body, CONTROL_SECONDS))

    def status(self) -> FleetStatus:
        """The fleet in one look."""
        return decode(FleetStatus, self._http.get("/v1/status", CONTROL_SECONDS))

    def engines(self) -> tuple[EngineStatus, ...]:
        """Every engine: address, version, state."""
        return self.status().engines

    def sleep(self, level: int = 1, engines: Sequence[int] = (), timeout_seconds: float = 300.0) -> FleetStatus:
        """Have engines give their GPU's memory back. Their requests end; they serve nothing and take no update until they wake.

        Args:
            level: 1 keeps the weights on the host, and `wake` brings them back. 2 drops them: a woken engine has
                pending weights, and serves behind the next complete update.
            engines: ordinals; all when empty.

        Raises:
            UnsupportedEngine: an engine was started without vLLM's sleep mode.
            UpdateConflict, Refused: an update is under way; asleep at another level.
            PinRefused: level 2 would drop what a pinned engine holds.
        """
        return self._order("/v1/sleep", engines, timeout_seconds, level=level)

    def wake(self, engines: Sequence[int] = (), timeout_seconds: float = 300.0) -> FleetStatus:
        """Have engines take their memory again; one that is awake stays as it is. Arguments as in `sleep`."""
        return self._order("/v1/wake", engines, timeout_seconds)

    def pause(self, engines: Sequence[int] = (), timeout_seconds: float = 300.0) -> FleetStatus:
        """Have engines generate nothing until `resume`; they take updates meanwhile, and stay paused behind them.

        Requests that run fare by `sync.in_flight`, new ones by `sync.new_requests`, as at an update. An engine whose process restarts,
        or that is added later, is not paused.

        Args:
            engines: ordinals; all that have started when empty.
            timeout_seconds: how long an engine may take, an update that is being written to it included.

        Raises:
            Refused: there is no such engine.
            WeightSyncError: the first engine's that failed; the others are paused.
        """
        return self._order("/v1/pause", engines, timeout_seconds)

    def resume(self, engines: Sequence[int] = (), timeout_seconds: float = 300.0) -> FleetStatus:
        """Have paused engines go on; one that is not paused stays as it is. Arguments as in `pause`."""
        return self._order("/v1/resume", engines, timeout_seconds)

    def _order(self, path: str, engines: Sequence[int], seconds: float, **more: int) -> FleetStatus:
        """Have engines do something behind which others may serve than before."""
        try:
            body = {"engines": list(engines), "timeout_seconds": seconds, **more}
            return decode(FleetStatus, self._http.post(path, body, seconds + 2 * CONTROL_SECONDS))
        finally:
            self._rollouts.forget()

    def scale(self, engines: int, drain: str = "wait", timeout_seconds: float = 60.0) -> FleetStatus:
        """Bring the fleet to so many engines, while updates and requests go on.

        Engines that come are starting when this returns; each serves when it has the committed version, and no update waits for it before.

        Args:
            engines: how many there shall be.
            drain: what becomes of requests of an engine that goes: `wait` for them, or `abort` them with a retryable error.
            timeout_seconds: how long an engine may take to drain; then they are ended.

        Raises:
            Refused: fewer than `sync.require` beside those that are pinned, or more than the cluster has room for.
            UpdateConflict: the fleet is being scaled; or an update does not end.
        """
        body = {"engines": engines, "drain": drain, "timeout_seconds": timeout_seconds}
        return decode(FleetStatus, self._http.post("/v1/scale", body, timeout_seconds + 5 * CONTROL_SECONDS))

    def pin(self, name: str, version: int, engines: int = 1) -> FleetStatus:
        """Hold engines at a version and leave them out of updates until `unpin`, for example to evaluate it.

        The engines keep the pin, and one whose process restarts loses it. The same pin again changes nothing.

        Args:
            name: 1 to 64 of `[A-Za-z0-9._-]`.
            version: that so many engines serve now, most often the committed one.
            engines: how many.

        Raises:
            PinRefused: too few serve it, or would be left for updates; the name holds another version.
            UpdateConflict: an update is under way.
        """
        return self._pins("/v1/pin", {"name": name, "version": version, "engines": engines})

    def unpin(self, name: str) -> FleetStatus:
        """Let a pin's engines take updates again; those that are behind get the committed version as any late engine does.

        Where no engine bears the pin, nothing is changed.

        Raises:
            UpdateConflict: an update is under way.
        """
        return self._pins("/v1/unpin", {"name": name})

    def _pins(self, path: str, body: dict[str, Any]) -> FleetStatus:
        try:
            return decode(FleetStatus, self._http.post(path, body, 4 * CONTROL_SECONDS))
        finally:
            self._rollouts.forget()

    def check(self, engines: Sequence[int] = (), timeout_seconds: float = 300.0) -> FleetCheck:
        """Have engines digest their live weights anew, while they serve, and compare them with what was sent (`worker.rereading`).

        Args:
            engines: ordinals; all that have started when empty.
            timeout_seconds: how long an engine may take.

        Raises:
            Refused: there is no such engine. What stands against an engine, or why it can't be checked, is in the answer.
        """
        body = {"engines": list(engines), "timeout_seconds": timeout_seconds}
        return decode(FleetCheck, self._http.post("/v1/check", body, timeout_seconds + 3 * CONTROL_SECONDS))

    def abort(self, update_id: str, reason: str = "asked for") -> UpdateStatus:
        """End an update, of any trainer, that is not being applied yet; engines serve the version they had. Its trainer gets `Aborted`.

        One that has ended is left as it is: `state` of the answer says how.

        Args:
            update_id: as an `UpdateConflict`, or `FleetStatus.update`, names it.
            reason: for its trainer and the log.

        Raises:
            Refused: it is being applied, and its verdict ends it; or nobody knows it.
        """
        path = f"/v1/updates/{urllib.parse.quote(update_id, safe='')}/abort"
        return decode(UpdateStatus, self._http.post(path, {"reason": reason[:300]}, 3 * CONTROL_SECONDS))

    def attach_run(self, step: int) -> Attachment:
        """Say what a trainer that starts again, with the weights of this step, finds in the fleet; nothing is changed there.

        A fleet above the step is no error: checkpoints are older than syncs. `Attachment.rewind` says what bringing it to the
        step takes. Versions that `sync_weights` chooses by itself go on from the step or the committed version, the higher one.

        Raises:
            ConfigError: no version can be this step.
        """
        found = attachment(self.status(), step)
        self._step = step
        return found

    # --- an update, for who sends it ------------------------------------------------------------

    def _next_version(self) -> int:
        return max(self._step, self.status().committed_version or 0) + 1

    def _ended(self, update_id: str, wait: float = 0.0) -> WeightSyncError | None:
        """The error with which the service ended an update, if it did; looks again for `wait` seconds."""
        until = time.monotonic() + wait
        while True:
            try:
                status = decode(UpdateStatus, self._http.get(f"/v1/updates/{update_id}", WORD_SECONDS))
            except WeightSyncError:
                return None
            if status.state.final:
                return WeightSyncError.from_dict(status.error) if status.error else None
            if time.monotonic() >= until:
                return None
            time.sleep(0.1)

    def _withdraw(self, update_id: str, reason: str, seconds: float) -> None:
        with contextlib.suppress(WeightSyncError):  # ended, being applied, or unreachable: then its own deadline ends it
            self._http.post(f"/v1/updates/{update_id}/abort", {"reason": reason[:300]}, seconds)
