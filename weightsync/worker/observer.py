"""A worker of a vLLM that nobody has proved, when it is configured to be observed: it seals, reports, and touches nothing.

Not covered: a vLLM so different that this package can't be imported in it; its engines don't start.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from weightsync.errors import UnsupportedEngine
from weightsync.protocol import ContractReport, WorkerReport
from weightsync.worker import guard, vllm_compat


class Observer:
    """Stands where an `Applier` would.

    Args:
        model: the live model, after graphs were captured.
        runner: vLLM's model runner.
        vllm_config: the engine's configuration.
        device: the worker's device.
        rank: rank within the engine.
        why: what has not been proved.
    """

    wrote = False

    def __init__(
        self, model: torch.nn.Module, runner: Any, vllm_config: Any, device: torch.device, rank: int, why: UnsupportedEngine
    ) -> None:
        self.rank, self._why = rank, why
        self._guard = guard.Guard(model, runner, device, graphs=vllm_compat.captures_graphs(vllm_config))

    def describe(self, verify_stored: bool = False, carried: bool = False) -> WorkerReport:
        """What was sealed at the start."""
        return WorkerReport(self.rank, "", "none", seconds=self._guard.sealed.seconds, checks=dict(self._guard.sealed.counts))

    report = describe

    def contract(self) -> ContractReport:
        """What was sealed."""
        return self._guard.report()

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedEngine(
            f"this engine is only observed: {self._why.message}",
            hint="Install a proved vLLM, and set engine.unknown_vllm back to refuse",
        )

    begin = apply = verify = keep = rollback = abort = check = fall_asleep = woken = stay_awake = _refuse
