"""Sizes beyond the machine are refused before anything is allocated (row 40)."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from marks import slow

from towers import build, models
from towers.config import Config
from towers.config.choices import FAMILY, MODELS
from towers.errors import ConfigError
from towers.run import sizes

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = {"dataset": "synthetic", "augment": "none", "model": "lenet", "device": "cpu"}
SHAPE = (32, 32, 3)  # of synthetic images


def refusal(**options):
    with pytest.raises(ConfigError) as caught:
        build.build(Config(**SMALL | options))
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 400
    return str(caught.value)


# The limit.


def machine(root, memory_kb=1000, swap_kb=24, cgroup="", **files):
    """The files in which Linux says how much memory there is; `_` stands for `/`."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:  {memory_kb} kB\nMemFree: 1 kB\nSwapTotal: {swap_kb} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name.replace("_DOT_", ".").replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


@pytest.mark.parametrize(
    "cgroup,files,expected",
    [
        ("", {}, 1024 * 1024),
        ("0::/\n", {}, 1024 * 1024),
        ("0::/\n", {"memory_DOT_max": "max"}, 1024 * 1024),
        ("0::/\n", {"memory_DOT_max": 5000}, 5000 + 24 * 1024),
        (
            "0::/\n",
            {"memory_DOT_max": 5000, "memory_DOT_swap_DOT_max": 0},
            5000,
        ),
        (
            "0::/\n",
            {"memory_DOT_max": 5000, "memory_DOT_swap_DOT_max": 70},
            5070,
        ),
        # The groups in which this one is count as well.
        (
            "0::/a/b\n",
            {"a__b__memory_DOT_max": "max", "a__memory_DOT_max": 600},
            600 + 24 * 1024,
        ),
        # Version 1, and a container that sees the path of its host.
        (
            "5:cpu:/x\n4:memory:/pods/7\n",
            {"memory__memory_DOT_limit_in_bytes": 700},
            700 + 24 * 1024,
        ),
        (
            "4:memory:/\n",
            {"memory__memory_DOT_limit_in_bytes": 2**63 - 4096},
            1024 * 1024,
        ),
    ],
)
def test_the_limit_is_the_least_of_machine_and_cgroups(
    tmp_path, cgroup, files, expected
):
    limit = sizes.memory_limit(machine(tmp_path, cgroup=cgroup, **files))
    assert limit.num_bytes == expected


def test_without_the_files_of_linux_no_limit_is_known(tmp_path):
    assert sizes.memory_limit(tmp_path) is None


def test_the_limit_here_is_not_below_the_memory_in_use():
    import resource

    used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = sizes.memory_limit()
    assert used < limit.num_bytes
    if limit.name.startswith("memory and swap of this machine"):
        assert 0.9 * physical <= limit.num_bytes


# The batch.


@pytest.mark.row(40)
def test_a_batch_beyond_the_memory_is_refused_with_bytes_and_limit():
    limit = sizes.memory_limit().num_bytes
    message = refusal(batch_size=2_000_000_000)
    bytes_needed = 2_000_000_000 * np.zeros(SHAPE, np.float32).nbytes
    assert message.startswith("batch_size=2000000000: ")
    assert f"{bytes_needed / 1e9:,.1f} GB" in message
    assert f"{limit / 1e9:,.1f} GB" in message
    message = refusal(batch_size=32, accumulate_steps=10**9)
    assert message.startswith("batch_size=32 with accumulate_steps=1000000000: ")
    refusal(batch_size=2**63 - 1, accumulate_steps=2**63 - 1)


def test_a_batch_that_might_just_fit_is_not_refused():
    limit = sizes.memory_limit().num_bytes
    most = limit // np.zeros(SHAPE, np.float32).nbytes
    sizes.check_batch(Config(**SMALL, batch_size=most), most, SHAPE)
    with pytest.raises(ConfigError):
        sizes.check_batch(Config(**SMALL, batch_size=most + 1), most + 1, SHAPE)


def test_an_evaluation_has_batches_of_its_own():
    config = Config(**SMALL, batch_size=32, accumulate_steps=10**9)
    build.build(config, for_training=False)


# The network.


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("cnn", "lenet", "resnet20", "speedrun") else slow(name)
        for name in (x.replace(FAMILY, "MobileNetV3Small") for x in MODELS)
    ],
)
def test_bytes_are_counted_as_they_will_be_allocated(name):
    counted = []
    model = models.create_model(
        name,
        image_shape=SHAPE,
        num_classes=10,
        width=0.5,
        precision="float64" if name == "lenet" else "float32",
        check_bytes=lambda *numbers: counted.append(numbers),
    )
    kinds = model.trainable_variables, model.non_trainable_variables
    assert counted == [tuple(sum(v.numpy().nbytes for v in kind) for kind in kinds)]


