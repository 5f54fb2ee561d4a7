"""Trainers that people use, and the fleet: one module for each, which imports `weightsync` and, when it is called, the trainer.

    fleet           what they share: `connect`, `weights(model, dtype)`, `Stream`; for any torch loop as well
    peft            adapters merged on the way
    callback        transformers.Trainer, and what takes its callbacks
    trl, trl_async  TRL's GRPOTrainer; its experimental asynchronous GRPO
    verl, verl_rollouts, skyrl, openrlhf

Each module's docstring says how it is switched on, which version it was tested with, and how far.
"""
