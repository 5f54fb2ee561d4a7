# Every target sets up .venv by itself; once that is done it costs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
ARGS ?=
# Processes that share the tests out: a file to each, the longest first. Engines take 2 GB each, so more of them take more memory.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest tests -n $(JOBS) --no-loadscope-reorder
PYTHON ?=
TORCH_INDEX ?=

.PHONY: help setup demo test test-full test-gpu lint types imports dist clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\n  TORCH_INDEX=…  index that has the CPU build of torch, when pip'"'"'s own has not\n'
	@printf '  PYTHON=…       interpreter to set up on; for test-gpu the one to test with\n'
	@printf '  JOBS=…         processes that share the tests out (2)\n'
	@printf '  ARGS="…"       passed on by demo and the test targets\n'

setup: $(READY) ## create .venv (about a minute, 3.1 GB)

$(READY): pyproject.toml requirements/cpu.lock scripts/setup.sh
	@PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' scripts/setup.sh
	@touch $@

demo: $(READY) ## train a small model while engines follow it
	@$(BIN)/weightsync demo $(ARGS)

test: $(READY) ## what a change should pass: no GPU, some minutes
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-full: $(READY) ## also the long tables
	$(PYTEST) -m "not gpu" $(ARGS)

# A GPU host brings its own vLLM: with PYTHON given nothing is installed there.
ifeq ($(PYTHON),)
test-gpu: GPU_PYTHON := $(BIN)/python
test-gpu: $(READY)
else
test-gpu: GPU_PYTHON := $(PYTHON)
endif
test-gpu: ## core tests that need a CUDA device (all: ARGS="-m gpu"); PYTHON=… uses that interpreter as it is
	$(GPU_PYTHON) -m pytest tests -m "gpu and not slow" $(ARGS)

lint: $(READY) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict
	$(BIN)/mypy

imports: $(READY) ## which package may import which
	$(BIN)/lint-imports

dist: $(READY) ## wheel and sdist, tried in an empty environment
	@scripts/check_dist.sh

clean: ## remove what the targets made, .venv as well
	rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
