"""The feeds of the compiled loop: every one gives a trainer the same batches."""

import dataclasses
import functools
import time

import networks
import numpy as np
import pytest
import small_runs
import tensorflow as tf
from marks import slow
from recipes import Recipe, create_trainer, have_steps_of_gpus

from benchmarks.proofs import partition_graphs
from towers import build, training
from towers.config.choices import AUGMENTS
from towers.data.augment import Augment, create_augment
from towers.data.batches import TrainBatches
from towers.data.distortions import extend
from towers.data.mixing import create_mix
from towers.data.resident import ResidentBatches
from towers.data.sources import ArraySource
from towers.parallel import strategies
from towers.parallel.devices import Devices
from towers.parallel.feed import CopiedAhead, HostStream, has_gpu_kernels
from towers.parallel.loop import Loop

DEVICE = "/CPU:3"  # of no tower, so that nothing else is sent there
WAIT_SECS = 30  # for what should come at once

FEEDS = {
    "resident": lambda batches: ResidentBatches(batches, DEVICE),
    "copied": lambda batches: CopiedAhead(batches.stream, DEVICE),
    "augmented there": lambda batches: CopiedAhead(
        batches.stored_stream, DEVICE, batches.process
    ),
}


def create_batches(mixed=False):
    """Batches that straddle epochs."""
    images, labels = small_runs.arrays(10, 0)
    moments = (120.0, 125.0, 130.0), (60.0, 61.0, 62.0)
    return TrainBatches(
        ArraySource(images, labels),
        create_augment("pad_crop_flip", (8, 8, 3), *moments),
        seed=3,
        images_per_step=6,
        noise_shapes=networks.NOISE_SHAPES,
        mix=create_mix(1.0, 1.0, 5) if mixed else None,
    )


def trainer_of(feed, cls=strategies.towers, **options):
    """A trainer on two devices."""
    of_size, network = networks.random_batches(1, 6), networks.plain_network()
    return create_trainer(cls, network, Recipe(), of_size, 2, feed=feed, **options)


class Recorder:
    """A step of GPUs that keeps its batches.

    Args:
        feed: of its loop.
        batches: what the feed should give.
        call: called in each step.
    """

    def __init__(self, feed, batches, call=lambda: None):
        self.seen, self._call = [], call
        with tf.device("CPU:0"):
            self.global_step = tf.Variable(0, dtype=tf.int64)
        self.loop = Loop(
            self._step,
            lambda: {"loss": tf.zeros([])},
            global_step=self.global_step,
            num_phases=1,
            feed=feed,
            inline=True,
        )
        self._names = sorted(batches(tf.constant(0, tf.int64)))

    def _step(self, phase, batch):
        assert sorted(batch) == self._names

        def record(*values):
            self._call()
            self.seen.append(dict(zip(self._names, values, strict=True)))
            return np.int32(0)

        tf.no_op(name="unplaced")
        values = [batch[name] for name in self._names]
        recorded = tf.numpy_function(record, values, tf.int32, name="recorded")
        with tf.control_dependencies([recorded]):
            counted = self.global_step.assign_add(1, read_value=False)
        with tf.control_dependencies([counted]), tf.device("CPU:0"):
            return tf.constant(True), {"loss": tf.constant(1.0)}


def assert_batches(seen, batches, steps):
    compiled = tf.function(lambda step: batches(step))
    for actual, step in zip(seen, steps, strict=True):
        for name, value in compiled(tf.constant(step, tf.int64)).items():
            np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.parametrize("name", FEEDS)
def test_the_loop_gets_the_batches_of_its_steps_bit_for_bit(name):
    """In several calls, and after a jump."""
    batches = create_batches(mixed=True)
    feed = FEEDS[name](batches)
    recorder = Recorder(feed, batches)
    for num_steps in (2, 1, 3):
        recorder.loop(0, num_steps)
    recorder.global_step.assign(4)
    recorder.loop.restart_input()
    recorder.loop(0, 2)
    assert_batches(recorder.seen, batches, [*range(6), 4, 5])


@pytest.mark.parametrize("name", ["augmented there", slow("copied"), slow("resident")])
@pytest.mark.parametrize(
    "options", [{"accumulate_steps": 2}, slow({"cls": strategies.replicated})]
)
def test_a_run_is_that_of_the_stream_bit_for_bit_also_in_two_parts(name, options):
    batches, states = create_batches(mixed=True), []
    for feed in (HostStream(batches.stream), FEEDS[name](batches)):
        trainer = trainer_of(feed, **options)
        trainer.train(2)
        trainer.train(3)
        states.append(trainer.state())
    small_runs.assert_equal_states(*states)


