# The commands of this repository. Each target first sets up what it needs, which is immediate the
# second time.

# The first Python that is new enough. Distributions compile theirs with profile-guided optimization:
# the tests take two thirds of the time that they take with one that pyenv compiled. Without any, the
# set-up prints what is missing.
PYTHON ?= $(shell /usr/bin/python3 -c 'import ensurepip, sys, venv; \
	sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo /usr/bin/python3 && exit; \
	for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; \
	done)
# With compiled modules Python starts in half the time.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.venv/pycache
# Tests write and sync thousands of small files: use memory if 6 GB are free there.
TEST_TMPDIR := $(shell test -w /dev/shm \
	&& test "$$(df -Pk /dev/shm | awk 'NR == 2 {print $$4}')" -gt 6000000 \
	&& echo /dev/shm || echo $${TMPDIR:-/tmp})

BIN := .venv/bin
MANAGE := $(BIN)/python manage.py
SETUP := scripts/bootstrap.py
LOCK := $(BIN)/uv pip compile --quiet --universal --no-annotate --python-version 3.11 \
	--excludes requirements/excluded.in --custom-compile-command 'make lock'

.DEFAULT_GOAL := help
.PHONY: help demo demo-mixed run test test-slow test-all test-postgres check bench lock static clean
.PHONY: python setup-run setup-dev

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 10

DEMO_OPTIONS = $(if $(EXIT),--exit) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(STEPS),--steps $(STEPS))

demo: setup-run ## start the server and train the demo run; EXIT=1 exits with its result
	@exec $(MANAGE) demo $(DEMO_OPTIONS)

# One thread per process: six replicas share this machine.
demo-mixed: PREEMPT_S ?= 45
demo-mixed: setup-dev ## a run on five backends at once, four of them emulated; EXIT=1 as above
	@OMP_NUM_THREADS=1 exec $(BIN)/python -m tests.emulators.compose --state var/emulators \
		--preempt kubernetes --after $(PREEMPT_S) -- $(MANAGE) demo --mixed $(DEMO_OPTIONS)

run: setup-run ## start the server without a demo run
	@exec $(MANAGE) serve

# One worker process more than cores; ARGS='-n 0' runs all tests in one process.
PYTEST := $(BIN)/python -m pytest -n auto

# Only these files have to be collected for the slow tests.
SLOW = $(shell grep -rlwE --include='test_*.py' 'mark\.slow|tests\.matrix|every_harness' tests)

test: python ## all tests but the slow ones; ARGS='-k name' is passed to pytest
	@$(PYTHON) $(SETUP) dev --browser
	@TMPDIR=$(TEST_TMPDIR) exec $(PYTEST) -m 'not slow' $(ARGS)

test-slow: python ## the slow tests: whole servers, demos, examples, long tables; ARGS as above
	@$(PYTHON) $(SETUP) dev --browser
	@TMPDIR=$(TEST_TMPDIR) exec $(PYTEST) -m slow $(SLOW) $(ARGS)

test-all: python ## both at once; ARGS as above
	@$(PYTHON) $(SETUP) dev --browser
	@TMPDIR=$(TEST_TMPDIR) exec $(PYTEST) $(ARGS)

test-postgres: python ## all tests that use a database, on PostgreSQL; ARGS as above
	@$(PYTHON) $(SETUP) dev --browser
	@TMPDIR=$(TEST_TMPDIR) ARCHIPELAGO_TEST_DATABASE=postgresql exec $(PYTEST) $(ARGS)

check: setup-dev ## format, lint, types, import contracts, docs, migrations
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_docs.py
	$(BIN)/python scripts/settings_reference.py --check
	$(BIN)/python scripts/check_language.py
	$(MANAGE) makemigrations --check --dry-run

bench: setup-run ## run every benchmark in bench/ and print its tables
	@for script in bench/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

lock: setup-dev ## update requirements/ from pyproject.toml; ARGS=--upgrade takes newer versions
	$(LOCK) $(ARGS) pyproject.toml requirements/torch-deps.in --extra server --group dev \
		-o requirements/dev.txt
	$(LOCK) pyproject.toml requirements/torch-deps.in --extra server \
		-c requirements/dev.txt -o requirements/run.txt
	$(LOCK) pyproject.toml --extra server -c requirements/dev.txt -o requirements/server.txt
	$(LOCK) $(ARGS) requirements/tracker-servers.in -o requirements/tracker-servers.txt
	$(LOCK) pyproject.toml requirements/torch-deps.in \
		--extra s3 --extra gcs --extra azure --extra hf \
		-c requirements/dev.txt -o requirements/replica.txt

static: setup-dev ## build static/dist from static/js
	$(BIN)/python scripts/static_bundle.py

clean: ## remove .venv, caches and build products; keep var/
	rm -rf .venv build dist *.egg-info test-artifacts
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './var/*' -prune -exec rm -rf {} +

python:
	@test -n "$(PYTHON)" || { echo "setup: expected Python 3.11 or newer, found" \
		"$$(python3 --version 2>&1 || echo none)" >&2; exit 1; }

setup-run: python
	@$(PYTHON) $(SETUP) run

setup-dev: python
	@$(PYTHON) $(SETUP) dev
