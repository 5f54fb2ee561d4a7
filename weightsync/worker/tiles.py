"""Leave to use AMX, the matrix tiles of some x86 CPUs.

Linux ends a process with SIGILL that uses them and has not asked. vLLM's attention on a CPU
uses them wherever the CPU has them and leaves the asking to oneDNN, which asks when it first
multiplies matrices by them: a small model's may never be.

Not covered: what else of a CPU's extensions vLLM picks by itself.
"""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)


def ask() -> None:
    """For this process, its threads, and processes that it forks; nothing on another CPU."""
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning("this CPU has AMX and the system does not let this process use it: vLLM may end with SIGILL")
