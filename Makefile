# Everything runs in a virtual environment of its own; all that is needed before is make and Python >= 3.10.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# On all cores, but four at most: each process holds torch and JAX where they are installed. ARGS="-n 0" is one process.
RUN_TESTS := -m pytest -n auto --maxprocesses 4 --dist worksteal
PYTEST := $(BIN)/python $(RUN_TESTS)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# `make test-lowest` and `make test-newest`: the oldest and newest Python that is here, pyenv's among them.
LOWEST_PYTHON ?= $(shell for v in 3.10 3.11; do \
    PYENV_VERSION=$$v python$$v -c 'import sys; print(sys.executable)' 2>/dev/null && exit; done; echo $(PYTHON))
NEWEST_PYTHON ?= $(shell for v in 3.14 3.13 3.12; do \
    PYENV_VERSION=$$v python$$v -c 'import sys; print(sys.executable)' 2>/dev/null && exit; done; echo $(PYTHON))
# Of the tests those of our side of NumPy, msgpack, JAX and the command line; the kernels' own meet none of their versions.
VERSIONED := not (emulat or mutation or compile or processes or examples or test_demo or streams)

# CuPy for CUDA 12, and for 13: one environment cannot have both.
PROCESSES ?= 2
REAL_CUPY = $(VENV)-cuda12/bin/python -m pytest -q -n $(PROCESSES) $(ARGS)
REAL_CUPY_13 = $(VENV)-cuda13/bin/python -m pytest -q -n $(PROCESSES) $(ARGS)
.PHONY: demo test test-interop test-package test-lowest test-newest check compile-check real-cupy bench gpu-check clean

demo: $(VENV)/cli  ## train a small Llama on two processes and prove that they agree
	$(BIN)/gradengine demo $(ARGS)

test: $(VENV)/test  ## all tests that need no GPU
	$(PYTEST) $(ARGS)

check: $(VENV)/test  ## lint, format and types, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-interop: $(VENV)/interop  ## torch and JAX, in and out, and every example; what is missing fails, but for a GPU
	GRADENGINE_REQUIRE_FRAMEWORKS=1 $(PYTEST) -k "torch or jax or frameworks or interop or examples or docs" $(ARGS)

test-package: $(VENV)/package  ## wheel and sdist: built, complete, and each at work in an empty environment
	TEST_PACKAGE=1 $(BIN)/python -m pytest tests/test_package.py $(ARGS)

test-lowest: $(VENV)-lowest/installed  ## with every dependency, JAX too, at the lower bound that pyproject.toml gives
	$(VENV)-lowest/bin/python $(RUN_TESTS) -k "$(VERSIONED)" $(ARGS)

test-newest: $(VENV)-newest/installed  ## with the newest Python that is here and the newest of every dependency
	$(VENV)-newest/bin/python $(RUN_TESTS) -k "$(VERSIONED)" $(ARGS)

compile-check: $(VENV)/compile  ## every CUDA kernel for every architecture, and a table of what it takes; needs no GPU
	COMPILE_CHECK=1 $(BIN)/python -m pytest tests/test_kernels_compile.py $(ARGS)
	$(BIN)/python bench/kernel_table.py

real-cupy: $(VENV)-cuda12/real_cupy/built $(VENV)-cuda13/real_cupy/built  ## every GPU test on CuPy itself in every order; needs g++, no GPU
	$(REAL_CUPY) tests
	REAL_CUPY_ORDER=random $(REAL_CUPY_13) tests
	REAL_CUPY_ORDER=eager $(REAL_CUPY_13) tests
	REAL_CUPY_STREAM=own $(REAL_CUPY) tests
	CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1 $(REAL_CUPY_13) tests
	$(VENV)-cuda12/bin/python bench/gpu_check.py --small --out out/gpu-check-small
	$(VENV)-cuda12/bin/python bench/gpu_check.py --small --further --out out/gpu-check-small

bench: $(VENV)/cli  ## make bench ARGS="step --json step.json"
	$(BIN)/gradengine bench $(ARGS)

gpu-check:  ## on a machine with a GPU, by $(PYTHON) as it is: tests, benchmarks; ARGS="--stage tests", ARGS=--list
	PYTHONPATH=. $(PYTHON) bench/gpu_check.py $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(VENV)-cuda12 $(VENV)-cuda13 build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "gradengine needs Python >= 3.10; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/cli: $(VENV)/python pyproject.toml
	$(PIP_INSTALL) --editable '.[cli,plot]'
	@touch $@

$(VENV)/test: $(VENV)/python pyproject.toml
	$(PIP_INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/cli

$(VENV)/interop: $(VENV)/python pyproject.toml
	$(PIP_INSTALL) --editable '.[interop]'
	@touch $@ $(VENV)/test $(VENV)/cli

$(VENV)/compile: $(VENV)/python pyproject.toml
	$(PIP_INSTALL) --editable '.[compile]'
	@touch $@ $(VENV)/test $(VENV)/cli

$(VENV)/package: $(VENV)/python pyproject.toml
	$(PIP_INSTALL) --editable '.[package]'
	@touch $@ $(VENV)/test $(VENV)/cli

$(VENV)-lowest/installed: pyproject.toml tests/lower_bounds.py
	$(LOWEST_PYTHON) -m venv --clear $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(VENV)-lowest/bin/python tests/lower_bounds.py cli plot test interop > $(VENV)-lowest/bounds.txt
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint $(VENV)-lowest/bounds.txt --editable '.[test]' jax
	@touch $@

$(VENV)-newest/installed: pyproject.toml
	$(NEWEST_PYTHON) -m venv --clear $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' jax
	@touch $@

.SECONDARY: $(VENV)-cuda12/installed $(VENV)-cuda13/installed

$(VENV)-cuda%/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)-cuda$*
	$(VENV)-cuda$*/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[real-cupy$*]'
	@touch $@

$(VENV)-cuda%/real_cupy/built: $(VENV)-cuda%/installed tests/real_cupy/build.py $(wildcard tests/real_cupy/driver/*)
	PYTHONPATH=tests $(VENV)-cuda$*/bin/python -m real_cupy.build
	@touch $@
