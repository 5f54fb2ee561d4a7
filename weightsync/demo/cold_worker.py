"""What vLLM loads into each worker of a cold engine: leave to use AMX tiles, and nothing else.

Leave is a process's own, and an engine of several workers has a process for each.

Not covered: anything of the weights; a cold engine is vLLM as it comes.
"""

from __future__ import annotations

from weightsync.worker import tiles

tiles.ask()


class ColdWorker:
    """For vLLM's `worker_extension_cls`."""
