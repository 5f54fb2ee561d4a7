"""Where trainer and workers meet: the TCP store, generations and ranks.

The store lives in the controller, so that no trainer's death takes it away. All
keys of a communicator lie under its generation; a process that still holds an
older generation finds nobody there. `ranks` is pure.

Not covered: choosing a network interface among several (`sync.interface` sets it).
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from datetime import timedelta

import torch.distributed as dist

from weightsync.errors import ConfigError, TransportFailed
from weightsync.protocol import CommunicatorInfo


def ranks(workers: Mapping[int, int], local: Mapping[int, Collection[int]]) -> tuple[dict[int, int], int]:
    """Rank of each engine's first worker that has one, and the world size.

    Args:
        workers: engine ordinal to number of workers inside.
        local: those of them that are reached by a link of the trainer's host and need no rank.

    Returns:
        (first rank per engine, world size). The trainer is rank 0, so ranks 1 to
        `world_size - 1` are each held by exactly one worker, as `rank_of` says.

    Raises:
        ValueError: an engine without workers.
    """
    first: dict[int, int] = {}
    rank = 1
    for engine in sorted(workers):
        if workers[engine] < 1:
            raise ValueError(f"engine {engine} says it has {workers[engine]} workers")
        first[engine] = rank
        rank += workers[engine] - len(set(local.get(engine, ())))
    return first, rank


def rank_of(first: int, local: Collection[int], worker: int) -> int | None:
    """A worker's rank; None if it is local.

    Args:
        first: of its engine, as `ranks` says.
        local: its engine's local workers.
        worker: its rank within its engine.
    """
    return None if worker in local else first + worker - sum(1 for other in set(local) if other < worker)


def host_store(host: str, timeout_seconds: float) -> dist.TCPStore:
    """Open the store in this process, on a free port of `host`."""
    try:
        return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as exc:
        raise ConfigError(f"sync.store_host: got {host!r}, want an address of this machine: {exc}") from exc


def join_store(info: CommunicatorInfo, timeout_seconds: float) -> dist.Store:
    """Connect to the controller's store, at the keys of one generation.

    Raises:
        TransportFailed: nothing listens there, for example because the controller is gone.
    """
    # torch's own client retries a refused connection until its timeout and prints each
    # attempt; one plain connect first gives the answer at once.
    try:
        socket.create_connection((info.host, info.port), timeout=min(5.0, timeout_seconds)).close()
        store = dist.TCPStore(info.host, info.port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
    except (OSError, RuntimeError) as exc:
        raise TransportFailed(
            f"no rendezvous store at {info.host}:{info.port}: {exc}",
            hint="Check that this machine can reach the controller's sync.store_host, then sync again",
        ) from exc
    return dist.PrefixStore(f"weightsync/{info.generation}", store)
