"""Alerts and dashboard: what they ask for is there, what is there is shown, and alerts fire on what they are for.

`tests/alerts.yaml` and `tests/alerts_of_fleets.yaml` are `promtool`'s; their tests skip where that is not. Not covered: Grafana itself.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from tests.charts import CHART, by_kind, documents
from weightsync.metrics import Recorder

ROOT = Path(__file__).resolve().parent.parent
RULES = CHART / "files/rules.yaml"
UNIT_TESTS = [ROOT / "tests/alerts.yaml", ROOT / "tests/alerts_of_fleets.yaml"]
DASHBOARD: dict[str, Any] = json.loads((CHART / "files/dashboard.json").read_text())
ALL_RULES: list[dict[str, Any]] = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}
#: What Prometheus adds to what it scrapes.
TARGET = {"namespace", "job", "instance", "le"}


def metrics() -> dict[str, set[str]]:
    """Every series that the recorder can show, and its labels."""
    found: dict[str, set[str]] = {}
    for collector, _ in Recorder()._registry._collector_to_names.items():
        (family,) = collector.collect()
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}[family.type]
        found |= {family.name + end: set(collector._labelnames) for end in ends}  # type: ignore[attr-defined]
    return found


def queries() -> dict[str, list[str]]:
    """Every PromQL expression by who asks it, Grafana's variables filled in."""
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    found = {f"panel {panel['title']}": [target["expr"] for target in panel["targets"]] for panel in panels}
    found |= {rule.get("alert") or rule["record"]: [rule["expr"]] for rule in ALL_RULES}
    return {who: [text.replace("$__rate_interval", "5m").replace('"$', '"') for text in asked] for who, asked in found.items()}


def selectors(node: Any) -> Iterator[promql.VectorSelector]:
    """Every selector of an expression."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for part in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (inner := getattr(node, part, None)) is not None:
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


def grouped(node: Any) -> set[str]:
    """Labels that an expression groups, matches or leaves out by."""
    modifier = getattr(node, "modifier", None)
    own = set(getattr(modifier, "labels", None) or ()) | set(getattr(getattr(modifier, "matching", None), "labels", None) or ())
    parts = [getattr(node, part, None) for part in ("expr", "lhs", "rhs")] + list(getattr(node, "args", None) or ())
    return own.union(*(grouped(part) for part in parts if part is not None))


@pytest.mark.parametrize("who", queries())
def test_every_query_parses_and_asks_for_what_there_is(who: str) -> None:
    there, records = metrics(), {rule["record"] for rule in ALL_RULES if "record" in rule}
    for text in queries()[who]:
        tree = promql.parse(text)
        asked = list(selectors(tree))
        assert asked
        labels = set[str]()
        for selector in asked:
            assert selector.name in there or selector.name in records, text
            own = there.get(selector.name, set())
            assert {matcher.name for matcher in selector.matchers.matchers} <= own | TARGET, text
            labels |= own
        assert grouped(tree) <= labels | TARGET, text


def test_the_checks_of_queries_see_into_them() -> None:
    tree = promql.parse('sum by (engine) (rate(a_total{what="x"}[5m])) / ignoring (kind) max_over_time(b[1d]) > quantile(0.5, c) or (d)')
    assert [selector.name for selector in selectors(tree)] == ["a_total", "b", "c", "d"]
    assert grouped(tree) == {"engine", "kind"}


def test_every_metric_has_a_panel() -> None:
    asked = {
        selector.name
        for who, texts in queries().items()
        if who.startswith("panel")
        for t in texts
        for selector in selectors(promql.parse(t))
    }
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in metrics()} == shown


def test_the_dashboard_is_what_its_script_writes() -> None:
    done = subprocess.run([sys.executable, "scripts/dashboard.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_fleets_of_one_name_in_two_namespaces_are_told_apart_and_no_namespace_is_needed() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "job", "phase"]
    assert variables["namespace"]["allValue"] == ".*", "a series without the label has an empty one"
    for name in ("job", "phase"):
        assert 'namespace=~"$namespace"' in variables[name]["query"]["query"]
    for who, texts in queries().items():
        for selector in (found for text in texts if who.startswith("panel") for found in selectors(promql.parse(text))):
            assert {"namespace", "job"} <= {matcher.name for matcher in selector.matchers.matchers}, who


def test_panels_do_not_lie_on_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        for place in ((x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])):
            assert place[0] < 24 and place not in taken, f"{panel['title']} lies on {taken.get(place)}"
            taken[place] = panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_what_is_wrong_and_where_to_read_on(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor == alert.lower() and anchor in {heading.lower() for heading in headings}
    tested = [
        case["alertname"]
        for path in UNIT_TESTS
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test["alert_rule_test"]
        if "exp_alerts" in case
    ]
    assert alert in tested, "no unit test sees it fire"


@pytest.mark.parametrize(
    "command", [("check", "rules", str(RULES)), ("test", "rules", *map(str, UNIT_TESTS))], ids=lambda command: command[0]
)
def test_promtool_is_content_with_the_rules(command: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian has it in the package prometheus)")
    done = subprocess.run([promtool, *command], cwd=RULES.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [RULES, *UNIT_TESTS], ids=lambda path: path.name)
def test_rules_are_tidy_yaml(path: Path) -> None:
    assert not list(linter.run(path.read_text(), YamlLintConfig((CHART.parent / ".yamllint").read_text())))


def test_the_chart_brings_the_same_rules_and_dashboard() -> None:
    values = {"metrics": {"rules": {"enabled": True, "runbook": "https://docs.example/operations"}, "dashboard": {"enabled": True}}}
    found = documents(values)
    groups = by_kind(found)["PrometheusRule"]["spec"]["groups"]
    assert json.dumps(groups).replace("https://docs.example/operations#", "docs/operations.md#") == json.dumps(
        yaml.safe_load(RULES.read_text())["groups"]
    )
    assert "docs/operations.md" not in json.dumps(groups)
    (boards,) = [document["data"] for document in found if document["metadata"]["name"] == "rl-weightsync-dashboard"]
    assert json.loads(boards["weightsync.json"]) == DASHBOARD
    assert not [d for d in documents({}) if d["kind"] == "PrometheusRule" or d["metadata"]["name"].endswith("-dashboard")]
