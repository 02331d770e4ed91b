# `make train` trains the quickstart, `make test` runs all tests, `make check` lints and type-checks.
# Each sets up .venv on first use and reuses it.

PYTHON ?= python3
# Processes that run tests side by side; 0 runs them in pytest's own.
WORKERS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: train test check

train: $(VENV)/.train-stamp
	$(BIN)/python train.py --config=configs/quickstart.py --workdir=runs/quickstart

test: $(VENV)/.dev-stamp
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

check: $(VENV)/.dev-stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.train-stamp: pyproject.toml | $(BIN)/pip
	@echo "installing what training needs into $(VENV)"
	$(PIP) --editable '.[plot]'
	@touch $@

$(VENV)/.dev-stamp: pyproject.toml | $(BIN)/pip
	@echo "installing what the tests need into $(VENV)"
	$(PIP) --editable '.[dev]'
	@touch $@

# pip comes last when an environment is made, so one that was interrupted is made again.
$(BIN)/pip:
	@$(PYTHON) -c '' || { echo "error: PYTHON=$(PYTHON) does not run; name a Python >= 3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit("error: PYTHON=$(PYTHON) is Python %s, expected >= 3.11" % v)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: PYTHON=$(PYTHON) cannot make environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
