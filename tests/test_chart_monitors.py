"""What the chart's monitors make of targets: a fleet's series outlive the pod that they are scraped from.

Not covered: the Prometheus Operator, which puts these rules behind its own.
"""

from __future__ import annotations

import re
from typing import Any

from tests.charts import by_kind, documents


def relabelled(labels: dict[str, str], rules: list[dict[str, Any]]) -> dict[str, str]:
    """As Prometheus does it, of what the chart uses."""
    for rule in rules:
        if rule.get("action", "replace") == "labeldrop":
            labels = {name: value for name, value in labels.items() if not re.fullmatch(rule["regex"], name)}
        else:
            value = ";".join(labels.get(name, "") for name in rule.get("sourceLabels", []))
            labels = labels | {rule["targetLabel"]: rule.get("replacement", "$1").replace("$1", value)}
    return labels


def target(pod: str, address: str) -> dict[str, str]:
    """What the operator says of a pod behind the release's Service."""
    same = {"job": "rl-weightsync", "namespace": "training", "service": "rl-weightsync", "endpoint": "http", "container": "api"}
    return {**same, "pod": pod, "instance": address}


def test_the_next_pod_of_the_api_goes_on_with_the_series_of_the_one_before() -> None:
    monitor = by_kind(documents({"metrics": {"serviceMonitor": {"enabled": True}}}))["ServiceMonitor"]
    rules = monitor["spec"]["endpoints"][0]["relabelings"]
    first, second = (relabelled(target(f"rl-weightsync-{n}", f"10.1.2.{n}:8517"), rules) for n in (1, 2))
    assert first == second
    assert first.items() >= {"job": "rl-weightsync", "namespace": "training", "instance": "rl-weightsync"}.items()


def test_nodes_of_ray_say_which_cluster_and_kind_they_are() -> None:
    monitor = by_kind(documents({"metrics": {"podMonitor": {"enabled": True}}}))["PodMonitor"]
    labels = {"__meta_kubernetes_pod_label_ray_io_cluster": "rl-weightsync", "__meta_kubernetes_pod_label_ray_io_node_type": "worker"}
    got = relabelled(labels, monitor["spec"]["podMetricsEndpoints"][0]["relabelings"])
    assert (got["ray_io_cluster"], got["ray_io_node_type"]) == ("rl-weightsync", "worker")
