"""One engine: a Ray actor around one vLLM AsyncLLM.

Answers about itself from its own event loop, whatever its workers do, and says so when those are silent (`watching`). Holds its
committed version and update id. An update is told to it in short calls (`begin`,
`poll`, `abort`) and one long one (`commit`): pause, apply, verify, caches,
version, resume; before it requests end, where they shall (`draining`). What fails behind the first write is tried once more, or undone (see
`transaction`); failing that the engine stays paused, its requests end, and it serves
nothing until a later update is verified. Asleep it serves nothing and takes no update (`sleeping`); pinned it serves what it has
and takes none (`holding`); paused it serves nothing and takes updates (`pausing`). Behind a commit it scores a few prompts (`probed`).
An actor that Ray restarted begins with pending weights, as at first. What it keeps for engines that come later `handing` sends.

Not covered: which of its requests an update interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import Any

import ray
import uvicorn

from weightsync import config, logs, tracing
from weightsync.codec import decode, encode
from weightsync.errors import EngineDied, InternalError, Refused, UpdateConflict, WeightSyncError, WorkersSilent
from weightsync.fleet import placement, vllm_api
from weightsync.fleet.adopting import Adopted
from weightsync.fleet.calls import answers
from weightsync.fleet.carried import name_of
from weightsync.fleet.draining import Draining
from weightsync.fleet.gate import Gate, http_settings
from weightsync.fleet.handing import Handing
from weightsync.fleet.holding import Holding
from weightsync.fleet.left_out import other_base
from weightsync.fleet.liveness import Liveness, commit_seconds
from weightsync.fleet.probed import Probed
from weightsync.fleet.reports import Inventory, failure, require_ranks
from weightsync.fleet.resting import Resting
from weightsync.fleet.salt import versioned
from weightsync.fleet.scratch import Scratch
from weightsync.fleet.sleeping import Sleeping
from weightsync.fleet.telling import Telling
from weightsync.fleet.told import Told
from weightsync.fleet.transaction import Transaction
from weightsync.protocol import Adapter, EngineState, EngineStatus, EngineVerdict, Phase, WorkerReport
from weightsync.transport import network

logger = logging.getLogger(__name__)

_LINGER_SECONDS = 2.0
#: Reason of an engine whose vLLM has died.
CORE_DIED = "engine_core_died"


class EngineActor(Adopted, Handing, Holding, Resting, Telling, Probed):
    """See the module. All public coroutines are actor methods that answer plain data (`calls.answers`).

    Args:
        ordinal: this engine's number in the fleet.
        settings: `config.dump` of the fleet's settings, token included.
    """

    def __init__(self, ordinal: int, settings: dict[str, Any]) -> None:
        self._ordinal = ordinal
        self._settings = config.restore(settings)
        logs.install(self._settings.log)
        tracing.install("weightsync-engine")
        self._trace = ""  # of the update that it was told last
        self._incarnation = f"{ordinal}-{time.time_ns():x}"
        self._engine: vllm_api.Engine | None = None
        self._server: uvicorn.Server | None = None
        self._gate: Gate | None = None
        self._state = EngineState.PENDING
        self._reason = "starting"
        self._version: int | None = None
        self._update_id: str | None = None
        self._adapter = ""  # its name, as it counts
        self._rewinds = 0  # that lie before the version held
        self._highest = -1  # version that this process has served
        self._committed: float | None = None  # when, Unix time
        self._ran = False  # requests may have gone on with the update that is being applied
        self._settled = asyncio.Event()  # unset while an update is applied
        self._settled.set()
        self._url = ""
        self._scratch: Scratch | None = None
        self._places: list[dict[str, Any] | None] = []  # of its workers
        self._starting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._stopping = False
        self._commits: dict[str, asyncio.Task[EngineVerdict]] = {}
        self._told: dict[str, Told] = {}  # by update
        self._sleeping, self._resting = Sleeping(), asyncio.Lock()
        self._draining = Draining(ordinal, self._settings.sync)
        self._liveness = Liveness(self._settings.engine.silence_seconds, self._ask_for_sign, self._silence_changed)

    @answers
    async def start(self) -> dict[str, Any]:
        """Start vLLM and its HTTP application; a second call waits for the first."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        return self._describe()

    async def _start(self) -> None:
        actor = ray.get_runtime_context().get_actor_id()
        self._scratch = Scratch(actor)
        self._open_shelf(actor)
        os.environ |= self._scratch.open()  # before vLLM is imported, here and in its processes
        engine = self._engine = await asyncio.to_thread(vllm_api.Engine, self._settings.engine)
        self._engine.check_caches(self._settings.sync.caches)
        await self._engine.make_stages()
        answers = await self._engine.rpc("weightsync_describe", self._settings.sync.verify_stored, True)
        reports = [decode(WorkerReport, answer) for answer in answers]
        if (error := failure(reports)) is not None:
            self._state, self._reason = EngineState.QUARANTINED, error.code
            raise error
        require_ranks(reports, self._settings.engine.workers)
        self._engine.adapter.open(reports)
        if self._settings.sync.rollback == "host":
            kept = sum(report.checks.get("checkpoint_bytes", 0) for report in reports)
            logger.info("engine %d keeps its last update to go back to: %.2f GB of host memory", self._ordinal, kept / 1e9)
        application = await self._engine.application()
        inner = versioned(application, self._settings.sync.caches, self._settled_version, lambda: engine.stamped)
        self._gate = Gate(inner, self._token(), self._refusal, self._settings.api.max_request_bytes, self._died)
        sock = placement.listen(self._settings, self._ordinal)
        self._server = uvicorn.Server(http_settings(self._gate, grace_seconds=1))
        application.state.server = self._server  # vLLM's own error handler asks for it
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        host, port = sock.getsockname()[:2]
        await asyncio.to_thread(self._scratch.note)  # what all of vLLM's parts have made by now
        self._places = [encode(report.place) if report.place else None for report in sorted(reports, key=lambda report: report.rank)]
        self._begin_watch()
        self._url, self._reason = f"http://{network.shown(placement.own_address(host), port)}", "pending_weights"

    def _token(self) -> str:
        token = self._settings.api.token
        if token is None:
            raise InternalError("the engine was started without a token")
        return token.get_secret_value()

    def _refusal(self) -> str | None:
        if self._died() is not None:
            return CORE_DIED
        if self._silent:
            return WorkersSilent.code
        if self._state in (EngineState.SERVING, EngineState.UPDATING) and self._version is not None:
            return None
        return self._reason or str(self._state)

    def _died(self) -> EngineDied | None:
        """What a request is told that was inside when vLLM died."""
        if self._engine is None or self._engine.alive:
            return None
        hint = "Ask another engine, once: it may have been this request. This one restarts by itself"
        return EngineDied(f"vLLM of engine {self._ordinal} died while it had this request", engine=self._ordinal, hint=hint)

    async def _settled_version(self) -> int | None:
        """The version that a request which begins now is computed with; waits while one is being applied."""
        if not self._draining.under_way:
            await self._settled.wait()
        return self._version

    @answers
    async def describe(self) -> dict[str, Any]:
        """What the controller asks again and again; never touches a worker.

        A restarted actor starts itself here, and one whose vLLM has died ends its process, so that Ray restarts it.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(_log_failure)
        answer = self._describe()
        if self._state == EngineState.DEAD and self._ending is None and not self._stopping:
            self._ending = asyncio.create_task(self._end())
        return answer

    async def _end(self) -> None:
        logger.error("engine %d ends to be restarted: %s", self._ordinal, self._reason)
        await asyncio.sleep(_LINGER_SECONDS)  # the verdict of an update under way, and the answer to who asked, go out first
        if self._engine is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.to_thread(self._engine.shutdown), _LINGER_SECONDS)
        os._exit(1)

    def _describe(self) -> dict[str, Any]:
        if self._engine is not None and not self._engine.alive:
            self._state, self._reason = EngineState.DEAD, CORE_DIED
        elif self._starting is not None and self._starting.done() and self._starting.exception() is not None:
            self._state, self._reason = EngineState.DEAD, "start_failed"
        inventory, shown = self._engine.inventory if self._engine is not None else Inventory(), self._shown
        status = EngineStatus(
            engine=self._ordinal,
            state=shown,
            version=self._version,
            update_id=self._update_id,
            url=self._url,
            model=self._settings.engine.served_model_name,
            workers=len(self._places),
            vllm_version=vllm_api.installed()[1],
            reason="" if shown == EngineState.SERVING else WorkersSilent.code if self._silent else self._reason or str(shown),
            rewinds=self._rewinds,
            retained=self._kept(),
            pinned=self._pinned,
            paused=self._draining.paused,
            committed_unix_seconds=self._committed,
            silence_seconds=self._liveness.seconds,
            silent_workers=self._silent_workers,
            slots=dict(inventory.slots),
            memory=dict(inventory.memory),
            adapter="" if self._version is None else self._adapter,
        )
        return {"status": encode(status), "incarnation": self._incarnation, "started": bool(self._url), "places": self._places}

    @answers
    async def begin(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell every worker of an update; their reports, by rank."""
        self._require_idle()
        self._require_unpinned("takes no update")
        if self._state in (EngineState.ASLEEP, EngineState.LEAVING):
            hint = "Wake it first" if self._state == EngineState.ASLEEP else "Sync again: it is being taken away"
            raise Refused(f"engine {self._ordinal} is {self._state} and can't take an update", engine=self._ordinal, hint=hint)
        if order["base_update"] and (self._state, self._update_id) != (EngineState.SERVING, order["base_update"]):
            raise other_base(decode(EngineStatus, self._describe()["status"]), order["base_version"], order["base_update"])
        self._require_answering()
        self._told = {order["request"]["update_id"]: Told.of(order)}
        self._trace = order.get("traceparent", "")
        return await self._workers_say("weightsync_begin", self._place(order))

    def _require_idle(self) -> None:
        if busy := [update_id for update_id, task in self._commits.items() if not task.done()]:
            raise UpdateConflict(
                f"engine {self._ordinal} still applies update {busy[0]}", engine=self._ordinal, hint="Try again in a moment"
            )

    @answers
    async def abort(self, update_id: str) -> list[dict[str, Any]]:
        """End an update in every worker, unless it is being applied: then its verdict ends it."""
        if (task := self._commits.get(update_id)) is not None and not task.done():
            raise UpdateConflict(f"engine {self._ordinal} applies update {update_id}", engine=self._ordinal, hint="Wait for its verdict")
        return await self._workers_say("weightsync_abort", update_id, owed=update_id in self._told)

    @answers
    async def commit(self, update_id: str, version: int, rewinds: int) -> dict[str, Any]:
        """Apply a staged update; the verdict. A repeated call waits for the same one."""
        if update_id not in self._commits:
            self._commits = {update_id: asyncio.create_task(self._settle(update_id, version, rewinds))}
        return dict(encode(await asyncio.shield(self._commits[update_id])))

    async def _end_requests(self) -> None:
        """Stay paused; end what vLLM has, and what is still on its way into it, with an error that says to come again."""
        if self._gate is not None:
            self._gate.end_soon()
        with contextlib.suppress(Exception):  # the core may be dead; then no request is left to end
            await self._live().end_requests()

    def _live(self) -> vllm_api.Engine:
        if self._engine is None or not self._engine.alive:
            raise EngineDied(f"engine {self._ordinal} has no running vLLM ({self._reason})", engine=self._ordinal, hint="See its log")
        return self._engine

    async def _settle(self, update_id: str, version: int, rewinds: int) -> EngineVerdict:
        self._settled.clear()
        try:
            # A little shorter than the controller waits, which then hears of it in heartbeats.
            sync, seconds = self._settings.sync, self._told.get(update_id, Told()).seconds
            with self._liveness.work(commit_seconds(sync, seconds) - sync.control_timeout_seconds):
                verdict = await self._commit(update_id, version)
            if verdict.committed:
                self._rewinds, self._committed = rewinds, time.time()
            self._tell_of(update_id, version, verdict)
            return verdict
        finally:
            self._settled.set()
            self._draining.go_on(self._gate)

    async def _commit(self, update_id: str, version: int) -> EngineVerdict:
        before, self._ran = (self._state, self._reason), False
        began, told = time.monotonic(), self._told.get(update_id, Told())
        adapter = name_of(version, update_id, told.adapter)
        transaction: Transaction | None = None
        try:
            engine = self._live()
            self._state, self._reason = EngineState.UPDATING, "updating"
            # Under `strict` a repair has failed the update, and would again; what was not staged is gone.
            once = self._settings.engine.strict or self._settings.sync.stage == "none"
            most = self._settings.sync.apply_timeout_seconds / 2
            transaction = Transaction(engine, update_id, tries=1 if once else 2, seconds_for_all=most)
            if self._draining.acts:
                await transaction.drain(self._draining.make_way(self._gate))
                began = time.monotonic()
            await transaction.pause()
            await transaction.bring()
            transaction.phase = Phase.RESUME
            start = time.monotonic()
            await self._go_on(engine, version, adapter)
            transaction.seconds[Phase.RESUME] = time.monotonic() - start
            with contextlib.suppress(Exception):  # it serves; workers that were not told have nothing to go back to
                await engine.rpc("weightsync_keep", update_id)
        except WeightSyncError as exc:
            return await self._failed(exc, update_id, transaction, before, began)
        except Exception as exc:  # vLLM's own errors: the core died, or a call that should not fail did
            error = EngineDied(f"{type(exc).__name__}: {exc}", hint="See the engine's log")
            return await self._failed(error, update_id, transaction, before, began)
        self._state, self._reason, self._version, self._update_id = EngineState.SERVING, "", version, told.restores or update_id
        self._adapter = adapter
        if not told.restores and not told.keeps:  # another engine keeps this one, and nobody needs the one before
            self._clear_shelf()
        seconds, checks, ranks = transaction.seconds, transaction.checks, transaction.ranks
        return EngineVerdict(self._ordinal, True, version, self._shown, time.monotonic() - began, seconds, checks, ranks=ranks)

    async def _go_on(self, engine: vllm_api.Engine, version: int, adapter: str) -> None:
        """What follows a verdict that is ok: caches by the policy, then the version, then requests."""
        policy = self._settings.sync.caches
        # Under salt a version is the name of what was cached with it: one that comes again must find nothing.
        if policy == "reset" or (policy == "salt" and version <= self._highest):
            await engine.reset_caches()
        self._highest = max(self._highest, version)
        await engine.set_version(version, adapter)
        if not self._draining.paused:
            self._ran = True
            await engine.resume()

    async def _failed(
        self, error: WeightSyncError, update_id: str, transaction: Transaction | None, before: tuple[EngineState, str], began: float
    ) -> EngineVerdict:
        error.engine, error.update_id = self._ordinal, update_id
        error.phase = str(transaction.phase if transaction else Phase.PAUSE)
        logger.error("update failed: %s", error)
        served = before[0] == EngineState.SERVING
        # The adapter before is always kept; weights are where the settings say so.
        way_back = self._settings.sync.rollback == "host" or self._told.get(update_id, Told()).adapter == Adapter.ALONE
        if transaction is not None and transaction.wrote and served and way_back:
            await self._roll_back(transaction, update_id)
        wrote = transaction is not None and transaction.wrote
        if not wrote and (not served or await self._resumed()):
            self._state, self._reason = before
        else:
            self._state, self._reason = EngineState.QUARANTINED, error.code
            await self._end_requests()
        with contextlib.suppress(Exception):  # likewise
            await self._live().rpc("weightsync_abort", update_id)  # lets the staged bytes go
        self._version = self._version if self._state == EngineState.SERVING else None
        verdict = EngineVerdict(self._ordinal, False, self._version, self._shown, time.monotonic() - began, error=error.to_dict())
        if transaction is None:
            return verdict
        return replace(verdict, seconds=transaction.seconds, checks=transaction.checks, ranks=transaction.ranks)

    async def _resumed(self) -> bool:
        """Whether requests go on with the version before, if not now then when the engine is resumed."""
        if self._draining.paused:
            return True
        try:
            await self._live().resume()
        except Exception as exc:
            logger.error("engine %d could not go on: %s", self._ordinal, exc)
            return False
        return True

    async def _roll_back(self, transaction: Transaction, update_id: str) -> None:
        try:
            if self._ran:
                await transaction.pause()
            await transaction.roll_back()
            if self._ran and self._settings.sync.caches != "retain":
                await self._live().reset_caches()
            if self._version is not None:
                # By a name of its own: what was cached by the one before may be of the update that failed.
                self._adapter = self._adapter and f"weightsync-{self._version}-behind-{update_id[-12:]}"
                await self._live().set_version(self._version, self._adapter)
            logger.warning("engine %d is back at version %s", self._ordinal, self._version)
        except Exception as exc:
            transaction.wrote = True
            logger.error("engine %d could not be brought back to version %s: %s", self._ordinal, self._version, exc)

    @answers
    async def stop(self) -> None:
        """End the HTTP application and vLLM's processes. The actor itself is killed by the caller."""
        self._stopping = True
        self._end_watch()
        if self._server is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=3)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.close)
        await asyncio.to_thread(self._clear_shelf)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("the engine did not start: %s", task.exception())
