"""The digest and the look at values on CUDA tensors: the same answers as on a CPU. Needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from weightsync.transport import digest, finite
from weightsync.transport.digest import BLOCK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("length", [1, 8, 77, 8 * BLOCK, 8 * 200 * BLOCK + 13])
@pytest.mark.parametrize("offset", [0, 8 * 12_345])
def test_a_digest_is_the_same_on_both_sides(length: int, offset: int) -> None:
    data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    assert digest.digest_bytes(data.cuda(), offset) == digest.digest_bytes(data, offset)


@pytest.mark.parametrize("dtype", [name for name in finite._FORMATS])
@pytest.mark.parametrize("at", [0, 1_000_003, 30_000_000])
def test_one_nan_is_found_and_nothing_where_there_is_none(dtype: str, at: int) -> None:
    tensor = torch.ones(30_000_001).to(getattr(torch, dtype)).cuda()
    peak = finite.Peak(dtype)
    digest.digest_tensor(tensor, peak)
    assert not peak.refused
    tensor[at : at + 1] = torch.tensor([float("nan")]).to(getattr(torch, dtype))
    digest.digest_tensor(tensor, peak)
    assert peak.refused
    assert peak.describe(tensor) == f"1 NaN of {tensor.numel()}"
