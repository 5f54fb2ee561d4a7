"""A worker's process sleeps soon behind a call, where it computes on a CPU.

vLLM's workers spin for a second behind each message, so that the next finds them awake. On a host whose cores compute, send and
receive as well, that takes one of them from the rest: from the thread that receives an update, to begin with, for each look at
how far it has come is a message.

Not covered: the engine's core, which spins while its workers compute; no code of ours runs there.
"""

from __future__ import annotations

import inspect
import logging

from vllm.platforms import current_platform

logger = logging.getLogger(__name__)

#: Longer than from one step to the next while an engine generates.
SPIN_SECONDS = 0.01


def sleep_soon() -> None:
    """For the message queues that this process makes from now on; nothing on a GPU."""
    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # a GPU's engines have nothing to do with it

    parameters = list(inspect.signature(SpinCondition.__init__).parameters.values())
    if parameters[-1].name != "busy_loop_s" or len(SpinCondition.__init__.__defaults__ or ()) != 1:
        logger.info("this vLLM's workers spin behind each message for as long as it likes: SpinCondition%s", parameters)
        return
    SpinCondition.__init__.__defaults__ = (SPIN_SECONDS,)
