"""The trainer's process: torch and httpx, nothing heavier, and no vLLM.

`WeightSync` is all that a trainer needs.
"""

from weightsync.client.sync import Published, WeightSync

__all__ = ["Published", "WeightSync"]
