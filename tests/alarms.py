"""Which alerts on mismatch fire on what /metrics says, by Prometheus's own tool.

Not covered: how long one must last (`for`), which is left out here, and the other alerts (`alerts.yaml`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_fd_to_metric_families

RULES = Path(__file__).resolve().parent.parent / "deploy/helm/weightsync/files/rules.yaml"
#: What a scrape adds.
TARGET = {"job": "weightsync", "instance": "api:8517"}


def rules() -> dict[str, dict[str, Any]]:
    """Every alert on mismatch by its name."""
    groups = {group["name"]: group["rules"] for group in yaml.safe_load(RULES.read_text())["groups"]}
    return {rule["alert"]: rule for rule in groups["weightsync.mismatch"]}


def require_alerts(folder: Path, text: str, expected: Sequence[tuple[str, dict[str, str]]]) -> None:
    """That just these alerts fire, with these labels beside their target's; the test is skipped where there is no promtool.

    Args:
        folder: to write in.
        text: of /metrics.
        expected: alerts by name, and labels.
    """
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian has it in the package prometheus)")
    series = []
    for family in text_fd_to_metric_families(iter(text.splitlines(keepends=True))):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in {**sample.labels, **TARGET}.items())
            series.append({"series": f"{sample.name}{{{labels}}}", "values": f"{sample.value!r}x3"})
    bare = [{"alert": name, "expr": rule["expr"], "labels": rule["labels"]} for name, rule in rules().items()]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": bare}]}))
    wanted = [
        {
            "eval_time": "1m",
            "alertname": alert,
            "exp_alerts": [
                {"exp_labels": {**labels, **TARGET, **rule["labels"]}} for name, labels in expected if name == alert
            ],
        }
        for alert, rule in rules().items()
    ]  # fmt: skip
    case = {"interval": "1m", "input_series": series, "alert_rule_test": wanted}
    (folder / "case.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run([promtool, "test", "rules", str(folder / "case.yaml")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
