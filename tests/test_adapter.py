"""Adapters alone: what a trainer's model gives, which version they build on, what a worker refuses, keeps, and goes back to.

The slot is made up. With vLLM's: `test_lora_on_vllm.py`; in a fleet: `test_lora_on_fleet.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.test_adapters import adapted
from tests.test_engine_update import Engine
from tests.test_ledger import engine
from tests.workers import Worker, weights, without_vllm
from weightsync.client import Lazy, Lora, lora_of
from weightsync.client.lora import Below
from weightsync.errors import ApplyFailed, BaseRefused, ManifestRefused, WeightSyncError
from weightsync.fleet.carried import Carried, name_of
from weightsync.fleet.ledger import Ledger
from weightsync.fleet.told import Told
from weightsync.protocol import Adapter, Manifest, TensorSpec, UpdateRequest, WorkerReport
from weightsync.worker import adapter, naming
from weightsync.worker.naming import HALVES

ALONE, WITH_BASE = Adapter.ALONE, Adapter.WITH_BASE
A, B = HALVES


class Slot:
    """Two layers that take adapters of rank 2; writes fail as often as it is told, half way."""

    max_rank, dtype = 2, torch.bfloat16
    targets: Mapping[str, Any] = {
        "body": SimpleNamespace(inputs=4, outputs=6),
        "tower": SimpleNamespace(inputs=4, outputs=4),
    }

    def __init__(self) -> None:
        self.holds: dict[tuple[str, str], torch.Tensor] = {}
        self.fail = self.spoil = 0

    def path(self, layer: str) -> str:
        return layer.removeprefix("model.")

    def write(self, tensors: adapter.Pairs) -> None:
        self.holds = {key: tensor.clone() for key, tensor in tensors.items()}
        if self.fail > 0:
            self.fail -= 1
            self.holds = dict(list(self.holds.items())[:1])
            raise RuntimeError("no")
        if self.spoil > 0:
            self.spoil -= 1
            next(iter(self.holds.values()))[0] += 1

    def differing(self, tensors: adapter.Pairs) -> tuple[int, list[str]]:
        keys = tensors.keys() | self.holds.keys()
        wrong = {layer for layer, half in keys if not self._same(tensors.get((layer, half)), self.holds.get((layer, half)))}
        return len(self.targets), sorted(wrong)

    def _same(self, one: Any, other: Any) -> bool:
        return one is not None and other is not None and torch.equal(one, other)


def pair(layer: str, value: float, rank: int = 2, inputs: int = 4, outputs: int = 4) -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.{layer}.{A}": torch.full((rank, inputs), float(value)),
        f"base_model.model.{layer}.{B}": torch.full((outputs, rank), float(value)),
    }


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    without_vllm(monkeypatch)
    return opened(Worker())


def opened(made: Worker) -> Worker:
    assert made.applier._adapters.open(Slot()) == {naming.TAKES: 1}
    return made


def slot(worker: Worker) -> Slot:
    found = worker.applier._adapters._slot
    assert isinstance(found, Slot)
    return found


def values(worker: Worker) -> dict[str, float]:
    """What the slot holds of each layer."""
    return {layer: tensor.flatten()[0].item() for (layer, half), tensor in slot(worker).holds.items() if half == A}


# --- a worker -----------------------------------------------------------------------------------------


def test_an_adapter_changes_no_weight_and_a_later_one_replaces_it(worker: Worker) -> None:
    worker.update({**weights(1), **pair("tower", 5), **pair("body", 5, outputs=6)}, adapter=WITH_BASE)
    assert values(worker) == {"tower": 5, "body": 5}
    update, report = worker.apply(pair("tower", 6), adapter=ALONE)
    assert report.error is None and report.checks == {}
    assert worker.applier.verify(update).checks["adapted_layers"] == 2
    worker.applier.keep(update)
    assert values(worker) == {"tower": 6} and worker.model.values() == dict.fromkeys(weights(1), 1)
    worker.update(weights(2))
    assert values(worker) == {}, "weights that come without one have none"
    with pytest.raises(BaseRefused, match="came without one: they may have one merged in already"):
        worker.begin(pair("tower", 7), adapter=ALONE)


@pytest.mark.parametrize("fault", ["fail", "spoil"])
@pytest.mark.parametrize("brings", [WITH_BASE, ALONE])
def test_a_worker_goes_back_to_the_adapter_that_counts(brings: Adapter, fault: str, worker: Worker) -> None:
    worker.update({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)
    worker.update(pair("tower", 6), adapter=ALONE)
    setattr(slot(worker), fault, 1)
    sent = pair("tower", 7) | (weights(2) if brings == WITH_BASE else {})
    update, report = worker.apply(sent, adapter=brings)
    report = report if report.error else worker.applier.verify(update)
    assert report.error is not None and report.wrote
    assert worker.go_back(update).state == "rolled_back"
    assert values(worker) == {"tower": 6} and worker.model.values() == dict.fromkeys(weights(1), 1)
    worker.update(pair("tower", 8), adapter=ALONE)
    assert values(worker) == {"tower": 8}


def test_what_failed_once_is_tried_again_from_the_staged_bytes(worker: Worker) -> None:
    worker.update({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)
    slot(worker).fail = 1
    update, report = worker.apply(pair("tower", 6), adapter=ALONE)
    assert report.error["code"] == ApplyFailed.code
    assert worker.applier.apply(update).error is None
    assert worker.applier.verify(update).state == "verified"


def test_an_adapter_alone_needs_no_kept_weights_to_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    worker = opened(Worker(retain=False))
    worker.update({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)
    slot(worker).spoil = 1
    update, _ = worker.apply(pair("tower", 6), adapter=ALONE)
    assert worker.applier.verify(update).error is not None
    assert worker.go_back(update).state == "rolled_back"
    assert values(worker) == {"tower": 5}


def test_behind_an_adapter_that_failed_none_is_taken_alone_before_all_of_it_comes(worker: Worker) -> None:
    worker.update({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)
    slot(worker).fail = 1
    update, _ = worker.apply(pair("tower", 6), adapter=ALONE)
    worker.applier.abort(update)
    with pytest.raises(BaseRefused, match="holds no proved update"):
        worker.begin(pair("tower", 7), adapter=ALONE)
    worker.update({**weights(1), **pair("tower", 7)}, adapter=WITH_BASE)
    assert values(worker) == {"tower": 7}


def test_what_is_kept_for_other_engines_has_the_adapter_that_counts(worker: Worker) -> None:
    def kept() -> dict[str, float] | None:
        found = worker.applier._held.kept
        return found and {spec.name: found.tensor(at).flatten()[0].item() for at, spec in enumerate(found.manifest.tensors)}

    both = pair("tower", 5) | pair("body", 5, outputs=6)
    worker.update({**weights(1), **both}, adapter=WITH_BASE)
    worker.update(pair("tower", 6) | pair("body", 6, outputs=6), adapter=ALONE)
    assert kept() == {**dict.fromkeys(weights(1), 1), **dict.fromkeys(both, 6)}
    # It would still have the layer that this one has not: nothing is kept, rather than something else than engines serve.
    worker.update(pair("tower", 7), adapter=ALONE)
    assert kept() is None


def test_a_check_of_live_storage_looks_at_the_slot_too(worker: Worker) -> None:
    worker.update({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)
    worker.update(pair("tower", 6), adapter=ALONE)
    assert worker.applier.check(True).differs == ()
    slot(worker).holds["tower", A][1, 2] += 1
    assert worker.applier.check(True).differs == ("the adapter of tower",)


def test_a_scope_is_refused_below_an_adapter(worker: Worker) -> None:
    worker.update({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)
    with pytest.raises(ManifestRefused, match="would change weights that an adapter lies on"):
        worker.begin({"tower.weight": torch.zeros(4)}, ("tower.*",))


WRONG = {
    "rank": (pair("tower", 1, rank=4), r"above the engine's max_lora_rank of 2: tower \(rank 4\)"),
    "half": (dict(list(pair("tower", 1).items())[:1]), r"one half is missing: tower \(lora_B.weight\)"),
    "layer": (pair("towel", 1), r"layers that this engine can't adapt: towel \(closest: tower\)"),
    "shape": (pair("tower", 1, outputs=6), r"another shape than the engine's layer: tower .*want inputs 4, outputs 4"),
    "fit": (pair("tower", 1) | {f"base_model.model.tower.{B}": torch.zeros(4, 1)}, "halves do not fit together"),
    "dtype": ({name: value.long() for name, value in pair("tower", 1).items()}, "of a dtype that is none of bfloat16"),
    "DoRA": (pair("tower", 1) | {"tower.lora_magnitude_vector.weight": torch.ones(4)}, "no half of a low-rank pair.*lora_magnitude_vector"),
    "raw": ({f"tower.{side}.default.weight": torch.ones(2, 4) for side in ("lora_A", "lora_B")}, "no half of a low-rank pair"),
    "twice": (pair("tower", 1) | {f"tower.{A}": torch.ones(2, 4)}, "are both lora_A.weight of tower"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_no_slot_takes_is_refused_before_a_byte_moves(case: str, worker: Worker) -> None:
    worker.update({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)
    given, words = WRONG[case]
    for sent, brings in ((given, ALONE), ({**weights(2), **given}, WITH_BASE)):
        with pytest.raises(ManifestRefused, match=words) as caught:
            worker.begin(sent, adapter=brings)
        assert set(caught.value.names) & set(given)
    assert values(worker) == {"tower": 5} and worker.model.values() == dict.fromkeys(weights(1), 1)


def test_what_an_update_says_of_its_adapter_must_be_so(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.update({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)
    with pytest.raises(ManifestRefused, match="parts of an adapter that was not merged"):
        worker.begin({**weights(1), **pair("tower", 5)})
    with pytest.raises(ManifestRefused, match="says that it brings an adapter, and has no part of one"):
        worker.begin(weights(1), adapter=WITH_BASE)
    with pytest.raises(ManifestRefused, match=r"1 tensor\(s\) are no parts of the adapter, which is sent alone: body.weight"):
        worker.begin({"body.weight": torch.zeros(4), **pair("tower", 5)}, adapter=ALONE)
    with pytest.raises(ManifestRefused, match=r"1 missing: tower.weight"):
        worker.begin({"body.weight": weights(1)["body.weight"], **pair("tower", 5)}, adapter=WITH_BASE)
    with pytest.raises(ManifestRefused, match=r"takes no adapters"):
        Worker().begin({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)
    with pytest.raises(ManifestRefused, match=r"sync.stage is none"):
        opened(Worker(stage="none")).begin({**weights(1), **pair("tower", 5)}, adapter=WITH_BASE)


def test_of_several_workers_each_takes_the_layers_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)
    worker = opened(Worker(workers=2))
    monkeypatch.setattr(slot(worker), "targets", {"tower": Slot.targets["tower"]})
    update = worker.begin({**weights(1), **pair("tower", 5), **pair("body", 5, outputs=6)}, adapter=WITH_BASE)
    assert set(worker.applier.report().unclaimed) == set(pair("body", 5)), "refused where no worker has it"
    assert worker.applier.apply(update).error is None and worker.applier.verify(update).state == "verified"
    assert values(worker) == {"tower": 5}


def test_names_of_an_adapter_are_read_without_wrappers() -> None:
    assert naming.adapted(f"base_model.model.model.layers.0.mlp.down_proj.{A}") == ("model.layers.0.mlp.down_proj", A)
    assert naming.adapted(f"module.base_model.model.m.base_layer.x.{B}") == ("m.x", B)
    assert naming.adapted("m.x.lora_embedding_A") == ("m.x.lora_embedding_A", "")
    own = Manifest((TensorSpec(f"time.{A}", "float32", (1, 1)), TensorSpec(f"x.{A}", "float32", (1, 1))))
    parts = adapter.part(own, {f"time.{A}": own.tensors[0]}, WITH_BASE)
    assert parts.names == {f"x.{A}"}, "what the checkpoint has is a weight, whatever it is called"


# --- a fleet's book, and an engine's requests ------------------------------------------------------------


def request(update_id: str, version: int, **about: Any) -> UpdateRequest:
    tensors = (TensorSpec(f"x.{A}", "float32", (1, 1)),)
    return UpdateRequest(update_id, "t", version, Manifest(tensors), 4096, "h", 10.0, "gloo", "2", **about)


def test_an_adapter_alone_builds_on_the_very_update_that_the_fleet_committed() -> None:
    ledger = Ledger(1, 10)
    for ordinal in (0, 1):
        ledger.see(replace(engine(ordinal, 3), update_id="u3"))
    ledger.see(engine(2))
    update = ledger.admit(request("u4", 4, adapter=ALONE, base_version=3), 0.0)
    assert (update.engines, update.base_update) == ((0, 1), "u3")
    assert [(verdict.engine, verdict.error["code"]) for verdict in update.left_out if verdict.error] == [(2, BaseRefused.code)]
    ledger = Ledger(None, 10)
    ledger.see(replace(engine(0, 3), update_id="u3"))
    with pytest.raises(BaseRefused, match="builds on version 2, and the fleet holds version 3"):
        ledger.admit(request("u4", 4, adapter=ALONE, base_version=2), 0.0)
    assert ledger.admit(request("u5", 4, adapter=WITH_BASE), 0.0).base_update == ""


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"adapter": ALONE, "rewind": True}, "rewind of an adapter alone"),
        ({"adapter": WITH_BASE, "scope": ("x",)}, "an adapter with a scope"),
        ({"adapter": WITH_BASE, "base_version": 1}, "only with a scope or an adapter alone"),
    ],
)
def test_requests_that_make_no_sense_can_not_be_made(about: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        request("u", 2, **about)


def test_requests_go_with_the_adapter_that_counts_under_a_name_of_its_own() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    seen: list[Any] = []

    async def add_request(*args: Any, lora_request: Any = None, **_: Any) -> None:
        seen.append(lora_request)

    llm = SimpleNamespace(add_request=add_request)
    carried = Carried(llm)
    asyncio.run(llm.add_request("r"))
    carried.open([WorkerReport(0, "", "none", checks={naming.TAKES: 1})])
    for name in (
        "",
        name_of(7, "rejoin-0123456789abcdef", ALONE),
        name_of(7, "fedcba9876543210", WITH_BASE),
        name_of(8, "u", Adapter.NONE),
    ):
        carried.carry(name)
        asyncio.run(llm.add_request("r", lora_request=None))
    assert seen[0] is None, "an engine that takes none"
    names = [one.lora_name for one in seen[1:]]
    assert names == ["weightsync", "weightsync-7-456789abcdef", "weightsync-7-ba9876543210", "weightsync"]
    assert len({one.lora_int_id for one in seen[1:]}) == 1, "so that requests in flight go on with the one that counts"


def test_an_engine_goes_back_to_the_adapter_before_without_any_kept_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_vllm(monkeypatch)
    made = Engine(tmp_path, more={"sync.rollback": "off"})
    for each in made.workers:
        each._retain = False
        opened(each)

    def update(version: int, sent: dict[str, torch.Tensor], brings: Adapter) -> Any:
        (update_id,) = {each.begin(sent, adapter=brings) for each in made.workers}
        made.actor._told = {update_id: Told(adapter=brings)}

        async def commit() -> Any:
            return await made.actor.commit(update_id, version, 0)

        return asyncio.run(commit())["value"]

    assert update(1, {**weights(1), **pair("tower", 5)}, WITH_BASE)["committed"]
    assert update(2, pair("tower", 6), ALONE)["committed"]
    name = made.core.adapter.name
    for step, shown in (("spoil", name), ("resume", "")):
        if step == "spoil":
            slot(made.workers[1]).spoil = 2
        else:
            made.core.fail["resume"] = 1
        verdict = update(3, pair("tower", 7), ALONE)
        assert not verdict["committed"] and verdict["checks"]["rolled_back"] == 1
        made.require(2, 1)
        assert [values(each) for each in made.workers] == [{"tower": 6}] * 2
        assert made.core.adapter.name not in ("", shown), "what was cached meanwhile may be of the one that failed"
    assert update(3, pair("tower", 7), ALONE)["committed"]
    assert [values(each) for each in made.workers] == [{"tower": 7}] * 2


# --- a trainer --------------------------------------------------------------------------------------------


def read(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.read() if isinstance(value, Lazy) else value.detach() for name, value in values.items()}


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {"odd": 2}, "alpha_pattern": {"layers.0": 3}}], ids=str)
def test_what_is_sent_of_peft_is_what_it_merges(options: dict[str, Any]) -> None:
    model = adapted(**options)
    lora = lora_of(model)
    parts, base = read(lora.adapter), read(lora.base)
    assert len(parts) == 2 * 3 and not any("lora_" in name for name in base)
    paths = [name.removesuffix(f".{A}") for name in parts if name.endswith(A)]
    changed = {path: base[f"{path}.base_layer.weight"] + parts[f"{path}.{B}"] @ parts[f"{path}.{A}"] for path in paths}
    model.merge_adapter()
    for path, value in changed.items():
        torch.testing.assert_close(value, model.get_parameter(f"{path}.base_layer.weight").detach())
    model.unmerge_adapter()


def broken(what: str) -> Any:
    model = adapted(**{"DoRA": {"use_dora": True}, "whole": {"modules_to_save": ["layers.1"]}, "bias": {"lora_bias": True}}.get(what, {}))
    if what == "merged":
        model.merge_adapter()
    elif what == "disabled":
        model.base_model.disable_adapter_layers()
    elif what == "trained":
        next(p for name, p in model.named_parameters() if "lora_" not in name).requires_grad_(True)
    elif what == "two":
        model.add_adapter("other", model.peft_config["default"])
        model.base_model.set_adapter(["default", "other"])
    return model


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("DoRA", "3 adapted by a variant of LoRA"),
        ("whole", "1 trained as a whole, beside the adapter.*layers.1"),
        ("bias", "3 with a bias in the adapter"),
        ("merged", "whose adapter is merged into the weights now"),
        ("disabled", "whose adapter is disabled now"),
        ("trained", "1 trained, and no part of the adapter"),
        ("two", "whose adapter is 2 at once now"),
    ],
)
def test_what_can_not_be_taken_apart_is_refused(what: str, words: str) -> None:
    with pytest.raises(ManifestRefused, match=words) as caught:
        lora_of(broken(what))
    assert "Send the merged weights instead" in caught.value.hint


def test_a_model_without_an_adapter_is_refused() -> None:
    with pytest.raises(ManifestRefused, match="Linear has no LoRA layer, so there is no adapter to send alone"):
        lora_of(torch.nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ManifestRefused, match="wants a model with a LoRA adapter, got dict"):
        lora_of({})


def test_the_weights_below_come_first_and_where_they_were_lost() -> None:
    below, other = Below(), torch.nn.Linear(2, 2)
    lora = Lora(torch.nn.Linear(2, 2), {"w": torch.zeros(1)}, {"a": torch.zeros(1)})

    def brings(given: Any = lora, **options: Any) -> tuple[Any, Any, list[str]]:
        chosen = below.choose(given, {"adapter_only": True, "base_version": None, "rewind": False, **options})
        return chosen.about["adapter"], chosen.about["base_version"], sorted(chosen.source())

    assert brings() == (WITH_BASE, None, ["a", "w"])
    below.note(lora.model, 4)
    assert brings() == (ALONE, 4, ["a"])
    assert brings(rewind=True) == (WITH_BASE, None, ["a", "w"])
    assert brings(Lora(other, lora.base, lora.adapter))[0] == WITH_BASE, "another model has other weights"
    assert not below.lost(WeightSyncError("something else")) and below.lost(BaseRefused("an engine restarted"))
    assert brings()[0] == WITH_BASE
    below.note(lora.model, 5)
    below.note(None, 6)
    assert brings()[0] == WITH_BASE, "what came since took its place"
    assert below.choose({"w": 1}, {"adapter_only": False}).about == {}
