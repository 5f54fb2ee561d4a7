"""Who takes part in a communicator, and how each is reached: by memory of the trainer's host, or by a rank in a process group.

`local_workers` is pure. A new generation begins when anything about the members changes.

Not covered: whether they reach each other, which joining finds out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.errors import Refused
from weightsync.protocol import CommunicatorInfo, Place, UpdateRequest
from weightsync.sections import SyncSettings
from weightsync.transport import rendezvous


class Membership:
    """The current communicator of a fleet.

    Args:
        sync: the fleet's settings.
        port: of the rendezvous store; may be set later.
        generation: a serial number that has not been used.
    """

    def __init__(self, sync: SyncSettings, port: int, generation: int) -> None:
        self._sync, self.port, self._generation = sync, port, generation
        self._members: Any = None

    def renew(self) -> None:
        """The next update meets anew: peers may stand anywhere in the stream."""
        self._members = None

    def apart(self, request: UpdateRequest, workers: Mapping[int, int]) -> CommunicatorInfo:
        """A communicator for one update whose sender is an engine; by ranks alone. Its members leave the trainer's: that is made anew.

        Args:
            workers: of each engine that receives.
        """
        self.renew()
        self._generation += 1
        first, world = rendezvous.ranks(workers, {})
        return self._info(request, first, world, {})

    def communicator(
        self, request: UpdateRequest, incarnations: Mapping[int, str], places: Mapping[int, Sequence[Place | None]]
    ) -> CommunicatorInfo:
        """The communicator for this trainer and these engines: the last one when nothing changed, else a new generation.

        Args:
            incarnations: of the engines that take part.
            places: of their workers, by rank within the engine.

        Raises:
            Refused: NCCL would have two ranks on one GPU.
        """
        local = local_workers(self._sync.local, request, places)
        members = (request.trainer_id, request.transport, request.place, request.socket, dict(incarnations), local)
        if members != self._members:
            self._generation, self._members = self._generation + 1, members
        first, world = rendezvous.ranks({ordinal: len(those) for ordinal, those in places.items()}, local)
        return self._info(request, first, world, local)

    def _info(self, request: UpdateRequest, first: Mapping[int, int], world: int, local: Mapping[int, tuple[int, ...]]) -> CommunicatorInfo:
        return CommunicatorInfo(
            host=self._sync.store_host,
            port=self.port,
            generation=self._generation,
            world_size=world,
            members={str(ordinal): rank for ordinal, rank in first.items()},
            transport=request.transport,
            local={str(ordinal): workers for ordinal, workers in local.items()},
        )


def local_workers(policy: str, request: UpdateRequest, places: Mapping[int, Sequence[Place | None]]) -> dict[int, tuple[int, ...]]:
    """The workers that are handed memory by the trainer; engines that have none are left out.

    Args:
        policy: `sync.local`.
        places: of all workers, by engine and by rank within it.

    Raises:
        Refused: two of the rest, or one and the trainer, are on one GPU, which NCCL does not take.
    """
    trainer = request.place if request.socket else None
    found: dict[int, tuple[int, ...]] = {}
    for engine in sorted(places):
        workers = tuple(w for w, place in enumerate(places[engine]) if trainer and place and _takes(policy, request, trainer, place))
        if workers:
            found[engine] = workers
    if request.transport == "nccl":
        _require_a_gpu_each(request, places, found)
    return found


def _takes(policy: str, request: UpdateRequest, trainer: Place, worker: Place) -> bool:
    if policy == "off" or not trainer.reaches(worker):
        return False
    if request.transport == "nccl":  # the trainer's buckets are on its GPU
        return trainer.device == worker.device
    return policy == "host"


def _require_a_gpu_each(request: UpdateRequest, places: Mapping[int, Sequence[Place | None]], local: Mapping[int, tuple[int, ...]]) -> None:
    members = [("the trainer", request.place)]
    members += [
        (f"worker {worker} of engine {engine}", place)
        for engine in sorted(places)
        for worker, place in enumerate(places[engine])
        if worker not in local.get(engine, ())
    ]
    seen: list[tuple[str, Place]] = []
    for name, place in members:
        if place is None:
            continue
        if other := next((who for who, where in seen if where.same_to_nccl(place)), None):
            raise Refused(
                f"{other} and {name} are on one GPU ({place.device}), and NCCL takes one rank on each",
                hint=_way_out(other, request.place, place),
            )
        seen.append((name, place))


def _way_out(other: str, trainer: Place | None, worker: Place) -> str:
    if other != "the trainer":
        return "Give each engine a GPU of its own, or train on that GPU too"
    if trainer is not None and not trainer.reaches(worker):
        return "Run both in one network namespace (one pod, the host's network), or give the trainer a GPU of its own"
    return "Set sync.local to auto, or give the trainer a GPU of its own"
