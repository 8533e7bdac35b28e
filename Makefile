# One command each: `make demo`, `make test`. The first call creates .venv; later calls start at once.
SHELL := /bin/sh
KIND ?= $(if $(filter 1,$(CUDA)),gpu,cpu)
# Test files that run at the same time. End-to-end tests often wait for processes and take some 3 GB each.
WORKERS ?= 3
export KIND PYTHON TORCH_INDEX

BIN := .venv/bin
# The stamp's name carries what was installed, so a changed list or pyproject installs again.
STAMP := .venv/.installed-$(KIND)-$(shell cat requirements/$(KIND).txt pyproject.toml forge_agents/cli/setup.txt | cksum | tr ' ' '-')

.PHONY: help demo test perf recipes docs lint lock venv clean
.DEFAULT_GOAL := help

help:  ## Say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "CUDA=1            install requirements/gpu.txt instead of cpu.txt"
	@echo "FAST=1            leave out of \`make test\` what starts engines, learners or a browser: half the time"
	@echo "WORKERS=3         test files that \`make test\` runs at the same time"
	@echo "PYTHON=...        the Python for .venv (default: the first of python3.11, 3.12, 3.13, python3 that fits)"
	@echo "TORCH_INDEX=URL   one more wheel index, e.g. PyTorch's for CPU builds"

demo: $(STAMP)  ## Train two agents end to end (five to ten minutes on two cores, after the installation)
	$(BIN)/forge-agents demo

test: $(STAMP)  ## Run the whole test suite
	$(BIN)/pytest -q --durations=25 --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder \
		$(if $(filter 1,$(FAST)),-m "not slow") tests

perf: $(STAMP)  ## Measure every stage; JSON lines
	$(BIN)/python tests/perf/run.py

recipes: $(STAMP)  ## Rerun every recipe, three seeds each, and compare with its expected results (hours, resumable)
	$(BIN)/python recipes/run.py $(RECIPES)

docs: $(STAMP)  ## Build the documentation into site/, strictly and without network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(STAMP)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: $(STAMP)  ## Regenerate requirements/*.txt (UPGRADE=1 takes the newest versions)
	requirements/lock.sh

venv: $(STAMP)  ## Only create .venv

$(STAMP):
	requirements/install.sh
	@rm -f .venv/.installed-*
	@touch $@

clean:  ## Remove .venv, builds and caches; runs/ stays
	rm -rf .venv dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