@pytest.mark.parametrize("width", [1e4, 1e9, 1e12, 1e15, 1e30])
@pytest.mark.parametrize("model", ["lenet", "cnn", slow("resnet20"), slow("alexnet")])
@pytest.mark.row(40)
def test_a_width_beyond_the_memory_is_refused(model, width):
    message = refusal(model=model, width=width)
    assert message.startswith(f"width={width:g}") and "lower --width" in message


NETWORK = """
import keras
from keras import layers


def create(image_shape, num_classes, width):
    images = keras.Input(image_shape, name="images")
    x = layers.Flatten(name="flatten")(images)
    x = layers.Reshape((-1, 64), name="tokens")(x)
    x = layers.Dense(round(width), name="embedding")(x)
    x = layers.MultiHeadAttention(4, round(width), name="attention")(x, x)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(images, layers.Dense(num_classes, name="logits")(x))
"""


def test_a_network_in_a_file_is_counted_too(tmp_path):
    (tmp_path / "mine.py").write_text(NETWORK)
    name = f"{tmp_path}/mine.py:create"
    assert refusal(model=name, width=1e6).startswith("width=1e+06 with model=")
    build.build(Config(**SMALL | {"model": name}, width=8.0))


def test_what_is_counted_is_never_initialized():
    """Keras initializes what a scope has deferred when the next scope ends."""

    def create():
        images = keras.Input(SHAPE, name="images")
        x = keras.layers.Dense(5, kernel_initializer=draw, name="dense")(images)
        return keras.Model(images, x)

    def draw(shape, dtype):
        drawn.append(shape)
        return keras.ops.zeros(shape, dtype)

    def refuse(*numbers):
        assert numbers == (4 * (3 * 5 + 5), 0)
        raise ConfigError("too large")

    drawn = []
    with pytest.raises(ConfigError, match="too large"):
        models.build_network(create, check_bytes=refuse)
    with keras.StatelessScope():
        pass
    assert not drawn
    models.build_network(create)
    assert drawn == [(3, 5)]


def test_a_network_that_needs_its_values_is_built_without_a_count(tmp_path):
    class Constant(keras.layers.Layer):
        def build(self, _):
            self.scale = keras.Variable(np.ones(3, np.float32), name="scale")

        def call(self, x):
            return x * self.scale

    def create():
        images = keras.Input(SHAPE, name="images")
        return keras.Model(images, Constant(name="constant")(images))

    model = models.build_network(create, check_bytes=lambda *_: pytest.fail("counted"))
    assert model.count_params() == 3


# What is called a lower bound is one, and the commands.

TRAIN = """
import json, sys
from benchmarks import measure
from towers.config import Config
from towers.parallel import devices
from towers import build
from towers.run import sizes
options = json.loads(sys.argv[1])
config = Config(dataset="synthetic", augment="none", device="cpu", **options)
chosen = devices.configure("cpu", 1)
needed = []
check = sizes._check
sizes._check = lambda *arguments: needed.append(arguments[2])
memory = measure.PeakMemory(chosen)
parts = build.build(config)
trainer = build.create_trainer(config, parts, chosen)
for _ in range(2):
    trainer.train(1)
print(json.dumps([memory.growth_bytes(), *needed]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "which,options",
    [
        (0, {"model": "lenet", "width": 0.1, "batch_size": 20_000}),
        (1, {"model": "lenet", "width": 15.0, "batch_size": 2}),
        (1, {"model": "lenet", "width": 15.0, "batch_size": 2, "ema_decay": 0.0}),
    ],
)
@pytest.mark.row(40)
def test_a_run_takes_more_than_the_lower_bound(which, options):
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    peak, *needed = json.loads(done.stdout.splitlines()[-1])
    assert needed[which] > 100e6
    assert peak > needed[which]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags,words",
    [
        (["--width=1e9"], "width=1e+09 with model=lenet: "),
        (["--batch_size=2000000000"], "batch_size=2000000000: "),
        (["--accumulate_steps=1000000000"], "accumulate_steps=1000000000: "),
        (["--num_towers=5000", "--batch_size=6000"], "num_towers=5000: "),
        (["--image_size=1000000"], "image_size=1000000 with max_image_pixels="),
        (["--batch_size=" + 400 * "9"], "batch_size=99"),
        (["--learning_rate=" + 400 * "9"], "learning_rate=inf"),
    ],
)
@pytest.mark.row(40)
def test_row_40_the_command_ends_in_one_line_within_a_limit_of_memory(
    tmp_path, flags, words
):
    """Under `ulimit -v`, so that an allocation would not go unnoticed."""
    limit = 6_000_000
    done = subprocess.run(
        ["bash", "-c", f'ulimit -v {limit} && exec "$@"', "", sys.executable]
        + [f"{ROOT}/run_train.py", "--dataset=embedded", "--model=lenet"]
        + [f"--workdir={tmp_path}/run", "--device=cpu", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line and len(line) <= 420
