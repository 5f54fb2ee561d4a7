"""The Helm chart: rendered by Helm's own engine, checked against schemas of Kubernetes and custom resources, read by the service.

Not covered: a cluster. Schemas of RayCluster, PodMonitor, ServiceMonitor and PrometheusRule are looked for in `CHART_CRD_DIR`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache, reduce
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from helm_python import HelmRenderError, HelmValuesError
from yamllint import linter
from yamllint.config import YamlLintConfig

from tests.charts import CHART, EXAMPLES, by_kind, closed, containers, documents, floats, merged, pods, rendered, strings, violations
from weightsync import config
from weightsync.fleet import own_ray
from weightsync.fleet.fixed import FIXED

ROOT = Path(__file__).resolve().parent.parent
KUBERNETES = "1.33"
CRDS = {
    "RayCluster": "ray.io_rayclusters.yaml",
    "PodMonitor": "monitoring.coreos.com_podmonitors.yaml",
    "ServiceMonitor": "monitoring.coreos.com_servicemonitors.yaml",
    "PrometheusRule": "monitoring.coreos.com_prometheusrules.yaml",
}

#: Every switch of the chart, on and off where it is not the default.
SWITCHES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "names": {"nameOverride": "sync", "image": {"digest": f"sha256:{'a' * 64}", "pullSecrets": ["mine"]}},
    "full name": {"fullnameOverride": "a" * 40},
    "secrets": {"auth": {"existingSecret": "mine", "existingSecretKey": "key"}, "ray": {"existingSecret": "mine"}},
    "token": {"auth": {"token": "secret"}},
    "quiet": {"api": {"verbose": False}},
    "placed": {
        kind: {
            "nodeSelector": {"zone": "a"},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
            "priorityClassName": "high",
            "annotations": {"team": "rl"},
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        }
        for kind in ("api", "head", "workers")
    },
    "rdma": {"workers": {"rdma": {"enabled": True, "count": 8}}},
    "locked memory": {"workers": {"rdma": {"enabled": True, "ipcLock": True}}},
    "runtime class": {"workers": {"runtimeClassName": "nvidia"}},
    "models in a claim": {"models": {"existingClaim": "models"}},
    "models on hosts": {"models": {"hostPath": "/srv"}},
    "no cache": {"cache": {"enabled": False}},
    "cache in a claim": {"cache": {"existingClaim": "mine"}},
    "cache of a class": {"cache": {"storageClass": "fast", "accessModes": ["ReadWriteOnce"]}},
    "load balancer": {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}, "loadBalancerSourceRanges": ["10.0.0.0/8"]}},
    "account": {"serviceAccount": {"create": False, "name": "mine"}},
    "account's annotations": {"serviceAccount": {"annotations": {"role": "rl"}}},
    "service monitor": {"metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "p"}}}},
    "pod monitor": {"metrics": {"podMonitor": {"enabled": True, "labels": {"release": "p"}}}},
    "rules": {"metrics": {"rules": {"enabled": True, "labels": {"release": "p"}, "runbook": "https://docs.example/operations"}}},
    "dashboard": {"metrics": {"dashboard": {"enabled": True, "annotations": {"grafana_folder": "RL"}}}},
    "egress": {"networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}]}},
    "free egress": {"networkPolicy": {"restrictEgress": False}},
    "no policy": {"networkPolicy": {"enabled": False}},
    "policy": {"networkPolicy": {who: [{"namespaceSelector": {}}] for who in ("clients", "trainers", "monitoring")}},
    "no budgets": {"podDisruptionBudget": {"enabled": False}},
    "host network": {"hostNetwork": True, "networkPolicy": {"enabled": False}},
    "cpu": {"fleet": {"engine": {"device": "cpu", "count": 3}}},
    "large ids": {"security": {"runAsUser": 1000660000, "runAsGroup": 1000660000, "fsGroup": 1000660000}},
}
_TOGETHER = (
    "names",
    "placed",
    "locked memory",
    "runtime class",
    "models in a claim",
    "load balancer",
    "service monitor",
    "pod monitor",
    "rules",
    "dashboard",
    "egress",
    "policy",
)
SWITCHES["together"] = reduce(merged, (SWITCHES[name] for name in _TOGETHER))
CASES = SWITCHES | EXAMPLES
_fits: set[str] = set()


@cache
def crd(kind: str) -> dict[str, Any]:
    folder = os.environ.get("CHART_CRD_DIR")
    if not folder:
        pytest.skip("CHART_CRD_DIR does not say where the custom resource definitions are")
    versions = yaml.load((Path(folder) / CRDS[kind]).read_text(), yaml.CSafeLoader)["spec"]["versions"]
    return closed(next(v for v in versions if v["name"] == "v1")["schema"]["openAPIV3Schema"])


def fits_kubernetes(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    if text not in _fits:  # most are those of other cases too
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        _fits.add(text)


def settings(values: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> config.Settings:
    """What `serve` reads in the API's pod: fleet.toml and the container's environment."""
    (folder / "config.json").write_text("{}")
    found = by_kind(documents(merged(values, {"fleet": {"engine": {"model": str(folder)}}})))
    toml = folder / "fleet.toml"
    toml.write_text(found["ConfigMap"]["data"]["fleet.toml"])
    secret = "token-of-the-secret"
    for entry in containers(found["Deployment"]["spec"]["template"])[0]["env"]:
        if entry["name"].startswith("WEIGHTSYNC_"):
            monkeypatch.setenv(entry["name"], entry.get("value", secret).replace("$(POD_IP)", "10.1.2.3"))
    return config.load({}, toml)


@pytest.mark.parametrize("case", CASES)
def test_it_lints_and_every_manifest_fits_kubernetes_schemas(case: str) -> None:
    assert not [m for m in helm_python.lint(str(CHART), CASES[case], strict=True, kube_version="v1.33.0")["messages"] if m["severity"] > 1]
    kinds = set()
    for document in documents(CASES[case]):
        kinds.add(document["kind"])
        assert not list(floats(document))  # Kubernetes refuses 1e+09 where it wants a whole number; the schemas don't
        assert "namespace" not in document["metadata"]
        if document["kind"] not in CRDS:
            fits_kubernetes(document)
    for template in pods(documents(CASES[case])):
        fits_kubernetes({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": template})
    assert {"ConfigMap", "Deployment", "RayCluster", "Service"} <= kinds


@pytest.mark.parametrize("case", CASES)
def test_custom_resources_fit_their_definitions(case: str) -> None:
    for document in documents(CASES[case]):
        if document["kind"] in CRDS:
            assert not violations(document, crd(document["kind"]))


def test_a_definition_refuses_a_key_that_it_does_not_know() -> None:
    document = by_kind(documents({}))["RayCluster"]
    document["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["imagePullPollicy"] = "Always"
    assert "imagePullPollicy" in "".join(violations(document, crd("RayCluster")))


@pytest.mark.parametrize("case", ["together", "trainer-outside"])
def test_what_is_rendered_is_tidy_yaml(case: str) -> None:
    rules = YamlLintConfig((CHART.parent / ".yamllint").read_text())
    for name, text in rendered(CASES[case]).items():
        if name.endswith(".yaml"):
            assert not [f"{name}: {problem}" for problem in linter.run(text.strip() + "\n", rules)]


def test_what_is_written_is_tidy_yaml() -> None:
    rules = YamlLintConfig((CHART.parent / ".yamllint").read_text())
    for path in [CHART / "Chart.yaml", CHART / "values.yaml", *sorted((CHART / "examples").glob("*.yaml"))]:
        assert not [f"{path.name}: {problem}" for problem in linter.run(path.read_text(), rules)]


def test_values_and_their_schema_are_those_of_the_settings() -> None:
    done = subprocess.run([sys.executable, "scripts/chart_files.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"imagee": {}}, "imagee"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"fleet": {"engine": {"tensor_paralel_size": 2}}}, "/fleet/engine"),
        ({"fleet": {"engine": {"count": 0}}}, "/fleet/engine/count"),
        ({"fleet": {"engine": {"port_base": 0}}}, "/fleet/engine/port_base"),
        ({"fleet": {"sync": {"stage": "disk"}}}, "/fleet/sync/stage"),
        ({"fleet": {"sync": {"store_host": "10.0.0.1"}}}, "/fleet/sync"),
        ({"fleet": {"api": {"token": "secret"}}}, "/fleet/api"),
        ({"fleet": {"ray": {"address": "head:6379"}}}, "/fleet"),
        ({"workers": {"gpusPerNode": 0}}, "/workers/gpusPerNode"),
        ({"workers": {"tolerations": [{"keyy": "a"}]}}, "/workers/tolerations/0"),
        ({"workers": {"affinity": {"nodeAffinity": {"required": {}}}}}, "/workers/affinity/nodeAffinity"),
        ({"workers": {"env": [{"name": "A", "valu": "b"}]}}, "/workers/env/0"),
        ({"workers": {"rdma": {"resource": "ib"}}}, "/workers/rdma/resource"),
        ({"cache": {"accessModes": []}}, "/cache/accessModes"),
        ({"service": {"type": "Ingress"}}, "/service/type"),
        ({"networkPolicy": {"clients": [{"namespace": "a"}]}}, "/networkPolicy/clients/0"),
        ({"networkPolicy": {"egress": [{"from": []}]}}, "/networkPolicy/egress/0"),
        ({"metrics": {"podMonitor": {"interval": "often"}}}, "/metrics/podMonitor/interval"),
        ({"security": {"runAsUser": 0}}, "/security/runAsUser"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(values: dict[str, Any], path: str) -> None:
    with pytest.raises(HelmValuesError) as caught:
        rendered(values)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fleet": {"engine": {"tensor_parallel_size": 16}}}, "an engine needs 16 GPU(s)"),
        ({"fleet": {"engine": {"tensor_parallel_size": 2, "gpus": 1}}}, "fleet.engine.gpus: got 1, want 2"),
        ({"fleet": {"engine": {"count": 2}, "sync": {"min_available": 2}}}, "fleet.sync.min_available: got 2"),
        ({"fleet": {"engine": {"count": 8, "cpus": 6}}}, "workers.cpu: got 32, want 48"),
        ({"fleet": {"engine": {"count": 4}}, "workers": {"gpus": 2}}, "workers.gpus: got 2, want 4 to 8"),
        ({"workers": {"gpus": 9}}, "workers.gpus: got 9, want 1 to 8"),
        ({"fleet": {"engine": {"extra": {"seed": None, "a": [None]}}}}, "fleet.engine.extra.a[]: got null"),
        ({"hostNetwork": True}, "networkPolicy.enabled: got true"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmRenderError) as caught:
        rendered(values)
    assert said in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_the_service_reads_the_fleet_as_it_was_given(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = config.dump(settings(CASES[case], tmp_path, monkeypatch))
    given = CASES[case].get("fleet", {})
    for section in ("engine", "api", "sync"):
        for key, value in given.get(section, {}).items():
            if (section, key) != ("engine", "model"):
                assert got[section][key] == value
    assert got["sync"]["store_host"] == "10.1.2.3"
    assert got["api"] | {"host": "0.0.0.0", "token": "token-of-the-secret"} == got["api"]
    assert got["ray"]["address"].endswith("-head-svc:6379")
    assert got["leave_fleet"] is True  # the API's pod goes, the engines stay


def test_defaults_are_the_services_own_but_for_ports_and_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = config.dump(settings({}, tmp_path, monkeypatch))
    own = config.dump(config.restore({"engine": {"model": tmp_path}}))
    differ = {(section, key) for section in ("engine", "api", "sync") for key in own[section] if got[section][key] != own[section][key]}
    ports = {("engine", "port_base"), ("sync", "store_port")}
    assert differ == ports | {("api", "host"), ("api", "token"), ("sync", "store_host"), ("engine", "start_timeout_seconds")}
    assert got["fleet"] == own["fleet"]


def test_arguments_of_vllm_pass_through_to_the_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {
        "max_num_batched_tokens": 8192,
        "big": 123456789012,
        "small": 1.5e-7,
        "off": False,
        "hf_overrides": {"rope scaling": {"factor": 2.5, "names": ["a", "b"]}, "": {}},
        "text": 'a "quoted"\\path\nünd <tags> & \u2028 {{ .Values }}',
        "none": [],
    }
    frozen = ["model.visual.*", "a.'b'"]
    got = settings({"fleet": {"engine": {"extra": extra, "frozen": frozen}}}, tmp_path, monkeypatch).engine
    assert got.extra == extra
    assert isinstance(got.extra["max_num_batched_tokens"], int)
    assert got.frozen == tuple(frozen)


@pytest.mark.parametrize(
    ("engine", "workers", "replicas", "gpus", "shm"),
    [
        ({"count": 1}, {}, 1, 1, 1 + 32 + 1),
        ({"count": 8}, {}, 1, 8, 8 + 32 + 1),
        ({"count": 9}, {}, 2, 5, 5 + 32 + 1),
        ({"count": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}, 2, 8, 8 + 32 + 1),
        ({"count": 3, "tensor_parallel_size": 3, "data_parallel_size": 1}, {}, 2, 6, 6 + 32 + 1),
        ({"count": 2, "tensor_parallel_size": 2, "data_parallel_size": 4}, {}, 2, 8, 8 + 32 + 1),
        ({"count": 4, "gpus": 0.5}, {}, 1, 2, 2 + 32 + 1),
        ({"count": 8, "gpus": 0.6}, {}, 1, 8, 8 + 32 + 1),
        ({"count": 2}, {"gpus": 8, "ncclShmGiB": 2}, 1, 8, 16 + 32 + 1),
        ({"count": 2}, {"shmGiB": 5}, 1, 2, 5),
        ({"count": 40, "device": "cpu"}, {}, 2, 0, 1 + 32 + 1),
    ],
)
def test_worker_pods_are_sized_by_what_engines_need(
    engine: dict[str, Any], workers: dict[str, Any], replicas: int, gpus: int, shm: int
) -> None:
    group = by_kind(documents({"fleet": {"engine": engine}, "workers": workers}))["RayCluster"]["spec"]["workerGroupSpecs"][0]
    spec = group["template"]["spec"]
    limits = spec["containers"][0]["resources"]["limits"]
    assert {group[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {replicas}
    assert limits.get("nvidia.com/gpu", 0) == gpus == int(group["rayStartParams"]["num-gpus"])
    assert next(v for v in spec["volumes"] if v["name"] == "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{shm}Gi"}
    assert limits["memory"] == f"{128 + shm}Gi"
    assert spec["containers"][0]["resources"]["requests"] == limits


@pytest.mark.parametrize(("sync", "copies"), [({"retain_engines": 0}, 0), ({"retain_engines": 3}, 2), ({"stage": "none"}, 0)])
def test_shared_memory_holds_two_copies_for_each_engine_of_the_pod_that_keeps_some(sync: dict[str, Any], copies: int) -> None:
    cluster_ = by_kind(documents({"fleet": {"engine": {"count": 2}, "sync": sync}}))["RayCluster"]
    volumes = cluster_["spec"]["workerGroupSpecs"][0]["template"]["spec"]["volumes"]
    assert next(v for v in volumes if v["name"] == "shm")["emptyDir"]["sizeLimit"] == f"{2 + copies * 32 + 1}Gi"


def other(section: str, key: str, value: Any) -> Any:
    """A value that a setting may have, and has not."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["fleet"]["properties"][section]["properties"][key]
    if choices := schema.get("enum"):
        return next(choice for choice in choices if choice != value)
    if isinstance(value, bool):
        return not value
    if value is None:
        return 1 << 21 if "bytes" in key else 1
    if isinstance(value, str):
        return f"{value}x"
    return {int: lambda: value + 2, float: lambda: value + 1, list: lambda: ["a"], dict: lambda: {"a": 1}}[type(value)]()


