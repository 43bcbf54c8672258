"""Many steps in one compiled call, which other threads can watch and stop, and the feed
of its batches.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.parallel.compilation import Compilation
from towers.parallel.copies import variable
from towers.parallel.devices import HOST
from towers.parallel.reduce import on_each, without_int32

# The activity of a trainer: a number in a tf.Variable, and its name in `progress`.
IDLE, TRACING, WAITING, COMPUTING, COMPUTING_FIRST, COMPUTING_OR_WAITING = range(6)
ACTIVITIES = (
    "idle",
    "tracing the step",
    "waiting for data",
    "computing",
    "computing the first steps",
    "computing or waiting for data",  # a loop on GPUs does not tell the host
)

# These may take long where nothing is wrong.
STARTING_ACTIVITIES = (ACTIVITIES[TRACING], ACTIVITIES[COMPUTING_FIRST])

# During these no update is under way, so `Trainer.state` is consistent.
CONSISTENT_ACTIVITIES = (ACTIVITIES[TRACING], ACTIVITIES[WAITING])

Batch = dict[str, tf.Tensor]
# first step -> the batches of all steps from there on
Stream = Callable[[int], tf.data.Dataset]


class Feed(Protocol):
    """The batches of the compiled loop, made for each tower.

    In the graph of a step `wait` comes first, while no update is under way: it alone
    may take long or fail. Then the step computes on what `batches` gives.
    """

    devices: Sequence[str]  # per tower, makes its batches

    def spec(self) -> Any:
        """The types of the iterators, for tracing."""

    def start(self, step: int, num_steps: int) -> Any:
        """Called before the loop of some steps; its iterators, if it has any."""

    def wait(self, iterators: Any) -> list:
        """Returns, in the graph, the tensors per tower that a step has to wait for.
        `iterators` are the result of `start`.
        """

    def batch(self, tower: int, awaited: Any, step: tf.Tensor) -> Batch:
        """Returns, in the graph, a tower's images of the batch of a step, an int64
        scalar on its device; `awaited` is its entry of `wait`.
        """

    def restart(self) -> None:
        """Forgets what is held; the next `start` may be at any step."""

    def batches_of(self, step: int) -> list[Batch]:
        """Returns the batches of one step, per tower, outside of a graph."""


class Streams:
    """Batches that arrive one after the other, on GPUs copied there two steps ahead: in
    a stream per tower, or in a single one whose elements are tuples. `processes` are
    per tower a function (step, elements of the stream) -> batch, on the device; by
    default the stream has whole batches.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        devices: Sequence[str],
        processes: Sequence[Callable[[tf.Tensor, Batch], Batch]] | None = None,
    ):
        self._streams, self.devices = streams, devices
        self._processes = processes or [lambda _, batch: batch for _ in devices]
        self._on_gpus = "GPU" in devices[0]
        self._iterators = self._specs = None
        self._step, self._kept = None, []

    def _datasets(self, step):
        """Kept, as TensorFlow never frees all of the functions of one."""
        if step != self._step:
            datasets = [stream(step) for stream in self._streams]
            if self._on_gpus:
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
        if self._specs is None:
            datasets = self._iterators or self._datasets(0)
            self._specs = [tf.data.IteratorSpec(x.element_spec) for x in datasets]
        return self._specs

    def start(self, step, num_steps):
        if self._iterators is None:
            self._iterators = self._new_iterators(step)
        return self._iterators

    def wait(self, iterators):
        if not self._on_gpus:
            with tf.device(HOST):
                return list(next(iterators[0]))

        def next_elements(iterator):
            # They have the iterator's device, which no name tells.
            return tf.nest.map_structure(tf.identity, next(iterator))

        return on_each(next_elements, self.devices, iterators)

    def batch(self, tower, awaited, step):
        with tf.device(self.devices[tower]):
            return self._processes[tower](step, awaited)

    def restart(self):
        self._iterators = None

    def batches_of(self, step):
        iterators = self._new_iterators(step)
        steps = [tf.constant(step, tf.int64)] * len(self.devices)
        return make_batches(self, self.wait(iterators), steps)


