"""What workers compare, with what others would give in place of their answers."""

import numpy as np
import pytest

from towers.cluster import agreement
from towers.cluster.spec import Cluster
from towers.config import Config
from towers.data.sources import ArraySource, DataSet
from towers.errors import ConfigError, NumericError
from towers.parallel.devices import Devices
from towers.training import setup

ADDRESSES = ("a:1", "b:1", "c:1")
THREADS = "threads (TF_NUM_INTRAOP_THREADS)"
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


@pytest.mark.row(27)
def test_a_copy_that_differs_is_named():
    state = {"params/a": np.ones(3), "params/b": np.zeros(3)}
    agreement.validate_copies(Answers(), state)
    workers = Answers(**{"params/b": 7})
    with pytest.raises(NumericError, match=r"params/b of worker 2 \(c:1\) differs"):
        agreement.validate_copies(workers, state)


@pytest.mark.row(29)
def test_weights_that_a_worker_does_not_find_are_named():
    workers, own = Answers(center_crop=1.0), {"center_crop": 0.875}
    for init_from, words in (("", "'?s 0.875$"), ("runs/a", "init_from=runs/a$")):
        with pytest.raises(ConfigError, match=f"center_crop is 1.0 .*{words}"):
            agreement.validate_alike(workers, own, init_from)


@pytest.mark.row(29)
def test_other_pixels_of_as_many_images_are_refused():
    images = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 1), np.uint8)
    given = []

    def record(own):
        given.append(own)
        return [own] * 3

    workers = Answers()
    workers.exchange = record
    for brighter in (0, 1):
        agreement.validate_data(workers, data_set(images ^ brighter), 40)
    same, other = given
    different = {name for name in same if same[name] != other[name]}
    assert different == {"the checksum of 16 training images"}
    with pytest.raises(ConfigError, match=r"worker 2 .* the checksum of 16 training"):
        agreement.validate_data(Answers(**other), data_set(images), 40)


def exchanged(patch, **options):
    """What a worker tells the others when it joins."""
    told = []

    def exchange(own):
        told.append(own)
        return [own] * 3

    workers = Answers()
    workers.exchange = exchange
    patch.setattr(agreement, "connect", lambda *_, **__: workers)
    config = Config(strategy="multi_worker", model="speedrun", **options)
    cluster = Cluster(ADDRESSES, 0, "--cluster")
    assert setup.join_workers(cluster, config, CPU) is workers
    return told[0]


@pytest.mark.parametrize(
    "options,are_compared",
    [
        ({}, False),
        ({"clip_norm": 1.0}, True),
        ({"optimizer": "lars"}, True),
        ({"optimizer": "muon"}, True),
        ({"optimizer": "adamw"}, False),
    ],
)
def test_where_an_update_has_sums_their_rounding_must_be_alike(
    options, are_compared, monkeypatch
):
    """Each worker adds up by itself: the bits depend on its threads."""
    told = exchanged(monkeypatch, **options)
    assert told["devices"] == "1 CPU"
    assert ("processor" in told) == (THREADS in told) == are_compared
