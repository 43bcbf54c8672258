"""The compiled loop over steps, which other threads watch and stop, and its feed."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.parallel.compilation import Compilation
from towers.parallel.copies import variable
from towers.parallel.devices import HOST, device_of
from towers.parallel.reduce import on_each, without_int32

# Activities of a trainer: the value of a tf.Variable, and the name in `progress`.
IDLE, TRACING, WAITING, COMPUTING, COMPUTING_FIRST, COMPUTING_OR_WAITING = range(6)
ACTIVITIES = (
    "idle",
    "tracing the step",
    "waiting for data",
    "computing",
    "computing the first steps",
    "computing or waiting for data",  # The host does not know more about GPUs.
)

# Activities that may take long although nothing is wrong.
STARTING_ACTIVITIES = (ACTIVITIES[TRACING], ACTIVITIES[COMPUTING_FIRST])

# Activities without an update in progress: `Trainer.state` is consistent.
CONSISTENT_ACTIVITIES = (ACTIVITIES[TRACING], ACTIVITIES[WAITING])

Batch = dict[str, tf.Tensor]
# Step -> the batches of that step and all later ones.
Stream = Callable[[int], tf.data.Dataset]


class Feed(Protocol):
    """The batches of the compiled loop, made for each tower.

    In the graph of a step, `wait` comes first, while no update is in progress: only
    there may the input take long or fail. Then the step computes on what `batch`
    returns. `devices` has the device of each tower, which makes its batches.
    """

    devices: Sequence[str]

    def spec(self) -> Any:
        """Return the types of the iterators, for tracing."""

    def start(self, step: int, num_steps: int) -> Any:
        """Prepare the batches of some steps; return iterators, if there are any."""

    def wait(self, iterators: Any, steps: Sequence[tf.Tensor]) -> list:
        """Return, in the graph, the tensors per tower that a step has to wait for."""

    def batch(self, tower: int, awaited: Any, step: tf.Tensor) -> Batch:
        """Return, in the graph, a tower's batch of a step, for its entry of `wait`."""

    def restart(self) -> None:
        """Discard prepared batches; the next `start` may be at any step."""

    def batches_of(self, step: int) -> list[Batch]:
        """Return the batches of one step, per tower, outside of a graph."""


class Streams:
    """Batches from a stream per tower, or from a single one of tuples.

    GPUs have them copied two steps ahead. `processes` are per tower a function
    (step, element of the stream) -> batch, on the device; by default the elements are
    batches.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        devices: Sequence[str],
        processes: Sequence[Callable[[tf.Tensor, Batch], Batch]] | None = None,
    ):
        self._streams, self.devices = streams, devices
        self._processes = processes or [lambda _, batch: batch for _ in devices]
        self._on_host = device_of(devices[0]).in_host_memory
        self._iterators = self._specs = None
        self._step: int | None = None
        self._kept: list[tf.data.Dataset] = []

    def _datasets(self, step):
        # Kept, as TensorFlow never frees all functions of a data set.
        if step != self._step:
            datasets = [stream(step) for stream in self._streams]
            if not self._on_host:
                datasets = [
                    dataset.map(without_int32).apply(
                        tf.data.experimental.prefetch_to_device(device, 2)
                    )
                    for dataset, device in zip(datasets, self.devices, strict=True)
                ]
            elif isinstance(datasets[0].element_spec, dict):
                datasets = [tf.data.Dataset.zip(tuple(datasets))]
            self._step, self._kept = step, datasets
        return self._kept

    def _new_iterators(self, step):
        return [tf_internals.delete_in_thread(iter(x)) for x in self._datasets(step)]

    def spec(self):
        """Implement `Feed.spec`."""
        if self._specs is None:
            datasets = self._iterators or self._datasets(0)
            self._specs = [tf.data.IteratorSpec(x.element_spec) for x in datasets]
        return self._specs

    def start(self, step, num_steps):
        """Implement `Feed.start`."""
        if self._iterators is None:
            self._iterators = self._new_iterators(step)
        return self._iterators

    def wait(self, iterators, steps):
        """Implement `Feed.wait`."""
        if self._on_host:
            with tf.device(HOST):
                return list(next(iterators[0]))

        def next_elements(iterator):
            # Elements have the device of the iterator, but no device name.
            return tf.nest.map_structure(tf.identity, next(iterator))

        return on_each(next_elements, self.devices, iterators)

    def batch(self, tower, awaited, step):
        """Implement `Feed.batch`."""
        with tf.device(self.devices[tower]):
            return self._processes[tower](step, awaited)

    def restart(self):
        """Implement `Feed.restart`."""
        self._iterators = None

    def batches_of(self, step):
        """Implement `Feed.batches_of`."""
        iterators = self._new_iterators(step)
        steps = [tf.constant(step, tf.int64)] * len(self.devices)
        return make_batches(self, self.wait(iterators, steps), steps)


def make_batches(feed: Feed, awaited: list, steps: Sequence[tf.Tensor]) -> list[Batch]:
    """Return each tower's images of the batch of a step, see `Feed.batch`."""
    towers = range(len(feed.devices))
    return [feed.batch(*x) for x in zip(towers, awaited, steps, strict=True)]


