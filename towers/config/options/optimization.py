"""Options of the optimization: optimizer, decay, rates, schedule, averages."""

import dataclasses

from towers.config import choices
from towers.config.options import option

# float32, in which updates are computed, ends at 3.4e38.
MOST = 1e30


@dataclasses.dataclass(frozen=True)
class OptimizationOptions:
    """Optimizer, learning rate, weight decay and moving averages."""

    optimizer: str = option(
        "sgd",
        f"Optimizer: {choices.explained('optimizer')}.",
        table="optimizer",
    )
    learning_rate: float = option(
        0.1, "Initial, or highest, learning rate.", above=0, at_most=MOST
    )
    momentum: float = option(
        0.0, "Momentum of the velocity.", read_by="optimizer", at_least=0, below=1
    )
    beta1: float = option(
        0.9,
        "Decay of adamw's mean of the gradients.",
        read_by="optimizer",
        at_least=0,
        below=1,
    )
    beta2: float = option(
        0.999,
        "Decay of adamw's mean of their squares.",
        read_by="optimizer",
        at_least=0,
        below=1,
    )
    rho: float = option(
        0.9,
        "Decay of rmsprop's mean of the squared gradients.",
        read_by="optimizer",
        at_least=0,
        below=1,
    )
    epsilon: float = option(
        1e-7,
        "Next to the root in adamw's denominator, under it in rmsprop's.",
        read_by="optimizer",
        at_least=1 / MOST,
    )
    muon_momentum: float = option(
        0.6,
        "Momentum of the convolutions with muon.",
        read_by="optimizer",
        at_least=0,
        below=1,
    )
    trust_coefficient: float = option(
        0.001,
        "With lars, the length of a kernel's step at rate 1 over that of the kernel.",
        read_by="optimizer",
        above=0,
        at_most=MOST,
    )
    optimizer_options: str = option(
        "",
        "Hyperparameters of the optimizer that have no flag of their own, such as "
        "'beta3:0.99,warm:5'.",
    )
    weight_decay: float = option(
        0.004,
        "Weight decay: this times half the sum of squares of the parameters that the "
        "network marks, kernels as a rule, is added to the loss; adamw, lars and muon "
        "(not to convolutions) apply it in their update.",
        at_least=0,
        at_most=MOST,
    )
    label_smoothing: float = option(
        0.0, "Probability spread evenly over all classes.", at_least=0, below=1
    )
    class_weights: str = option(
        "",
        "Weights of the classes in the training loss: balanced for weights inverse to "
        "the number of images, or a JSON file of names and weights; empty for none.",
    )
    param_rates: str = option(
        "",
        "Factors on the learning rate of parameters by name, the first pattern that "
        "fits, such as '*/bias:2', 0 to freeze them; with another number, "
        "'stem/bias:2:3', that rate falls linearly to zero over so many epochs.",
    )
    freeze: str = option(
        "",
        "Patterns of the names of parameters that are not trained, such as stem*, with "
        "commas between them. Batch normalization all of whose parameters are frozen "
        "normalizes with its moving averages and leaves them.",
    )
    schedule: str = option(
        "exponential",
        f"Learning rate over the images trained on: {choices.explained('schedule')}.",
        table="schedule",
    )
    decay_factor: float = option(
        0.1,
        "Factor on the rate at each stair of the exponential schedules.",
        read_by="schedule",
        above=0,
    )
    epochs_per_decay: float = option(
        350.0,
        "Length of a stair of the exponential schedules, in epochs.",
        read_by="schedule",
        above=0,
    )
    epoch_factors: str = option(
        "",
        "Of the piecewise schedule: epochs, and the factor on the rate from each of "
        "them on, such as 30:0.1,60:0.01.",
        read_by="schedule",
    )
    peak_fraction: float = option(
        0.3,
        "Part of --num_epochs after which the one_cycle schedule is highest.",
        read_by="schedule",
        above=0,
        below=1,
    )
    warmup_epochs: float = option(
        0.0, "Epochs over which the rate first rises linearly from 0.", at_least=0
    )
    ema_decay: float = option(
        0.9999,
        "Decay of the parameters' moving averages, ramped as min(decay, (1+n)/(10+n)) "
        "in step n; 0 keeps none.",
        at_least=0,
        below=1,
    )
    clip_norm: float = option(
        0.0,
        "Largest global norm of the mean gradient; 0 does not clip.",
        at_least=0,
        at_most=MOST,
    )
    # Free, as max_steps is: every update is the same with both, one of them only ends
    # the run earlier.
    on_nonfinite: str = option(
        "stop",
        "Where a loss or a gradient is not finite: end the run before the update "
        "(stop), or leave out the update and count the step (skip); the tenth in a row "
        "ends the run.",
        choices=("stop", "skip"),
        free=True,
    )
