"""Where the chart's values go, and what its pods find there: ports, probes, folders that are written, tokens.

Not covered: sizes (`test_chart.py`), and values at their edges (`test_chart_values.py`).
"""

from __future__ import annotations

import base64
import shutil
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import helm_python
import pytest
import yaml

from tests.charts import CHART, by_kind, containers, documents, pods
from weightsync.fleet.vllm_api import ENVIRONMENT

API = "spec.template.spec.containers.0"
HEAD = "spec.headGroupSpec"
WORKER = "spec.workerGroupSpecs.0"
#: A value, another than its default, the kind of manifest that has it and where in that it stands.
PLACES: list[tuple[str, Any, str, list[str]]] = [
    ("api.livenessSeconds", 47, "Deployment", [f"{API}.livenessProbe.periodSeconds"]),
    ("api.readinessSeconds", 7, "Deployment", [f"{API}.readinessProbe.periodSeconds"]),
    ("api.cpu", "3", "Deployment", [f"{API}.resources.requests.cpu", f"{API}.resources.limits.cpu"]),
    ("api.memory", "9Gi", "Deployment", [f"{API}.resources.requests.memory", f"{API}.resources.limits.memory"]),
    ("fleet.api.port", 8111, "Deployment", [f"{API}.ports.0.containerPort"]),
    ("fleet.api.port", 8111, "Service", ["spec.ports.0.port"]),
    ("fleet.sync.store_port", 8112, "Deployment", [f"{API}.ports.1.containerPort"]),
    ("security.runAsUser", 2001, "Deployment", ["spec.template.spec.securityContext.runAsUser"]),
    ("security.runAsGroup", 2002, "Deployment", ["spec.template.spec.securityContext.runAsGroup"]),
    ("security.fsGroup", 2003, "Deployment", ["spec.template.spec.securityContext.fsGroup"]),
    *[
        (f"{kind}.{key}", value, document, [f"{spec}.{key}"])
        for kind, document, spec in (
            ("api", "Deployment", "spec.template.spec"),
            ("head", "RayCluster", f"{HEAD}.template.spec"),
            ("workers", "RayCluster", f"{WORKER}.template.spec"),
        )
        for key, value in (
            ("nodeSelector", {"zone": kind}),
            ("tolerations", [{"key": kind, "operator": "Exists"}]),
            ("priorityClassName", f"class-{kind}"),
        )
    ],
    ("head.cpu", "5", "RayCluster", [f"{HEAD}.template.spec.containers.0.resources.{k}.cpu" for k in ("requests", "limits")]),
    ("head.memory", "6Gi", "RayCluster", [f"{HEAD}.template.spec.containers.0.resources.{k}.memory" for k in ("requests", "limits")]),
    ("head.annotations.team", "one", "RayCluster", [f"{HEAD}.template.metadata.annotations.team"]),
    ("workers.annotations.team", "two", "RayCluster", [f"{WORKER}.template.metadata.annotations.team"]),
    ("api.annotations.team", "three", "Deployment", ["spec.template.metadata.annotations.team"]),
    ("workers.runtimeClassName", "fast", "RayCluster", [f"{WORKER}.template.spec.runtimeClassName"]),
    ("ray.version", "2.61.0", "RayCluster", ["spec.rayVersion"]),
    ("image.pullPolicy", "Always", "Deployment", [f"{API}.imagePullPolicy"]),
    ("image.pullPolicy", "Always", "RayCluster", [f"{part}.template.spec.containers.0.imagePullPolicy" for part in (HEAD, WORKER)]),
    ("service.type", "LoadBalancer", "Service", ["spec.type"]),
    ("service.annotations", {"a": "b"}, "Service", ["metadata.annotations"]),
    ("service.loadBalancerSourceRanges", ["10.0.0.0/8"], "Service", ["spec.loadBalancerSourceRanges"]),
    ("cache.size", "77Gi", "PersistentVolumeClaim", ["spec.resources.requests.storage"]),
    ("cache.storageClass", "quick", "PersistentVolumeClaim", ["spec.storageClassName"]),
    ("cache.accessModes", ["ReadWriteOnce", "ReadWriteMany"], "PersistentVolumeClaim", ["spec.accessModes"]),
    ("serviceAccount.annotations", {"c": "d"}, "ServiceAccount", ["metadata.annotations"]),
    ("metrics.serviceMonitor.interval", "21s", "ServiceMonitor", ["spec.endpoints.0.interval"]),
    ("metrics.serviceMonitor.labels.release", "one", "ServiceMonitor", ["metadata.labels.release"]),
    ("metrics.podMonitor.interval", "22s", "PodMonitor", ["spec.podMetricsEndpoints.0.interval"]),
    ("metrics.podMonitor.labels.release", "two", "PodMonitor", ["metadata.labels.release"]),
    ("metrics.rules.labels.release", "three", "PrometheusRule", ["metadata.labels.release"]),
]
MONITORS = {kind: {"enabled": True} for kind in ("serviceMonitor", "podMonitor", "rules", "dashboard")}


