"""A trainer's weights in the quantised form that an engine's checkpoint has. Pure functions.

An engine is updated in the format of the checkpoint that it was started from. Where
that is quantised, the trainer quantises what it sends:

    master weight [N, K] ─▶ int8_channel ─▶ INT8 [N, K], scale [N, 1] ─▶ sync_weights

Names are the caller's: in compressed-tensors' format the two are `<layer>.weight` and
`<layer>.weight_scale`.

Not covered: FP8 and four bits; scales of activations, which this format takes while it runs.
"""

from __future__ import annotations

import torch

_INT8_MAX = 127


def int8_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric INT8 with one scale per output row.

    Args:
        weight: floating point [N, K], N outputs and K inputs of a linear layer.

    Returns:
        INT8 [N, K] in -127 … 127, to the nearest even, and float32 [N, 1]: the largest
        magnitude of the row divided by 127. A row of zeros gets scale 1. A row with a NaN or an
        infinity gets that for its scale: it must not look like a sound one.
    """
    full = weight.detach().float()
    scale = full.abs().amax(dim=1, keepdim=True) / _INT8_MAX
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (full / scale).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8), scale


def from_int8_channel(quantised: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the engine's kernel makes of it.

    Args:
        quantised: INT8 [N, K].
        scale: float32 [N, 1].

    Returns:
        float32 [N, K]; off the original by at most half a scale.
    """
    return quantised.float() * scale
