#!/usr/bin/env bash
# Writes requirements/*.lock from pyproject.toml and requirements/: cpu.lock for `make setup`, cuda.lock and build.lock, with hashes,
# for the image (Dockerfile). None names an index: where packages come from is the matter of whoever installs them.
# Pins that are there already are kept; `scripts/lock.sh --upgrade` takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."

# pip can neither leave out a dependency nor resolve for another platform; uv can. It is needed for nothing else.
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv

lock() {
  "$tools/bin/uv" pip compile --python-platform x86_64-unknown-linux-gnu --no-python-downloads --no-annotate \
    --no-emit-index-url --custom-compile-command scripts/lock.sh --quiet "$@"
}

lock pyproject.toml requirements/cpu.txt --extra cpu --extra dev --override requirements/cpu-overrides.txt \
  --output-file requirements/cpu.lock --python-version 3.11 "$@"
# Ubuntu's Python in the image. torch comes with CUDA from PyPI.
lock pyproject.toml --extra cuda --generate-hashes --output-file requirements/cuda.lock --python-version 3.12 "$@"
lock requirements/build.txt --generate-hashes --output-file requirements/build.lock --python-version 3.12 "$@"