def add_on_each(
    devices: Sequence[str], numbers: Sequence[tf.Tensor], addend: int
) -> list[tf.Tensor]:
    """Add to the int64 scalar of each device, on that device."""
    return on_each(lambda x: x + tf.constant(addend, tf.int64), devices, numbers)


class Loop:
    """The steps of a synchronous trainer; each phase of the run has its own trace.

    `train_step` is (phase, batches, metrics of the previous step) -> (whether the step
    was taken, metrics), in the graph; `zero_metrics` returns metrics of the same form.
    """

    def __init__(
        self,
        train_step: Callable[[int, Sequence, Any], tuple[tf.Tensor, Any]],
        zero_metrics: Callable[[], Any],
        *,
        num_phases: int,
        feed: Feed,
        compilation: Compilation,
    ):
        self._train_step, self._zero_metrics = train_step, zero_metrics
        self.feed, self._compilation = feed, compilation
        with tf.device(HOST):
            self._activity = variable(IDLE, "activity")
            self._stop = variable(False, "stop")
            self._number = variable(np.int64(0), "number")  # Steps taken.
        self.is_compiled, self._phase = [False] * num_phases, 0
        self.compiled = tf.function(self._steps, autograph=False)
        self._step_call = tf.function(
            train_step, autograph=False, experimental_attributes={"_noinline": True}
        )

    def start(self, phase: int, first: int, num_steps: int) -> tuple:
        """Prepare steps after `first` ones; return the arguments of `run`."""
        self._phase = phase
        self._number.assign(first)
        self._activity.assign(WAITING)
        iterators = self.feed.start(first, num_steps)
        if not self.is_compiled[phase]:
            self._activity.assign(TRACING)
        return phase, iterators, first, num_steps

    def run(
        self, phase: int, iterators: Any, first: int, num_steps: int
    ) -> tuple[int, float, Any]:
        """Take up to `num_steps` steps, fewer after a stop request.

        Returns how many were begun, the seconds that they waited for batches, and the
        metrics of the last one. If a step is refused, later ones change nothing.
        """
        if not self._compilation.device.waits_for_host:
            self._activity.assign(COMPUTING_OR_WAITING)
        with tf.device(HOST):
            arguments = tf.constant(first, tf.int64), tf.constant(num_steps)
        with self._compilation.loop_options():
            begun, _, wait_secs, metrics, _ = self.compiled(
                phase, iterators, *arguments
            )
        self.is_compiled[phase] = True
        metrics = tf.nest.map_structure(lambda x: x.numpy(), metrics)
        self.reset(first + int(begun))
        return int(begun), float(wait_secs), metrics

    def signature(self, phase: int) -> tuple:
        """Return the types of the arguments of `compiled`."""
        begin = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int32)
        return phase, self.feed.spec(), *begin

    def request_stop(self) -> None:
        """Let the loop end after the current step."""
        self._stop.assign(True)

    def reset(self, number: int) -> None:
        """Set the number of steps taken; no step is in progress."""
        self._number.assign(number)
        self._activity.assign(IDLE)

    def progress(self) -> tuple[int, str]:
        """Return steps taken and activity, see `Trainer.progress`."""
        activity = int(self._activity)
        if activity == IDLE and not any(self.is_compiled):
            activity = TRACING
        elif activity >= COMPUTING and not self.is_compiled[self._phase]:
            activity = COMPUTING_FIRST  # Kernels are compiled and chosen.
        return int(self._number), ACTIVITIES[activity]

    def _steps(self, phase, iterators, first, num_steps):
        devices = self.feed.devices
        waits_for_host = self._compilation.device.waits_for_host
        with tf.device(HOST):  # The arguments are there.
            first = tf.identity(first)

        def should_continue(begun, taken, *_):
            with tf.device(HOST):
                return (begun < num_steps) & taken & ~self._stop.read_value()

        def body_calling_step(begun, taken, wait_secs, metrics, _):
            with inside_of_loop():
                with tf.device(HOST):
                    number = first + tf.cast(begun, tf.int64)
                    awaited, number, secs = self._await(iterators, number, taken)
                batches = make_batches(self.feed, awaited, [number] * len(devices))
                with tf.device(HOST), self._compilation.step_options():
                    taken, metrics = self._step_call(phase, batches, metrics)
                    return begun + 1, taken, wait_secs + secs, metrics, []

        def step_on_gpus(awaited, metrics, steps):
            batches = make_batches(self.feed, awaited, steps)
            _, metrics = self._train_step(phase, batches, metrics)
            return metrics, add_on_each(devices, steps, 1)

        if self._compilation.whole_step:
            step_on_gpus = tf.function(step_on_gpus, autograph=False, jit_compile=True)

        def body_with_step(begun, taken, wait_secs, metrics, steps):
            # Nothing is sent from the host to the GPUs, not even a control edge: a copy
            # of 8 bytes is issued when the previous step is enqueued, and drains the
            # GPU. The host continues as if all steps were taken.
            with inside_of_loop():
                with tf.device(HOST):
                    number = first + tf.cast(begun, tf.int64)
                    self._number.assign(number, read_value=False)
                    begun += 1
                awaited = self.feed.wait(iterators, steps)
                with tf.device(devices[0] if self._compilation.whole_step else None):
                    metrics, steps = step_on_gpus(awaited, metrics, steps)
                return begun, taken, wait_secs, metrics, steps

        # The condition is placed on the device of the loop, variables of the loop on
        # the devices of their initial values.
        with tf.device(HOST):
            begin = tf.constant(0), tf.constant(True), tf.zeros([], tf.float64)
            steps, body = [], body_calling_step
            if not waits_for_host:
                steps = add_on_each(devices, [first] * len(devices), 0)
                body = body_with_step
            begin = [*begin, self._zero_metrics(), steps]
            with around_loop():
                return tf.while_loop(
                    should_continue, body, begin, parallel_iterations=1
                )

    def _await(self, iterators, number, taken):
        """Wait for the feed; return its tensors, the number of the step and the time.

        The previous step is finished when the activity changes.
        """
        with tf.control_dependencies([number, taken]):
            waiting = self._activity.assign(WAITING, read_value=False)
            numbered = self._number.assign(number, read_value=False)
        with tf.control_dependencies([waiting, numbered]):
            since = _clock()
        with tf.control_dependencies([since]):
            numbers = [number] * len(self.feed.devices)
            awaited = self.feed.wait(iterators, numbers)
        with tf.control_dependencies(tf.nest.flatten(awaited)):
            secs = _clock() - since
        with tf.control_dependencies([secs]):
            computing = self._activity.assign(COMPUTING, read_value=False)
        with tf.control_dependencies([computing]):
            awaited = tf.nest.map_structure(colocated_identity, awaited)
            return awaited, tf.identity(number), secs


