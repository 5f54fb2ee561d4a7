"""What killed vLLM processes leave on a machine is removed, and nothing that anybody uses."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from weightsync.fleet.scratch import Scratch

MAKER = """
import sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
resource_tracker.register = lambda *_: None  # as vLLM does: its segments outlive a killed process
segment = SharedMemory(create=True, size=4096)
print(segment.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    made = Scratch(f"{os.getpid():x}-{time.time_ns():x}")
    yield made
    made.close()


def _maker() -> tuple[subprocess.Popen[str], Path]:
    child = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, Path("/dev/shm") / child.stdout.readline().strip()


def test_segments_of_killed_children_go_at_the_next_start_and_sockets_with_them(scratch: Scratch) -> None:
    variables = scratch.open()
    assert variables == {"VLLM_RPC_BASE_PATH": str(scratch.folder)}
    assert scratch.folder.stat().st_mode & 0o777 == 0o700
    child, segment = _maker()
    try:
        scratch.note()
        (scratch.folder / "a-socket").touch()
        scratch.open()
        assert segment.exists(), "the child lives"
        scratch.note()
        child.kill()
        child.wait()
        assert segment.exists()
        scratch.open()
        assert not segment.exists() and list(scratch.folder.iterdir()) == []
    finally:
        child.kill()
        segment.unlink(missing_ok=True)


def test_what_a_dying_child_still_holds_goes_at_the_start_behind_the_next(scratch: Scratch) -> None:
    scratch.open()
    child, segment = _maker()
    try:
        scratch.note()
        (notes,) = scratch.folder.iterdir()
        held = notes.read_text()
        again = Scratch(scratch.folder.name.rpartition("-")[2])
        again.folder = scratch.folder  # a new process of the same engine
        again.open()
        child.kill()
        child.wait()
        again.note()
        assert segment.name in held and segment.name in notes.read_text() and segment.exists()
        again.close()
        assert not segment.exists()
    finally:
        child.kill()
        segment.unlink(missing_ok=True)


def test_segments_of_others_stay(scratch: Scratch) -> None:
    scratch.open()
    scratch.note()
    child, segment = _maker()
    child.kill()
    child.wait()
    try:
        scratch.close()
        assert segment.exists() and not scratch.folder.exists()
    finally:
        segment.unlink()


def test_a_segment_that_somebody_else_has_mapped_stays(scratch: Scratch) -> None:
    scratch.open()
    child, path = _maker()
    scratch.note()
    child.kill()
    child.wait()
    mine = SharedMemory(name=path.name)
    try:
        scratch.close()
        assert path.exists()
    finally:
        mine.close()
        mine.unlink()


def test_notes_that_can_not_be_read_remove_nothing(scratch: Scratch) -> None:
    scratch.open()
    (scratch.folder / "segments.json").write_text("[")
    scratch.close()
    assert not scratch.folder.exists()


def test_sockets_fit_in_however_long_the_temporary_folder_s_name_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("/tmp", "/var/tmp/somebody", "/tmp/" + "long" * 20):
        monkeypatch.setattr("tempfile.tempdir", folder)
        made = Scratch("0123456789abcdef-and-more").folder
        assert len(f"{made}/{uuid.uuid4()}") <= 107
        assert str(made).startswith(folder) == (len(folder) < 30)


def test_a_semaphore_is_known_by_its_file_whatever_the_map_calls_it(scratch: Scratch) -> None:
    context = multiprocessing.get_context("spawn")
    before = set(os.listdir("/dev/shm"))
    held = context.Lock()
    (name,) = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("sem.mp-")}
    scratch.open()
    scratch.note()
    assert name in (scratch.folder / "segments.json").read_text()
    scratch.close()
    assert (Path("/dev/shm") / name).exists() and held


def test_notes_name_segments_alone_and_count_in_our_own_folder_alone(scratch: Scratch, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    scratch.open()
    (scratch.folder / "segments.json").write_text(json.dumps([str(victim), f"../..{victim}", "psm_/../x"]))
    scratch.close()
    assert victim.exists()
    child, segment = _maker()
    child.kill()
    child.wait()
    (tmp_path / "segments.json").write_text(json.dumps([segment.name]))
    scratch.folder.symlink_to(tmp_path)
    try:
        scratch.close()
        assert segment.exists()
    finally:
        scratch.folder.unlink()
        segment.unlink()
