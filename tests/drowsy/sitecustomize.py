"""Gives engines on a CPU a sleep mode, where a test has put this folder on the path: Python imports it in every process.

A worker's tensors stand for the memory that vLLM gives back: files in SLEEP_FOLDER say which part is gone (`weights`, `kv`), and a deep
sleep leaves all of them with every bit set, but for the KV cache. What `weightsync` does
about it is its own.

Not covered: memory that is really given back.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def gone(part: str) -> Path:
    return Path(os.environ["SLEEP_FOLDER"]) / part


def give_workers(module: Any) -> None:
    """The worker's memory, by the model's tensors."""
    import torch

    from weightsync.check.contents import scratch_rule
    from weightsync.storage.blocks import Span
    from weightsync.storage.owners import walk

    stock_fall = module.Applier.fall_asleep

    def storages(model: Any) -> dict[int, torch.Tensor]:
        found = {}
        for path, tensor in walk(model, "model").tensors.items():
            if not scratch_rule(path) and tensor.device.type == "cpu" and (held := tensor.untyped_storage()).nbytes():
                found[held.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(held, 0, (held.nbytes(),), (1,))
        return found

    class Memory:
        def __init__(self, applier: Any) -> None:
            self._applier = applier

        def asleep(self) -> bool:
            return gone("weights").exists() or gone("kv").exists()

        def weights_asleep(self) -> bool:
            return gone("weights").exists()

        def blocks(self) -> list[Span]:
            return [Span(at, data.nbytes, data.nbytes, (3, 0), 0, True) for at, data in storages(self._applier.model).items()]

        def read(self, address: int, into: torch.Tensor) -> None:
            into.copy_(storages(self._applier.model)[address])

        def write(self, address: int, data: torch.Tensor) -> None:
            storages(self._applier.model)[address].copy_(data)

    def fall_asleep(self: Any, level: int) -> Any:
        self._sleep._memory = Memory(self)
        report = stock_fall(self, level)
        if level == 2:
            for data in storages(self.model).values():
                data.fill_(255)
        return report

    module.Applier.fall_asleep = fall_asleep


def give_engines(module: Any) -> None:
    """The engine's calls."""

    async def sleep(self: Any, level: int) -> None:
        await self.end_requests()
        gone("weights").touch()
        gone("kv").touch()

    async def wake_weights(self: Any) -> None:
        gone("weights").unlink()

    async def wake_rest(self: Any) -> None:
        gone("kv").unlink()
        await self.resume()

    engine = module.Engine
    engine.check_sleep, engine.sleep, engine.wake_weights, engine.wake_rest = lambda self: None, sleep, wake_weights, wake_rest


TARGETS: dict[str, Callable[[ModuleType], None]] = {"weightsync.worker.applier": give_workers, "weightsync.fleet.vllm_api": give_engines}


class Finder(importlib.abc.MetaPathFinder):
    """Changes a module when it has been imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name not in TARGETS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        stock = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            stock(module)
            TARGETS[name](module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


if os.environ.get("SLEEP_FOLDER"):
    sys.meta_path.insert(0, Finder())
