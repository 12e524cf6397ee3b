# `make` alone prints the targets. Every target sets itself up in a private environment of its own.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
CUDA_VENV := .venv-cuda
RUN := $(VENV)/bin/python -m
# The option belongs to pytest-asyncio, which the configuration cannot take for granted.
PYTEST := $(RUN) pytest -o asyncio_default_fixture_loop_scope=function
TESTS := not gpu and not multi_gpu and not slow
PYTEST_ARGS ?=

# make serve
DEVICE ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo cuda || echo cpu)
MODEL ?=
ARGS ?=
HOST ?= 127.0.0.1
PORT ?= 8000
# GiB of memory for keys and values on a CPU; vLLM alone would take most of the machine's.
VLLM_CPU_KVCACHE_SPACE ?= 2
SERVE_VENV = $(if $(filter cuda,$(DEVICE)),$(CUDA_VENV),$(VENV))
SERVE = $(if $(filter cpu,$(DEVICE)),VLLM_CPU_KVCACHE_SPACE=$(VLLM_CPU_KVCACHE_SPACE)) \
	$(SERVE_VENV)/bin/magi-serve serve
# On a CPU, compiling a model of this size takes longer than it saves, and bf16 is slower than fp32.
DEMO_ARGS = --served-model-name SmolLM2-135M-Instruct $(if $(filter cpu,$(DEVICE)),--enforce-eager --dtype float32)

# The folder a command runs in stays off sys.path: `kernels` here is not the package `kernels`.
export PYTHONSAFEPATH := 1

.PHONY: help setup serve test test-slow test-gpu bench fmt lint types lock matrix docs pages

help:  ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' \
		| while IFS=$$'\t' read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

setup:  ## make the environment for tests and development in .venv
	@$(PYTHON) tools/setup_env.py test --venv $(VENV)

serve:  ## serve a small model on 127.0.0.1:8000; MODEL=path-or-name ARGS="..." serves another one
	@$(PYTHON) tools/setup_env.py serve --device $(DEVICE) --venv $(SERVE_VENV)
ifeq ($(MODEL),)
	@model=$$($(SERVE_VENV)/bin/python -m magi_serve.server.demo_model) && \
		exec env $(SERVE) "$$model" --host $(HOST) --port $(PORT) $(DEMO_ARGS) $(ARGS)
else
	@exec env $(SERVE) $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)
endif

test: lint types  ## lint, types and every test that needs no GPU
	@echo "test: pytest, Triton's kernels in its interpreter"
	@TRITON_INTERPRET=1 $(PYTEST) -m "$(TESTS)" -q -rN tests/kernels
	@echo "test: pytest, all that needs no GPU"
	@$(PYTEST) -m "$(TESTS)" $(PYTEST_ARGS)

test-slow: setup  ## the tests that take minutes
	@$(PYTEST) -m "slow and not gpu and not multi_gpu" $(PYTEST_ARGS)

test-gpu:  ## the tests for a GPU, with the machine's own Python (PYTHON=...): no set-up
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

bench:  ## measure, with the machine's own Python (PYTHON=...): make bench ARGS="serve --help"
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m magi_serve.cli bench $(ARGS)

fmt: setup  ## format the code and fix what can be fixed
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

lint: setup  ## ruff: check and format
	@echo "lint: ruff check, ruff format --check"
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .

types: setup  ## mypy, strict
	@echo "types: mypy"
	@$(RUN) mypy

matrix: setup  ## write docs/support-matrix.md from the capability table
	@$(VENV)/bin/python tools/support_matrix.py

pages: setup  ## write docs/settings.md and docs/errors.md from the code
	@PYTHONPATH=tools $(VENV)/bin/python tools/reference_pages.py

docs: setup  ## build the documentation as a site, in site/
	@$(RUN) mkdocs build --quiet
	@echo "docs: site/index.html"

lock:  ## resolve requirements/*.in anew and write the pins to requirements/*.txt
	@$(PYTHON) tools/lock.py cpu dev cuda
