"""The trainer's process: torch and httpx, nothing heavier, and no vLLM.

`WeightSync` is all that a trainer needs.
"""

from weightsync.client.published import Published
from weightsync.client.sync import WeightSync

__all__ = ["Published", "WeightSync"]
