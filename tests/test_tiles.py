"""A process that hosts vLLM on a CPU may use its AMX tiles.

Not covered: systems that do not allow it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

_HELD = """
import ctypes, platform
from weightsync.worker import tiles

def held():
    call, allowed = ctypes.CDLL(None).syscall, ctypes.c_uint64()
    assert call(158, 0x1022, ctypes.byref(allowed)) == 0  # arch_prctl(ARCH_GET_XCOMP_PERM)
    return bool(allowed.value >> 18 & 1)

before = held()
tiles.ask()
print(before, held())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_a_process_that_has_asked_may_use_tiles() -> None:
    said = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "True"]
