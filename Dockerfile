# The image of docs/cluster.md. It was built once, with buildah on a Debian base and CUDA=0.
#
#     docker build -t registry.example/towers:0.2.0 .
#     docker build -t registry.example/towers:0.2.0-cuda --build-arg CUDA=1 .
#
# PYTHON may be 3.11 to 3.13. With CUDA=1 the CUDA libraries come from the lock, too; the
# machine adds its driver (NVIDIA Container Toolkit).

ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

ARG CUDA=0
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1

WORKDIR /opt/towers

# As `make setup` does: only what the lock of users names, exactly and by hash.
COPY requirements-build.lock requirements.lock requirements-cuda.lock ./
RUN case "$CUDA" in \
        0) lock=requirements.lock ;; \
        1) lock=requirements-cuda.lock ;; \
        *) echo "CUDA=$CUDA should be 0 or 1" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --require-hashes --no-deps -r requirements-build.lock \
    && pip install --no-cache-dir --require-hashes --no-deps \
        --no-build-isolation --use-pep517 -r "$lock"

COPY run_train.py run_eval.py run_predict.py run_export.py ./
COPY configs configs
COPY towers towers

RUN useradd --uid 1000 --create-home towers
USER 1000:1000
ENTRYPOINT ["python", "run_train.py"]
