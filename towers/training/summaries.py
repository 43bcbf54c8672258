"""What TensorBoard gets of a run besides its curves: histograms, the length of an
update, and pictures."""

from typing import Any

import numpy as np
import tensorflow as tf

from towers import build
from towers.evaluation.figures import worst_mistakes
from towers.run.board import MOST_IMAGES, batch_picture, mistakes_picture
from towers.run.session import Session


def summarize(session: Session, parts: build.Parts) -> None:
    """Histograms of the parameters and gradients, and the images of the next step."""
    state = session.trainer.state().items()
    params = {k.removeprefix("params/"): v for k, v in state if k.startswith("params/")}
    session.reports.histograms(session.step, params, "params")
    with session.watchdog.activity("waiting for data"):
        batch = parts.train_batches(tf.constant(session.step, tf.int64))
    with session.watchdog.activity("computing gradients for the summary"):
        gradients = session.trainer.gradients()
    session.reports.histograms(session.step, gradients, "gradients")
    session.reports.picture(
        session.step,
        "training_batch",
        lambda: batch_picture(
            batch["images"].numpy(), batch["labels"].numpy(), parts.data.class_names
        ),
        "Augmented images of the next step; each is stretched to the whole range",
    )
    session.summarized_at, session.summarized_params = session.clock(), params


def log_update(session: Session) -> None:
    """The length of the step after a summary."""
    before, session.summarized_params = session.summarized_params, None
    state = session.trainer.state()
    update, norm = 0.0, 0.0
    for name, values in before.items():
        values = values.astype(np.float64)
        update += np.sum((state[f"params/{name}"] - values) ** 2)
        norm += np.sum(values**2)
    if norm:
        ratio = np.sqrt(update / norm)
        session.reports.scalars(session.step, {"update_ratio": ratio})


def report_evaluation(
    session: Session, parts: build.Parts, record: dict[str, Any], predictions
) -> None:
    """Curves and the worst mistakes."""
    split, source = parts.eval_split
    reports, names = session.reports, parts.data.class_names
    values = {k.removeprefix(f"{split}_"): v for k, v in record.items()}
    reports.scalars(session.step, values, split)

    def draw_mistakes():
        images, _ = source.read(tf.constant(worst, tf.int64))
        return mistakes_picture(images.numpy(), predictions[worst], names)

    labels, classes = predictions[:, :2].T.astype(int)
    worst = worst_mistakes(labels, classes, predictions[:, 2], MOST_IMAGES)
    if len(worst):
        about = "The mistakes with the largest loss"
        reports.picture(session.step, "mistakes", draw_mistakes, about, split)
