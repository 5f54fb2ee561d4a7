"""`weightsync status` as scripts and people use it: in a pipe, again and again, on a terminal, with a service that goes and comes.

Not covered: what the table looks like (`test_cli.py`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.service import Service, until
from tests.test_api import fleet
from tests.test_cli import HEALTHY, OF_AN_UPDATE, PINNED
from weightsync import cli
from weightsync.codec import encode
from weightsync.errors import AuthError, ServiceUnreachable
from weightsync.protocol import FleetStatus

BOTH = replace(fleet(HEALTHY, PINNED, committed=120), ready=1)


class Watched(Service):
    """Answers with the status, or the error, that the test has put there."""

    now: Any = BOTH

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        if path != "/v1/status":
            return super().answer(method, path, body)
        if isinstance(self.now, FleetStatus):
            return encode(self.now)
        raise self.now


@pytest.fixture
def service() -> Iterator[Watched]:
    with Watched() as running:
        yield running


@pytest.fixture
def line(service: Watched, tmp_path: Path) -> list[str]:
    """`weightsync status` of that service."""
    (tmp_path / "token").write_text("token")
    return [sys.executable, "-m", "weightsync.cli", "status", "--url", service.url, "--token-file", str(tmp_path / "token")]


def environment(**more: str) -> dict[str, str]:
    """Without what would tell rich of a terminal."""
    return {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE")} | more


@contextlib.contextmanager
def running(line: list[str], **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, which is gone behind this."""
    # Ctrl-C has to reach it also where whoever runs the tests ignores that, as a shell has its background jobs do.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(line, text=True, stderr=subprocess.PIPE, preexec_fn=heeding, **how) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def test_in_a_pipe_nothing_is_cut_whatever_the_usual_width(line: list[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=60, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    rows = done.stdout.splitlines()
    for engine in BOTH.engines:
        assert any(OF_AN_UPDATE in row and engine.url in row and engine.vllm_version in row for row in rows)
    assert max(map(len, rows)) > 100 and "no room for" not in done.stdout


def test_a_watching_script_gets_a_line_for_each_change_and_the_code_of_the_last(line: list[str], service: Watched) -> None:
    with running([*line, "--watch", "0.05", "--json"], stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None

        def following() -> Any:
            assert process.stdout is not None
            return json.loads(process.stdout.readline())

        assert following() == encode(BOTH)
        service.now = ServiceUnreachable("the controller is gone")
        assert following()["error"]["code"] == "unreachable"
        time.sleep(0.3)  # several looks at the same, which say nothing
        service.now = replace(BOTH, ready=0)
        assert following()["ready"] == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 3
        assert process.stdout.read() == ""


def test_a_wrong_token_ends_the_watching(line: list[str], service: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    service.now = AuthError("missing or wrong bearer token")
    assert cli.main([*line[3:], "--watch", "0.05"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "wrong bearer token" in err


def test_who_reads_may_leave(line: list[str], service: Watched) -> None:
    with running(["bash", "-c", f"{shlex.join([*line, '--watch', '0.05', '--json'])} | head -n 1"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None and shell.stderr is not None
        assert json.loads(shell.stdout.readline())["ready"] == 1
        for ready in (0, 1):  # it notices when it writes
            time.sleep(0.2)
            service.now = replace(BOTH, ready=ready)
        assert shell.wait(20) == 0 and shell.stderr.read() == ""


def test_on_a_terminal_it_is_drawn_in_its_place_and_says_when_the_service_is_lost(line: list[str], service: Watched) -> None:
    ours, theirs = pty.openpty()
    seen = bytearray()

    def said(text: str) -> bool:
        while select.select([ours], [], [], 0.05)[0]:
            seen.extend(os.read(ours, 65536))
        return text in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))

    with running([*line, "--watch", "0.1"], stdout=theirs, stdin=theirs, env=environment(COLUMNS="150", TERM="xterm")) as process:
        until(lambda: said("every 0.1 s until Ctrl-C"), 60)
        assert said("eval") and said(HEALTHY.url)
        service.now = ServiceUnreachable("the controller is gone")
        until(lambda: said("lost at ") and said("the controller is gone; what is above was seen before"), 60)
        service.now, before = replace(BOTH, committed_version=121, ready=1), len(seen)
        until(lambda: said("version 121"), 60)
        assert b"\x1b[1A" in seen[before:], "what stood there is drawn over"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    os.close(ours)
    os.close(theirs)
