"""How old the allocator's blocks are, told from snapshots that are made up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weightsync.storage import census
from weightsync.storage.blocks import Age, Loaded, MemoryMap, Span, last_handed_out, where
from weightsync.storage.census import Join
from weightsync.storage.graph_nodes import Touch

BASE = 0x7F00_0000_0000
NOTED_US = 1_000


def snapshot(*blocks: tuple[int, int, str], pool: tuple[int, int] = (0, 0)) -> list[dict[str, Any]]:
    """One segment; each block with its offset, what was asked for, and its state."""
    made = [{"address": BASE + at, "size": -(-asked // 512) * 512, "requested_size": asked, "state": state} for at, asked, state in blocks]
    return [{"address": BASE, "device": 0, "segment_pool_id": pool, "blocks": made}]


def alloc(at: int, time_us: int, action: str = "alloc") -> dict[str, Any]:
    return {"action": action, "addr": BASE + at, "size": 512, "time_us": time_us}


ACTIVE, FREE = "active_allocated", "inactive"


@pytest.mark.parametrize(
    ("then", "now", "traces", "age"),
    [
        (snapshot((0, 500, ACTIVE)), snapshot((0, 500, ACTIVE)), [], Age.LOADED),
        (snapshot((0, 500, FREE)), snapshot((0, 500, ACTIVE)), [], Age.LATER),
        ([], snapshot((0, 500, ACTIVE)), [], Age.LATER),
        (snapshot((0, 500, ACTIVE)), snapshot((0, 500, FREE)), [], Age.UNKNOWN),
        # Freed in between and handed out again, as far as it shows.
        (snapshot((0, 500, ACTIVE)), snapshot((0, 501, ACTIVE)), [], Age.LATER),
        (snapshot((0, 500, ACTIVE)), snapshot((0, 900, ACTIVE)), [], Age.LATER),
        (snapshot((0, 500, ACTIVE), pool=(0, 7)), snapshot((0, 500, ACTIVE)), [], Age.LATER),
        (snapshot((0, 500, ACTIVE)), snapshot((0, 500, ACTIVE)), [alloc(0, NOTED_US + 1)], Age.LATER),
        (snapshot((0, 500, ACTIVE)), snapshot((0, 500, ACTIVE)), [alloc(0, NOTED_US + 1), alloc(0, NOTED_US - 1)], Age.LATER),
        # A history that shows nothing of the kind.
        (snapshot((0, 500, ACTIVE)), snapshot((0, 500, ACTIVE)), [alloc(0, NOTED_US)], Age.LOADED),
        (snapshot((0, 500, ACTIVE)), snapshot((0, 500, ACTIVE)), [alloc(512, NOTED_US + 1)], Age.LOADED),
        (snapshot((0, 500, ACTIVE)), snapshot((0, 500, ACTIVE)), [alloc(0, NOTED_US + 1, "free_completed")], Age.LOADED),
        (snapshot((0, 500, ACTIVE)), snapshot((0, 500, ACTIVE)), [{"action": "oom", "size": 1}], Age.LOADED),
    ],
)
def test_a_block_is_as_old_as_the_allocator_shows(then: Any, now: Any, traces: list[Any], age: Age) -> None:
    loaded = Loaded(MemoryMap.from_snapshot(then), NOTED_US)
    span = MemoryMap.from_snapshot(now).find(BASE)
    assert span is not None and loaded.age(span, last_handed_out([traces])) is age


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A CUDA device that is made up, as far as a note needs one."""
    now: dict[str, Any] = {"segments": [], "traces": [], "recorded": False, "cleared": 0}

    def clear() -> None:
        now["cleared"] += 1
        now["segments"] = [
            {**segment, "blocks": [b | ({"state": FREE} if b["requested_size"] == 333 else {}) for b in segment["blocks"]]}
            for segment in now["segments"]
        ]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: now["segments"])
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": now["segments"], "device_traces": [now["traces"]]})
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: now["recorded"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(census, "_loaded", None)
    yield now


def ages(now: dict[str, Any]) -> list[Age]:
    """What a census says of all blocks."""
    memory = MemoryMap.from_snapshot(now["segments"])
    join = Join(memory, (), census._ages())
    join.add(0, [Touch("gemm", frozenset(span.address for span in memory.active()))])
    return [block.age for block in join.blocks(lambda _: None)]


def test_a_census_tells_what_was_there_when_loading_had_ended(device: dict[str, Any]) -> None:
    device["segments"] = snapshot((0, 500, ACTIVE), (512, 500, FREE))
    assert ages(device) == [Age.UNKNOWN], "nobody has noted it"
    census.note_loaded()
    device["segments"] = snapshot((0, 500, ACTIVE), (512, 500, ACTIVE))
    assert ages(device) == [Age.LOADED, Age.LATER]
    census.note_loaded()
    assert ages(device) == [Age.LOADED, Age.LOADED], "the last note counts"


def test_a_workspace_of_cublas_does_not_count_as_loaded(device: dict[str, Any]) -> None:
    device["segments"] = snapshot((0, 500, ACTIVE), (512, 333, ACTIVE))
    census.note_loaded()
    device["segments"] = snapshot((0, 500, ACTIVE), (512, 333, ACTIVE))  # the next product takes the same memory again
    assert device["cleared"] == 1 and ages(device) == [Age.LOADED, Age.LATER]


def test_a_history_is_asked_only_where_torch_records_one(device: dict[str, Any]) -> None:
    device["segments"] = snapshot((0, 500, ACTIVE))
    census.note_loaded()
    device["traces"] = [alloc(0, 1 << 62)]
    assert ages(device) == [Age.LOADED]
    device["recorded"] = True
    assert ages(device) == [Age.LATER]


def test_a_reload_under_captured_graphs_moves_the_note_nowhere(device: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device["segments"] = snapshot((0, 500, ACTIVE))
    census.note_loaded()
    monkeypatch.setattr(census, "captured_graphs", lambda: (object(),))
    device["segments"] = snapshot((0, 500, ACTIVE), (512, 500, ACTIVE))
    census.note_loaded()
    assert ages(device) == [Age.LOADED, Age.LATER]


def test_without_a_device_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "_loaded", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    census.note_loaded()
    assert census._loaded is None


def test_an_allocation_is_shown_by_the_frames_that_say_most() -> None:
    torchs = os.path.join(os.path.dirname(torch.__file__), "functional.py")
    frames = [
        {"filename": "??", "line": 0, "name": "c10::cuda::malloc"},
        {"filename": torchs, "line": 3, "name": "zeros"},
        {"filename": "/x/lib/python3.12/site-packages/vllm/kernels/moe.py", "line": 7, "name": "make_strides"},
        {"filename": "/x/lib/python3.12/site-packages/vllm/loader.py", "line": 9, "name": "load"},
    ]
    assert where(frames).startswith("vllm/kernels/moe.py:7 make_strides < vllm/loader.py:9 load < torch/functional.py:3 zeros")
    assert where([]) == "" and len(where(frames * 3).split(" < ")) == 4


def test_a_block_of_the_census_carries_them() -> None:
    segments = snapshot((0, 500, ACTIVE))
    segments[0]["blocks"][0]["frames"] = [{"filename": "a.py", "line": 1, "name": "f"}]
    memory = MemoryMap.from_snapshot(segments)
    join = Join(memory, ())
    join.add(0, [Touch("gemm", frozenset({BASE + 8}))])
    (block,) = join.blocks(lambda _: None)
    assert block.where == "a.py:1 f"
    assert memory.find(BASE) == Span(BASE, 512, 500, (0, 0), 0, True), "frames are no part of what a block is"
