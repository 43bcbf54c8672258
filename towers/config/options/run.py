"""Options of a run: its start, its length, and the periods of what it does."""

import dataclasses

from towers.config import choices
from towers.config.options import option


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Initial parameters, length, and periods of logs, evaluations and checkpoints."""

    init_from: str = option(
        "",
        "What has the parameters that a new run starts from at step 0, where names and "
        "shapes match: a run folder, a .keras or .h5 file of Keras, a SavedModel, a "
        "checkpoint of TensorFlow; or imagenet, for keras:NAME, which Keras fetches; "
        "empty for random ones.",
    )

    num_epochs: float = option(
        60.0,
        "Length of the run, in passes over the training images.",
        above=0,
        at_most=1e9,
    )
    max_steps: int = option(
        0,
        "Stop after this step; shapes nothing; 0 does not stop.",
        at_least=0,
        free=True,
    )
    steps_per_loop: int = option(
        100,
        "Most steps in one compiled call; fewer where something is due, or where they "
        "would take more than about 2 s.",
        at_least=1,
        free=True,
    )
    log_every_steps: int = option(
        100, "Steps between log lines and scalars.", at_least=1, free=True
    )
    summary_every_steps: int = option(
        1000,
        "Steps between histograms and image grids in TensorBoard; 0 ignores the steps.",
        at_least=0,
        free=True,
    )
    summary_every_secs: float = option(
        600.0,
        "Seconds between summaries, each with log line, scalars, histograms and image "
        "grid; 0 ignores the clock.",
        at_least=0,
        free=True,
    )
    eval_every_epochs: float = option(
        1.0, "Epochs between evaluations; 0 evaluates none.", at_least=0, free=True
    )
    tta: str = option(
        "none",
        "Test-time augmentation: evaluations also report the accuracy of the mean "
        f"logits over several views of an image: {choices.explained('tta')}.",
        table="tta",
        free=True,
    )
    checkpoint_every_secs: float = option(
        600.0,
        "Seconds between checkpoints; 0 ignores the clock.",
        at_least=0,
        free=True,
    )
    checkpoint_every_steps: int = option(
        0, "Steps between checkpoints; 0 ignores the steps.", at_least=0, free=True
    )
    keep_checkpoints: int = option(
        3, "Newest checkpoints that are kept, besides the best.", at_least=1, free=True
    )
    stuck_after_secs: float = option(
        600.0,
        "Seconds without a finished step, or save, after which the run is ended as "
        "stuck; 0 waits forever.",
        at_least=0,
        free=True,
    )
