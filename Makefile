# Every target sets up what it needs: .venv is made from requirements.lock, and remade when that or pyproject.toml changes.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint requirements.lock
READY := .venv/ready

.PHONY: env train test slow lint bench

env: $(READY)

# torch goes first and alone: the largest download, and the one most often picked by hand for a machine.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("PipeSwift needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": try make PYTHON=python3.12 $(MAKECMDGOALS)" if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "Setting up .venv; the first time takes some minutes"
	@$(PIP) $$(grep '^torch==' requirements.lock)
	@$(PIP) --requirement requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

train: $(READY)
	$(BIN)/pipeswift train examples/quickstart.toml

# By file, so that what a file sets up once is set up once; the process pool of each worker starts when first used.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# pytest exits with 5 when nothing is marked slow, which is fine.
slow: $(READY)
	$(BIN)/python -m pytest -m slow || [ $$? -eq 5 ]

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

SHARED := $(addprefix bench/,harness.py emulated_moe.py turns.py)

bench: $(READY)
	@set -e; for script in $(filter-out $(SHARED),$(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python $$script; done