@pytest.mark.parametrize("name", ["augmented there", slow("copied")])
def test_a_run_that_was_interrupted_continues_with_the_right_batch(
    name, tmp_path, monkeypatch
):
    small_runs.use(monkeypatch)
    expected = small_runs.uninterrupted(small_runs.small_config())
    monkeypatch.setattr(
        build, "create_feed", lambda _, batches, __: FEEDS[name](batches)
    )
    training.train(tmp_path, small_runs.small_config(max_steps=3))
    training.train(tmp_path, small_runs.small_config())
    small_runs.assert_equal_states(small_runs.saved(tmp_path).tensors, expected.state)


def test_a_stop_finds_a_whole_step_and_the_next_call_the_next_batch():
    batches = create_batches()
    feed = FEEDS["augmented there"](batches)

    def call():
        if len(recorder.seen) == 1:  # the second step
            recorder.loop.request_stop()

    recorder = Recorder(feed, batches, call)
    num_begun, is_taken, *_ = recorder.loop(0, 5)
    assert (num_begun, is_taken, int(recorder.global_step)) == (2, True, 2)
    recorder.loop._stop.assign(False)
    recorder.loop(0, 2)
    assert_batches(recorder.seen, batches, range(4))


def test_an_error_of_the_input_comes_before_a_step():
    batches, bad_step = create_batches(), 3

    def stream(first_step):
        steps = tf.data.Dataset.counter(first_step)
        stored = batches.stored_stream(first_step)
        return tf.data.Dataset.zip(steps, stored).map(failing)

    def failing(step, stored):
        is_good = tf.debugging.assert_less(step, np.int64(bad_step))
        with tf.control_dependencies([is_good]):
            return {name: tf.identity(x) for name, x in stored.items()}

    recorder = Recorder(CopiedAhead(stream, DEVICE, batches.process), batches)
    with pytest.raises(tf.errors.InvalidArgumentError):
        recorder.loop(0, 5)
    # A batch is taken at the beginning of the step before.
    assert recorder.loop.progress() == (bad_step - 1, "waiting for data")
    assert_batches(recorder.seen, batches, range(bad_step - 1))


# What is copied, and when.


def test_a_batch_is_copied_while_the_step_before_computes():
    """A step that ends only once the device has the next batch."""
    batches = create_batches()
    feed = FEEDS["augmented there"](batches)
    stored = [x["indices"].numpy() for x in batches.stored_stream(0).take(4)]

    def call():
        wanted, patience = stored[len(recorder.seen) + 1], time.monotonic() + WAIT_SECS
        while (feed._held["indices"].numpy() != wanted).any():
            assert time.monotonic() < patience, "the copy waits for the step"
            time.sleep(0.001)

    recorder = Recorder(feed, batches, call)
    recorder.loop(0, 3)
    assert len(recorder.seen) == 3


def test_a_step_does_not_wait_for_the_copy_of_the_next_batch():
    batches = create_batches()
    feed = FEEDS["augmented there"](batches)
    [graph] = Recorder(feed, batches).loop.trace()
    copies = [
        op
        for op in graph.get_operations()
        if op.type == "AssignVariableOp" and op.device.endswith(DEVICE[1:])
    ]
    assert len(copies) == len(feed._held)
    [step] = [op for op in graph.get_operations() if "recorded" in op.name]
    assert not ancestors([step]) & set(copies)
    assert not any("recorded" in op.name for op in ancestors(copies))
    # The batch is there before the step begins.
    before = {op.type for op in ancestors([step])}
    assert {"IteratorGetNext", "ReadVariableOp"} <= before
    # The next step waits for the count, with which the step ends.
    assert set(copies) <= ancestors([graph.outputs[2].op])


def test_the_host_counts_the_steps_and_decides_on_the_next():
    """On GPUs TensorFlow would choose the first for everything that is not placed."""
    [graph] = Recorder(
        FEEDS["resident"](create_batches()), create_batches()
    ).loop.trace()
    [loop] = [op for op in graph.outer_graph.get_operations() if op.type == "While"]
    inside = {op.name.split("/")[-1]: op for op in graph.get_operations()}
    placed = [loop, *(x.op for x in loop.inputs[2:6]), inside["cond"], inside["Equal"]]
    assert {op.device for op in placed} == {"/device:CPU:0"}
    assert inside["unplaced"].device == ""  # of the step