def fixed(values: dict[str, Any]) -> tuple[str, ...]:
    """The annotation that makes Ray's pods anew."""
    return tuple(template["metadata"]["annotations"]["weightsync/fixed-settings"] for template in pods(documents(values)))


def test_ray_is_made_anew_for_settings_that_live_engines_keep_and_for_no_others() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["fleet"]
    before = fixed({})
    assert len(set(before)) == 1
    wide = {"fleet": {"engine": {"count": 3}}}
    changed = {
        (section, key)
        for section in ("engine", "api", "sync")
        for key, value in defaults[section].items()
        if fixed(merged(wide, {"fleet": {section: {key: other(section, key, value)}}})) != before
    }
    kept = {(section, key) for section, keys in FIXED.items() if section in defaults for key in keys or defaults[section]}
    assert changed == {(section, key) for section, key in kept if key in defaults[section]} - {("engine", "count")}
    assert fixed({"fleet": {"fleet": "other"}}) != before
    assert fixed({"auth": {"token": "other"}}) != before


def test_every_pod_is_a_node_of_ray_as_serve_would_start_it() -> None:
    for template in pods(documents({})):
        env = {entry["name"]: entry.get("value") for entry in containers(template)[0]["env"]}
        assert env | own_ray.environment() == env
        assert env["RAY_AUTH_MODE"] == "token"
    spec = by_kind(documents({}))["RayCluster"]["spec"]
    assert spec["authOptions"] == {"mode": "token", "secretName": "rl-weightsync-ray"}
    assert spec["headGroupSpec"]["rayStartParams"] | {"num-cpus": "0", "num-gpus": "0"} == spec["headGroupSpec"]["rayStartParams"]


