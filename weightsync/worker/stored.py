"""Whether live parameters hold the very bytes that were sent.

What a kernel makes of a weight (packed, shuffled, transposed, scaled) can't be compared
with what was sent. But many weights stay as the loader wrote them: fused qkv and gate_up
in bfloat16, experts of some kernels, embeddings, norms. Which ones is not guessed from
dtypes and shapes, which a shuffle leaves alone: `Stored` looks at the start, when the
engine has just loaded its checkpoint, which parameters hold its bytes where the load map
says that the loader put them. Behind an update the same places must hold the update's.

Not covered: tensors of which a part is converted, computed, or kept in another order;
parameters of which each part of the checkpoint is one value over and over, as it would
look the same in any order. Both are counted as unchecked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from weightsync.errors import VerdictNotOk
from weightsync.storage.pins import bits
from weightsync.worker.loadmap import Copy, LoadMap, View, checkpoint_files


class Stored:
    """What can be compared in one live model.

    Args:
        model: the live model, as it came from `checkpoint`.
        load_map: of the checkpoint.
        checkpoint: its tensors by name (`checkpoint_tensors`); each is looked at once and let go.
    """

    def __init__(self, model: torch.nn.Module, load_map: LoadMap, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model = model
        live = registered(model)
        kept: set[str] = set()
        changed: set[str] = set()
        for name, tensor in checkpoint:
            for copy in load_map.copies.get(name, ()):
                if not holds(live.get(copy.path), copy, tensor):
                    changed.add(copy.path)
                elif not _uniform(view(tensor, copy.source)):
                    kept.add(copy.path)
        self._paths = kept - changed

    def check(self, load_map: LoadMap, sent: Iterable[tuple[str, torch.Tensor]]) -> tuple[VerdictNotOk | None, dict[str, int]]:
        """Compare after an update was applied.

        Args:
            load_map: of the update's manifest.
            sent: its tensors, by the names of the map, on any device (`Staged.stream`).

        Returns:
            What stands against the update, and counts: tensors whose every write was compared (`stored`), and
            those of which some or none was (`stored_unchecked`).
        """
        live = registered(self._model)
        wrong: list[str] = []
        whole = partly = 0
        for name, tensor in sent:
            writes, copies = load_map.writes.get(name, ()), load_map.copies.get(name, ())
            known = [copy for copy in copies if copy.path in self._paths]
            if writes and len(known) == len(writes):
                whole += 1
            else:
                partly += 1
            if not all(holds(live.get(copy.path), copy, tensor) for copy in known):
                wrong.append(name)
        counts = {"stored": whole, "stored_unchecked": partly}
        if not wrong:
            return None, counts
        error = VerdictNotOk(
            f"{len(wrong)} tensor(s) are not stored as they were sent: {', '.join(wrong[:20])}",
            hint="Sync again; if it comes back, restart this engine and report its model",
            names=wrong,
        )
        return error, counts


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors, one after the other."""
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def registered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of a model, under each of its paths."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def holds(parameter: torch.Tensor | None, copy: Copy, tensor: torch.Tensor) -> bool:
    """Whether a live parameter has a tensor's bytes where the loader copied them."""
    held, sent = live_view(parameter, tensor.dtype, copy.into), view(tensor, copy.source)
    return held is not None and torch.equal(bits(held), bits(sent.to(held.device)))


def live_view(parameter: torch.Tensor | None, dtype: torch.dtype, at: View) -> torch.Tensor | None:
    """These elements of a live parameter; None where it is not of that dtype, or has none there."""
    if parameter is None or parameter.dtype != dtype or parameter.layout != torch.strided or parameter.is_meta:
        return None
    offset, shape, stride = at
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
    if (parameter.storage_offset() + last + 1) * parameter.element_size() > parameter.untyped_storage().nbytes():
        return None
    return view(parameter, at)


def view(tensor: torch.Tensor, at: View) -> torch.Tensor:
    """These elements of a tensor's memory, counted from where it begins there."""
    offset, shape, stride = at
    return torch.as_strided(tensor.detach(), shape, stride, tensor.storage_offset() + offset)


def _uniform(tensor: torch.Tensor) -> bool:
    """Whether all elements are alike."""
    flat = bits(tensor).reshape(-1)
    return bool((flat == flat[:1]).all())
