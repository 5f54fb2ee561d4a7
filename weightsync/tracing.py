"""Spans of updates through OpenTelemetry's API, where that is installed; without an SDK they go nowhere.

The trainer's current span travels as the header `traceparent` (W3C Trace Context) of its requests, whoever made it, and
what controller and engines do for its update becomes children of it. Spans are written when an update has ended: its phases
follow one another and are known by their lengths.

An SDK that the process already has is used. Where there is none and `OTEL_TRACES_EXPORTER` names an exporter (the SDK's own variable,
`console` or `otlp`), `install` sets one up.

Not covered: spans within a phase, and vLLM's own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

api: Any
try:
    from opentelemetry import trace as api
except ImportError:
    api = None

logger = logging.getLogger(__name__)

_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def valid(text: str) -> str:
    """A `traceparent` as it came in a request; empty where it is none."""
    found = _FORM.fullmatch(text)
    return text if found and set(found[1]) != {"0"} and set(found[2]) != {"0"} else ""


def trace_id(traceparent: str) -> str:
    """The 32 hexadecimal digits that all spans of one trace share."""
    return traceparent[3:35]


def current() -> str:
    """`traceparent` of the span that the caller is in; empty outside of one."""
    context = api.get_current_span().get_span_context() if api is not None else None
    if context is None or not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def install(service: str) -> None:
    """Set up an SDK where the environment asks for one, the SDK is installed, and the process has none.

    Args:
        service: the process's name in traces, where `OTEL_SERVICE_NAME` gives none.
    """
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "none").split(",")[0].strip()
    if api is None or exporter in ("", "none"):
        return
    with contextlib.suppress(ImportError):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if isinstance(api.get_tracer_provider(), TracerProvider):
            return
        (*_, found) = (None, *importlib.metadata.entry_points(group="opentelemetry_traces_exporter", name=exporter))
        if found is None:
            logger.warning("OTEL_TRACES_EXPORTER is %r, and no such exporter is installed: nothing is traced", exporter)
            return
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
        provider = TracerProvider(resource=Resource.create(name))
        provider.add_span_processor(BatchSpanProcessor(found.load()()))
        api.set_tracer_provider(provider)


def record(
    name: str,
    parent: str,
    began: float,
    ended: float,
    phases: Sequence[tuple[str, float, float]],
    about: Mapping[str, Any],
    error: str = "",
) -> None:
    """A span that has ended, with its phases as children. Never fails: an update must not fail of its trace.

    Args:
        parent: `traceparent`; empty for a trace of its own.
        began, ended: Unix seconds.
        phases: name, began, ended.
        about: attributes, under `weightsync.`.
        error: what went wrong.
    """
    if api is None:
        return
    try:
        tracer = api.get_tracer("weightsync")
        span = tracer.start_span(name, context=_context(parent), start_time=_nanoseconds(began))
        span.set_attributes({f"weightsync.{key}": value for key, value in about.items()})
        if error:
            span.set_status(api.StatusCode.ERROR, error)
        within = api.set_span_in_context(span)
        for phase, start, end in phases:
            tracer.start_span(phase, context=within, start_time=_nanoseconds(start)).end(_nanoseconds(end))
        span.end(_nanoseconds(ended))
    except Exception:
        logger.exception("a span could not be recorded")


def _context(parent: str) -> Any:
    found = _FORM.fullmatch(parent)
    if found is None:
        return None
    flags = api.TraceFlags(int(found[3], 16))
    above = api.SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=flags)
    return api.set_span_in_context(api.NonRecordingSpan(above))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
