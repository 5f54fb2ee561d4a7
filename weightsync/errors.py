"""Every error that weightsync raises, as one tree.

    WeightSyncError
    ├── ConfigError            a setting is wrong: which key, what it got, what it wants
    ├── ServiceUnreachable     nothing answers at the URL, or it stopped answering
    ├── AuthError              the token is missing or wrong
    ├── ProtocolMismatch       the two sides' versions can't work together
    ├── Refused                the update was refused; nothing has changed anywhere
    │   ├── ManifestRefused    names, shapes, dtypes, or an empty model
    │   ├── VersionRefused     the version does not rise
    │   ├── BaseRefused        a partial update builds on another version than what is held
    │   ├── PinRefused         engines can't be pinned so, or a pin holds them
    │   ├── UpdateConflict     another update is under way; names it
    │   ├── MemoryRefused      staging or a bucket would not fit
    │   ├── SamplesRefused     what `observe` was given can't be; names the sample
    │   └── NoEngineReady      no engine can take the request
    │       └── EngineUpdating  it is being updated, and takes none meanwhile
    ├── UpdateFailed           the update began and did not commit
    │   ├── TransportFailed    the broadcast broke or a peer died
    │   ├── DigestMismatch     bytes arrived that were not sent
    │   ├── BadValues          NaN, infinity, or more than the engine's dtype holds
    │   ├── ApplyFailed        the engine could not load the bytes
    │   ├── VerdictNotOk       loaded, and the proof failed: the engine is quarantined
    │   ├── HeldBack           an engine was not written, since too few others serve
    │   └── Aborted            somebody ended the update
    ├── DeadlineExceeded       the call's own deadline passed
    ├── EngineDied             an engine's process is gone
    │   └── WorkersSilent      it lives, and its workers don't answer
    ├── UnsupportedEngine      this vLLM, model or kernel has not been proved
    │   └── UnknownVllm        this vLLM, or a function of it, is not one that was proved
    ├── GenerationFailed       a rollout request failed
    └── InternalError          a fault of weightsync itself; please report it

Each error says *what* happened and *where* (`update_id`, `engine`, `phase`),
*what to do* (`hint`), and whether trying the same call again can help
(`retryable`). It crosses processes as plain data: `to_dict` and `from_dict`.

Not covered: errors of the caller's own iterator pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class WeightSyncError(Exception):
    """Base of all errors here.

    Args:
        message: what happened, with the names it happened to.
        hint: what the reader can do about it.
        update_id: the update it belongs to, if any.
        engine: the engine's ordinal, if one engine is at fault.
        phase: the part of an update in which it happened (`protocol.Phase` values).
        names: tensor names it concerns; at most the first 20 are kept.
        retryable: overrides the class's own answer.
    """

    code: ClassVar[str] = "error"
    retryable_by_default: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        update_id: str | None = None,
        engine: int | None = None,
        phase: str | None = None,
        names: Sequence[str] = (),
        retryable: bool | None = None,
    ) -> None:
        self.message = message
        self.hint = hint
        self.update_id = update_id
        self.engine = engine
        self.phase = phase
        self.names = tuple(names)[:20]
        self.retryable = self.retryable_by_default if retryable is None else retryable
        super().__init__(message)

    def __str__(self) -> str:
        where = [
            f"{key} {value}"
            for key, value in (("update", self.update_id), ("engine", self.engine), ("phase", self.phase))
            if value is not None
        ]
        text = self.message + (f" [{', '.join(where)}]" if where else "")
        return f"{text}. {self.hint}" if self.hint else text

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON-ready data; `from_dict` turns it back."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "update_id": self.update_id,
            "engine": self.engine,
            "phase": self.phase,
            "names": list(self.names),
            "retryable": self.retryable,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> WeightSyncError:
        """Rebuild an error; an unknown code (a newer peer) becomes the base class, text unchanged."""
        cls = BY_CODE.get(str(data.get("code")), WeightSyncError)
        return cls(
            str(data.get("message", "no message")),
            hint=str(data.get("hint", "")),
            update_id=data.get("update_id"),
            engine=data.get("engine"),
            phase=data.get("phase"),
            names=[str(name) for name in data.get("names", ())],
            retryable=bool(data.get("retryable", False)),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray pickles exceptions between our own actors; keyword-only fields need this.
        return (WeightSyncError.from_dict, (self.to_dict(),))


class ConfigError(WeightSyncError):
    """A setting is wrong. The message names the key, what it got and what it wants."""

    code, http_status = "config", 400


class ServiceUnreachable(WeightSyncError):
    """Nothing answers at the service's URL, or it stopped answering."""

    code, http_status, retryable_by_default = "unreachable", 503, True


