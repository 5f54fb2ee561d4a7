"""The chart's values at their edges: names that YAML takes for something else, values taken away, and what the service would refuse.

Not covered: what only a cluster can tell (whether a claim, a class or a Secret is there), and arguments that vLLM alone can judge.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import HelmRenderError, HelmValuesError
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.charts import CHART, CRD_KINDS, by_kind, containers, documents, merged, pods, rendered
from weightsync import config

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
#: Names that YAML reads as numbers, truth values or nothing unless they are quoted.
ODD = ["1234", "null", "yes"]


def fits(found: list[dict[str, Any]]) -> None:
    for document in found:
        if document["kind"] not in CRD_KINDS:
            kubernetes_validate.validate(document, "1.33", strict=True)
    for template in pods(found):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": template}, "1.33", True
        )


# --- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ODD)
def test_names_stay_text_whatever_yaml_would_make_of_them(odd: str) -> None:
    named = {
        "fullnameOverride": "fleet",
        "nameOverride": odd,
        "auth": {"existingSecret": odd, "existingSecretKey": odd},
        "ray": {"existingSecret": odd},
        "image": {"pullSecrets": [odd], "repository": odd},
        "models": {"existingClaim": odd, "mountPath": "/y: #"},
        "cache": {"existingClaim": odd},
        "serviceAccount": {"name": odd},
        **{kind: {"priorityClassName": odd} for kind in ("api", "head")},
        "workers": {"priorityClassName": odd, "runtimeClassName": odd},
    }
    found = documents(named, odd)
    fits(found)
    for template in pods(found):
        assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == odd
        assert template["spec"]["serviceAccountName"] == odd == template["spec"]["priorityClassName"]
    fits(documents({"cache": {"storageClass": odd}}))
    fits(documents({"models": {"hostPath": "/srv: #1"}, "cache": {"storageClass": "-"}}))
    assert by_kind(documents({"cache": {"storageClass": "-"}}))["PersistentVolumeClaim"]["spec"]["storageClassName"] == "-"


@pytest.mark.parametrize(
    ("release", "values"),
    [("7b", {}), ("rl.v2", {}), ("rl", {"nameOverride": "a.b"}), ("1e3", {"nameOverride": "1e3"})],
)
def test_a_name_that_a_service_or_a_ray_cluster_may_not_have_is_refused(release: str, values: dict[str, Any]) -> None:
    with pytest.raises(HelmRenderError, match="fullnameOverride"):
        rendered(values, release)
    assert documents({**values, "fullnameOverride": "fleet"}, release)


def test_long_names_are_cut_to_what_ray_clusters_may_have() -> None:
    for document in documents({}, "a" * 39 + "-" + "b" * 13):
        assert re.fullmatch("a{39}(-[a-z]+)?", document["metadata"]["name"])


def test_two_releases_in_one_namespace_have_nothing_in_common() -> None:
    everything = {"metrics": {kind: {"enabled": True} for kind in ("serviceMonitor", "podMonitor", "rules", "dashboard")}}
    first, second = documents(everything, "one"), documents(everything, "two")
    names = [{(document["kind"], document["metadata"]["name"]) for document in found} for found in (first, second)]
    assert not names[0] & names[1] and len(names[0]) == len(first)
    labels = [template["metadata"]["labels"] for template in pods(second)]

    def picked(selector: dict[str, str]) -> bool:
        return any(selector.items() <= own.items() for own in labels)

    for kind, found in by_kind(first).items():
        spec = found.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector") or {}
        if kind not in ("ServiceMonitor", "PodMonitor") and selector:
            assert not picked(selector.get("matchLabels", selector)), kind
    service = by_kind(second)["Service"]["metadata"]["labels"]
    assert not by_kind(first)["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= service.items()
    pod_monitor = by_kind(first)["PodMonitor"]["spec"]["selector"]["matchLabels"]
    assert pod_monitor == {"ray.io/cluster": by_kind(first)["RayCluster"]["metadata"]["name"]}


# --- values taken away ------------------------------------------------------------------------------


def paths(node: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every value that the chart comes with, and each part that holds some."""
    here = [(*path, key) for key, value in node.items() if value is not None]
    sections = [key for key, value in node.items() if isinstance(value, dict) and key != "labels"]  # those are names of a user's own
    return here + [found for key in sections for found in paths(node[key], (*path, key))]


