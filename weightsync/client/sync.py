"""`WeightSync`: what a trainer calls.

`sync_weights(x)` is `publish(x)` and then `commit()`. `publish` returns when the
engines have admitted the update; a thread sends the bytes while the engines go
on serving, and `Published.tensors_read()` says when the parameters may change.
`commit` waits until every engine has staged them, and has them applied.

Every call ends within its deadline. Whatever fails before the commit leaves
engines serving the version they had.

Not covered: several trainer ranks that send at once; let rank 0 gather and send.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from weightsync.client.fleet import FleetCalls
from weightsync.client.http import Http
from weightsync.client.published import Published
from weightsync.client.rollouts import Rollouts
from weightsync.client.sender import Progress, Sender
from weightsync.client.source import Offer, Source, offer
from weightsync.codec import decode, encode
from weightsync.errors import (
    Aborted,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    Refused,
    ServiceUnreachable,
    TransportFailed,
    UpdateFailed,
    WeightSyncError,
)
from weightsync.protocol import Admission, UpdateRequest, UpdateState, UpdateStatus
from weightsync.results import Generation, SyncReport
from weightsync.transport.fanout import Channel, join
from weightsync.transport.local import Listener, place_of
from weightsync.transport.packing import BucketPlan, plan_buckets

_CONTROL_SECONDS = 30.0
_CONNECT_SECONDS = 30.0
_WATCH_SECONDS = 0.5
_WITHDRAW_SECONDS = 5.0


class WeightSync(FleetCalls):
    """A trainer's connection to one service. Thread safe; one update at a time.

    Args:
        url: the service, for example `http://127.0.0.1:8517`.
        token: its bearer token.
        bucket_bytes: unit of broadcast, bytes.
        timeout_seconds: default deadline of one update.
        interface: network interface for gloo; torch chooses when empty.
        allow_nonfinite: send NaN and infinity, and what becomes infinity in the engine's dtype; else such an
            update fails with `BadValues` before an engine is touched.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        bucket_bytes: int = 64 << 20,
        timeout_seconds: float = 300.0,
        interface: str = "",
        allow_nonfinite: bool = False,
    ) -> None:
        super().__init__(Http(url, token))
        self._rollouts = Rollouts(self._http, self.engines)
        self._bucket_bytes, self._timeout, self._interface = bucket_bytes, timeout_seconds, interface
        self._allow_nonfinite = allow_nonfinite
        self._trainer_id = uuid.uuid4().hex
        self._communicator: Channel | None = None
        self._listener: Listener | None = None
        self._published: Published | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Abort what has not been committed, leave the communicator, close connections."""
        with self._lock:
            if self._published is not None:
                self._give_up(self._published, "the trainer closed")
            self._leave()
            if self._listener is not None:
                self._listener.close()
        self._http.close()

    # --- weights -------------------------------------------------------------------------------

    def sync_weights(
        self,
        source: Source,
        version: int | None = None,
        *,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        allow_nonfinite: bool | None = None,
        rewind: bool = False,
        scope: Sequence[str] | None = None,
        base_version: int | None = None,
    ) -> SyncReport:
        """Bring every engine to these weights: `publish`, then `commit`.

        Args:
            source: a module, a mapping, or (name, tensor) pairs; names, shapes and dtypes as in the
                checkpoint that the engines were started from.
            version: must rise; one above the fleet's when None.
            timeout_seconds: deadline of the whole call.
            progress: called with (bytes sent, bytes in all) behind each bucket.
            allow_nonfinite: as for `WeightSync`, for this update; as it was made when None.
            rewind: `version` may be the fleet's or below it: a trainer that starts again takes the fleet back.
            scope: patterns (`model.layers.0.*`) of names: these tensors of `source` alone are sent, all of a layer or none, and
                the rest stays as it is in engines that hold the fleet's version; others need a complete update.
            base_version: the version that an update with a scope builds on; the fleet's when None, and refused if that is another.

        Raises:
            Refused (and its kinds): nothing was changed.
            UpdateFailed (and its kinds): engines serve the version they had, or are quarantined; the
                message names them.
            DeadlineExceeded, ServiceUnreachable, AuthError: as they say.
        """
        published = self.publish(
            source,
            version,
            timeout_seconds=timeout_seconds,
            progress=progress,
            allow_nonfinite=allow_nonfinite,
            rewind=rewind,
            scope=scope,
            base_version=base_version,
        )
        return self.commit(published)

    def publish(
        self,
        source: Source,
        version: int | None = None,
        *,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        allow_nonfinite: bool | None = None,
        rewind: bool = False,
        scope: Sequence[str] | None = None,
        base_version: int | None = None,
    ) -> Published:
        """Have an update admitted and start sending it; returns at once. Arguments as in `sync_weights`.

        Raises:
            Refused, ServiceUnreachable, AuthError, DeadlineExceeded: nothing was changed.
        """
        began = time.monotonic()
        offered = offer(source, scope)
        with self._lock:
            if self._published is not None and not self._published._done.is_set():
                raise Refused(f"update {self._published.update_id} of this trainer is still being sent", hint="Call commit() first")
            timeout = self._timeout if timeout_seconds is None else timeout_seconds
            allow = self._allow_nonfinite if allow_nonfinite is None else allow_nonfinite
            about = {"rewind": rewind, "scope": tuple(scope or ()), "base_version": base_version}
            request, plan = self._request(offered, version, timeout, allow, **about)
            seconds = min(4 * _CONTROL_SECONDS, request.timeout_seconds + _CONTROL_SECONDS)
            try:
                answer = self._http.post("/v1/updates", encode(request), seconds)
            except (DeadlineExceeded, ServiceUnreachable):
                self._withdraw(request.update_id, "the trainer got no answer", _WITHDRAW_SECONDS)  # it may be under way all the same
                raise
            published = Published(decode(Admission, answer), request, began)
            published._seconds["admit"] = time.monotonic() - began
            self._published = published
        sender = Sender(offered, plan, progress)
        threading.Thread(target=self._send, args=(published, offered, sender), name="weightsync-send", daemon=True).start()
        return published

    def commit(self, published: Published | None = None) -> SyncReport:
        """Apply the published update everywhere and report. Arguments, errors: see `sync_weights`.

        Args:
            published: from `publish`; the last one when None.
        """
        published = published or self._published
        if published is None:
            raise Refused("nothing has been published", hint="Call publish() first")
        try:
            if published.admission.staged:  # else the bytes go on only when the engines apply them
                self._watch(published)
            left = max(1.0, published._deadline - time.monotonic())
            start = time.monotonic()
            data = self._http.post(f"/v1/updates/{published.update_id}/commit", {"timeout_seconds": left}, left + _CONTROL_SECONDS)
            published._seconds["commit"] = time.monotonic() - start
        except WeightSyncError as exc:
            self._give_up(published, exc.message)
            raise
        finally:
            self._rollouts.forget()
        return self._report(published, decode(UpdateStatus, data))

    def _request(
        self, offered: Offer, version: int | None, timeout: float, allow_nonfinite: bool = False, **about: Any
    ) -> tuple[UpdateRequest, BucketPlan]:
        if version is None:
            version = (self.status().committed_version or 0) + 1
        listener = self._listen()
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if offered.transport == "nccl" else ""
        try:
            plan = plan_buckets(offered.manifest, self._bucket_bytes)
            request = UpdateRequest(
                update_id=uuid.uuid4().hex,
                trainer_id=self._trainer_id,
                version=version,
                manifest=offered.manifest,
                bucket_bytes=plan.bucket_bytes,
                plan_hash=plan.hash,
                timeout_seconds=timeout,
                transport=offered.transport,
                torch_version=torch.__version__,
                nccl_version=nccl,
                allow_nonfinite=allow_nonfinite,
                **about,
                place=place_of(offered.device),
                socket=listener.name if listener else "",
                secret=listener.secret if listener else "",
            )
        except ValueError as exc:
            raise ConfigError(str(exc), hint="See WeightSync's arguments") from None
        return request, plan

    def _send(self, published: Published, offered: Offer, sender: Sender) -> None:
        """Body of the sending thread."""
        start = time.monotonic()
        try:
            communicator = self._connect(published, offered.device)
            published._seconds["connect"] = time.monotonic() - start
            sender.send(communicator, published._deadline, published._cancelled.is_set, published._has_read)
        except WeightSyncError as exc:
            published._error = exc
        except Exception as exc:  # the caller's progress callback, or a fault of ours: must reach commit()
            published._error = InternalError(f"sending failed: {type(exc).__name__}: {exc}")
            published._error.__cause__ = exc
        finally:
            published._seconds |= sender.seconds
            if published._error is not None:
                self._leave()
            published._read.set()
            published._done.set()

    def _listen(self) -> Listener | None:
        """Where workers of this host come to; None where the system has no such sockets: they are reached as others are."""
        if self._listener is None:
            with contextlib.suppress(TransportFailed):
                self._listener = Listener()
        return self._listener

    def _connect(self, published: Published, device: torch.device) -> Channel:
        info, held = published.admission.communicator, self._communicator
        if held is not None and held.open and held.info == info:
            return held
        self._leave()
        operation = max(self._timeout, _CONNECT_SECONDS)
        self._communicator = join(
            info, device, self._listener, _CONNECT_SECONDS, operation, self._interface, cancelled=published._cancelled.is_set
        )
        return self._communicator

    def _leave(self) -> None:
        held, self._communicator = self._communicator, None
        if held is not None:
            held.close()

    def _watch(self, published: Published) -> None:
        """Wait for the sending thread; leave the broadcast when the service has ended the update."""
        while not published._done.wait(_WATCH_SECONDS):
            if time.monotonic() > published._deadline:
                published._cancelled.set()
                raise DeadlineExceeded("the update was not sent before its deadline", update_id=published.update_id, phase="receive")
            if (ended := self._ended(published.update_id)) is not None:
                published._cancelled.set()
                published._done.wait(5.0)
                raise ended
        if published._error is not None:
            # The engines' own word says more than a broken broadcast does.
            if (
                isinstance(published._error, (TransportFailed, Aborted))
                and (ended := self._ended(published.update_id, wait=3.0)) is not None
            ):
                raise ended from published._error
            raise published._error

    def _ended(self, update_id: str, wait: float = 0.0) -> WeightSyncError | None:
        """The error with which the service ended an update, if it did; looks again for `wait` seconds."""
        until = time.monotonic() + wait
        while True:
            try:
                status = decode(UpdateStatus, self._http.get(f"/v1/updates/{update_id}", 5.0))
            except WeightSyncError:
                return None
            if status.state.final:
                return WeightSyncError.from_dict(status.error) if status.error else None
            if time.monotonic() >= until:
                return None
            time.sleep(0.1)

    def _give_up(self, published: Published, reason: str) -> None:
        """Tell the service that this update ends; it may know already."""
        published._cancelled.set()
        self._withdraw(published.update_id, reason, _CONTROL_SECONDS)
        if self._published not in (None, published):
            return  # a later update of this trainer is using the communicator
        self._leave()
        # It may commit yet, and the workers then keep a communicator that this side has left: be a new trainer to them.
        self._trainer_id = uuid.uuid4().hex
        if self._published is published:
            self._published = None

    def _withdraw(self, update_id: str, reason: str, seconds: float) -> None:
        with contextlib.suppress(WeightSyncError):  # ended, being applied, or unreachable: then its own deadline ends it
            self._http.post(f"/v1/updates/{update_id}/abort", {"reason": reason[:300]}, seconds)

    def _report(self, published: Published, status: UpdateStatus) -> SyncReport:
        self._published = None
        if status.state != UpdateState.COMMITTED:
            self._leave()
            raise _failure(status) from published._error
        published._done.wait(_CONTROL_SECONDS)  # what was not staged may have its last callback still to run
        seconds = {**status.seconds, **published._seconds, "total": time.monotonic() - published._began}
        return SyncReport(
            update_id=status.update_id,
            version=status.version,
            nbytes=status.nbytes,
            tensors=status.tensors,
            seconds=seconds,
            pause_seconds=max((v.pause_seconds for v in status.verdicts), default=0.0),
            verdicts=status.verdicts,
        )

    # --- rollouts and state --------------------------------------------------------------------

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
        timeout_seconds: float = 120.0,
    ) -> Generation:
        """One completion from an engine that serves; see `rollouts.Rollouts.generate` for errors.

        Args:
            token_ids: the prompt.
            max_tokens: longest completion, tokens.
            temperature: 0 is greedy.
            seed: makes sampling repeatable.
            engine: ordinal, to ask just this one.
        """
        sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "logprobs": 0,
            "ignore_eos": ignore_eos,
            "detokenize": False,
            **({} if seed is None else {"seed": seed}),
        }
        return self._rollouts.generate(token_ids, sampling, timeout_seconds, engine)


def _failure(status: UpdateStatus) -> WeightSyncError:
    """What an update's status says went wrong, with every engine's state."""
    error = WeightSyncError.from_dict(status.error) if status.error else UpdateFailed("the update did not commit")
    if status.verdicts:
        states = ", ".join(
            f"engine {v.engine} {v.state}" + ("" if v.version is None else f" with version {v.version}") for v in status.verdicts
        )
        error.message = f"{error.message} ({states})"
        error.args = (error.message,)
    error.update_id = status.update_id
    return error
