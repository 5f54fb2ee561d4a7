"""An update on its way, as its trainer sees it.

Not covered: sending, which `WeightSync` does.
"""

from __future__ import annotations

import threading
import time

from weightsync.errors import WeightSyncError
from weightsync.protocol import Admission, UpdateRequest


class Published:
    """An update that has been admitted and is being sent.

    Attributes:
        admission: what the service answered.
    """

    def __init__(self, admission: Admission, request: UpdateRequest, began: float) -> None:
        self.admission = admission
        self._request = request
        self._began = began
        self._deadline = began + request.timeout_seconds
        self._read = threading.Event()  # every tensor has been read, or never will be
        self._all_read = False
        self._done = threading.Event()
        self._cancelled = threading.Event()
        self._error: WeightSyncError | None = None
        self._seconds: dict[str, float] = {}

    @property
    def update_id(self) -> str:
        return self.admission.update_id

    @property
    def version(self) -> int:
        return self.admission.version

    def tensors_read(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every tensor has been read, so that the parameters may change.

        Returns:
            False when `timeout_seconds` passed first.

        Raises:
            WeightSyncError: sending failed before that.
        """
        left = max(0.0, self._deadline - time.monotonic()) if timeout_seconds is None else timeout_seconds
        done = self._read.wait(left)
        if done and not self._all_read and self._error is not None:
            raise self._error
        return done

    def _has_read(self) -> None:
        self._all_read = True
        self._read.set()
