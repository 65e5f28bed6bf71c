# Everything runs in a virtual environment of its own; all that is needed before is make and Python >= 3.10.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check bench clean

demo: $(VENV)/cli  ## train a small Llama on two processes and prove that they agree
	$(BIN)/gradengine demo $(ARGS)

test: $(VENV)/test  ## all tests that need no GPU
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/test  ## lint, format and types, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/cli  ## make bench ARGS="step --json step.json"
	$(BIN)/gradengine bench $(ARGS)

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "gradengine needs Python >= 3.10; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/cli: $(VENV)/python pyproject.toml
	$(PIP_INSTALL) --editable '.[cli]'
	@touch $@

$(VENV)/test: $(VENV)/python pyproject.toml
	$(PIP_INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/cli