@pytest.mark.parametrize("case", CASES)
def test_every_pod_is_restricted(case: str) -> None:
    for template in pods(documents(CASES[case])):
        spec = template["spec"]
        # A variable such as WEIGHTSYNC_PORT, which Kubernetes sets for a service of that name, is no setting.
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        assert by_kind(documents({}))["ServiceAccount"]["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            added = ["IPC_LOCK"] if case in ("locked memory", "together") and container["name"] == "ray-worker" else None
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]} | ({"add": added} if added else {})
            assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)


def test_pods_of_ray_do_not_change_with_the_charts_version() -> None:
    head, worker = (template for template in pods(documents({})) if template["metadata"]["labels"]["app.kubernetes.io/component"] != "api")
    for template in (head, worker):
        assert set(template["metadata"]["labels"]) == {f"app.kubernetes.io/{key}" for key in ("instance", "part-of", "component")}


def test_the_network_is_open_inside_the_release_and_to_those_who_are_named() -> None:
    inside = {"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "rl", "app.kubernetes.io/part-of": "weightsync"}}}
    policy = by_kind(documents({}))["NetworkPolicy"]["spec"]
    names = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    assert (policy["ingress"], policy["egress"]) == ([{"from": [inside]}], [{"to": [inside]}, names])
    assert (policy["podSelector"], policy["policyTypes"]) == (inside["podSelector"], ["Ingress", "Egress"])
    who = {name: [{"namespaceSelector": {"matchLabels": {"a": name}}}] for name in ("clients", "trainers", "monitoring")}
    further = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}
    policy = by_kind(documents({"networkPolicy": {**who, "egress": [further]}}))["NetworkPolicy"]["spec"]
    assert policy["egress"] == [{"to": [inside]}, names, {"to": who["trainers"]}, further]
    _, clients, trainers, monitoring = policy["ingress"]
    assert clients == {"from": who["clients"], "ports": [{"port": 8517}, {"port": 8600, "endPort": 9623}]}
    assert trainers == {"from": who["trainers"]}
    assert monitoring == {"from": who["monitoring"], "ports": [{"port": 8517}, {"port": 8080}]}
    free = by_kind(documents(SWITCHES["free egress"]))["NetworkPolicy"]["spec"]
    assert free["policyTypes"] == ["Ingress"] and "egress" not in free


