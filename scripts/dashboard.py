"""Writes the Grafana dashboard, `deploy/helm/weightsync/files/dashboard.json`.

    python scripts/dashboard.py           # write it
    python scripts/dashboard.py --check   # exit code 1 when it is not up to date

Rows and panels are what `ROWS` says; places on the grid follow from it. `$job` is a fleet as Prometheus scrapes it; fleets of one
name in several namespaces are told apart by `$namespace`, which what is scraped outside of Kubernetes need not have.

Not covered: Ray's own dashboards and vLLM's, which both projects ship.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parent.parent / "deploy/helm/weightsync/files/dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_ACROSS = 24


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        queries: expression and legend of each.
        about: what one sees in it.
        unit: Grafana's name of it.
        kind: `timeseries`, `stat`, `heatmap`, `state-timeline` or `table`.
        width: of 24.
        options: over those of its kind.
    """

    title: str
    queries: Sequence[tuple[str, str]]
    about: str
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    options: dict[str, Any] = field(default_factory=dict)


def of(metric: str, more: str = "") -> str:
    """A metric of the chosen fleets."""
    matchers = ", ".join(filter(None, ('namespace=~"$namespace"', 'job=~"$job"', more)))
    return f"weightsync_{metric}{{{matchers}}}"


def rise(metric: str, by: str, more: str = "") -> str:
    """How much a counter rose from point to point."""
    return f"sum by ({by}) (increase({of(metric, more)}[$__rate_interval]))"


def quantile(q: float, metric: str, by: str = "job") -> str:
    """Of a histogram."""
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({of(metric + '_bucket')}[$__rate_interval])))"


def mean(metric: str, by: str) -> str:
    """Of what a histogram saw."""
    total, count = (f"sum by ({by}) (rate({of(f'{metric}_{part}')}[$__rate_interval]))" for part in ("sum", "count"))
    return f"{total} / {count}"


