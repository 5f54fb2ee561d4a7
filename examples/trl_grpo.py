"""TRL's `GRPOTrainer` with rollouts and weights through a fleet.

    pip install trl matplotlib
    python examples/trl_grpo.py [CHECKPOINT URL TOKEN_FILE]

TRL logs how far its own log-probabilities of the sampled tokens are from the engines'. Here both compute in float32, so what is left
shows that the engines hold exactly the trainer's weights at every step. A CHECKPOINT needs a tokenizer that knows the task's words.
"""

import os

import torch
from datasets import Dataset
from serving import fleet
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainer_adapters.trl import attach
from weightsync.demo import task

STEPS, TOKENS = int(os.environ.get("STEPS", 10)), 8


def same_topic(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Share of the words that are of the prompt's topic (`sea12` and `sea7` are)."""
    topics = [prompt.split()[-1].rstrip("0123456789") for prompt in prompts]
    return [sum(word.startswith(topic) for word in answer.split()) / TOKENS for topic, answer in zip(topics, completions, strict=True)]


class Show(TrainerCallback):
    def on_log(self, args: object, state: object, control: object, logs: dict[str, float], **_: object) -> None:
        if "reward" in logs:
            gap = logs["sampling/sampling_logp_difference/max"]
            print(f"step {state.global_step}: reward {logs['reward']:.3f}, largest log-probability gap {gap:.2e}", flush=True)


def main() -> None:
    with fleet(float32=True) as (checkpoint, url, token):
        rows = [f"<bos> {topic}{at} {topic}{at + 7} {topic}{at + 19}" for at in range(64) for topic in task.TOPICS]
        config = GRPOConfig(
            output_dir="trl_grpo_output",
            max_steps=STEPS,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=TOKENS,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
            same_topic,
            config,
            train_dataset=Dataset.from_dict({"prompt": rows}),
            processing_class=AutoTokenizer.from_pretrained(checkpoint, padding_side="left"),
            callbacks=[Show()],
        )
        sync = attach(trainer, url, token, dtype=AutoConfig.from_pretrained(checkpoint).dtype)
        trainer.train()
        if sync is not None:  # in the first process
            print(f"engines serve version {sync.status().committed_version}")
            sync.close()


if __name__ == "__main__":
    main()
