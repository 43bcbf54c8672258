"""Every operation that is asked onto a GPU has a kernel there: proved without a GPU."""

import dataclasses
import functools
import itertools
import os
import pathlib
import random
import subprocess
import sys

import pytest
import tensorflow as tf
import traced
from marks import slow

from benchmarks.graphs import placement
from benchmarks.graphs.graphs import inherited
from benchmarks.graphs.kernels import CPU, find_kernel
from towers.config import Config, choices
from towers.errors import ConfigError

# Of the slow cases.
CASES_AT_ONCE = 10

IMAGES = tf.TensorSpec([4, 3], tf.uint8)


def graph_of(function, *specs):
    traced_function = tf.function(function, autograph=False)
    return traced_function.get_concrete_function(*specs).graph


def gathered(images):
    """uint8, for which `GatherV2` has no kernel on GPUs."""
    return tf.gather(images, [1, 0])


# Graphs that ask a GPU for what it cannot do.


def plainly(images):
    with tf.device("/GPU:1"):
        return gathered(images)


def in_a_loop(images):
    def body(i, x):
        with tf.device("/GPU:1"):
            return i + 1, tf.concat([gathered(x), x[2:]], 0)

    return tf.while_loop(lambda i, x: i < 3, body, (0, images))[1]


def in_a_called_function(images):
    """Which has no device of its own."""
    call = tf.function(gathered, autograph=False)
    with tf.device("/GPU:1"):
        return call(images)


def in_a_called_function_with_a_part_of_a_device(images):
    @tf.function(autograph=False)
    def call(images):
        with tf.device("/device:GPU:*"):
            return gathered(images)

    with tf.device("/job:localhost/replica:0/task:0/device:GPU:1"):
        return call(images)


def in_a_branch(images):
    with tf.device("/GPU:1"):
        return tf.cond(
            tf.reduce_all(images > 0), lambda: gathered(images), lambda: images[:2]
        )


def in_one_of_many_branches(images):
    with tf.device("/GPU:1"):
        branches = [lambda: images[:2], lambda: gathered(images)]
        return tf.switch_case(tf.shape(images)[0], branches)


BAD = [
    plainly,
    in_a_loop,
    in_a_called_function,
    in_a_called_function_with_a_part_of_a_device,
    in_a_branch,
    in_one_of_many_branches,
]


@pytest.mark.parametrize("function", BAD, ids=lambda f: f.__name__)
def test_an_operation_without_a_kernel_is_found_wherever_it_is(function):
    [group] = placement.without_kernel(graph_of(function, IMAGES))
    assert (group.type, group.device, group.count) == ("GatherV2", "/GPU:1", 1)
    assert "Tparams=uint8" in group.types
    floats = tf.TensorSpec(IMAGES.shape, tf.float32)
    assert not placement.without_kernel(graph_of(function, floats))


def test_what_xla_compiles_needs_a_kernel_of_xla():
    """Which has one for uint8, and none for a shuffle."""

    def shuffled(images):
        return tf.random.experimental.stateless_shuffle(images, [1, 2])

    def compiled(function):
        call = tf.function(function, jit_compile=True, autograph=False)

        def on_gpu(images):
            with tf.device("/GPU:0"):
                return call(images)

        return graph_of(on_gpu, IMAGES)

    assert not placement.without_kernel(compiled(gathered))
    [group] = placement.without_kernel(compiled(shuffled))
    assert group.type == "StatelessShuffle"


def test_an_operation_that_nothing_asks_onto_a_device_goes_to_the_first_gpu():
    [group] = placement.without_kernel(graph_of(gathered, IMAGES))
    assert group.device == "/GPU:0"
    assert not placement.without_kernel(graph_of(tf.timestamp))

    def on_host():
        with tf.device("/CPU:0"):
            return tf.timestamp()

    [group] = placement.on_host_alone(graph_of(on_host))
    assert group.type == "Timestamp"


def test_a_large_result_that_nothing_asks_onto_a_device_is_found():
    def function(images):
        with tf.device("/GPU:0"):
            x = tf.cast(images, tf.float32)
        return tf.reduce_sum(tf.concat([x, x], 0)), x

    groups = placement.unasked(graph_of(function, tf.TensorSpec([8, 3], tf.uint8)))
    assert [group.type for group in groups] == ["ConcatV2"]