def without_secrets(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Manifests but those with random tokens."""
    return [document for document in documents(values) if document["kind"] != "Secret"]


def nulls(taken: list[tuple[str, ...]]) -> dict[str, Any]:
    """Values that take these away."""
    values: dict[str, Any] = {}
    for path in taken:
        nested: Any = None
        for key in reversed(path):
            nested = {key: nested}
        values = merged(values, nested)
    return values


def default(path: tuple[str, ...]) -> Any:
    found: Any = DEFAULTS
    for key in path:
        found = found[key]
    return found


ALL = paths(DEFAULTS)
EMPTY = [path for path in ALL if not default(path) and path[0] != "fleet"]
SECTIONS = [path for path in ALL if any(other[: len(path)] == path and other != path for other in ALL)]


def test_null_stands_for_a_default_that_is_empty() -> None:
    assert len(EMPTY) > 40
    assert without_secrets(nulls(EMPTY)) == without_secrets({})


@pytest.mark.parametrize("taken", [[path for path in ALL if path not in EMPTY + SECTIONS], *([path] for path in SECTIONS)])
def test_null_for_any_other_is_refused_with_its_path(taken: list[tuple[str, ...]]) -> None:
    with pytest.raises(HelmValuesError) as caught:
        rendered(nulls(taken))
    said = dict(re.findall(r"^ *- at '(.*?)': missing propert(?:y|ies) (.*)$", str(caught.value), re.MULTILINE))
    for *parents, last in taken:
        assert f"'{last}'" in said["".join(f"/{parent}" for parent in parents)]


# --- what the service would refuse ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "path"),
    [
        ({"fleet": "Bad_Name"}, "/fleet/fleet"),
        ({"fleet": "a" * 33}, "/fleet/fleet"),
        ({"engine": {"model": "models/policy"}}, "/fleet/engine/model"),
        *[
            ({"engine": {"extra": {key: value}}}, "/fleet/engine/extra")
            for key, value in (
                ("model", "x"),
                ("worker_extension_cls", "x"),
                ("tensor_parallel_size", 2),
                ("data_parallel_rank", 1),
                ("nnodes", 2),
                ("enable_eplb", True),
                ("additional_config", {"weightsync": {}}),
            )
        ],
    ],
)
def test_what_the_settings_refuse_is_refused_before_it_is_installed(
    fleet: dict[str, Any], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HelmValuesError) as caught:
        rendered({"fleet": fleet})
    assert path in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValidationError):
        config.restore(merged({"engine": {"model": str(tmp_path)}}, fleet))


@pytest.mark.parametrize(
    "extra", [{"enable_eplb": False}, {"enable_eplb": None}, {"additional_config": {"theirs": 1}}, {"max_loras": "two"}]
)
def test_what_only_vllm_can_judge_passes(extra: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert config.restore({"engine": {"model": tmp_path, "extra": extra}}).engine.extra == extra
    assert rendered({"fleet": {"engine": {"extra": {key: value for key, value in extra.items() if value is not None}}}})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fleet": {"sync": {"stage": "none", "rollback": "host"}}}, "fleet.sync.rollback: got host"),
        ({"fleet": {"sync": {"stage": "none", "verify_stored": True}}}, "fleet.sync.verify_stored: got true"),
        ({"fleet": {"engine": {"count": 3}, "sync": {"stage": "none", "min_available": 1}}}, "fleet.sync.min_available: got 1"),
        ({"fleet": {"sync": {"caches": "salt"}, "engine": {"extra": {"kv_transfer_config": {"a": 1}}}}}, "fleet.sync.caches: got salt"),
        ({"fleet": {"api": {"port": 8518}}}, "fleet.sync.store_port: got 8518"),
        ({"fleet": {"engine": {"port_base": 64990, "count": 1000}}}, "fleet.engine.port_base: got 64990"),
        (
            {"fleet": {"engine": {"port_base": 9999, "count": 4}}},
            "fleet.engine.port_base: got 9999 for 4 engine(s), want ports without 10002",
        ),
        ({"fleet": {"engine": {"port_base": 19999}}}, "fleet.engine.port_base: got 19999 for 1 engine(s), want ports without 10002"),
        ({"fleet": {"engine": {"port_base": 8079, "count": 2}}}, "fleet.engine.port_base: got 8079"),
        ({"fleet": {"engine": {"count": 9}}, "cache": {"accessModes": ["ReadWriteOnce"]}}, "cache.accessModes: got ReadWriteOnce"),
    ],
)
def test_values_that_could_not_work_together_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmRenderError) as caught:
        rendered(values)
    assert said in str(caught.value)


@pytest.mark.parametrize(("base", "count"), [(9999, 3), (20000, 8), (8081, 1), (8072, 8)])
def test_ports_beside_those_that_ray_takes_are_the_engines(base: int, count: int) -> None:
    assert documents({"fleet": {"engine": {"port_base": base, "count": count}}})


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["\x7f", "a\x85b", "\ufeff", "\u2028", "'\"\\", "{{ .Values }}"]
)
_values = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-(2.0**53), 2.0**53) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(_texts.map("x".__add__), _values, max_size=4))
def test_whatever_is_passed_to_vllm_reaches_it_through_toml(extra: dict[str, Any]) -> None:
    text = by_kind(documents({"fleet": {"engine": {"extra": extra}}}))["ConfigMap"]["data"]["fleet.toml"]
    assert tomllib.loads(text)["engine"]["extra"] == extra


# --- room and place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [{"retain_engines": 1}, {"retain_engines": 4}])
def test_pods_of_given_gpus_stay_the_same_however_many_engines_there_are(sync: dict[str, Any]) -> None:
    def group(count: int) -> dict[str, Any]:
        found = by_kind(documents({"fleet": {"engine": {"count": count}, "sync": sync}, "workers": {"gpus": 8}}))["RayCluster"]
        own: dict[str, Any] = found["spec"]["workerGroupSpecs"][0]
        return {key: value for key, value in own.items() if not key.endswith("eplicas")}

    assert group(1) == group(3) == group(8) == group(20)


@pytest.mark.parametrize("kind", ["api", "head", "workers"])
def test_in_the_hosts_network_pods_keep_apart_whatever_else_draws_them(kind: str) -> None:
    drawn = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}
    apart = [{"topologyKey": "zone", "labelSelector": {}}]
    own = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": drawn},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart},
    }
    found = documents({"hostNetwork": True, "networkPolicy": {"enabled": False}, kind: {"affinity": own}})
    fits(found)
    template = pods(found)[("head", "workers", "api").index(kind)]
    affinity = template["spec"]["affinity"]
    assert affinity["nodeAffinity"] == own["nodeAffinity"]
    theirs, ours = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert theirs == apart[0]
    assert ours["topologyKey"] == "kubernetes.io/hostname"
    assert ours["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_pods_are_spread_among_their_own_kind_of_their_own_release() -> None:
    constraint = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    mine = {**constraint, "labelSelector": {"matchLabels": {"a": "b"}}}
    found = documents({kind: {"topologySpreadConstraints": [constraint, mine]} for kind in ("api", "head", "workers")})
    for template in pods(found):
        first, second = template["spec"]["topologySpreadConstraints"]
        own = {f"app.kubernetes.io/{key}" for key in ("instance", "part-of", "component")}
        labels = template["metadata"]["labels"]
        assert first["labelSelector"]["matchLabels"] == {key: labels[key] for key in own}
        assert second == mine


# --- what is said when it is installed --------------------------------------------------------------


def notes(values: dict[str, Any]) -> str:
    return rendered(values)["NOTES.txt"]


def test_the_notes_say_who_is_not_let_in() -> None:
    closed = notes({"metrics": {"serviceMonitor": {"enabled": True}}})
    assert "networkPolicy.clients" in closed and "networkPolicy.trainers" in closed and "networkPolicy.monitoring" in closed
    who = {name: [{"namespaceSelector": {}}] for name in ("clients", "trainers", "monitoring")}
    for values in ({"networkPolicy": who}, {"networkPolicy": {"enabled": False}}):
        assert "networkPolicy" not in notes(merged(values, {"metrics": {"serviceMonitor": {"enabled": True}}}))
    assert "networkPolicy.monitoring" not in notes({})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fleet": {"sync": {"require": 2}}}, "fleet.sync.require is 2 and fleet.engine.count 1"),
        ({"fleet": {"api": {"min_ready": 2}}}, "fleet.api.min_ready is 2 and fleet.engine.count 1"),
        ({}, "neither models.existingClaim nor models.hostPath is given: /models/policy must be in the image"),
        (
            {"models": {"hostPath": "/srv", "mountPath": "/model"}},
            "fleet.engine.model is /models/policy, which is not in models.mountPath (/model)",
        ),
    ],
)
def test_the_notes_warn_of_what_can_be_right_and_seldom_is(values: dict[str, Any], said: str) -> None:
    right = {"fleet": {"engine": {"count": 2}, "sync": {"require": 2}, "api": {"min_ready": 2}}, "models": {"existingClaim": "models"}}
    assert f"WARNING: {said}" in " ".join(notes(values).split()) and "WARNING" not in notes(right)


def test_the_notes_say_how_to_ask_what_is_served_at_whatever_port() -> None:
    assert "exec deploy/rl-weightsync -- weightsync status\n" in notes({})
    assert "weightsync status --url http://127.0.0.1:9000\n" in notes({"fleet": {"api": {"port": 9000}}})


def test_the_notes_find_the_token_under_any_key() -> None:
    assert r"{.data.my\.token}" in notes({"auth": {"existingSecret": "mine", "existingSecretKey": "my.token"}})
    env = {entry["name"]: entry for entry in containers(pods(documents({}))[2])[0]["env"]}
    assert f"get secret {env['WEIGHTSYNC_API__TOKEN']['valueFrom']['secretKeyRef']['name']} " in notes({})
