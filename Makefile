# Everything runs in .venv, which each target fills with what it needs: a fresh machine
# needs Python 3.11 or later and make. Choose another Python with: make test PYTHON=python3.12

.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTHON ?=
CANDIDATES := $(or $(PYTHON),python3.13 python3.12 python3.11 python3.14 python3 python)

.PHONY: help demo test test-all newest-env test-newest test-machines frameworks lint docs bench gpu gpu-wheels gpu-kernels gpu-env clean
.NOTPARALLEL:      # two pips must not write into one environment
.DELETE_ON_ERROR:

help:  ## this list
	@echo "make TARGET [ARGS='...']    ARGS are passed on to what the target runs"
	@echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

demo: $(VENV)/.study  ## train on 64 replicas, compare orders of summation, draw a picture
	@$(BIN)/python -m gpusim demo $(ARGS)

# SEED= repeats a run, AREA= takes one area's tests and those below it, ARGS= goes to pytest:
# tests/oracles/budget.py has the lanes and areas, docs/testing-gpusim.md explains them.
LANE := $(if $(AREA),--area $(AREA)) $(ARGS)
export GPUSIM_TESTS_SEED := $(SEED)

test: $(VENV)/.test $(if $(AREA),lint)  ## tests, doctests and the documentation's examples, in about ten minutes
	@$(BIN)/python -m tests $(LANE)

test-all: $(VENV)/.test $(if $(AREA),lint)  ## the same with all cases, the slow tests and the full random budgets
	@$(BIN)/python -m tests --lane all $(LANE)

# In an environment of its own, as the other's torch is pinned: some 7 GB, of CUDA's libraries for the
# most part, without which this torch cannot be imported. pip asks for newer releases every time.
newest-env:
	@$(MAKE) --no-print-directory VENV=.venv-newest .venv-newest/.checks
	@.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade torch jax

test-newest: newest-env  ## the tests that rest on torch and JAX, and the ports, on the newest of both
	@.venv-newest/bin/python -m tests.machines.newest $(BIN)/python
	@.venv-newest/bin/python -m tests --lane area tests/collectives tests/jax tests/poptorch tests/torch \
	    tests/project/test_ports.py $(ARGS)

# It needs only a Python: both machines get environments of their own, below .machines.
test-machines: $(VENV)/.python  ## the wheel alone, and `make gpu` on a GPU machine's image; ARGS=wheel, ARGS=image
	@$(BIN)/python -m tests.machines $(ARGS)

# An environment of its own: some 2 GB with PyTorch's build for the CPU, 7 with CUDA's. NEWEST=1 takes
# the newest releases, in another environment, and writes nothing.
FRAMEWORKS := .venv-frameworks$(if $(NEWEST),-newest)
frameworks:  ## run frameworks' programs over gloo and on simulated ranks, and write docs/frameworks.md
	@$(MAKE) --no-print-directory VENV=$(FRAMEWORKS) $(FRAMEWORKS)/.frameworks
	$(if $(NEWEST),@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --upgrade --requirement $(FRAMEWORKS)/requirements.txt)
	@$(FRAMEWORKS)/bin/python -m tests.frameworks $(if $(NEWEST),--dry) $(ARGS)

lint: $(VENV)/.test  ## style, format and types
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

docs: $(VENV)/.docs  ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@$(BIN)/python -m tests.project.site site
	@echo "open site/index.html"

# In an environment of its own: JAX, PyTorch and MPI take more than a gigabyte.
bench:  ## measure the speed, beside that of JAX, PyTorch, MPI and the memory
	@$(MAKE) --no-print-directory VENV=.venv-bench .venv-bench/.bench
	@.venv-bench/bin/python -m bench $(ARGS)

# The Python that has CuPy: the one that is named, that of `make gpu-env`, or the system's.
# The fake GPU needs no more than the tests' environment and CuPy.
GPU_PYTHON = $(or $(PYTHON),$(wildcard .venv-gpu/bin/python),$(if $(findstring --fake,$(ARGS))$(filter gpu-kernels,$(MAKECMDGOALS)),$(wildcard $(BIN)/python)),python3)

gpu: $(if $(findstring --fake,$(ARGS)),$(VENV)/.test)  ## all that a machine with a GPU can check, offline; ARGS=--fake needs no GPU
	@$(GPU_PYTHON) -m tests.gpu $(ARGS)

gpu-wheels:  ## download what `make gpu` needs offline; PYTHON_VERSION=3.12
	@$(or $(PYTHON),$(wildcard $(BIN)/python),python3) -m tests.gpu.wheels \
	    $(if $(PYTHON_VERSION),--python $(PYTHON_VERSION)) $(ARGS)

# NVRTC's version has to be that of the machine with the GPU: PYTHON= names an environment with it.
gpu-kernels:  ## compile all kernels for a GPU that is elsewhere; ARCH=sm_90
	@$(GPU_PYTHON) -m tests.gpu --kernels $(or $(ARCH),sm_90) $(ARGS)

# Several gigabytes: CuPy with CUDA's libraries, PyTorch and JAX.
gpu-env:  ## make an environment for `make gpu`, where there is a GPU and a network
	@$(MAKE) --no-print-directory VENV=.venv-gpu .venv-gpu/.gpu
	@.venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check 'jax[cuda13]' \
	    || echo "JAX for CUDA 13 could not be installed: it will not be compared with" >&2

clean:  ## remove everything that make set up or wrote
	rm -rf $(VENV) .venv-newest .venv-bench .venv-frameworks .venv-frameworks-newest .venv-gpu .gpu .machines wheels demo site dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find gpusim fallback tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched last, so that what was interrupted is done again.
$(VENV)/.study $(VENV)/.checks $(VENV)/.test $(VENV)/.docs $(VENV)/.bench $(VENV)/.gpu: $(VENV)/.%: pyproject.toml $(VENV)/.python
	@echo "Installing gpusim[$*] into $(VENV), once; this takes a minute or two ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

$(FRAMEWORKS)/.frameworks: tests/frameworks/requirements.txt pyproject.toml $(VENV)/.python
	@echo "Installing the frameworks into $(VENV), once; this takes some minutes ..."
	@sed 's/ *#.*//$(if $(NEWEST),; s/==.*//)' $< > $(VENV)/requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --requirement $(VENV)/requirements.txt --editable .
	@touch $@

# An interpreter counts when it runs, is new enough, and can make environments: a name on
# the path may be a shim of pyenv without a version behind it, or lack Debian's python3-venv.
$(VENV)/.python:
	@for python in $(CANDIDATES); do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	            >/dev/null 2>&1; then \
	        echo "Making $(VENV) with $$("$$python" --version) ..."; \
	        "$$python" -m venv --clear $(VENV) && touch $@; exit; \
	    fi; \
	done; \
	echo "gpusim needs Python 3.11 or later with its venv module; tried: $(CANDIDATES)" >&2; \
	echo "Install one (Debian, Ubuntu: apt install python3 python3-venv)," >&2; \
	echo "or name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	exit 1