ROWS: dict[str, Sequence[Panel]] = {
    "Fleet": (
        Panel("Committed version", [(of("committed_version"), "{{job}}")], "-1 before the first update.", "none", "stat", 4),
        Panel(
            "Ready",
            [(of("ready_engines"), "ready"), (of("pinned_engines"), "pinned")],
            "Engines that serve the committed version.",
            "none",
            "stat",
            4,
        ),
        Panel(
            "Since the last commit",
            [(f"time() - ({of('last_commit_timestamp_seconds')} > 0)", "{{job}}")],
            "Nothing before a controller's first.",
            "s",
            "stat",
            4,
        ),
        Panel("Update under way", [(of("update_in_progress"), "{{job}}")], "1 while there is one.", "none", "stat", 4),
        Panel("Rewinds", [(of("rewinds"), "{{job}}")], "How often the fleet has gone back to an earlier version.", "none", "stat", 4),
        Panel("Build", [(of("build_info"), "{{version}}, protocol {{protocol}}")], "What runs.", "none", "stat", 4, {"textMode": "name"}),
        Panel(
            "Versions",
            [(of("committed_version"), "committed"), (of("engine_version"), "engine {{engine}}")],
            "Engines' lines lie on the committed one; pinned ones stay flat.",
            "none",
            width=12,
            options={"lineInterpolation": "stepAfter"},
        ),
        Panel(
            "Engines by state",
            [(of("engines"), "{{state}}")],
            "Serving is what they should be.",
            "none",
            width=12,
            options={"stacking": {"mode": "normal"}, "fillOpacity": 40},
        ),
    ),
    "Updates": (
        Panel("Updates by outcome", [(rise("updates_total", "outcome"), "{{outcome}}")], "Aborted ones changed nothing, or quarantined."),
        Panel("Refused by reason", [(rise("refused_updates_total", "reason"), "{{reason}}")], "Before any byte moved."),
        Panel(
            "From begin to commit",
            [(quantile(0.5, "publish_lag_seconds"), "median"), (quantile(0.99, "publish_lag_seconds"), "99 %")],
            "What a trainer waits for.",
            "s",
        ),
        Panel(
            "Phases of the fleet",
            [(mean("update_phase_seconds", "phase"), "{{phase}}")],
            "Mean time of each phase of committed updates.",
            "s",
            width=12,
            options={"stacking": {"mode": "normal"}, "fillOpacity": 40},
        ),
        Panel(
            "Phase times",
            [(rise("update_phase_seconds_bucket", "le", 'phase=~"$phase"'), "{{le}}")],
            "How long the chosen phases took, update by update.",
            "s",
            "heatmap",
            12,
        ),
        Panel(
            "Apply by engine",
            [(mean("engine_phase_seconds", "engine, phase"), "{{engine}} {{phase}}")],
            "Which one is slow.",
            "s",
            width=12,
        ),
        Panel(
            "Pause by engine",
            [(mean("engine_pause_seconds", "engine"), "engine {{engine}}")],
            "It generates nothing meanwhile.",
            "s",
            width=12,
        ),
    ),
    "Bytes": (
        Panel(
            "Speed of the last broadcast",
            [(of("last_broadcast_bytes_per_second"), "{{job}}")],
            "Its bytes by the time of the slowest engine.",
            "Bps",
        ),
        Panel("Size of the last broadcast", [(of("last_broadcast_bytes"), "{{job}}")], "A partial update is smaller.", "bytes"),
        Panel(
            "Sent", [(f"rate({of('sent_bytes_total')}[$__rate_interval])", "{{job}}")], "Over time, pauses between updates in it.", "Bps"
        ),
    ),
    "Staleness": (
        Panel(
            "Updates behind",
            [(of("engine_staleness_updates"), "engine {{engine}}")],
            "0 holds what the fleet has committed.",
            "none",
            width=12,
        ),
        Panel("Since an engine's last commit", [(of("engine_staleness_seconds"), "engine {{engine}}")], "Rises by itself.", "s", width=12),
    ),
    "Drift": (
        Panel(
            "Slots moved by updates",
            [(rise("drift_slots_total", "engine, what"), "{{engine}} {{what}}")],
            "Adopted and refreshed were repaired; all else was not.",
        ),
        Panel("Storage contracts", [(f"sum by (class) ({of('contract_slots')})", "{{class}}")], "Slots by class, all engines."),
        Panel("Bytes that were not sent", [(rise("digest_mismatches_total", "job"), "{{job}}")], "Updates ended by a digest."),
    ),
    "Mismatch": (
        Panel(
            "Trainer against rollouts",
            [(of("observed_difference_nats"), "engine {{engine}}, {{behind}} behind")],
            "Mean difference of log-probabilities of the sampled tokens, as trainers tell it (observe).",
            "none",
        ),
        Panel(
            "KL of rollouts and trainer",
            [(of("observed_kl_nats", 'estimator="k3"'), "engine {{engine}}, {{behind}} behind")],
            "Nats, by the estimator k3.",
            "none",
        ),
        Panel("Tokens told of", [(rise("observed_tokens_total", "engine"), "engine {{engine}}")], "0 where no trainer calls observe."),
        Panel(
            "Probe",
            [(of("probe_difference_nats"), "engine {{engine}}, {{against}}"), (of("probe_limit_nats"), "limit {{engine}}, {{against}}")],
            "How far answers to fixed prompts are off, nats, and may be.",
            "none",
        ),
        Panel("Probe's baseline", [(of("probe_baseline_nats"), "engine {{engine}}, {{against}}")], "Of the first commits, nats.", "none"),
        Panel("Named by the probe", [(of("probe_named"), "engine {{engine}}")], "1: the fault is in this engine.", "none"),
        Panel("Probes by outcome", [(rise("probes_total", "outcome"), "{{outcome}}")], "Of each engine, behind each commit.", width=12),
        Panel("Time of a probe", [(mean("probe_seconds", "job"), "{{job}}")], "All engines at once.", "s", width=12),
    ),
    "Failures": (
        Panel(
            "Silence of workers",
            [(of("engine_silence_seconds"), "engine {{engine}}")],
            "How long they have owed an answer; a model step that compiles takes its time.",
            "s",
            width=24,
        ),
        Panel(
            "Second tries",
            [(rise("second_tries_total", "outcome"), "{{outcome}}")],
            "Applies tried once more from the staged bytes.",
            width=6,
        ),
        Panel(
            "Gone back, and held back",
            [(rise("rollbacks_total", "job"), "gone back"), (rise("held_back_engines_total", "job"), "held back")],
            "Engines that went back to the version before, and engines not written since too few others would have served.",
            width=6,
        ),
        Panel(
            "Brought up later", [(rise("rejoins_total", "outcome"), "{{outcome}}")], "Engines that got their weights from another.", width=6
        ),
        Panel(
            "Requests at a commit",
            [(rise("requests_at_commit_total", "outcome"), "{{outcome}}")],
            "Ended, or kept behind the deadline.",
            width=6,
        ),
    ),
    "Memory": (
        Panel("Staging", [(of("staging_bytes"), "engine {{engine}}")], "An update beside the weights.", "bytes", width=6),
        Panel("Kept for engines that come later", [(of("retained_bytes"), "engine {{engine}}")], "In shared memory.", "bytes", width=6),
        Panel("Kept to go back to", [(of("rollback_bytes"), "engine {{engine}}")], "sync.rollback.", "bytes", width=6),
        Panel("Workers", [(of("engine_workers"), "engine {{engine}}")], "0 while an engine starts.", "none", width=6),
    ),
}


