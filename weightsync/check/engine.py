"""An engine in this process, and a trainer beside it in a thread: updates go the whole way, over gloo.

Whoever calls this has set `environment.ENGINE_ENV` before vLLM was imported.

Not covered: NCCL, several workers.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from weightsync.client.sender import Sender
from weightsync.client.source import offer
from weightsync.codec import encode
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
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
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._store = host_store("127.0.0.1", _DEADLINE_SECONDS)
        self._info = CommunicatorInfo("127.0.0.1", self._store.port, 1, 2, {"0": 1}, "gloo")
        self._communicator: Any = None
        self._version = 0
        self._require(self._call("describe"), "none")

    def sync(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """One update, to its verdict.

        Returns:
            The worker's last report.

        Raises:
            RuntimeError: the worker or the sender failed.
        """
        self._version += 1
        update, offered = f"u-{self._version}", offer(tensors)
        plan = plan_buckets(offered.manifest, _BUCKET_BYTES)
        request = UpdateRequest(
            update, "trainer", self._version, offered.manifest, _BUCKET_BYTES, plan.hash, _DEADLINE_SECONDS, "gloo", torch.__version__
        )
        order = BeginOrder(request, self._info, 0, 1, _DEADLINE_SECONDS)
        self._require(self._call("begin", encode(order)), "receiving", "staged")
        sent: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: sent.append(self._send(offered, plan)), daemon=True)
        thread.start()
        report = self._call("poll")
        while report["state"] == "receiving":
            if sent and sent[0] is not None:
                raise RuntimeError(f"sending failed: {sent[0]}")
            time.sleep(0.01)
            report = self._call("poll")
        thread.join(_DEADLINE_SECONDS)
        self._require(report, "staged")
        self._require(self._call("apply", update), "applied")
        return self._require(self._call("verdict", update), "verified")

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
            error = report["error"] or {}
            checks = {key: count for key, count in report["checks"].items() if count}
            raise RuntimeError(f"{error.get('code', report['state'])}: {error.get('message', 'no error')} (checks: {checks})")
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
