"""The ranks of a trainer, of which the first talks to the service and sends.

    rank 0    agree ── admit ──tell──▶ … tell "gather 0" ─▶ gather ─▶ tell "read" … commit ── tell report
    others    agree ── hear ◀──────────────── take part ◀─┘                       ◀── hear

A gloo group of our own, made once, so that nothing here meets the trainer's collectives.
Before each gather the first rank says that it is to be, and in the place of one that the update
has ended and how: nobody stands in a gather to which the sender does not come. A rank that
fails in one sends the first an alarm, for which there is always a receive posted. Every wait
has a deadline, and a rank that died is noticed by its broken connections. Messages are JSON.
Once something broke here the group is of no use, and the next call says so.

Not covered: going on with fewer ranks; a trainer starts again when it loses one.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from weightsync.errors import Aborted, ConfigError, DeadlineExceeded, Refused, TransportFailed, UpdateFailed, WeightSyncError

T = TypeVar("T")

_CONNECT_SECONDS = 60.0
#: How long one wait lasts before trouble is looked for, seconds.
_TICK_SECONDS = 0.05
#: A rank that is in trouble waits so long for the first one's own word of it.
_PATIENCE_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_PROBE_TAG, _ALARM_TAG = 1, 2
#: Room for what a rank says of itself in `agree` and in an alarm, bytes.
_STATE_BYTES = 4096
_AGAIN = "Start the trainer again, or make WeightSync anew on every rank; the engines serve what they had"

#: How many groups of the same ranks this process has made.
_serials: dict[tuple[int, ...], Iterator[int]] = {}


class Kind(enum.IntEnum):
    """What the first rank tells the others."""

    ADMITTED = 0
    GATHER = 1
    READ = 2
    REPORT = 3
    ERROR = 4


class Ranks:
    """This process among the trainer's; every rank makes one, and closes it.

    Args:
        group: a process group, or a device mesh of any shape, of all ranks.

    Raises:
        ConfigError: there is no default process group, or this process is not of the group.
        TransportFailed: not every rank came.
    """

    def __init__(self, group: Any) -> None:
        if not dist.is_initialized():
            raise ConfigError("group: torch.distributed is not initialised", hint="Call torch.distributed.init_process_group first")
        members = group.mesh.flatten().tolist() if hasattr(group, "mesh") else dist.get_process_group_ranks(group)
        #: Global ranks; the first is the one that sends.
        self.members = tuple(sorted(members))
        if dist.get_rank() not in self.members:
            raise ConfigError(
                f"group: rank {dist.get_rank()} is not among {self.members[:16]}", hint="Make WeightSync on the group's ranks only"
            )
        self._place = self.members.index(dist.get_rank())
        try:
            self._group: Any = _new_group(self.members, self._place)
        except RuntimeError as exc:
            raise TransportFailed(
                f"the trainer's ranks {self.members[:16]} did not all meet: {exc}", hint="Make WeightSync on all"
            ) from exc
        self._talk = threading.Lock()
        self._serial = 0  # of the call
        self._ended = False  # others have been told that the update ended
        self._alarms: dict[int, tuple[torch.Tensor, Any]] = {}  # on the first rank: by place, where one lands
        self._alarmed: Any = None  # on the others: the send, and of which call
        for place in range(1, len(self.members)) if self.leads else ():
            self._await_alarm(place)
        self._broken: WeightSyncError | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the rank that sends."""
        return self._place == 0

    # --- all ranks ------------------------------------------------------------------------------

    def agree(self, call: str, make: Callable[[], T], describe: Callable[[T], str], deadline: float) -> tuple[T, float]:
        """Begin a call of all ranks: each makes its part, and hears whether the others could and made the same.

        Args:
            call: name of the call.
            describe: equal on all ranks when what was made fits together.
            deadline: `time.monotonic()` value.

        Returns:
            What this rank made, and the earliest of the ranks' deadlines.

        Raises:
            Refused and others: what `make` raised on any rank, or that ranks call for different things; on every rank.
        """
        made: T | None = None
        failed: Exception | None = None
        state: dict[str, Any] = {"call": call, "left": deadline - time.monotonic()}
        try:
            made = make()
            state["made"] = describe(made)
        except Exception as exc:  # the others must hear of it before it is raised
            failed = exc
            state["error"] = _short(_as_data(exc, Refused))
        states = self._exchange(state, deadline)
        self._serial += 1
        self._ended, self._alarmed = False, None
        if failed is not None:
            raise failed
        for place, other in enumerate(states):
            if "error" in other:
                raise WeightSyncError.from_dict(other["error"] | {"message": f"rank {self.members[place]}: {other['error']['message']}"})
        first = states[0]
        for place, other in enumerate(states):
            if (other["call"], other["made"]) != (first["call"], first["made"]):
                what = f"{first['call']}() for different tensors or updates"
                if other["call"] != first["call"]:
                    what = f"{first['call']}() and {other['call']}()"
                raise Refused(
                    f"ranks {self.members[0]} and {self.members[place]} call {what}",
                    hint="Every rank makes the same calls in the same order, with the same names, shapes and shards",
                )
        assert made is not None
        agreed = time.monotonic() + min(other["left"] for other in states)
        # The others go on waiting for what the first says, which ends at its own.
        return made, min(deadline, agreed) if self.leads else agreed

    def require_all(self) -> None:
        """See that every rank is there and well; may be called beside another thread that talks.

        Raises:
            TransportFailed: a rank is gone.
            WeightSyncError: what failed on another rank.
        """
        self._require_touch()
        for place, (landed, _) in tuple(self._alarms.items()):
            if landed[-1]:
                said = json.loads(bytes(landed.tolist()))
                self._await_alarm(place)
                if said["serial"] == self._serial:
                    raise WeightSyncError.from_dict(said["error"] | {"message": f"rank {self.members[place]}: {said['error']['message']}"})
        if gone := self._gone():
            raise _lost(gone)

    def close(self) -> None:
        """Leave; the others notice. Can be called twice."""
        group, self._group = self._group, None
        if group is None:
            return
        self._alarms, self._alarmed = {}, None
        if self._broken is None:
            self._broken = TransportFailed("WeightSync is closed", hint=_AGAIN)
        # Destroying it joins its threads, which an unfinished operation holds until its own deadline.
        holder = [group]
        del group
        thread = threading.Thread(target=holder.clear, name="weightsync-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)

    # --- the first rank -------------------------------------------------------------------------

    def tell(self, kind: Kind, value: Any, deadline: float) -> None:
        """Say something to all others; a whole number, or JSON-ready data.

        Raises:
            Aborted: they have been told that the update ended.
            TransportFailed, DeadlineExceeded: it could not be said.
        """
        data = b"" if isinstance(value, int) else json.dumps(value).encode()
        with self._talk:
            if self._ended and kind != Kind.ERROR:
                raise Aborted("the update has ended")
            self._ended = kind in (Kind.ERROR, Kind.REPORT)
            head = torch.tensor([kind, value if isinstance(value, int) else 0, len(data)])
            self._broadcast(head, deadline, "the first rank's word")
            if data:
                self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), deadline, "the first rank's word")

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Whatever ends this early is told to the others, who raise it too."""
        try:
            yield
        except BaseException as exc:
            with contextlib.suppress(WeightSyncError):  # who can't be told sees that this rank is gone
                self.tell(Kind.ERROR, _as_data(exc, UpdateFailed), time.monotonic() + _PATIENCE_SECONDS)
            raise

    # --- the others -----------------------------------------------------------------------------

    def hear(self, deadline: float, failed: Callable[[], WeightSyncError | None]) -> tuple[Kind, Any]:
        """The next thing that the first rank says.

        Args:
            failed: asked while waiting: what went wrong on this rank. The first one's own word of it is preferred.

        Raises:
            WeightSyncError: the update ended so.
            TransportFailed, DeadlineExceeded: a rank is gone; nothing was said in time.
        """
        head = torch.zeros(3, dtype=torch.int64)
        self._broadcast(head, deadline, "the first rank's word", failed)
        kind, number, length = head.tolist()
        if not length:
            return Kind(kind), number
        data = torch.zeros(length, dtype=torch.uint8)
        self._broadcast(data, deadline, "the first rank's word", failed)
        value = json.loads(bytes(data.tolist()))
        if kind == Kind.ERROR:
            raise WeightSyncError.from_dict(value)
        return Kind(kind), value

    # --- operations -----------------------------------------------------------------------------

    def _exchange(self, state: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        mine = _packed(state)
        all_of_them = [torch.zeros_like(mine) for _ in self.members]
        options = dist.distributed_c10d.AllgatherOptions()
        self._finish(
            lambda: self._group.allgather([all_of_them], [mine], options), options, deadline, f"every rank to call {state['call']}()"
        )
        return [json.loads(bytes(each.tolist())) for each in all_of_them]

    def _broadcast(
        self, tensor: torch.Tensor, deadline: float, what: str, failed: Callable[[], WeightSyncError | None] = lambda: None
    ) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._finish(lambda: self._group.broadcast([tensor], options), options, deadline, what, failed)

    def _finish(
        self,
        begin: Callable[[], Any],
        options: Any,
        deadline: float,
        what: str,
        failed: Callable[[], WeightSyncError | None] = lambda: None,
    ) -> None:
        self._require_touch()
        # Ends an operation that was left behind; a little later, so that the wait is the one to say why.
        options.timeout = timedelta(seconds=max(0.0, deadline - time.monotonic()) + 0.1)
        patient_until = float("inf")
        try:
            work = begin()
            while not work.is_completed():
                with contextlib.suppress(RuntimeError):  # a wait that timed out leaves a gloo operation as it was
                    work.wait(timedelta(seconds=_TICK_SECONDS))
                now = time.monotonic()
                if (trouble := failed()) is not None:
                    self._alarm(trouble)
                    patient_until = min(patient_until, now + _PATIENCE_SECONDS)
                    if now >= patient_until and not work.is_completed():
                        self._break(trouble)
                if now >= deadline and not work.is_completed():
                    self._break(
                        DeadlineExceeded(f"waited for {what} until the deadline", hint="See what the other ranks of the trainer do")
                    )
            work.wait()
        except RuntimeError as exc:
            gone = self._gone()
            self._break(_lost(gone) if gone else TransportFailed(f"lost touch with the trainer's ranks: {str(exc)[:200]}", hint=_AGAIN))

    def _require_touch(self) -> None:
        if self._broken is not None:
            raise TransportFailed(f"the trainer's ranks have lost touch: {self._broken.message}", hint=_AGAIN, retryable=False)

    def _gone(self) -> list[int]:
        """Ranks whose processes are known to be gone."""
        found = []
        for place, rank in enumerate(self.members):
            if place != self._place:
                try:  # a receive that nobody answers costs nothing, and posting it fails on a broken connection
                    self._group.recv([torch.empty(1, dtype=torch.uint8)], place, _PROBE_TAG)
                except (RuntimeError, AttributeError):
                    found.append(rank)
        return found

    def _await_alarm(self, place: int) -> None:
        landing = torch.zeros(_STATE_BYTES, dtype=torch.uint8)
        self._alarms[place] = landing, self._group.recv([landing], place, _ALARM_TAG)

    def _alarm(self, error: WeightSyncError) -> None:
        if self._alarmed is None:
            said = _packed({"serial": self._serial, "error": _short(error.to_dict())})
            self._alarmed = said, self._group.send([said], 0, _ALARM_TAG)

    def _break(self, error: WeightSyncError) -> NoReturn:
        self._broken = error
        self.close()
        raise error


def _packed(state: dict[str, Any]) -> torch.Tensor:
    # Filled up with spaces, so that the last byte is not zero when all of it is there.
    return torch.frombuffer(bytearray(json.dumps(state).encode().ljust(_STATE_BYTES)), dtype=torch.uint8)


def _lost(gone: list[int]) -> TransportFailed:
    return TransportFailed(f"rank(s) {gone} of the trainer are gone", hint=_AGAIN, retryable=False)


def _as_data(exc: BaseException, kind: type[WeightSyncError]) -> dict[str, Any]:
    """An error as data; of this kind where it is not one of ours."""
    return (exc if isinstance(exc, WeightSyncError) else kind(f"{type(exc).__name__}: {exc}")).to_dict()


def _short(data: dict[str, Any]) -> dict[str, Any]:
    """An error's data, cut so that it fits into what a rank says of itself."""
    while len(json.dumps(data)) > _STATE_BYTES - 500:
        longest = max(("message", "hint"), key=lambda key: len(data[key]))
        data = data | ({"names": data["names"][:-1]} if data["names"] else {longest: data[longest][: len(data[longest]) // 2] + "…"})
    return data


def _new_group(members: tuple[int, ...], place: int) -> Any:
    # Not by dist.new_group: that gives a group made behind one that was destroyed the old one's name, and it then waits for its addresses.
    serial = next(_serials.setdefault(members, itertools.count()))
    store = dist.PrefixStore(f"weightsync/{members}/{serial}", dist.distributed_c10d._get_default_store())
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=_CONNECT_SECONDS)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, place, len(members), options)
