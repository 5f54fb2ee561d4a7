"""`WeightSync`: what a trainer calls.

`sync_weights(x)` is `publish(x)` and then `commit()`. `publish` returns when the
engines have admitted the update; a thread sends the bytes while the engines go
on serving, and `Published.tensors_read()` says when the parameters may change.
`commit` waits until every engine has staged them, and has them applied.

Every call ends within its deadline and the few seconds that the service is given to say
what went wrong. Whatever fails before the commit leaves engines serving the version they had.

A trainer of several ranks gives its process group, and calls everything on every rank: the
first talks to the service and sends, the others take part in gathers (`client/ranks.py`).

Not covered: several ranks that send at once.
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

from weightsync.client.again import Again
from weightsync.client.follower import Follower
from weightsync.client.joined import Joined
from weightsync.client.lora import Below
from weightsync.client.published import Published, failure
from weightsync.client.ranks import Kind, Ranks
from weightsync.client.request import request_for
from weightsync.client.sender import Progress, Sender
from weightsync.client.source import Offer, Source, offer, require_same_dtypes
from weightsync.client.view import CONTROL_SECONDS, WORD_SECONDS, View
from weightsync.codec import decode, encode
from weightsync.errors import (
    Aborted,
    DeadlineExceeded,
    InternalError,
    Refused,
    ServiceUnreachable,
    TransportFailed,
    WeightSyncError,
)
from weightsync.protocol import Admission, UpdateRequest, UpdateState, UpdateStatus
from weightsync.results import SentAgain, SyncReport
from weightsync.transport import network
from weightsync.transport.packing import BucketPlan

_WITHDRAW_SECONDS = 5.0


class WeightSync(View):
    """A trainer's connection to one service. Thread safe; one update at a time.

    Args:
        url: the service, for example `http://127.0.0.1:8517`.
        token: its bearer token.
        bucket_bytes: unit of broadcast; a trainer has memory for two. None: 64 MiB, and on a GPU a 16th of the update up to 1 GiB.
        timeout_seconds: default deadline of one update.
        interface: network interface for gloo; when empty the one that leads to the service's store.
        allow_nonfinite: send NaN and infinity, and what becomes infinity in the engine's dtype; else such an
            update fails with `BadValues` before an engine is touched.
        device: where tensors travel from, each moved there when it is its turn; where they are when None. A fleet on
            GPUs is reached by NCCL from a GPU: say which one when the weights are in host memory.
        group: process group or device mesh of all ranks of a trainer that has several. Then making this, closing it and
            every call that brings weights is for all ranks together, in the same order, like a collective; what is
            passed beside the weights counts on the first rank.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        bucket_bytes: int | None = None,
        timeout_seconds: float = 300.0,
        interface: str = "",
        allow_nonfinite: bool = False,
        device: torch.device | str | None = None,
        group: Any = None,
    ) -> None:
        network.require_interface(interface)
        super().__init__(url, token)
        self._bucket_bytes, self._timeout = bucket_bytes, timeout_seconds
        self._allow_nonfinite = allow_nonfinite
        self._trainer_id = uuid.uuid4().hex
        self._joined = Joined(timeout_seconds, interface)
        self._published: Published | None = None
        self._tried: Published | None = None  # by the call under way
        self._sending: threading.Thread | None = None
        self._dtypes: dict[str, str] = {}  # as committed last
        self._below = Below()
        self._device = None if device is None else torch.device(device)
        self._ranks = None if group is None else Ranks(group)
        self._follower = None if self._ranks is None or self._ranks.leads else Follower(self._ranks)
        self._lock = threading.Lock()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Abort what has not been committed, leave the communicator, close connections."""
        with self._lock:
            if self._published is not None and self._follower is None:
                self._give_up(self._published, "the trainer closed")
            self._joined.close()
        if self._ranks is not None:
            self._ranks.close()
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
        adapter_only: bool = False,
    ) -> SyncReport:
        """Bring every engine to these weights: `publish`, then `commit`.

        Where an engine is lost while the bytes are sent and the fleet's `sync.require` can be met without it, they are sent again to those
        that are left: the same version, another update, three times in all at most and within the same deadline. `sent_again` of
        the report says so. `progress` then begins anew, and tensors are read once more: from an iterator they can't be.

        Args:
            source: a module, a mapping, or (name, tensor) pairs, in which a `Lazy` may stand for a tensor and shards are
                gathered; or a `TensorSource`. Names, shapes and dtypes as in the checkpoint that the engines
                were started from.
            version: must rise; one above the fleet's, or above the step of `attach_run`, when None.
            timeout_seconds: deadline of the whole call.
            progress: called with (bytes sent, bytes in all) behind each bucket.
            allow_nonfinite: as for `WeightSync`, for this update; as it was made when None.
            rewind: `version` may be the fleet's or below it: a trainer that starts again takes the fleet back.
            scope: patterns (`model.layers.0.*`) of names: these tensors of `source` alone are sent, all that the engine joins in a module
                (q, k and v) or none, and the rest stays as it is in engines that hold the fleet's version; others need a complete update.
            base_version: the version that a partial update builds on; the fleet's when None, and refused if that is another.
            adapter_only: `source` is PEFT's model (or a `Lora`): its LoRA alone is sent, and engines serve with it from then on. The
                weights below come with the first one, and where engines have lost them. What is sent otherwise takes the adapter's place.

        Raises:
            Refused (and its kinds): nothing was changed.
            UpdateFailed (and its kinds): engines serve the version they had, or are quarantined; the
                message names them.
            DeadlineExceeded, ServiceUnreachable, AuthError: as they say.
        """
        began = time.monotonic()
        deadline = began + (self._timeout if timeout_seconds is None else timeout_seconds)
        options: dict[str, Any] = {"allow_nonfinite": allow_nonfinite, "rewind": rewind, "base_version": base_version}
        options["adapter_only"] = adapter_only
        again = Again(source, version, deadline, self._http, self._ranks)
        while True:
            self._tried = None
            try:
                sending = options | {"version": again.version, "sent": again.sent}
                return self.commit(self._bring(source, scope, progress, began, deadline, **sending))
            except WeightSyncError as exc:
                if not (adapter_only and self._below.lost(exc)):
                    again.after(exc, self._tried)

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
        adapter_only: bool = False,
    ) -> Published:
        """Have an update admitted and start sending it. Arguments as in `sync_weights`.

        Returns at once; where ranks gather, when every tensor has been read, for their gathers go through the trainer's own
        process groups, in which nothing else may run meanwhile. (Engines that stage nothing read only
        while `commit` runs, so that the gathers do, too.) An engine that is lost meanwhile ends the update for all: nothing is sent
        again here, since the parameters may have changed. Publish anew.

        Raises:
            Refused, ServiceUnreachable, AuthError, DeadlineExceeded: nothing was changed.
            TransportFailed: a rank of the trainer is gone.
        """
        began = time.monotonic()
        deadline = began + (self._timeout if timeout_seconds is None else timeout_seconds)
        options: dict[str, Any] = {"version": version, "allow_nonfinite": allow_nonfinite, "rewind": rewind, "base_version": base_version}
        try:
            return self._bring(source, scope, progress, began, deadline, adapter_only=adapter_only, **options)
        except WeightSyncError as exc:
            if adapter_only:
                self._below.lost(exc)
            raise

    def _bring(
        self, source: Any, scope: Sequence[str] | None, progress: Progress | None, began: float, deadline: float, **options: Any
    ) -> Published:
        options["scope"] = tuple(scope or ())
        chosen = self._below.choose(source, options)
        options |= chosen.about

        def make() -> Offer:
            self._require_idle()
            members = None if self._ranks is None else self._ranks.members
            made = offer(chosen.source(), self._device, members, self._bucket_bytes, scope)
            made.model = chosen.model
            return made

        if self._ranks is None:
            return self._publish(make(), progress, began, deadline, **options)
        offered, deadline = self._ranks.agree("publish", make, lambda made: made.fingerprint, deadline)
        if self._follower is not None:
            self._published = self._follower.publish(offered, began, deadline)
            return self._published
        with self._ranks.telling():
            return self._publish(offered, progress, began, deadline, **options)

    def commit(self, published: Published | None = None) -> SyncReport:
        """Apply the published update everywhere and report. Arguments, errors: see `sync_weights`; nothing is sent again.

        Args:
            published: from `publish`; the last one when None.
        """
        last = published or self._published

        def make() -> Published:
            if last is None:
                raise Refused("nothing has been published", hint="Call publish() first")
            return last

        if self._ranks is None:
            return self._commit(make())
        deadline = time.monotonic() + self._timeout if last is None else last._deadline
        agreed, deadline = self._ranks.agree("commit", make, lambda made: made.update_id, deadline)
        if self._follower is not None:
            self._published = None
            report = self._follower.commit(agreed, deadline)
            self._below.note(agreed._model, report.version)
            return report
        with self._ranks.telling():
            report = self._commit(agreed)
        with contextlib.suppress(WeightSyncError):  # a rank that is gone changes nothing about what was committed
            self._ranks.tell(Kind.REPORT, encode(report), max(deadline, time.monotonic() + WORD_SECONDS))
        return report

    # --- the rank that sends ---------------------------------------------------------------------

    def _require_idle(self) -> None:
        """See that no gather of an update that was given up is still running."""
        if self._follower is not None:
            self._follower.require_idle()
        elif self._ranks is not None and self._published is None and self._sending is not None:
            self._sending.join(1.0)
            if self._sending.is_alive():
                raise TransportFailed("the last update's tensors are still being read", hint="Start the trainer again", retryable=False)

    def _publish(self, offered: Offer, progress: Progress | None, began: float, deadline: float, **options: Any) -> Published:
        with self._lock:
            published, plan = self._admit(offered, began, deadline, **options)
        ranks, staged = self._ranks, published.admission.staged
        together = ranks is not None and bool(offered.runs)  # gathers go on only while every rank is in a call of ours
        try:
            sender = Sender(offered, plan, progress)
            if ranks is not None:
                ranks.tell(Kind.ADMITTED, encode(published.admission), deadline)
                offered.go = lambda run: self._tell(published, Kind.GATHER, run)
            if staged or not together:
                published._go.set()
            published._reads = sender.reads
            self._sending = threading.Thread(target=self._send, args=(published, offered, sender), name="weightsync-send", daemon=True)
            self._sending.start()
            if staged and together:
                published._watch(published._read, self._ended, self._ranks)
        except BaseException as exc:  # nobody has it to commit
            self._give_up(published, exc.message if isinstance(exc, WeightSyncError) else repr(exc))
            raise
        return published

    def _admit(
        self,
        offered: Offer,
        began: float,
        deadline: float,
        version: int | None,
        allow_nonfinite: bool | None,
        sent: tuple[SentAgain, ...] = (),
        **about: Any,
    ) -> tuple[Published, BucketPlan]:
        if self._published is not None and not self._published._done.is_set():
            raise Refused(f"update {self._published.update_id} of this trainer is still being sent", hint="Call commit() first")
        require_same_dtypes(offered.manifest, self._dtypes)
        allow = self._allow_nonfinite if allow_nonfinite is None else allow_nonfinite
        without = tuple(sorted({lost.engine for lost in sent}))
        request, plan = self._request(offered, version, deadline - time.monotonic(), allow, without=without, **about)
        seconds = min(4 * CONTROL_SECONDS, request.timeout_seconds + WORD_SECONDS)
        try:
            admission = decode(Admission, self._http.post("/v1/updates", encode(request), seconds))
        except (DeadlineExceeded, ServiceUnreachable, ValueError, KeyboardInterrupt):
            self._withdraw(request.update_id, "the trainer got no answer", _WITHDRAW_SECONDS)  # it may be under way all the same
            raise
        self._published = self._tried = published = Published(admission, began, deadline, sent)
        published._seconds["admit"] = time.monotonic() - began - sum(lost.seconds for lost in sent)
        published._model = offered.model
        published._dtypes = {spec.name: spec.dtype for spec in offered.manifest.tensors}
        return published, plan

    def _commit(self, published: Published) -> SyncReport:
        published._go.set()
        try:
            if published.admission.staged:  # else the bytes go on only when the engines apply them
                published._watch(published._done, self._ended, self._ranks)
            left = max(1.0, published._deadline - time.monotonic())
            start = time.monotonic()
            data = self._http.post(f"/v1/updates/{published.update_id}/commit", {"timeout_seconds": left}, left + WORD_SECONDS)
            published._seconds["commit"] = time.monotonic() - start
        except WeightSyncError as exc:
            self._give_up(published, exc.message)
            raise
        finally:
            self._rollouts.forget()
        return self._report(published, decode(UpdateStatus, data))

    def _request(
        self, offered: Offer, version: int | None, seconds: float, allow_nonfinite: bool = False, **about: Any
    ) -> tuple[UpdateRequest, BucketPlan]:
        about |= {"version": self._next_version() if version is None else version, "allow_nonfinite": allow_nonfinite}
        return request_for(offered, seconds, self._joined.listener(), trainer_id=self._trainer_id, **about)

    def _send(self, published: Published, offered: Offer, sender: Sender) -> None:
        """Body of the sending thread."""
        start, channel = time.monotonic(), None
        try:
            info, cancelled = published.admission.communicator, published._cancelled.is_set
            channel = self._joined.connect(info, offered.device, published._deadline, cancelled)
            published._seconds["connect"] = time.monotonic() - start
            published._await_go()
            sender.send(channel, published._deadline, cancelled, lambda: self._all_read(published, offered))
        except WeightSyncError as exc:
            published._error = exc
        except Exception as exc:  # the caller's progress callback, or a fault of ours: must reach commit()
            published._error = InternalError(f"sending failed: {type(exc).__name__}: {exc}")
            published._error.__cause__ = exc
        finally:
            published._seconds |= sender.seconds
            if published._error is not None and channel is not None:  # that one: a later update may have its own by now
                self._joined.leave(channel)
            published._end(None)

    def _all_read(self, published: Published, offered: Offer) -> None:
        if offered.runs:
            self._tell(published, Kind.READ, 0)
        published._has_read()

    def _tell(self, published: Published, kind: Kind, value: int) -> None:
        if published._cancelled.is_set():  # its packing thread was left behind: other ranks may be in the next update by now
            raise Aborted("the update was given up while its tensors were read")
        if self._ranks is not None:
            self._ranks.tell(kind, value, published._deadline)

    def _give_up(self, published: Published, reason: str) -> None:
        """Tell the service that this update ends; it may know already."""
        published._cancelled.set()
        self._withdraw(published.update_id, reason, _WITHDRAW_SECONDS)
        if self._published not in (None, published):
            return  # a later update of this trainer is using the communicator
        self._joined.leave()
        # It may commit yet, and the workers then keep a communicator that this side has left: be a new trainer to them.
        self._trainer_id = uuid.uuid4().hex
        self._published = None

    def _report(self, published: Published, status: UpdateStatus) -> SyncReport:
        if self._published in (None, published):  # as in `_give_up`
            self._published = None
            if status.state != UpdateState.COMMITTED:
                self._joined.leave()
        if status.state != UpdateState.COMMITTED:
            if (own := published._own_error) is not None:
                raise own
            raise failure(status) from published._error
        self._dtypes |= published._dtypes
        self._below.note(published._model, status.version)
        self._step = 0
        published._done.wait(CONTROL_SECONDS)  # what was not staged may have its last callback still to run
        return published._report(status)
