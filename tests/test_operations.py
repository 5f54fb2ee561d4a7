"""What the documents for operators name is there: links, commands and their flags, settings, values, variables, metrics, routes, manifests.

Not covered: whether what they say is true, and `kubectl` and `helm` beyond the form of a line.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.charts import CHART
from tests.test_alerts import metrics
from weightsync import WeightSync, cli, config
from weightsync.api import app
from weightsync.errors import BY_CODE
from weightsync.protocol import EngineState, UpdateState

ROOT = Path(__file__).resolve().parent.parent
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", ROOT / "docs/operations.md", CHART / "README.md")}
README = str((CHART / "README.md").relative_to(ROOT))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SETTINGS = {
    name: set(getattr(field.annotation, "model_fields", ())) for name, field in config.Settings.model_fields.items() if name != "state_dir"
}
#: Verbs of kubectl and helm that stand in the documents, so that a slip is seen.
VERBS = {
    "kubectl": {"config", "cp", "create", "delete", "describe", "exec", "get", "logs", "port-forward"},
    "helm": {"get", "install", "repo", "uninstall", "upgrade"},
}
documents = pytest.mark.parametrize("name", TEXTS)


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", plain, re.MULTILINE)}


def commands(text: str, program: str) -> list[list[str]]:
    """Every line of code that begins with a program, in words; a line that ends in a backslash goes on."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    code = [re.sub(r"^(\. .venv/bin/activate|docker run .*? weightsync-?\w*)$", "", line.strip()) for line in lines + inline]
    nested = [part for line in code for part in re.split(r" -- | \| |; ", line)]
    found = [part.split() if part.count('"') % 2 or part.count("'") % 2 else shlex.split(part, comments=True) for part in nested]
    return [words for words in found if words[:1] == [program] and len(words) > 1]


@documents
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            to = (ROOT / name).parent / path if path else ROOT / name
            assert to.exists(), target
            assert not anchor or anchor in anchors(to.read_text()), target


@documents
def test_commands_and_their_flags_are_there(name: str) -> None:
    (sub,) = [action for action in cli._parser()._actions if action.choices]
    found = commands(TEXTS[name], "weightsync")
    assert found
    for _, command, *words in found:
        if re.fullmatch("[a-z]+", command) and command not in ("ready", "starting"):  # those two are what `serve` prints
            assert command in sub.choices, command  # type: ignore[operator]
            for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
                assert flag in sub.choices[command]._option_string_actions, f"{command} {flag}"  # type: ignore[index]


@pytest.mark.parametrize("program", VERBS)
def test_lines_for_a_cluster_are_well_formed(program: str) -> None:
    found = [words for text in TEXTS.values() for words in commands(text, program)]
    assert found
    for words in found:
        text = re.sub(r" (--namespace|-n) \S+", "", " ".join(words))
        verb = text.split()[1]
        assert verb in VERBS[program], words
        assert not [word for word in words if re.match("-[a-z]{2}|---", word) and word != "-it"], words


@documents
def test_settings_and_values_are_there(name: str) -> None:
    for path in re.findall(r"`([a-zA-Z]\w*(?:\.\w+)+)(?:=[^`]*)?`", TEXTS[name]):
        first, *rest = path.split(".")
        if first in VALUES | SETTINGS and rest[-1] not in ("py", "toml", "sh", "yaml", "json", "md", "log"):
            node: Any = VALUES
            for part in path.split("."):
                node = node.get(part) if isinstance(node, dict) and part in node else ...
            of_client = first == "sync" and hasattr(WeightSync, rest[0])  # `sync` is what the documents call one
            assert node is not ... or rest[0] in SETTINGS.get(first, ()) or of_client, path


@documents
def test_variables_metrics_and_routes_are_there(name: str) -> None:
    text = TEXTS[name]
    for section, key in re.findall(r"WEIGHTSYNC_([A-Z]+)__([A-Z_]+)", text):
        assert key.lower() in SETTINGS[section.lower()]
    there = {re.sub("_(bucket|sum|count)$", "", metric) for metric in metrics()}
    assert set(re.findall(r"`(weightsync_[a-z_]+)", text)) <= there
    source = Path(app.__file__).read_text()
    for route in set(re.findall(r"/v1/([a-z]+)", text)) - {"chat", "completions", "generate", "models"}:  # those are vLLM's own
        assert f'"/{route}' in source, route


def test_codes_and_states_are_there() -> None:
    text = TEXTS["docs/operations.md"]
    for title, known in (("States of an engine", EngineState), ("States of an update", UpdateState)):
        (part,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
        assert set(re.findall(r"^\| `(\w+)` ", part, re.MULTILINE)) == {str(state) for state in known}, title
    (failing,) = re.findall(r"^### WeightsyncUpdateFailing\n(.*?)(?=^### )", text, re.MULTILINE | re.DOTALL)
    first = [code for line in re.findall(r"^\d\. (`.*?): ", failing, re.MULTILINE) for code in re.findall(r"`(\w+)`", line)]
    assert first and set(first) <= set(BY_CODE) | {"GET"}


@documents
def test_manifests_fit_kubernetes(name: str) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", TEXTS[name], re.MULTILINE | re.DOTALL):
        for manifest in yaml.safe_load_all(block):
            if "kind" in manifest:
                kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_the_charts_readme_builds_the_image_that_the_chart_takes() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert set(re.findall(r"registry\.example/weightsync:(\S+)", TEXTS[README])) == {version}


def test_what_an_example_wants_stands_in_it() -> None:
    rows = re.findall(r"^\| `(examples/\S+)` \|.*\| (.*) \|$", TEXTS[README], re.MULTILINE)
    assert {CHART / path for path, _ in rows} == set((CHART / "examples").glob("*.yaml"))
    for path, wanted in rows:
        there = f"{VALUES}{yaml.safe_load((CHART / path).read_text())}".replace("'", "")
        for word in re.findall(r"`([^`]+)`", wanted):
            assert word in there, f"{path}: {word}"
