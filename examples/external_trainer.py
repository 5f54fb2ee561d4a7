"""A trainer outside of Ray and of the fleet's machine: all it needs is `pip install weightsync`, the URL and the token.

    weightsync serve --engine.model CHECKPOINT --api.host 0.0.0.0       # on a machine of the fleet; --sync.store_host=ITS_ADDRESS
    python examples/external_trainer.py [CHECKPOINT URL TOKEN_FILE]     # anywhere that reaches it

It starts again as trainers do: `attach_run(step)` says what the fleet serves, and whether a sync is needed, before anything is sent.
Ray and vLLM are never loaded here, which the last line shows.
"""

import sys

import torch
from serving import fleet
from transformers import AutoModelForCausalLM

from weightsync import WeightSync, WeightSyncError


def run(checkpoint: str, url: str, token: str, first_step: int, steps: int) -> int:
    """A run of a trainer, from the checkpoint of `first_step`; the last step."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with WeightSync(url, token, timeout_seconds=120) as sync:
        found = sync.attach_run(first_step)
        print(f"step {first_step}: {found.advice or 'the fleet serves it'}")
        if found.needed:
            sync.sync_weights(model, version=first_step, rewind=found.rewind)
        for step in range(first_step + 1, first_step + steps + 1):
            batch = torch.tensor([[1, 8, 9, 10, 8, 9, 10]])
            model(batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sync.sync_weights(model, version=step)
            print(f"step {step}: {report.nbytes / 1e6:.1f} MB in {report.seconds['total']:.2f} s, paused {report.pause_seconds:.3f} s")
        return step


with fleet() as (checkpoint, url, token):
    with WeightSync(url, token) as sync:
        committed = sync.status().committed_version or 0
    last = run(checkpoint, url, token, committed + 1, steps=2)
    run(checkpoint, url, token, last - 1, steps=2)  # it had crashed, and its newest checkpoint is one step old
    try:
        with WeightSync(url, token + "x") as sync:
            sync.status()
    except WeightSyncError as exc:
        print(f"with a wrong token: {exc}")
print(f"loaded: {', '.join(name for name in ('ray', 'vllm', 'torch', 'httpx') if name in sys.modules)}")
