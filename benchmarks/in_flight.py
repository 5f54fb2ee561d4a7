"""Tokens per second of two engines with a hundred requests in flight, with updates and without: one command, one JSON file, one table.

    python -m benchmarks.in_flight [--caches reset] [--in-flight 100] [--tokens 128] [--each 2] [--repeats 3]

The requests are those of OpenAI's Python client, sent to the engines' own addresses: whole and streamed completions, and
`/inference/v1/generate`. A round is over when each of those in flight has been answered and asked again, `each` times in
all. Rounds take turns: no updates, updates at intervals, one update behind the other; so what else the machine does meets
each of them. Trainer, engines and clients share the machine, so a part of what updates cost here is theirs to compute. Under
`reset` the requests in flight compute the keys and values of their tokens anew behind each update, under the other policies not.

A round in which a request was lost, or got fewer tokens than it asked for, ends the measurement with an error.

Not covered: GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import AsyncOpenAI, OpenAIError

from tests import checkpoints
from tests.fleets import Fleet
from weightsync.protocol import EngineStatus

KINDS = ("whole", "streamed", "generate")
#: Which updates go by in a round: none, or how many seconds lie between the begins of two.
WAYS: dict[str, float | None] = {"none": None, "every 2 s": 2.0, "one behind the other": 0.0}
VERSION = "x-weightsync-version"
_ANSWER_SECONDS = 120.0
_RESULTS = Path(__file__).parent / "results"


@dataclass
class Answer:
    """What became of one request; times are `time.monotonic()`.

    Attributes:
        head: when the answer's head had come, with the version that it names.
        spans: (version, first token, behind the last), where the route tells them.
        error: empty when the answer came to its end.
    """

    kind: str
    engine: int
    prompt: list[int]
    asked: int
    began: float
    head: float = 0.0
    ended: float = 0.0
    version: int | None = None
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    reason: str | None = None
    error: str = ""

    @property
    def whole(self) -> bool:
        return not self.error and self.reason == "length" and len(self.tokens) == self.asked


class Clients:
    """OpenAI clients, one for each engine, that try nothing twice.

    Args:
        engines: as the service names them.
        token: the fleet's.
    """

    def __init__(self, engines: Sequence[EngineStatus], token: str) -> None:
        self._urls = [engine.url for engine in engines]
        self._of = [AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=_ANSWER_SECONDS) for url in self._urls]
        self._model = engines[0].model

    async def close(self) -> None:
        for client in self._of:
            await client.close()

    async def ask(self, kind: str, engine: int, prompt: list[int], tokens: int) -> Answer:
        """One greedy request; whatever becomes of it is in the answer."""
        answer = Answer(kind, engine, prompt, tokens, time.monotonic())
        try:
            await getattr(self, f"_{kind}")(self._of[engine], answer)
        except OpenAIError as exc:
            answer.error = f"{type(exc).__name__}: {exc}"
        answer.ended = time.monotonic()
        return answer

    def _completion(self, answer: Answer) -> dict[str, Any]:
        more = {"ignore_eos": True, "return_token_ids": True}
        return {"model": self._model, "prompt": answer.prompt, "max_tokens": answer.asked, "temperature": 0.0, "extra_body": more}

    async def _whole(self, client: AsyncOpenAI, answer: Answer) -> None:
        raw = await client.completions.with_raw_response.create(**self._completion(answer))
        _head(answer, raw.headers)
        choice = raw.parse().choices[0]
        answer.tokens, answer.reason = choice.token_ids, choice.finish_reason  # type: ignore[attr-defined]

    async def _streamed(self, client: AsyncOpenAI, answer: Answer) -> None:
        raw = await client.completions.with_raw_response.create(stream=True, **self._completion(answer))
        _head(answer, raw.headers)
        async for chunk in raw.parse():
            for choice in chunk.choices:
                answer.tokens += choice.token_ids or []  # type: ignore[attr-defined]
                answer.reason = choice.finish_reason or answer.reason

    async def _generate(self, client: AsyncOpenAI, answer: Answer) -> None:
        sampling = {"max_tokens": answer.asked, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": answer.prompt, "sampling_params": sampling, "model": self._model}
        response = await client.post(f"{self._urls[answer.engine]}/inference/v1/generate", cast_to=httpx.Response, body=body)
        _head(answer, response.headers)
        choice = response.json()["choices"][0]
        answer.tokens, answer.reason = choice["token_ids"], choice["finish_reason"]
        answer.spans = [(int(span["version"]), span["start"], span["end"]) for span in choice["weight_versions"]]


def _head(answer: Answer, headers: Any) -> None:
    answer.head, answer.version = time.monotonic(), int(headers[VERSION])


async def keep_in_flight(clients: Clients, engines: int, count: int, tokens: int, more: Callable[[int], bool]) -> list[Answer]:
    """Keep `count` requests in flight, spread over engines and kinds.

    Args:
        tokens: that each asks for.
        more: whether one that has been answered so many times asks again.
    """
    answers: list[Answer] = []

    async def one(number: int) -> None:
        asked = 0
        while more(asked):
            kind = KINDS[(number // engines + asked) % len(KINDS)]
            prompt = [3 + (number + 7 * n) % 500 for n in range(8 + number % 9)]
            answers.append(await clients.ask(kind, number % engines, prompt, tokens))
            asked += 1

    await asyncio.gather(*map(one, range(count)))
    return answers


class Trainer:
    """`benchmarks.trainer` as a process; `updates` grows while it runs. Ended by `close`, or killed."""

    def __init__(self, fleet: Fleet, even: Path, odd: Path, every: float = 0.0) -> None:
        token = fleet.home / "trainer-token"
        token.write_text(fleet.token)
        command = [sys.executable, "-m", "benchmarks.trainer", fleet.url, str(token), str(even), str(odd), f"--every={every}"]
        with (fleet.home / "trainer.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.updates: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # else it was killed in the middle
                self.updates.append(json.loads(line))

    @property
    def committed(self) -> list[dict[str, Any]]:
        return [update for update in self.updates if "code" not in update]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.close()

    def close(self, seconds: float = 120.0) -> int:
        """Let it end its update, which has a minute; its exit status.

        Raises:
            TimeoutExpired: it does not end; `trainer.log` says where its threads stand.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            raise
        self._reader.join(seconds)
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def training(fleet: Fleet, even: Path, odd: Path, every: float | None) -> Iterator[Trainer | None]:
    """A trainer that has committed once; None where there is to be none."""
    trainer = None if every is None else Trainer(fleet, even, odd, every)
    try:
        while trainer is not None and not trainer.committed:
            if trainer.process.poll() is not None:
                raise SystemExit("the trainer ended; see its log")
            time.sleep(0.05)
        yield trainer
    finally:
        if trainer is not None:
            trainer.close()