def ancestors(operations):
    """All operations of a graph that are finished before these begin."""
    found, left = set(), list(operations)
    while left:
        op = left.pop()
        new = {x.op for x in op.inputs} | set(op.control_inputs)
        left += new - found
        found |= new
    return found


def sent_to_device(create_feed):
    """Per tensor that two executed steps send to DEVICE, read from TensorFlow's graphs:
    (name of its operation, bytes). Only flow of control has no bytes."""
    with pytest.MonkeyPatch.context() as patch:
        have_steps_of_gpus(patch)
        trainer = trainer_of(create_feed(create_batches()))
    [traced] = trainer.loop.trace()
    sizes = {op.name: op.outputs[0] for op in traced.get_operations() if op.outputs}
    sent = []
    for graph in partition_graphs(functools.partial(trainer.train, 2)):
        for node in graph.node:
            ends = [node.attr[f"{end}_device"].s.decode() for end in ("send", "recv")]
            if node.op not in ("_Send", "_HostSend") or ends[0] == ends[1]:
                continue
            name, in_loop, inside = node.input[0].partition("/body/_1/")
            if not ends[1].endswith(DEVICE[1:]) or not in_loop or "/ctrl/" in inside:
                continue
            # TensorFlow may cast the labels in another place.
            tensor = sizes.get(inside.replace(":0", ""), sizes["while/Cast"])
            is_known = inside in sizes or "Cast" in inside or "/cond/" in inside
            assert is_known, inside
            sent.append((inside, tensor.shape.num_elements() * tensor.dtype.size))
    return sent


def test_a_step_on_resident_images_is_sent_a_few_numbers():
    """The order of an epoch is sent where it is drawn, in a branch."""
    sent = sent_to_device(FEEDS["resident"])
    orders = [name for name, _ in sent if "/cond/" in name]
    assert len(orders) == 1
    keys, step, is_same_epoch = [16] * 3, 8, 1
    assert sorted(size for name, size in sent if name not in orders) == sorted(
        [*keys, step, is_same_epoch]
    )


def test_streamed_images_cross_once_as_they_are_stored():
    images_per_step = 6
    sizes = [size for _, size in sent_to_device(FEEDS["augmented there"])]
    images, indices_and_labels = images_per_step * 8 * 8 * 3, [images_per_step * 8] * 2
    keys = [16] * 3
    assert sorted(sizes) == sorted([images, *indices_and_labels, *keys])


# Which augmentation a GPU can run.


@pytest.mark.parametrize(
    "augment",
    [slow(name) if name != "translate_flip" else name for name in AUGMENTS],
)
def test_gpus_have_kernels_for_every_augmentation(augment):
    """With everything that may be added to it."""
    shape = (26, 26, 3)
    augment = create_augment(augment, shape, (120.0,) * 3, (60.0,) * 3)
    for options in ({}, {"color_jitter": 0.4, "random_erasing": 0.5, "cutout_size": 3}):
        batches = dataclasses.replace(
            create_batches(mixed=True),
            source=ArraySource(np.zeros((10, *shape), np.uint8), np.zeros(10)),
            augment=extend(augment, **options),
        )
        elements = batches.stored_stream(0).element_spec
        assert has_gpu_kernels(batches.process, elements)
        # A GPU leaves arithmetic in int32 to the host.
        step = tf.TensorSpec([], tf.int64)
        process = tf.function(batches.process, autograph=False)
        ops = process.get_concrete_function(step, elements).graph.get_operations()
        for tensor in (x for op in ops for x in op.outputs if op.type != "Placeholder"):
            is_of_images = tensor.shape.rank and tensor.shape[0] == 6
            assert tensor.dtype != tf.int32 or not is_of_images, tensor.op.name


def test_what_a_gpu_cannot_augment_the_host_does():
    def with_python(images, draw):
        half = tf.numpy_function(lambda x: np.float32(x / 2), [images], tf.float32)
        return tf.ensure_shape(half, images.shape)

    def with_uint8_gather(images, draw):
        return tf.cast(tf.gather(images, [1, 0], axis=2), tf.float32)

    def in_a_function(images, draw):
        return tf.map_fn(lambda x: with_uint8_gather(x[None], draw)[0], images)

    config = small_runs.small_config(input="auto")
    for train in (with_python, with_uint8_gather, in_a_function):
        augment = Augment(train, None, (8, 8, 3))
        batches = dataclasses.replace(create_batches(), augment=augment)
        feed = build.create_feed(config, batches, Devices("GPU", ["/CPU:0"]))
        assert feed.spec() == tf.data.IteratorSpec(batches.stream(0).element_spec)
