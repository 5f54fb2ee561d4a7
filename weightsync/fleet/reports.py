"""What the workers of one engine say, taken together. Pure.

An engine is one of several workers only when each has a rank of its own; what failed in
any of them failed in the engine, and none's failure is lost behind another's; and a name
of the manifest is unknown when no worker can place it.

Not covered: workers of several engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from weightsync.errors import EngineDied, InternalError, ManifestRefused, TransportFailed, WeightSyncError
from weightsync.protocol import WorkerReport

_SHOWN = 20
#: How counts of a storage contract's slots begin in `WorkerReport.checks`, before the class; and one that is no class.
_SLOTS, _NO_CLASS = "slots_", "slots_possibly_derived"

Error = TypeVar("Error", bound=BaseException)


def require_ranks(reports: Sequence[WorkerReport], workers: int) -> None:
    """That every worker of an engine answers, each under its own rank.

    Args:
        workers: how many the settings give it.

    Raises:
        InternalError: with the ranks.
    """
    ranks = sorted(report.rank for report in reports)
    if ranks != list(range(workers)):
        raise InternalError(f"an engine of {workers} worker(s) has ranks {ranks}", hint="Report the vLLM version and the settings")


def failure(reports: Sequence[WorkerReport]) -> WeightSyncError | None:
    """What stands against the engine; the one that tells most gives it its kind."""
    failed = [(report.rank, WeightSyncError.from_dict(report.error)) for report in reports if report.error is not None]
    if not failed:
        return _unplaced(reports)
    error = telling([error for _, error in failed])
    ranks: dict[str, list[int]] = {}
    for rank, other in failed:
        ranks.setdefault(other.message, []).append(rank)
    if len(ranks) > 1 or len(failed) < len(reports):
        parts = [f"worker {', '.join(map(str, own))} of {len(reports)}: {said}" for said, own in ranks.items()]
        error.message = "; ".join(parts)
    error.names = tuple(dict.fromkeys(name for _, other in failed for name in other.names))[:_SHOWN]
    return error


def telling(errors: Sequence[Error]) -> Error:
    """Of what several say of one failure: a death, before a reason, before that the broadcast broke, as it does for all by either."""
    return min(errors, key=lambda error: (not isinstance(error, EngineDied), isinstance(error, TransportFailed)))


def standings(reports: Sequence[WorkerReport]) -> dict[str, str]:
    """By rank, where each worker stands (`EngineVerdict.ranks`)."""
    return {
        str(report.rank): report.state if report.error is None else f"{report.error['code']}: {report.error['message']}"
        for report in reports
    }


class Inventory:
    """What the workers of an engine said last of what they hold, summed.

    Attributes:
        memory: bytes beside the live weights, by what they are for.
        slots: of the storage contract, by class.
    """

    def __init__(self) -> None:
        self.memory: dict[str, int] = {}
        self.slots: dict[str, int] = {}

    def note(self, answers: Sequence[dict[str, Any]]) -> None:
        """Take in what all workers answered to one call, as plain data; what says nothing of either changes nothing."""
        if answers and all(answer.get("memory") for answer in answers):
            self.memory = total(answer["memory"] for answer in answers)
        counts = total(answer.get("checks", {}) for answer in answers)
        slots = {key.removeprefix(_SLOTS): n for key, n in counts.items() if key.startswith(_SLOTS) and key != _NO_CLASS}
        if slots:  # those of a verdict leave out what it has none of
            self.slots = dict.fromkeys(self.slots, 0) | slots


def total(counted: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts of several workers, added up by what they count."""
    sums: dict[str, int] = {}
    for counts in counted:
        for key, value in counts.items():
            sums[key] = sums.get(key, 0) + value
    return sums


def _unplaced(reports: Sequence[WorkerReport]) -> ManifestRefused | None:
    if not reports:
        return None
    first, *others = reports
    names = [name for name in first.unclaimed if all(name in other.unclaimed for other in others)]
    if not names:
        return None
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ManifestRefused(
        f"{len(names)} unknown to every worker: {', '.join(first.unclaimed[name] for name in names[:_SHOWN])}{more}",
        hint="Send the tensors under the names, shapes and dtypes of the checkpoint that the engine was started from",
        names=names,
    )