def test_a_part_of_a_device_is_completed_by_the_callers():
    assert inherited("", "/device:GPU:1") == "/device:GPU:1"
    assert inherited("/device:CPU:0", "/job:w/device:GPU:1") == "/job:w/device:CPU:0"


def test_a_kernel_is_found_where_tensorflow_finds_one():
    """On a CPU, where it can be tried: operations of one tensor, for every type."""
    tf.config.set_soft_device_placement(True)
    types = [tf.float32, tf.float64, tf.bfloat16, tf.int32, tf.uint8, tf.bool]
    types += [tf.uint16, tf.uint32, tf.int8, tf.complex64, tf.float16]
    operations = {
        "Relu": tf.raw_ops.Relu,
        "Rsqrt": tf.raw_ops.Rsqrt,
        "LogicalNot": tf.raw_ops.LogicalNot,
        "Softmax": tf.raw_ops.Softmax,
        "Neg": tf.raw_ops.Neg,
        "Round": tf.raw_ops.Round,
        "Abs": tf.raw_ops.Abs,
        "Invert": tf.raw_ops.Invert,
        "L2Loss": tf.raw_ops.L2Loss,
        "Selu": tf.raw_ops.Selu,
        "CheckNumerics": functools.partial(tf.raw_ops.CheckNumerics, message=""),
        "Cumsum": functools.partial(tf.raw_ops.Cumsum, axis=0),
    }
    arguments = {"Softmax": "logits", "Relu": "features", "Selu": "features"}
    arguments |= {"L2Loss": "t", "CheckNumerics": "tensor"}
    seen = set()
    for (name, call), dtype in itertools.product(operations.items(), types):
        argument = arguments.get(name, "x")

        def function(x, call=call, argument=argument):
            return call(**{argument: x})

        try:
            graph = graph_of(function, tf.TensorSpec([2, 2], dtype))
        except TypeError:
            continue  # the operation is not defined for the type
        [op] = [op for op in graph.get_operations() if op.type == name]
        try:
            with tf.device("/CPU:0"):
                function(tf.zeros([2, 2], dtype))
            runs = True
        except tf.errors.NotFoundError:
            runs = False
        assert (find_kernel(op, CPU) is not None) == runs, (name, dtype)
        seen.add(runs)
    assert seen == {True, False}


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
}
PLACES = {
    "towers": {},
    "async_towers": {},
    "replicated": {"all_reduce": "ring"},
    "model_parallel": {"group_size": 2, "num_towers": 4},
}
AXES = {
    "strategy": tuple(PLACES),
    "model": tuple(x for x in choices.MODELS if not x.endswith(choices.FAMILY)),
    "precision": choices.PRECISIONS,
    "input": ("stream", "resident"),
    "accumulate_steps": (1, 2),
    "batch_norm": ("local", "sync"),
    "tta": tuple(choices.TTA),
    "augment": tuple(AUGMENTS),
}
APART = ({"model", "augment"}, {"tta", "augment"})


@dataclasses.dataclass(frozen=True)
class Case:
    """A value of each axis."""

    strategy: str = "towers"
    model: str = "lenet"
    precision: str = "float32"
    input: str = "stream"
    accumulate_steps: int = 1
    batch_norm: str = "local"
    tta: str = "none"
    augment: str = "none"

    def __str__(self):
        return " ".join(str(value) for value in dataclasses.astuple(self))

    @property
    def fields(self) -> dict:
        fields = dataclasses.asdict(self)
        return fields | AUGMENTS[self.augment] | PLACES[self.strategy]

    @property
    def is_possible(self) -> bool:
        whitened = self.model.startswith("speedrun")
        if self.strategy == "model_parallel" and whitened:
            return False  # it cannot be split
        fields = self.fields
        if fields["augment"] not in choices.AUGMENTS:
            fields["augment"] = "none"
        try:
            Config(**traced.SMALL | fields)
        except ConfigError:
            return False
        return True

    def trace(self):
        fields = self.fields
        if fields["augment"] not in choices.AUGMENTS:
            fields["augment"] = "none"
        return traced.on_gpus(**fields)


