"""The feeds of the compiled loop: the batches of all towers are together those of one.

Everything here runs through the loop that trains.
"""

import dataclasses
import functools
import itertools

import networks
import numpy as np
import pytest
import small_runs
import tensorflow as tf
from marks import slow

from towers.build import assembly
from towers.data.augment.augmentation import create_augment
from towers.data.augment.mixing import create_mix
from towers.data.batches import TrainBatches
from towers.data.resident import Resident
from towers.data.share import shares
from towers.data.sources import ArraySource
from towers.errors import ConfigError
from towers.parallel import compilation
from towers.parallel.devices import Devices
from towers.parallel.loop import Loop, Streams

MICRO_BATCH_SIZE = 5  # of which no number of towers but one and five is a divisor

FEEDS = {
    "streams": lambda batches, devices: Streams([x.stream for x in batches], devices),
    "stored": lambda batches, devices: Streams(
        [x.stored_stream for x in batches], devices, [x.process for x in batches]
    ),
    "resident": Resident,
}


def create_batches(accumulate_steps=2, mixed=True, num_examples=12):
    """Batches that straddle epochs."""
    images, labels = small_runs.arrays(num_examples, 0)
    moments = (120.0, 125.0, 130.0), (60.0, 61.0, 62.0)
    return TrainBatches(
        ArraySource(images, labels, np.linspace(0, 2, num_examples, dtype=np.float32)),
        create_augment("pad_crop_flip", (8, 8, 3), *moments),
        seed=3,
        images_per_step=accumulate_steps * MICRO_BATCH_SIZE,
        noise_shapes=networks.NOISE_SHAPES,
        mix=create_mix(1.0, 1.0, 5) if mixed else None,
    )


def devices_of(num_towers):
    return [f"/CPU:{tower}" for tower in range(num_towers)]


def feed_of(name, batches, num_towers):
    sizes = shares(MICRO_BATCH_SIZE, num_towers)
    return FEEDS[name](batches.split(sizes), devices_of(num_towers))


class Recorder:
    """A loop whose step keeps the batches of all towers.

    Args:
        feed: of the loop.
        call: called in each step.
    """

    def __init__(self, feed, call=lambda: None):
        self.seen, self._call = [], call
        self.loop = Loop(
            self._step,
            lambda: tf.zeros([1]),
            num_phases=1,
            feed=feed,
            compilation=compilation.CPU_STEP,
        )

    def take(self, first, num_steps):
        """Take steps; return how many were begun."""
        return self.loop.run(*self.loop.start(0, first, num_steps))[0]

    def _step(self, phase, batches, before):
        def record(*values):
            self._call()
            self.seen.append(tf.nest.pack_sequence_as(batches, values))
            return np.float32(len(self.seen))

        values = tf.nest.flatten(batches)
        recorded = tf.numpy_function(record, values, tf.float32)
        return tf.constant(True), tf.reshape(recorded, [1])


def joined(batches, accumulate_steps):
    """The towers' images of each micro-batch, one tower after the other."""
    names = batches[0]
    pieces = [
        {k: np.split(v, accumulate_steps) for k, v in batch.items()}
        for batch in batches
    ]
    return {
        name: np.concatenate(
            [piece[name][i] for i in range(accumulate_steps) for piece in pieces]
        )
        for name in names
    }


@functools.cache
def whole_batch(accumulate_steps, mixed, num_examples):
    """A function of the step, of one tower and no part."""
    batches = create_batches(accumulate_steps, mixed, num_examples)
    whole = tf.function(batches)
    return functools.cache(lambda step: whole(tf.constant(step, tf.int64)))


