"""Many steps in one compiled call, which other threads can watch and stop."""

from collections.abc import Callable, Mapping

import tensorflow as tf

from towers.parallel.devices import HOST
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
        stream: first step -> the batches of all steps from there on.
        resident: makes the batches inside the compiled step, in place of the stream:
            `start(step) -> carry` and (step, carry) -> (batch, carry).
        inline: whether a step's operations are those of the loop itself. On a CPU they
            should be those of a function that the loop calls: the rewriting for oneDNN
            follows their topological order, which a loop does not have, and
            occasionally misses those that depend on their forward part, such as
            `MaxPoolGrad`. On a GPU that call would copy the batch through the host.
    """

    def __init__(
        self,
        train_step: TrainStep,
        zero_metrics: Callable[[], dict[str, tf.Tensor]],
        *,
        global_step: tf.Variable,
        num_phases: int,
        stream: Callable[[int], tf.data.Dataset],
        resident: Callable | None = None,
        inline: bool,
    ):
        self._train_step = train_step
        self._zero_metrics = zero_metrics
        self._global_step = global_step
        self._stream = stream
        self._resident = resident
        self._batches = None
        with tf.device(HOST):
            self._activity = tf.Variable(IDLE, trainable=False, name="activity")
            self._stop = tf.Variable(False, trainable=False, name="stop")
        self._has_run = False
        self._step_graphs = [None] * num_phases
        self._graphs = [None] * num_phases
        self.compiled = tf.function(self._steps, autograph=False)
        self._inline = inline
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
        if self._batches is None and self._resident is None:
            self._batches = iter(self._stream(int(self._global_step)))
        if not self._has_run:
            self._trace(range(phase, len(self._step_graphs)))
        done, taken, wait_secs, metrics = self.compiled(
            phase, self._batches, tf.constant(num_steps)
        )
        self._has_run = True
        self._activity.assign(IDLE)
        metrics = {name: value.numpy() for name, value in metrics.items()}
        return int(done), bool(taken), float(wait_secs), metrics

    def trace(self) -> list[tf.Graph]:
        """Traces all phases without taking a step; the graph of one step of each."""
        self._trace(range(len(self._step_graphs)))
        return self._step_graphs

    def graphs(self) -> list[tf.Graph]:
        """Traces all phases without taking a step; the graph of the loop of each."""
        self._trace(range(len(self._graphs)))
        return self._graphs

    def _trace(self, phases):
        """Compiles the phases, so that no later call pays for it."""
        batches = None
        if self._resident is None:
            stream = self._stream(0) if self._batches is None else self._batches
            batches = tf.data.IteratorSpec(stream.element_spec)
        for phase in phases:
            traced = self.compiled.get_concrete_function(
                phase, batches, tf.TensorSpec([], tf.int32)
            )
            self._graphs[phase] = traced.graph

    def restart_input(self) -> None:
        """Recreates the input iterator at the current global step."""
        self._batches = None

    def request_stop(self) -> None:
        self._stop.assign(True)

    def progress(self) -> tuple[int, str]:
        """As `Trainer.progress`."""
        activity = int(self._activity)
        if activity == IDLE and not self._has_run:
            activity = TRACING
        return int(self._global_step), ACTIVITIES[activity]

    def _steps(self, phase, batches, num_steps):
        def wanted(done, taken, wait_secs, carry, metrics):
            with tf.device(HOST):
                return (done < num_steps) & taken & ~self._stop.read_value()

        def body(done, taken, wait_secs, carry, metrics):
            with tf.device(HOST):
                # The activity changes only once the step before is finished.
                with tf.control_dependencies([done, taken]):
                    waiting = self._activity.assign(WAITING, read_value=False)
                with tf.control_dependencies([waiting]):
                    since = tf.timestamp()
                with tf.control_dependencies([since]):
                    batch, carry = self._next(batches, carry)
                with tf.control_dependencies(list(batch.values())):
                    wait_secs += tf.timestamp() - since
                with tf.control_dependencies([wait_secs]):
                    computing = self._activity.assign(COMPUTING, read_value=False)
            with tf.control_dependencies([computing]):
                batch = {name: _colocated_identity(x) for name, x in batch.items()}
            if self._inline:
                taken, metrics = self._one_step(phase, batch)
            else:
                with tf.device(HOST):
                    taken, metrics = self.step_call(phase, batch)
            return done + 1, taken, wait_secs, carry, metrics

        carry = ()
        if self._resident is not None:
            carry = self._resident.start(self._global_step.read_value())
        with tf.device(HOST):
            begun = tf.constant(0), tf.constant(True), tf.zeros([], tf.float64)
            no_metrics = self._zero_metrics()
        done, taken, wait_secs, _, metrics = while_loop(
            wanted, body, (*begun, carry, no_metrics)
        )
        return done, taken, wait_secs, metrics

    def _one_step(self, phase, batch):
        self._step_graphs[phase] = tf.compat.v1.get_default_graph()
        return self._train_step(phase, batch)

    def _next(self, batches, carry):
        if self._resident is None:
            return next(batches), carry
        return self._resident(self._global_step.read_value(), carry)


def _colocated_identity(x):
    """An identity on the device of the tensor; an iterator, which has none, is on the
    host."""
    with tf.device(x.device or HOST):
        return tf.identity(x)
