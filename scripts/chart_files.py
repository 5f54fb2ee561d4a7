"""Writes the chart's `values.yaml` and `values.schema.json`.

The part `fleet` comes from `weightsync.config.Settings`, so that what the schema lets pass is what the service
reads; the rest from `scripts/chart_values.py`; types of Kubernetes from the schemas of `kubernetes-validate`.

    python scripts/chart_files.py           # write them
    python scripts/chart_files.py --check   # exit code 1 when they are not up to date

Not covered: checks of settings that JSON schema can't tell; `serve` has the last word.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import textwrap
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from chart_values import Values

from weightsync.config import Settings

CHART = Path(__file__).resolve().parent.parent / "deploy/helm/weightsync"
KUBERNETES = "kubernetes-json-schema/v1.33.0-local-strict/_definitions.json"

#: What the chart sets itself, as (section, keys); without keys the whole of it.
OWN: dict[str, tuple[str, ...]] = {
    "api": ("host", "token"),
    "sync": ("store_host", "retain_folder"),
    "ray": (),
    "state_dir": (),
    "leave_fleet": (),
}
#: Other defaults than the settings', since in a cluster ports must be known beforehand, and images and models take time to come.
DEFAULTS: dict[str, dict[str, Any]] = {
    "engine": {"model": "/models/policy", "port_base": 8600, "extra": {}, "start_timeout_seconds": 1800},
    "sync": {"store_port": 8518},
}
#: Where a path is one of the pods', relative to nothing.
PATTERNS: dict[str, dict[str, str]] = {"engine": {"model": "^/."}}
#: For what 0 stands for in the settings ("a free one"), which no policy or firewall can open.
LEAST: dict[str, dict[str, int]] = {"engine": {"port_base": 1024}, "api": {"port": 1024}, "sync": {"store_port": 1024}}
_WIDTH = 118


def fleet_schema() -> dict[str, Any]:
    """Schema of `fleet`: that of the settings, without what the chart sets."""
    whole = Settings.model_json_schema()
    definitions = whole.pop("$defs")
    fleet = whole | {"description": "The settings of `weightsync serve` under their own names: rendered into fleet.toml as they are."}
    fleet.pop("required", None)
    for name, field in list(fleet["properties"].items()):
        own = OWN.get(name)
        if own == ():
            del fleet["properties"][name]
        elif "$ref" in field:
            section = copy.deepcopy(definitions[field["$ref"].rpartition("/")[2]])
            section.pop("required", None)
            section["properties"] = {key: value for key, value in section["properties"].items() if key not in (own or ())}
            for key, value in DEFAULTS.get(name, {}).items():
                section["properties"][key]["default"] = value
            for key, least in LEAST.get(name, {}).items():
                field = section["properties"][key]
                field |= {"minimum": least, "description": re.sub("; 0 takes .*(?=[.])", "", field["description"])}
            for key, pattern in PATTERNS.get(name, {}).items():
                section["properties"][key]["pattern"] = pattern
            fleet["properties"][name] = _required(section, empty=True)
    return _required(fleet, empty=True)


def _required(section: dict[str, Any], empty: bool) -> dict[str, Any]:
    """The same, where a value that was set to null, which takes its default away, is missing.

    Args:
        empty: also where the default is empty, which templates take for the same as nothing; fleet.toml does not.
    """
    defaults = {key: field.get("default", "properties" in field or None) for key, field in section["properties"].items()}
    required = [key for key, default in defaults.items() if default or (empty and default is not None)]
    return {**section, "required": required} if required else section


def schema() -> dict[str, Any]:
    """The whole schema, every object closed but those that hold names of a user's own."""
    own = Values.model_json_schema()
    definitions = {name: _required(section, empty=False) for name, section in own.pop("$defs").items()}
    properties = {"fleet": fleet_schema(), **own["properties"]}
    own["properties"] = properties
    own = _required(own, empty=False)
    # Helm hands `global` to every chart that is another one's dependency.
    properties["global"] = {"description": "Values of a parent chart; not read.", "type": "object"}
    found = _plain({**own, "$defs": definitions})
    found["$defs"] |= _kubernetes(found)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "Values of the chart weightsync"}


def _plain(node: Any) -> Any:
    """Without what pydantic adds for itself, and with references to Kubernetes' types."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = dict(node)
    if kind := node.pop("x-kubernetes", None):
        node["$ref"] = f"#/$defs/{kind}"
    dropped = {"title"} if isinstance(node.get("title"), str) else set()
    dropped |= {"format"} if node.get("format") == "path" else set()
    return {key: _plain(value) for key, value in node.items() if key not in dropped}


def _kubernetes(found: dict[str, Any]) -> dict[str, Any]:
    """The definitions of Kubernetes that a schema refers to, and those that they refer to, without descriptions."""
    there = json.loads((resources.files("kubernetes_validate") / KUBERNETES).read_text())["$defs"]
    wanted, taken = _references(found), {}
    while wanted:
        name = wanted.pop()
        if name in there and name not in taken:
            taken[name] = _local(there[name])
            wanted |= _references(taken[name])
    return dict(sorted(taken.items()))


def _local(node: Any) -> Any:
    if isinstance(node, list):
        return [_local(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return {"$ref": f"#/$defs/{node['$ref'].rpartition('/')[2]}"}
    return {key: _local(value) for key, value in node.items() if not (key == "description" and isinstance(value, str))}


def _references(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_references, node))
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"].rpartition("/")[2]} if isinstance(node.get("$ref"), str) else set()
    return own.union(*map(_references, node.values()))


def values(whole: dict[str, Any]) -> str:
    """`values.yaml`: every value with its default, under its description."""
    head = "Written by scripts/chart_files.py: every value that there is, with its default."
    lines = [*_comment(head, 0)]
    for key, field in whole["properties"].items():
        if key != "global":
            lines += ["", *_entry(key, field, whole["$defs"], None, 0)]
    return "\n".join(lines) + "\n"


def _entry(key: str, field: dict[str, Any], definitions: dict[str, Any], default: Any, depth: int) -> list[str]:
    default = field.get("default", default)
    section = field if "properties" in field else definitions.get(field.get("$ref", "").rpartition("/")[2], {})
    if "properties" in section and "description" in section:  # one of Kubernetes' has none: a value like any other
        lines = [*_comment(field.get("description", section["description"]), depth), f"{'  ' * depth}{key}:"]
        for name, inner in section["properties"].items():
            lines += _entry(name, inner, definitions, (default or {}).get(name), depth + 1)
        return lines
    shown = json.dumps(default, ensure_ascii=False)
    if isinstance(default, list) and default:
        shown = "\n" + textwrap.indent(yaml.safe_dump(default, sort_keys=False).rstrip(), "  " * (depth + 1))
    return [*_comment(field["description"], depth), f"{'  ' * depth}{key}:{'' if shown.startswith(chr(10)) else ' '}{shown}"]


def _comment(text: str, depth: int) -> list[str]:
    pad = "  " * depth + "# "
    return [pad + line for line in textwrap.wrap(" ".join(text.split()), _WIDTH - len(pad))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a file is not up to date")
    check = parser.parse_args().check
    whole = schema()
    code = 0
    for name, text in (("values.schema.json", json.dumps(whole, indent=1, ensure_ascii=False) + "\n"), ("values.yaml", values(whole))):
        path = CHART / name
        if check and (not path.is_file() or path.read_text() != text):
            print(f"{path}: not up to date; run python scripts/chart_files.py", file=sys.stderr)
            code = 1
        elif not check:
            path.write_text(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
