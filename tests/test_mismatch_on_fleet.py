"""A wrong engine among three real ones, seen: weights that nobody has sent, behind a proof that passed.

It is named by `observe`, by the probe and by the alerts. Not covered: graphs (an engine on a CPU captures none).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.alarms import require_alerts
from tests.fleets import PROMPTS, Fleet, order_fault, wait_until, with_faults
from tests.test_metrics import samples
from weightsync import WeightSync
from weightsync.client import Sample
from weightsync.mismatch import ProbeReport
from weightsync.protocol import EngineState, Observation
from weightsync.results import Generation

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(500)]

KIND = "qwen3"
ENGINES = range(3)


@pytest.fixture(scope="module")
def three(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Path]]:
    """A fleet of three, and where its workers look for what is to go wrong."""
    fault = tmp_path_factory.mktemp("fault") / "fault.json"
    running = Fleet(checkpoint(KIND, 1), tmp_path_factory.mktemp("fleet"), 3, [], with_faults(fault)).ready()
    yield running, fault
    assert running.stop() == 0


class Trainer:
    """What a trainer makes of completions: its own forward pass."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, prompt: list[int], made: Generation) -> torch.Tensor:
        tokens = torch.tensor([prompt + list(made.token_ids)])
        with torch.no_grad():
            logits = self._model(tokens).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]


def observe(sync: WeightSync, trainer: Trainer, forms: str = "generations") -> Observation:
    """Sample from every engine, and tell of it."""
    made = [(prompt, sync.generate(prompt, max_tokens=24, ignore_eos=True, engine=e)) for e in ENGINES for prompt in PROMPTS]
    own = [trainer.logprobs(prompt, one) for prompt, one in made]
    if forms == "generations":
        return sync.observe([one for _, one in made], own)
    arrays = [
        Sample(one.token_ids, logprobs, torch.tensor(one.logprobs), one.engine, one.version or 0)
        for (_, one), logprobs in zip(made, own, strict=True)
    ]
    return sync.observe(arrays)


def metrics(fleet: Fleet) -> str:
    return httpx.get(f"{fleet.url}/metrics", timeout=10).text


def probe_of(sync: WeightSync, weights: Any) -> ProbeReport:
    report = sync.sync_weights(weights)
    assert all(verdict.committed for verdict in report.verdicts)
    wait_until(lambda: (probe := sync.status().probe) is not None and probe.version == report.version, 15, "the probe")
    probe = sync.status().probe
    assert probe is not None and probe.skipped == {} and probe.no_graphs == "this engine captures no graphs"
    print(f"probe of version {probe.version}: {probe.seconds:.3f} s; in the commit {report.seconds['probe']:.3f} s; {probe.engines}")
    return probe


def test_an_engine_with_wrong_weights_is_named_by_samples_by_the_probe_and_by_the_alerts(
    three: tuple[Fleet, Path], checkpoint: Any, tensors: Any, tmp_path: Path
) -> None:
    fleet, fault = three
    trainers = {seed: Trainer(checkpoint(KIND, seed)) for seed in (1, 2)}
    with fleet.client(bucket_bytes=60_000) as sync:
        for seed in (1, 2, 1):
            right = probe_of(sync, tensors(KIND, seed))
            assert right.named == () and right.said == () and max(right.engines.values()) < 0.01
        seen = observe(sync, trainers[1])
        assert seen.named == () and [m.behind for m in seen.engines] == ["0"] * 3 and max(m.difference for m in seen.engines) < 0.05
        require_alerts(tmp_path, metrics(fleet), [])

        order_fault(fault, 1, step="poke", engine=1)
        wrong = probe_of(sync, tensors(KIND, 2))
        assert wrong.named == (1,) and "engine 1 differs from most engines" in wrong.said[0]
        assert max(wrong.engines["0"], wrong.engines["2"]) < 0.01 < 0.25 < wrong.engines["1"]
        assert all(e.state == EngineState.SERVING for e in sync.engines()), "it is warned of, and no more"
        for forms in ("generations", "arrays"):
            seen = observe(sync, trainers[2], forms)
            assert seen.named == (1,), seen
            assert all(m.k3 >= 0 for m in seen.engines) and {m.tokens for m in seen.engines} == {24 * len(PROMPTS)}
        text = metrics(fleet)
        assert samples(text)['weightsync_observed_tokens_total{behind="0",engine="1"}'] == 3 * 24 * len(PROMPTS)
        alerts = [
            ("WeightsyncRolloutMismatch", {"engine": "1", "behind": "0"}),
            ("WeightsyncProbeDiffers", {"engine": "1", "against": "engines"}),
            ("WeightsyncProbeNames", {"engine": "1"}),
        ]
        log = next(path.read_text() for path in fleet.logs.glob("worker-*.err") if "behind update" in path.read_text())
        assert "engine 1 differs from most engines" in log

        healed = probe_of(sync, tensors(KIND, 2))
        assert healed.named == () and observe(sync, trainers[2]).named == ()
        require_alerts(tmp_path, text, alerts)


def test_the_probe_goes_beside_requests_that_run_and_takes_nothing_from_them(three: tuple[Fleet, Path], tensors: Any) -> None:
    fleet, _ = three
    url, headers = "/inference/v1/generate", {"authorization": f"Bearer {fleet.token}"}
    with fleet.client(bucket_bytes=60_000) as sync:
        sync.sync_weights(tensors(KIND, 1))
        sampling = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True, "logprobs": 3, "detokenize": False}
        addresses, answers = [e.url for e in sync.engines()], list[Any]()

        def ask(address: str) -> None:
            body = {"token_ids": PROMPTS[0], "sampling_params": sampling, "model": "policy"}
            answers.append(httpx.post(address + url, json=body, headers=headers, timeout=120))

        threads = [threading.Thread(target=ask, args=(address,)) for address in addresses for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: answers or all(thread.is_alive() for thread in threads), 10)
        probe = probe_of(sync, tensors(KIND, 2))
        beside = sum(thread.is_alive() for thread in threads)
        for thread in threads:
            thread.join(120)
        assert beside > 0, "requests were still running when the probe had ended"
        assert probe.named == () and set(probe.engines) == {"0", "1", "2"}
        for answer in answers:
            entries = answer.json()["choices"][0]["logprobs"]["content"]
            assert len(entries) == 200 and all(len(entry["top_logprobs"]) == 3 for entry in entries)
            assert all(top["logprob"] > -100 for entry in entries for top in entry["top_logprobs"]), "the likeliest are its own"
