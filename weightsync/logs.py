"""What controller and engines log of updates, and their log as lines of JSON where the setting `log` says so.

One line for each phase of an update, from the controller (the fleet's) and from every engine (its own), with update id,
version, engine, seconds, and the id of the trainer's trace where there is one. They are of level INFO: without `log=json` nobody sees them.

Standard library only. Not covered: vLLM's processes, which have their own log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from weightsync import tracing

#: Key of a record's attributes beside its text.
_ABOUT = "about"


class JsonLines(logging.Formatter):
    """One object a line: `time` (UTC), `level`, `logger`, `message`, `error` with a traceback, and what the record is about."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, _ABOUT, {}), default=str)


def install(kind: Literal["plain", "json"]) -> None:
    """Have this process log as the settings say; a second call changes nothing."""
    ours = logging.getLogger("weightsync")
    if kind == "plain" or any(isinstance(handler.formatter, JsonLines) for handler in ours.handlers):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def phases(
    logger: logging.Logger, update_id: str, version: int, seconds: Mapping[str, float], outcome: str, trace: str, engine: int | None = None
) -> None:
    """A line for each phase of an update that has ended, and one for the end.

    Args:
        outcome: how it ended, for the fleet or in this engine.
        trace: `traceparent` of the trainer's span; may be empty.
        engine: ordinal, where it is one engine's part.
    """
    about: dict[str, Any] = {"update_id": update_id, "version": version}
    about |= {"engine": engine} if engine is not None else {}
    about |= {"trace_id": tracing.trace_id(trace)} if trace else {}
    where = f"update {update_id} to version {version}" + (f", engine {engine}" if engine is not None else "")
    for phase, took in seconds.items():
        logger.info("%s: %s took %.3f s", where, phase, took, extra={_ABOUT: about | {"phase": phase, "seconds": round(took, 6)}})
    logger.info("%s: %s", where, outcome, extra={_ABOUT: about | {"outcome": outcome}})
