# make train | lint | test | test-all | test-keras | test-onnx | test-ray |
# test-torch | test-track | test-types | docs | notebook | dist | lock | clean   (GNU make 3.81 or later)
#
#   PYTHON=python3.12    the Python that .venv is made with (3.11 to 3.13)
#   CUDA=0, CUDA=1       without or with the CUDA packages; by default (auto) with them
#                        where nvidia-smi answers

PYTHON ?= python3 python3.13 python3.12 python3.11
CUDA ?= auto
# For `make test-torch`: TORCH=torch==2.13.0+cpu takes a wheel without CUDA, where pip
# finds one.
TORCH ?= torch
# For `make test-keras`: versions of Keras, each with one of TensorFlow.
KERAS ?= 3.4.1-2.16.2 3.8.0-2.18.1 3.12.0-2.20.0 3.13.2-2.20.0 3.14.1-2.21.0
# For `make lock`: UV_FLAGS=--upgrade takes the newest versions instead of keeping pins.
UV_FLAGS ?=

RUN := runs/quickstart
PY := .venv/bin/python
# In two processes: what takes the time is tracing, on one core. Each would rewrite the
# assertions of all tests anew where the environment keeps no bytecode.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 2 --dist worksteal
PIP := -m pip -qq --disable-pip-version-check --no-input
# Only the packages that a lock names, exactly and by hash.
INSTALL := $(PY) $(PIP) install --require-hashes --no-deps
COMPILE := .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 \
    --fork-strategy fewest --generate-hashes --no-annotate --no-emit-index-url \
    --custom-compile-command "make lock" $(UV_FLAGS)

# The package itself, as a link to this folder: a program anywhere can import towers.
LINK := { $(PY) $(PIP) install --no-deps --no-index --no-build-isolation -e . && \
    echo "$(CURDIR)" >.venv/.linked; }

GPUS := $(CUDA)
ifeq ($(filter-out auto,$(CUDA)),)
    GPUS := $(shell nvidia-smi >/dev/null 2>&1 && echo 1 || echo 0)
endif
LOCK_0 := requirements.lock
LOCK_1 := requirements-cuda.lock
LOCK := $(LOCK_$(GPUS))
# All of requirements.lock, and what the tests need.
DEV := requirements-dev.lock
ifeq ($(LOCK),)
    $(error CUDA=$(CUDA) should be 0 (CPU), 1 (GPUs) or auto)
endif
IN_RANGE := import ensurepip, sys, venv; \
    sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
FIND_PYTHON = for python in $(PYTHON) none; do \
    $$python -c '$(IN_RANGE)' >/dev/null 2>&1 && break; done; \
    [ $$python != none ] || { echo "make: found no Python 3.11, 3.12 or 3.13 that runs" \
        "and has venv (tried: $(PYTHON)); install one, or name it:" \
        "make PYTHON=/path/to/python3.12" >&2; exit 1; }

FAILED := { echo "make: the installation failed; the next make starts it anew" >&2; \
    exit 1; }

.PHONY: help setup setup-dev train lint test test-all test-keras test-onnx test-ray \
    test-torch test-track test-types docs notebook dist lock clean

help:
	@echo "make train      set up .venv, train and evaluate the quickstart"
	@echo "make lint       set up .venv, then ruff, mypy, deptry and codespell"
	@echo "make test       the same, then the fast tests"
	@echo "make test-all   the same with the slow tests"
	@echo "make test-keras Keras exports in older versions, in .venv-keras-*"
	@echo "make test-onnx  the tests of ONNX and TFLite exports, in .venv-onnx"
	@echo "make test-ray   the tests on a cluster of Ray, in .venv-ray"
	@echo "make test-torch the tests against timm, torchvision and transformers"
	@echo "make test-track the tests of MLflow, W&B and Optuna, in .venv-track"
	@echo "make docs       build the guides and the API as a site, in build/docs/"
	@echo "make test-types mypy alone, which make lint runs too"
	@echo "make dist       build the wheel and the source distribution, in dist/"
	@echo "make notebook   runs docs/photos.ipynb again, in .venv-notebook"
	@echo "make lock       renew the files requirements*.lock"
	@echo "make clean      remove .venv*, dist/ and caches; runs/ stays"

train: setup
	$(PY) run_train.py --config=quickstart
	$(PY) run_eval.py --workdir=$(RUN)
	@echo "TensorBoard: .venv/bin/tensorboard --logdir=$(RUN)"

lint: setup-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/deptry towers
	.venv/bin/codespell

test-types: setup-dev
	$(PY) -m mypy

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ""

