"""What an engine's actor keeps of an update that it was told of. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weightsync.protocol import Adapter


@dataclass(frozen=True)
class Told:
    """Of one update.

    Attributes:
        restores: the update whose bytes it brings again; empty for a trainer's.
        keeps: it is kept for engines that come later.
        seconds: its deadline.
        adapter: what it brings of one (`Adapter`).
    """

    restores: str = ""
    keeps: bool = False
    seconds: float = 0.0
    adapter: str = Adapter.NONE

    @classmethod
    def of(cls, order: dict[str, Any]) -> Told:
        """Of a plain `BeginOrder`."""
        request = order["request"]
        return cls(order["restores"], order["hand_on"], request["timeout_seconds"], request["adapter"])
