"""The controller: a named, detached Ray actor without a GPU that drives updates.

It holds the ledger, the communicator's store, and the metrics. It talks to
engines in short calls with deadlines and never touches a tensor. A new
controller learns versions from what the engines report.

An update: `admit` (every worker says yes before a byte moves) → the trainer
broadcasts while `_watch` polls → `commit` (all engines pause, apply, verify,
resume, at once or in waves) → verdicts. Whatever fails before `commit` costs nothing.

"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import ray

import weightsync
from weightsync import config, logs, tracing
from weightsync.codec import decode, encode
from weightsync.errors import (
    Aborted,
    DeadlineExceeded,
    InternalError,
    ManifestRefused,
    ProtocolMismatch,
    Refused,
    UpdateFailed,
    WeightSyncError,
)
from weightsync.fleet import placement
from weightsync.fleet.calls import answers
from weightsync.fleet.ledger import Ledger, Update
from weightsync.fleet.membership import Membership
from weightsync.fleet.observed import Observed
from weightsync.fleet.operating import Operating
from weightsync.fleet.pins import Pins
from weightsync.fleet.probing import Probing
from weightsync.fleet.rejoin import Rejoin
from weightsync.fleet.roster import Roster
from weightsync.fleet.scaling import Scaling
from weightsync.metrics import Recorder
from weightsync.protocol import (
    PROTOCOL_VERSION,
    Phase,
    UpdateRequest,
    UpdateState,
)
from weightsync.transport import network, rendezvous

logger = logging.getLogger(__name__)

NAME = "controller"
_POLL_SECONDS = 0.03
_HEARTBEAT_SECONDS = 1.0


class Controller(Operating):
    """See the module. Coroutines marked `answers` are the actor's methods.

    Args:
        settings: `config.dump` of the fleet's settings.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = config.restore(settings)
        logs.install(self._settings.log)
        tracing.install("weightsync-controller")
        sync = self._settings.sync
        self._ledger = Ledger(sync.require, sync.history, sync.min_available)
        self._recorder = Recorder()
        self._recorder.build(weightsync.__version__)
        self._store: Any = None
        self._roster = Roster(self._settings.namespace, self._settings.engine.count, self._ledger, sync)
        # The first generation rises over restarts of the controller.
        self._membership = Membership(sync, 0, time.time_ns() // 1_000_000)
        self._rejoin = Rejoin(self._roster, self._ledger, self._membership, sync, self._rejoined)
        self._probing = Probing(self._roster, self._ledger, self._rejoin, sync, self._recorder.probed)
        self._scaling = Scaling(self._settings, self._roster, self._ledger)
        self._observed = Observed()
        self._staged: dict[str, asyncio.Event] = {}
        self._commits: dict[str, asyncio.Task[None]] = {}
        self._admitting = asyncio.Lock()
        self._asked: dict[str, str] = {}  # for updates that wait for their admission; why one was withdrawn meanwhile
        self._pins = Pins(self._roster, self._ledger, self._rejoin, sync, self._admitting, self._refresh)
        self._heart: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()

    @answers
    async def start(self) -> dict[str, Any]:
        """Find the engines and begin to watch them; called by every `serve`."""
        await self._refresh()
        return self._status()

    # --- engines -------------------------------------------------------------------------------

    async def _refresh(self, *, waited_for: bool = False) -> None:
        if self._store is None:  # not when it is constructed: what an actor's constructor raises is lost on the way to `serve`
            sync = self._settings.sync
            self._store = rendezvous.host_store(sync.store_host, sync.rendezvous_timeout_seconds, sync.store_port)
            self._membership.port = self._store.port
            await self._roster.discover()
        await self._roster.refresh(waited_for=waited_for)
        if self._heart is None:  # also in a controller that Ray restarted, which nobody calls `start` on
            self._heart = self._spawn(self._watch_engines())
            self._spawn(self._end_earlier())
        self._show()

    async def _end_earlier(self) -> None:
        """Let engines drop what an earlier controller had admitted: nobody can commit it any more."""
        for update_id in await self._roster.held():
            if self._ledger.get(update_id) is None and update_id != self._rejoin.name:
                logger.warning("update %s was admitted by an earlier controller and ends", update_id)
                await self._roster.abort(update_id)

    async def _watch_engines(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            try:
                await self._refresh()
                if not self._admitting.locked():
                    self._rejoin.look()
            except Exception:
                logger.exception("heartbeat failed")

    # --- one update ----------------------------------------------------------------------------

    @answers
    async def begin(self, data: dict[str, Any], trace: str = "") -> dict[str, Any]:
        """Admit an update; returns an `Admission`. The same update again gives the same answer.

        Args:
            trace: `traceparent` of the trainer's span.
        """
        now, update_id = time.time(), str(data.get("update_id")) if isinstance(data, dict) else ""
        self._asked[update_id] = ""
        try:
            request = await _read(data)
            async with self._admitting:
                return dict(encode((self._ledger.repeated(request) or await self._admit(request, now, trace)).admission))
        except WeightSyncError as exc:
            self._recorder.refused(exc)
            exc.update_id, exc.phase = update_id or None, str(Phase.ADMIT)
            raise
        finally:
            self._asked.pop(update_id, None)

    async def _admit(self, request: UpdateRequest, now: float, trace: str) -> Update:
        _check_versions(request)
        await self._rejoin.give_way()
        await self._refresh(waited_for=True)  # an engine that died a moment ago must not be counted on
        if why := self._asked.get(request.update_id):
            raise Aborted(f"aborted: {why}")
        began = time.monotonic()
        update = self._ledger.admit(request, now)
        update.trace = trace
        self._staged[request.update_id] = asyncio.Event()
        try:
            incarnations, places = self._roster.members(update.engines)
            update.communicator = self._membership.communicator(request, incarnations, places)
            update.staged = self._settings.sync.stage != "none"
            keep = update.engines[: self._settings.sync.retain_engines] if update.staged else ()
            begun = [self._roster.begin(update, ordinal, hand_on=ordinal in keep) for ordinal in update.engines]
            reports = await asyncio.gather(*begun, return_exceptions=True)
            refusals = [r for r in reports if isinstance(r, BaseException)]
            if refusals:
                raise next((r for r in refusals if isinstance(r, Refused)), refusals[0])
            if update.state.final:  # somebody aborted it meanwhile
                raise Aborted(str((update.error or {}).get("message", "aborted")))
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else UpdateFailed(f"{type(exc).__name__}: {exc}")
            ended = update.state.final
            await self._abort(update, error)
            if ended:  # somebody aborted it meanwhile: an engine may have begun it behind that
                await self._roster.abort(request.update_id)
            raise error from None
        update.move(UpdateState.RECEIVING)
        update.seconds[Phase.ADMIT] = time.monotonic() - began
        self._spawn(self._watch(update))
        self._show()
        return update

    async def _watch(self, update: Update) -> None:
        """Poll the engines until all have staged the update, one failed, or the deadline passed."""
        deadline = time.monotonic() + update.request.timeout_seconds
        began = time.monotonic()
        try:
            while update.state == UpdateState.RECEIVING:
                await asyncio.sleep(_POLL_SECONDS)
                late = await self._roster.late(update, deadline)
                if update.state == UpdateState.RECEIVING and not late:
                    update.seconds[Phase.RECEIVE] = time.monotonic() - began
                    update.move(UpdateState.STAGED)
                    self._staged[update.request.update_id].set()
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"not all bytes had arrived after {update.request.timeout_seconds:.0f} s: {'; '.join(late)}",
                        hint="See the log of what did not answer or got nothing; sync again",
                        phase=str(Phase.RECEIVE),
                    )
            while update.state == UpdateState.STAGED:
                await asyncio.sleep(0.2)
                if not update.staged:  # its bytes are still on their way
                    await self._roster.late(update, deadline)
                if time.monotonic() > deadline:
                    raise DeadlineExceeded("staged, and no commit came before the update's deadline", phase=str(Phase.STAGE))
        except WeightSyncError as exc:
            await self._abort(update, exc)
        except Exception as exc:  # an update that nobody watches would be under way for ever
            logger.exception("watching update %s failed", update.request.update_id)
            await self._abort(update, InternalError(f"{type(exc).__name__}: {exc}"))

    async def _abort(self, update: Update, error: WeightSyncError) -> None:
        """End an update that no engine has begun to apply; engines go on serving what they had."""
        if update.state.final or update.state == UpdateState.APPLYING:
            return
        error.update_id = update.request.update_id
        self._ledger.abort(update, error, time.time())
        self._membership.renew()
        if event := self._staged.pop(update.request.update_id, None):
            event.set()
        self._ended(update)
        logger.warning("update %s aborted: %s", update.request.update_id, error)
        await self._roster.abort(update.request.update_id)

    @answers
    async def abort(self, update_id: str, reason: str) -> dict[str, Any]:
        """End an update on behalf of its trainer or an operator."""
        if self._ledger.get(update_id) is None:
            if update_id in self._asked:
                self._asked[update_id] = reason[:300] or "withdrawn"
            await self._roster.abort(update_id)  # engines may have it from a controller before this one
        update = self._known(update_id)
        if update.state == UpdateState.APPLYING:
            raise Refused(f"update {update_id} is being applied and can't be aborted", hint="Wait for its verdict", update_id=update_id)
        await self._abort(update, Aborted(f"aborted: {reason[:300]}"))
        return dict(encode(update.status))

    @answers
    async def commit(self, update_id: str, timeout_seconds: float) -> dict[str, Any]:
        """Wait until the update is staged, apply it everywhere, return its `UpdateStatus`. Idempotent.

        Raises:
            DeadlineExceeded: not staged, or not applied, in `timeout_seconds`; the update itself goes on.
        """
        update = self._known(update_id)
        deadline = time.monotonic() + timeout_seconds
        if (event := self._staged.get(update_id)) is not None:
            try:
                await asyncio.wait_for(event.wait(), timeout_seconds)
            except TimeoutError:
                raise DeadlineExceeded(f"update {update_id} was not staged within {timeout_seconds:.0f} s", update_id=update_id) from None
        if update.state == UpdateState.STAGED and update_id not in self._commits:
            update.move(UpdateState.APPLYING)
            self._commits = {update_id: self._spawn(self._apply(update))}
        if task := self._commits.get(update_id):
            try:
                await asyncio.wait_for(asyncio.shield(task), max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                raise DeadlineExceeded(
                    f"update {update_id} is still being applied after {timeout_seconds:.0f} s",
                    hint="Ask for its status",
                    update_id=update_id,
                ) from None
        return dict(encode(update.status))

    async def _apply(self, update: Update) -> None:
        began = time.monotonic()
        verdicts = await self._roster.commit_all(update)
        for phase in (Phase.DRAIN, Phase.PAUSE, Phase.APPLY, Phase.VERIFY, Phase.ROLLBACK, Phase.RESUME):
            if times := [v.seconds[phase] for v in verdicts if phase in v.seconds]:
                update.seconds[phase] = max(times)
        update.seconds["commit"] = time.monotonic() - began
        verdicts = await self._probing.behind(update, verdicts)
        if not self._ledger.conclude(update, verdicts, time.time()):
            failed = next(v for v in verdicts if not v.committed)
            update.error = failed.error
        self._staged.pop(update.request.update_id, None)
        if any(not v.committed for v in verdicts):
            self._membership.renew()
        self._ended(update)

    def _ended(self, update: Update) -> None:
        """Let metrics, log and trace know."""
        status = update.status
        self._recorder.ended(status)
        self._show()
        logs.phases(logger, status.update_id, status.version, status.seconds, str(status.state), update.trace)
        began, ended = status.began_unix_seconds, status.ended_unix_seconds or time.time()
        admitted = began + status.seconds.get(Phase.ADMIT, 0.0)
        spans = [(str(Phase.ADMIT), began, admitted)]
        if (took := status.seconds.get(Phase.RECEIVE)) is not None:
            spans.append((str(Phase.RECEIVE), admitted, admitted + took))
        if (took := status.seconds.get("commit")) is not None:
            spans.append(("commit", ended - took, ended))
        about = {"update_id": status.update_id, "version": status.version, "state": str(status.state), "bytes": status.nbytes}
        tracing.record("weightsync update", update.trace, began, ended, spans, about, (status.error or {}).get("code", ""))

    def _rejoined(self, outcome: str, *about: Any, **more: Any) -> None:
        self._recorder.rejoined(outcome, *about, **more)
        if outcome == "committed":
            self._probing.look()

    def _known(self, update_id: str) -> Update:
        update = self._ledger.get(update_id)
        if update is None:
            raise Refused(
                f"no update {update_id[:64]!r} is known",
                hint="It may be older than the ledger keeps, or the controller restarted: sync again",
            )
        return update

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._background.add(task)  # a task that nobody holds can be collected while it runs
        task.add_done_callback(self._background.discard)
        return task


async def _read(data: Any) -> UpdateRequest:
    """A request; read in a thread, since one of a hundred thousand tensors takes seconds, in which others want an answer.

    Raises:
        ManifestRefused: it is none.
    """
    try:
        return await asyncio.to_thread(decode, UpdateRequest, data)
    except ValueError as exc:
        raise ManifestRefused(f"the request is not valid: {exc}", hint="Nothing was changed") from None


def _check_versions(request: UpdateRequest) -> None:
    """The controller has only read what it is asked; what workers must share with the trainer they see to themselves."""
    if request.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the trainer speaks protocol {request.protocol_version}, the service {PROTOCOL_VERSION}",
            hint="Install the same weightsync on both sides",
        )


def create(settings: config.Settings) -> Any:
    """Create the actor, or get the one that exists."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(NAME, settings.namespace)
    options = {
        "name": NAME,
        "namespace": settings.namespace,
        "lifetime": "detached",
        "num_cpus": 0,
        "resources": placement.pinned_to(settings.sync.store_host, ray.nodes(), ray.util.get_node_ip_address()),
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 256,
        "runtime_env": {"env_vars": network.LOOKUPS},
    }
    return ray.remote(Controller).options(**options).remote(config.dump(settings))