# .venv/.installed is a copy of the lock that is installed whole, .venv/.installed-dev of
# the lock of the tests. They are removed first and written last: without .installed, an
# installation was interrupted, and pip may take its remains for whole packages. Then
# .venv is made anew, also when its Python no longer runs. (venv refuses a symbolic link,
# which .venv may be: hence pwd -P.)
setup:
	@runs() { $(PY) -c '$(IN_RANGE)' 2>/dev/null; }; \
	if cmp -s $(LOCK) .venv/.installed && runs; then \
	    [ "$$(cat .venv/.linked 2>/dev/null)" = "$(CURDIR)" ] || $(LINK); exit; \
	fi; \
	if ! [ -e .venv/.installed ] || ! runs; then \
	    $(FIND_PYTHON); mkdir -p .venv; \
	    $$python -m venv --clear "$$(cd .venv && pwd -P)" || exit 1; \
	fi; \
	echo "Installing what $(LOCK) pins into .venv (2.4 GB, with CUDA 6.6 GB):" \
	    "1 to 3 minutes, once"; \
	rm -f .venv/.installed; \
	$(INSTALL) -r requirements-build.lock && \
	    $(INSTALL) --no-build-isolation --use-pep517 -r $(LOCK) && \
	    $(LINK) && cp $(LOCK) .venv/.installed || $(FAILED)

setup-dev: setup
	@cmp -s $(DEV) .venv/.installed-dev && exit 0; \
	echo "Installing what $(DEV) pins besides, for the tests"; \
	rm -f .venv/.installed .venv/.installed-dev; \
	$(INSTALL) --no-build-isolation --use-pep517 -r $(DEV) && \
	    cp $(DEV) .venv/.installed-dev && cp $(LOCK) .venv/.installed || $(FAILED)

# Environments of their own: what they install may be other versions than those pinned.
.venv-%/bin/python:
	@$(FIND_PYTHON); $$python -m venv .venv-$*

# PYTHON=python3.11 or 3.12: TensorFlow 2.16 and 2.18 have no wheels for 3.13.
KERAS_PYTHONS := $(KERAS:%=.venv-keras-%/bin/python)
test-keras: setup-dev $(KERAS_PYTHONS)
	for pair in $(KERAS); do .venv-keras-$$pair/bin/python $(PIP) install \
	    keras==$${pair%-*} tensorflow-cpu==$${pair#*-} || exit 1; done
	TOWERS_TEST_KERAS="$(KERAS_PYTHONS:%=$(CURDIR)/%)" $(PY) -m pytest -m slow \
	    tests/exporting/test_keras_versions.py

test-onnx: .venv-onnx/bin/python
	$< $(PIP) install -e '.[onnx,test]' ai-edge-litert mediapipe
	$< -m pytest -m slow -k "onnx or tflite or mediapipe" tests/exporting/test_export_outside.py

test-ray: .venv-ray/bin/python
	$< $(PIP) install -e '.[ray,test]' 'ray[tune]'
	$< -m pytest -m "" tests/test_on_ray.py

# torchvision is imported before TensorFlow: the LLVM of its Triton crashes after that of
# TensorFlow.
test-torch: .venv-torch/bin/python
	$< $(PIP) install -e '.[test]' $(TORCH) timm torchvision transformers
	$< -m pytest -m slow -p torchvision tests/models/test_torch.py
	$< -m pytest -m slow -p torchvision -k safetensors tests/exporting/test_export_outside.py

test-track: .venv-track/bin/python
	$< $(PIP) install -e '.[mlflow,wandb,test]' optuna
	$< -m pytest -m slow tests/test_callbacks.py

# The wheel is built from the source distribution, which has no remains of earlier builds.
dist: setup
	rm -rf dist *.egg-info
	$(PY) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' \
	    >/dev/null
	$(PY) $(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

docs: .venv-docs/bin/python
	$< $(PIP) install -e '.[docs]'
	TF_CPP_MIN_LOG_LEVEL=3 $< -m sphinx -qW --keep-going -c docs . build/docs
	@echo "build/docs/docs/index.html"

# In a new folder, whose path is taken out of what was printed. GitHub shows the outputs.
notebook: .venv-notebook/bin/python
	$< $(PIP) install -e . ipykernel nbconvert
	folder=$$(mktemp -d) && cp docs/photos.ipynb $$folder && cd $$folder && \
	convert="$(CURDIR)/$< -m nbconvert --to notebook --inplace photos.ipynb" && \
	$$convert --execute --ExecutePreprocessor.record_timing=False \
	    --ExecutePreprocessor.extra_arguments=--InlineBackend.figure_formats=jpeg && \
	$$convert --coalesce-streams && \
	sed "s#$$folder/##g" photos.ipynb > $(CURDIR)/docs/photos.ipynb && rm -r $$folder

lock: .venv-lock/bin/python
	$< $(PIP) install uv
	$(COMPILE) --extra test --extra pretrained pyproject.toml --output-file $(DEV)
	$(COMPILE) --extra pretrained pyproject.toml --constraint $(DEV) \
	    --output-file requirements.lock
	$(COMPILE) --extra pretrained --extra cuda pyproject.toml --constraint $(DEV) \
	    --output-file requirements-cuda.lock
	printf 'packaging\nsetuptools\nwheel\n' | $(COMPILE) - \
	    --constraint requirements.lock --output-file requirements-build.lock
	@! grep -nE 'https?://|--(extra-)?index|--find-links' requirements*.lock

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache build dist *.egg-info
	find configs docs tests towers benchmarks -name __pycache__ -prune -exec rm -rf {} +
