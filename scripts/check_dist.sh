#!/usr/bin/env bash
# Builds wheel and sdist into dist/ and shows that the wheel stands alone:
# in an environment without a single dependency the modules that every process
# shares must import, and nothing but the two packages must be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf dist
.venv/bin/python -m build --no-isolation --outdir dist . >/dev/null

clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
.venv/bin/python -m venv --without-pip "$clean/venv"
.venv/bin/python -m pip --disable-pip-version-check --python "$clean/venv/bin/python" install --quiet --no-deps --no-index dist/*.whl

cd "$clean" # else the source tree would be imported
venv/bin/python - <<'PYTHON'
import importlib.metadata
import pathlib
import weightsync.errors
import weightsync.protocol

assert "site-packages" in weightsync.errors.__file__, weightsync.errors.__file__
assert (pathlib.Path(weightsync.errors.__file__).parent / "py.typed").is_file(), "py.typed is not in the wheel"
assert (pathlib.Path(weightsync.errors.__file__).parent / "api/page.html").is_file(), "the status page is not in the wheel"
files = importlib.metadata.files("weightsync")
tops = {file.parts[0] for file in files if not file.parts[0].endswith(".dist-info") and ".." not in file.parts}
assert tops == {"weightsync", "trainer_adapters"}, tops
PYTHON

cd - >/dev/null
ls -l dist
