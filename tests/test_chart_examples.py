"""The chart's examples: each is what its first lines say. `test_chart.py` renders them and checks them against schemas.

Not covered: a cluster.
"""

from __future__ import annotations

from typing import Any

from tests.charts import EXAMPLES, by_kind, containers, documents, pods


def shape(name: str) -> tuple[int, int, dict[str, Any]]:
    """Worker pods, GPUs of each, and the engines' settings."""
    group = by_kind(documents(EXAMPLES[name]))["RayCluster"]["spec"]["workerGroupSpecs"][0]
    limits = containers(group["template"])[0]["resources"]["limits"]
    return group["replicas"], limits["nvidia.com/gpu"], EXAMPLES[name]["fleet"]["engine"]


def test_there_is_one_for_each_way_to_place_a_trainer() -> None:
    assert set(EXAMPLES) == {"one-node", "two-nodes", "trainer-outside"}


def test_on_one_node_every_gpu_has_an_engine_and_room_for_a_rank() -> None:
    replicas, gpus, engine = shape("one-node")
    assert (replicas, gpus, engine["count"]) == (1, 8, 8)
    # Ray puts one engine on each GPU, not two, and what is left is a whole rank's part.
    assert 0.5 < engine["gpus"] < 1 and engine["gpus"] + 0.4 <= 1
    assert EXAMPLES["one-node"]["fleet"]["sync"]["local"] == "auto"
    worker = pods(documents(EXAMPLES["one-node"]))[1]
    token = next(mount for mount in containers(worker)[0]["volumeMounts"] if mount["name"] == "token")
    assert token["mountPath"] == "/etc/weightsync"  # for the trainer in this pod


def test_on_two_nodes_the_engines_fill_both_and_the_trainer_may_meet_them() -> None:
    replicas, gpus, engine = shape("two-nodes")
    assert (replicas, gpus) == (2, 8) and engine["count"] * engine["tensor_parallel_size"] == 16
    keepers = EXAMPLES["two-nodes"]["fleet"]["sync"]["retain_engines"]
    assert keepers > engine["count"] / replicas, "the first engines keep the weights, and may be on one node"
    found = by_kind(documents(EXAMPLES["two-nodes"]))
    policy, trainers = found["NetworkPolicy"]["spec"], EXAMPLES["two-nodes"]["networkPolicy"]["trainers"]
    assert {"from": trainers} in policy["ingress"] and {"to": trainers} in policy["egress"]
    assert {"PrometheusRule", "ServiceMonitor", "PodMonitor"} <= found.keys()


def test_a_trainer_outside_reaches_every_pod_at_its_hosts_address() -> None:
    found = by_kind(documents(EXAMPLES["trainer-outside"]))
    assert "NetworkPolicy" not in found and found["Service"]["spec"]["type"] == "NodePort"
    assert all(template["spec"]["hostNetwork"] for template in pods(documents(EXAMPLES["trainer-outside"])))
    toml = found["ConfigMap"]["data"]["fleet.toml"]
    (interface,) = [entry["value"] for entry in EXAMPLES["trainer-outside"]["workers"]["env"] if entry["name"] == "NCCL_SOCKET_IFNAME"]
    assert f'interface = "{interface}"' in toml and "store_port = 8518" in toml
