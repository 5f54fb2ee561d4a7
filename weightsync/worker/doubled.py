"""A layer that is processed beside itself for an update: what its method makes of the loaded tensors goes into its live storage.

Not covered: which layers that is right for (`planned`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightsync.errors import ApplyFailed
from weightsync.storage.pins import same_bytes
from weightsync.worker import stored, vllm_compat
from weightsync.worker.loadmap import Copy
from weightsync.worker.staging import Staged

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Double:
    """A layer that is processed beside itself.

    Attributes:
        path, layer: which.
        shapes: of its loaded parameters, by their names; and their dtype.
        copies: what is copied into them: parameter, index in the manifest, how.
        live: what the layer holds, by name: what processing makes goes there.
    """

    path: str
    layer: torch.nn.Module
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    copies: tuple[tuple[str, int, Copy], ...]
    live: dict[str, torch.Tensor]

    def made(self, incoming: Staged) -> dict[str, torch.Tensor]:
        """What processing makes of an update, by name, each laid out as what is live.

        Raises:
            ApplyFailed: it makes something else.
        """
        device = next(iter(self.live.values())).device
        loaded: dict[str, torch.Tensor] = {}
        for name, index, copy in self.copies:
            sent = incoming.tensor(index)
            shape, dtype = self.shapes[name]
            if copy.into[:2] == (0, shape) and copy.source == (0, tuple(sent.shape), sent.stride()) and sent.device == device:
                loaded[name] = sent  # all there is of it, as it lies
                continue
            if name not in loaded:
                loaded[name] = torch.empty(shape, dtype=dtype, device=device)
            stored.view(loaded[name], copy.into).copy_(stored.view(sent, copy.source))
        found = vllm_compat.processed(self.layer, loaded)
        laid = {name: (tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in found.items()}
        if laid != {name: (tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in self.live.items()}:
            raise ApplyFailed(f"what {self.path} makes of its weights is laid out otherwise than what is live", names=[self.path])
        return found

    def write(self, incoming: Staged) -> None:
        """Put that into the layer."""
        for name, tensor in self.made(incoming).items():
            self.live[name].copy_(tensor)


def double_of(path: str, layer: torch.nn.Module, copies: Sequence[tuple[int, Copy]], incoming: Staged) -> Double | None:
    """The double of a layer; None where the layer holds something else than what that makes of an update."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for known in {copy.path for _, copy in copies}:
        if known not in incoming.load_map.shapes:
            return None
        shape, dtype = incoming.load_map.shapes[known]
        shapes[known.rpartition(".")[2]] = shape, getattr(torch, dtype)
    tensors = {**layer._parameters, **layer._buffers}
    live = {name: tensor.data for name, tensor in tensors.items() if tensor is not None}
    double = Double(path, layer, shapes, tuple((copy.path.rpartition(".")[2], index, copy) for index, copy in copies), live)
    try:
        made = double.made(incoming)
    except Exception as exc:  # whatever it is, the general way is there
        logger.info("%s is taken apart for each update: %s: %s", path, type(exc).__name__, exc)
        return None
    return double if all(same_bytes(tensor, live[name]) for name, tensor in made.items()) else None
