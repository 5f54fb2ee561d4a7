"""One worker and its trainer in one process: updates go step by step, and a fault can be put in at each.

`Bench` drives the RPC surface of a worker as the controller and a trainer do. What comes of
an update is a worker's report with `at` beside it: the step at which it ended. A bench also
knows what must be as it was behind any update, and what an update must not leave behind.

Not covered: a trainer in a process of its own that is killed (the fleet's tests have one), several workers, NCCL.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync.client.sender import Sender
from weightsync.client.source import Offer, offer
from weightsync.codec import encode
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.transport import communicator as communicator_module
from weightsync.transport.communicator import Communicator
from weightsync.transport.packing import BucketPlan, plan_buckets
from weightsync.worker import loadmap

Tensors = dict[str, torch.Tensor]
Call = Callable[..., dict[str, Any]]
#: Sends an offer, by a bucket plan, on a communicator, until the last argument says to stop.
Send = Callable[[Offer, BucketPlan, Communicator, Callable[[], bool]], None]

CPU = torch.device("cpu")
BUCKET = 64 << 10
SECONDS = 30.0
#: How long the controller waits for an update whose trainer is gone, before it aborts.
_PATIENCE = 1.0


class Gone(Exception):
    """The trainer left without a word."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        offered: what the trainer offers, made from a complete set.
        admitted: admission lets everything pass, so that what stands behind it is asked.
        sender: how the trainer sends.
        worker: what goes wrong in the worker while this lasts; is given the bench and the complete set.
    """

    offered: Callable[[Tensors], Tensors] = dict
    admitted: bool = False
    sender: Send = field(default=lambda *to: send(*to))
    worker: Callable[[Bench, Tensors], AbstractContextManager[Any]] = field(default=lambda bench, tensors: nullcontext())


def send(offered: Offer, plan: BucketPlan, wire: Any, cancelled: Callable[[], bool], kind: type[Sender] = Sender, told: Any = None) -> None:
    """As a trainer does; `told` is called with the bytes sent and those in all."""
    kind(offered, plan, told).send(wire, time.monotonic() + SECONDS, cancelled, lambda: None)


class Bench:
    """One worker, and a trainer beside it in a thread.

    Args:
        call: calls one of the worker's methods by name.
        worker: vLLM's worker, with our extension.
    """

    def __init__(self, call: Call, worker: Any) -> None:
        self._call = call
        report = call("weightsync_describe")
        assert report["error"] is None, report["error"]
        self.applier = worker._weightsync()
        self.model = self.applier.model
        self._store, self._generation, self._updates = dist.HashStore(), 1, 0
        self._wire: Communicator | None = None
        self._staging: list[StorageWeakRef] = []
        self.structure = structure(self.model)

    def call(self, name: str, *args: Any) -> dict[str, Any]:
        return self._call(f"weightsync_{name}", *args)

    def update(self, tensors: Mapping[str, torch.Tensor], fault: Fault | None = None) -> dict[str, Any]:
        """One update, to its verdict or its end; how far it came (`at`), and the worker's last report."""
        report = self._update(dict(tensors), fault or Fault())
        if report["state"] not in ("verified", "refused"):
            # As the controller does with what did not commit.
            aborted = self.call("abort", report["update_id"])
            report["wrote"] = aborted["wrote"]
            assert report["at"] == "receive" or aborted["error"] == report["error"]
        return report

    def begin(self, offered: Offer, plan: BucketPlan) -> dict[str, Any]:
        """Ask the worker to take an update, with an eye on the memory that it takes to stage it."""
        self._updates += 1
        update = f"u-{self._updates}"
        request = UpdateRequest(update, "trainer", self._updates, offered.manifest, BUCKET, plan.hash, SECONDS, "gloo", torch.__version__)
        made: list[torch.Tensor] = []
        empty = torch.empty
        with patch.object(torch, "empty", lambda *size, **how: made.append(empty(*size, **how)) or made[-1]):  # type: ignore[func-returns-value]
            report = self.call("begin", encode(BeginOrder(request, self._info, 0, 1, SECONDS)))
        staging = [tensor for tensor in made if tensor.nbytes >= plan.stream_bytes]
        assert staging or report["state"] == "failed", "an update that is received is staged"
        self._staging += [StorageWeakRef(tensor.untyped_storage()) for tensor in staging]
        return {**report, "update_id": update}

    def _update(self, tensors: Tensors, fault: Fault) -> dict[str, Any]:
        offered = offer(fault.offered(tensors))
        plan = plan_buckets(offered.manifest, BUCKET)
        with patch.object(loadmap, "admit", lambda manifest, base, *_, **__: base) if fault.admitted else nullcontext():
            report = self.begin(offered, plan)
        if report["state"] == "failed":
            return {**report, "at": "begin", "state": "refused"}
        update = report["update_id"]
        sending = self.send(offered, plan, fault)
        report = self.received(sending)
        if report["state"] != "staged" or sending.gone:
            self.leave()
            return {**report, "at": "receive"}
        with fault.worker(self, tensors):
            for at, state in (("apply", "applied"), ("verdict", "verified")):
                report = self.call(at, update)
                if report["state"] != state:
                    break
        return {**report, "at": at}

    def send(self, offered: Offer, plan: BucketPlan, fault: Fault) -> Sending:
        return Sending(lambda cancelled: fault.sender(offered, plan, self._connected(), cancelled), self.leave)

    def received(self, sending: Sending) -> dict[str, Any]:
        """The worker's report when it receives no more, or when its trainer has been gone for long enough."""
        until = 0.0
        while (report := self.call("poll"))["state"] == "receiving":
            until = until or (time.monotonic() + _PATIENCE if sending.gone else 0.0)
            if until and time.monotonic() > until:
                break
            time.sleep(0.005)
        if report["state"] != "staged":
            sending.cancelled.set()  # as a trainer that is told
        sending.thread.join(SECONDS)
        return report

    @property
    def _info(self) -> CommunicatorInfo:
        return CommunicatorInfo("127.0.0.1", 1, self._generation, 2, {"0": 1}, "gloo")

    def _connected(self) -> Communicator:
        if self._wire is None or not self._wire.open:
            self._wire = Communicator(self._info, 0, CPU, SECONDS, SECONDS)
        return self._wire

    def leave(self) -> None:
        """The trainer closes its end; the next update meets in a new generation."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
            self._generation += 1

    @contextlib.contextmanager
    def meeting_here(self) -> Iterator[None]:
        """Trainer and worker are in one process and need no port to meet; torch's TCP client would ask a name server."""
        with patch.object(communicator_module, "join_store", lambda info, _: dist.PrefixStore(str(info.generation), self._store)):
            yield

    def left_behind(self, closing: bool, seconds: float = 3.0) -> dict[str, Any]:
        """What updates have left: receiving threads, memory of staged bytes, and how many threads and files the process has.

        Args:
            closing: also communicators that are being left. A trainer that was told to stop in the middle of a bucket
                waits for its worker, which leaves when it meets the next trainer.
            seconds: how long what is there may still take to go.
        """
        kinds = ("weightsync-receive", "weightsync-close") if closing else ("weightsync-receive",)
        until = time.monotonic() + seconds
        while True:
            threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(kinds))
            staging = sum(not ref.expired() for ref in self._staging)
            if not (threads or staging) or time.monotonic() > until:
                break
            gc.collect()
            time.sleep(0.02)
        self._staging = [ref for ref in self._staging if not ref.expired()]
        process = psutil.Process()
        return {"ours": threads, "staging": staging, "threads": process.num_threads(), "files": process.num_fds()}


