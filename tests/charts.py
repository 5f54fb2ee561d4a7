"""The chart as manifests, and how strictly a custom resource is looked at."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import yaml

CHART = Path(__file__).resolve().parent.parent / "deploy/helm/weightsync"
EXAMPLES: dict[str, dict[str, Any]] = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "examples").glob("*.yaml"))}
#: Kinds that Kubernetes itself does not have.
CRD_KINDS = ("RayCluster", "PodMonitor", "ServiceMonitor", "PrometheusRule")


def rendered(values: dict[str, Any], release: str = "rl") -> dict[str, str]:
    """Text of each template. Loaded anew each time, since rendering changes a chart that is loaded."""
    with helm_python.Chart.load(str(CHART)) as chart:
        return {Path(name).name: text for name, text in chart.render(values, name=release, namespace="training").items()}


def documents(values: dict[str, Any], release: str = "rl") -> list[dict[str, Any]]:
    """The manifests; the caller's own."""
    return copy.deepcopy(_documents(json.dumps(values), release))


@cache
def _documents(values: str, release: str) -> list[dict[str, Any]]:
    texts = [text for name, text in rendered(json.loads(values), release).items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def by_kind(found: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first of each kind."""
    return {document["kind"]: document for document in reversed(list(found))}


def pods(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pod templates of head, workers and API."""
    kinds = by_kind(found)
    ray = kinds["RayCluster"]["spec"]
    return [
        ray["headGroupSpec"]["template"],
        *(group["template"] for group in ray["workerGroupSpecs"]),
        kinds["Deployment"]["spec"]["template"],
    ]


def containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = template["spec"]["containers"]
    return found


def floats(node: Any) -> Iterator[float]:
    if isinstance(node, float):
        yield node
    elif isinstance(node, (dict, list)):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from floats(inner)


def strings(node: Any) -> set[str]:
    if isinstance(node, (dict, list)):
        return set().union(*map(strings, node.values() if isinstance(node, dict) else node))
    return {node} if isinstance(node, str) else set()


def merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(values[key], over[key]) for key in values.keys() & over.keys() if isinstance(over[key], dict)}
    return values | over | both


def closed(schema: Any) -> Any:
    """A custom resource's schema that takes no key it does not list, as the API server drops such keys without a word."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False) is True:
        found.pop("type", None)
    if (
        isinstance(found.get("properties"), dict)
        and found.get("type") == "object"
        and not found.get("x-kubernetes-preserve-unknown-fields")
    ):
        found.setdefault("additionalProperties", False)
    return found


def violations(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What the API server would find, behind the schema's own defaults."""
    with_defaults(document, schema)
    return [f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in jsonschema.Draft202012Validator(schema).iter_errors(document)]


def with_defaults(node: Any, schema: dict[str, Any]) -> None:
    if isinstance(node, dict):
        for key, inner in schema.get("properties", {}).items():
            if "default" in inner:
                node.setdefault(key, inner["default"])
            if key in node:
                with_defaults(node[key], inner)
    elif isinstance(node, list):
        for item in node:
            with_defaults(item, schema.get("items", {}))