@contextlib.contextmanager
def around_loop() -> Iterator[None]:
    """Let a `tf.while_loop` leave the results of its body on their devices.

    TensorFlow returns the results of a body by identities without a device, which are
    placed on the first GPU, or on the device of the loop: gradients of other towers
    would be copied there and back in every iteration. Here each identity is on the
    device of its input.

    TensorFlow also lets every result of a body wait for all reads and assignments in
    it: the host would wait for the GPUs in every iteration. That is not needed, as a
    device ends an iteration before it begins the next one. Within an iteration
    `inside_of_loop` keeps the order of the operations on a variable.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    with tf_internals.around_loop(graph), tf.compat.v1.device(_device_of_identity):
        yield


@contextlib.contextmanager
def inside_of_loop() -> Iterator[None]:
    """Remove outer devices in the body of a loop `around_loop`.

    A device function in scope would be copied into every function that the body traces,
    with the devices around it; two towers may share such a function.
    """
    if tf.executing_eagerly():
        yield
        return
    with tf_internals.inside_of_loop(tf.compat.v1.get_default_graph()):
        yield


def _device_of_identity(op):
    if op.device or op.type != "Identity":
        return op.device
    return op.inputs[0].device


def colocated_identity(x):
    """Copy a tensor on its device; an iterator, which has none, on the host."""
    with tf.device(x.device or HOST):
        return tf.identity(x)


def _clock():
    """Read the time in seconds while the graph runs."""
    # `tf.timestamp` is an error if operations must be deterministic.
    if tf_internals.is_op_determinism_enabled():
        return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
    return tf.timestamp()
