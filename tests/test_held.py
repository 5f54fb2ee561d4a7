"""What is kept behind partial updates, to come back to and for other engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weightsync.client.source import offer
from weightsync.protocol import BeginOrder, CommunicatorInfo, UpdateRequest
from weightsync.transport import digest
from weightsync.transport.packing import plan_buckets
from weightsync.transport.retained import Folder
from weightsync.worker.held import Held
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.staging import Staged

FULL = {"q": 1.0, "k": 1.0, "v": 1.0, "rotary": 1.0}


def order(update_id: str, keep_in: str = "") -> BeginOrder:
    request = UpdateRequest(update_id, "t", int(update_id[1:]), offer({"q": torch.zeros(3)}).manifest, 4096, "h", 1.0, "gloo", "2")
    info = CommunicatorInfo("h", 1, 1, 2, {"0": 1}, "gloo")
    return BeginOrder(request, info, 0, 1, 1.0, retain=True, hand_on=bool(keep_in), keep_in=keep_in)


def settle(held: Held, update_id: str, incoming: Staged | None, keep_in: str = "") -> None:
    held.settle(order(update_id, keep_in), 0, incoming)


def staged(values: dict[str, float], load_map: LoadMap, unused: frozenset[int] = frozenset()) -> Staged:
    tensors = {name: torch.full((3,), value) for name, value in values.items()}
    manifest = offer(tensors).manifest
    plan = plan_buckets(manifest, 4096)
    data = torch.zeros(plan.stream_bytes, dtype=torch.uint8)
    for offset, tensor in zip(plan.offsets, tensors.values(), strict=True):
        data[offset : offset + tensor.nbytes] = tensor.view(torch.uint8)
    return Staged(manifest, plan.offsets, data, load_map, frozenset(), unused)


def values(kept: Staged | None) -> dict[str, float]:
    assert kept is not None
    return {spec.name: float(kept.tensor(index)[0]) for index, spec in enumerate(kept.manifest.tensors)}


@pytest.mark.parametrize("writes", [{"q": [], "k": []}, {"k": []}])
def test_all_that_loaders_touched_of_a_partial_update_is_kept_whoever_is_said_to_have_written_it(writes: dict[str, list[object]]) -> None:
    """A loader that joins q and k before it stores them writes under the name of the second."""
    held = Held()
    settle(held, "u1", staged(FULL, LoadMap({})))
    part = LoadMap({}, writes, touched={"q", "k"}, part=True)  # type: ignore[arg-type]
    settle(held, "u2", staged({"q": 2.0, "k": 2.0, "rotary": 2.0}, part))
    assert values(held.kept) == {"q": 2.0, "k": 2.0, "v": 1.0, "rotary": 1.0}
    assert held.counts == "u2"


def kept_for_others(folder: Path) -> dict[str, float]:
    """What an engine's actor would send of what is kept."""
    head = Folder(folder).head()
    assert head is not None
    stream = Folder(folder).open(head.update_id)
    plan = plan_buckets(stream.manifest, head.bucket_bytes)
    sums = dict(zip((spec.name for spec in stream.manifest.tensors), digest.unpack(stream.digests), strict=True))
    found = {}
    for spec, offset in zip(stream.manifest.tensors, plan.offsets, strict=True):
        tensor = stream.data[offset : offset + spec.nbytes].view(torch.float32)
        assert digest.digest_tensor(tensor) == sums[spec.name], f"{spec.name} is not what its digest says"
        found[spec.name] = float(tensor[0])
    return found


def for_others(values: dict[str, float], load_map: LoadMap, folder: Path, update_id: str) -> Staged:
    """As it was received into the file, or, of a partial one, beside it."""
    made = staged(values, load_map)
    made = replace(made, digests={index: digest.digest_tensor(made.tensor(index)) for index in range(len(values))})
    if load_map.part:
        return made
    memory, file = Folder(folder).memory(update_id, made.data.numel())
    assert memory is not None
    return replace(made, data=memory.tensor().copy_(made.data), file=file)


def test_what_is_kept_for_other_engines_follows_partial_updates_and_is_one_file(tmp_path: Path) -> None:
    folder, held = tmp_path / "shelf", Held()
    settle(held, "u1", for_others(FULL, LoadMap({}), folder, "u1"), str(folder))
    held.stop()
    assert kept_for_others(folder) == FULL
    part = LoadMap({}, {"k": []}, touched={"q", "k"}, part=True)
    settle(held, "u2", for_others({"q": 2.0, "k": 2.0}, part, folder, "u2"), str(folder))
    held.stop()
    assert kept_for_others(folder) == values(held.kept) == {"q": 2.0, "k": 2.0, "v": 1.0, "rotary": 1.0}
    settle(held, "u3", for_others(FULL, LoadMap({}), folder, "u3"), str(folder))
    held.stop()
    assert kept_for_others(folder) == FULL
    assert Folder(folder).head().update_id == "u3" and len(list(folder.glob("*.bytes"))) == 1  # type: ignore[union-attr]


def test_a_partial_update_that_does_not_fit_what_is_kept_leaves_nothing_for_other_engines(tmp_path: Path) -> None:
    folder, held = tmp_path / "shelf", Held()
    settle(held, "u1", for_others(FULL, LoadMap({}), folder, "u1"), str(folder))
    part = LoadMap({}, {"w": []}, touched={"w"}, part=True)
    settle(held, "u2", for_others({"w": 2.0}, part, folder, "u2"), str(folder))
    held.stop()
    assert held.kept is None and Folder(folder).head() is None and not folder.exists()


def test_without_room_for_a_file_the_way_back_is_kept_all_the_same(tmp_path: Path) -> None:
    folder, held = tmp_path / "shelf", Held()
    folder.write_text("a file stands in the way")
    settle(held, "u1", staged(FULL, LoadMap({})), str(folder))
    held.stop()
    assert values(held.kept) == FULL and Folder(folder).head() is None


def test_what_another_worker_needs_alone_is_not_merged_and_what_does_not_fit_ends_the_keeping() -> None:
    held = Held()
    settle(held, "u1", staged(FULL, LoadMap({}), frozenset({0})))
    part = LoadMap({}, {"q": [], "k": []}, touched={"q", "k"}, part=True)
    settle(held, "u2", staged({"q": 2.0, "k": 2.0}, part, frozenset({0})))
    assert values(held.kept)["q"] == 1.0 and values(held.kept)["k"] == 2.0
    settle(held, "u3", staged({"q": 3.0, "k": 3.0}, part))
    assert held.kept is None, "the kept one lacks q's bytes"
