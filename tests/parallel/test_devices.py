"""The devices of the towers, and messages if there are too few."""

import re

import pytest
import tensorflow as tf
from conftest import NUM_DEVICES
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

from towers.errors import ConfigError
from towers.parallel import devices
from towers.parallel.devices import configure

HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
without_gpu = pytest.mark.skipif(HAS_GPU, reason="there is a GPU")


def test_cpu_towers_have_a_logical_device_each():
    assert configure("cpu", 0).towers == ("/CPU:0",)
    found = configure("cpu", 4)
    assert (found.kind, found.remarks) == ("CPU", ())
    assert found.towers == tuple(f"/CPU:{i}" for i in range(4))
    places = set()
    for name in found.towers:
        with tf.device(name):
            places.add((tf.constant(1) + 1).device)
    assert len(places) == 4
    for num_towers in (0, 3):
        found = configure("cpu", num_towers, "5,0,3")
        assert found.towers == ("/CPU:5", "/CPU:0", "/CPU:3")


@pytest.mark.row(40)
@without_gpu
@pytest.mark.parametrize(
    "arguments,message",
    [
        (("cpu", NUM_DEVICES + 1), f"^num_towers={NUM_DEVICES + 1} .*{NUM_DEVICES} lo"),
        *(
            (("cpu", 0, order), f"^device_order={order}: .*0,1,4,5")
            for order in ("a", "0,,1", "0 1", "-1,0", "1,0,1", ",")
        ),
        (("cpu", 2, "0,1,2"), "names 3 devices, but num_towers=2"),
        # Row 40: more than a process may have.
        *(
            (("cpu", count, order), "^.{,150}than the 256 devices.{,50}$")
            for count, order in [(257, ""), (2**62, ""), (0, "0,256"), (0, "9" * 4000)]
        ),
        (("gpu", 0), "^device=gpu.*missing: nvidia-x"),
    ],
)
def test_devices_that_are_not_there_are_refused(monkeypatch, arguments, message):
    tf.config.list_logical_devices()  # From here on the devices are what they are.
    monkeypatch.setattr(devices, "unused_gpu", lambda: "missing: nvidia-x")
    with pytest.raises(ConfigError, match=message):
        configure(*arguments)


# Four GPUs that TensorFlow lists, but the machine does not have.


@pytest.fixture
def four_gpus(monkeypatch):
    """Simulate a machine with four GPUs, before TensorFlow creates its devices."""
    names = [b"/physical_device:CPU:0"]
    names += [b"/physical_device:GPU:%d" % number for number in range(4)]
    monkeypatch.setattr(pywrap_tfe, "TF_ListPhysicalDevices", lambda: names)
    monkeypatch.setattr(context, "_context", context.Context())


def configured():
    """Return visible GPUs, memory growth and memory limits, as TensorFlow has them."""
    config = context.context().config
    options = config.gpu_options
    gpus = options.visible_device_list if config.device_count["GPU"] else ""
    limits = [list(x.memory_limit_mb) for x in options.experimental.virtual_devices]
    return gpus, options.allow_growth, limits


@pytest.mark.parametrize(
    "device,num_towers,device_order,towers,gpus",
    [
        ("auto", 0, "", "/GPU:0 /GPU:1 /GPU:2 /GPU:3", "0,1,2,3"),
        ("gpu", 1, "", "/GPU:0", "0"),
        ("auto", 2, "", "/GPU:0 /GPU:1", "0,1"),
        ("gpu", 0, "2", "/GPU:0", "2"),
        ("auto", 3, "3,0,1", "/GPU:2 /GPU:0 /GPU:1", "0,1,3"),
        ("cpu", 1, "", "/CPU:0", ""),
    ],
)
def test_only_the_gpus_of_the_towers_are_made(
    four_gpus, device, num_towers, device_order, towers, gpus
):
    found = configure(device, num_towers, device_order)
    assert " ".join(found.towers) == towers
    assert configured() == (gpus, bool(gpus), [])


@pytest.mark.parametrize(
    "num_towers,device_order,towers,gpus",
    [
        (2, "", "/GPU:0 /GPU:1", "0,1"),
        (6, "", "/GPU:0 /GPU:1 /GPU:2 /GPU:3 /GPU:4 /GPU:5", "0,1,2"),
        (0, "5,0", "/GPU:3 /GPU:0", "0,2"),  # two on each GPU: 5 is of the third
    ],
)
def test_a_memory_limit_makes_logical_gpus(
    four_gpus, num_towers, device_order, towers, gpus
):
    found = configure("gpu", num_towers, device_order, device_memory_mb=2**21 / 1e3)
    assert " ".join(found.towers) == towers
    per_gpu = 1 if num_towers == 2 else 2
    count = len(gpus.split(","))
    assert configured() == (gpus, False, [[2000] * per_gpu] * count)  # MiB
    assert found.share_gpus == (per_gpu > 1)


@without_gpu
@pytest.mark.parametrize(
    "first,then,towers,remark",
    [
        (("gpu", 2), ("gpu", 2), "/GPU:0 /GPU:1", ""),
        (("gpu", 2), ("auto", 1), "/GPU:0", ""),
        (("gpu", 0, "2,3"), ("gpu", 0, "3,2"), "/GPU:1 /GPU:0", "GPUs 2, 3 are"),
        (("gpu", 0, "2,3"), ("gpu", 0, "3"), "/GPU:1", "GPUs 2, 3 are"),
        (("gpu", 0, "2,3"), ("gpu", 1), "/GPU:0", "GPUs 2, 3 are"),
        (("gpu", 2), ("cpu", 1), "/CPU:0", ""),
        (("cpu", 2), ("cpu", 1), "/CPU:0", ""),
        # All that there are, and a line about the others.
        (("gpu", 2), ("auto", 0), "/GPU:0 /GPU:1", "2 of 4 GPU.* restart it"),
        (("cpu", 1), ("auto", 0), "/CPU:0", "no GPU.* 0 of 4 GPU.* restart it"),
    ],
)
def test_a_second_call_gets_the_devices_that_tensorflow_has_made(
    four_gpus, first, then, towers, remark
):
    configure(*first)
    context.context().ensure_initialized()
    found = configure(*then)
    assert " ".join(found.towers) == towers
    remarks = " ".join(found.remarks)
    assert re.search(remark, remarks) if remark else not remarks


@pytest.mark.row(16)
@without_gpu
@pytest.mark.parametrize(
    "first,then,message",
    [
        (("gpu", 2), ("auto", 3), "num_towers=3 .*2 of 4 GPU.* restart it"),
        (("gpu", 2), ("gpu", 0, "0,3"), "device_order=0,3: 2 of 4 GPU.* restart it"),
        (("cpu", 1), ("gpu", 0), "device=gpu: .*0 of 4 GPU.* restart it"),
        (("gpu", 2, "", 500), ("gpu", 2), "device_memory_mb=0 .* restart it"),
        (("cpu", 2), ("cpu", 3), "num_towers=3 with 2 logical CPU .* restart it"),
        ((), ("auto", 5), r"num_towers=5 .*with 4 GPU\(s\)"),
        ((), ("auto", 0, "0,4"), r"GPU 4 with 4 GPU\(s\)"),
    ],
)
def test_gpus_that_are_not_there_are_refused(four_gpus, first, then, message):
    if first:
        configure(*first)
        context.context().ensure_initialized()
    with pytest.raises(ConfigError, match=message):
        configure(*then)
