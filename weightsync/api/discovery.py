"""The engines as a Prometheus HTTP service-discovery document, for routers and scrapers. Pure.

Not covered: metrics of vLLM itself: an engine's application serves none.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from weightsync.protocol import EngineState, EngineStatus, FleetStatus


def targets(status: FleetStatus) -> list[dict[str, Any]]:
    """One group for each engine that has an address: `targets` is its host and port, labels say what it serves."""
    return [
        {
            "targets": [urlsplit(engine.url).netloc],
            "labels": {
                "__meta_weightsync_fleet": status.fleet,
                "__meta_weightsync_engine": str(engine.engine),
                "__meta_weightsync_model": engine.model,
                "__meta_weightsync_state": str(engine.state),
                "__meta_weightsync_version": "" if engine.version is None else str(engine.version),
                "__meta_weightsync_pin": engine.pinned,
                "__meta_weightsync_ready": str(_ready(engine, status)).lower(),
            },
        }
        for engine in status.engines
        if engine.url
    ]


def _ready(engine: EngineStatus, status: FleetStatus) -> bool:
    return engine.state == EngineState.SERVING and not engine.pinned and engine.version == status.committed_version
