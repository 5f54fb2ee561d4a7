"""What the workers that run a model together decide together, before a step in which each waits for the others.

One worker that stays away from a run of the model, or from a capture of its graphs,
keeps all others in a collective of theirs. So each first says how it fared.

Not covered: a worker that fails inside such a step.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from vllm.distributed import get_world_group

from weightsync.errors import ApplyFailed

#: One that was asked at the same moment as all others, and whose own part takes seconds, answers well within it.
_MOST = timedelta(seconds=120)


def together(part: Callable[[], bool]) -> bool:
    """Do this worker's part before such a step; whether any worker wants it. Every worker must come here.

    Raises:
        ApplyFailed: another worker's part failed, so that it won't be there.
        RuntimeError: one died, or did not come.
    """
    wants, error = False, None
    try:
        wants = part()
    except Exception as exc:
        error = exc
    said = torch.tensor([error is not None, wants], dtype=torch.int32)
    # Over gloo, also beside GPUs: nothing here may wait for a stream.
    dist.all_reduce(said, op=dist.ReduceOp.MAX, group=get_world_group().cpu_group, async_op=True).wait(_MOST)
    if error is not None:
        raise error
    if said[0]:
        raise ApplyFailed("another worker of this engine failed before all could go on together", hint="Its own error says why")
    return bool(said[1])
