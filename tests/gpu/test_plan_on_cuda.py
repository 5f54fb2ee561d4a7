"""Rectangles of bytes copied by one launch, on a GPU. Needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from tests.test_plan import require_copied

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("seed", range(12))
def test_one_launch_copies_rectangles_of_any_width_and_place(seed: int) -> None:
    from weightsync.storage import copying

    require_copied(copying.Launch, torch.device("cuda", torch.cuda.current_device()), seed)
