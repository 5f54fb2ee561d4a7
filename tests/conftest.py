"""Fixtures shared by the tests: checkpoints, one cold engine as the oracle, one fleet of two engines.

Engines cost 15 to 25 s and 2 GB each, so those are made once per session, when
first asked for.
"""

from __future__ import annotations

import ast
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests out, what shares the fleet goes first, then other engines: these take longest."""
    twice = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if twice:  # of tests with one name pytest-xdist runs one
        raise pytest.UsageError(f"several tests are called {', '.join(twice)}")
    if os.environ.get("PYTEST_XDIST_WORKER"):
        engines = {item.path for item in items if item.get_closest_marker("engine")}
        items.sort(key=lambda item: (not _shares_fleet(item.path), item.path not in engines))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file goes to one process, with its fixtures, and all files that share the fleet to the same one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "the fleet's" if _shares_fleet(config.rootpath / file) else file

    return Scheduling(config, log)


@functools.cache
def _shares_fleet(path: Path) -> bool:
    """Whether a file's tests ask for `fleet` and it has none of its own."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return all(one.name != "fleet" for one in functions) and any(
        argument.arg == "fleet" for one in functions if one.name.startswith("test_") for argument in one.args.args
    )


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