def put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        values = values.setdefault(key, {})
    values[last] = value


def at(node: Any, path: str) -> Any:
    for key in path.split("."):
        node = node[int(key)] if isinstance(node, list) else node[key]
    return node


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Manifests by kind with every value of the table at once."""
    values: dict[str, Any] = {"metrics": {key: dict(value) for key, value in MONITORS.items()}}
    for path, value, _, _ in PLACES:
        put(values, path, value)
    put(values, "image.pullSecrets", ["registry"])
    return by_kind(documents(values))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]} in {place[2]}")
def test_a_value_stands_where_it_is_for(place: tuple[str, Any, str, list[str]], found: dict[str, dict[str, Any]]) -> None:
    _, value, kind, where = place
    assert [at(found[kind], path) for path in where] == [value] * len(where)


@pytest.mark.parametrize("kind", ["api", "head", "workers"])
def test_variables_of_ones_own_reach_the_pods_of_a_kind_and_no_others(kind: str) -> None:
    mine = {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}
    templates = dict(zip(("head", "workers", "api"), pods(documents({kind: {"env": [mine]}})), strict=True))
    assert [name for name, template in templates.items() if mine in containers(template)[0]["env"]] == [kind]


def test_every_pod_pulls_with_the_secrets_that_are_named(found: dict[str, dict[str, Any]]) -> None:
    assert all(template["spec"]["imagePullSecrets"] == [{"name": "registry"}] for template in pods(found.values()))


# --- what pods find ---------------------------------------------------------------------------------


def mounts(template: dict[str, Any]) -> dict[str, tuple[dict[str, Any], bool]]:
    """A container's mounted folders: the volume, and whether it may be written."""
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    (container,) = containers(template)
    return {mount["mountPath"]: (volumes[mount["name"]], not mount.get("readOnly", False)) for mount in container["volumeMounts"]}


def written(template: dict[str, Any], folder: str) -> dict[str, Any]:
    """The volume that a folder lies in, which must be one that may be written: all else is read-only."""
    places = {path: volume for path, (volume, may) in mounts(template).items() if may and PurePosixPath(folder).is_relative_to(path)}
    assert places, f"{folder} can't be written"
    return places[max(places, key=len)]


def env(template: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in containers(template)[0]["env"]}


