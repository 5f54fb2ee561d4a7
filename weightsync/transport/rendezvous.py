"""Where trainer and workers meet: the TCP store, generations and ranks.

The store lives in the controller, so that no trainer's death takes it away. All
keys of a communicator lie under its generation; a process that still holds an
older generation finds nobody there. `ranks` and `who` are pure.

Which way leads there (`network`) is looked at first, so that a wrong address is
an error within seconds that says from where it was tried.

Not covered: NCCL's choice of an interface, for which it reads NCCL_SOCKET_IFNAME.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from weightsync.errors import ConfigError, TransportFailed
from weightsync.protocol import CommunicatorInfo
from weightsync.transport import network

#: How long the store's own port may still be held by a controller that has just ended.
_PORT_SECONDS = 3.0
#: How long one attempt to reach the store may take.
_REACH_SECONDS = 5.0
#: How long the store may take to answer who has reached it; another service there never does. torch's client asks the name server
#: for the peer's name meanwhile, which took 5 s once where that did not answer.
_ANSWER_SECONDS = 15.0


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


def who(info: CommunicatorInfo, rank: int) -> str:
    """A rank in words: `the trainer (rank 0)`, `engine 1 (rank 2)`."""
    engine = engine_of(info, rank)
    return f"the trainer (rank {rank})" if engine is None else f"engine {engine} (rank {rank})"


def engine_of(info: CommunicatorInfo, rank: int) -> int | None:
    """The engine of which a rank is a worker; None for the trainer."""
    below = [(first, int(ordinal)) for ordinal, first in info.members.items() if first <= rank]
    return max(below)[1] if below else None


def named(info: CommunicatorInfo, some: Sequence[int]) -> str:
    """Several ranks in words; the first eight."""
    shown = ", ".join(who(info, rank) for rank in some[:8])
    return shown + (f" and {len(some) - 8} more" if len(some) > 8 else "")


def host_store(host: str, timeout_seconds: float, port: int = 0) -> dist.TCPStore:
    """Open the store in this process, at this address alone; on a free port if `port` is 0.

    Raises:
        ConfigError: the address is not one to meet at, or the port is taken.
    """
    # Our own socket, since torch's would listen at every address of this machine. An IPv4 one also spares torch a question to
    # the name server about each local peer: it asks for ::ffff:127.0.0.1, which is in nobody's hosts file.
    listener = _listen(host, port)
    port = listener.getsockname()[1]
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as exc:
        raise ConfigError(f"sync.store_host: got {host!r}, want an address of this machine: {exc}") from exc


def _listen(host: str, port: int) -> socket.socket:
    want = "want an address of this machine that trainers and engines can reach"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as exc:
        raise ConfigError(f"sync.store_host: got {host!r}, {want} ({exc})") from None
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if ip.is_unspecified or (ip.is_loopback and not network.is_loopback(host)):
        hint = f"It is told to everybody as the place to meet, and here it is {ip}; {network.seen()}"
        raise ConfigError(f"sync.store_host: got {host!r}, {want}", hint=hint)
    until = time.monotonic() + (_PORT_SECONDS if port else 0.0)
    while True:
        try:
            return socket.create_server(address, family=family, backlog=1024)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise ConfigError(f"sync.store_host: got {host!r}, {want} ({os.strerror(exc.errno or 0)})", hint=network.seen()) from None
            if time.monotonic() > until:
                raise ConfigError(f"sync.store_port: got {port}, want a free port of {host} ({os.strerror(exc.errno)})") from None
            time.sleep(0.1)


def join_store(info: CommunicatorInfo, timeout_seconds: float) -> dist.Store:
    """Connect to the controller's store, at the keys of one generation.

    Raises:
        TransportFailed: nothing listens there, for example because the controller is gone.
    """
    # torch's own client retries a refused connection until its timeout and prints each
    # attempt; one plain connect first gives the answer at once.
    try:
        socket.create_connection((info.host, info.port), timeout=min(_REACH_SECONDS, timeout_seconds)).close()
        answer = timedelta(seconds=min(_ANSWER_SECONDS, timeout_seconds))
        store = dist.TCPStore(info.host, info.port, is_master=False, timeout=answer)
        store.set_timeout(timedelta(seconds=timeout_seconds))
    except (OSError, RuntimeError) as exc:
        why = str(exc).splitlines()[0]
        hint = "Check that this machine can reach the controller's sync.store_host, then sync again"
        if network.is_loopback(info.host):
            hint = f"{info.host} leads to this machine: where the controller runs on another, set sync.store_host to an address of that one"
        raise TransportFailed(
            f"no rendezvous store at {network.shown(info.host, info.port)}, tried from {network.way_to(info.host)}: {why}",
            hint=hint,
        ) from exc
    return dist.PrefixStore(f"weightsync/{info.generation}", store)
