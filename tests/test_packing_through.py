"""Any tensors come through the real sender and the real receiver as they went in, by every way in which a bucket can land."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wires import Ends, same_bits
from weightsync.protocol import DTYPE_BYTES
from weightsync.worker import staging

BUCKET = 4096  # the least that an update may ask for
WAYS = ("in place", "moved", "streamed")
#: Elements of these dtypes laid end to end would begin at bytes that their neighbours can't be viewed at.
ODD = {"bfloat16": 3, "float32": 2, "uint8": 1, "float16": 5}


def tensor_of(dtype: str, elements: int, layout: str, seed: int) -> torch.Tensor:
    """Any bit pattern at all, as many elements, laid out in one of the ways that a tensor of a model can be."""
    real = getattr(torch, dtype)
    shape = {
        "flat": (elements,),
        "turned": (2, -(-elements // 2)),
        "every other": (elements, 2),
        "expanded": (1, elements),
        "inside": (elements + 3,),
    }[layout]
    high = 2 if dtype == "bool" else 256
    count = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
    data = torch.randint(0, high, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    whole = data.view(real).reshape(shape)
    if layout == "turned":
        return whole.t()
    if layout == "every other":
        return whole[:, 1]
    if layout == "expanded":
        return whole.expand(2, elements)
    return whole[3:] if layout == "inside" else whole


def through(way: str, tensors: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    """An update; all bits must be those that were sent."""
    elsewhere = property(lambda self: torch.device("meta"))
    moved = patch.object(staging.Whole, "device", elsewhere) if way == "moved" else patch.object(staging, "_SHARE", staging._SHARE)
    with moved:
        ends = Ends(tensors, bucket_bytes, "none" if way == "streamed" else "host")
        sending = threading.Thread(target=ends.send)
        ends.receive()
        sending.start()
        arrived = ends.arrived()
        sending.join(10)
    assert ends.read.is_set() and not sending.is_alive()
    assert len(arrived) == len(tensors)
    for got, (name, want) in zip(arrived, tensors.items(), strict=True):
        assert same_bits(got, want), name
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert (ends.receiver.nbytes, ends.receiver.tensors) == (total, len(tensors))


@pytest.mark.parametrize("way", WAYS)
def test_dtypes_of_different_width_in_any_order_share_a_bucket(way: str) -> None:
    for order in itertools.permutations(ODD):
        through(way, {dtype: tensor_of(dtype, ODD[dtype], "flat", seed) for seed, dtype in enumerate(order)}, BUCKET)


@st.composite
def models(draw: Any) -> dict[str, torch.Tensor]:
    """Tensors of 0 to 3 buckets each."""
    tensors = {}
    for index in range(draw(st.integers(1, 7))):
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        nbytes = draw(
            st.one_of(st.integers(0, 70), st.integers(0, 3 * BUCKET), st.sampled_from([BUCKET - 64, BUCKET, BUCKET + 64, 3 * BUCKET]))
        )
        layout = draw(st.sampled_from(["flat", "turned", "every other", "expanded", "inside"]))
        tensors[f"t{index}"] = tensor_of(dtype, nbytes // DTYPE_BYTES[dtype], layout, index)
    return tensors


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(tensors=models(), bucket_bytes=st.sampled_from([BUCKET, BUCKET + 64, 3 * BUCKET, 1 << 20]))
def test_any_tensors_come_through(way: str, tensors: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    through(way, tensors, bucket_bytes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("buckets", [0, 1, 2, 3])
def test_a_model_of_so_many_full_buckets_comes_through(way: str, buckets: int) -> None:
    through(way, {"empty": torch.empty(0, 3), "w": tensor_of("uint8", buckets * BUCKET, "flat", 1), "end": torch.empty(0)}, BUCKET)
