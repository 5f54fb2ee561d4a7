"""Real fleets for tests: `weightsync serve` as a process of its own, with a folder of its own.

Not covered: engines on a GPU (`tests/gpu`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from weightsync import WeightSync

#: What every fleet of the tests is started with; a cold engine gets the same.
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
}
PROMPTS = [[1, 5, 9, 300], [7, 7, 7], [100, 200, 300, 400, 500, 11, 12, 13]]
MAX_TOKENS = 24


class Fleet:
    """One `weightsync serve`.

    Args:
        model: checkpoint that engines start from.
        home: state folder; a second Fleet on the same one adopts what the first left.
        engines: how many.
        flags: further flags of `serve`.
        env: variables over this process's own.
        prefix: what the command line begins with (`hosts.Network.on`).
    """

    def __init__(
        self,
        model: Path,
        home: Path,
        engines: int = 1,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.log = home, home / "serve.log"
        command = [
            *prefix, sys.executable, "-m", "weightsync.cli", "serve", f"--engine.model={model}", f"--engine.count={engines}",
            "--engine.max_model_len=512", "--engine.kv_cache_memory_bytes=67108864", "--engine.cpus=1",
            "--api.port=0", f"--state_dir={home}", "--verbose", *flags,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env={**os.environ, **(env or {})}
            )
        self.url = self.token = ""

    def ready(self, timeout_seconds: float = 240.0) -> Fleet:
        """Wait for the line that `serve` prints when every engine can take an update."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and not line.startswith("weightsync ready "):
            line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"serve ended with {self.process.wait()}:\n{self.log.read_text()[-3000:]}")
        words = dict(word.split("=", 1) for word in line.split()[2:])
        self.url, self.token = words["url"], Path(words["token_file"]).read_text().strip()
        return self

    def client(self, **arguments: Any) -> WeightSync:
        return WeightSync(self.url, self.token, **arguments)

    def get(self, path: str, token: str | None = None) -> httpx.Response:
        return httpx.get(self.url + path, headers={"authorization": f"Bearer {self.token if token is None else token}"}, timeout=30)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers={"authorization": f"Bearer {self.token}"}, timeout=60)

    def stop(self, number: int = signal.SIGINT, timeout_seconds: float = 60.0) -> int:
        """Send a signal and wait; the exit code."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        code = self.process.wait(timeout_seconds)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def processes(self) -> dict[int, str]:
        """Every process of this fleet."""
        return processes_of(_temp_dir(self.home), str(self.home))

    @property
    def logs(self) -> Path:
        """Folder of Ray's logs, actors' among them; gone when the fleet has ended."""
        return Path(_temp_dir(self.home)) / "session_latest" / "logs"


def processes_of(*marks: str) -> dict[int, str]:
    """Every process that names one of these folders, or writes to a file in them (all that Ray starts does)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            files = [os.readlink(entry / "fd" / number) for number in ("1", "2")]
        except OSError:
            continue
        if command and any(mark in text for mark in marks for text in (command, *files)):
            found[int(entry.name)] = command[:150]
    return found


def _temp_dir(home: Path) -> str:
    import hashlib

    return f"/tmp/weightsync-{hashlib.sha256(str((home / 'default').resolve()).encode()).hexdigest()[:10]}"


def wait_until(condition: Callable[[], Any], timeout_seconds: float = 30.0, what: str = "the condition") -> Any:
    """Poll until it is true; the value."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not come about in {timeout_seconds} s"
        time.sleep(0.05)


@contextlib.contextmanager
def trainer(fleet: Fleet, weights: Any) -> Iterator[WeightSync]:
    """A trainer of its own, behind its first sync."""
    with fleet.client(bucket_bytes=60_000) as client:
        client.sync_weights(weights)
        yield client


def with_faults(file: Path) -> dict[str, str]:
    """Variables of a fleet whose workers fail when `order_fault` says so (`tests/broken`)."""
    path = os.pathsep.join([str(Path(__file__).parent / "broken"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"FAULT_FILE": str(file), "PYTHONPATH": path}


def order_fault(file: Path, times: int, step: str = "apply", at: int = 7, engine: int = 0, rank: int = 0) -> None:
    """Have a step of the next update fail so many times; `at` tensors are loaded before."""
    part = file.with_suffix(".new")
    part.write_text(json.dumps({"engine": engine, "rank": rank, "step": step, "at": at, "times": times}))
    part.replace(file)


def answers(sync: WeightSync, engine: int) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens and log-probabilities of one engine, prompt after prompt."""
    tokens, logprobs = [], []
    for prompt in PROMPTS:
        g = sync.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, engine=engine)
        tokens.append(list(g.token_ids))
        logprobs.append(list(g.logprobs))
    return tokens, logprobs


def engine_pid(fleet: Fleet, ordinal: int) -> int:
    """Process of an engine's actor."""
    for pid, _ in fleet.processes().items():
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
        except OSError:
            continue
        if title.startswith("ray::EngineActor"):
            # The actor's HTTP port tells which engine it is.
            with fleet.client() as sync:
                port = int(sync.engines()[ordinal].url.rsplit(":", 1)[1])
            if port in _listening(pid):
                return pid
    raise AssertionError(f"no process of engine {ordinal}")


def _listening(pid: int) -> set[int]:
    import psutil

    return {c.laddr.port for c in psutil.Process(pid).net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}
