"""A trainer on its engine's host, which hands it its weights by shared memory: the main job with a real engine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleets import Fleet, answers, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3"
BUCKET = 60_000

#: Stands behind half of an update.
HANGS = """
import sys, time
from safetensors.torch import load_file
from weightsync import WeightSync

def hold(sent, total):
    if sent * 2 > total:
        print("half", flush=True)
        time.sleep(600)

WeightSync(sys.argv[1], sys.argv[2], bucket_bytes=60_000).sync_weights(load_file(sys.argv[3]), progress=hold)
"""


@pytest.fixture(scope="module")
def local(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("local"), flags=["--sync.local=host"]).ready()
    yield running
    assert running.stop() == 0


def test_an_engine_takes_new_weights_from_memory_and_outlives_a_trainer_that_is_killed(
    local: Fleet, tensors: Any, checkpoint: Any, cold: Any, tmp_path: Path
) -> None:
    with local.client(bucket_bytes=BUCKET) as sync:
        for seed in (1, 2, 1):
            published = sync.publish(tensors(KIND, seed))
            reached = published.admission.communicator
            assert (reached.local, reached.world_size) == ({"0": (0,)}, 1)
            sync.commit(published)
            assert answers(sync, 0) == cold(KIND, seed)
        engine = sync.engines()[0]

        script = tmp_path / "trainer.py"
        script.write_text(HANGS)
        command = [sys.executable, str(script), local.url, local.token, str(checkpoint(KIND, 2) / "model.safetensors")]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None and trainer.stdout.readline().strip() == "half"
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        killed = time.monotonic()
        update = local.get("/v1/updates").json()[0]["update_id"]
        status = wait_until(lambda: (s := local.get(f"/v1/updates/{update}").json())["state"] == "aborted" and s, 10, "the abort")
        assert "the trainer is gone" in status["error"]["message"]
        assert time.monotonic() - killed < 5
        assert answers(sync, 0) == cold(KIND, 1)

        sync.sync_weights(tensors(KIND, 2))
        assert answers(sync, 0) == cold(KIND, 2)
        assert sync.engines()[0].url == engine.url, "the engine was not restarted"