class AuthError(WeightSyncError):
    """The token is missing or wrong."""

    code, http_status = "auth", 401


class ProtocolMismatch(WeightSyncError):
    """Trainer and service speak versions (protocol, torch) that can't work together."""

    code, http_status = "protocol_mismatch", 409


class Refused(WeightSyncError):
    """The update was refused before any byte moved; nothing has changed anywhere."""

    code, http_status = "refused", 409


class ManifestRefused(Refused):
    """The tensors offered are not what the engine's model needs."""

    code, http_status = "manifest_refused", 422


class VersionRefused(Refused):
    """The version does not rise above the committed one."""

    code, http_status = "version_refused", 409


class BaseRefused(Refused):
    """A partial update builds on another version than the fleet, or an engine, holds; the message names both."""

    code, http_status = "base_refused", 409


class PinRefused(Refused):
    """Engines can't be pinned so, or a pin holds them; the message says which engine holds which version."""

    code, http_status = "pin_refused", 409


class UpdateConflict(Refused):
    """Another update is under way; the message names it."""

    code, http_status, retryable_by_default = "update_conflict", 409, True


class MemoryRefused(Refused):
    """Staging the update would not fit in the memory that is free."""

    code, http_status = "memory_refused", 507


class SamplesRefused(Refused):
    """Samples for `observe` have shapes, lengths or numbers that can't be; the message names the sample. Nothing was counted."""

    code, http_status = "samples_refused", 422


class NoEngineReady(Refused):
    """No engine can take the request now."""

    code, http_status, retryable_by_default = "no_engine_ready", 503, True


class EngineUpdating(NoEngineReady):
    """An engine takes no request while it is being updated, or ended this one for it; in a moment it serves again."""

    code = "engine_updating"


class UpdateFailed(WeightSyncError):
    """The update began and did not commit; engines serve the version they had, or are quarantined."""

    code, http_status, retryable_by_default = "update_failed", 500, True


class TransportFailed(UpdateFailed):
    """The broadcast broke: a peer died, hung or left."""

    code = "transport_failed"


class DigestMismatch(UpdateFailed):
    """Bytes arrived that were not sent."""

    code = "digest_mismatch"


class BadValues(UpdateFailed):
    """The weights hold NaN, infinity, or values beyond the engine's dtype; engines serve the version they had."""

    code, http_status, retryable_by_default = "bad_values", 422, False


class ApplyFailed(UpdateFailed):
    """An engine could not load the received bytes."""

    code = "apply_failed"


class VerdictNotOk(UpdateFailed):
    """The bytes were loaded and the proof failed; the engine is quarantined."""

    code = "verdict_not_ok"


class HeldBack(UpdateFailed):
    """An engine was not taken out of service for the update, since too few others serve; it serves what it had."""

    code = "held_back"


class Aborted(UpdateFailed):
    """Somebody ended the update."""

    code = "aborted"


class DeadlineExceeded(WeightSyncError):
    """The call's own deadline passed."""

    code, http_status, retryable_by_default = "deadline", 504, True


class EngineDied(WeightSyncError):
    """An engine's process is gone."""

    code, http_status, retryable_by_default = "engine_died", 503, True


class WorkersSilent(EngineDied):
    """An engine's process answers and its workers do not: they hang, or are stopped. As good as dead until they answer."""

    code = "workers_silent"


class UnsupportedEngine(WeightSyncError):
    """This vLLM version, model or kernel has not been proved to follow an update."""

    code, http_status = "unsupported_engine", 501


class UnknownVllm(UnsupportedEngine):
    """This vLLM, or a function of it that an update leans on, is not one that was proved."""

    code = "unknown_vllm"


class GenerationFailed(WeightSyncError):
    """A rollout request failed on its engine."""

    code, http_status = "generation_failed", 502


class InternalError(WeightSyncError):
    """A fault of weightsync itself; please report it with the log."""

    code, http_status = "internal", 500


def _walk(cls: type[WeightSyncError]) -> list[type[WeightSyncError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _walk(sub))]


BY_CODE: dict[str, type[WeightSyncError]] = {cls.code: cls for cls in _walk(WeightSyncError)}
