"""Send a model's weights to a running fleet and ask it something.

    weightsync serve --engine.model CHECKPOINT        # prints the URL and the token's file
    python examples/quickstart.py CHECKPOINT URL TOKEN_FILE

Not covered: training; `weightsync/demo/trainer.py` is a whole loop.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from weightsync import WeightSync

checkpoint, url, token_file = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")

with WeightSync(url, token=Path(token_file).read_text().strip()) as sync:
    report = sync.sync_weights(model)
    print(f"version {report.version}: {report.nbytes / 1e6:.1f} MB in {report.seconds['total']:.2f} s")
    answer = sync.generate([1, 8, 9, 10], max_tokens=8, temperature=0.0)
    print(f"tokens {list(answer.token_ids)} from version {answer.version}")