def make_batches(feed: Feed, awaited: list, steps: Sequence[tf.Tensor]) -> list[Batch]:
    """Returns each tower's images of the batch of a step, see `Feed.batch`."""
    towers = range(len(feed.devices))
    return [feed.batch(*x) for x in zip(towers, awaited, steps, strict=True)]


def add_on_each(
    devices: Sequence[str], numbers: Sequence[tf.Tensor], addend: int
) -> list[tf.Tensor]:
    """Returns the number of each device, an int64 scalar, and the addend, on it."""
    return on_each(lambda x: x + tf.constant(addend, tf.int64), devices, numbers)


class Loop:
    """The steps of a synchronous trainer; each phase of the run is traced apart.

    Args:
        train_step: (phase, batches, metrics of the step before) -> (whether the step
            was taken, metrics), in the graph; metrics are a tensor, or several.
        zero_metrics: metrics of the same form, for the loop to begin with.
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
            self._number = variable(np.int64(0), "number")  # steps taken
        self._is_compiled, self._phase = [False] * num_phases, 0
        self.compiled = tf.function(self._steps, autograph=False)
        self._step_call = tf.function(
            train_step, autograph=False, experimental_attributes={"_noinline": True}
        )

    def __call__(
        self, phase: int, first: int, num_steps: int
    ) -> tuple[int, float, Any]:
        """Takes up to `num_steps` steps of a phase after the `first` ones; fewer after
        a stop request. Where one is refused, none after it changes anything.

        Returns (how many were begun, seconds that they waited for batches, metrics of
        the last one).
        """
        self._phase = phase
        self._number.assign(first)
        on_cpus = self._compilation.on_cpus
        self._activity.assign(WAITING if on_cpus else COMPUTING_OR_WAITING)
        iterators = self.feed.start(first, num_steps)
        if not self._is_compiled[phase]:
            self._activity.assign(TRACING)
            # Not left to the call: TensorFlow warns of calls that trace.
            self.compiled.get_concrete_function(*self._spec(phase))
        with tf.device(HOST):
            arguments = tf.constant(first, tf.int64), tf.constant(num_steps)
        with self._compilation.loop_options():
            begun, _, wait_secs, metrics, _ = self.compiled(
                phase, iterators, *arguments
            )
        self._is_compiled[phase] = True
        metrics = tf.nest.map_structure(lambda x: x.numpy(), metrics)
        result = int(begun), float(wait_secs), metrics
        self._number.assign(first + result[0])
        self._activity.assign(IDLE)
        return result

    def trace(self, phase: int) -> tf.Graph:
        """The graph of the loop of a phase; no step is taken."""
        return self.compiled.get_concrete_function(*self._spec(phase)).graph

    def _spec(self, phase):
        begin = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int32)
        return phase, self.feed.spec(), *begin

    def request_stop(self) -> None:
        self._stop.assign(True)

    def reset(self, number: int) -> None:
        """Resets the loop after an error to the last finished step, `number`."""
        self._number.assign(number)
        self._activity.assign(IDLE)

    def progress(self) -> tuple[int, str]:
        """As `Trainer.progress`."""
        activity = int(self._activity)
        if activity == IDLE and not any(self._is_compiled):
            activity = TRACING
        elif activity >= COMPUTING and not self._is_compiled[self._phase]:
            activity = COMPUTING_FIRST  # which compiles kernels, and chooses them
        return int(self._number), ACTIVITIES[activity]

    def _steps(self, phase, iterators, first, num_steps):
        on_cpus, devices = self._compilation.on_cpus, self.feed.devices
        with tf.device(HOST):  # where the arguments are
            first = tf.identity(first)

        def wanted(begun, taken, *_):
            with tf.device(HOST):
                return (begun < num_steps) & taken & ~self._stop.read_value()

        def body_on_cpus(begun, taken, wait_secs, metrics, _):
            with inside_of_loop():
                with tf.device(HOST):
                    number = first + tf.cast(begun, tf.int64)
                    awaited, number, secs = self._await(iterators, number, taken)
                batches = make_batches(self.feed, awaited, [number] * len(devices))
                with tf.device(HOST), self._compilation.step_options():
                    taken, metrics = self._step_call(phase, batches, metrics)
                    return begun + 1, taken, wait_secs + secs, metrics, []

        def body(begun, taken, wait_secs, metrics, steps):
            # Nothing goes from the host to the GPUs, not even a control edge: a copy
            # of 8 bytes is issued when the step before is enqueued, and drains the GPU.
            # The host goes on as if all steps were taken.
            with inside_of_loop():
                with tf.device(HOST):
                    number = first + tf.cast(begun, tf.int64)
                    self._number.assign(number, read_value=False)
                    begun += 1
                batches = make_batches(self.feed, self.feed.wait(iterators), steps)
                _, metrics = self._train_step(phase, batches, metrics)
                return begun, taken, wait_secs, metrics, add_on_each(devices, steps, 1)

        # A loop's condition is where the loop is, its variables where they begin.
        with tf.device(HOST):
            begin = tf.constant(0), tf.constant(True), tf.zeros([], tf.float64)
            steps = [] if on_cpus else add_on_each(devices, [first] * len(devices), 0)
            begin = [*begin, self._zero_metrics(), steps]
            turn = body_on_cpus if on_cpus else body
            with around_loop():
                return tf.while_loop(wanted, turn, begin, parallel_iterations=1)

    def _await(self, iterators, number, taken):
        """Waits for the feed; returns what it waited for, the number of the step, and
        the waiting time. The step before is finished when the activity changes.
        """
        with tf.control_dependencies([number, taken]):
            waiting = self._activity.assign(WAITING, read_value=False)
            numbered = self._number.assign(number, read_value=False)
        with tf.control_dependencies([waiting, numbered]):
            since = _clock()
        with tf.control_dependencies([since]):
            awaited = self.feed.wait(iterators)
        with tf.control_dependencies(tf.nest.flatten(awaited)):
            secs = _clock() - since
        with tf.control_dependencies([secs]):
            computing = self._activity.assign(COMPUTING, read_value=False)
        with tf.control_dependencies([computing]):
            awaited = tf.nest.map_structure(colocated_identity, awaited)
            return awaited, tf.identity(number), secs


@contextlib.contextmanager
def around_loop() -> Iterator[None]:
    """A `tf.while_loop` that is called here leaves the results of its body on their
    devices, and does not have them wait for the variables of others.

    TensorFlow returns the results of a body by identities without a device, which are
    placed on the first GPU, or on the loop's device: gradients of other towers would be
    copied there and back in every turn. Here these identities are on the device of what
    they return.

    TensorFlow also has every result of a body wait for all reads and assignments in it:
    the host would wait for the GPUs in every turn. That is not needed, as a device ends
    a turn before it begins the next one. Within a turn `inside_of_loop` keeps the order
    of the operations on a variable.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    with tf_internals.around_loop(graph), tf.compat.v1.device(_device_of_identity):
        yield


@contextlib.contextmanager
def inside_of_loop() -> Iterator[None]:
    """The body of a loop `around_loop`: it alone chooses the devices. A device function
    in scope would be copied into every function that the body traces, with the devices
    around it; two towers may share such a function.
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
    """An identity on the device of the tensor; an iterator, which has none, is on the
    host.
    """
    with tf.device(x.device or HOST):
        return tf.identity(x)


def _clock():
    """Seconds, read while the graph runs; TensorFlow's operation for that is an error
    where everything has to be deterministic.
    """
    if tf_internals.is_op_determinism_enabled():
        return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
    return tf.timestamp()
