"""Where the buckets of one update are packed, in a trainer: buffers in turns, or a worker's own memory for all of the stream.

Not covered: what becomes of a packed bucket, which its channel knows.
"""

from __future__ import annotations

import torch

from weightsync.transport.packing import Bucket, BucketPlan

#: One travels while the next is packed.
_BUFFERS = 2


class Ground:
    """See the module.

    Args:
        parts: shape [at least a bucket], uint8, each; or one of shape [stream bytes].
        whole: whether it is that one, in which each bucket has a place of its own.
        ahead: so many buckets may be packed before the first of them has been broadcast; counted from there on.
    """

    def __init__(self, parts: list[torch.Tensor], whole: bool, ahead: int) -> None:
        self._parts, self._whole, self.ahead = parts, whole, ahead

    def window(self, number: int, bucket: Bucket) -> torch.Tensor:
        """Where this bucket, of this number, is packed, shape [its bytes], uint8."""
        if self._whole:
            return self._parts[0][bucket.start : bucket.start + bucket.nbytes]
        return self._parts[number % len(self._parts)][: bucket.nbytes]

    def let_go(self) -> None:
        """Nothing is packed any more: hold none of the memory."""
        self._parts = []


def in_turns(buffers: list[torch.Tensor]) -> Ground:
    """Buffers that buckets take in turns: one is free again when its bucket has been broadcast."""
    return Ground(buffers, whole=False, ahead=len(buffers))


def all_of(plan: BucketPlan, stream: torch.Tensor) -> Ground:
    """Memory for all of a stream: nobody has to wait for anybody.

    Args:
        stream: shape [at least the plan's stream bytes], uint8.
    """
    return Ground([stream[: plan.stream_bytes]], whole=True, ahead=len(plan.buckets))


def turns_of(plan: BucketPlan) -> tuple[int, int]:
    """How many buffers a plan takes in turns, and of how many bytes each."""
    return min(_BUFFERS, len(plan.buckets)), max(1, min(plan.bucket_bytes, plan.stream_bytes))
