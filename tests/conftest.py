"""Sets the process up for all tests: eight logical CPU devices, one BLAS thread."""

import gc
import os
import sys
import threading

import pytest

# Small products in the oracle; threads that wait for each other cost more than they do.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Variables of whoever runs the tests would change what towers and TensorFlow do.
for name in list(os.environ):
    if name.startswith(("KERAS_", "SLURM_", "TF_")) or name == "TOWERS_JOB":
        del os.environ[name]
# Processes that tests start say no more than by default.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

# For pytest to find.
from small_disk import small_disk  # noqa: E402, F401

import towers  # noqa: E402, F401  (settles Keras' backend before TensorFlow)
from towers.cli.imports import Finder  # noqa: E402

NUM_DEVICES = 8


def pytest_configure(config):
    is_controller = getattr(config.option, "numprocesses", None)
    if is_controller and not hasattr(config, "workerinput"):
        return  # of pytest-xdist, which runs no test
    if config.option.markexpr == "not slow":
        # Compiling for XLA takes longer than what small tests compute with it.
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    sys.meta_path.insert(0, Finder)
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_DEVICES)]
    )


def pytest_collection_finish(session):
    """TensorFlow's million objects stay, and those of the tests: each training collects
    garbage, and would look through them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Nor what the tests of a module leave, such as graphs that TensorFlow does not
    free."""
    if nextitem is None or nextitem.module is not item.module:
        gc.collect()
        gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--row", type=int, help="only tests of this row (reliability.md)")


def pytest_collection_modifyitems(config, items):
    if row := config.getoption("row"):
        items[:] = [
            item
            for item in items
            if any(row in mark.args for mark in item.iter_markers("row"))
        ]


@pytest.fixture(autouse=True, scope="session")
def quick_runs():
    """Draw no report, which takes a second; tests/report/test_run_report.py does. Do
    not wait for the disk, which matters only in a power cut."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towers.training.train.report_run", lambda *_: None)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def several_vectors(monkeypatch):
    """The larger parameters of `networks` are vectors of their own, as those of real
    networks are."""
    from towers.optim import vector

    monkeypatch.setattr(vector, "MIN_ALONE", 300)


@pytest.fixture
def small(monkeypatch):
    """The data set and the linear network of `small_runs` are those of runs."""
    import small_runs

    small_runs.use(monkeypatch)


@pytest.fixture
def half_way(small, tmp_path):
    """The folder of a small run that has taken five of its ten steps; its moving
    averages are not its parameters."""
    import small_runs

    return small_runs.half_way(tmp_path / "half_way")


@pytest.fixture
def no_pause(monkeypatch):
    """A save that has failed is tried again at once."""
    from towers.run import checkpointer

    monkeypatch.setattr(checkpointer, "RETRY_SECS", 0.0)


@pytest.fixture
def join_worker():
    """Waits for the workers that watchdogs have started, and abandoned, in the test."""
    before = threading.enumerate()

    def join():
        for thread in threading.enumerate():
            if thread.name == "worker" and thread not in before:
                thread.join(30)
                assert not thread.is_alive()

    return join
