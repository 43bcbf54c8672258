"""Every operation that is requested on a GPU has a kernel, proved without a GPU."""

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf
import traced
from engines.pairs import pairwise
from networks import KINDS

from benchmarks.graphs import placement
from towers.config import Config, choices
from towers.errors import ConfigError

# Sizes of the slow suite.
CASES_AT_ONCE, MAX_CASES = 10, 120

IMAGES = tf.TensorSpec([4, 3], tf.uint8)


def graph_of(function, *specs):
    traced_function = tf.function(function, autograph=False)
    return traced_function.get_concrete_function(*specs).graph


def gathered(images):
    """Gather uint8, for which `GatherV2` has no kernel on GPUs."""
    return tf.gather(images, [1, 0])


# Graphs that request operations without a GPU kernel.


def on_gpu(function):
    def placed(images):
        with tf.device("/GPU:1"):
            return function(images)

    return placed


def test_an_operation_without_a_kernel_is_found_in_a_loop():
    body = on_gpu(lambda x: tf.concat([gathered(x), x[2:]], 0))

    def function(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, body(x)), (0, x))

    [group] = placement.without_kernel(graph_of(function, IMAGES))
    assert (group.type, group.device, group.count) == ("GatherV2", "/GPU:1", 1)
    assert "Tparams=uint8" in group.types
    floats = tf.TensorSpec(IMAGES.shape, tf.float32)
    assert not placement.without_kernel(graph_of(function, floats))


def test_what_xla_compiles_needs_a_kernel_of_xla():
    """XLA has a kernel for uint8, and none for a shuffle."""

    def shuffled(images):
        return tf.random.experimental.stateless_shuffle(images, [1, 2])

    def compiled(function):
        call = tf.function(function, jit_compile=True, autograph=False)
        return graph_of(on_gpu(call), IMAGES)

    assert not placement.without_kernel(compiled(gathered))
    [group] = placement.without_kernel(compiled(shuffled))
    assert group.type == "StatelessShuffle"


# The trainers. The input, down to the batch, and the network meet only there, so that
# augmentations and networks are not paired.

AUGMENTS = {
    "none": {},
    "tutorial": {"augment": "tutorial"},
    "pad_crop_flip": {"augment": "pad_crop_flip"},
    "translate_flip": {"augment": "translate_flip"},
    "translate_4_flip": {"augment": "translate_4_flip"},
    "distorted": {"color_jitter": 0.2, "random_erasing": 0.5, "cutout_size": 8},
    "mixed": {"mixup": 0.2, "cutmix": 1.0},
    "operated": {"augment": "pad_crop_flip", "policy": "trivial_augment"},
    "chained": {"augment": "pad_crop_flip", "policy": "augmix"},
    "blurred": {"augment": "pad_crop_flip", "policy": "three_augment"},
}
PLACES = {
    "towers": {},
    "async_towers": {},
    "replicated": {"all_reduce": "ring"},
    "model_parallel": {"group_size": 2, "num_towers": 4},
}
AXES = {
    "strategy": list(PLACES),
    "model": ["lenet", *(x for x in KINDS if x != "lenet")],
    "precision": list(choices.PRECISIONS),
    "input": ["stream", "resident"],
    "accumulate_steps": [1, 2],
    "batch_norm": ["local", "sync"],
    "tta": list(choices.TTA),
    "augment": list(AUGMENTS),
}
APART = ({"model", "augment"}, {"tta", "augment"})
FAST = [
    {"input": "resident", "augment": "tutorial", "accumulate_steps": 2},
    {
        "strategy": "replicated",
        "precision": "float16",
        "tta": "translate",
        "on_nonfinite": "skip",
    },
]


def fields_of(case):
    fields = dict(case) | AUGMENTS[case["augment"]] | PLACES[case["strategy"]]
    is_named = fields["augment"] in choices.AUGMENTS
    return fields if is_named else fields | {"augment": "none"}


def is_possible(case):
    # Layers that look at all channels, and heads that two devices do not divide.
    unsplit = "speedrun", "convnextv2", "vit_tiny", "deit_tiny", "tiny_vit_5m"
    if case["strategy"] == "model_parallel" and case["model"].startswith(unsplit):
        return False
    if case["model"].startswith("dinov2") and case["augment"] == "tutorial":
        return False  # crops of 24x24 are less than two patches
    try:
        Config(**traced.SMALL | fields_of(case))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("case", FAST, ids=str)
def test_every_operation_on_a_gpu_has_a_kernel(case):
    default = {axis: values[0] for axis, values in AXES.items()}
    assert_every_kernel(fields_of(default | case))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MAX_CASES, CASES_AT_ONCE))
def test_every_pair_of_options_has_a_kernel_for_every_operation(first):
    """TensorFlow 2.21 does not free graphs with loops: here they would need 11 GB."""
    script = f"import test_placement; test_placement.check_cases({first})"
    root = pathlib.Path(__file__).resolve().parents[2]
    folders = (root, root / "tests", root / "tests/support", root / "tests/parallel")
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, folders))}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def check_cases(first):
    cases = pairwise(AXES, is_possible=is_possible, apart=APART)
    assert len(cases) < MAX_CASES
    for case in cases[first : first + CASES_AT_ONCE]:
        print(case, file=sys.stderr)
        assert_every_kernel(fields_of(case))


def assert_every_kernel(fields):
    trained = traced.on_gpus(**fields)
    missing, on_host, unasked = [], [], []
    for call in [*trained.calls(), traced.evaluation(trained)]:
        missing += map(str, placement.without_kernel(call.graph, call.device))
        on_host += placement.on_host_alone(call.graph, call.device)
        unasked += map(str, placement.unasked(call.graph, call.device))
    assert not missing
    assert {group.type for group in on_host} <= set(placement.HOST_OPERATIONS)
    assert not unasked