def dashboard() -> dict[str, Any]:
    """The whole, as Grafana imports it."""
    return {
        "title": "weightsync",
        "uid": "weightsync",
        "description": "Fleets of vLLM engines that follow a trainer's weights. Alerts: docs/operations.md.",
        "tags": ["weightsync", "vllm", "reinforcement-learning"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_placed()),
    }


def _variables() -> list[dict[str, Any]]:
    def labels(name: str, metric: str, about: str) -> dict[str, Any]:
        query = {"query": f"label_values({metric}, {name})", "refId": name}
        # `.*`, not the values that there are: it also takes series without the label.
        every = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
        return {"name": name, "label": about, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "sort": 1, **every}

    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        labels("namespace", "weightsync_build_info", "Namespace"),
        labels("job", 'weightsync_build_info{namespace=~"$namespace"}', "Fleet"),
        labels("phase", of("update_phase_seconds_count"), "Phase"),
    ]


def _placed() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": _grid(0, top, _ACROSS, 1)}
        top, left, height = top + 1, 0, 0
        for panel in panels:
            if left + panel.width > _ACROSS:
                top, left, height = top + height, 0, 0
            number, tall = number + 1, 4 if panel.kind == "stat" else 8
            yield {"id": number, "gridPos": _grid(left, top, panel.width, tall), **_panel(panel)}
            left, height = left + panel.width, max(height, tall)
        top += height


def _grid(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    heat = panel.kind == "heatmap"
    targets = [
        {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": query, "legendFormat": legend, **({"format": "heatmap"} if heat else {})}
        for n, (query, legend) in enumerate(panel.queries)
    ]
    own: dict[str, Any] = {"fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []}}
    if panel.kind == "timeseries":
        own["fieldConfig"]["defaults"]["custom"] = {"showPoints": "never", **panel.options}
        own["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    elif heat:
        own["options"] = {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Oranges"}}
    else:
        own["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, **panel.options}
    return {"type": panel.kind, "title": panel.title, "description": panel.about, "datasource": SOURCE, "targets": targets, **own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when it is not up to date")
    text = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    if not parser.parse_args().check:
        PATH.write_text(text)
    elif not PATH.is_file() or PATH.read_text() != text:
        print(f"{PATH}: not up to date; run python scripts/dashboard.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
