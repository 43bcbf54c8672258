"""Which devices the towers get, and what is said where there are too few."""

import importlib.metadata

import pytest
import tensorflow as tf
from conftest import NUM_DEVICES

from towers.errors import ConfigError
from towers.parallel import devices
from towers.parallel.devices import configure, missing_cuda_packages

HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
without_gpu = pytest.mark.skipif(HAS_GPU, reason="there is a GPU")


@pytest.mark.parametrize("num_towers", [1, 2, 4, NUM_DEVICES])
def test_cpu_towers_have_a_logical_device_each(num_towers):
    found = configure("cpu", num_towers)
    assert found.kind == "CPU"
    assert found.towers == tuple(f"/CPU:{i}" for i in range(num_towers))
    places = set()
    for name in found.towers:
        with tf.device(name):
            places.add((tf.constant(1) + 1).device)
    assert len(places) == num_towers


def test_without_a_number_there_is_one_cpu_tower():
    assert configure("cpu", 0).towers == ("/CPU:0",)


def test_a_cpu_that_was_asked_for_needs_no_remark():
    assert configure("cpu", 2).remarks == ()


@pytest.mark.parametrize(
    "num_towers,core_per_tower,expected",
    [(1, True, []), (3, True, []), (4, True, [1]), (6, True, [1]), (4, False, [])],
)
def test_as_many_towers_as_cores_have_a_thread_each(
    monkeypatch, num_towers, core_per_tower, expected
):
    threads = []
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: {0, 1, 6, 7})
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda _: None)
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda *_: None)
    monkeypatch.setattr(
        tf.config.threading, "set_intra_op_parallelism_threads", threads.append
    )
    configure("cpu", num_towers, core_per_tower=core_per_tower)
    assert threads == expected


def test_more_cpu_towers_than_can_be_made_are_refused_with_both_numbers():
    tf.config.list_logical_devices()  # From here on the devices are what they are.
    with pytest.raises(ConfigError) as caught:
        configure("cpu", NUM_DEVICES + 1)
    assert f"num_towers={NUM_DEVICES + 1}" in str(caught.value)
    assert f"{NUM_DEVICES} logical" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("num_towers", [0, 3])
def test_devices_are_taken_in_the_order_that_is_given(num_towers):
    found = configure("cpu", num_towers, "5,0,3")
    assert found.towers == ("/CPU:5", "/CPU:0", "/CPU:3")


@pytest.mark.parametrize("order", ["a", "0,,1", "0 1", "-1,0", "1,0,1", ","])
def test_an_order_that_is_no_list_of_devices_is_refused(order):
    with pytest.raises(ConfigError, match=f"^device_order={order}: .*0,1,4,5"):
        configure("cpu", 0, order)


def test_an_order_of_another_length_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="names 3 devices, but num_towers=2"):
        configure("cpu", 2, "0,1,2")


@without_gpu
def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "unused_gpu", lambda: "")
    with pytest.raises(ConfigError, match="^device=gpu.*--device=cpu") as caught:
        configure("gpu", 0)
    assert caught.value.exit_code == 2


@without_gpu
def test_a_gpu_that_tensorflow_cannot_use_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(devices, "unused_gpu", lambda: "missing: nvidia-x")
    with pytest.raises(ConfigError, match="device=gpu.*missing: nvidia-x"):
        configure("gpu", 0)


@without_gpu
def test_auto_takes_the_cpu_and_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr(devices, "unused_gpu", lambda: "")
    found = configure("auto", 2)
    assert (found.kind, found.towers) == ("CPU", ("/CPU:0", "/CPU:1"))
    (remark,) = found.remarks
    assert "no GPU" in remark and "CPU" in remark and "\n" not in remark


@without_gpu
def test_auto_says_what_is_missing_where_the_driver_sees_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "unused_gpu", lambda: "missing: nvidia-x")
    assert configure("auto", 1).remarks[1:] == ("missing: nvidia-x",)


# GPUs, as TensorFlow would list them.


@pytest.fixture
def two_gpus(monkeypatch):
    """The list of devices and what is set for them, on a machine with two GPUs."""
    gpus, growing = ["GPU:0", "GPU:1"], []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(
        tf.config.experimental,
        "set_memory_growth",
        lambda gpu, grow: growing.append(gpu) if grow else None,
    )
    return growing