async def one_round(fleet: Fleet, given: argparse.Namespace, trainer: Trainer | None) -> dict[str, Any]:
    """One round's numbers."""
    with fleet.client() as sync:
        engines = sync.engines()
    clients, before = Clients(engines, fleet.token), len(trainer.committed) if trainer else 0
    began = time.monotonic()
    answers = await keep_in_flight(clients, len(engines), given.in_flight, given.tokens, lambda asked: asked < given.each)
    seconds = time.monotonic() - began
    updates = trainer.committed[before:] if trainer else []
    await clients.close()
    if broken := [answer for answer in answers if not answer.whole]:
        raise SystemExit(f"{len(broken)} of {len(answers)} requests were not answered in full: {broken[0]}")
    latencies = statistics.quantiles([answer.ended - answer.began for answer in answers], n=20)
    return {
        "seconds": seconds, "tokens_per_second": sum(len(answer.tokens) for answer in answers) / seconds,
        "latency_median": latencies[9], "latency_95": latencies[18],
        "updates": len(updates), "paused": sum(update["pause"] for update in updates) / seconds,
    }  # fmt: skip


def measure(given: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rounds of each way."""
    even, odd = (checkpoints.build("qwen3", folder / f"checkpoint-{seed}", seed) for seed in (1, 2))
    flags = [f"--engine.max_num_seqs={given.in_flight}", f"--sync.caches={given.caches}"]
    fleet = Fleet(even, folder / "fleet", 2, flags).ready()
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    try:
        with training(fleet, even, odd, 0.0):  # engines serve behind a first update
            pass
        asyncio.run(one_round(fleet, given, None))  # what first requests build is not measured
        for _ in range(given.repeats):
            for way, every in WAYS.items():
                with training(fleet, even, odd, every) as trainer:
                    rounds[way].append(asyncio.run(one_round(fleet, given, trainer)))
    finally:
        if fleet.stop() != 0:
            raise SystemExit(f"serve did not end well; see {fleet.log}")
    return rounds


def summed(rounds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians of each way, and what share of the tokens per second without updates is left."""
    rows = [{"way": way, **{key: statistics.median(one[key] for one in ones) for key in ones[0]}} for way, ones in rounds.items()]
    for row in rows:
        row["updates_per_second"] = row["updates"] / row["seconds"]
        row["of_none"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return [{key: value if isinstance(value, str) else round(value, 3) for key, value in row.items()} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, for reading."""
    lines = ["| updates | per second | tokens/s | of none | paused | latency s: median, 95 % |", "|---|" + "---|" * 5]
    for row in rows:
        rates = f"{row['updates_per_second']:.2f} | {row['tokens_per_second']:.0f} | {row['of_none']:.0%} | {row['paused']:.0%}"
        lines.append(f"| {row['way']} | {rates} | {row['latency_median']:.2f}, {row['latency_95']:.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, write the file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--caches", choices=("reset", "retain", "salt"), default="reset", help="the fleet's sync.caches")
    parser.add_argument("--in-flight", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128, help="that each request asks for")
    parser.add_argument("--each", type=int, default=2, help="requests one behind the other, in each of those in flight")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure(given, Path(folder))
    rows = summed(rounds)
    result = {
        "device": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "engines": 2, "caches": given.caches,
        "in_flight": given.in_flight, "tokens": given.tokens, "each": given.each, "repeats": given.repeats,
        "rows": rows, "rounds": rounds,
    }  # fmt: skip
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"in-flight-cpu-{given.caches}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
