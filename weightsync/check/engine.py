"""An engine in this process, and a trainer beside it in a thread: updates go the whole way, over gloo.

Whoever calls this has set `environment.ENGINE_ENV` before vLLM was imported.

Not covered: NCCL, several workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.client.sender import Sender
from weightsync.client.source import offer
from weightsync.codec import encode
from weightsync.errors import InternalError, TransportFailed, WeightSyncError
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.storage.contract import Contract
from weightsync.storage.pins import Pins
from weightsync.transport.communicator import Communicator
from weightsync.transport.packing import plan_buckets
from weightsync.transport.rendezvous import host_store

EXTENSION = "weightsync.worker.extension.WeightSyncExtension"
#: What an engine needs to be updated by weightsync, beside its other arguments.
OURS: dict[str, Any] = {"worker_extension_cls": EXTENSION, "weight_transfer_config": {"backend": "weightsync"}}

_DEADLINE_SECONDS = 120.0
_BUCKET_BYTES = 16 << 20


class Trainer:
    """Sends updates to the engine of the same process, as a trainer would.

    Args:
        llm: an engine with the worker extension.

    Attributes:
        sealed: the worker's report of its seal.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._store = host_store("127.0.0.1", _DEADLINE_SECONDS)
        self._info = CommunicatorInfo("127.0.0.1", self._store.port, 1, 2, {"0": 1}, "gloo")
        self._communicator: Any = None
        self._version = 0
        self.sealed = self._require(self._call("describe"), "none")

    def sync(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """One update, to its verdict, and the engine's word that it counts.

        Returns:
            The worker's report of the verdict.

        Raises:
            WeightSyncError: the worker's, with what it had counted in a note, or the sender's.
        """
        update = self.stage(tensors)
        verdict = self.apply(update)
        self.keep(update)
        return verdict

    def stage(self, tensors: dict[str, torch.Tensor], *, where: str = "auto", bucket_bytes: int = _BUCKET_BYTES) -> str:
        """The first part of `sync`: until the worker has all of the update beside the live weights.

        Args:
            where: `BeginOrder.stage`.

        Returns:
            The update's name.
        """
        self._version += 1
        update, offered = f"u-{self._version}", offer(tensors)
        plan = plan_buckets(offered.manifest, bucket_bytes)
        request = UpdateRequest(
            update, "trainer", self._version, offered.manifest, bucket_bytes, plan.hash, _DEADLINE_SECONDS, "gloo", torch.__version__
        )
        order = BeginOrder(request, self._info, 0, 1, _DEADLINE_SECONDS, stage=where)
        self._require(self._call("begin", encode(order)), "receiving", "staged")
        sent: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: sent.append(self._send(offered, plan)), daemon=True)
        thread.start()
        report = self._call("poll")
        while report["state"] == "receiving":
            if sent and sent[0] is not None:
                raise TransportFailed(f"sending failed: {sent[0]}") from sent[0]
            time.sleep(0.01)
            report = self._call("poll")
        thread.join(_DEADLINE_SECONDS)
        self._require(report, "staged")
        return update

    def apply(self, update: str) -> dict[str, Any]:
        """The second part: write a staged update and prove it; the worker's report."""
        self._require(self._call("apply", update), "applied")
        return self._require(self._call("verdict", update), "verified")

    def keep(self, update: str) -> None:
        """The last part: the update counts."""
        self._require(self._call("keep", update), "verified")

    def _send(self, offered: Any, plan: Any) -> BaseException | None:
        try:
            if self._communicator is None:
                self._communicator = Communicator(self._info, 0, torch.device("cpu"), _DEADLINE_SECONDS, _DEADLINE_SECONDS)
            deadline = time.monotonic() + _DEADLINE_SECONDS
            Sender(offered, plan, None).send(self._communicator, deadline, lambda: False, lambda: None)
        except Exception as exc:
            return exc
        return None

    def _call(self, name: str, *args: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._llm.collective_rpc(f"weightsync_{name}", args=args)[0]
        return answer

    def _require(self, report: dict[str, Any], *states: str) -> dict[str, Any]:
        if report["state"] not in states or report["error"]:
            unexpected = InternalError(f"the worker is in state {report['state']}, want {' or '.join(states)}").to_dict()
            error = WeightSyncError.from_dict(report["error"] or unexpected)
            error.add_note(f"checks: { {key: count for key, count in report['checks'].items() if count} }")
            raise error
        return report


def generate(llm: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Greedy continuations, one prompt at a time: the size of a batch may pick other kernels."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    tokens, logprobs = [], []
    for prompt in prompts:
        output = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)[0].outputs[0]
        tokens.append([int(token) for token in output.token_ids])
        logprobs.append([float(at[token].logprob) for at, token in zip(output.logprobs, output.token_ids, strict=True)])
    return {"tokens": tokens, "logprobs": logprobs}


def mean_loss(llm: Any, streams: Sequence[Sequence[int]]) -> float:
    """Mean negative log-probability per token of fixed streams, nats; its exponential is the perplexity."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    losses: list[float] = []
    for stream in streams:
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=list(stream))], params, use_tqdm=False)
        losses += [-float(at[token].logprob) for at, token in zip(output.prompt_logprobs, stream, strict=True) if at]  # none at the first
    return sum(losses) / len(losses)


def contract_report(llm: Any) -> dict[str, Any]:
    """The contract of the engine's first worker, as plain data. After `Trainer` was made.

    Raises:
        WeightSyncError: the worker's.
    """
    answer = llm.collective_rpc("weightsync_contract")[0]
    if answer["error"]:
        raise WeightSyncError.from_dict(answer["error"])
    report: dict[str, Any] = answer["contract"]
    return report


def sealed_memory(llm: Any) -> tuple[Contract, Pins]:
    """The contract that the worker of this process has sealed, and what it holds for it. After `Trainer` was made."""
    guard = llm.collective_rpc(lambda worker: worker._weightsync()._guard)[0]
    return guard.contract, guard._adopter.pins
