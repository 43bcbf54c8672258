"""A training under way: what it has reached, and what it does between two steps."""

import copy
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from towers import console, errors
from towers.build import assembly, builder
from towers.build.restored import evaluated_weights
from towers.callbacks import Callback
from towers.cluster.agreement import WAITING, validate_copies
from towers.config import FIELDS, Config, non_defaults
from towers.config.metrics import metrics_of
from towers.data.batches import EvalBatches
from towers.metrics.metrics import create_metric, thresholds_json
from towers.metrics.predictions import LabelSets
from towers.metrics.results import epoch_line, figures_of_counts, record_of
from towers.parallel.evaluator import Evaluation
from towers.parallel.loop import CONSISTENT_ACTIVITIES, Feed
from towers.parallel.trainer import Trainer
from towers.run.checkpoint import Snapshot
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.progress import Progress, as_lists
from towers.training.callback_list import CallbackList
from towers.training.display import Display
from towers.training.outputs import (
    Outputs,
    is_between_steps,
    settled_state,
    validate_finite,
)
from towers.training.restore import apply_plateau_decay
from towers.training.summaries import Summaries
from towers.training.watchdog import Watchdog

# Target duration of one compiled call: signals and the clock are served between calls.
CALL_SECS = 2.0

# Options in TensorBoard's table of hyperparameters, besides non-default options.
HPARAMS = ("dataset", "model", "batch_size", "optimizer", "learning_rate", "num_epochs")


