"""Messages: they survive JSON, and what is wrong with one is said by its path."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import manifest, protocol, results
from weightsync.codec import decode, encode
from weightsync.errors import ApplyFailed
from weightsync.protocol import (
    DTYPE_BYTES,
    MAX_NAME_LENGTH,
    MAX_VERSION,
    Admission,
    BeginOrder,
    CommunicatorInfo,
    ContractAnswer,
    ContractReport,
    EngineCheck,
    EngineState,
    EngineStatus,
    EngineVerdict,
    FleetCheck,
    FleetStatus,
    Manifest,
    Mismatch,
    Observation,
    Place,
    ProbeAnswer,
    ProbeReport,
    Retained,
    SlotReport,
    Tallies,
    Tally,
    TensorSpec,
    UpdateRequest,
    UpdateState,
    UpdateStatus,
    WorkerCheck,
    WorkerReport,
)
from weightsync.results import Attachment, Generation, SentAgain, SyncReport, VersionSpan

MANIFEST = Manifest(
    (TensorSpec("model.embed.weight", "bfloat16", (8, 4)), TensorSpec("größe", "float32", ()), TensorSpec("none", "int8", (0,)))
)
PLACE = Place("boot/4026531840", "GPU-1", "trainer")
RETAINED = Retained("update-1", 7, 0, 4096, "ab", 68, "update-1.bytes")
REQUEST = UpdateRequest(
    "update-1", "trainer_1", 7, MANIFEST, 1 << 20, "ab" * 32, 300.0, "gloo", "2.13.0", "", 1, place=PLACE, socket="s-1", secret="5e"
)
COMMUNICATOR = CommunicatorInfo("127.0.0.1", 4321, 3, 5, {"0": 1, "1": 3}, "gloo", {"0": (0, 2)})
ERROR = ApplyFailed("layer 3 did not load", engine=1, names=["a", "b"]).to_dict()
VERDICT = EngineVerdict(1, False, None, EngineState.QUARANTINED, 0.5, {"apply": 0.25}, {"addresses": 3}, ERROR)
STATUS = UpdateStatus("update-1", 7, UpdateState.ABORTED, 3, 68, 1.5, 2.5, {"admit": 0.5}, (VERDICT,), ERROR)
ENGINE = EngineStatus(0, EngineState.SERVING, 7, "update-1", "http://127.0.0.1:1", "policy", 2, "0.32.0", "")
SPAN = VersionSpan(None, 0, 2)
SLOT = SlotReport("model.layers.0.kernel.strides", "derived", 64, 1 << 46, 2, "gemm", "")
LOOSE = SlotReport("<scratch at 0x7f>", "scratch", 0, 0x7F, 0, "gemm", "a.py:1 f")
CONTRACT = ContractReport(
    "0.33.0", "cuda:0", True, 30, {"kernel": 900}, {"kernel: no layout": 1}, {"host": 2}, 1 << 20,
    {"derived": 1, "scratch": 1, "weight": 3}, {"derived": 64, "scratch": 0, "weight": 1 << 40}, (SLOT,), (LOOSE,), 3, 0,
    {"model.layers.0.kernel.strides": {"adopted": 3, "refreshed": 1}}, 0, ("model.gone",), ("model.gone: lost",), ("model.odd",), (), 2, 5,
    {"seal": 0.5},
)  # fmt: skip
SENT_AGAIN = SentAgain("update-1", 1, ERROR, 0.5)
MISMATCH = Mismatch(1, "3+", 128, 0.5, -0.25, 0.125, 7.0)
TALLY = Tally(1, 7, 128, 64.0, -32.0, 16.0, 7.0)
PROBE = ProbeReport(7, {"0": 0.0, "1": 2.5}, {"1": 0.5}, (1,), ("engine 1 differs",), {"2": "late: no seat"}, "", 0.05)
ANSWER = ProbeAnswer(({"7": -0.5, "8": -2.0},), ({"7": -0.5},), ({"7": -0.25},), "no graphs", "late", "no seat", 0.05)
CHECK = WorkerCheck(1, "update-1", True, 20, 3, 2, 1, ("model.norm.weight",), ("model.gone: lost",), 4, 30, 1 << 30, 0.5, ERROR)
ENGINE_CHECK = EngineCheck(1, 7, False, (CHECK,), ERROR)
MESSAGES = [
    CHECK,
    WorkerCheck(0),
    ENGINE_CHECK,
    EngineCheck(0, None, False),
    FleetCheck(7, False, (ENGINE_CHECK,)),
    FleetCheck(None, True, ()),
    SLOT,
    CONTRACT,
    ContractAnswer(1, CONTRACT),
    ContractAnswer(0, None, ERROR),
    *MANIFEST.tensors,
    MANIFEST,
    PLACE,
    REQUEST,
    COMMUNICATOR,
    Admission("update-1", 7, COMMUNICATOR, (0, 1)),
    BeginOrder(REQUEST, COMMUNICATOR, 1, 3, 30.0, "eth0"),
    WorkerReport(0, "update-1", "failed", 3, 68, {"receive": 0.5}, ERROR, True, {"layers": 2}, PLACE, {"x": "x (closest: y)"}),
    WorkerReport(1, "", "none"),
    VERDICT,
    STATUS,
    ENGINE,
    dataclasses.replace(ENGINE, version=None, update_id=None),
    dataclasses.replace(ENGINE, retained=RETAINED, pinned="eval"),
    RETAINED,
    FleetStatus("default", None, 0, (ENGINE,), None),
    FleetStatus("default", 7, 1, (ENGINE,), STATUS),
    FleetStatus("default", 7, 1, (ENGINE,), STATUS, observed=(MISMATCH,), probe=PROBE),
    dataclasses.replace(STATUS, probe=PROBE),
    PROBE,
    ANSWER,
    MISMATCH,
    TALLY,
    Tallies((TALLY,)),
    Observation((MISMATCH,), (1,), (9,)),
    SyncReport("update-1", 7, 68, 3, {"total": 1.5}, 0.5, (VERDICT,)),
    SyncReport("update-2", 7, 68, 3, {"total": 1.5}, 0.5, (VERDICT,), (SENT_AGAIN,)),
    SENT_AGAIN,
    Attachment(6, 7, (ENGINE,), (0,), True, True, "rewind"),
    SPAN,
    Generation((1, 2), (-0.5, -1.0), (SPAN, VersionSpan(7, 2, 3)), 0, "length"),
]
CLASSES = [c for c in (*vars(protocol).values(), *vars(results).values()) if isinstance(c, type) and dataclasses.is_dataclass(c)]


def by_class(cls: type) -> Any:
    return next(message for message in MESSAGES if type(message) is cls)


FIELDS = [(cls, field.name) for cls in CLASSES for field in dataclasses.fields(cls)]
field_cases = pytest.mark.parametrize(("cls", "name"), FIELDS, ids=[f"{cls.__name__}.{name}" for cls, name in FIELDS])


# --- round trips -------------------------------------------------------------------------------


def test_every_message_is_tried_here() -> None:
    assert {type(message) for message in MESSAGES} == set(CLASSES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_json(message: Any) -> None:
    again = decode(type(message), json.loads(json.dumps(encode(message), allow_nan=False)))
    assert again == message
    assert encode(again) == encode(message)


specs = st.builds(
    TensorSpec,
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=20),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(0, 100), max_size=4).map(tuple),
)
ids = st.text("abcXYZ019-_", min_size=1, max_size=64)
requests = st.builds(
    UpdateRequest,
    ids,
    ids,
    st.integers(0, MAX_VERSION),
    st.lists(specs, max_size=5, unique_by=lambda spec: spec.name).map(tuple).map(Manifest),
    st.integers(4096, 2**34),
    st.text(),
    st.floats(0, 86_400, exclude_min=True),
    st.sampled_from(["gloo", "nccl"]),
    st.text(),
    st.text(),
    st.integers(),
)


@settings(deadline=None)
@given(requests)
def test_any_valid_request_survives_json(request: UpdateRequest) -> None:
    again = decode(UpdateRequest, json.loads(json.dumps(encode(request))))
    assert again == request
    assert again.manifest.hash == request.manifest.hash


@settings(deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_whatever_json_comes_it_is_a_message_or_a_value_error(data: Any) -> None:
    for cls in CLASSES:
        for candidate in (data, {field.name: data for field in dataclasses.fields(cls)}):
            try:
                decode(cls, candidate)
            except ValueError:
                pass


# --- complaints --------------------------------------------------------------------------------


def wrong_for(hint: Any) -> list[Any]:
    """JSON values that don't fit a field's type."""
    if hint is Any:
        return []
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return [value for value in wrong_for(inner) if value is not None]
    if typing.get_origin(hint) is tuple:
        return [None, "text", 1, {}, [object()]]
    if typing.get_origin(hint) is dict:
        return [None, [], "text"]
    if dataclasses.is_dataclass(hint):
        return [None, [], "text", 1]
    if issubclass(hint, str):  # plain and enumerations
        return [None, 1, True, [], {}] + (["no such member"] if hint is not str else [])
    return {
        int: [None, "1", 1.0, True, False, [], {}],
        float: [None, "1.0", True, [], {}, 10**400],
        bool: [None, "true", 1, 0, []],
    }[hint]


@field_cases
def test_a_field_of_the_wrong_type_is_named_by_its_path(cls: type, name: str) -> None:
    good = encode(by_class(cls))
    wrong = wrong_for(typing.get_type_hints(cls)[name])
    assert wrong
    for value in wrong:
        with pytest.raises(ValueError, match=rf"{cls.__name__}\.{name}\b"):
            decode(cls, {**good, name: value})


@field_cases
def test_a_missing_field_is_named_unless_it_has_a_default(cls: type, name: str) -> None:
    message = by_class(cls)
    rest = {key: value for key, value in encode(message).items() if key != name}
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        with pytest.raises(ValueError, match=rf"{cls.__name__}: missing field\(s\) {name}$"):
            decode(cls, rest)
    else:
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        assert getattr(decode(cls, rest), name) == default


@pytest.mark.parametrize("cls", CLASSES)
def test_an_unknown_field_is_named(cls: type) -> None:
    with pytest.raises(ValueError, match=rf"{cls.__name__}: unknown field\(s\) colour"):
        decode(cls, {**encode(by_class(cls)), "colour": 1})


@pytest.mark.parametrize("data", [None, [], "text", 1, True])
def test_a_message_that_is_not_an_object_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="Manifest: want an object"):
        decode(Manifest, data)


def test_the_path_leads_into_lists_and_objects() -> None:
    request = encode(REQUEST)
    request["manifest"]["tensors"][2]["shape"] = [0, "3"]
    with pytest.raises(ValueError, match=r"UpdateRequest\.manifest\.tensors\[2\]\.shape\[1\]: want int, got str"):
        decode(UpdateRequest, request)
    order = encode(by_class(BeginOrder))
    order["communicator"]["members"]["1"] = True
    with pytest.raises(ValueError, match=r"BeginOrder\.communicator\.members\.1: want int, got bool"):
        decode(BeginOrder, order)


def test_true_is_no_number_and_a_whole_number_is_a_float() -> None:
    with pytest.raises(ValueError, match="version: want int, got bool"):
        decode(UpdateRequest, encode(REQUEST) | {"version": True})
    with pytest.raises(ValueError, match="timeout_seconds: want float, got bool"):
        decode(UpdateRequest, encode(REQUEST) | {"timeout_seconds": True})
    whole = decode(UpdateRequest, encode(REQUEST) | {"timeout_seconds": 5}).timeout_seconds
    assert whole == 5.0
    assert type(whole) is float


# --- what a message refuses to be ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a" * (MAX_NAME_LENGTH + 1), "line\nbreak", "nul\0", "\ud800", "\u202e"])
def test_a_tensor_needs_a_name_that_can_be_printed(name: str) -> None:
    with pytest.raises(ValueError, match="tensor name"):
        TensorSpec(name, "float32", (1,))


@pytest.mark.parametrize("dtype", ["", "torch.float32", "complex64", "Float32", "float8_e4m3fnuz"])
def test_a_dtype_that_cannot_travel_is_refused_with_the_tensors_name(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"'layer\.weight': dtype"):
        TensorSpec("layer.weight", dtype, (1,))


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (-1, -1), (2**49,), (2**25, 2**25)])
def test_an_impossible_shape_is_refused_with_the_tensors_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"'layer\.weight': impossible shape"):
        TensorSpec("layer.weight", "float32", shape)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"), [("bfloat16", (3, 5), 30), ("float64", (), 8), ("int8", (7, 0), 0), ("float8_e5m2", (9,), 9)]
)
def test_a_tensors_size(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    spec = TensorSpec("t", dtype, shape)
    assert spec.nbytes == nbytes
    assert spec.numel == math.prod(shape)


def test_a_name_given_twice_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match=r"1 tensor name\(s\) appear twice: b$"):
        Manifest((TensorSpec("a", "int8", (1,)), TensorSpec("b", "int8", (1,)), TensorSpec("b", "float32", (2,))))


def test_a_manifest_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_TENSORS", 2)
    with pytest.raises(ValueError, match="3 tensors; at most 2"):
        Manifest(tuple(TensorSpec(f"t{i}", "int8", (1,)) for i in range(3)))


def test_the_manifests_hash_depends_on_all_of_it() -> None:
    a, b = TensorSpec("a", "int8", (2, 3)), TensorSpec("b", "int8", (6,))
    variants = [
        (a, b),
        (b, a),
        (a,),
        (),
        (TensorSpec("a", "uint8", (2, 3)), b),
        (TensorSpec("a", "int8", (3, 2)), b),
        (TensorSpec("c", "int8", (2, 3)), b),
    ]
    assert len({Manifest(tensors).hash for tensors in variants}) == len(variants)
    assert Manifest((a, b)).hash == Manifest((TensorSpec("a", "int8", (2, 3)), b)).hash
    assert Manifest((a, b)).nbytes == 12


@pytest.mark.parametrize("key", ["update_id", "trainer_id"])
@pytest.mark.parametrize("value", ["", "a" * 65, "a b", "a/b", "../x", "a.b", "a\n", "é", "²", "%2e"])
def test_an_id_fits_a_path_and_a_log_line(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{key} .*want 1 to 64"):
        dataclasses.replace(REQUEST, **{key: value})


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("version", [-1, MAX_VERSION + 1], [0, MAX_VERSION]),
        ("bucket_bytes", [0, 4095, 2**34 + 1, -4096], [4096, 2**34]),
        ("timeout_seconds", [0.0, -1.0, 86_401.0, math.inf, math.nan], [0.001, 86_400.0]),
        ("transport", ["", "mpi", "NCCL"], ["gloo", "nccl"]),
        ("allow_nonfinite", [None, 0, 1, "true"], [False, True]),
        ("rewind", [None, 0, 1, "true"], [False, True]),
        ("socket", ["../x", "a b", "\0", "s" * 65], ["", "weightsync-5e"]),
    ],
)
def test_a_requests_field_has_its_range(key: str, bad: list[Any], good: list[Any]) -> None:
    for value in bad:
        with pytest.raises(ValueError, match=f"{key} .*want"):
            dataclasses.replace(REQUEST, **{key: value})
    for value in good:
        assert getattr(dataclasses.replace(REQUEST, **{key: value}), key) == value


def test_messages_cannot_be_changed() -> None:
    for message in MESSAGES:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, dataclasses.fields(message)[0].name, None)


def test_the_version_of_a_generation_is_that_of_its_first_token() -> None:
    spans = (VersionSpan(3, 0, 2), VersionSpan(4, 2, 5))
    assert Generation((), (), spans, 0, "length").version == 3
    assert Generation((), (), (), 0, "abort").version is None


def test_committed_and_aborted_are_final() -> None:
    assert {state for state in UpdateState if state.final} == {UpdateState.COMMITTED, UpdateState.ABORTED}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"left_out": 2}, "2 slots left out don't make up for 5"),
        ({"slots": {"weight": 5}}, "slots are counted of"),
        ({"nodes": {"kernel": -1}}, "nodes\\['kernel'\\] is negative"),
    ],
)
def test_a_contract_that_does_not_add_up_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(CONTRACT, **change)


def test_a_slot_of_less_than_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        dataclasses.replace(SLOT, nbytes=-1)


@pytest.mark.parametrize(
    ("committed", "version", "staleness"), [(57, 57, 0), (57, 50, 7), (1, 57, None), (0, 0, 0), (None, 0, None), (57, None, None)]
)
def test_what_was_sampled_is_never_fresher_than_the_fleet(committed: int | None, version: int | None, staleness: int | None) -> None:
    assert FleetStatus("default", committed, 0, (ENGINE,), None).staleness(version) == staleness


# --- a scope ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"scope": ("",)}, "scope: want at most 1000 patterns of 1 to 512 characters"),
        ({"scope": ("x" * 513,)}, "scope: want at most 1000 patterns"),
        ({"scope": ("x",) * 1001}, "scope: want at most 1000 patterns"),
        ({"base_version": 3}, "base_version 3: want 0 to .*, and only with a scope"),
        ({"scope": ("a.*",), "base_version": -1}, "base_version -1: want 0 to"),
        ({"without": (1, -1)}, r"without \(1, -1\): want ordinals"),
        ({"scope": ("a.*",), "rewind": True}, "rewind with a scope: going back takes a complete update"),
    ],
)
def test_a_scope_that_makes_no_sense_is_refused(about: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(REQUEST, **about)  # type: ignore[arg-type]


def test_a_scope_and_its_base_cross_the_wire() -> None:
    request = dataclasses.replace(REQUEST, scope=("a.*", "b"), base_version=3)
    assert decode(UpdateRequest, json.loads(json.dumps(encode(request)))) == request
    old = {key: value for key, value in encode(REQUEST).items() if key not in ("scope", "base_version")}
    assert decode(UpdateRequest, old) == REQUEST, "a trainer that knows no scopes sends complete updates"
