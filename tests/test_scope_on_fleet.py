"""Partial updates over a real fleet of two engines: versions, bases, an engine that misses one, and `push --scope`.

Not covered: kinds of models (`test_scope_on_vllm.py`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fleets
from tests.fleets import Fleet, answers, order_fault
from tests.test_scope_on_vllm import mixed, within
from weightsync.demo.cold import ColdEngine
from weightsync.errors import BaseRefused, ManifestRefused, UpdateFailed
from weightsync.protocol import EngineState

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCOPE = ["model.layers.0.*", "lm_head.weight"]


def test_partial_updates_of_a_fleet(fleet: Fleet, fault: Path, tensors: Any, checkpoint: Any, cold: Any, tmp_path: Path) -> None:
    first, second = tensors("qwen3", 1), tensors("qwen3", 2)
    folder = mixed(tmp_path / "mixed", checkpoint("qwen3", 1), checkpoint("qwen3", 2), tuple(SCOPE))
    with ColdEngine() as engine:
        made = engine.outputs(folder, fleets.PROMPTS, fleets.MAX_TOKENS, fleets.ENGINE_ARGS)
    mixture = made["tokens"], made["logprobs"]
    with fleet.client(bucket_bytes=60_000) as sync:
        base = sync.sync_weights(first).version
        report = sync.sync_weights(second, scope=SCOPE, base_version=base)
        assert (report.version, report.tensors) == (base + 1, len(within(second, tuple(SCOPE))))
        assert {verdict.checks["stored"] + verdict.checks["stored_unchecked"] for verdict in report.verdicts} == {report.tensors}
        assert answers(sync, 0) == answers(sync, 1) == mixture
        with pytest.raises(BaseRefused, match=f"builds on version {base}, and the fleet holds version {base + 1}"):
            sync.sync_weights(second, scope=SCOPE, base_version=base)
        with pytest.raises(ManifestRefused, match="a layer is loaded whole"):
            sync.sync_weights(second, scope=["*.q_proj.weight"])

        command = ["push", str(checkpoint("qwen3", 1)), f"--base-version={base + 1}", *(f"--scope={pattern}" for pattern in SCOPE)]
        done = _run(fleet, tmp_path, *command)
        assert f"version {base + 2}: {report.tensors} tensors" in done.stdout, done.stderr
        assert answers(sync, 0) == answers(sync, 1) == cold("qwen3", 1)

        # One engine fails it twice and goes back: it has missed the version, and takes no partial update before a complete one.
        order_fault(fault, 2, engine=1)
        with pytest.raises(UpdateFailed):
            sync.sync_weights(second, scope=SCOPE)
        assert answers(sync, 0) == mixture and answers(sync, 1) == cold("qwen3", 1)
        assert [(e.state, e.version) for e in sync.engines()] == [(EngineState.SERVING, base + 3), (EngineState.SERVING, base + 2)]
        with pytest.raises(BaseRefused, match=rf"engine 1 is serving with version {base + 2} .* builds on version {base + 3}") as caught:
            sync.sync_weights(second, scope=SCOPE)
        assert caught.value.engine == 1
        sync.sync_weights(first)
        sync.sync_weights(second, scope=SCOPE)
        assert answers(sync, 0) == answers(sync, 1) == mixture
        sync.sync_weights(first)


def _run(fleet: Fleet, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    token = folder / "token"
    token.write_text(fleet.token)
    command = [sys.executable, "-m", "weightsync.cli", *arguments, f"--url={fleet.url}", f"--token-file={token}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