def assert_batches(seen, steps, accumulate_steps=2, mixed=True, num_examples=12):
    """The towers' batches are those of one function of the step."""
    whole = whole_batch(accumulate_steps, mixed, num_examples)
    for of_towers, step in zip(seen, steps, strict=True):
        actual, expected = joined(of_towers, accumulate_steps), whole(step)
        assert set(actual) == set(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(actual[name], value, err_msg=name)


OPTIONS = [
    {},
    {"accumulate_steps": 1},
    {"mixed": False, "accumulate_steps": 1},
    {"mixed": False, "accumulate_steps": 3},
    {"num_examples": 1},
]
FAST = [(*x, {}) for x in (("streams", 2), ("stored", 3), ("resident", 3))]


@pytest.mark.parametrize(
    "name,num_towers,options",
    [
        case if case in FAST else slow(*case)
        for case in itertools.product(FEEDS, [1, 2, 3], OPTIONS)
    ],
)
def test_the_batches_of_all_towers_are_that_of_one_bit_for_bit(
    name, num_towers, options
):
    """In several calls, and after a jump to an earlier step."""
    feed = feed_of(name, create_batches(**options), num_towers)
    recorder = Recorder(feed)
    for first, num_steps in ((0, 2), (2, 1), (3, 3)):
        recorder.take(first, num_steps)
    feed.restart()
    recorder.take(4, 2)
    assert_batches(recorder.seen, [*range(6), 4, 5], **options)


@pytest.mark.parametrize("name", ["stored", *map(slow, ["streams", "resident"])])
def test_the_batches_of_one_step_are_had_outside_of_the_loop(name):
    batches = feed_of(name, create_batches(), 2).batches_of(9)
    outside = [{k: v.numpy() for k, v in batch.items()} for batch in batches]
    assert_batches([outside], [9])


def test_a_stop_ends_with_a_whole_step_and_the_next_call_has_the_next_batch():
    def call():
        if len(recorder.seen) == 1:  # in the second step
            recorder.loop.request_stop()

    recorder = Recorder(feed_of("resident", create_batches(), 2), call)
    assert recorder.take(0, 5) == 2
    recorder.loop._stop.assign(False)
    recorder.take(2, 2)
    assert_batches(recorder.seen, range(4))


def test_an_error_of_the_input_comes_before_a_step():
    batches, bad_step = create_batches(), 3

    def failing(own):
        def check(step, batch):
            is_good = tf.debugging.assert_less(step, np.int64(bad_step))
            with tf.control_dependencies([is_good]):
                return {name: tf.identity(x) for name, x in batch.items()}

        def stream(first_step):
            steps = tf.data.Dataset.counter(first_step)
            return tf.data.Dataset.zip(steps, own.stream(first_step)).map(check)

        return stream

    of_towers = batches.split([3, 2])
    feed = Streams([failing(own) for own in of_towers], devices_of(2))
    recorder = Recorder(feed)
    with pytest.raises(tf.errors.InvalidArgumentError):
        recorder.take(0, 5)
    assert recorder.loop.progress() == (bad_step, "waiting for data")
    assert_batches(recorder.seen, range(bad_step))


class FromFiles:
    """A source that does not lie in memory."""

    num_examples, image_shape = 12, (8, 8, 3)

    def __init__(self, source):
        self.read = source.read


def test_what_is_read_from_files_is_not_resident():
    batches = create_batches()
    batches = dataclasses.replace(batches, source=FromFiles(batches.source))
    config = small_runs.small_config(input="resident")
    with pytest.raises(ConfigError, match=r"^input=resident with dataset=synthetic: "):
        assembly.create_feed(config, batches, ["/CPU:0"], [MICRO_BATCH_SIZE])


def test_a_device_without_a_kernel_is_found_out_by_trying():
    def only_for_tpus(step, elements):
        return {"images": tf.raw_ops.TPUReplicatedInput(inputs=[elements["images"]])}

    batches = create_batches()
    elements = batches.stored_stream(0).element_spec
    for can in (assembly.runs_on, assembly.compiles_on):
        assert can("/CPU:0", batches.process, elements)
        assert not can("/CPU:0", only_for_tpus, elements)
    assert tf.config.get_soft_device_placement()


def test_an_evaluation_of_a_compiled_run_on_one_gpu_has_no_input_to_compile():
    config, gpu = small_runs.small_config(compile="xla"), Devices("GPU", ("/GPU:0",))
    _, trainer = assembly.assemble(config, gpu, for_training=False)
    assert trainer.compilation.xla and not trainer.compilation.whole_step
