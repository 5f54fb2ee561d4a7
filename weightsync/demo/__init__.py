"""A whole RL post-training loop in small: real engines, real GRPO, and a proof at the end.

    process                 runs                            does
    ----------------------  ------------------------------  ---------------------------------------------
    `weightsync demo`       `demo/run.py`                   builds the checkpoint, starts the three below,
                            (`processes.py`, `view.py`)     shows the table, draws demo.png, ends them all
    the fleet               `weightsync serve`              vLLM engines in Ray actors, and the HTTP service
    the trainer             `demo/trainer.py` (`grpo.py`)   rollouts, GRPO, `sync_weights()` after each step
    the cold engine         `demo/cold.py`                  a fresh vLLM engine on the weights synced last

Both `run` and `trainer` use `checkpoint.py` (a small Qwen3 with a tokenizer: dense, with
experts, or INT8), `formats.py` (from the trainer's weights to that checkpoint's form and back)
and `task.py` (a toy task with a reward). The proof: after the last update every engine
of the fleet answers greedy prompts with the same tokens and log-probabilities, to
the bit, as an engine that loaded the trainer's saved weights from disk. On a GPU, where
two cold engines may differ by what kernels they chose, within what three of them differ by
(nothing, as a rule); there each update also compares stored bytes (`sync.verify_stored`).

`place.py` says what runs where. Not covered: models worth having, asynchronous rollouts
(here each step waits for the engines to hold the newest weights).
"""

#: Values of `weightsync demo --model`.
MODELS = ("qwen3", "qwen3-moe", "int8")