def test_the_first_update_gets_through_to_an_api_that_is_not_ready() -> None:
    found = by_kind(documents({"fleet": {"engine": {"start_timeout_seconds": 905.5}}}))
    assert found["Service"]["spec"]["publishNotReadyAddresses"] is True
    container = containers(found["Deployment"]["spec"]["template"])[0]
    assert [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")] == [
        "/livez",
        "/livez",
        "/readyz",
    ]
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 600 + 905.5
    assert found["Deployment"]["spec"]["replicas"] == 1
    assert found["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}


def test_secrets_that_exist_are_used_and_others_are_made() -> None:
    made = [document for document in documents({}) if document["kind"] == "Secret"]
    assert {key for secret in made for key in secret["data"]} == {"token", "auth_token"}
    assert all(len(value) >= 43 for secret in made for value in secret["data"].values())
    found = documents(SWITCHES["secrets"])
    assert not [document for document in found if document["kind"] == "Secret"]
    env = {entry["name"]: entry for entry in containers(by_kind(found)["Deployment"]["spec"]["template"])[0]["env"]}
    assert env["WEIGHTSYNC_API__TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "key"}
    assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "auth_token"}


@pytest.mark.parametrize(("engines", "unavailable", "least"), [(8, 1, 1), (16, 1, 1), (40, 1, 4), (40, 2, 3), (16, 9, 1)])
def test_a_drain_leaves_so_many_workers(engines: int, unavailable: int, least: int) -> None:
    values = {"fleet": {"engine": {"count": engines}}, "podDisruptionBudget": {"workersUnavailable": unavailable}}
    budgets = {d["metadata"]["name"]: d["spec"] for d in documents(values) if d["kind"] == "PodDisruptionBudget"}
    assert budgets["rl-weightsync-worker"]["minAvailable"] == least
    assert budgets["rl-weightsync-head"]["minAvailable"] == 1


def test_in_the_hosts_network_no_two_pods_share_a_node() -> None:
    for template in pods(documents(SWITCHES["host network"])):
        (term,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        labels = template["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()
        assert (template["spec"]["hostNetwork"], template["spec"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


@pytest.mark.parametrize("case", CASES)
def test_what_pods_refer_to_is_made_or_was_named(case: str) -> None:
    found = documents(CASES[case])
    there = {(document["kind"], document["metadata"]["name"]) for document in found}
    there |= {(kind, name) for kind in ("Secret", "PersistentVolumeClaim", "ServiceAccount") for name in strings(CASES[case])}
    for template in pods(found):
        spec = template["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in there
        for volume in spec["volumes"]:
            for source, kind, key in (
                ("secret", "Secret", "secretName"),
                ("configMap", "ConfigMap", "name"),
                ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
            ):
                assert source not in volume or (kind, volume[source][key]) in there
        for container in containers(template):
            assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
            for entry in container["env"]:
                if secret := entry.get("valueFrom", {}).get("secretKeyRef"):
                    assert ("Secret", secret["name"]) in there


def test_selectors_find_what_they_are_for_and_nothing_else() -> None:
    found = documents(SWITCHES["together"])
    kinds = by_kind(found)
    labels = {template["metadata"]["labels"]["app.kubernetes.io/component"]: template["metadata"]["labels"] for template in pods(found)}
    assert set(labels) == {"head", "worker", "api"}

    def picks(selector: dict[str, str]) -> set[str]:
        return {component for component, own in labels.items() if selector.items() <= own.items()}

    assert picks(kinds["Service"]["spec"]["selector"]) == {"api"}
    assert picks(kinds["Deployment"]["spec"]["selector"]["matchLabels"]) == {"api"}
    assert picks(kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]) == {"head", "worker", "api"}
    budgets = [document for document in found if document["kind"] == "PodDisruptionBudget"]
    assert [picks(budget["spec"]["selector"]["matchLabels"]) for budget in budgets] == [{"head"}, {"worker"}]
    assert kinds["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items() <= kinds["Service"]["metadata"]["labels"].items()
    # KubeRay labels its pods with the cluster's name.
    assert kinds["PodMonitor"]["spec"]["selector"]["matchLabels"] == {"ray.io/cluster": kinds["RayCluster"]["metadata"]["name"]}
    (port,) = kinds["Service"]["spec"]["ports"]
    assert port["targetPort"] in {port["name"] for port in containers(kinds["Deployment"]["spec"]["template"])[0]["ports"]}
    assert kinds["ServiceMonitor"]["spec"]["endpoints"][0]["port"] == port["name"]


def test_devices_for_rdma_come_with_the_pod() -> None:
    def worker(rdma: dict[str, Any]) -> dict[str, Any]:
        template = pods(documents({"workers": {"rdma": rdma}}))[1]
        resources: dict[str, Any] = containers(template)[0]["resources"]
        return resources

    assert not [name for name in worker({})["limits"] if name.startswith("rdma")]
    resources = worker({"enabled": True, "resource": "rdma/hca", "count": 4})
    assert resources["limits"]["rdma/hca"] == resources["requests"]["rdma/hca"] == 4