def pairs(case: Case) -> set:
    """The values of any two axes that are not apart."""
    values = dataclasses.asdict(case).items()
    return {
        pair
        for pair in itertools.combinations(values, 2)
        if {pair[0][0], pair[1][0]} not in APART
    }


def pairwise_cases() -> list[Case]:
    """Few cases that have every possible pair: each takes one that is missing, and of
    some random cases with it that which has most others."""
    draw, chosen, missing = random.Random(0), [], set()
    for first, second in itertools.combinations(AXES, 2):
        for values in itertools.product(AXES[first], AXES[second]):
            pair = tuple(zip((first, second), values, strict=True))
            if pair in pairs(Case(**dict(pair))) and Case(**dict(pair)).is_possible:
                missing.add(pair)
    while missing:
        fixed = dict(min(missing, key=str))
        candidates = [Case(**fixed)] + [
            Case(**{axis: draw.choice(AXES[axis]) for axis in AXES} | fixed)
            for _ in range(60)
        ]
        best = max(
            (case for case in candidates if case.is_possible),
            key=lambda case: len(pairs(case) & missing),
        )
        chosen.append(best)
        missing -= pairs(best)
    return chosen


FAST = [
    Case("towers", "lenet", "float32", "resident", augment="tutorial"),
    Case("towers", "cnn", "bfloat16", accumulate_steps=2, tta="translate_unsure"),
    Case("replicated", "lenet", "float16", accumulate_steps=2, tta="mirror"),
    Case("model_parallel", "lenet", "float16", "resident", 2, augment="mixed"),
    Case("async_towers", "lenet", "bfloat16", tta="translate"),
]


@pytest.mark.parametrize("case", [*FAST[:3], *map(slow, FAST[3:])], ids=str)
def test_every_operation_on_a_gpu_has_a_kernel(case):
    assert_every_kernel(case.trace())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 110, CASES_AT_ONCE))
def test_every_pair_of_options_has_a_kernel_for_every_operation(first):
    """In other processes: TensorFlow 2.21 does not free a graph that has a loop, so
    that all of them would take 11 GB."""
    script = f"import test_placement; test_placement.check_cases({first})"
    root = pathlib.Path(__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def check_cases(first):
    for case in pairwise_cases()[first : first + CASES_AT_ONCE]:
        print(case, file=sys.stderr)
        assert_every_kernel(case.trace())


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "towers"},
        {"strategy": "async_towers", "parameter_device": "gpu"},
        slow({"strategy": "replicated", "precision": "float16"}),
        slow({"strategy": "model_parallel", "group_size": 2, "num_towers": 4}),
    ],
)
def test_steps_that_may_be_skipped_have_every_kernel(fields):
    assert_every_kernel(traced.on_gpus(model="lenet", on_nonfinite="skip", **fields))


def assert_every_kernel(trained):
    missing, on_host, unasked = [], [], []
    for call in [*trained.calls(), traced.evaluation(trained)]:
        missing += map(str, placement.without_kernel(call.graph, call.device))
        on_host += placement.on_host_alone(call.graph, call.device)
        unasked += map(str, placement.unasked(call.graph, call.device))
    assert not missing
    assert {group.type for group in on_host} <= set(placement.HOST_OPERATIONS)
    assert not unasked


def test_the_cases_have_every_pair():
    cases = [*FAST, *pairwise_cases()]
    assert len(cases) < 110
    for axis, values in AXES.items():
        assert {getattr(case, axis) for case in cases} == set(values)
    assert any(case.model == "cnn" and case.tta == "mirror" for case in cases)
    assert any(
        case.strategy == "replicated" and case.input == "resident" for case in cases
    )


@pytest.mark.slow
def test_what_xla_compiles_of_a_tower_has_its_kernels():
    calls = traced.on_gpus(model="resnet20", compile="xla").calls()
    compiled = [
        p for call in calls for p in placement.placements(call.graph) if p.compiled
    ]
    assert {p.device for p in compiled} == {"/GPU:0", "/GPU:1"}
    assert any(p.op.type == "Conv2DBackpropFilter" for p in compiled)
    assert all(p.has_kernel() for p in compiled)
