"""What an update takes beside the weights: a trainer two buckets and the largest tensor; a worker what is staged, and two buckets to move.

Every storage that a torch operation makes in a thread of the update is counted for as long as it lives, and what a worker maps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.test_overlap import Gathered
from tests.wires import Ends, same_bits
from weightsync.transport import digest
from weightsync.transport.beside import Beside
from weightsync.transport.memory import HostMemory
from weightsync.worker import staging
from weightsync.worker.receiver import Receiver

BUCKET = 1 << 20
LARGEST = 3 * BUCKET + 4096
#: The digest's own: a run of words at a time.
SCRATCH = 8 * digest.BLOCK + (64 << 10)


class Counted:
    """Bytes of storages that are alive, and the most there were."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock = threading.Lock()
        self.peak = 0

    def saw(self, tensor: torch.Tensor, known: bool) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = (StorageWeakRef(storage), 0 if known else storage.nbytes())
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """In this thread, and in those of the update that begin meanwhile."""
        counted = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                for tensor in tree_leaves((args, kwargs)):
                    if isinstance(tensor, torch.Tensor):
                        counted.saw(tensor, known=True)  # if it was not made here, it was there before
                made = function(*args, **(kwargs or {}))
                for tensor in tree_leaves(made):
                    if isinstance(tensor, torch.Tensor):
                        counted.saw(tensor, known=False)
                return made

        def counting(run: Any) -> Any:
            def body(self: Any) -> None:
                with Mode():
                    run(self)

            return body

        with patch.object(Beside, "_run", counting(Beside._run)), patch.object(Receiver, "_run", counting(Receiver._run)), Mode():
            yield


def weights() -> dict[str, torch.Tensor]:
    """12 MiB, of which the largest two lie one behind the other, one of them not contiguous."""
    tensors = {f"small{index}": torch.randn(50_000) for index in range(20)}
    tensors |= {
        "large": torch.randn(LARGEST // 4),
        "turned": torch.randn(LARGEST // 4 // 8, 8).t(),
        "large again": torch.randn(LARGEST // 4),
    }
    return tensors | {"last": torch.randn(7)}


def taken(ends: Ends, receive: bool) -> int:
    """The most that one side's threads had, beside what was there."""
    digest.digest_tensor(torch.ones(9))  # its table stays
    counted, mapped = Counted(), list[int]()

    class Mapped(HostMemory):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            mapped.append(nbytes)

    if receive:
        ends.send()
        with counted.everywhere(), patch.object(staging, "HostMemory", Mapped):
            ends.receive()
            ends.receiver._thread.join(20)
        assert all(map(same_bits, ends.arrived(), weights_of(ends)))
    else:
        ends.trainer.travel = lambda *_: time.sleep(0.002)  # type: ignore[method-assign]  # meanwhile the next one is packed
        with counted.everywhere():
            ends.send()
    return counted.peak + sum(mapped)


def weights_of(ends: Ends) -> list[torch.Tensor]:
    return [ends.offer.read(index) for index in range(len(ends.offer.manifest.tensors))]


@pytest.mark.parametrize("kind", ["resident", "gathered"])
def test_a_trainer_takes_two_buckets_and_the_largest_tensor(kind: str) -> None:
    tensors = weights()
    if kind == "gathered":
        del tensors["turned"]  # what a gather makes is contiguous
    peak = taken(Ends(Gathered(tensors) if kind == "gathered" else tensors, BUCKET), receive=False)
    assert 2 * BUCKET < peak <= 2 * BUCKET + LARGEST + SCRATCH


def test_a_trainer_of_contiguous_resident_tensors_takes_two_buckets_alone() -> None:
    tensors = weights()
    del tensors["turned"]
    assert 2 * BUCKET <= taken(Ends(tensors, BUCKET), receive=False) <= 2 * BUCKET + SCRATCH


def test_a_worker_that_stages_takes_what_it_stages_alone() -> None:
    ends = Ends(weights(), BUCKET)
    peak = taken(ends, receive=True)
    assert ends.plan.stream_bytes <= peak <= ends.plan.stream_bytes + SCRATCH


def test_a_worker_that_moves_buckets_takes_two_of_them_beside_what_it_stages() -> None:
    ends = Ends(weights(), BUCKET)
    with patch.object(staging.Whole, "device", property(lambda self: torch.device("meta"))):
        peak = taken(ends, receive=True)
    assert ends.plan.stream_bytes + 2 * BUCKET <= peak <= ends.plan.stream_bytes + 2 * BUCKET + SCRATCH
