"""The files in `examples/` as a user runs them, against engines that run already (`serving.py` can start its own).

`fsdp2.py`: `test_fsdp2_example.py`; `trl_grpo.py`: `test_trl.py`; `quickstart.py`: `test_main_job.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleets import Fleet

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent
STEPS = 6


@pytest.fixture
def run(fleet: Fleet, checkpoint: Callable[[str, int], Path], tensors: Any, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`run(name)`: what an example prints."""
    (tmp_path / "token").write_text(fleet.token)

    def call(name: str) -> str:
        given = (str(checkpoint("qwen3", 1)), fleet.url, str(tmp_path / "token"))
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": paths, "STEPS": str(STEPS), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "examples" / name), *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return done.stdout

    yield call
    with fleet.client() as client:
        client.sync_weights(tensors("qwen3", 1))  # as other tests found it


def numbers(pattern: str, said: str) -> list[float]:
    found = [float(value) for value in re.findall(pattern, said)]
    assert found, said
    return found


def test_grpo_from_scratch_learns_and_draws(run: Callable[..., str], tmp_path: Path) -> None:
    said = run("grpo_from_scratch.py")
    versions = numbers(r"version (\d+)", said)
    assert versions == [versions[0] + step for step in range(STEPS)]
    assert max(numbers(r"gap ([\d.]+)", said)) < 0.3, said
    assert (tmp_path / "grpo_from_scratch.png").stat().st_size > 5000


def test_async_grpo_trains_on_samples_of_bounded_age(run: Callable[..., str]) -> None:
    said = run("async_grpo.py")
    assert len(numbers(r"step (\d+):", said)) == STEPS
    ages = numbers(r"samples (\d+) version", said)
    assert max(ages) <= 2 and max(ages) >= 1, said


def test_adapters_are_trained_and_refused_unmerged(run: Callable[..., str]) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    said = run("peft_lora.py")
    assert re.search(r"refused as it is: .*adapter", said), said
    assert numbers(r"moved by up to ([\d.]+)", said)[0] > 0.01
    assert max(numbers(r"gap ([\d.]+)", said)) < 0.3, said


def test_a_policy_is_sent_without_its_value_model(run: Callable[..., str]) -> None:
    said = run("ppo_value_model.py")
    assert re.search(r"refused as one module: .*prefix 'policy\.'", said), said
    assert len(numbers(r"step (\d+): version", said)) == STEPS


def test_a_trainer_outside_of_ray_starts_again(run: Callable[..., str]) -> None:
    said = run("external_trainer.py")
    assert "takes it back" in said and "with a wrong token: " in said, said
    assert "loaded: torch, httpx" in said, said


def test_the_engines_answer_openais_client(run: Callable[..., str]) -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    said = run("openai_client.py")
    assert len(set(re.findall(r"version (\d+) says \[[\d, ]+\]", said))) == 1 and len(said.splitlines()) == 2, said


@pytest.mark.timeout(300)
def test_an_example_without_arguments_serves_a_model_of_its_own() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "examples/quickstart.py"], capture_output=True, text=True, timeout=280, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"version 1: .*\ntokens \[.*\] from version 1", done.stdout), done.stdout
