# Targets over a virtual environment in .venv, which is created on demand. `make` alone lists them.
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
CHECKED = $(wildcard src tests examples bench demo tools)
# Four at a time, because much of it waits; each file in one process, so that what a file shares is made once.
# Files keep the order of tests/conftest.py, slow ones first; pytest-xdist would sort them by their number of tests.
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: help demo venv kernel sanitize test quick soak check bench format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## a cluster, a shop, a lake, a kill and a loss, end to end (KEEP=1: leave it running)
	$(BIN)/python -m demo $(if $(KEEP),--keep)

test: check ## everything that must pass: check, then all tests
	$(BIN)/python -m pytest $(PYTEST_ARGS) || { code=$$?; echo $$code > .pytest_cache/code; exit $$code; }

quick: $(READY) ## the tests that are fast and do not start Spark
	$(BIN)/python -m pytest -m "not slow and not spark" $(PYTEST_ARGS)

soak: $(READY) ## a million simulated clusters, then an hour of faults in each kind of real one (HISTORIES=N, HOURS=N: as many)
	UPPER_SEEDS=$(or $(HISTORIES),1000000) $(BIN)/python -m pytest tests/cluster/test_simulation.py -k promises_hold -n 2
	$(if $(filter 0,$(HOURS)),,UPPER_TORTURE_HOURS=$(or $(HOURS),1) $(BIN)/python -m pytest tests/cluster/test_torture.py)

check: $(READY) ## lint, formatting and strict types of all Python code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CHECKED)

format: $(READY) ## format the source as `make check` requires
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## measure, compare, write docs/benchmarks.md (QUICK=1: three minutes, rough numbers, into out/)
	$(BIN)/python -m bench $(if $(QUICK),--quick) --json out/bench.json $(GROUPS)
	$(BIN)/python -m bench.page out/bench.json --into $(if $(QUICK)$(GROUPS),out/page,docs)

kernel: $(READY) ## rebuild the compiled kernel; fail if that is not possible
	UPPER_KERNEL=required $(BIN)/python setup.py --quiet build_ext --inplace

# A Python that is not built with the sanitizer has to have its library loaded first. What Python never frees is no leak.
SANITIZER = $(shell $(or $(CC),gcc) -print-file-name=libasan.so 2>/dev/null)
sanitize: $(READY) ## the kernel's tests with every access to memory checked; needs a compiler with AddressSanitizer
	@test -e "$(SANITIZER)" || { echo "skipped: this compiler has no AddressSanitizer (Debian, Ubuntu: apt install gcc)"; exit 0; }; \
	UPPER_KERNEL=required UPPER_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-lib build/sanitized --build-temp build/sanitized.o && \
	LD_PRELOAD="$(SANITIZER)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=build/sanitized UPPER_MAP_RUNS=25 \
		$(BIN)/python -m pytest -q -p no:cacheprovider -n 0 --timeout 600 -k "not memory" $(SANITIZED_TESTS)
SANITIZED_TESTS ?= tests/kernel/test_map.py tests/kernel/test_run.py tests/kernel/test_commands.py tests/kernel/test_apply.py \
	tests/kernel/test_log.py tests/kernel/test_records.py tests/kernel/test_fanout.py

venv: $(READY) ## create or update the environment in .venv

clean: ## remove the environment, builds, caches and results
	rm -rf $(VENV) build dist out .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db
	rm -rf src/*.egg-info src/upper/kernel/_compiled.c src/upper/kernel/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Build requirements first: with them in place nothing is fetched twice, and the build uses the pinned versions.
# Not compiled on installation: Python does that for what is imported, and most of it never is.
# Of what pip prints, one line for each package as it is fetched: progress without hundreds of lines.
EACH_PACKAGE = | sed -un -e 's/^Collecting \([^ ]*\).*/    \1/p' -e 's/^Installing collected packages.*/    installing/p'
$(INSTALLED): pyproject.toml setup.py constraints.txt
	@"$(PYTHON)" $(NEW_ENOUGH) || { echo "upper needs Python 3.11 or newer; install it, or name one: make PYTHON=/path/to/python3"; exit 2; }
	@echo "Preparing $(VENV), once; this takes a few minutes. Step 1 of 4: create it with $(PYTHON)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment; install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 2; }
	@echo "Step 2 of 4: fetch the build tools"
	@$(PIP) install --no-compile --constraint constraints.txt setuptools wheel cython $(EACH_PACKAGE)
	@echo "Step 3 of 4: fetch everything else, 1.3 GB on disk; the largest are Spark and Arrow"
	@$(PIP) install --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]' $(EACH_PACKAGE)
	@touch $@

# The kernel alone, when its source has changed; if it cannot be built, the plain kernel runs.
$(READY): $(INSTALLED) $(KERNEL)
	@echo "Step 4 of 4: build the kernel"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@
