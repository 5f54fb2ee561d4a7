"""The bucket plan: which bytes of which tensors travel in which broadcast. Pure.

All tensors of a manifest are laid one behind the other in one stream of bytes,
each starting at a multiple of `ALIGN`; bucket *k* is the window
`[k * bucket_bytes, (k + 1) * bucket_bytes)` of that stream. So a tensor larger
than a bucket is split, small ones share a bucket, mixed dtypes stay aligned, and
a receiver that lands the windows one behind the other has every tensor whole and
in place without another copy.

Behind each bucket go the digests of the tensors that end in it
(`Bucket.complete`), so both sides know from the plan alone what comes when.

Not covered: sharded sending (every rank receives whole tensors).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from weightsync.protocol import Manifest

#: More buckets than this take seconds to plan, in an engine that stands still meanwhile.
MAX_BUCKETS = 100_000
#: Tensors start at multiples of this in the stream, bytes. Wide enough for any
#: dtype's view, for a cache line, and for the digest's 8-byte words.
ALIGN = 64


@dataclass(frozen=True)
class Piece:
    """A run of bytes of one tensor inside one bucket.

    Attributes:
        tensor: index into the manifest.
        tensor_offset: first byte within the tensor; a multiple of `ALIGN`.
        bucket_offset: first byte within the bucket.
        nbytes: length, at least 1.
    """

    tensor: int
    tensor_offset: int
    bucket_offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """One broadcast.

    Attributes:
        start: first byte within the stream.
        nbytes: length of the window; the last one may be shorter.
        pieces: what lies in it, in stream order.
        complete: indices of the tensors whose last byte lies in it (a tensor
            without elements completes in the bucket where it would start).
    """

    start: int
    nbytes: int
    pieces: tuple[Piece, ...]
    complete: tuple[int, ...]


@dataclass(frozen=True)
class BucketPlan:
    """The whole plan.

    Attributes:
        offsets: for each tensor, its first byte in the stream.
        stream_bytes: length of the stream, padding between tensors included.
        buckets: in the order of sending; empty when no tensor has a byte.
    """

    offsets: tuple[int, ...]
    stream_bytes: int
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    hash: str


def bucket_bytes_for(nbytes: int, on_gpu: bool) -> int:
    """The unit of broadcast where nobody asked for one.

    On a GPU a bucket costs both sides some 0.3 ms beside its bytes, which NCCL moves 100 MB in, and a trainer has memory for two of
    them: a 16th of the update, 64 MiB to 1 GiB. On a CPU the network is slower than what is done for a bucket: 64 MiB.
    """
    return min(max(64 << 20, nbytes // 16), 1 << 30) if on_gpu else 64 << 20


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> BucketPlan:
    """Lay out a manifest.

    Args:
        manifest: what travels, in order.
        bucket_bytes: window size in bytes, rounded up to a multiple of `ALIGN`.

    Raises:
        ValueError: `bucket_bytes` is not positive, or so small that there would be more than `MAX_BUCKETS`.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes {bucket_bytes}: want a positive number")
    size = _round_up(bucket_bytes)
    offsets: list[int] = []
    end = 0
    for spec in manifest.tensors:
        offsets.append(end)
        end = _round_up(end + spec.nbytes)
    if end > MAX_BUCKETS * size:
        raise ValueError(
            f"bucket_bytes {size}: {end} bytes make more than {MAX_BUCKETS} buckets; want {_round_up(end // MAX_BUCKETS + 1)} or more"
        )
    # Tensors without elements still need a bucket to be completed in.
    count = -(-end // size) if end else (1 if manifest.tensors else 0)
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    complete: list[list[int]] = [[] for _ in range(count)]
    for index, (spec, offset) in enumerate(zip(manifest.tensors, offsets, strict=True)):
        first, last = offset // size, (offset + max(spec.nbytes, 1) - 1) // size
        for k in range(first, last + 1) if spec.nbytes else ():
            begin = max(offset, k * size)
            stop = min(offset + spec.nbytes, (k + 1) * size)
            pieces[k].append(Piece(index, begin - offset, begin - k * size, stop - begin))
        complete[min(last, count - 1)].append(index)
    buckets = tuple(Bucket(k * size, min(size, max(end - k * size, 0)), tuple(pieces[k]), tuple(complete[k])) for k in range(count))
    digest = hashlib.sha256(f"{manifest.hash}:{size}:{ALIGN}:{end}".encode()).hexdigest()
    return BucketPlan(tuple(offsets), end, size, buckets, digest)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
