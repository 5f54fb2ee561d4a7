"""Calls of the CUDA driver, which torch has no names for: memory that is shared, and memory of the host that a GPU reaches itself.

Not covered: graphs (`storage.graph_nodes` loads the driver by itself, for it has to read structs that the bindings hide).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from weightsync.errors import ConfigError


class DriverError(Exception):
    """A call that did not succeed, with the driver's name for why."""


def calls() -> Any:
    """The driver's calls.

    Raises:
        ConfigError: cuda-bindings is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise ConfigError(
            "the CUDA driver can't be called: cuda-bindings is not installed",
            hint="Install cuda-bindings, which torch's CUDA builds come with, or set sync.local to off",
        ) from None
    return driver


def value(driver: Any, answer: tuple[Any, ...]) -> Any:
    """What a call gave back besides its code.

    Raises:
        DriverError: its code is not success.
    """
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"the CUDA driver says {getattr(code, 'name', code)}")
    return values[0] if values else None


@contextlib.contextmanager
def context_of(device: torch.device) -> Iterator[None]:
    """Have the device's context be this thread's, as calls of the driver need it, without a wait for what the device does."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()
        yield
