"""A check from start to end: the inputs, a cold engine on the other weights, then the engine itself; one process each.

Not covered: engines in several processes, and two of them at a time on one device.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from weightsync.check.environment import ENGINE_ENV
from weightsync.check.inputs import require_checkpoint, require_same_kind
from weightsync.check.probe import STRICT_IS_SET, Job
from weightsync.errors import DeadlineExceeded, EngineDied, UnsupportedEngine, WeightSyncError

#: vLLM's arguments where the caller says nothing else. On a GPU graphs are captured as vLLM would for serving.
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "cuda": {"skip_tokenizer_init": True, "enable_prefix_caching": False},
    "cpu": {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 64 << 20,
    },
}


def check(
    model: Path,
    other: Path | None = None,
    *,
    strict: bool = False,
    identity: bool = False,
    engine_args: Mapping[str, Any] | None = None,
    timeout_seconds: float = 1800.0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Start an engine on a checkpoint and find out whether it follows its weights.

    Args:
        model: folder of the weights to start on.
        other: folder of another set of weights of the same model; without it values are unproven.
        strict: take a repair of captured storage for a failure.
        identity: only send the engine its own weights, which must change no slot and no answer; without `other`.
        engine_args: vLLM's, over `ENGINE_ARGS`.
        timeout_seconds: for each engine.
        say: is told what is being done.

    Returns:
        The report, as `probe` describes it; `ok` says whether there are no failures.

    Raises:
        ConfigError: a folder is not what it should be; no engine was started.
        WeightSyncError: what the worker, or vLLM, said.
    """
    require_checkpoint(model, "--model")
    if other is not None:
        require_same_kind(model, other)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = {**ENGINE_ARGS[device], **(engine_args or {})}
    with tempfile.TemporaryDirectory(prefix="weightsync-check-", ignore_cleanup_errors=True) as scratch:
        work = Path(scratch)
        folders = str(model.resolve()), str(other.resolve()) if other else ""
        digests = str(work / "digests.json")
        if other is not None:
            say(f"a cold engine on {other}")
            plain = {key: value for key, value in arguments.items() if key != "worker_extension_cls"}
            _process(Job("cold", folders[1], "", digests, str(work / "cold.json"), device, plain), work, timeout_seconds)
        say(f"the engine on {model}")
        report = _process(
            Job("warm", *folders, digests, str(work / "warm.json"), device, arguments, strict, identity), work, timeout_seconds
        )
    asked = {"model": str(model), "other": str(other) if other else None, "identity_alone": identity, "device": device}
    return {**asked, "ok": not report["failures"], **report}


def require_ok(report: Mapping[str, Any]) -> None:
    """Let a report without failures pass.

    Raises:
        UnsupportedEngine: there are failures; says that the engine must not serve.
    """
    if report["failures"]:
        only_strict = all(failure.endswith(STRICT_IS_SET) for failure in report["failures"])
        raise UnsupportedEngine(
            f"this engine does not follow its weights{' by itself' * only_strict}: {'; '.join(report['failures'])}",
            hint="Every update repairs it, which strict takes for a failure; without strict the contract holds"
            if only_strict
            else "An engine of this model must not serve behind weight updates: it would answer from old values without an error",
            names=list(report.get("proof", {}).get("differing", ())),
        )


def _process(job: Job, work: Path, timeout_seconds: float) -> dict[str, Any]:
    """One engine's process to its end; its report."""
    path, log = work / f"{job.task}.job", work / f"{job.task}.log"
    job.dump(path)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "weightsync.check.probe", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **ENGINE_ENV[job.device]},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"the {job.task} engine on {job.model} took more than {timeout_seconds:g} s{_last(log)}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has started goes with it, also after Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    try:
        report: dict[str, Any] = json.loads(Path(job.out).read_text())
    except (OSError, ValueError):
        raise EngineDied(
            f"the {job.task} engine on {job.model} ended with code {code} and no report{_last(log)}", retryable=False
        ) from None
    if "error" in report:
        raise WeightSyncError.from_dict(report["error"])
    return report


def _last(log: Path) -> str:
    """The last lines of a log, as the end of a sentence."""
    lines = [line.strip() for line in log.read_bytes()[-20_000:].decode(errors="replace").splitlines() if line.strip()]
    return f"; it last said: {' / '.join(lines[-3:])[:800]}" if lines else ""
