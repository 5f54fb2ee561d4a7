"""Whether the nodes of a cluster have the GPUs that the settings ask for, before an engine waits for them. Pure.

An engine is one actor that reserves a GPU for each of its workers, so Ray puts all of
them on one node: eight nodes of one GPU have no place for an engine of two workers.

Not covered: GPUs that other programs hold, and nodes that a cluster may still get.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.config import EngineSettings
from weightsync.errors import ConfigError

logger = logging.getLogger(__name__)


def require_gpus(engine: EngineSettings, gpus: float, nodes: Sequence[Mapping[str, Any]], may_grow: bool) -> None:
    """Refuse more engines than fit.

    Args:
        gpus: that one engine reserves (`engine_actor.engine_options`).
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
