"""What the API's container of the chart does when it is told to end, when its `serve` ends, and when Ray's head goes.

`ray` and `weightsync` are stand-ins that say what they are told.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.charts import CHART
from tests.fleets import wait_until

RAY = """#!/usr/bin/env bash
echo "ray $*" >>"$EVENTS"
if [ "$1" != start ]; then
  [ "$(grep -c health-check "$EVENTS")" -gt 1 ] # the head takes its time
  exit
fi
[ ! -e "$TMPDIR/ray" ] || exit 1
sleep 0.3
trap 'echo "node told to end" >>"$EVENTS"; exit 0' TERM
echo "Ray runtime started."
while [ ! -e "$TMPDIR/head-gone" ]; do sleep 0.05; done
exit 1
"""
SERVE = """#!/usr/bin/env bash
trap 'echo "serve told to end" >>"$EVENTS"; [ -e "$TMPDIR/hangs" ] || exit 0' TERM
echo "weightsync $* pid=$$" >>"$EVENTS"
while [ ! -e "$TMPDIR/exit" ]; do sleep 0.05; done
exit "$(cat "$TMPDIR/exit")"
"""


class Container:
    """One run of serve.sh."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._events = folder, folder / "events"
        self._events.touch()
        # What a container before this one has left: its session, and a log that says that Ray has started.
        (folder / "ray").mkdir()
        (folder / "ray-start.log").write_text("Ray runtime started.")
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("ray", RAY), ("weightsync", SERVE)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        own = {"TMPDIR": str(folder), "EVENTS": str(self._events), "PATH": f"{programs}:{os.environ['PATH']}"}
        env = {**os.environ, **own, "HEAD": "head:6379", "POD_IP": "10.1.2.3", "STORE_BYTES": "100", "VERBOSE": "--verbose"}
        env["LEAVE_SECONDS"] = "1"
        self.process = subprocess.Popen(["bash", str(CHART / "files/serve.sh")], env=env, stdout=subprocess.DEVNULL)

    def events(self) -> str:
        return self._events.read_text()

    def write(self, name: str, text: str = "") -> None:
        (self._folder / "new").write_text(text)
        (self._folder / "new").rename(self._folder / name)

    def serves(self) -> bool:
        return Path(f"/proc/{self.events().partition('pid=')[2].split()[0]}").exists()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    running = Container(tmp_path)
    try:
        wait_until(lambda: "pid=" in running.events(), 20, "serve")
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(10)


def told_to_end(container: Container) -> None:
    container.process.send_signal(signal.SIGTERM)


def told_to_end_and_hanging(container: Container) -> None:
    container.write("hangs")
    told_to_end(container)


@pytest.mark.parametrize(
    ("happens", "code", "node", "told"),
    [
        pytest.param(told_to_end, 0, "told to end", True, id="told to end"),
        pytest.param(told_to_end_and_hanging, 0, "told to end", True, id="told to end, and serve hangs"),
        pytest.param(lambda container: container.write("exit", "2"), 2, "told to end", False, id="serve ends"),
        pytest.param(lambda container: container.write("head-gone"), 1, "gone by itself", True, id="head goes"),
    ],
)
def test_the_container_ends_as_a_whole(
    container: Container, happens: Callable[[Container], None], code: int, node: str, told: bool
) -> None:
    happens(container)
    assert container.process.wait(20) == code
    wait_until(lambda: not container.serves(), 10, "the end of serve")
    events = container.events()
    assert ("serve told to end" in events) == told  # it leaves the fleet: `leave_fleet`, in fleet.toml
    assert ("node told to end" in events) == (node == "told to end")
    assert not told or node != "told to end" or events.index("serve told to end") < events.index("node told to end")
    assert events.count("ray health-check --address head:6379") == 2
    assert "ray start --address=head:6379 --node-ip-address=10.1.2.3 --num-cpus=0 --num-gpus=0 --object-store-memory=100" in events
    assert events.index("health-check") < events.index("ray start") < events.index("weightsync serve")
    assert "weightsync serve --config /etc/weightsync/fleet.toml --verbose" in events
