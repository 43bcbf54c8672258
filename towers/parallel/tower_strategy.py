"""What the strategies share: the network, its variables by their canonical names, and
evaluation on all devices.

A strategy adds where its variables live (`_create_variables`, `_named_variables`), what
a tower evaluates with (`_logits`), and how it trains.
"""

import abc
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.data.tta import TestTimeAugmentation, least_confident
from towers.models.variables import variable_names
from towers.optim import losses
from towers.optim.phases import Phase, phases_of, resize_to_phase, zero_frozen
from towers.optim.update import Update
from towers.parallel.devices import HOST
from towers.parallel.gradients import check_gradients, shares, split_batch
from towers.parallel.memory import Account, create_accounts, fullest
from towers.parallel.strategy import Strategy
from towers.parallel.tower import (
    LossFn,
    tower_counts,
    tower_gradients,
    tower_logits,
)
from towers.parallel.variables import Variables


class TowerStrategy(Strategy):
    """Towers that share the images of each batch.

    Args:
        model: a single-device Functional model; its variables are the initial values.
        loss_fn: (logits, labels) -> the loss of each image.
        update: from the mean gradient to the next parameters.
        stream: first step -> the batches of all steps from there on.
        batch_size: images over all towers.
        devices: one device name per tower.
        stages: parts of the run whose steps are not alike, in order; `model` is that of
            the last one. Empty where all are alike and nothing is frozen.
        tta: the test-time augmentation of evaluations.
        compile_towers: whether XLA compiles the forward and backward part of each
            tower, and nothing that crosses devices.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        loss_fn: LossFn,
        update: Update,
        stream: Callable[[int], tf.data.Dataset],
        batch_size: int,
        devices: Sequence[str],
        stages: Sequence[Phase] = (),
        tta: TestTimeAugmentation = TestTimeAugmentation(),  # noqa: B008 (frozen)
        compile_towers: bool = False,
    ):
        self._model = model
        self._loss_fn = loss_fn
        self._update = update
        self._stream = stream
        self._stages = phases_of(stages, model)
        self._tta = tta
        self._devices = list(devices)
        self._sizes = shares(batch_size, len(devices))
        self._weights = [size / batch_size for size in self._sizes]
        self._names = variable_names(model.trainable_variables)
        self._state_names = variable_names(model.non_trainable_variables)
        self._create_variables()
        with tf.device(HOST):
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        if compile_towers:
            self._tower_gradients = tf.function(
                self._tower_gradients, autograph=False, jit_compile=True
            )
        self._evaluate_batch = tf.function(self._count, autograph=False)

    # What a strategy decides.

    @abc.abstractmethod
    def _create_variables(self) -> None:
        """Makes the variables, with the model's as initial values."""

    @abc.abstractmethod
    def _logits(
        self, batches: Sequence[Mapping[str, tf.Tensor]], use_averages: bool
    ) -> list[tf.Tensor]:
        """Every tower's logits of its share, in inference."""

    @abc.abstractmethod
    def _begin_anew(self) -> None:
        """Goes on from the step, whatever it is now, with batches drawn anew."""

    @abc.abstractmethod
    def _named_variables(self) -> dict[str, tf.Variable]:
        """Canonical name -> variable, without those of the progress."""

    @abc.abstractmethod
    def _variable_sets(self) -> list[Variables]:
        """All copies and shards of the variables."""

    @abc.abstractmethod
    def _graphs(self) -> list[list[tf.Graph]]:
        """Per stage the traced graphs that compute at the same time."""

    def memory(self) -> list[Account]:
        named = [pair for v in self._variable_sets() for pair in v.named().items()]
        return fullest(
            create_accounts(named, graphs, self._devices) for graphs in self._graphs()
        )

    def _initial_values(self):
        """Parameters and model state of the model, name -> value."""
        params, state = (
            self._model.trainable_variables,
            self._model.non_trainable_variables,
        )
        return (
            {n: v.value for n, v in zip(self._names, params, strict=True)},
            {n: v.value for n, v in zip(self._state_names, state, strict=True)},
        )

    def _tower_gradients(self, stage, params, state, share, loss_scale=None):
        """What a tower computes in a stage."""
        model = self._stages[stage].model
        result = tower_gradients(model, self._loss_fn, params, state, share, loss_scale)
        return self._checked(stage, result)

    def _fitted(self, stage, share):
        """A tower's share of a batch with images of the stage's size."""
        model = self._stages[stage].model
        return share if model is self._model else resize_to_phase(share, model)

    def _checked(self, stage, result):
        """The result of a tower, or of a device of it, in a stage."""
        check_gradients([zip(result.gradients, self._names, strict=True)])
        frozen = self._stages[stage].frozen
        gradients = zero_frozen(result.gradients, self._names, frozen)
        return result._replace(gradients=gradients)

    def _add_weight_decay(self, stage, params, gradients, weight=1.0):
        """(weight decay, the gradients with that of the weight decay)."""
        decay, added = losses.add_weight_decay(
            self._model.trainable_variables, params, gradients, weight
        )
        return decay, zero_frozen(added, self._names, self._stages[stage].frozen)

    def describe(self) -> list[str]:
        least, most = min(self._sizes), max(self._sizes)
        share = f"{most}" if least == most else f"{least} or {most}"
        return [f"{len(self._sizes)} tower(s) with {share} images each"]

    # Evaluation.

    def _count(self, batch, use_averages):
        pieces = self._pieces(batch)
        logits = self._logits(pieces, use_averages)
        counts = self._counts(logits, pieces)
        if not self._tta.transforms:
            return counts
        if self._tta.fraction < 1:
            with tf.device(HOST):
                batch = dict(batch) | {"logits": tf.concat(logits, 0)}
                batch = least_confident(batch, batch["logits"], self._tta.fraction)
            pieces = self._pieces(batch)
            logits = [piece.pop("logits") for piece in pieces]
        # Those that are looked at change their answer, the others keep it.
        before = self._counts(logits, pieces)["correct"]
        logits = self._logits_of_views(pieces, use_averages, logits)
        after = self._counts(logits, pieces)["correct"]
        with tf.device(HOST):
            return counts | {"correct_tta": counts["correct"] - before + after}

    def _pieces(self, batch):
        """Per tower its part of a batch; of a small one some towers have none."""
        size = batch["labels"].shape[0]
        return split_batch(batch, shares(size, min(size, len(self._devices))))

    def _counts(self, logits, pieces):
        """The sums of `tower_counts`."""
        counts = []
        for tower, (of_tower, piece) in enumerate(zip(logits, pieces, strict=True)):
            with tf.device(self._devices[tower]):
                counts.append(tower_counts(self._loss_fn, of_tower, piece))
        with tf.device(HOST):
            return {name: tf.add_n([c[name] for c in counts]) for name in counts[0]}

    def _logits_of_views(self, pieces, use_averages, of_plain):
        """Every tower's mean logits over the views, given those of the plain image."""
        totals = [0.0] * len(pieces)
        for weight, view in self._tta.transforms:
            logits = of_plain
            if view is not None:
                seen = []
                for tower, piece in enumerate(pieces):
                    with tf.device(self._devices[tower]):
                        seen.append(piece | {"images": view(piece["images"])})
                logits = self._logits(seen, use_averages)
            for tower, of_view in enumerate(logits):
                with tf.device(self._devices[tower]):
                    wide = tf.cast(of_view, tf.float64)  # half width has no room
                    totals[tower] += weight * wide
        return totals

    def _logits_of_whole(self, batches, fetch):
        """`_logits` of towers that hold a whole network each.

        Args:
            batches: per tower its share.
            fetch: tower -> parameters and model state, on the device in scope.
        """
        found = []
        for tower, share in enumerate(batches):
            with tf.device(self._devices[tower]), tf.name_scope(f"tower_{tower}"):
                params, state = fetch(tower)
                found.append(tower_logits(self._model, params, state, share))
        return found

    def evaluate(
        self, batches: Iterable[Mapping[str, tf.Tensor]], use_averages: bool = False
    ) -> dict[str, float]:
        if use_averages and not self._update.ema_decay:
            raise ValueError("this run keeps no moving averages: its ema_decay is 0")
        totals = collections.Counter(correct=0.0, images=0.0, loss=0.0)
        for batch in batches:
            counts = self._evaluate_batch(dict(batch), use_averages)
            totals.update({name: float(value) for name, value in counts.items()})
        return dict(totals)

    # The canonical state.

    def _progress_variables(self) -> dict[str, tf.Variable]:
        """Canonical name -> variable of what says how far the training is."""
        return {"step": self._step}

    def state(self) -> dict[str, np.ndarray]:
        named = self._named_variables() | self._progress_variables()
        return {name: variable.numpy() for name, variable in named.items()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        named = self._named_variables() | self._progress_variables()
        for name, variable in named.items():
            variable.assign(state[name])
        self._begin_anew()
