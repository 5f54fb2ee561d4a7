"""HTTP to the service and the engines: deadlines, the token, and typed errors.

Nothing is tried again here; `retryable` of the error says whether that can help.

Not covered: a server that sends its answer's head byte by byte (each byte starts
the deadline anew), and asynchronous trainers (the calls are thread safe; use a thread).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import httpx

from weightsync import tracing
from weightsync.errors import ConfigError, DeadlineExceeded, ServiceUnreachable, WeightSyncError


class Http:
    """One service.

    Args:
        url: for example `http://127.0.0.1:8517`.
        token: bearer token.

    Raises:
        ConfigError: the token can't be sent in a header.
    """

    def __init__(self, url: str, token: str) -> None:
        if not re.fullmatch(r"[!-~]+", token):
            raise ConfigError(
                "token: it is empty or holds a space or line end", hint="Pass the content of the service's token file, stripped"
            )
        self.url = url.rstrip("/")
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        # Rollout clients go straight to addresses inside the cluster: no proxy from the environment.
        self._client = httpx.Client(headers={"authorization": f"Bearer {token}"}, limits=limits, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, timeout_seconds: float) -> Any:
        return self.request("GET", self.url + path, None, timeout_seconds)

    def post(self, path: str, body: Mapping[str, Any], timeout_seconds: float) -> Any:
        return self.request("POST", self.url + path, body, timeout_seconds)

    def request(self, method: str, url: str, body: Mapping[str, Any] | None, timeout_seconds: float) -> Any:
        """One call; the decoded JSON.

        Raises:
            ServiceUnreachable: nothing answers there, or it broke off.
            DeadlineExceeded: no answer in time.
            WeightSyncError: what the service answered.
        """
        timeout = httpx.Timeout(timeout_seconds, connect=min(5.0, timeout_seconds))
        until = time.monotonic() + timeout_seconds
        content = bytearray()
        try:
            headers = {"traceparent": trace} if (trace := tracing.current()) else {}
            with self._client.stream(method, url, json=body, timeout=timeout, headers=headers) as response:
                for piece in response.iter_bytes():
                    content += piece
                    if time.monotonic() > until:  # httpx's own limit is on the silence between two pieces
                        raise httpx.ReadTimeout("the answer takes too long")
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError) as exc:
            raise ServiceUnreachable(f"no service answers at {url}: {exc}", hint="Is `weightsync serve` running there?") from None
        except httpx.TimeoutException:
            raise DeadlineExceeded(
                f"{method} {url} gave no answer within {timeout_seconds:.0f} s", hint="See `weightsync status`"
            ) from None
        except httpx.HTTPError as exc:
            raise ServiceUnreachable(f"{method} {url} broke off: {exc}", hint="The service may have restarted; try again") from None
        return _answer(response, bytes(content), f"{method} {url}")


def _answer(response: httpx.Response, content: bytes, what: str) -> Any:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise ServiceUnreachable(f"{what} answered {response.status_code} and no JSON: is this weightsync's URL?") from None
    if response.is_success:
        return data
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, dict) and "code" in error and "retryable" in error:
        raise WeightSyncError.from_dict(error)
    raise WeightSyncError(f"{what} answered {response.status_code}: {str(data)[:500]}")
