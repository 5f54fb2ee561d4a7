"""Whether a `serve` that finds engines may go on with them: they are asked what they were started with.

On a cluster that was there before nothing else knows: the state folder may be another one, or empty.

Not covered: Ray's own settings (`own_ray` keeps those of a Ray that `serve` started).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from weightsync import config
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.fleet.calls import answers, call
from weightsync.fleet.fixed import FIXED, differences, fixed

logger = logging.getLogger(__name__)


class Adopted:
    """An engine actor's part; attributes are those of `EngineActor`."""

    _settings: config.Settings

    @answers
    async def started_with(self) -> dict[str, Any]:
        """The settings that whoever adopts this engine must ask for, too (`fixed.fixed`)."""
        return fixed(self._settings)


async def require_same(engines: Mapping[int, Any], settings: config.Settings) -> None:
    """Refuse a fleet that other settings have started.

    One that does not answer (it waits for its place, or starts again) is taken on trust, and the log says so.

    Args:
        engines: handles of the actors, by ordinal.

    Raises:
        ConfigError: names each setting and engine that differs.
    """
    seconds = settings.sync.control_timeout_seconds
    asked = [call(handle.started_with, timeout_seconds=seconds, engine=ordinal) for ordinal, handle in engines.items()]
    wanted, found = fixed(settings), dict[str, list[int]]()
    for ordinal, running in zip(engines, await asyncio.gather(*asked, return_exceptions=True), strict=True):
        if isinstance(running, WeightSyncError):
            logger.warning("engine %d is adopted without a look at its settings: %s", ordinal, running)
            continue
        if isinstance(running, BaseException):
            raise running
        for difference in differences(wanted, running, [section for section in FIXED if section != "ray"]):
            found.setdefault(difference, []).append(ordinal)
    if found:
        said = "; ".join(f"{difference} (engine {', '.join(map(str, which))})" for difference, which in found.items())
        raise ConfigError(said, hint="Use the same settings, or end the fleet that is there first")
