"""The oracle: training of a small network as ONE device does it on the whole batch.

NumPy in float64, written independently of the trainer: it imports nothing of it and no
TensorFlow. The tests of every parallel strategy compare parameters, slots, moving
averages and model state with it. One step is, in this order:

 1. forward and backward, giving the gradient of the mean cross-entropy of the batch
    (with batch normalization on N towers: the image-weighted mean over the towers, and
    over the micro-batches where a step has several);
 2. the gradient of the weight decay is added, once;
 3. clipping by the global norm of all that;
 4. the optimizer's update at the rate of the images seen before the step;
 5. the moving averages of the parameters and of the model state.

Parameters and state are ordered dicts 'layer/variable' -> array; the names of variables
and options are the keyword arguments of the functions in `oracle_layers`. A bias
is there when `params` holds one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from engines import oracle_layers
from engines.oracle_layers import Pullback

INPUT = "images"  # what the network's first layer reads, for use in `inputs`

Arrays = Mapping[str, np.ndarray]
Network = Sequence["Layer"]


class Layer(NamedTuple):
    """One node of the network; `inputs` names the layers it reads."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    options: Mapping[str, Any]


class Forward(NamedTuple):
    """A pass through the network: the last layer's output, and how to go back."""

    logits: np.ndarray
    state: dict[str, np.ndarray]
    tape: list[tuple[str, tuple[str, ...], Pullback | None]]


class Batch(NamedTuple):
    """Images [G, H, W, C], labels [G], noise {dropout layer: [G, ...]} or None."""

    images: np.ndarray
    labels: np.ndarray
    noise: Arrays | None = None


class Gradients(NamedTuple):
    """What a tower, or all of them, make of their images."""

    loss: float  # mean cross-entropy, without weight decay
    accuracy: float
    image_losses: np.ndarray  # [images]
    gradients: dict[str, np.ndarray]  # of `loss`, in the order of the parameters
    state: dict[str, np.ndarray]


class StepReport(NamedTuple):
    """The numbers of one step; losses are those before the update."""

    step: int  # the global step before the increment: 0 for the first update
    loss: float
    total_loss: float  # with weight decay
    accuracy: float
    tower_losses: list[float]  # mean cross-entropy of every tower's own images
    tower_images: list[int]
    learning_rate: float
    gradient_norm: float  # with weight decay, before clipping


@dataclasses.dataclass(frozen=True)
class OracleResult:
    """The canonical state after the last step, and a report of every step."""

    params: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    slots: dict[str, dict[str, np.ndarray]]  # slot name -> parameter name -> array
    averages: dict[str, np.ndarray]  # empty without ema_decay
    reports: list[StepReport]


# The network.


def layer(kind: str, name: str, inputs: Sequence[str] = (), **options) -> Layer:
    """Declares a layer; without `inputs` it reads the layer declared before it."""
    return Layer(kind, name, tuple(inputs), options)


def plain(text: str) -> list[Layer]:
    """Declares layers without options, from "kind:name kind:name"."""
    return [layer(*each.split(":")) for each in text.split()]


def forward(
    network: Network,
    params: Arrays,
    state: Arrays,
    images: np.ndarray,
    noise: Arrays | None = None,
    training: bool = True,
) -> Forward:
    """Runs the network over images [n, H, W, C] as one device does.

    `state` of the result is the new model state (the old one out of training).
    """
    variables: dict[str, dict[str, np.ndarray]] = {node.name: {} for node in network}
    for full_name, array in (*params.items(), *state.items()):
        owner, _, name = full_name.rpartition("/")
        variables[owner][name] = array
    values, new_state, tape = {INPUT: _float64(images)}, dict(state), []
    previous = INPUT
    for node in network:
        arguments = {**node.options, **variables[node.name]}
        is_random = node.kind in ("dropout", "stochastic_depth")
        if is_random or node.kind == "batch_norm":
            arguments["training"] = training
        if is_random:
            arguments["noise"] = (noise or {}).get(node.name)
        inputs = node.inputs or (previous,)
        apply = getattr(oracle_layers, node.kind)
        done = apply(*(values[name] for name in inputs), **arguments)
        values[node.name] = done.output
        new_state.update({f"{node.name}/{k}": v for k, v in done.state.items()})
        tape.append((node.name, inputs, done.pullback))
        previous = node.name
    return Forward(values[previous], new_state, tape)


