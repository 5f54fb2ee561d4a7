"""The trainer's process: torch and httpx, nothing heavier, and no vLLM.

`WeightSync` is all that a trainer needs. One whose tensors have to be made when they are sent gives `Lazy`
ones, or a `TensorSource` of its own; one whose adapter travels alone may take it apart itself (`Lora`); one that samples
otherwise than by `generate` gives `observe` its `Sample`s.
"""

from weightsync.client.lora import Lora, lora_of
from weightsync.client.observing import Sample
from weightsync.client.published import Published
from weightsync.client.source import Lazy, SourceSpec, TensorSource
from weightsync.client.sync import WeightSync

__all__ = ["Lazy", "Lora", "Published", "Sample", "SourceSpec", "TensorSource", "WeightSync", "lora_of"]
