# Everything a person does with the repository. Each target sets up what it needs by itself; the
# second time that takes no time.

# The first Python that is new enough; without any, the set-up says what is missing.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; \
	done)
# Python starts in half the time when it keeps compiled modules.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.venv/pycache
# Tests write and sync thousands of small files: in memory, where there are 6 GB to spare.
TEST_TMPDIR := $(shell test -w /dev/shm \
	&& test "$$(df -Pk /dev/shm | awk 'NR == 2 {print $$4}')" -gt 6000000 \
	&& echo /dev/shm || echo $${TMPDIR:-/tmp})

BIN := .venv/bin
MANAGE := $(BIN)/python manage.py
SETUP := scripts/bootstrap.py
LOCK := $(BIN)/uv pip compile --quiet --universal --no-annotate --python-version 3.11 \
	--excludes requirements/excluded.in --custom-compile-command 'make lock'

.DEFAULT_GOAL := help
.PHONY: help demo demo-mixed run test test-postgres check bench lock static clean python setup-run setup-dev

help: ## say what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 10

DEMO_OPTIONS = $(if $(EXIT),--exit) $(if $(ROUNDS),--rounds $(ROUNDS))

demo: setup-run ## start everything, train the demo run and show it; EXIT=1 ends with its result
	@exec $(MANAGE) demo $(DEMO_OPTIONS)

# One thread each: six replicas share this machine.
demo-mixed: setup-dev ## a run on five backends at once, four of them emulated here; EXIT=1 as above
	@OMP_NUM_THREADS=1 exec $(BIN)/python -m tests.emulators.together --state var/emulators \
		--preempt kubernetes --after 45 -- $(MANAGE) demo --mixed $(DEMO_OPTIONS)

run: setup-run ## start everything without a demo run
	@exec $(MANAGE) serve

test: python ## all tests, browser tests included; ARGS='-k name' is passed to pytest
	@$(PYTHON) $(SETUP) dev --browser
	@TMPDIR=$(TEST_TMPDIR) exec $(BIN)/python -m pytest $(ARGS)

test-postgres: python ## every test that has a database once more, on PostgreSQL; ARGS as above
	@$(PYTHON) $(SETUP) dev --browser
	@TMPDIR=$(TEST_TMPDIR) ARCHIPELAGO_TEST_DATABASE=postgresql exec $(BIN)/python -m pytest $(ARGS)

check: setup-dev ## format, lint, types, import contracts, docs, migrations
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_docs.py
	$(MANAGE) makemigrations --check --dry-run

bench: setup-run ## print the tables of bench/
	@for script in bench/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

lock: setup-dev ## refresh the pinned versions in requirements/ (ARGS=--upgrade for newer ones)
	$(LOCK) $(ARGS) pyproject.toml requirements/torch-deps.in --extra server --group dev \
		-o requirements/dev.txt
	$(LOCK) pyproject.toml requirements/torch-deps.in --extra server \
		-c requirements/dev.txt -o requirements/run.txt
	$(LOCK) pyproject.toml --extra server -c requirements/dev.txt -o requirements/server.txt
	$(LOCK) pyproject.toml requirements/torch-deps.in \
		--extra s3 --extra gcs --extra azure --extra hf \
		-c requirements/dev.txt -o requirements/replica.txt

static: setup-dev ## make static/dist/app.js, the script of the pages, of static/js
	$(BIN)/python scripts/static_bundle.py

clean: ## remove .venv, caches and build products; var/ is kept
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