class Run:
    """A training under way.

    Its methods are called inside of `Watchdog.call`, unless they say otherwise.

    Attributes:
        best_by: the metric that decides which step is best; "auto" is resolved.
        progress: what a checkpoint stores besides the tensors.
        evaluated: step and figures of the last evaluation; None before the first.
        stopped: whether all workers agreed to stop before the last step.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        parts: builder.Parts,
        trainer: Trainer,
        outputs: Outputs,
        display: Display,
        callbacks: Sequence[Callback],
    ):
        self.config, self.folder, self.parts = config, folder, parts
        self.trainer, self.outputs, self.display = trainer, outputs, display
        self.workers, self.reports = trainer.workers, outputs.reports
        self.dataset_info = DatasetInfo.of(parts.data)
        auto = metrics_of(parts.data.multi_label)[0]
        self.best_by = auto if config.best_by == "auto" else config.best_by
        self.last_step = parts.last_step
        self.progress = Progress()
        self.evaluated: tuple[int, Evaluation] | None = None
        self.stopped = False
        self.callbacks = CallbackList(callbacks, outputs)
        self.watchdog = Watchdog(
            trainer,
            CONSISTENT_ACTIVITIES,
            stuck_after_secs=config.stuck_after_secs,
            tick=display.tick,
        )
        self._periods = parts.periods
        self._summaries = Summaries(parts, trainer, self.reports, self.watchdog)
        self._metric = create_metric(self.best_by)
        self._saved_at = self._evaluated_at = 0.0
        # TensorFlow traces the functions of each data set that is made, and never frees
        # all of that: every evaluation has the same feed.
        self._eval_feed: Feed | None = None
        self._staleness: list[int] = []  # of asynchronous updates since the last log

    @property
    def step(self) -> int:
        """The steps taken."""
        return self.progress.step

    @property
    def is_out_of_patience(self) -> bool:
        """Return whether `patience` evaluations passed without improvement."""
        return 0 < self.config.patience <= self.progress.num_worse

    @property
    def is_at_end(self) -> bool:
        """Return whether no step is left."""
        return self.step >= self.last_step or self.is_out_of_patience

    # Agreements of all workers.

    def start_from_chief(self) -> None:
        """Give every worker the state and the progress that the chief has restored."""
        if self.workers.size == 1:
            return
        state = self.trainer.state()
        with self.watchdog.activity(WAITING):
            progress, *_ = self.workers.exchange(self.progress.to_json())
            state = self.workers.broadcast(state)
        self.progress = Progress.from_json(progress)
        self.trainer.load(state)
        apply_plateau_decay(self.trainer, self.config, self.progress.num_plateaus)

    def plan_next_call(self, steps_until_trace_event: float) -> tuple[int, bool, bool]:
        """Return the chief's plan: (number of steps, whether to save, to summarize).

        The number is at most `steps_until_trace_event`, and 0 after a signal to any
        worker; checkpoints and summaries are due by the clock.
        """
        config, step, now = self.config, self.step, time.monotonic()
        num_steps = min(
            config.steps_per_loop,
            self._periods.next_due(step) - step,
            self.last_step - step,
            self.progress.stopwatch.steps_in(CALL_SECS),
            steps_until_trace_event,
        )
        with self.watchdog.activity(WAITING):
            num_steps, saves, summarizes = self.workers.agree(
                int(num_steps),
                now - self._saved_at > config.checkpoint_every_secs > 0,
                now - self._summaries.written_at > config.summary_every_secs > 0,
                self.watchdog.stop_requested,
            )
        self.stopped = not num_steps
        return num_steps, saves, summarizes

    def wait_for_chief(self) -> None:
        """Wait until the chief has saved the last step; outside of `Watchdog.call`.

        If all have agreed to stop, wait for nothing but this agreement, which another
        worker may still be receiving.
        """
        stops_alone = self.watchdog.stop_requested and not self.stopped
        if self.workers.size == 1 or stops_alone:
            return

        def meet():
            with self.watchdog.activity(WAITING):
                self.workers.agree(0, False, False, False)

        try:
            self.watchdog.call(meet)
        except (errors.Preempted, errors.WorkerLostError):
            if not (self.outputs.saved_step == self.step or self.stopped):
                raise

    # Steps.

    def begin(self) -> None:
        """Open the board, call `on_start`, and make up for a missed evaluation."""
        config, split = self.config, self.parts.eval_split[0]
        hparams = [n for n in FIELDS if n in {*HPARAMS, *non_defaults(config)}]
        options = dataclasses.asdict(config)
        self.reports.on_board(lambda board: board.begin(options, hparams), split)
        self.display.update(step=self.step, epoch=self._epoch_at(self.step))
        self._saved_at = self._evaluated_at = time.monotonic()
        self._summaries.written_at = self._saved_at
        self.callbacks.call("on_start", self.folder.path, options, self.step)
        if self.progress.open_record:
            self.outputs.saved_step = -1  # its checkpoint lacks the evaluation
            self.evaluate_and_save()

    def count(self, metrics: dict[str, Any], secs: float) -> int:
        """Count the steps of a call of the trainer; return their number.

        Figures of the whole call, and not of its last step, leave the metrics.
        """
        config, parts, progress = self.config, self.parts, self.progress
        before, step = self.step, metrics.pop("step")
        self._staleness.extend(metrics.pop("staleness", ()))
        stopwatch = progress.stopwatch
        stopwatch.add(step - before, secs, metrics.pop("input_wait_secs"))
        if step in {phase.end_step for phase in parts.phases}:
            stopwatch.begin_phase()
        epoch = before * config.images_per_step // parts.num_examples
        progress.means.add(epoch, metrics.pop("sums"))
        progress.step = step
        # A checkpoint stores it, so that a step is evaluated even after a preemption.
        progress.open_record = {"step": step, "epoch": self._epoch_at(step)}
        loss, accuracy = progress.means.means(config.images_per_step) or (None, None)
        evaluations = self._periods.num_evaluations(step - 1, self.last_step)
        self.display.update(
            step=step,
            epoch=self._epoch_at(step),
            loss=loss,
            accuracy=accuracy,
            learning_rate=metrics["learning_rate"],
            skipped_steps=metrics.get("skipped_steps", 0),
            secs_left=stopwatch.secs_left(self.last_step - step, evaluations),
            **self._speed(stopwatch.speed()),
        )
        return step - before

    def _epoch_at(self, step):
        return step * self.config.images_per_step / self.parts.num_examples

    def _record(self, metrics):
        """Add metrics to the record of the last step."""
        self.progress.open_record = (self.progress.open_record or {}) | metrics

    def _speed(self, lap):
        """Return the figures of a lap; none before there is one."""
        if lap is None:
            return {}
        return {
            "images_per_sec": lap.steps_per_sec * self.config.images_per_step,
            "input_wait_percent": lap.input_wait_percent,
        }

    def write(self, metrics: dict[str, Any], summary_due: bool) -> None:
        """Write metrics, and a summary, if due by the step or the clock."""
        step = self.step
        if summary_due or self._periods.logs(step):
            metrics |= self._speed(self.progress.stopwatch.lap())
            if staleness := self._staleness:
                metrics["staleness_mean"] = np.mean(staleness)
                metrics["staleness_max"] = np.max(staleness)
                values = {"updates": staleness}
                self.reports.on_board(lambda x: x.histograms(step, values, "staleness"))
                staleness.clear()
            self._record(metrics)
            self.reports.scalars(step, metrics)
        if summary_due or self._periods.summarizes(step):
            self._summaries.write(step)

    # Evaluations and checkpoints.

    def evaluate_and_save(self, save_due: bool = False) -> None:
        """Evaluate, write the record of the step, and save, each if due."""
        is_best = self._periods.evaluates(self.step) and self.evaluate()
        record = self.progress.open_record or {}
        is_of_interest = bool(record.keys() - {"step", "epoch"})
        if is_of_interest:
            self.reports.record(record)
        self.progress.open_record = None  # before what may raise: it is counted
        if is_of_interest:
            metrics = as_lists(record)
            self.callbacks.call("on_log", metrics.pop("step"), metrics)
        save_due = save_due or is_best or self._periods.saves(self.step)
        if self.workers.size > 1 and (save_due or self.is_at_end):
            state = self.trainer.state()
            with self.watchdog.activity(WAITING):
                validate_copies(self.workers, state)
        if save_due:
            self.save()

    def evaluate(self) -> bool:
        """Evaluate, and return whether the step is the best so far.

        A run reports the accuracy of the EMA weights, if it keeps them; and only
        images held out of the training set may decide which step is best.
        """
        config, progress = self.config, self.progress
        split, _ = self.parts.eval_split
        evaluation = self._run_evaluation()
        record = record_of(evaluation, split, [self._metric.name])
        if means := progress.means.means(config.images_per_step):
            record["epoch_loss"], record["epoch_accuracy"] = means
        self._record(record)
        result = evaluation.reported
        self._summaries.write_evaluation(self.step, record, result["predictions"])

        def add_to(progress: Progress) -> bool:
            score = result["accuracy"], result["loss"], self._metric.score(result)
            return progress.add_evaluation(*score, self.best_by, config.min_delta)

        # A callback may end the run, which then evaluates again.
        is_best = split == "validation" and add_to(copy.copy(progress))
        now = time.monotonic()
        line = epoch_line(
            self._epoch_of_evaluation(),
            evaluation,
            split,
            config.tta,
            [self._metric.name] if self._metric.is_recorded else [],
            record.get("epoch_loss"),
            now - self._evaluated_at,
            is_best,
        )
        self._evaluated_at = now
        self.outputs.say(line)
        self.callbacks.call("on_evaluation", self.step, as_lists(record))
        progress.accuracy = result["accuracy"]
        self.evaluated = self.step, evaluation
        if split != "validation":
            return False
        add_to(progress)
        by_accuracy = config.choice_of("schedule").by_accuracy
        num_worse = progress.num_worse
        if by_accuracy and num_worse and num_worse % config.plateau_patience == 0:
            progress.num_plateaus += 1
            apply_plateau_decay(self.trainer, config, progress.num_plateaus)
        if is_best and isinstance(result["predictions"], LabelSets):
            names = self.parts.data.class_names
            thresholds = thresholds_json(result["predictions"], names)
            self.reports.file(self.folder.thresholds, thresholds)
        return is_best

    def _run_evaluation(self):
        config, parts = self.config, self.parts
        source = parts.eval_split[1]
        batches = EvalBatches(source, parts.augment, config.batch_size, parts.share)
        if self._eval_feed is None:
            self._eval_feed = assembly.create_eval_feed(batches, self.trainer)
        weights, started = evaluated_weights(config), time.monotonic()
        with self.watchdog.activity("evaluating") as heartbeat:
            counts = self.trainer.evaluate(
                self._eval_feed, len(batches), weights, heartbeat
            )
        evaluation = counts.map(self._figures)
        self.progress.stopwatch.add_evaluation(time.monotonic() - started)
        return evaluation

    def _figures(self, counts):
        """Return `figures_of_counts`, with the metric of best_by if it is recorded."""
        result, metric = figures_of_counts(counts), self._metric
        if not metric.is_recorded:
            return result
        return result | {metric.name: metric.function(result["predictions"])}

    def _epoch_of_evaluation(self):
        """Return the epoch of an evaluation, without a last batch's spill-over."""
        config, epoch = self.config, self._epoch_at(self.step)
        every = config.eval_every_epochs
        multiple = math.floor(epoch / every + 1e-9) * every
        if epoch - multiple < self._epoch_at(1):
            epoch = multiple
        return round(min(epoch, config.num_epochs), 3)

    def save(self) -> None:
        """Save a snapshot in the background, unless the last checkpoint holds it."""
        self.outputs.save(self._take_snapshot, self.watchdog.saving)
        self._saved_at = time.monotonic()

    def _take_snapshot(self):
        """Return state and progress, with its step set; None if they are saved."""
        trainer, saved_step = self.trainer, self.outputs.saved_step
        if is_between_steps(trainer) and trainer.progress()[0] == saved_step:
            self.progress.step = saved_step
            return None
        with self.watchdog.saving():
            tensors = settled_state(trainer)
        step = self.progress.step = int(tensors["step"])
        validate_finite(tensors, step)
        run_state = {
            **self.progress.to_json(),
            "images_seen": step * self.config.images_per_step,
            "seed": self.config.seed,
            "config": dataclasses.asdict(self.config),
            "dataset_info": dataclasses.asdict(self.dataset_info),
        }
        return Snapshot(step, tensors, run_state)

    def save_and_wait(self) -> None:
        """Save as `save`, and wait until the checkpoint is committed."""
        self.save()
        with self.watchdog.saving():
            self.outputs.wait()

    def try_to_save(self, because: BaseException) -> None:
        """Save before a run ends with an error; say why if that fails."""
        try:
            self.save_and_wait()
        except (
            errors.CheckpointError,
            errors.NumericError,
            errors.RunFolderError,
        ) as error:
            if str(error) != str(because):
                console.line(str(error))
