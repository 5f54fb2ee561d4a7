"""An FSDP2 trainer of two ranks (gloo, no GPU needed) whose engines follow every step.

    weightsync serve --engine.model CHECKPOINT        # prints the URL and the token's file
    torchrun --nproc-per-node 2 examples/fsdp2.py CHECKPOINT URL TOKEN_FILE

Every rank makes WeightSync with the same group and makes the same calls. The first one talks to the
service and sends; shards are gathered a bucket at a time. After each step an engine's log-probabilities
are compared with the trainer's own, before the sync (stale weights) and behind it.

Not covered: a task worth learning; `weightsync/demo/trainer.py` has one.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from weightsync import Generation, WeightSync

PROMPT, TOKENS, STEPS = [1, 8, 9, 10], 12, 3


def sharded(checkpoint: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def gap(model: torch.nn.Module, answer: Generation) -> float:
    """How far the trainer's log-probabilities are from an engine's; every rank calls this, for a forward pass gathers too."""
    tokens = torch.tensor([PROMPT + list(answer.token_ids)])
    with torch.no_grad():
        ours = model(tokens).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
    ours = ours.gather(1, tokens[0, len(PROMPT) :, None])[:, 0]
    return (ours - torch.tensor(answer.logprobs)).abs().max().item()


def ask(sync: WeightSync) -> Generation:
    return sync.generate(PROMPT, max_tokens=TOKENS, temperature=0.0)


def main() -> None:
    checkpoint, url, token_file = sys.argv[1:]
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    model = sharded(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with WeightSync(url, token=Path(token_file).read_text().strip(), group=dist.group.WORLD) as sync:
        for step in range(1, STEPS + 1):
            batch = torch.tensor([PROMPT * 2])
            loss = model(batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            answers = [ask(sync) if first and step > 1 else None]  # of the weights before
            report = sync.sync_weights(model)
            answers.append(ask(sync) if first else None)
            dist.broadcast_object_list(answers)
            gaps = [f"{gap(model, answer):.4f}" for answer in answers if answer is not None]
            if first:
                engines = sum(verdict.committed for verdict in report.verdicts)
                print(
                    f"step {step}: loss {loss.item():.3f}, version {report.version} in {engines} engines, "
                    f"{report.nbytes / 1e6:.1f} MB, {report.seconds['total']:.2f} s of which gathering {report.seconds['export']:.2f}, "
                    f"log-probability gap {' -> '.join(gaps)}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
