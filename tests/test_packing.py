"""The bucket plan: every byte of every tensor travels once, aligned, and both sides know when each is whole."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.protocol import DTYPE_BYTES, Manifest, TensorSpec
from weightsync.transport.packing import ALIGN, BucketPlan, bucket_bytes_for, plan_buckets

MIXED = Manifest(
    (
        TensorSpec("bf16", "bfloat16", (3,)),
        TensorSpec("fp32", "float32", (2,)),
        TensorSpec("byte", "uint8", (1,)),
        TensorSpec("fp16", "float16", (5,)),
        TensorSpec("nothing", "float32", (0, 7)),
        TensorSpec("scalar", "float64", ()),
        TensorSpec("large", "bfloat16", (33, 100)),
        TensorSpec("bool", "bool", (65,)),
        TensorSpec("nothing at the end", "int8", (0,)),
    )
)

shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
manifests = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), shapes), max_size=12).map(
    lambda rows: Manifest(tuple(TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)))
)


def send_and_receive(manifest: Manifest, plan: BucketPlan, sources: list[bytes]) -> list[bytes]:
    """Pack into windows as a sender does, land the windows as a receiver does; the tensors at the plan's offsets."""
    staging = bytearray(b"\xee" * plan.stream_bytes)
    for bucket in plan.buckets:
        window = bytearray(bucket.nbytes)
        for piece in bucket.pieces:
            run = sources[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.nbytes]
            assert len(run) == piece.nbytes
            window[piece.bucket_offset : piece.bucket_offset + piece.nbytes] = run
        assert len(window) == bucket.nbytes, "a piece reached beyond its bucket"
        staging[bucket.start : bucket.start + bucket.nbytes] = window
    assert len(staging) == plan.stream_bytes, "a bucket reached beyond the stream"
    return [bytes(staging[o : o + spec.nbytes]) for spec, o in zip(manifest.tensors, plan.offsets, strict=True)]


def check(manifest: Manifest, bucket_bytes: int) -> BucketPlan:
    """Everything that must hold of any plan."""
    plan = plan_buckets(manifest, bucket_bytes)
    assert plan.bucket_bytes >= bucket_bytes
    assert plan.bucket_bytes % ALIGN == 0
    # The windows tile the stream.
    end = 0
    for bucket in plan.buckets:
        assert bucket.start == end
        assert bucket.nbytes <= plan.bucket_bytes
        assert bucket is plan.buckets[-1] or bucket.nbytes == plan.bucket_bytes
        end += bucket.nbytes
    assert end == plan.stream_bytes
    # Within a window nothing overlaps, and every run can be viewed as words of its dtype.
    for bucket in plan.buckets:
        free = 0
        for piece in bucket.pieces:
            assert piece.nbytes >= 1
            assert piece.bucket_offset >= free
            assert piece.bucket_offset % ALIGN == 0
            assert piece.tensor_offset % ALIGN == 0
            assert bucket.start + piece.bucket_offset == plan.offsets[piece.tensor] + piece.tensor_offset
            free = piece.bucket_offset + piece.nbytes
        assert free <= bucket.nbytes
    # Every byte of every tensor lies in exactly one piece; it is whole where its last byte is.
    pieces = sorted((p.tensor, p.tensor_offset, p.nbytes, k) for k, bucket in enumerate(plan.buckets) for p in bucket.pieces)
    completed = [(index, k) for k, bucket in enumerate(plan.buckets) for index in bucket.complete]
    assert [index for index, _ in completed] == list(range(len(manifest.tensors))), "each once, in the manifest's order"
    for index, spec in enumerate(manifest.tensors):
        at = last = 0
        for tensor, offset, nbytes, k in pieces:
            if tensor == index:
                assert offset == at
                at, last = at + nbytes, k
        assert at == spec.nbytes
        assert plan.offsets[index] % ALIGN == 0
        if spec.nbytes:
            assert dict(completed)[index] == last
    return plan


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 128, 320, 1 << 20])
def test_mixed_tensors_come_out_as_they_went_in(bucket_bytes: int) -> None:
    plan = check(MIXED, bucket_bytes)
    sources = [random.Random(i).randbytes(spec.nbytes) for i, spec in enumerate(MIXED.tensors)]
    assert send_and_receive(MIXED, plan, sources) == sources
    if bucket_bytes <= 320:
        large = [piece for bucket in plan.buckets for piece in bucket.pieces if piece.tensor == 6]
        assert len(large) > 6600 // 320, "the large tensor was meant to lie in many buckets"


