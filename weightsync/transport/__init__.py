"""Bytes between processes, over torch.distributed or in memory that both have mapped; knows nothing of models.

Used by the trainer (`client/`), the controller (`fleet/`) and the receiving
thread in vLLM's workers (`worker/`). `packing` and `digest` are pure.
"""