@pytest.mark.parametrize("device", ["auto", "gpu"])
@pytest.mark.parametrize("num_towers,expected", [(0, 2), (1, 1), (2, 2)])
def test_by_default_every_gpu_has_a_tower(two_gpus, device, num_towers, expected):
    found = configure(device, num_towers)
    assert found.kind == "GPU"
    assert found.towers == tuple(f"/GPU:{i}" for i in range(expected))
    assert two_gpus == ["GPU:0", "GPU:1"], "memory grows on all that will be opened"


def test_a_memory_limit_makes_logical_gpus(two_gpus, monkeypatch):
    made = {}
    monkeypatch.setattr(
        tf.config,
        "set_logical_device_configuration",
        lambda gpu, logical: made.update({gpu: [d.memory_limit for d in logical]}),
    )
    found = configure("gpu", 3, device_memory_mb=2**21 / 1e3)
    assert found.towers == ("/GPU:0", "/GPU:1", "/GPU:2")
    assert made == {"GPU:0": [2000, 2000], "GPU:1": [2000, 2000]}  # MiB


def test_gpus_that_tensorflow_has_set_up_already_are_used_or_refused_in_a_line(
    two_gpus, monkeypatch
):
    def refuse(error):
        def call(*_):
            raise error

        return call

    growth = "set_memory_growth"
    monkeypatch.setattr(tf.config.experimental, growth, refuse(RuntimeError()))
    found = configure("gpu", 2)
    assert found.towers == ("/GPU:0", "/GPU:1")
    assert "taken all memory" in found.remarks[0]
    monkeypatch.setattr(tf.config.experimental, growth, refuse(ValueError()))
    with pytest.raises(ConfigError, match="device_memory_mb=0 .* restart it"):
        configure("gpu", 2)
    name = "set_logical_device_configuration"
    monkeypatch.setattr(tf.config, name, refuse(RuntimeError()))
    with pytest.raises(ConfigError, match="device_memory_mb=500 .* restart it"):
        configure("gpu", 2, device_memory_mb=500)


def test_more_towers_than_gpus_are_refused_with_both_numbers(two_gpus):
    with pytest.raises(ConfigError, match=r"num_towers=3 .*with 2 GPU\(s\)"):
        configure("auto", 3)


def test_a_gpu_beyond_the_last_is_refused_with_both_numbers(two_gpus):
    assert configure("auto", 0, "1,0").towers == ("/GPU:1", "/GPU:0")
    with pytest.raises(ConfigError, match=r"GPU 2 with 2 GPU\(s\)"):
        configure("auto", 0, "0,2")


# Packages.

REQUIREMENTS = [
    "numpy>=1.26.0",
    "nvidia-cublas-cu12<13.0,>=12.5.3.2; extra == 'and-cuda'",
    'nvidia-nccl-cu12[x]==2.25.1; extra == "and-cuda"',
    "nvidia-of-another-extra; extra == 'other'",
]


def test_missing_packages_are_those_of_the_cuda_extra_that_are_not_installed(
    monkeypatch,
):
    def version(name):
        if name != "nvidia-cublas-cu12":
            raise importlib.metadata.PackageNotFoundError(name)
        return "12.5"

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIREMENTS)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert missing_cuda_packages() == ["nvidia-nccl-cu12"]


def test_a_tensorflow_without_such_an_extra_misses_nothing(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: None)
    assert missing_cuda_packages() == []


def test_the_installed_tensorflow_names_its_cuda_packages(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    missing = missing_cuda_packages()
    assert len(missing) > 5
    assert all(name.startswith("nvidia-") for name in missing)


@without_gpu
@pytest.mark.parametrize(
    "num_towers,device_order",
    [(devices.MOST_DEVICES + 1, ""), (2**62, ""), (0, "0,256"), (0, "9" * 4000)],
)
def test_row_40_more_towers_than_a_process_may_have_are_refused(
    num_towers, device_order
):
    with pytest.raises(ConfigError, match="than the 256 devices") as caught:
        configure("cpu", num_towers, device_order)
    assert len(str(caught.value)) < 200
