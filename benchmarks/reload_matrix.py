"""Do engines hold what a cold engine would, after updates? Stock vLLM against weightsync, row by row.

    python3 -m benchmarks.reload_matrix --rows moe-fp8-channel,gpt-oss-mxfp4 --jobs 8
    python3 -m benchmarks.reload_matrix --device cpu --rows qwen3-moe
    python3 -m benchmarks.reload_matrix --table benchmarks/results/reload-matrix-h200.json --readme README.md

For each row: small random checkpoints A and B (two seeds), a cold engine of each,
and two warm engines, one with vLLM's own reload from disk and one with weightsync,
that go A → A → B → B under allocator pressure → A (ours once more, with scratch
overwritten). Each engine is a process of its
own (`matrix_worker`), so a crash is a result like others. `matrix_judge` says what
*right* means. Rows are merged into the file as they finish; other rows in it stay.

The first cold engine of a row runs alone and fills the row's own cache of compiled
code; the others share it, so that all run the same kernels. Triton's is one for the run.

Exit code 0 when every row asked for has a result, whatever its verdict.

Not covered: several GPUs, engines in several processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import matrix_judge
from benchmarks.matrix_judge import Outcome
from benchmarks.matrix_rows import ROWS, Row
from benchmarks.matrix_worker import MODEL, Job, dump, weights_at_start
from weightsync.check.environment import ENGINE_ENV

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PROMPTS = [[1, 5, 9, 300], [7, 7, 7], [100, 200, 300, 400, 500, 11, 12, 13]]
MAX_TOKENS = 24
#: On which the mean loss is taken; of tokens that every row's vocabulary has.
STREAMS = [random.Random(seed).choices(range(3, 500), k=128) for seed in range(4)]


class Matrix:
    """One run of the command.

    Args:
        options: from the command line.
        work: folder for checkpoints, caches, jobs and logs.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.slots = threading.BoundedSemaphore(options.jobs)
        self.lock = threading.Lock()
        self.rows: list[dict[str, Any]] = []
        self.began = time.monotonic()

    def run(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """All rows, at most `--jobs` processes at a time; returns those that have a result."""
        # No more rows at a time than processes: those begun come to their end before others begin.
        with ThreadPoolExecutor(max(1, min(len(rows), self.options.jobs))) as pool:
            for future in [pool.submit(self._row, row) for row in rows]:
                try:
                    future.result()
                except Exception as exc:  # a fault of one row, a checkpoint that can't be written, must not end the others
                    self._say(f"no result: {type(exc).__name__}: {exc}")
        return self.rows

    def _row(self, row: Row) -> None:
        folder = self.work / row.name
        with self.slots:
            folders = {letter: str(row.build(folder / letter, self.options.seed + n)) for n, letter in enumerate("ab")}
        modes = ["cold-b", *(["stock"] if self.options.stock else []), "weightsync"]
        modes += [f"cold-{letter}-{n}" for n in range(2, self.options.colds + 1) for letter in "ab"]
        outcomes = {"cold-a": self._process(row, "cold-a", folders)}
        if not outcomes["cold-a"].error:
            with ThreadPoolExecutor(len(modes)) as pool:
                outcomes |= zip(modes, pool.map(lambda mode: self._process(row, mode, folders), modes), strict=True)
        judged = matrix_judge.judge_row(row.name, row.about, self.options.seed, outcomes)
        if judged is None:
            self._say(f"{row.name}: no result, a cold engine timed out")
            return
        judged |= {"engine_args": row.arguments(self.options.device), "env": dict(row.env)}
        with self.lock:
            self.rows.append(judged)
            matrix_judge.merge_into(self._out(judged), judged, list(ROWS[self.options.device]))
        stock = judged.get("stock", {})
        self._say(f"{row.name}: weightsync {judged['verdict']}, stock {stock.get('verdict', 'not run')}")
        for mode in ("stock", "weightsync"):
            for reason in judged.get(mode, {}).get("reasons", [])[:3]:
                self._say(f"    {mode}: {reason}")
        if judged["verdict"] == "blocked":
            self._say(f"    {judged['evidence']['error']}")
        if not self.options.keep:
            for path in folders.values():
                shutil.rmtree(path, ignore_errors=True)

    def _out(self, row: dict[str, Any]) -> Path:
        if self.options.out:
            return Path(self.options.out)
        gpu = re.sub(r"[^a-z0-9]+", "-", row["versions"].get("gpu", self.options.device).lower().removeprefix("nvidia ")).strip("-")
        return RESULTS / f"reload-matrix-{gpu}.json"

    def _process(self, row: Row, mode: str, folders: dict[str, str]) -> Outcome:
        """One engine, from start to end; a process that hangs is killed at its deadline."""
        base = self.work / row.name / mode
        log, out, job = (base.with_suffix(suffix) for suffix in (".log", ".json", ".job"))
        arguments = row.arguments(self.options.device)
        dump(Job(row.name, mode, self.options.device, folders, arguments, PROMPTS, MAX_TOKENS, str(out), STREAMS, dict(row.env)), job)
        # vLLM has the name of the model in the key of its compile cache: all engines of a row start on the same one.
        place = self.work / row.name / "in" / mode
        place.mkdir(parents=True, exist_ok=True)
        (place / MODEL).unlink(missing_ok=True)
        (place / MODEL).symlink_to(folders[weights_at_start(mode)])
        cache = self.work / row.name / "cache"
        caches = {"VLLM_CACHE_ROOT": str(cache), "TRITON_CACHE_DIR": str(self.work / "triton")}
        env = {**os.environ, **ENGINE_ENV[self.options.device], **row.env, **caches}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        with self.slots, log.open("wb") as errors:
            began = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.matrix_worker", str(job)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=env,
                cwd=place,
                start_new_session=True,
            )
            timed_out = False
            try:
                code = process.wait(self.options.timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its compilers too: the group is this process's own
                code = process.wait()
            record = None
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(out.read_text())
        outcome = Outcome(record, code, timed_out, _last_lines(log))
        self._say(f"{row.name} {mode}: {outcome.error or 'done'} ({time.monotonic() - began:.0f} s)")
        return outcome

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)


