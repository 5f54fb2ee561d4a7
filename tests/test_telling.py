"""What is logged and traced of updates: a line for each phase, spans below the trainer's own, and nothing where nobody asked for it.

The controller is the real one over engines that are made up; the engine's part is told by itself. Not covered: an exporter over a network.
"""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service import Service
from tests.test_controller import begin, drive
from tests.test_house import BAR, run_python
from tests.test_metrics import fleet_of, verdict
from weightsync import WeightSync, logs, tracing
from weightsync.fleet.controller import Controller
from weightsync.fleet.telling import Telling

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[Callable[[], None]], list[Any]]]:
    """`lines(work)`: what is logged as JSON meanwhile, an object a line."""

    def said(work: Callable[[], None]) -> list[Any]:
        logs.install("json")  # not before: it writes to the standard error of its moment
        work()
        return [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    yield said
    ours = logging.getLogger("weightsync")
    ours.handlers.clear()
    ours.setLevel(logging.NOTSET)
    ours.propagate = True


@pytest.fixture(scope="module")
def exporter() -> Any:
    """An SDK in this process, which keeps spans in memory; a process has one for good."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    if not isinstance(trace.get_tracer_provider(), sdk.TracerProvider):
        trace.set_tracer_provider(sdk.TracerProvider())
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(kept))
    return kept


def commit_one(tmp_path: Path) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        fleet_of(controller)
        assert "value" in await controller.begin(begin("u1", 7), PARENT)
        assert (await controller.commit("u1", 5.0))["value"]["state"] == "committed"

    drive(tmp_path, scenario)


class Actor(Telling):
    _ordinal, _trace = 3, PARENT


# --- the log -------------------------------------------------------------------------------------


def test_an_update_is_a_line_for_each_phase_with_ids_as_data(tmp_path: Path, lines: Any) -> None:
    said = [line for line in lines(lambda: commit_one(tmp_path)) if "phase" in line or "outcome" in line]
    assert [line.get("phase", line.get("outcome")) for line in said][-1] == "committed"
    assert {"admit", "receive", "apply", "verify", "commit"} <= {line.get("phase") for line in said}
    for line in said:
        assert (line["update_id"], line["version"], line["trace_id"], line["level"]) == ("u1", 7, TRACE, "INFO")
        assert line["logger"] == "weightsync.fleet.controller" and line["time"].endswith("+00:00") and "update u1" in line["message"]
        assert "phase" not in line or line["seconds"] >= 0


def test_an_engine_tells_its_own_part_by_its_ordinal(lines: Any) -> None:
    said = lines(lambda: Actor()._tell_of("u2", 8, verdict(3, 8)))
    assert {line.get("phase") for line in said} == {"receive", "pause", "apply", "verify", "resume", None}
    assert {(line["update_id"], line["version"], line["engine"], line["trace_id"]) for line in said} == {("u2", 8, 3, TRACE)}


def test_a_line_is_one_line_whatever_is_in_it(lines: Any) -> None:
    def work() -> None:
        try:
            raise ValueError('two\nlines and "quotes"')
        except ValueError:
            logging.getLogger("weightsync.fleet.x").exception("it\nbroke: %s", Path("/x"))

    (line,) = lines(work)
    assert line["message"] == "it\nbroke: /x" and "ValueError: two\nlines" in line["error"] and line["level"] == "ERROR"


def test_unless_it_is_asked_for_nothing_more_is_said_than_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.install("plain")
    commit_one(tmp_path)
    assert "took" not in capsys.readouterr().err
    assert logging.getLogger("weightsync").handlers == []


# --- the trace -----------------------------------------------------------------------------------


def test_spans_of_controller_and_engine_are_children_of_the_trainers(tmp_path: Path, exporter: Any) -> None:
    exporter.clear()
    commit_one(tmp_path)
    Actor()._tell_of("u1", 7, verdict(3, 7))
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    whole = {span.name: span for span in spans if f"{span.parent.span_id:016x}" == "b7ad6b7169203331"}
    assert set(whole) == {"weightsync update", "weightsync engine"}
    assert dict(whole["weightsync update"].attributes)["weightsync.version"] == 7
    for name, phases in (
        ("weightsync update", ["admit", "receive", "commit"]),
        ("weightsync engine", ["pause", "apply", "verify", "resume"]),
    ):
        parts = sorted((s for s in spans if s.parent.span_id == whole[name].context.span_id), key=lambda s: s.start_time)
        assert [span.name for span in parts] == phases
        assert all(whole[name].start_time - 1000 <= span.start_time <= span.end_time <= whole[name].end_time + 1000 for span in parts)
        assert all(one.end_time <= next_.start_time + 1000 for one, next_ in itertools.pairwise(parts))


def test_a_failed_update_is_an_error_in_the_trace(tmp_path: Path, exporter: Any) -> None:
    async def scenario(controller: Controller, _: Any) -> None:
        await controller.begin(begin("u1", 1), "")
        await controller.abort("u1", "the trainer has gone")

    exporter.clear()
    drive(tmp_path, scenario)
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "weightsync update"]
    assert (span.parent, span.status.is_ok, span.status.description) == (None, False, "aborted")


def test_a_trainers_span_travels_with_its_requests(exporter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace

    seen: list[str | None] = []
    with Service() as service:
        handler = service._server.RequestHandlerClass
        answer = handler.do_GET

        def noting(self: Any) -> None:
            seen.append(self.headers.get("traceparent"))
            answer(self)

        monkeypatch.setattr(handler, "do_GET", noting)
        with WeightSync(service.url, "token") as sync:
            sync.status()
            with trace.get_tracer("trainer").start_as_current_span("step") as span:
                sync.status()
    assert seen[0] is None and seen[1] is not None
    assert tracing.valid(seen[1]) and tracing.trace_id(seen[1]) == f"{span.get_span_context().trace_id:032x}"


@pytest.mark.parametrize(
    "text", ["", "x", PARENT + "\n", PARENT.upper(), PARENT[:-1], f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-{TRACE}-{'0' * 16}-01", "<b>"]
)
def test_what_is_no_traceparent_is_left_out(text: str) -> None:
    assert tracing.valid(text) == ""
    assert tracing.valid(PARENT) == PARENT


def test_without_opentelemetry_everything_works_and_nothing_is_sent() -> None:
    run_python(
        BAR + "from weightsync import tracing; assert tracing.current() == ''; tracing.record('x', '', 0, 1, [], {})", "opentelemetry"
    )


def test_an_exporter_that_the_environment_names_gets_the_spans() -> None:
    code = (
        "import time; from weightsync import tracing; tracing.install('here');"
        f"tracing.record('weightsync update', '{PARENT}', time.time() - 1, time.time(), [], {{'version': 3}});"
        "from opentelemetry import trace; trace.get_tracer_provider().force_flush()"
    )
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"OTEL_TRACES_EXPORTER": "console", "PATH": "/usr/bin"},
    )
    assert TRACE in done.stdout and '"service.name": "here"' in done.stdout, done.stderr
