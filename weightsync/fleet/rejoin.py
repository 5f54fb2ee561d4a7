"""Engines that come later get the committed version from one that keeps it, without the trainer.

An engine that was restarted, has been added, woke from a deep sleep, was quarantined or
missed an update is brought up to the fleet by the ordinary path: begin, receive, commit,
verdict; an engine that keeps the update (`handing`) sends in the trainer's place. Several
take part at once. The trainer goes first: what it begins ends a rejoin that is still receiving
and waits for one that is being applied; of that no further wave begins. Engines that serve an older version are
taken out of service only as far as `sync.min_available` allows.

Not covered: a committed version that too few engines reached: whether it counts its trainer decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from weightsync.codec import decode, encode
from weightsync.errors import DeadlineExceeded, HeldBack, UpdateConflict, WeightSyncError
from weightsync.fleet.calls import call
from weightsync.fleet.ledger import Ledger, Update
from weightsync.fleet.membership import Membership
from weightsync.fleet.roster import Roster
from weightsync.fleet.waves import reachable
from weightsync.protocol import CommunicatorInfo, EngineVerdict, UpdateRequest
from weightsync.sections import SyncSettings

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.03
#: An engine that fails to rejoin is tried again so often, at growing distances; then it waits for the next update.
_TRIES = 5
_FIRST_WAIT_SECONDS = 1.0


class Giver:
    """An engine that keeps an update and hands it on.

    Args:
        ordinal: its own.
        handle: its actor.
        wait: deadline of a short call, seconds.
    """

    def __init__(self, ordinal: int, handle: Any, wait: float) -> None:
        self.ordinal, self._handle, self._wait = ordinal, handle, wait

    async def offer(self, update_id: str, name: str, seconds: float) -> UpdateRequest:
        """What it keeps of an update, as the request of another one of this name.

        Raises:
            WeightSyncError: it keeps another one, or does not answer.
        """
        answer = await call(self._handle.offer, update_id, name, seconds, timeout_seconds=self._wait, engine=self.ordinal)
        return await asyncio.to_thread(decode, UpdateRequest, answer)

    async def hand_on(self, name: str, communicator: CommunicatorInfo, seconds: float) -> None:
        """Have it send; returns when it has sent all.

        Raises:
            WeightSyncError: see `Handing.hand_on`.
        """
        most = seconds + self._wait
        await call(self._handle.hand_on, name, encode(communicator), seconds, timeout_seconds=most, engine=self.ordinal)

    async def call_off(self, name: str) -> None:
        """Have it leave the workers of an update that has ended; tried once, since it has deadlines of its own."""
        with contextlib.suppress(WeightSyncError):
            await call(self._handle.call_off, name, timeout_seconds=self._wait, engine=self.ordinal)


class Rejoin:
    """See the module.

    Args:
        roster, ledger, membership, sync: the controller's.
        ended: told how each ended, `committed`, `failed` or `gave_way`, with the verdict or what it failed of, where there is one.
    """

    def __init__(self, roster: Roster, ledger: Ledger, membership: Membership, sync: SyncSettings, ended: Callable[..., None]) -> None:
        self._roster, self._ledger, self._membership, self._sync, self._ended = roster, ledger, membership, sync, ended
        self._task: asyncio.Task[None] | None = None
        self._applying = self._yields = False
        self.name = ""  # of the update under way
        self._failures: dict[int, tuple[str, str, int, float]] = {}  # engine: incarnation, update, tries, not before

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def look(self) -> None:
        """Begin to bring whom there is to bring, if nothing else is under way."""
        ordinal = self._ledger.giver()
        if ordinal is None or self.busy or self._ledger.current is not None:
            return
        lacking = {engine: update_id for engine, update_id in self._ledger.lacking().items() if self._due(engine, update_id)}
        takers = {engine: lacking[engine] for engine in reachable(sorted(lacking), self._ledger.states, self._sync.min_available)}
        if takers:
            self._yields = False
            giver = Giver(ordinal, self._roster.handle(ordinal), self._sync.control_timeout_seconds)
            self._task = asyncio.create_task(self._bring(giver, takers))

    def hold(self, engine: int, update_id: str) -> None:
        """Bring this update to this engine no more: it had it from here already, and does not serve it rightly."""
        self._failures[engine] = self._incarnation(engine), update_id, _TRIES, 0.0

    async def give_way(self) -> None:
        """Return when no rejoin is under way: the trainer has something newer.

        Raises:
            UpdateConflict: engines are being written for longer than a short call may take.
        """
        if not self.busy or self._task is None:
            return
        self._yields = True
        if not self._applying:
            self._task.cancel()
        done, _ = await asyncio.wait([self._task], timeout=self._sync.control_timeout_seconds)
        if not done:
            raise UpdateConflict("engines are being brought to the committed version", hint="Try again in a moment")

    # --- one rejoin ------------------------------------------------------------------------------

    async def _bring(self, giver: Giver, takers: Mapping[int, str]) -> None:
        name, kept = f"rejoin-{uuid.uuid4().hex}", next(iter(takers.values()))
        self.name = name
        seconds = self._sync.apply_timeout_seconds
        sending: asyncio.Task[None] | None = None
        try:
            update = await self._offered(giver, kept, name, seconds, tuple(sorted(takers)))
            assert update.communicator is not None
            await self._begin(update, kept)
            sending = asyncio.create_task(giver.hand_on(name, update.communicator, seconds))
            await self._received(update, sending, time.monotonic() + seconds)
            self._applying = True
            for verdict in await self._roster.commit_all(update, lambda: not self._yields):
                self._enter(verdict, kept, update)
        except asyncio.CancelledError:
            self._ended("gave_way")
            await self._roster.abort(name)
        except WeightSyncError as exc:
            self._failed(kept, [exc.engine] if exc.engine in takers else list(takers), exc)
            self._ended("failed", error=exc)
            await self._roster.abort(name)
        except Exception:
            logger.exception("a rejoin failed")
            self._failed(kept, list(takers), "see above")
            await self._roster.abort(name)
        finally:
            self._applying = False
            if sending is not None:
                sending.cancel()
                with contextlib.suppress(BaseException):
                    await sending
            await giver.call_off(name)

    def _enter(self, verdict: EngineVerdict, kept: str, update: Update) -> None:
        self._ledger.rejoined(verdict, kept, update.rewinds)
        error = verdict.error or {}
        if verdict.committed:
            self._failures.pop(verdict.engine, None)
            logger.warning("engine %d is at version %d again; %s had kept it", verdict.engine, verdict.version, update.request.trainer_id)
            self._ended("committed", verdict)
        elif error.get("code") != HeldBack.code:  # else its turn comes when more engines serve
            self._failed(kept, [verdict.engine], error.get("message"))
            self._ended("failed", verdict)

    async def _offered(self, giver: Giver, kept: str, name: str, seconds: float, takers: tuple[int, ...]) -> Update:
        request = await giver.offer(kept, name, seconds)
        update = Update(request, takers, time.time(), rewinds=self._ledger.rewinds)
        _, places = self._roster.members(takers)
        update.communicator = self._membership.apart(request, {engine: len(those) for engine, those in places.items()})
        update.staged = self._sync.stage != "none"
        return update

    async def _begin(self, update: Update, kept: str) -> None:
        begun = [self._roster.begin(update, engine, restores=kept) for engine in update.engines]
        for refused in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(refused, BaseException):
                raise refused

    async def _received(self, update: Update, sending: asyncio.Task[None], deadline: float) -> None:
        """Return when every engine has staged it.

        Raises:
            WeightSyncError: what failed in one of them, or in the sender; the deadline.
        """
        while late := await self._roster.late(update, deadline):
            if sending.done() and (error := sending.exception()) is not None:
                raise error
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"not all bytes had arrived: {'; '.join(late)}")
            await asyncio.sleep(_POLL_SECONDS)

    # --- who is tried again ------------------------------------------------------------------------

    def _due(self, engine: int, update_id: str) -> bool:
        incarnation, update, tries, not_before = self._failures.get(engine, ("", "", 0, 0.0))
        if (incarnation, update) != (self._incarnation(engine), update_id):
            return True
        return tries < _TRIES and time.monotonic() >= not_before

    def _failed(self, update_id: str, engines: list[Any], why: Any) -> None:
        for engine in engines:
            incarnation, update, tries, _ = self._failures.get(engine, ("", "", 0, 0.0))
            now = self._incarnation(engine)
            tries = tries + 1 if (incarnation, update) == (now, update_id) else 1
            self._failures[engine] = now, update_id, tries, time.monotonic() + _FIRST_WAIT_SECONDS * 2**tries
            logger.warning("engine %s could not be brought to update %s (try %d of %d): %s", engine, update_id, tries, _TRIES, why)

    def _incarnation(self, engine: int) -> str:
        return self._roster.members([engine])[0][engine]