def _last_lines(log: Path, count: int = 25) -> tuple[str, ...]:
    text = log.read_bytes()[-20_000:].decode(errors="replace")
    return tuple(line[:300] for line in text.splitlines()[-count:])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.reload_matrix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="", help="names, with commas between them; all rows of the device when left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
    parser.add_argument("--seed", type=int, default=1, help="seed of A; B has the next one")
    parser.add_argument("--colds", type=int, default=2, help="cold engines for each of A and B; the warm ones start cold as well")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds that one engine's process may take")
    parser.add_argument("--out", default="", help="file of results; by default benchmarks/results/reload-matrix-<gpu>.json")
    parser.add_argument("--work", default="", help="folder for checkpoints, logs and caches; a temporary one by default")
    parser.add_argument("--keep", action="store_true", help="leave checkpoints in --work")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="leave vLLM's own reload out")
    parser.add_argument("--table", metavar="FILE", help="print a file of results as a table, and end")
    parser.add_argument("--readme", metavar="FILE", help="with --table: put the table into this file, between its marks")
    parser.add_argument("--list", action="store_true", help="print the rows, and end")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    options = parse(arguments)
    if options.table:
        made = matrix_judge.table(json.loads(Path(options.table).read_text()))
        if options.readme:
            Path(options.readme).write_text(matrix_judge.put_table(Path(options.readme).read_text(), made))
        else:
            print(made)
        return 0
    known = ROWS["cuda"] | ROWS["cpu"]
    names = [name for name in options.rows.split(",") if name] or list(ROWS[options.device])
    if options.list:
        print("\n".join(f"{row.name:20} {row.about}" for row in ROWS[options.device].values()))
        return 0
    if unknown := [name for name in names if name not in known]:
        print(f"no such row: {', '.join(unknown)}; rows are {', '.join(known)}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        work = Path(options.work or stack.enter_context(tempfile.TemporaryDirectory(prefix="reload-matrix-", ignore_cleanup_errors=True)))
        for name in names:
            (work / name).mkdir(parents=True, exist_ok=True)
        rows = Matrix(options, work.resolve()).run([known[name] for name in names])
    return 0 if len(rows) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
