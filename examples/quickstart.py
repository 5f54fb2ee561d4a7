"""Serve a model, send weights to it, and ask it something.

    python examples/quickstart.py [CHECKPOINT URL TOKEN_FILE]

Not covered: training; `grpo_from_scratch.py` is a whole loop.
"""

from serving import fleet
from transformers import AutoModelForCausalLM

from weightsync import WeightSync

with fleet() as (checkpoint, url, token), WeightSync(url, token) as sync:  # `weightsync serve --engine.model CHECKPOINT`
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    report = sync.sync_weights(model)
    print(f"version {report.version}: {report.nbytes / 1e6:.1f} MB in {report.seconds['total']:.2f} s")
    answer = sync.generate([1, 8, 9, 10], max_tokens=8, temperature=0.0)
    print(f"tokens {list(answer.token_ids)} from version {answer.version}")
