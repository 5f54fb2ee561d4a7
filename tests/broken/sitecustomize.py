"""Faults on order in a real engine's worker: this folder on PYTHONPATH, and FAULT_FILE with what is to fail.

The file has JSON: `engine` (ordinal), `rank` of the worker in it, `step` (`apply`, `verify`, `either` or `check`; or `poke` and `rebind`,
behind which the proof has passed, and weights change that nobody has sent: in place, or by another tensor, which captured graphs do not
read), `at` (tensors that are loaded before it fails; for a check the parameter in which a bit is flipped before it is read) and `times`,
which each fault counts down. Nothing fails while there is no file.

Not covered: faults outside a worker.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

TARGET = "weightsync.worker.applier"
SAID = "a fault made for a test"


def due(applier: Any, step: str) -> dict[str, Any] | None:
    """The fault that this step of this worker must have now."""
    file = Path(os.environ["FAULT_FILE"])
    try:
        fault: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    if fault["times"] < 1 or fault["step"] not in (step, "either") or applier._receiver.order.engine != fault["engine"]:
        return None
    if applier.rank != fault["rank"]:
        return None
    part = file.with_suffix(".part")  # other workers read it at any moment
    part.write_text(json.dumps(fault | {"times": fault["times"] - 1}))
    part.replace(file)
    return fault


class Broken:
    """An update whose loading fails after some tensors."""

    def __init__(self, incoming: Any, at: int) -> None:
        self._incoming, self._at = incoming, at
        self.manifest, self.load_map = incoming.manifest, incoming.load_map

    def stream(self, taken: list[str]) -> Iterator[tuple[str, Any]]:
        for index, pair in enumerate(self._incoming.stream(taken)):
            if index == self._at:
                raise RuntimeError(SAID)
            yield pair


def poke(model: Any, *, in_place: bool) -> None:
    """Give the last norm other weights."""
    import torch

    weight = next(parameter for name, parameter in model.named_parameters() if name.endswith("model.norm.weight"))
    other = weight.detach() * torch.linspace(-2, 2, weight.numel(), dtype=weight.dtype, device=weight.device)
    if in_place:
        weight.data.copy_(other)
    else:
        weight.data = other


def break_(module: Any) -> None:
    """Put the faults around the applier's steps."""
    import torch  # not before: every process of an engine loads this file

    applier = module.Applier
    stock_load, stock_prove, stock_check = applier._load, applier._prove, applier.check

    def load(self: Any, incoming: Any, *plan_key: str) -> Any:
        fault = due(self, "apply")
        return stock_load(self, incoming, *plan_key) if fault is None else stock_load(self, Broken(incoming, fault["at"]))

    def prove(self: Any) -> Any:
        from weightsync.errors import VerdictNotOk

        if due(self, "verify"):
            return VerdictNotOk(SAID)
        found = stock_prove(self)
        for step in ("poke", "rebind"):
            if due(self, step):
                poke(self.model, in_place=step == "poke")
        return found

    def check(self: Any, anew: bool) -> Any:
        if anew and (fault := due(self, "check")):
            list(self.model.parameters())[fault["at"]].view(-1)[:1].view(torch.uint8)[0] ^= 1
        return stock_check(self, anew)

    applier._load, applier._prove, applier.check = load, prove, check


class Finder(importlib.abc.MetaPathFinder):
    """Breaks one module when it has been imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        stock = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            stock(module)
            break_(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


if os.environ.get("FAULT_FILE"):
    sys.meta_path.insert(0, Finder())
