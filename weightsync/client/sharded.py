"""Tensors of which each rank of the trainer holds a part: DTensor, as FSDP2 and tensor parallelism make them.

`DTensor.full_tensor` gathers over whatever mesh the tensor has: one dimension, HSDP's two, uneven
shards. What older wrappers leave in a parameter's place is told by what it looks like, and
refused with the call that gathers it.

Not covered: gathering FSDP1's and DeepSpeed's partitions (their own context managers do).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import ManifestRefused
from weightsync.transport import digest

GROUP_HINT = "Make WeightSync(…, group=…) on every rank, with a process group or device mesh of all of them, and call it on every rank"
_SMALL_BYTES = 1 << 20
_FSDP1_HINT = (
    "Move to fully_shard, or pass what torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)) gives"
)
_ZERO3_HINT = "Sync inside `with deepspeed.zero.GatheredParameters(list(model.parameters())):`"


def has_company() -> bool:
    """Whether this process is one of several of its trainer."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # takes a while to load, and without it there is no DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_partitioned(name: Any, tensor: Any) -> None:
    """Refuse what holds no values, or not those of one tensor.

    Raises:
        ManifestRefused: a FlatParameter of FSDP1, or a parameter that ZeRO-3 has partitioned away.
    """
    if getattr(tensor, "_is_flat_param", False):
        raise ManifestRefused(f"{name!r} is a FlatParameter: FSDP1 keeps many parameters in it", names=[str(name)], hint=_FSDP1_HINT)
    if hasattr(tensor, "ds_tensor") and tensor.numel() != getattr(tensor, "ds_numel", 0):
        raise ManifestRefused(f"{name!r} is partitioned by DeepSpeed ZeRO-3 and empty here", names=[str(name)], hint=_ZERO3_HINT)


def refuse_fsdp1(module: torch.nn.Module) -> None:
    """Refuse a model whose parameters are not what they look like.

    Raises:
        ManifestRefused: a module in it is wrapped by FSDP1.
    """
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is None:
        return
    for name, part in module.named_modules():
        if isinstance(part, fsdp.FullyShardedDataParallel):
            raise ManifestRefused(f"module {name or 'of the whole model'!r} is wrapped by FSDP1", names=[name], hint=_FSDP1_HINT)


def require_members(name: Any, tensor: Any, members: Collection[int] | None) -> None:
    """See that all who hold a part will take part, and the rank that sends holds one.

    Args:
        members: global ranks, the one that sends first; None for a process alone.

    Raises:
        ManifestRefused: they don't.
    """
    ranks = sorted(tensor.device_mesh.mesh.flatten().tolist())
    if members is None:
        if len(ranks) > 1:
            raise ManifestRefused(f"{name!r} is sharded over ranks {ranks[:16]}", names=[str(name)], hint=GROUP_HINT)
        return
    sender = min(members)
    if sender not in ranks or not set(ranks) <= set(members):
        raise ManifestRefused(
            f"{name!r} is sharded over ranks {ranks[:16]}; of the group {sorted(members)[:16]}, rank {sender} sends",
            names=[str(name)],
            hint="The group has to hold all of a tensor's ranks, and the first of the group to be one of them (pipeline stages: not yet)",
        )


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where it is once it has been gathered."""
    if not is_sharded(tensor) or tensor.device.type == (kind := tensor.device_mesh.device_type):
        return tensor.device
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def gather(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The whole tensors, by collectives of all ranks that hold parts; of no meaning on another rank.

    Small ones that are cut alike along their rows, as FSDP2 does, travel together in one collective: one for each
    takes about a millisecond, which adds up for a model of many experts. Large ones are quicker without the copies.
    """
    made: dict[int, torch.Tensor] = {}
    alike: dict[tuple[Any, int], list[int]] = {}  # in the same order on every rank
    for at, tensor in enumerate(tensors):
        if tensor.device_mesh.get_coordinate() is None:
            made[at] = tensor.to_local()
        elif (cut := _cut_by_rows(tensor)) is not None:
            alike.setdefault((tensor.device_mesh, cut), []).append(at)
        else:
            made[at] = _on_mesh(tensor).full_tensor()
    for (mesh, dimension), places in alike.items():
        made |= zip(places, _gather_rows([tensors[at] for at in places], mesh, dimension), strict=True)
    return [made[at] for at in range(len(tensors))]


def _on_mesh(tensor: Any) -> Any:
    # It may be offloaded to the host, while the ranks meet between their GPUs.
    kind = tensor.device_mesh.device_type
    return tensor if tensor.device.type == kind else tensor.to(kind)


def _cut_by_rows(tensor: Any) -> int | None:
    """The mesh's dimension along which it is cut, when it is small and that is all that is done to it."""
    from torch.distributed.tensor import Replicate, Shard

    if tensor.numel() * tensor.element_size() > _SMALL_BYTES:
        return None
    cuts = [at for at, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    if len(cuts) != 1 or type(tensor.placements[cuts[0]]) is not Shard or tensor.placements[cuts[0]].dim != 0:
        return None
    return cuts[0] if tensor.device_mesh.size(cuts[0]) > 1 else None


def _gather_rows(tensors: list[Any], mesh: Any, dimension: int) -> list[torch.Tensor]:
    """Gather tensors that are cut into as many runs of rows as there are ranks, the last ones shorter or empty."""
    world = mesh.size(dimension)
    parts = [_on_mesh(tensor).to_local() for tensor in tensors]
    rooms = [-(-tensor.shape[0] // world) * math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in tensors]
    mine = torch.zeros(sum(rooms), dtype=torch.uint8, device=parts[0].device)
    starts = list(itertools.accumulate(rooms, initial=0))
    for part, start in zip(parts, starts, strict=False):
        mine[start : start + part.nbytes] = digest.as_bytes(part)
    by_rank = torch.empty(world, mine.numel(), dtype=torch.uint8, device=mine.device)
    dist.all_gather(list(by_rank.unbind()), mine, group=mesh.get_group(dimension))
    # What is missing from the last ranks' parts is at the end, where rows end.
    return [
        by_rank[:, start : start + room].reshape(-1)[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for tensor, start, room in zip(tensors, starts, rooms, strict=False)
    ]