def test_what_ray_engines_and_the_service_write_can_be_written() -> None:
    head, worker, api = pods(documents({"models": {"existingClaim": "models"}}))
    toml = tomllib.loads(by_kind(documents({}))["ConfigMap"]["data"]["fleet.toml"])
    for template, size in ((head, "10Gi"), (worker, "40Gi"), (api, "10Gi")):
        # Ray's sessions and everybody's configuration; what is said to be in memory is.
        assert written(template, "/tmp/ray") == {"name": "tmp", "emptyDir": {"sizeLimit": size}}
        assert written(template, env(template)["HOME"]) == {"name": "home", "emptyDir": {"sizeLimit": size}}
        assert written(template, "/dev/shm")["emptyDir"]["medium"] == "Memory"
        assert mounts(template)["/models"][1] is False
    assert written(api, toml["state_dir"]) == {"name": "state", "emptyDir": {"sizeLimit": "10Gi"}}
    assert written(worker, toml["sync"]["retain_folder"])["emptyDir"]["medium"] == "Memory"
    compiled = {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH"}
    for name in compiled:
        assert written(worker, env(worker)[name])["persistentVolumeClaim"] == {"claimName": "rl-weightsync-cache"}
    assert ENVIRONMENT["HF_HUB_OFFLINE"] == "1", "engines load nothing from a hub, so there is no cache of models to keep"


def test_the_apis_container_runs_the_script_with_the_settings_that_it_is_given() -> None:
    found = by_kind(documents({}))
    (container,) = containers(found["Deployment"]["spec"]["template"])
    data = found["ConfigMap"]["data"]
    assert data["serve.sh"] == (CHART / "files/serve.sh").read_text().strip() + "\n"
    folder, may_write = mounts(found["Deployment"]["spec"]["template"])["/etc/weightsync"]
    assert (folder["configMap"]["name"], may_write) == (found["ConfigMap"]["metadata"]["name"], False)
    assert container["command"] == ["bash", "/etc/weightsync/serve.sh"] and "/etc/weightsync/fleet.toml" in data["serve.sh"]
    assert env(found["Deployment"]["spec"]["template"])["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_new_settings_make_a_new_pod_of_the_api_and_no_other() -> None:
    before, after = documents({}), documents({"fleet": {"sync": {"history": 100}}})
    assert [old == new for old, new in zip(pods(before), pods(after), strict=True)] == [True, True, False]
    changed = {name for old, new in zip(before, after, strict=True) if old != new and old["kind"] != "Secret" for name in [old["kind"]]}
    assert changed == {"ConfigMap", "Deployment"}


def test_the_api_may_take_its_time_to_start_and_to_end_and_is_watched_in_between() -> None:
    values = {"api": {"startSeconds": 100}, "fleet": {"engine": {"start_timeout_seconds": 1000}}}
    deployment = by_kind(documents(values))["Deployment"]["spec"]
    (container,) = containers(deployment["template"])
    start, live, ready = (container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
    assert {probe["httpGet"]["port"] for probe in (start, live, ready)} == {"http"} == {container["ports"][0]["name"]}
    patience = start["failureThreshold"] * start["periodSeconds"]
    assert 1100 <= patience < 1200
    assert deployment["progressDeadlineSeconds"] > patience
    assert live["failureThreshold"] * live["periodSeconds"] >= 60 and live["timeoutSeconds"] >= 10, "slow: a restart ends an update"
    assert ready["failureThreshold"] == 1 and ready["periodSeconds"] <= 5, "fast: routers go by it"
    # serve.sh waits 15 s for `serve`, and for Ray's node behind it.
    assert deployment["template"]["spec"]["terminationGracePeriodSeconds"] >= 15 + 10


def test_rays_object_store_fits_into_the_shared_memory_of_each_pod() -> None:
    found = documents({"ray": {"objectStoreMiB": 1000}})
    head, worker, api = pods(found)
    spec = by_kind(found)["RayCluster"]["spec"]
    for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0]):
        assert group["rayStartParams"]["object-store-memory"] == str(1000 << 20)
    assert env(api)["STORE_BYTES"] == str(1000 << 20)
    for template in (head, api):
        assert int(written(template, "/dev/shm")["emptyDir"]["sizeLimit"].removesuffix("Mi")) > 1000
    assert int(written(worker, "/dev/shm")["emptyDir"]["sizeLimit"].removesuffix("Gi")) > 1


def test_ray_is_found_and_scraped_at_the_ports_that_it_listens_on() -> None:
    found = by_kind(documents({"metrics": MONITORS}))
    head, worker, api = pods(found.values())
    ports = [{port["name"]: port["containerPort"] for port in containers(template)[0]["ports"]} for template in (head, worker)]
    # What `ray start` takes by default, and KubeRay.
    assert ports[0] == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080} and ports[1] == {"metrics": 8080}
    assert env(api)["HEAD"] == f"{found['RayCluster']['metadata']['name']}-head-svc:6379"
    (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    assert found["ServiceMonitor"]["spec"]["endpoints"][0]["path"] == "/metrics"
    params = found["RayCluster"]["spec"]["workerGroupSpecs"][0]["rayStartParams"]
    assert params["num-cpus"] == containers(worker)[0]["resources"]["limits"]["cpu"] == "32"
    assert found["RayCluster"]["spec"]["upgradeStrategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("kind", ["head", "workers", "api"])
def test_a_pod_takes_so_much_of_its_nodes_disk_and_no_more(kind: str) -> None:
    def disk(gib: int) -> tuple[dict[str, Any], dict[str, Any]]:
        template = pods(documents({kind: {"ephemeralGiB": gib}, "cache": {"enabled": False}}))[("head", "workers", "api").index(kind)]
        folders = {volume["name"]: volume["emptyDir"] for volume in template["spec"]["volumes"] if "emptyDir" in volume}
        assert folders.pop("shm")["medium"] == "Memory"
        return containers(template)[0]["resources"], folders

    (resources, folders), (free, anywhere) = disk(77), disk(0)
    assert {part["ephemeral-storage"] for part in resources.values()} == {"77Gi"} and len(resources) == 2
    extra = {"workers": {"cache"}, "api": {"state"}}.get(kind, set())
    assert folders == {key: {"sizeLimit": "77Gi"} for key in {"tmp", "home"} | extra}
    assert "ephemeral-storage" not in str(free) and anywhere == {key: {} for key in folders}


def test_gpus_of_another_kind_are_asked_for_by_their_name() -> None:
    (container,) = containers(pods(documents({"workers": {"gpuResource": "amd.com/gpu"}}))[1])
    assert container["resources"]["limits"]["amd.com/gpu"] == 1 and "nvidia.com/gpu" not in container["resources"]["limits"]


# --- tokens -----------------------------------------------------------------------------------------


def test_a_token_that_is_given_is_the_one_in_the_secret_and_each_other_is_its_own() -> None:
    def made(values: dict[str, Any], release: str) -> dict[str, str]:
        secrets = [document for document in documents(values, release) if document["kind"] == "Secret"]
        return {key: base64.b64decode(value).decode() for secret in secrets for key, value in secret["data"].items()}

    assert made({"auth": {"token": 'a"token'}}, "rl")["token"] == 'a"token'
    tokens = [token for release in ("one", "two") for token in made({}, release).values()]
    assert len(set(tokens)) == 4 and all(len(token) == 64 for token in tokens)


def test_an_upgrade_keeps_the_tokens_that_were_made(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart")
    template = tmp_path / "chart/templates/secrets.yaml"
    # Without a cluster Helm finds nothing; this is what it finds in one.
    asked = '(lookup "v1" "Secret" $root.Release.Namespace .name | default dict)'
    text = template.read_text()
    assert text.count(asked) == 1
    template.write_text(text.replace(asked, '(dict "data" (dict .key (b64enc .name)))'))
    with helm_python.Chart.load(str(tmp_path / "chart")) as chart:
        (secrets,) = [text for name, text in chart.render({}, name="rl", namespace="a").items() if name.endswith("secrets.yaml")]
    data = {key: base64.b64decode(value) for secret in yaml.safe_load_all(secrets) if secret for key, value in secret["data"].items()}
    assert data == {"token": b"rl-weightsync-token", "auth_token": b"rl-weightsync-ray"}


def test_a_trainer_in_a_worker_pod_finds_the_token_under_one_name() -> None:
    for values, name, key in (
        ({}, "rl-weightsync-token", "token"),
        ({"auth": {"existingSecret": "mine", "existingSecretKey": "key"}}, "mine", "key"),
    ):
        volume, may_write = mounts(pods(documents(values))[1])["/etc/weightsync"]
        assert volume["secret"] == {"secretName": name, "items": [{"key": key, "path": "token"}]} and not may_write
