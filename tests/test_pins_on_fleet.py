"""A pin on a real fleet: one engine is held at a version, to the bit, while the other goes on; then it is brought up to it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.fleets import MAX_TOKENS, PROMPTS, Fleet, answers, engine_pid, wait_until
from weightsync.errors import NoEngineReady, PinRefused, WeightSyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KIND = "qwen3"


def test_a_pinned_engine_answers_as_it_did_to_the_bit_then_as_the_other_does(
    checkpoint: Any, tensors: Any, cold: Any, tmp_path: Any
) -> None:
    fleet = Fleet(checkpoint(KIND, 1), tmp_path / "home", 2).ready()
    try:
        with fleet.client(bucket_bytes=60_000) as sync:
            n = sync.sync_weights(tensors(KIND, 1)).version
            status = sync.pin("eval", n)
            assert [(e.pinned, e.version) for e in status.engines] == [("", n), ("eval", n)]
            for step, seed in ((1, 2), (2, 3)):
                report = sync.sync_weights(tensors(KIND, seed))
                assert (report.version, [v.engine for v in report.verdicts]) == (n + step, [0])
                assert answers(sync, 0) == cold(KIND, seed)
                assert answers(sync, 1) == cold(KIND, 1), "held, to the bit"
                assert sample(sync) == {(0, n + step)} and sample(sync, pin="eval") == {(1, n)}
            status = sync.status()
            assert ([e.version for e in status.engines], status.ready) == ([n + 2, n], 1)
            assert fleet.get("/readyz").json() == {"ready": True, "reasons": [], "engines": {"0": "serving", "1": "serving"}}
            wait_until(lambda: "weightsync_pinned_engines 1.0" in fleet.get("/metrics").text, 5, "the gauge")
            with pytest.raises(PinRefused, match=rf"engine 0 serves with version {n + 2}, engine 1 .* version {n}, pinned as 'eval'"):
                sync.pin("another", n + 2, engines=2)
            assert not sync.attach_run(n + 2).needed

            os.kill(next(pid for pid, name in fleet.processes().items() if name.startswith("ray::Controller")), signal.SIGKILL)
            wait_until(lambda: pins(sync) == ["", "eval"], 30, "a new controller that has learned of it")
            assert answers(sync, 1) == cold(KIND, 1)

            assert [e.pinned for e in sync.unpin("eval").engines] == ["", ""]
            wait_until(lambda: sync.status().ready == 2, 30, "what engine 0 had kept")
            assert answers(sync, 0) == answers(sync, 1) == cold(KIND, 3)
            assert len({e.update_id for e in sync.engines()}) == 1
            with pytest.raises(NoEngineReady, match="under pin 'eval'"):
                sync.generate(PROMPTS[0], pin="eval")

            # A pin ends with the process that kept it.
            sync.pin("eval", n + 2)
            os.kill(engine_pid(fleet, 1), signal.SIGKILL)
            wait_until(lambda: pins(sync) == ["", ""], 60, "a new process")
            wait_until(lambda: sync.status().ready == 2, 90, "the committed version in it")
            assert answers(sync, 1) == cold(KIND, 3)
            assert len(sync.sync_weights(tensors(KIND, 2)).verdicts) == 2
    finally:
        assert fleet.stop() == 0


def sample(sync: Any, **whom: Any) -> set[tuple[int, int | None]]:
    """Who answers, with which version."""
    made = [sync.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, **whom) for prompt in PROMPTS]
    return {(one.engine, one.version) for one in made}


def pins(sync: Any) -> list[str] | None:
    try:
        return [e.pinned for e in sync.engines()]
    except WeightSyncError:
        return None
