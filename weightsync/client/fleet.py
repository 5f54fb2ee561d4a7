"""What a client asks of the fleet itself: its status, and that engines sleep and wake.

Not covered: weights (`sync`) and completions (`rollouts`).
"""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.client.http import Http
from weightsync.codec import decode
from weightsync.protocol import EngineStatus, FleetStatus

_STATUS_SECONDS = 30.0


class FleetCalls:
    """The calls of `WeightSync` that concern no weights.

    Args:
        http: the service.
    """

    def __init__(self, http: Http) -> None:
        self._http = http

    def status(self) -> FleetStatus:
        """The fleet in one look."""
        return decode(FleetStatus, self._http.get("/v1/status", _STATUS_SECONDS))

    def engines(self) -> tuple[EngineStatus, ...]:
        """Every engine: address, version, state."""
        return self.status().engines

    def sleep(self, level: int = 1, engines: Sequence[int] = (), timeout_seconds: float = 300.0) -> FleetStatus:
        """Have engines give their GPU's memory back. Their requests end; they serve nothing and take no update until they wake.

        Args:
            level: 1 keeps the weights on the host, and `wake` brings them back. 2 drops them: a woken engine has
                pending weights, and serves behind the next complete update.
            engines: ordinals; all when empty.

        Raises:
            UnsupportedEngine: an engine was started without vLLM's sleep mode.
            UpdateConflict, Refused: an update is under way; asleep at another level.
        """
        body = {"level": level, "engines": list(engines), "timeout_seconds": timeout_seconds}
        return decode(FleetStatus, self._http.post("/v1/sleep", body, timeout_seconds + 2 * _STATUS_SECONDS))

    def wake(self, engines: Sequence[int] = (), timeout_seconds: float = 300.0) -> FleetStatus:
        """Have engines take their memory again; one that is awake stays as it is. Arguments as in `sleep`."""
        body = {"engines": list(engines), "timeout_seconds": timeout_seconds}
        return decode(FleetStatus, self._http.post("/v1/wake", body, timeout_seconds + 2 * _STATUS_SECONDS))
