"""The engines as the controller knows them: handles, incarnations, heartbeats, and the calls of an update.

Every engine is asked what it is once a second, by a call that touches no worker
of it; one that does not answer is entered as dead in the ledger, and one that
answers again with what it says. One whose workers do not answer says so itself (`watching`), and
updates go on without it. A host whose link is cut answers nothing and breaks no
connection: it may cost one update its time, and others a second. One that has applied an update behind the controller's back,
because its answer came too late, either has what the fleet has, or is told to serve nothing.

Not covered: restarting an engine whose workers never answer again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import ray

from weightsync.codec import decode, encode
from weightsync.errors import DeadlineExceeded, EngineDied, InternalError, TransportFailed, WeightSyncError, WorkersSilent
from weightsync.fleet.calls import call
from weightsync.fleet.ledger import Ledger, Update
from weightsync.fleet.liveness import commit_seconds
from weightsync.fleet.orders import Orders
from weightsync.fleet.reports import failure, telling
from weightsync.fleet.waves import held_back, next_wave
from weightsync.protocol import BeginOrder, EngineState, EngineStatus, EngineVerdict, Phase, Place, UpdateState, WorkerReport
from weightsync.sections import SyncSettings

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 10.0
#: How long one is waited for that did not answer when it was asked last, where others wait meanwhile.
_LOST_SECONDS = 1.0
#: So many heartbeats in a row without an answer end the wait for a commit.
_SILENT_TIMES, _SILENT_LOOK_SECONDS = 2, 0.25
#: How often and how long engines are asked again which of them refused or died, when a broadcast broke.
_TELL_TRIES, _TELL_SECONDS = 4, 0.25


class Roster(Orders):
    """All engines of one fleet.

    Args:
        namespace: Ray's namespace of the fleet.
        count: how many engines it starts with, from 0.
        ledger: takes in what they say.
        sync: deadlines.

    Attributes:
        ordinals: of its engines.
    """

    def __init__(self, namespace: str, count: int, ledger: Ledger, sync: SyncSettings) -> None:
        self._namespace, self.ordinals, self._ledger, self._sync = namespace, set(range(count)), ledger, sync
        self._handles: dict[int, Any] = {}
        self._incarnations: dict[int, str] = {}
        self._places: dict[int, tuple[Place | None, ...]] = {}
        self._silent: dict[int, int] = {}  # heartbeats in a row that were not answered
        self._hung = set[int]()  # engines that said with their last one that their workers don't answer
        self._given_up: dict[int, float] = {}  # when an engine's workers did not answer in time, by `time.monotonic()`
        self._starting: dict[int, asyncio.Task[None]] = {}  # engines that were added, and the question to each

    async def discover(self) -> None:
        """Take the engines that there are for the fleet's: it may have been scaled before this controller was made."""
        named = asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        with contextlib.suppress(TimeoutError):
            names = [entry["name"] for entry in await asyncio.wait_for(named, _TIMEOUT_SECONDS) if entry["namespace"] == self._namespace]
            if found := {int(name.removeprefix("engine-")) for name in names if name.startswith("engine-")}:
                self.ordinals = found

    def add(self, ordinal: int, handle: Any) -> None:
        """An engine comes."""
        self.ordinals.add(ordinal)
        self._handles[ordinal] = handle

    def remove(self, ordinal: int) -> Any:
        """An engine goes; its actor, as far as it is known."""
        self.ordinals.discard(ordinal)
        return self._handles.pop(ordinal, None)

    def handle(self, ordinal: int) -> Any:
        """The actor's handle.

        Raises:
            EngineDied: it went away since it was last seen.
        """
        if ordinal not in self._handles:
            raise EngineDied(f"engine {ordinal} is gone", engine=ordinal, hint="It restarts by itself; sync again when it answers")
        return self._handles[ordinal]

    def members(self, ordinals: Iterable[int]) -> tuple[dict[int, str], dict[int, tuple[Place | None, ...]]]:
        """Of these engines: what changes when the process does, and where the workers are, by rank within the engine."""
        wanted = list(ordinals)
        return {o: self._incarnations[o] for o in wanted}, {o: self._places[o] for o in wanted}

    async def refresh(self, *, waited_for: bool = False) -> None:
        """Ask every engine what it is; none can hold up another.

        Args:
            waited_for: by an update, which goes on without engines that are known not to answer.
        """
        starting = {o for o in self._ledger.joining if not self._ledger.engines[o].workers} & self.ordinals
        for ordinal in starting:  # nobody waits for an answer of an actor that a cluster may have no place for yet
            if (asked := self._starting.get(ordinal)) is None or asked.done():
                self._starting[ordinal] = asyncio.create_task(self._ask(ordinal, waited_for=False))
        await asyncio.gather(*(self._ask(ordinal, waited_for) for ordinal in self.ordinals - starting))

    def _patience(self, ordinal: int, seconds: float) -> float:
        """How long an engine is waited for where others wait meanwhile: not for long if it did not answer last time."""
        known = self._ledger.engines.get(ordinal)
        lost = known is not None and known.state == EngineState.DEAD and known.reason == DeadlineExceeded.code
        return min(seconds, _LOST_SECONDS) if lost else seconds

    async def _ask(self, ordinal: int, waited_for: bool) -> None:
        seconds = min(_TIMEOUT_SECONDS, self._sync.control_timeout_seconds)
        seconds = self._patience(ordinal, seconds) if waited_for else seconds
        asked = time.monotonic()
        try:
            if ordinal not in self._handles:
                found = asyncio.to_thread(ray.get_actor, f"engine-{ordinal}", self._namespace)
                self._handles[ordinal] = await asyncio.wait_for(found, seconds)
            answer = await call(self._handles[ordinal].describe, timeout_seconds=seconds, engine=ordinal)
        except ValueError:  # no actor of that name
            self._lose(ordinal, "gone")
        except TimeoutError:  # Ray's own directory does not answer
            self._lose(ordinal, DeadlineExceeded.code)
        except WeightSyncError as exc:
            if isinstance(exc, EngineDied):
                self._handles.pop(ordinal, None)  # a recreated actor has a new handle
            elif isinstance(exc, DeadlineExceeded) and not waited_for:
                self._silent[ordinal] = self._silent.get(ordinal, 0) + 1
            self._lose(ordinal, exc.code)
        else:
            # It was taken away meanwhile, or its workers gave no answer since it said what it says here.
            if ordinal not in self.ordinals or self._given_up.get(ordinal, asked) > asked:
                return
            self._silent[ordinal] = 0
            self._note_restart(ordinal, answer["incarnation"])
            self._places[ordinal] = tuple(decode(Place, place) if place else None for place in answer["places"])
            await self._take_in(answer["status"])

    async def _take_in(self, plain: dict[str, Any]) -> None:
        """What an engine says that it is."""
        status, current = decode(EngineStatus, plain), self._ledger.current
        self._note_silence(status)
        if current is not None and current.state == UpdateState.APPLYING:
            # Its verdict is what counts, not what the engine says on the way.
            self._ledger.note_pause(status)
            return
        self._ledger.see(status)
        if self._ledger.came_late(status):
            await self._retire(status)

    def _lose(self, ordinal: int, reason: str) -> None:
        if ordinal in self.ordinals:
            self._ledger.lose(ordinal, reason)

    def _give_up(self, ordinal: int, reason: str) -> None:
        """Workers gave no answer in time. From its next heartbeat on the engine says that itself, until they do."""
        self._given_up[ordinal] = time.monotonic()
        self._lose(ordinal, reason)

    def _note_silence(self, status: EngineStatus) -> None:
        silent = status.state == EngineState.SILENT
        if silent != (status.engine in self._hung):
            logger.warning("the workers of engine %d %s", status.engine, "don't answer" if silent else "answer again")
            self._hung ^= {status.engine}

    def _note_restart(self, ordinal: int, incarnation: str) -> None:
        known = self._ledger.engines.get(ordinal)
        if known is not None and known.pinned and self._incarnations.get(ordinal, incarnation) != incarnation:
            text = "engine %d was pinned as %r at version %s and has restarted: that is lost, and it takes updates again"
            logger.warning(text, ordinal, known.pinned, known.version)
        if known is not None and known.paused and self._incarnations.get(ordinal, incarnation) != incarnation:
            logger.warning("engine %d was paused and has restarted: that is lost, and it serves when it has its weights", ordinal)
        self._incarnations[ordinal] = incarnation

    async def _retire(self, status: EngineStatus) -> None:
        """Have an engine serve nothing until the next update; asked again with its next heartbeat if it does not answer."""
        with contextlib.suppress(WeightSyncError):
            retire = self.handle(status.engine).retire
            await call(retire, status.update_id, timeout_seconds=_TIMEOUT_SECONDS, engine=status.engine)

    # --- one update ----------------------------------------------------------------------------

    async def begin(self, update: Update, ordinal: int, *, hand_on: bool = False, restores: str = "") -> None:
        """Tell every worker of an engine of an update.

        Args:
            hand_on, restores: see `BeginOrder`.

        Raises:
            WeightSyncError: a worker refuses, no worker knows a name, or the engine does not answer.
        """
        communicator, sync = update.communicator, self._sync
        assert communicator is not None
        order = BeginOrder(
            request=update.request,
            communicator=communicator,
            engine=ordinal,
            rank_offset=communicator.members[str(ordinal)],
            connect_seconds=sync.rendezvous_timeout_seconds,
            interface=sync.interface,
            stage=sync.stage,
            retain=sync.rollback == "host",
            hand_on=hand_on,
            restores=restores,
            rewinds=update.rewinds,
            plan=sync.plan == "auto",
            base_version=update.base_version,
            base_update=update.base_update,
            traceparent=update.trace,
        )
        try:
            plain = await asyncio.to_thread(encode, order)  # seconds, where there are very many tensors
            await self._reports(ordinal, self.handle(ordinal).begin, plain)
        except (DeadlineExceeded, WorkersSilent) as exc:
            self._give_up(ordinal, exc.code)
            raise

    async def late(self, update: Update, until: float) -> list[str]:
        """Engines that can't apply the update yet, in words; none when all can.

        Args:
            until: `time.monotonic()` value behind which no answer is waited for.

        Raises:
            WeightSyncError: what went wrong in an engine; its refusal or its death, where that is behind a broken broadcast.
        """
        answers = await self._poll_all(update, until)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        for _ in range(_TELL_TRIES):
            # An engine's refusal, or its death, breaks the broadcast of all; who it was may not be known at once.
            if not failed or not isinstance(telling(failed), TransportFailed):
                break
            await asyncio.sleep(_TELL_SECONDS)
            again = await self._poll_all(update, time.monotonic() + _TELL_SECONDS)
            failed += [answer for answer in again if isinstance(answer, BaseException)]
        if failed:
            raise telling(failed)
        return [str(answer) for answer in answers if answer]

    async def _poll_all(self, update: Update, until: float) -> list[str | BaseException]:
        return await asyncio.gather(*(self._poll(update, ordinal, until) for ordinal in update.engines), return_exceptions=True)

    async def _poll(self, update: Update, ordinal: int, until: float) -> str:
        """Why an engine can't apply the update yet; empty when it can.

        Raises:
            WeightSyncError: it failed in a worker, or the engine does not answer.
        """
        seconds = max(0.1, min(self._sync.control_timeout_seconds, until - time.monotonic()))
        try:
            reports = await self._reports(ordinal, self.handle(ordinal).poll, seconds=seconds)
        except WorkersSilent as exc:
            self._give_up(ordinal, exc.code)
            raise
        except DeadlineExceeded as exc:
            if seconds == self._sync.control_timeout_seconds:
                self._give_up(ordinal, exc.code)
                raise
            return f"engine {ordinal} did not answer"
        if all(report.state == "staged" and report.update_id == update.request.update_id for report in reports):
            return ""
        fewest = min((report.tensors for report in reports), default=0)
        return f"engine {ordinal} had {fewest} of {len(update.request.manifest.tensors)} tensors"

    async def held(self) -> set[str]:
        """Updates whose bytes engines hold and have not begun to apply, as far as engines answer."""
        found = await asyncio.gather(*(self._reports(o, handle.poll) for o, handle in self._handles.items()), return_exceptions=True)
        reports = (report for answer in found if not isinstance(answer, BaseException) for report in answer)
        return {report.update_id for report in reports if report.state in ("receiving", "staged")}

    async def abort(self, update_id: str, ordinals: Sequence[int] = ()) -> None:
        """End an update in these engines, or all, that answer; one that has not heard of it, or is applying it, goes on."""
        most, chosen = self._sync.control_timeout_seconds, {o: self._handles[o] for o in ordinals or self._handles if o in self._handles}
        calls = (call(h.abort, update_id, timeout_seconds=self._patience(o, most), engine=o) for o, h in chosen.items())
        await asyncio.gather(*calls, return_exceptions=True)

    async def states(self) -> dict[int, EngineState | None]:
        """What every engine that stays says that it does now, whatever update is under way; None for one that does not answer.

        One that did not answer its last heartbeat is not waited for again, nor one that is on its way up.
        """

        async def ask(ordinal: int) -> EngineState | None:
            if not known[ordinal].workers or known[ordinal].state == EngineState.DEAD:
                return EngineState.DEAD if ordinal not in self._handles else None
            try:
                answer = await call(self.handle(ordinal).describe, timeout_seconds=_TIMEOUT_SECONDS, engine=ordinal)
            except EngineDied:
                return EngineState.DEAD
            except WeightSyncError:
                return None
            return decode(EngineStatus, answer["status"]).state

        known = {o: self._ledger.engines[o] for o in self._ledger.states}
        return dict(zip(known, await asyncio.gather(*map(ask, known)), strict=True))

    async def commit_all(self, update: Update, more: Callable[[], bool] = lambda: True) -> list[EngineVerdict]:
        """Have the engines of an update apply it, wave after wave, `sync.min_available` serving meanwhile; the verdicts in that order.

        Those whose turn does not come let the update go and serve on.

        Args:
            more: asked before each wave whether there shall be one.
        """
        left, verdicts, least = list(update.engines), list[EngineVerdict](), self._sync.min_available
        states: dict[int, EngineState | None] = {}
        while left and more():
            states = await self.states() if least else {}
            wave = next_wave(left, states, least)
            if not wave:
                break
            verdicts += await asyncio.gather(*(self.commit(update, ordinal) for ordinal in wave))
            left = [ordinal for ordinal in left if ordinal not in wave]
        if left:
            await self.abort(update.request.update_id, left)
        there = [self._ledger.engines[ordinal] for ordinal in left if ordinal in self._ledger.engines]
        return verdicts + [held_back(engine, states, least) for engine in there]

    async def commit(self, update: Update, ordinal: int) -> EngineVerdict:
        """Have an engine apply an update. Whatever happens there is a verdict: without one the update would never end."""
        request, most = update.request, commit_seconds(self._sync, update.request.timeout_seconds)
        try:
            commit = self.handle(ordinal).commit
            answer = call(commit, request.update_id, request.version, update.rewinds, timeout_seconds=most, engine=ordinal)
            return decode(EngineVerdict, await self._while_it_answers(ordinal, answer))
        except Exception as raised:
            exc = raised if isinstance(raised, WeightSyncError) else InternalError(f"{type(raised).__name__}: {raised}")
            exc.update_id, exc.engine, exc.phase = request.update_id, ordinal, str(Phase.APPLY)
            self._ledger.lose(ordinal, exc.code)
            return EngineVerdict(ordinal, False, None, self._ledger.engines[ordinal].state, error=exc.to_dict())

    async def _while_it_answers(self, ordinal: int, answer: Coroutine[Any, Any, Any]) -> Any:
        """What a long call answers; an engine says what it is meanwhile, whatever its workers do.

        Raises:
            DeadlineExceeded: it has stopped saying so, as on a host whose link is cut.
            WorkersSilent: it says that its workers don't answer what they were asked before, or write for longer than they may.
        """
        self._silent[ordinal] = 0
        waiting = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait({waiting}, timeout=_SILENT_LOOK_SECONDS))[0]:
                if ordinal in self._hung:
                    raise WorkersSilent(
                        f"the workers of engine {ordinal} do not answer, and it has not applied the update",
                        hint="See its log; it takes part again when they answer",
                        engine=ordinal,
                    )
                if self._silent[ordinal] >= _SILENT_TIMES:
                    raise DeadlineExceeded(
                        f"engine {ordinal} has stopped answering while it applied the update",
                        hint="See its log, and the network to its host; it takes part again when it answers",
                        engine=ordinal,
                    )
            return waiting.result()
        finally:
            waiting.cancel()

    async def _reports(self, ordinal: int, method: Any, *args: Any, seconds: float | None = None) -> list[WorkerReport]:
        seconds = self._sync.control_timeout_seconds if seconds is None else seconds
        answers = await call(method, *args, timeout_seconds=seconds, engine=ordinal)
        reports = [decode(WorkerReport, answer) for answer in answers]
        if (error := failure(reports)) is not None:
            error.engine = ordinal
            raise error
        return reports
