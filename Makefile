# Few verbs over a project-local environment that makes itself. `make` alone lists them.
# Needs Python 3.11 or newer with venv, and make. No compiler, no Java and no running service.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter on the path that is new enough; `make PYTHON=...` overrules.
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" $(NEW_ENOUGH) && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
KERNEL := $(wildcard src/upper/kernel/*.pyx src/upper/kernel/*.pxi src/upper/kernel/*.h)
CHECKED = $(wildcard src tests examples bench demo)
# Two at a time, each file in one process, so that what a file shares is made once.
PYTEST_ARGS ?= -n 2 --dist loadfile

.PHONY: help demo venv kernel test quick check bench format clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## the main job, end to end: a node, a shop, a lake, and a plug that is pulled (KEEP=1: leave it running)
	$(BIN)/python -m demo $(if $(KEEP),--keep)

test: check ## everything that must pass: check, then every test, slow ones included
	$(BIN)/python -m pytest $(PYTEST_ARGS)

quick: $(READY) ## the tests that are neither slow nor start Spark
	$(BIN)/python -m pytest -m "not slow and not spark" $(PYTEST_ARGS)

check: $(READY) ## lint, format and strict types, over everything written in Python
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CHECKED)

format: $(READY) ## rewrite the source as `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## measure, compare, write docs/benchmarks.md (QUICK=1: under two minutes, rough numbers, into out/)
	$(BIN)/python -m bench $(if $(QUICK),--quick) --json out/bench.json $(GROUPS)
	$(BIN)/python -m bench.page out/bench.json --into $(if $(QUICK)$(GROUPS),out/page,docs)

kernel: $(READY) ## build the compiled kernel again, and fail if it cannot be built
	UPPER_KERNEL=required $(BIN)/python setup.py --quiet build_ext --inplace

venv: $(READY) ## the environment of the project, in .venv

clean: ## remove what was made here: environment, builds, caches, results
	rm -rf $(VENV) build dist out .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db
	rm -rf src/*.egg-info src/upper/kernel/_compiled.c src/upper/kernel/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Build requirements first: with them in place nothing is fetched twice, and the build uses the pinned versions.
# Not compiled on installation: Python does that for what is imported, and most of it never is.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	@"$(PYTHON)" $(NEW_ENOUGH) || { echo "upper needs Python 3.11 or newer; install it, or name one: make PYTHON=/path/to/python3"; exit 2; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment; install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 2; }
	$(PIP) install --quiet --no-compile --constraint constraints.txt setuptools wheel cython
	$(PIP) install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# The kernel alone, when its source has changed; where it cannot be built the plain twins run.
$(READY): $(INSTALLED) $(KERNEL)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@