def backward(passed: Forward, of_logits: np.ndarray) -> dict[str, np.ndarray]:
    """Takes the gradient of the logits back to every parameter."""
    of_values = {passed.tape[-1][0]: of_logits}
    gradients = {}
    for name, inputs, pullback in reversed(passed.tape):
        of_inputs, of_variables = pullback(of_values.pop(name))
        gradients.update({f"{name}/{k}": v for k, v in of_variables.items()})
        for source, gradient in zip(inputs, of_inputs, strict=True):
            of_values[source] = of_values.get(source, 0.0) + gradient
    return gradients


# Loss and gradient.


def cross_entropy(
    logits: np.ndarray, labels: np.ndarray, label_smoothing: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax cross-entropy of every image [n], and its gradient by logits [n, K].

    The target is (1 - label_smoothing) * one-hot + label_smoothing / K.
    """
    num_classes = logits.shape[1]
    target = np.full(logits.shape, label_smoothing / num_classes)
    target[np.arange(len(labels)), labels] += 1.0 - label_smoothing
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return -(target * log_softmax).sum(axis=1), np.exp(log_softmax) - target


def loss_and_gradients(
    network: Network,
    params: Arrays,
    state: Arrays,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    noise: Arrays | None = None,
    label_smoothing: float = 0.0,
) -> Gradients:
    """What one device computes from these images: the gradient of their mean loss."""
    passed = forward(network, params, state, images, noise)
    losses, of_logits = cross_entropy(passed.logits, labels, label_smoothing)
    found = backward(passed, of_logits / len(labels))
    return Gradients(
        loss=float(losses.mean()),
        accuracy=float(np.mean(passed.logits.argmax(axis=1) == labels)),
        image_losses=losses,
        gradients={name: found[name] for name in params},
        state=passed.state,
    )


def shares(num_images: int, num_towers: int) -> list[slice]:
    """Cuts the batch in contiguous shares; the first ones get one image more."""
    size, rest = divmod(num_images, num_towers)
    starts = [tower * size + min(tower, rest) for tower in range(num_towers + 1)]
    return [slice(starts[tower], starts[tower + 1]) for tower in range(num_towers)]


def tower_gradients(
    network: Network,
    params: Arrays,
    state: Arrays,
    batch: Batch,
    num_towers: int,
    label_smoothing: float = 0.0,
    states: Sequence[Arrays] | None = None,
) -> list[Gradients]:
    """What every tower computes from its own share.

    All begin with the same `state`, unless `states` has one for each.
    """
    noise = batch.noise or {}
    return [
        loss_and_gradients(
            network,
            params,
            old_state,
            batch.images[share],
            batch.labels[share],
            noise={name: array[share] for name, array in noise.items()},
            label_smoothing=label_smoothing,
        )
        for share, old_state in zip(
            shares(len(batch.labels), num_towers),
            states or [state] * num_towers,
            strict=True,
        )
    ]


def average_towers(towers: Sequence[Gradients]) -> Gradients:
    """The mean of the towers, each weighted by its number of images."""
    sizes = np.array([len(tower.image_losses) for tower in towers], np.float64)
    weights = sizes / sizes.sum()

    def mean(values):
        return sum(w * value for w, value in zip(weights, values, strict=True))

    def mean_of_each(maps):
        return {name: mean([each[name] for each in maps]) for name in maps[0]}

    return Gradients(
        loss=float(mean([tower.loss for tower in towers])),
        accuracy=float(mean([tower.accuracy for tower in towers])),
        image_losses=np.concatenate([tower.image_losses for tower in towers]),
        gradients=mean_of_each([tower.gradients for tower in towers]),
        state=mean_of_each([tower.state for tower in towers]),
    )


def batch_gradients(
    network: Network,
    params: Arrays,
    state: Arrays,
    batch: Batch,
    num_towers: int = 1,
    label_smoothing: float = 0.0,
    accumulate_steps: int = 1,
) -> Gradients:
    """The gradient of the whole batch that N towers should agree on.

    Only batch normalization sees the other images of its tower and micro-batch, so only
    a network with it is really cut; any other one is computed whole. The state of each
    tower then goes from one micro-batch to the next, and the towers' last ones count.
    """
    if not any(node.kind == "batch_norm" for node in network):
        num_towers = accumulate_steps = 1
    states, found = None, []
    for micro_batch in micro_batches(batch, accumulate_steps):
        towers = tower_gradients(
            network, params, state, micro_batch, num_towers, label_smoothing, states
        )
        states = [tower.state for tower in towers]
        found.append(average_towers(towers))
    return average_towers(found)._replace(state=found[-1].state)


def micro_batches(batch: Batch, accumulate_steps: int) -> list[Batch]:
    """Cuts the batch in contiguous micro-batches of one size."""
    size = len(batch.labels) // accumulate_steps
    cuts = [slice(i * size, (i + 1) * size) for i in range(accumulate_steps)]
    noise = batch.noise or {}
    return [
        Batch(
            batch.images[cut], batch.labels[cut], {k: x[cut] for k, x in noise.items()}
        )
        for cut in cuts
    ]


def weight_decay_loss(params: Arrays, weight_decay: Mapping[str, float]) -> float:
    """Sum over the decayed parameters of coefficient * half the sum of squares."""
    return sum(
        0.5 * coefficient * float(np.square(params[name]).sum())
        for name, coefficient in weight_decay.items()
    )


def add_weight_decay(
    gradients: Arrays, params: Arrays, weight_decay: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Adds the gradient of `weight_decay_loss`."""
    return {
        name: gradient + weight_decay.get(name, 0.0) * params[name]
        for name, gradient in gradients.items()
    }


def global_norm(gradients: Arrays) -> float:
    """The Euclidean norm over all entries of all arrays together."""
    return math.sqrt(sum(float(np.square(g).sum()) for g in gradients.values()))


def clip_by_global_norm(gradients: Arrays, clip_norm: float | None) -> dict:
    """Scales by clip_norm / max(norm, clip_norm); None or 0 leaves all as it is."""
    norm = global_norm(gradients)
    scale = clip_norm / max(norm, clip_norm) if clip_norm else 1.0
    return {name: gradient * scale for name, gradient in gradients.items()}


# The update. An optimizer is update(params, gradients, slots, rate, **hyperparameters)
# -> (params, slots); its slots start as zeros of the parameters' shapes. The rate is
# outside the velocity: changing it does not rescale what is remembered. `decay`, of
# those that apply the weight decay themselves, is parameter name -> coefficient.


def sgd(params, gradients, slots, rate):
    """params - rate * gradient."""
    return {name: params[name] - rate * gradients[name] for name in params}, {}


def momentum_sgd(params, gradients, slots, rate, *, momentum=0.9):
    """v = momentum * v + gradient; params - rate * v."""
    velocity = _velocity(gradients, slots, momentum)
    moved = {name: params[name] - rate * velocity[name] for name in params}
    return moved, {"velocity": velocity}


def nesterov(params, gradients, slots, rate, *, momentum=0.9):
    """v = momentum * v + gradient; params - rate * (gradient + momentum * v)."""
    velocity = _velocity(gradients, slots, momentum)
    moved = {
        name: params[name] - rate * (gradients[name] + momentum * velocity[name])
        for name in params
    }
    return moved, {"velocity": velocity}


def rmsprop(params, gradients, slots, rate, *, momentum=0.0, rho=0.9, epsilon=1e-7):
    """s = mean of squares; v = momentum * v + gradient / sqrt(s + epsilon)."""
    second = _mean(slots["second_moment"], gradients, rho, power=2)
    scaled = {n: g / np.sqrt(second[n] + epsilon) for n, g in gradients.items()}
    moved, velocity = momentum_sgd(params, scaled, slots, rate, momentum=momentum)
    return moved, {"second_moment": second} | velocity


def adamw(params, gradients, slots, rate, *, step, decay, beta1, beta2, epsilon):
    """Adam's algorithm 1 with its epsilon as in Keras: over the root of 1 - beta2^t."""
    first = _mean(slots["first_moment"], gradients, beta1, power=1)
    second = _mean(slots["second_moment"], gradients, beta2, power=2)
    moved, t = {}, step + 1
    for name, param in params.items():
        mean = first[name] / (1 - beta1**t)
        root = np.sqrt(second[name] / (1 - beta2**t))
        adam = mean / (root + epsilon / math.sqrt(1 - beta2**t))
        shrunk = param * (1 - rate * decay.get(name, 0.0))
        moved[name] = shrunk - rate * adam
    return moved, {"first_moment": first, "second_moment": second}


def adam(params, gradients, slots, rate, **hyper):
    """Of gradients that include the weight decay."""
    return adamw(params, gradients, slots, rate, decay={}, **hyper)


def lamb(params, gradients, slots, rate, *, step, decay, beta1, beta2, epsilon):
    """Algorithm 2 of arXiv:1904.00962 with phi(z) = z; the ratio of vectors, and where
    a norm is 0, is 1."""
    m = _mean(slots["first_moment"], gradients, beta1, power=1)
    v = _mean(slots["second_moment"], gradients, beta2, power=2)
    moved = {}
    for name, x in params.items():
        m_hat = m[name] / (1 - beta1 ** (step + 1))
        v_hat = v[name] / (1 - beta2 ** (step + 1))
        r = m_hat / (np.sqrt(v_hat) + epsilon) + decay.get(name, 0.0) * x
        norms = np.sqrt((x**2).sum()), np.sqrt((r**2).sum())
        ratio = norms[0] / norms[1] if x.ndim > 1 and all(norms) else 1.0
        moved[name] = x - rate * ratio * r
    return moved, {"first_moment": m, "second_moment": v}


def lion(params, gradients, slots, rate, *, decay, beta1=0.9, momentum_decay=0.99):
    """Algorithm 2 of arXiv:2302.06675."""
    moved, m = {}, slots["first_moment"]
    for name, x in params.items():
        c = beta1 * m[name] + (1 - beta1) * gradients[name]
        moved[name] = x - rate * (np.sign(c) + decay.get(name, 0.0) * x)
    return moved, {"first_moment": _mean(m, gradients, momentum_decay, power=1)}


def lars(params, gradients, slots, rate, *, decay, momentum, trust_coefficient):
    """v = momentum * v + local rate * (gradient + decay * param); the local rate of
    vectors, and where a norm is 0, is 1."""
    scaled = {}
    for name, param in params.items():
        gradient, beta = gradients[name], decay.get(name, 0.0)
        norms = np.sqrt((param**2).sum()), np.sqrt((gradient**2).sum())
        local = 1.0
        if param.ndim > 1 and all(norms):
            local = trust_coefficient * norms[0] / (norms[1] + beta * norms[0])
        scaled[name] = local * (gradient + beta * param)
    return momentum_sgd(params, scaled, slots, rate, momentum=momentum)


def muon(params, gradients, slots, rate, *, decay, momentum, muon_momentum=0.6):
    """Nesterov's form with weight decay; kernels of convolutions, as matrices
    [filters, inputs], are put on norm sqrt(filters) and moved by three steps of the
    quintic iteration towards U V^T of their Nesterov momentum."""
    moved, velocity = {}, {}
    for name, param in params.items():
        gradient, beta = gradients[name], momentum
        if param.ndim == 4:
            beta = muon_momentum
        else:
            gradient = gradient + decay.get(name, 0.0) * param
        velocity[name] = beta * slots["velocity"][name] + gradient
        ahead = gradient + beta * velocity[name]
        if param.ndim == 4:
            x = ahead.reshape(-1, param.shape[-1]).T
            x = x / (np.linalg.norm(x) + 1e-7)
            for _ in range(3):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            ahead = x.T.reshape(param.shape)
            scale = math.sqrt(param.shape[-1]) / math.sqrt((param**2).sum())
            moved[name] = param * scale - rate * ahead
        else:
            moved[name] = param - rate * ahead
    return moved, {"velocity": velocity}


def _velocity(gradients, slots, momentum):
    old = slots["velocity"]
    return {name: momentum * old[name] + gradients[name] for name in gradients}


def _mean(old, gradients, beta, power):
    return {
        name: beta * old[name] + (1 - beta) * gradient**power
        for name, gradient in gradients.items()
    }


class Optimizer(NamedTuple):
    """An update rule and the names of the slots it keeps for every parameter."""

    update: Callable
    slot_names: tuple[str, ...]
    takes_step: bool = False


OPTIMIZERS = {
    "sgd": Optimizer(sgd, ()),
    "momentum": Optimizer(momentum_sgd, ("velocity",)),
    "nesterov": Optimizer(nesterov, ("velocity",)),
    "rmsprop": Optimizer(rmsprop, ("second_moment", "velocity")),
    "adamw": Optimizer(adamw, ("first_moment", "second_moment"), takes_step=True),
    "adam": Optimizer(adam, ("first_moment", "second_moment"), takes_step=True),
    "lars": Optimizer(lars, ("velocity",)),
    "lamb": Optimizer(lamb, ("first_moment", "second_moment"), takes_step=True),
    "lion": Optimizer(lion, ("first_moment",)),
    "muon": Optimizer(muon, ("velocity",)),
}


def staircase(
    learning_rate: float,
    decay_factor: float,
    num_examples: int,
    epochs_per_decay: float,
) -> Callable[[int], float]:
    """The rate, as a function of the images seen, times decay_factor every period."""
    period = num_examples * epochs_per_decay
    return lambda images: learning_rate * decay_factor ** math.floor(images / period)


def move_averages(
    averages: Arrays, values: Arrays, ema_decay: float, step: int
) -> dict[str, np.ndarray]:
    """decay * average + (1 - decay) * value, of the new parameters and model state.

    The decay is the tutorial's ramp min(ema_decay, (1 + step) / (10 + step)), where
    `step` is 0 for the first update.
    """
    decay = min(ema_decay, (1.0 + step) / (10.0 + step))
    return {
        name: decay * averages[name] + (1.0 - decay) * values[name] for name in averages
    }


# Training.


def ramp_momentum(network: Network, step: int) -> list[Layer]:
    """Batch normalization with a momentum above 0.9 (and below 1, with which nothing
    moves) forgets the values that it began with by the same ramp."""
    nodes = []
    for node in network:
        momentum = node.options.get("momentum", 0.0)
        if node.kind == "batch_norm" and 0.9 < momentum < 1:
            ramped = {"momentum": min(momentum, (1.0 + step) / (10.0 + step))}
            nodes.append(node._replace(options={**node.options, **ramped}))
        else:
            nodes.append(node)
    return nodes


def train(
    network: Network,
    params: Arrays,
    state: Arrays,
    batches: Iterable[Batch | tuple],
    *,
    optimizer: str = "sgd",
    learning_rate: float | Callable[[int], float] = 0.1,
    weight_decay: Mapping[str, float] | None = None,
    label_smoothing: float = 0.0,
    clip_norm: float | None = None,
    ema_decay: float | None = None,
    num_towers: int = 1,
    accumulate_steps: int = 1,
    frozen: Mapping[str, int] | None = None,
    **hyperparameters: float,
) -> OracleResult:
    """Takes one step per batch; what is handed in is left as it was.

    Args:
      network: each layer reads only earlier ones; the last one gives the logits.
      batches: (images, labels) or (images, labels, noise), all of one size G.
      learning_rate: a number, or a function of the images seen before the update.
      weight_decay: parameter name -> coefficient of half its sum of squares.
      num_towers: on how many towers batch normalization is local; 1 where it is
        synchronised.
      frozen: parameter name -> the first step from which on its gradient is zero.
    """
    rule = OPTIMIZERS[optimizer]
    weight_decay = weight_decay or {}
    params = {name: _float64(array) for name, array in params.items()}
    state = {name: _float64(array) for name, array in state.items()}
    slots = {
        slot: {name: np.zeros_like(array) for name, array in params.items()}
        for slot in rule.slot_names
    }
    averages = params | state if ema_decay else {}
    reports: list[StepReport] = []
    for step, batch in enumerate(itertools.starmap(Batch, batches)):
        nodes, options = (
            ramp_momentum(network, step),
            (label_smoothing, accumulate_steps),
        )
        found = batch_gradients(nodes, params, state, batch, num_towers, *options)
        with_decay = add_weight_decay(found.gradients, params, weight_decay)
        gradients = {
            name: gradient * (step < (frozen or {}).get(name, math.inf))
            for name, gradient in with_decay.items()
        }
        rate = learning_rate
        if callable(learning_rate):
            rate = float(learning_rate(step * len(batch.labels)))
        image_losses = found.image_losses.reshape(accumulate_steps, -1)
        towers = shares(image_losses.shape[1], num_towers)
        reports.append(
            StepReport(
                step=step,
                loss=found.loss,
                total_loss=found.loss + weight_decay_loss(params, weight_decay),
                accuracy=found.accuracy,
                tower_losses=[float(image_losses[:, t].mean()) for t in towers],
                tower_images=[accumulate_steps * (t.stop - t.start) for t in towers],
                learning_rate=rate,
                gradient_norm=global_norm(gradients),
            )
        )
        gradients = clip_by_global_norm(gradients, clip_norm)
        if rule.takes_step:
            hyperparameters["step"] = step
        params, slots = rule.update(params, gradients, slots, rate, **hyperparameters)
        state = found.state
        if ema_decay:
            averages = move_averages(averages, params | state, ema_decay, step)
    return OracleResult(params, state, slots, averages, reports)


def _float64(array: np.ndarray) -> np.ndarray:
    return np.array(array, dtype=np.float64)
