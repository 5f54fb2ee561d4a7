"""The RPC surface in every vLLM worker, and nothing else.

vLLM mixes this class into its worker (`worker_extension_cls`). Each call takes
and gives plain data, never raises and never waits: a worker RPC blocks the
whole engine while it runs, and an exception in one leaves other workers' answers
queued for the next. Receiving goes on in a thread of the worker.

Not covered: `apply` does run inside its RPC; the engine is paused then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weightsync.codec import decode, encode
from weightsync.errors import InternalError, UnknownVllm, WeightSyncError
from weightsync.protocol import BeginOrder, ContractAnswer, WorkerCheck, WorkerReport
from weightsync.storage import census
from weightsync.worker import tiles, vllm_compat
from weightsync.worker.applier import Applier
from weightsync.worker.observer import Observer

# vLLM imports this module in every worker before the model is loaded: no graph is captured unseen.
census.install()
tiles.ask()
vllm_compat.sleep_soon()  # before the worker makes its message queues


class WeightSyncExtension:
    """Methods are called by name through `collective_rpc`; all answers are plain data: a `WorkerReport`, or what it names."""

    def weightsync_describe(self, verify_stored: bool = False, carried: bool = False) -> dict[str, Any]:
        """Seal the model's storage and say what this worker is; called once, before the first update."""
        return self._weightsync_answer(lambda: self._weightsync().describe(verify_stored, carried))

    def weightsync_begin(self, order: dict[str, Any]) -> dict[str, Any]:
        """Admit an update and start the receiving thread."""
        return self._weightsync_answer(lambda: self._weightsync().begin(decode(BeginOrder, order)))

    def weightsync_poll(self) -> dict[str, Any]:
        """Where the update stands."""
        return self._weightsync_answer(lambda: self._weightsync().report())

    def weightsync_apply(self, update_id: str) -> dict[str, Any]:
        """Write the staged bytes into live storage."""
        return self._weightsync_answer(lambda: self._weightsync().apply(update_id))

    def weightsync_verdict(self, update_id: str) -> dict[str, Any]:
        """Prove what was applied."""
        return self._weightsync_answer(lambda: self._weightsync().verify(update_id))

    def weightsync_keep(self, update_id: str) -> dict[str, Any]:
        """Take note that the engine holds this update now."""
        return self._weightsync_answer(lambda: self._weightsync().keep(update_id))

    def weightsync_rollback(self, update_id: str) -> dict[str, Any]:
        """Load the update before this one; to be proved as it was."""
        return self._weightsync_answer(lambda: self._weightsync().rollback(update_id))

    def weightsync_abort(self, update_id: str) -> dict[str, Any]:
        """End an update."""
        return self._weightsync_answer(lambda: self._weightsync().abort(update_id))

    def weightsync_sleep(self, level: int) -> dict[str, Any]:
        """vLLM is about to put this worker to sleep."""
        return self._weightsync_answer(lambda: self._weightsync().fall_asleep(level))

    def weightsync_woken(self) -> dict[str, Any]:
        """It is awake again."""
        return self._weightsync_answer(lambda: self._weightsync().woken())

    def weightsync_stay_awake(self) -> dict[str, Any]:
        """The sleep that was prepared does not come."""
        return self._weightsync_answer(lambda: self._weightsync().stay_awake())

    def weightsync_sign(self, folder: str, number: int) -> dict[str, Any]:
        """A sign of life, in answer to this question. In a file too: the core passes no answer on before it has all."""
        rank = self._weightsync_rank()
        with contextlib.suppress(OSError):
            Path(folder, f"sign-{rank}").write_text(str(number))
        return {"rank": rank}

    def weightsync_contract(self) -> dict[str, Any]:
        """The storage contract, as it was sealed and as it fared since."""
        rank = self._weightsync_rank()
        try:
            answer = ContractAnswer(rank, self._weightsync().contract())
        except WeightSyncError as exc:
            answer = ContractAnswer(rank, error=exc.to_dict())
        except Exception as exc:
            answer = ContractAnswer(rank, error=InternalError(f"worker: {type(exc).__name__}: {exc}").to_dict())
        plain: dict[str, Any] = encode(answer)
        return plain

    def weightsync_check(self, anew: bool) -> dict[str, Any]:
        """Read some of the live storage again (`rereading`), from the start or on from where the last call ended."""
        try:
            found = self._weightsync().check(anew)
        except WeightSyncError as exc:
            found = WorkerCheck(self._weightsync_rank(), error=exc.to_dict())
        except Exception as exc:
            found = WorkerCheck(self._weightsync_rank(), error=InternalError(f"worker: {type(exc).__name__}: {exc}").to_dict())
        plain: dict[str, Any] = encode(found)
        return plain

    def _weightsync_rank(self) -> int:
        """Among all workers of the engine: vLLM's own rank begins at 0 in each of its data-parallel copies."""
        worker: Any = self
        parallel = worker.vllm_config.parallel_config
        copies_before = getattr(parallel, "data_parallel_index", 0)  # also asked in a vLLM that nobody knows, where nothing may raise
        return int(copies_before * parallel.world_size + worker.rank)

    def _weightsync(self) -> Applier | Observer:
        applier = getattr(self, "_weightsync_applier", None)
        if applier is None:
            worker: Any = self
            holder = worker.get_model(), worker.model_runner, worker.vllm_config, torch.device(worker.device), self._weightsync_rank()
            try:
                vllm_compat.require_supported()
                applier = Applier(*holder)
            except UnknownVllm as why:
                if vllm_compat.told(worker.vllm_config).get("unknown_vllm") != "observe":
                    raise
                applier = Observer(*holder, why)
            self._weightsync_applier = applier
        return applier

    def _weightsync_answer(self, call: Callable[[], WorkerReport]) -> dict[str, Any]:
        try:
            report = call()
        except WeightSyncError as exc:
            report = self._weightsync_failed(exc)
        except Exception as exc:
            report = self._weightsync_failed(InternalError(f"worker: {type(exc).__name__}: {exc}"))
        answer: dict[str, Any] = encode(report)
        return answer

    def _weightsync_failed(self, error: WeightSyncError) -> WorkerReport:
        applier: Applier | Observer | None = getattr(self, "_weightsync_applier", None)
        wrote = applier is not None and applier.wrote  # not its report, which may be what raised
        return WorkerReport(self._weightsync_rank(), error.update_id or "", "failed", error=error.to_dict(), wrote=wrote)
