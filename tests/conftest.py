"""Fixtures shared by the tests: checkpoints, one cold engine as the oracle, one fleet of two engines.

Engines cost 15 to 25 s and 2 GB each, so those are made once per session, when
first asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests out: a file goes to one of them, with its fixtures, and so does all that shares the fleet.

    Those with engines go first, as they take longest.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    shared = {path for path, own in files.items() if any(_takes_shared_fleet(item) for item in own)}
    for path, own in files.items():
        for item in own:
            item.add_marker(pytest.mark.xdist_group("fleet" if path in shared else str(path)))
    if os.environ.get("PYTEST_XDIST_WORKER"):
        order = {path: (path not in shared, not any(item.get_closest_marker("engine") for item in own)) for path, own in files.items()}
        items.sort(key=lambda item: order[item.path])


def _takes_shared_fleet(item: pytest.Item) -> bool:
    found = item._fixtureinfo.name2fixturedefs.get("fleet")
    return bool(found) and found[-1].scope == "session"  # the last is the nearest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """`checkpoint(kind, seed)`: the folder of a tiny random checkpoint, made once."""
    from tests import checkpoints

    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[str, int], Path] = {}

    def get(kind: str, seed: int) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = checkpoints.build(kind, root / f"{kind}-{seed}", seed)
        return made[kind, seed]

    return get


@pytest.fixture(scope="session")
def cold(checkpoint: Callable[[str, int], Path]) -> Iterator[Callable[[str, int], tuple[Any, Any]]]:
    """`cold(kind, seed)`: greedy tokens and log-probabilities of a freshly started engine."""
    from tests import fleets
    from weightsync.demo.cold import ColdEngine

    known: dict[tuple[str, int], tuple[Any, Any]] = {}
    with ColdEngine() as engine:

        def get(kind: str, seed: int) -> tuple[Any, Any]:
            if (kind, seed) not in known:
                result = engine.outputs(checkpoint(kind, seed), fleets.PROMPTS, fleets.MAX_TOKENS, fleets.ENGINE_ARGS)
                known[kind, seed] = result["tokens"], result["logprobs"]
            return known[kind, seed]

        yield get


@pytest.fixture(scope="session")
def tensors(checkpoint: Callable[[str, int], Path]) -> Callable[[str, int], dict[str, Any]]:
    """`tensors(kind, seed)`: a checkpoint's tensors by name."""
    from safetensors.torch import load_file

    return lambda kind, seed: load_file(checkpoint(kind, seed) / "model.safetensors")


@pytest.fixture(scope="session")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared fleet's workers look for what is to fail (`fleets.order_fault`)."""
    return tmp_path_factory.mktemp("fault") / "fault.json"


@pytest.fixture(scope="session")
def fleet(checkpoint: Callable[[str, int], Path], fault: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two engines of the untied dense kind, shared by the tests that leave it as it was: serving."""
    from tests.fleets import Fleet, with_faults

    flags = ["--sync.rollback=host", "--sync.verify_stored=true"]
    running = Fleet(checkpoint("qwen3", 1), tmp_path_factory.mktemp("fleet"), 2, flags, with_faults(fault)).ready()
    yield running
    assert running.stop() == 0
