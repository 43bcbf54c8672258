"""Many steps in one compiled call, which other threads can watch and stop."""

import contextlib
import time
from collections.abc import Callable, Mapping

import tensorflow as tf
from tensorflow.python.framework import config

from towers.parallel import grappler
from towers.parallel.devices import HOST
from towers.parallel.feed import Feed
from towers.parallel.graphs import while_loop
from towers.parallel.trainer import ACTIVITIES, COMPUTING, IDLE, TRACING, WAITING

# (phase, batch) -> (whether the step was taken, metrics), in the graph.
TrainStep = Callable[
    [int, Mapping[str, tf.Tensor]], tuple[tf.Tensor, dict[str, tf.Tensor]]
]


class Loop:
    """The steps of a synchronous trainer.

    Args:
        train_step: one step.
        zero_metrics: metrics of the same form, for the loop to begin with.
        global_step: the variable that counts the steps taken.
        num_phases: phases of the run, each of which is traced apart.
        feed: the batches.
        inline: whether a step's operations are those of the loop itself. On a CPU they
            should be those of a function that the loop calls: the rewriting for oneDNN
            follows their topological order, which a loop does not have, and
            occasionally misses those that depend on their forward part, such as
            `MaxPoolGrad`. On a GPU that call would copy the batch through the host.
        optimize: whether Grappler optimizes a step that is called; one that is inline
            it does.
    """

    def __init__(
        self,
        train_step: TrainStep,
        zero_metrics: Callable[[], dict[str, tf.Tensor]],
        *,
        global_step: tf.Variable,
        num_phases: int,
        feed: Feed,
        inline: bool,
        optimize: bool = True,
    ):
        self._train_step = train_step
        self._zero_metrics = zero_metrics
        self._global_step = global_step
        self.feed = feed
        with tf.device(HOST):
            self._activity = tf.Variable(IDLE, trainable=False, name="activity")
            self._stop = tf.Variable(False, trainable=False, name="stop")
        self._step_graphs = [None] * num_phases
        self._graphs = [None] * num_phases
        self._compiled_phases = set()
        self.compiled = tf.function(self._steps, autograph=False)
        self._inline, self._optimize = inline, optimize
        self.step_call = tf.function(
            self._one_step, autograph=False, experimental_attributes={"_noinline": True}
        )

    def __call__(self, phase: int, num_steps: int) -> tuple[int, bool, float, dict]:
        """Takes up to `num_steps` steps of a phase, fewer after a stop request
        or where one is not taken.

        Returns:
            How many were begun; whether the last one was taken; how long they waited
            for batches, in seconds; the metrics of the last one.
        """
        self._activity.assign(WAITING)
        iterator = self.feed.start(int(self._global_step))
        if phase not in self._compiled_phases:
            self._activity.assign(TRACING)
            self._trace(phase)
        with tf.device(HOST):
            num_steps = tf.constant(num_steps)
        # A loop of one call has nothing to optimize.
        with contextlib.nullcontext() if self._inline else grappler.disabled():
            done, taken, wait_secs, metrics = self.compiled(phase, iterator, num_steps)
        self._compiled_phases.add(phase)
        self._activity.assign(IDLE)
        metrics = {name: value.numpy() for name, value in metrics.items()}
        return int(done), bool(taken), float(wait_secs), metrics

    def trace(self) -> list[tf.Graph]:
        """Traces all phases without taking a step; the graph of one step of each."""
        for phase in range(len(self._step_graphs)):
            self._trace(phase)
        return self._step_graphs

    def graphs(self) -> list[tf.Graph]:
        """Traces all phases without taking a step; the graph of the loop of each."""
        self.trace()
        return self._graphs

    def _trace(self, phase):
        """Not left to the first call: TensorFlow warns of calls that trace."""
        traced = self.compiled.get_concrete_function(
            phase, self.feed.spec(), tf.TensorSpec([], tf.int32)
        )
        self._graphs[phase] = traced.graph

    def restart_input(self) -> None:
        """Recreates the input iterator at the current global step."""
        self.feed.restart()

    def request_stop(self) -> None:
        self._stop.assign(True)

    def reset(self) -> None:
        """After a call that ended with an error before it changed a variable: the state
        is that of the last finished step."""
        self._activity.assign(IDLE)

    def progress(self) -> tuple[int, str]:
        """As `Trainer.progress`."""
        activity = int(self._activity)
        if activity == IDLE and not self._compiled_phases:
            activity = TRACING
        return int(self._global_step), ACTIVITIES[activity]

    def _steps(self, phase, iterator, num_steps):
        def wanted(done, taken, wait_secs, metrics):
            with tf.device(HOST):
                return (done < num_steps) & taken & ~self._stop.read_value()

        def body(done, taken, wait_secs, metrics):
            with tf.device(HOST):
                # The activity changes only once the step before is finished.
                with tf.control_dependencies([done, taken]):
                    waiting = self._activity.assign(WAITING, read_value=False)
                with tf.control_dependencies([waiting]):
                    since = _clock()
                with tf.control_dependencies([since]):
                    number = self._global_step.read_value()
                    awaited = self.feed.wait(iterator, number)
                with tf.control_dependencies(list(awaited.values())):
                    wait_secs += _clock() - since
                with tf.control_dependencies([wait_secs]):
                    computing = self._activity.assign(COMPUTING, read_value=False)
            with tf.control_dependencies([computing]):
                awaited = {name: _colocated_identity(x) for name, x in awaited.items()}
                number = _colocated_identity(number)
            batch = self.feed.batch(awaited, number)
            if self._inline:
                taken, metrics = self._one_step(phase, batch)
            else:
                with tf.device(HOST), self._step_options():
                    taken, metrics = self.step_call(phase, batch)
            with tf.device(HOST):
                return done + 1, taken, wait_secs, metrics

        # A loop's condition is where the loop is, its variables where they begin.
        with tf.device(HOST):
            begin = tf.constant(0), tf.constant(True), tf.zeros([], tf.float64)
            return while_loop(wanted, body, (*begin, self._zero_metrics()))

    def _step_options(self):
        return contextlib.nullcontext() if self._optimize else grappler.disabled()

    def _one_step(self, phase, batch):
        self._step_graphs[phase] = tf.compat.v1.get_default_graph()
        return self._train_step(phase, batch)


def _colocated_identity(x):
    """An identity on the device of the tensor; an iterator, which has none, is on the
    host."""
    with tf.device(x.device or HOST):
        return tf.identity(x)


def _clock():
    """Seconds, read while the graph runs; TensorFlow's operation for that is an error
    where everything has to be deterministic."""
    if config.is_op_determinism_enabled():
        return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
    return tf.timestamp()
