"""The error tree: codes, the plain form that crosses processes, and the picture in the docstring."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any

import pytest

from weightsync import errors
from weightsync.errors import BY_CODE, DigestMismatch, Refused, TransportFailed, WeightSyncError
from weightsync.protocol import Phase

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, WeightSyncError)]
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
FIELDS = ("message", "hint", "update_id", "engine", "phase", "names", "retryable")


def full(cls: type[WeightSyncError], **overrides: Any) -> WeightSyncError:
    known: dict[str, Any] = {"hint": "Do that", "update_id": "u-1", "engine": 0, "phase": Phase.APPLY, "names": ["a", "größe"]}
    return cls("it broke", **(known | overrides))


def assert_same(again: WeightSyncError, error: WeightSyncError) -> None:
    assert type(again) is type(error)
    assert [getattr(again, name) for name in FIELDS] == [getattr(error, name) for name in FIELDS]
    assert str(again) == str(error)
    assert again.args == error.args


@each_class
def test_every_class_has_a_code_of_its_own(cls: type[WeightSyncError]) -> None:
    assert [other for other in CLASSES if other.code == cls.code] == [cls]
    assert BY_CODE[cls.code] is cls
    # Codes are labels of metrics and reasons in health.
    assert re.fullmatch(r"[a-z_]+", cls.code)


@each_class
def test_every_class_answers_http_with_an_error(cls: type[WeightSyncError]) -> None:
    assert 400 <= cls.http_status < 600


@each_class
@pytest.mark.parametrize("retryable", [None, True, False])
def test_an_error_survives_its_plain_form(cls: type[WeightSyncError], retryable: bool | None) -> None:
    error = full(cls, retryable=retryable)
    assert error.retryable is (cls.retryable_by_default if retryable is None else retryable)
    assert_same(WeightSyncError.from_dict(json.loads(json.dumps(error.to_dict()))), error)


@each_class
def test_a_bare_error_survives_its_plain_form(cls: type[WeightSyncError]) -> None:
    assert_same(WeightSyncError.from_dict(json.loads(json.dumps(cls("x").to_dict()))), cls("x"))


@each_class
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickle(cls: type[WeightSyncError], protocol: int) -> None:
    error = full(cls, retryable=not cls.retryable_by_default)
    assert_same(pickle.loads(pickle.dumps(error, protocol)), error)


def test_an_error_survives_a_copy() -> None:
    error = full(DigestMismatch)
    assert_same(copy.copy(error), error)
    assert_same(copy.deepcopy(error), error)


def test_at_most_20_names_are_kept_in_their_order() -> None:
    names = [f"layer.{i}" for i in range(100)]
    error = WeightSyncError("x", names=names)
    assert error.names == tuple(names[:20])
    assert WeightSyncError.from_dict(error.to_dict() | {"names": names}).names == tuple(names[:20])


def test_an_unknown_code_becomes_the_base_class_with_its_text() -> None:
    data = full(TransportFailed).to_dict() | {"code": "of_a_newer_peer"}
    error = WeightSyncError.from_dict(data)
    assert type(error) is WeightSyncError
    assert [getattr(error, name) for name in FIELDS] == [getattr(full(TransportFailed), name) for name in FIELDS]


@pytest.mark.parametrize("data", [{}, {"code": None}, {"code": ["transport_failed"]}, {"code": "refused"}])
def test_a_form_with_gaps_is_still_an_error(data: dict[str, Any]) -> None:
    error = WeightSyncError.from_dict(data)
    assert error.message == "no message"
    assert not error.retryable


def test_the_text_says_what_where_and_what_to_do() -> None:
    assert str(full(Refused)) == "it broke [update u-1, engine 0, phase apply]. Do that"
    assert str(Refused("it broke")) == "it broke"
    assert str(Refused("it broke", hint="Do that")) == "it broke. Do that"
    assert str(Refused("it broke", engine=0)) == "it broke [engine 0]"


def test_the_docstring_draws_exactly_this_tree() -> None:
    drawn: set[tuple[str, str | None]] = set()
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)(?:  |$)", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            drawn.add((found[2], path[depth - 1] if depth else None))
    real = {(cls.__name__, cls.__base__.__name__ if cls is not WeightSyncError else None) for cls in CLASSES if cls.__base__}
    assert drawn == real


def test_a_base_class_catches_its_kind() -> None:
    refusals = {cls.__name__ for cls in CLASSES if issubclass(cls, Refused)}
    assert refusals == {
        "Refused", "ManifestRefused", "VersionRefused", "BaseRefused", "PinRefused", "UpdateConflict", "MemoryRefused", "NoEngineReady",
        "EngineUpdating", "SamplesRefused",
    }  # fmt: skip
