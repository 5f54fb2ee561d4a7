"""Calls between actors: deadlines on every one, and errors as typed data.

`answers` wraps an actor's method so that what it raises goes back as data;
`call` makes such a call and raises it again here. Ray's own failures become
`EngineDied`, `ServiceUnreachable` or `DeadlineExceeded`.

Not covered: retries. Only the caller knows which calls may be repeated.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray.exceptions

from weightsync.errors import DeadlineExceeded, EngineDied, InternalError, ServiceUnreachable, WeightSyncError

logger = logging.getLogger(__name__)


def answers(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Make an actor's coroutine answer `{"value": …}` or `{"error": …}` and never raise."""

    @functools.wraps(method)
    async def answered(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return {"value": await method(*args, **kwargs)}
        except WeightSyncError as exc:
            return {"error": exc.to_dict()}
        except Exception as exc:
            logger.exception("%s failed", method.__name__)
            return {"error": InternalError(f"{method.__name__}: {type(exc).__name__}: {exc}").to_dict()}

    return answered


async def call(method: Any, *args: Any, timeout_seconds: float, engine: int | None = None) -> Any:
    """Call an actor's method that is wrapped in `answers`.

    Args:
        method: `handle.method`.
        engine: ordinal, if the actor is an engine; names it in errors.

    Raises:
        EngineDied, ServiceUnreachable: the actor's process is gone.
        DeadlineExceeded: no answer in time; the call may still be running there.
        WeightSyncError: what the method raised.
    """
    name = f"engine {engine}" if engine is not None else "the controller"
    try:
        answer = await asyncio.wait_for(asyncio.shield(_as_future(method.remote(*args))), timeout_seconds)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{name} did not answer {method._method_name} within {timeout_seconds:.0f} s", hint="See its log", engine=engine
        ) from None
    except ray.exceptions.RayActorError as exc:
        text = str(exc).strip().splitlines()[0][:200]
        if engine is not None:
            raise EngineDied(f"{name} is gone: {text}", hint="It restarts by itself; sync again when it answers", engine=engine) from exc
        raise ServiceUnreachable(f"{name} is gone: {text}", hint="It restarts by itself; try again") from exc
    if "error" in answer:
        raise WeightSyncError.from_dict(answer["error"])
    return answer["value"]


async def _as_future(ref: Any) -> Any:
    return await ref
