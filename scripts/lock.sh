#!/usr/bin/env bash
# Writes requirements/cpu.lock from pyproject.toml and requirements/.
# Pins that are there already are kept; `scripts/lock.sh --upgrade` takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."

# pip can neither leave out a dependency nor resolve for another platform; uv can. It is needed for nothing else.
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv

"$tools/bin/uv" pip compile pyproject.toml requirements/cpu.txt --extra cpu --extra dev \
  --override requirements/cpu-overrides.txt --output-file requirements/cpu.lock \
  --python-version 3.11 --python-platform x86_64-unknown-linux-gnu --no-python-downloads \
  --no-annotate --custom-compile-command scripts/lock.sh --quiet "$@"