@settings(max_examples=150, deadline=None)
@given(manifests, st.integers(1, 2000), st.randoms(use_true_random=False))
def test_any_tensors_come_out_as_they_went_in(manifest: Manifest, bucket_bytes: int, random: random.Random) -> None:
    plan = check(manifest, bucket_bytes)
    sources = [random.randbytes(spec.nbytes) for spec in manifest.tensors]
    assert send_and_receive(manifest, plan, sources) == sources


def test_a_tensor_without_elements_is_completed_without_a_byte() -> None:
    plan = check(Manifest((TensorSpec("a", "float32", (0,)), TensorSpec("b", "float32", (3, 0)))), 4096)
    assert plan.stream_bytes == 0
    assert [(bucket.nbytes, bucket.pieces, bucket.complete) for bucket in plan.buckets] == [(0, (), (0, 1))]


def test_a_tensor_without_elements_behind_a_full_bucket_has_no_bucket_of_its_own() -> None:
    plan = check(Manifest((TensorSpec("full", "uint8", (128,)), TensorSpec("empty", "uint8", (0,)))), 128)
    assert [bucket.complete for bucket in plan.buckets] == [(0, 1)]


def test_no_tensors_need_no_bucket() -> None:
    assert plan_buckets(Manifest(()), 4096).buckets == ()


def test_small_tensors_share_a_bucket() -> None:
    manifest = Manifest(tuple(TensorSpec(f"t{i}", "float32", (4,)) for i in range(64)))
    assert len(plan_buckets(manifest, 4096).buckets) == 1


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_must_hold_something(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match="bucket_bytes"):
        plan_buckets(MIXED, bucket_bytes)


def test_buckets_that_would_be_too_many_are_refused_with_a_size_that_will_do() -> None:
    manifest = Manifest((TensorSpec("w", "uint8", (200 << 30,)),))
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"more than 100000 buckets; want \d+ or more") as caught:
        plan_buckets(manifest, 4096)
    assert time.monotonic() - began < 1, "before they are made"
    enough = int(str(caught.value).split("want ")[1].split()[0])
    assert len(plan_buckets(manifest, enough).buckets) <= 100_000


def test_the_same_manifest_and_bucket_give_the_same_plan() -> None:
    again = Manifest(tuple(TensorSpec(s.name, s.dtype, s.shape) for s in MIXED.tensors))
    assert plan_buckets(MIXED, 256) == plan_buckets(again, 256)


def test_the_hash_tells_apart_whatever_the_two_sides_could_disagree_on() -> None:
    base = (TensorSpec("a", "float32", (4, 6)), TensorSpec("b", "float32", (24,)))
    variants = [
        (base, 256),
        (base, 512),
        (base[::-1], 256),
        (base[:1], 256),
        ((TensorSpec("a2", "float32", (4, 6)), base[1]), 256),
        ((TensorSpec("a", "int32", (4, 6)), base[1]), 256),  # as many bytes
        ((TensorSpec("a", "float32", (6, 4)), base[1]), 256),  # as many bytes
        ((*base, TensorSpec("c", "float32", (0,))), 256),  # as many bytes
    ]
    hashes = [plan_buckets(Manifest(tensors), bucket).hash for tensors, bucket in variants]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    ("nbytes", "on_gpu", "want"),
    [
        (0, True, 64 << 20),
        (1 << 30, True, 64 << 20),
        (4 << 30, True, 256 << 20),
        (16 << 30, True, 1 << 30),
        (1 << 40, True, 1 << 30),
        (1 << 40, False, 64 << 20),
    ],
)
def test_where_nobody_says_how_large_a_bucket_goes_by_the_update_and_where_it_lies(nbytes: int, on_gpu: bool, want: int) -> None:
    assert bucket_bytes_for(nbytes, on_gpu) == want
