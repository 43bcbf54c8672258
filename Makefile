# make train | test | test-all | lock | clean          (GNU make 3.81 or later)
#
#   PYTHON=python3.12    the Python that .venv is made with (3.11 to 3.13)
#   CUDA=0, CUDA=1       without or with the CUDA packages; by default with them where
#                        nvidia-smi answers

PYTHON ?= python3 python3.13 python3.12 python3.11
CUDA ?=
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

IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

.PHONY: help setup train test test-all lock clean

help:
	@echo "make train     set up .venv, train and evaluate the quickstart"
	@echo "make test      set up .venv, then ruff and the fast tests"
	@echo "make test-all  the same with the slow tests"
	@echo "make lock      renew requirements.lock and requirements-cuda.lock"
	@echo "make clean     remove .venv and caches; runs/ stays"

train: setup
	$(PY) run_train.py --config=quickstart
	$(PY) run_eval.py --workdir=$(RUN)
	@echo "TensorBoard: .venv/bin/tensorboard --logdir=$(RUN)"

test: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PYTEST)

test-all: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PYTEST) -m "slow or not slow"

# .venv/.installed is a copy of the lock that .venv was installed from: while both are
# the same there is nothing to do. .venv/.unfinished stands while an installation runs;
# found at the start, it tells of one that was cut short, whose leftovers pip may take
# for whole packages. (venv refuses a symbolic link, which .venv may well be: pwd -P.)
setup:
	@set -e; \
	fail() { echo "make: $$1" >&2; exit 1; }; \
	case "$(CUDA)" in \
	0) lock=requirements.lock ;; \
	1) lock=requirements-cuda.lock ;; \
	"") lock=requirements.lock; \
	    if nvidia-smi >/dev/null 2>&1; then lock=requirements-cuda.lock; fi ;; \
	*) fail "CUDA=$(CUDA) should be 0 (CPU) or 1 (GPUs), or not be set" ;; \
	esac; \
	if [ -e .venv/.unfinished ]; then \
	    echo "The last installation was cut short: making .venv anew."; \
	    find .venv/ -mindepth 1 -maxdepth 1 ! -name .unfinished -exec rm -rf {} +; \
	fi; \
	if [ ! -e $(PY) ] && [ ! -L $(PY) ]; then \
	    python=; \
	    for p in $(PYTHON); do \
	        if $$p -c 'import ensurepip, venv; $(IN_RANGE)' >/dev/null 2>&1; \
	        then python=$$p; break; fi; \
	    done; \
	    [ "$$python" ] || fail "found no Python 3.11, 3.12 or 3.13 that runs and has \
	venv (tried: $(PYTHON)); install one, or name it: make PYTHON=/path/to/python3.12"; \
	    mkdir -p .venv; \
	    : >.venv/.unfinished; \
	    $$python -m venv "$$(cd .venv && pwd -P)" || \
	        fail "could not make .venv with $$python"; \
	fi; \
	$(PY) -c 'pass' >/dev/null 2>&1 || fail "$(PY) no longer runs (its Python was \
	moved or removed); make clean, then try again"; \
	$(PY) -c '$(IN_RANGE)' || fail "$(PY) is `$(PY) -V`, and 3.11 to 3.13 is needed; \
	make clean, then try again"; \
	if cmp -s $$lock .venv/.installed; then exit 0; fi; \
	echo "Installing what $$lock pins into .venv (2.4 GB, with CUDA 6.6 GB):" \
	    "1 to 3 minutes, once"; \
	: >.venv/.unfinished; \
	$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null; \
	awk '/^[^ ]/ { keep = /^(packaging|setuptools|wheel)==/ } keep' $$lock \
	    >.venv/build.lock; \
	$(INSTALL) -r .venv/build.lock && \
	$(INSTALL) --no-build-isolation --use-pep517 -r $$lock || \
	    fail "the installation failed; the next make starts it anew"; \
	cp $$lock .venv/.installed; \
	rm .venv/.unfinished

lock: setup
	$(PIP) install uv
	$(COMPILE) --output-file requirements.lock
	$(COMPILE) --extra cuda --output-file requirements-cuda.lock
	@! grep -nE 'https?://|--(extra-)?index|--find-links' requirements*.lock

clean:
	rm -rf .venv .pytest_cache .ruff_cache
	find configs docs tests towers benchmarks -name __pycache__ -prune -exec rm -rf {} +