class Sending:
    """A thread of the trainer's."""

    def __init__(self, run: Callable[[Callable[[], bool]], None], leave: Callable[[], None]) -> None:
        self._run, self._leave = run, leave
        self.gone, self.error, self.cancelled = False, "", threading.Event()
        self.thread = threading.Thread(target=self._send, name="trainer", daemon=True)
        self.thread.start()

    def _send(self) -> None:
        try:
            self._run(self.cancelled.is_set)
        except Gone:
            self.gone = True
            self._leave()
        except Exception as exc:
            self.error = f"{type(exc).__name__}: {exc}"


def structure(model: torch.nn.Module) -> dict[str, Any]:
    """What an update must leave as it was, whatever became of it: where and how tensors lie, loaders, what vLLM keeps for a reload."""
    from vllm.model_executor.model_loader.reload import layerwise

    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    infos = {path: layerwise.get_layerwise_info(layer) for path, layer in model.named_modules()}
    functions = ("get_numel_loaded", "materialize_layer", "_copy_and_restore_kernel_tensors", "_get_original_loader")
    loaders = {path: getattr(tensor, "weight_loader", None) for path, tensor in tensors.items()}
    return {
        "tensors": {path: (t.device.type, t.data_ptr(), t.dtype, t.shape, t.stride()) for path, t in tensors.items()},
        "loaders": {path: getattr(loader, "__qualname__", "") for path, loader in loaders.items()},
        "loading": [path for path, info in infos.items() if info.can_load() or info.loaded_weights or info.load_numel],
        "layers loading": len(layerwise.LOADING_LAYERS),
        "vLLM": [getattr(layerwise, name).__module__ for name in functions],
        "filters": len(layerwise.logger.filters),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "torchao": getattr(model, "_do_torchao_reload", False),
    }
