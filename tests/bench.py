"""One worker and its trainer in one process: updates go step by step, and a fault can be put in at each.

`Bench` drives the RPC surface of a worker as the controller and a trainer do; pause, apply,
second try and the way back are the engine actor's own `Transaction`. What comes of an
update is a worker's report with `at` beside it: the step at which it ended. A bench also
knows what must be as it was behind any update, and what an update must not leave behind.

Not covered: a trainer in a process of its own that is killed (the fleet's tests have one), several workers, NCCL.
"""

from __future__ import annotations

import asyncio
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
from weightsync.errors import WeightSyncError
from weightsync.fleet.transaction import Transaction
from weightsync.protocol import Adapter, BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.transport import communicator as communicator_module
from weightsync.transport.communicator import Communicator
from weightsync.transport.packing import BucketPlan, plan_buckets
from weightsync.worker import admission, streaming
from weightsync.worker.staging import Whole

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
        worker: what goes wrong in the worker while this lasts; is given the bench and the complete set. Such an update goes the
            general way: what a plan writes passes no loader in which something could go wrong.
    """

    offered: Callable[[Tensors], Tensors] = dict
    admitted: bool = False
    sender: Send = field(default=lambda *to: send(*to))
    worker: Callable[[Bench, Tensors], AbstractContextManager[Any]] | None = None


def send(offered: Offer, plan: BucketPlan, wire: Any, cancelled: Callable[[], bool], kind: type[Sender] = Sender, told: Any = None) -> None:
    """As a trainer does; `told` is called with the bytes sent and those in all."""
    kind(offered, plan, told).send(wire, time.monotonic() + SECONDS, cancelled, lambda: None)


@dataclass(frozen=True)
class Way:
    """How an update is made: `stage` and `retain` as in `BeginOrder`; how often it is applied; its scope; what it brings of an adapter.

    Stored bytes are looked at where it says `compared`.
    """

    stage: str = "auto"
    retain: bool = False
    tries: int = 2
    compared: bool = False
    scope: tuple[str, ...] = ()
    adapter: Adapter = Adapter.NONE


STAGED = Way()
WAYS = {"staged": STAGED, "kept": Way(retain=True), "streamed": Way(stage="none", tries=1), "compared": Way(compared=True)}


class Bench:
    """One worker, and a trainer beside it in a thread.

    Args:
        call: calls one of the worker's methods by name.
        worker: vLLM's worker, with our extension.
    """

    def __init__(self, call: Call, worker: Any) -> None:
        self._call = call
        report = call("weightsync_describe", True, True)
        assert report["error"] is None, report["error"]
        self.applier = worker._weightsync()
        self._stored, self.applier._stored = self.applier._stored, None  # what it compares with; only where a way says so
        self.model = self.applier.model
        self._store, self._generation, self._updates = dist.HashStore(), 1, 0
        self.held = ""  # the update that counts
        self._wire: Communicator | None = None
        self._staging: list[StorageWeakRef] = []
        self.structure = structure(self.model)

    def call(self, name: str, *args: Any) -> dict[str, Any]:
        return self._call(f"weightsync_{name}", *args)

    def update(self, tensors: Mapping[str, torch.Tensor], fault: Fault | None = None, way: Way = STAGED) -> dict[str, Any]:
        """One update, to its verdict or its end; how far it came (`at`), and what is true of the worker then."""
        report = self._update(dict(tensors), fault or Fault(), way)
        if report["state"] not in ("verified", "refused"):
            # As the controller does with what did not commit.
            assert self.call("abort", report["update_id"])["wrote"] is report["wrote"]
        return report

    def begin(self, offered: Offer, plan: BucketPlan, way: Way, planned: bool = True) -> dict[str, Any]:
        """Ask the worker to take an update, with an eye on the memory that it takes for the bytes."""
        self._updates += 1
        update = f"u-{self._updates}"
        meeting = ("trainer", self._updates, offered.manifest, BUCKET, plan.hash, SECONDS, "gloo", torch.__version__)
        request = UpdateRequest(update, *meeting, scope=way.scope, adapter=way.adapter)
        base = (self._updates - 1, self.held) if request.partial else (None, "")
        order = BeginOrder(request, self._info, 0, 1, SECONDS, "", way.stage, way.retain, *base, plan=planned)
        made: list[torch.Tensor] = []
        empty = torch.empty
        # What is not staged waits for its loader after few bytes, as large models do.
        few = patch.object(streaming.Passing.__init__, "__defaults__", (BUCKET,))
        with few, patch.object(torch, "empty", lambda *size, **how: made.append(empty(*size, **how)) or made[-1]):  # type: ignore[func-returns-value]
            report = self.call("begin", encode(order))
        least = min(plan.stream_bytes, BUCKET if way.stage == "none" else plan.stream_bytes)
        bytes_of = [tensor for tensor in made if tensor.nbytes >= least and tensor.dtype == torch.uint8]
        receiver = self.applier._receiver
        if report["state"] != "failed" and receiver is not None and isinstance(receiver.into, Whole):
            bytes_of.append(receiver.into.data)  # memory that may have been there before; what counts is who still holds it
        assert bytes_of or report["state"] == "failed", "bytes that are received lie somewhere"
        self._staging += [StorageWeakRef(tensor.untyped_storage()) for tensor in bytes_of]
        return {**report, "update_id": update}

    def _update(self, tensors: Tensors, fault: Fault, way: Way) -> dict[str, Any]:
        offered = offer(fault.offered(tensors))
        plan = plan_buckets(offered.manifest, BUCKET)
        with patch.object(admission, "admit", lambda manifest, base, *_, **__: base) if fault.admitted else nullcontext():
            report = self.begin(offered, plan, way, planned=fault.worker is None)
        if report["state"] == "failed":
            return {**report, "at": "begin", "state": "refused"}
        update = report["update_id"]
        sending = self.send(offered, plan, fault)
        report = self._received(sending)
        if way.stage != "none":
            self._end(sending, report["state"] != "staged")
        if report["state"] != "staged" or (sending.gone and way.stage != "none"):
            self._end(sending, True)
            return {**report, "at": "receive"}
        transaction = Transaction(_Engine(self._call), update, tries=way.tries, seconds_for_all=SECONDS)
        served, error = not report["wrote"], None
        try:
            broken = fault.worker(self, tensors) if fault.worker is not None else nullcontext()
            with broken, patch.object(self.applier, "_stored", self._stored if way.compared else None):
                asyncio.run(transaction.bring())
            self.call("keep", update)
            self.held = update
        except WeightSyncError as exc:
            error = exc
        at = str(transaction.phase)
        if error is not None and transaction.wrote and served and (way.retain or way.adapter == Adapter.ALONE):
            asyncio.run(transaction.roll_back())
        self._end(sending, error is not None)  # as the client does, and the controller: whatever failed, they meet anew
        state = "failed" if error else "verified"
        wrote = transaction.wrote and error is not None  # when all is well the version is stamped now
        return {**report, "at": at, "state": state, "error": error and error.to_dict(), "wrote": wrote, "checks": transaction.checks}

    def send(self, offered: Offer, plan: BucketPlan, fault: Fault) -> Sending:
        return Sending(lambda cancelled: fault.sender(offered, plan, self._connected(), cancelled), self.leave)

    def _received(self, sending: Sending) -> dict[str, Any]:
        """The worker's report when it is ready to apply, or has failed, or when its trainer has been gone for long enough."""
        until = 0.0
        while (report := self.call("poll"))["state"] == "receiving":
            until = until or (time.monotonic() + _PATIENCE if sending.gone else 0.0)
            if until and time.monotonic() > until:
                break
            time.sleep(0.005)
        return report

    def _end(self, sending: Sending, failed: bool) -> None:
        """The trainer has sent everything, or is told that the update has failed."""
        if failed:
            sending.cancelled.set()
        sending.thread.join(SECONDS)
        if failed:  # the stream may stand in the middle of an update
            self.leave()

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

    def left_behind(self, closing: bool, kept: int, seconds: float = 3.0) -> dict[str, Any]:
        """What updates have left: threads of either side, memory of staged bytes, and how many threads and files the process has.

        Args:
            closing: also communicators that are being left. A trainer that was told to stop in the middle of a bucket
                waits for its worker, which leaves when it meets the next trainer.
            kept: of how many updates the bytes are kept.
            seconds: how long what is there may still take to go.
        """
        kinds = ("weightsync-receive", "weightsync-check", "weightsync-pack", *(("weightsync-close",) if closing else ()))
        until = time.monotonic() + seconds
        while True:
            threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(kinds))
            staging = sum(not ref.expired() for ref in self._staging)
            if not (threads or staging > kept) or time.monotonic() > until:
                break
            gc.collect()
            time.sleep(0.02)
        self._staging = [ref for ref in self._staging if not ref.expired()]
        process = psutil.Process()
        return {"ours": threads, "staging": staging, "threads": process.num_threads(), "files": process.num_fds()}


class _Engine:
    """What a transaction needs of an engine: here, one worker."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def pause(self) -> bool:
        return True

    async def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        return [self._call(method, *args)]


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
    # What attention leaves of a projection that it has absorbed is nothing, made anew each time, and gets its loader when the next is due.
    loaders = {path: getattr(tensor, "weight_loader", None) for path, tensor in tensors.items() if tensor.numel()}
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
