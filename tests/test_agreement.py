"""What workers compare, with what others would give in place of their answers."""

import contextlib
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from towers.config import Config
from towers.config.cluster_spec import Cluster
from towers.data.sources import ArraySource, DataSet
from towers.errors import ConfigError, NumericError
from towers.parallel.devices import Devices
from towers.run import peers

ADDRESSES = ("a:1", "b:1", "c:1")
CPU = Devices("CPU", ("/CPU:0",))


class Answers:
    """Workers that all have what this one has, but for some changes of the last."""

    index, size, addresses, is_chief = 0, 3, ADDRESSES, True

    def __init__(self, **changes):
        self._changes = changes

    def exchange(self, own):
        return [own, own, own | self._changes]


def data_set(images):
    source = ArraySource(images, np.arange(len(images)) % 3)
    return DataSet("made up", source, source, ("x", "y", "z"), (0.0,), (1.0,), "")


def test_a_copy_that_differs_is_named():
    state = {"params/a": np.ones(3), "params/b": np.zeros(3)}
    trainer = types.SimpleNamespace(state=lambda: state)
    watchdog = types.SimpleNamespace(activity=contextlib.nullcontext)
    run = types.SimpleNamespace(workers=Answers(), trainer=trainer, watchdog=watchdog)
    peers.validate_copies(run)
    run.workers = Answers(**{"params/b": 7})
    with pytest.raises(NumericError, match=r"params/b of worker 2 \(c:1\) differs"):
        peers.validate_copies(run)


def test_other_pixels_of_as_many_images_are_refused():
    images = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 1), np.uint8)
    given = []

    def record(own):
        given.append(own)
        return [own] * 3

    workers = Answers()
    workers.exchange = record
    for brighter in (0, 1):
        peers.validate_data(workers, data_set(images ^ brighter), 40)
    same, other = given
    different = {name for name in same if same[name] != other[name]}
    assert different == {"the checksum of 16 training images"}
    with pytest.raises(ConfigError, match="worker 2 .* the checksum of 16 training"):
        peers.validate_data(Answers(**other), data_set(images), 40)


@pytest.mark.parametrize(
    "changes,are_compared",
    [
        ({}, False),
        ({"clip_norm": 1.0}, True),
        ({"optimizer": "lars"}, True),
        ({"optimizer": "muon"}, True),
        ({"optimizer": "adamw"}, False),
    ],
)
def test_where_an_update_has_sums_their_rounding_must_be_alike(
    changes, are_compared, monkeypatch
):
    """Each worker adds up by itself: the bits depend on its threads."""
    seen = {}
    monkeypatch.setattr(peers, "connect", lambda *_, **__: Answers())
    monkeypatch.setattr(peers, "validate_alike", lambda _, own: seen.update(own))
    config = Config(strategy="multi_worker", model="speedrun", **changes)
    peers.join(Cluster(ADDRESSES, 0, "--cluster"), config, CPU)
    assert seen["devices"] == "1 CPU"
    assert ("processor" in seen) == are_compared


# Prints how many threads TensorFlow has made, and how many towers says that it makes.
THREADS = """
import os, sys
import tensorflow as tf
from towers.run import peers
if by_program := int(sys.argv[1]):
    tf.config.threading.set_intra_op_parallelism_threads(by_program)
before = len(os.listdir("/proc/self/task"))
tf.constant(1) + 1
print(len(os.listdir("/proc/self/task")) - before, peers._num_threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_the_number_of_threads_is_that_of_tensorflow():
    others = set()
    for by_variable, by_program in [("0", 0), (" 5 ", 0), ("7", 0), ("7", 3)]:
        done = subprocess.run(
            [sys.executable, "-c", THREADS, str(by_program)],
            env=os.environ | {"TF_NUM_INTRAOP_THREADS": by_variable},
            capture_output=True,
            text=True,
        )
        made, expected = map(int, done.stdout.split())
        others.add(made - expected)  # as many of other kinds each time
    assert len(others) == 1


def test_the_variable_that_the_message_names_counts(monkeypatch):
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", int)
    for value, expected in [("3", 3), (" 3 ", 3), ("", 6), ("0", 6)]:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", value)
        monkeypatch.setattr(peers, "num_cores", lambda: 6)
        assert peers._arithmetic(CPU)["threads (TF_NUM_INTRAOP_THREADS)"] == expected


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "٣", "9" * 5000])
def test_what_is_no_number_of_threads_is_refused(value, monkeypatch):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", value)
    with pytest.raises(ConfigError, match="TF_NUM_INTRAOP_THREADS=.*number of threads"):
        peers._num_threads()


def test_runs_of_one_process_in_a_step_of_slurm_are_their_own():
    by_slurm = Cluster(ADDRESSES, 0, "Slurm")
    assert peers.cluster_of(Config(), by_slurm, False) is None
    with pytest.raises(ConfigError, match="set --strategy=multi_worker"):
        peers.cluster_of(Config(), Cluster(ADDRESSES, 0, "TF_CONFIG"), False)
