# make train | test | test-all | lock | clean          (GNU make 3.81 or later)
#
#   PYTHON=python3.12    the Python that .venv is made with (3.11 to 3.13)
#   CUDA=0, CUDA=1       without or with the CUDA packages; by default (auto) with them
#                        where nvidia-smi answers

PYTHON ?= python3 python3.13 python3.12 python3.11
CUDA ?= auto
# For `make lock`: UV_FLAGS=--upgrade takes the newest versions instead of keeping pins.
UV_FLAGS ?=

RUN := runs/quickstart
PY := .venv/bin/python
# In two processes: what takes the time is tracing, on one core.
PYTEST := $(PY) -m pytest -n 2 --dist worksteal
PIP := $(PY) -m pip -qq --disable-pip-version-check --no-input
# Only the packages that a lock names, exactly and by hash.
INSTALL := $(PIP) install --require-hashes --no-deps
COMPILE := $(PY) -m uv pip compile --quiet --universal --python-version 3.11 \
    --fork-strategy fewest --generate-hashes --no-annotate \
    --custom-compile-command "make lock" $(UV_FLAGS) --extra test pyproject.toml

GPUS := $(CUDA)
ifeq ($(filter-out auto,$(CUDA)),)
    GPUS := $(shell nvidia-smi >/dev/null 2>&1 && echo 1 || echo 0)
endif
STAMP_0 := .venv/.installed
STAMP_1 := .venv/.installed-cuda
STAMP := $(STAMP_$(GPUS))
ifeq ($(STAMP),)
    $(error CUDA=$(CUDA) should be 0 (CPU), 1 (GPUs) or auto)
endif
LOCK := $(STAMP:.venv/.installed%=requirements%.lock)
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# Empty where .venv has no Python that runs.
RUNS := $(shell $(PY) -c '$(IN_RANGE)' 2>/dev/null && echo yes)

.PHONY: help setup train test test-all lock clean broken

help:
	@echo "make train     set up .venv, train and evaluate the quickstart"
	@echo "make test      set up .venv, then ruff and the fast tests"
	@echo "make test-all  the same with the slow tests"
	@echo "make lock      renew requirements.lock and requirements-cuda.lock"
	@echo "make clean     remove .venv and caches; runs/ stays"

train: $(STAMP)
	$(PY) run_train.py --config=quickstart
	$(PY) run_eval.py --workdir=$(RUN)
	@echo "TensorBoard: .venv/bin/tensorboard --logdir=$(RUN)"

test: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PYTEST)

test-all: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PYTEST) -m "not product"

# The stamp of a whole installation goes first and comes back last. Where .venv has none,
# an installation was cut short, and pip may take its leftovers for whole packages: so
# .venv is made anew, as it is when its Python no longer runs. (venv refuses a symbolic
# link, which .venv may be: hence pwd -P.)
setup: $(STAMP)

$(STAMP): $(LOCK) $(if $(RUNS),,broken)
	@mkdir -p .venv; \
	if [ "$(RUNS)" ] && ls .venv/.installed* >/dev/null 2>&1; then exit 0; fi; \
	for python in $(PYTHON); do \
	    if $$python -c 'import ensurepip, venv; $(IN_RANGE)' >/dev/null 2>&1; then \
	        exec $$python -m venv --clear "$$(cd .venv && pwd -P)"; fi; \
	done; \
	echo "make: found no Python 3.11, 3.12 or 3.13 that runs and has venv (tried:" \
	    "$(PYTHON)); install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
	exit 1
	@echo "Installing what $(LOCK) pins into .venv (2.4 GB, with CUDA 6.6 GB):" \
	    "1 to 3 minutes, once"
	@rm -f .venv/.installed*
	@awk '/^[^ ]/ { keep = /^(packaging|setuptools|wheel)==/ } keep' $(LOCK) \
	    >.venv/build.lock
	@{ $(INSTALL) -r .venv/build.lock && \
	    $(INSTALL) --no-build-isolation --use-pep517 -r $(LOCK); } || { \
	    echo "make: the installation failed; the next make starts it anew" >&2; exit 1; }
	@touch $@

lock: $(STAMP)
	$(PIP) install uv
	$(COMPILE) --output-file requirements.lock
	$(COMPILE) --extra cuda --output-file requirements-cuda.lock
	@! grep -nE 'https?://|--(extra-)?index|--find-links' requirements*.lock

clean:
	rm -rf .venv .pytest_cache .ruff_cache
	find configs docs tests towers benchmarks -name __pycache__ -prune -exec rm -rf {} +
