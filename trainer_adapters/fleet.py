"""What the adapters share: a connection that was tried, and a trainer's weights as `sync_weights` takes them.

Not covered: FSDP1 (refused, with what to call instead) and stages of a pipeline.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer_adapters import peft
from weightsync import SyncReport, WeightSync, WeightSyncError
from weightsync.client import Lazy, Lora, lora_of, sharded

CPU = torch.device("cpu")
_ANEW = "A trainer whose tensors change needs a new connection: make the adapter anew"

#: Name, dtype and shape of each tensor of a stream, in order.
Specs = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]


def connect(url: str, token: str, *, group: Any = None, **options: Any) -> WeightSync:
    """A client of a service that answers, takes the token and has an engine. Of several ranks the first one asks.

    Args:
        url, token, group, options: see `WeightSync`.

    Raises:
        WeightSyncError: one sentence that says what to change.
    """
    sync = WeightSync(url, token, group=group, **options)
    try:
        asks = group is None or dist.get_rank() == min(dist.get_process_group_ranks(group))
        if asks and not any(engine.url for engine in sync.engines()):
            hint = "See `weightsync status`; start one with `weightsync serve`"
            raise WeightSyncError(f"the fleet at {url} has no engine that runs", hint=hint)
    except WeightSyncError as exc:
        exc.hint = exc.hint or "Pass the address that `weightsync serve` prints as url=, not an engine's"
        sync.close()
        raise
    return sync


def weights(model: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor | Lazy]:
    """A model's tensors by name, to pass to `sync_weights`, which makes each when it is sent.

    Adapters of PEFT are merged one layer at a time, in a copy: the model itself stays as it is. Shards of FSDP2 and of
    DeepSpeed's ZeRO-3 are gathered, for which `WeightSync` needs the group of all ranks, and every rank makes the call.

    Args:
        dtype: cast parameters to it on the way (`torch.bfloat16`); as they are when None.

    Raises:
        WeightSyncError: adapters that can't be merged so.
    """
    persistent = model.state_dict(keep_vars=True).keys()  # this also has FSDP2 show its shards
    merged, left_out = peft.merges(model)
    parameters = {name: value for name, value in model.named_parameters() if name not in left_out}
    made: dict[str, torch.Tensor | Lazy] = {name: _as_sent(value, merged.get(name), dtype) for name, value in parameters.items()}
    return made | {name: value for name, value in model.named_buffers() if name in persistent and name not in left_out}


def lora(model: torch.nn.Module, dtype: torch.dtype | None = None) -> Lora:
    """A model's adapter and the weights below it, to pass to `sync_weights(adapter_only=True)`; arguments as for `weights`.

    Raises:
        WeightSyncError: it has no LoRA, or one that engines can't be sent alone.
    """
    return lora_of(model, lambda value: _as_sent(value, None, dtype))


def bring(sync: WeightSync, model: torch.nn.Module, dtype: torch.dtype | None = None, adapter_only: bool = False) -> SyncReport:
    """Sync a model's weights as `weights` gives them.

    Args:
        adapter_only: its LoRA alone, as `lora` gives it.

    Raises:
        WeightSyncError: see `WeightSync.sync_weights`; of a wrong dtype with what to pass to the adapter.
    """
    try:
        return sync.sync_weights(lora(model, dtype), adapter_only=True) if adapter_only else sync.sync_weights(weights(model, dtype))
    except WeightSyncError as exc:
        if "wrong dtype" in exc.message:
            exc.hint = "Pass dtype=, that of the engines' checkpoint (dtype=torch.bfloat16), to have weights cast on the way"
        raise


def _as_sent(value: Any, merge: Callable[[], torch.Tensor] | None, dtype: torch.dtype | None) -> torch.Tensor | Lazy:
    partitioned = hasattr(value, "ds_tensor")  # by ZeRO-3
    to = dtype if dtype is not None and value.is_floating_point() else value.dtype
    if merge is None and not partitioned and to is value.dtype:
        return value
    if merge is not None and partitioned:
        raise WeightSyncError("adapters can't be merged into weights that ZeRO-3 has partitioned", hint="Use ZeRO-2 or FSDP2 for PEFT")
    make = merge or (lambda: _gathered(value) if partitioned else value.detach())
    together = partitioned or (sharded.is_sharded(value) and value.device_mesh.size() > 1)
    shape = tuple(value.ds_shape if partitioned else value.shape)
    return Lazy(to, shape, lambda: make().to(to), sharded.device_of(value), collective=together)


def _gathered(value: Any) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([value]):
        return value.data.clone()


class Stream:
    """Weights of a trainer that hands over an iterator of (name, tensor), which can be gone through once.

    All names have to be known before the first tensor is sent. Where the trainer does not say them, the first stream is copied to host
    memory, whole; later ones, which must be alike, pass tensor by tensor.

    Args:
        sync: the client of the rank that sends.
        dtype: cast to it on the way.
        specs: name, dtype and shape of every tensor, in order; None when they are not known yet.
        device: where the tensors of such a stream are.
    """

    def __init__(self, sync: WeightSync, dtype: torch.dtype | None = None, specs: Specs | None = None, device: torch.device = CPU) -> None:
        self._sync, self._dtype = sync, dtype
        self._specs = None if specs is None else [(name, self._to(kind), tuple(shape), device) for name, kind, shape in specs]

    def send(self, iterator: Iterator[tuple[str, torch.Tensor]], **options: Any) -> SyncReport:
        """Sync what the iterator gives, and go through it to its end whatever comes: other ranks stand in its gathers.

        Args:
            options: of `WeightSync.sync_weights`.

        Raises:
            WeightSyncError: see `WeightSync.sync_weights`; or the iterator gives other tensors than before.
        """
        turn = threading.Lock()  # tensors are read in another thread, which may outlive a call that failed
        left: list[str] = []
        try:
            if self._specs is None:
                report = self._send_first(iterator, **options)
            else:
                stream = ((n, Lazy(k, s, functools.partial(self._next, iterator, turn, n, k), on)) for n, k, s, on in self._specs)
                report = self._sync.sync_weights(stream, **options)  # an iterator: it can't be sent again when an engine is lost
        finally:
            with turn:
                left += (name for name, _ in iterator)
        if left:
            raise WeightSyncError(f"the trainer gave {len(left)} more tensor(s) than before: {', '.join(left[:5])}", hint=_ANEW)
        return report

    def _send_first(self, iterator: Iterator[tuple[str, torch.Tensor]], **options: Any) -> SyncReport:
        specs: list[tuple[str, torch.dtype, tuple[int, ...], torch.device]] = []
        held: list[tuple[str, torch.Tensor]] = []
        for name, tensor in iterator:
            kind = self._to(tensor.dtype)
            specs.append((name, kind, tuple(tensor.shape), tensor.device))
            held.append((name, tensor.detach().to(CPU, kind, copy=True)))
        report = self._sync.sync_weights(held, **options)
        self._specs = specs
        return report

    @staticmethod
    def _next(iterator: Iterator[tuple[str, torch.Tensor]], turn: threading.Lock, name: str, dtype: torch.dtype) -> torch.Tensor:
        with turn:
            given, tensor = next(iterator, ("nothing", torch.empty(0)))
        if given != name:
            raise WeightSyncError(f"the trainer gave {given!r} where {name!r} came before", hint=_ANEW)
        return tensor.detach().to(dtype)

    def _to(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype
