"""Updates against the oracle."""

import dataclasses
import itertools

import networks
import numpy as np
import pytest
import tensorflow as tf
from engines import oracle
from marks import slow
from recipes import Recipe, assert_equal_to_oracle, create_trainer

from towers.config import Config, checks
from towers.config.choices import OPTIMIZERS
from towers.optim.losses import pop_weight_decay
from towers.optim.optimizers import create_optimizer, orthogonalized
from towers.optim.update import Update, moving_averages
from towers.optim.vector import Layout
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers

pytestmark = pytest.mark.usefixtures("several_vectors")

SHAPES = {"kernel": (4, 3), "bias": (3,), "scalar": (), "filters": (2, 3, 2, 4)}
SHAPES |= {"zero": (2, 2), "still": (2, 2)}  # no values at first; no gradients
SHAPES |= {"more_filters": (2, 3, 2, 4), "decayed": (2, 2)}
DECAYS = {"kernel": 0.2, "filters": 0.2, "more_filters": 0.2, "decayed": 0.2}
NUM_STEPS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, its hyperparameters, and its name in the oracle."""

    name: str
    hyper: dict
    oracle: str

    def create(self):
        return create_optimizer(self.name, **self.hyper)

    def decays(self):
        """Parameter name -> weight decay that the optimizer applies itself."""
        return DECAYS if self.create().takes_decay else {}

    def rule(self):
        """The oracle's update with the same hyperparameters, and its names of slots."""
        update, slot_names, takes_step = oracle.OPTIMIZERS[self.oracle]
        hyper = dict(self.hyper)
        if self.create().takes_decay:
            hyper["decay"] = self.decays()

        def step_by(step, *args):
            return update(*args, **hyper, **({"step": step} if takes_step else {}))

        return step_by, slot_names


MOMENTUM = {"momentum": 0.9}
RHO = {"rho": 0.7, "epsilon": 1e-3}
BETAS = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3}
CASES = {
    "sgd": Case("sgd", {}, "sgd"),
    "momentum": Case("sgd", MOMENTUM, "momentum"),
    "nesterov": Case("nesterov", MOMENTUM, "nesterov"),
    "rmsprop": Case("rmsprop", RHO, "rmsprop"),
    "rmsprop_momentum": Case("rmsprop", RHO | MOMENTUM, "rmsprop"),
    "adamw": Case("adamw", BETAS, "adamw"),
    "adam": Case("adam", BETAS, "adam"),
    "lamb": Case("lamb", BETAS, "lamb"),
    "lion": Case("lion", {"beta1": 0.8}, "lion"),
    "muon": Case("muon", MOMENTUM | {"muon_momentum": 0.5}, "muon"),
    "lars": Case("lars", MOMENTUM | {"trust_coefficient": 0.1}, "lars"),
}


def random_arrays(seed, dtype=np.float64):
    """Parameters for seed 0, or gradients."""
    rng = np.random.default_rng(seed)
    empty = "still" if seed else "zero"
    return [
        rng.normal(size=shape).astype(dtype) * (name != empty)
        for name, shape in SHAPES.items()
    ]


def named(arrays):
    return dict(zip(SHAPES, arrays, strict=True))


def gradients(step):
    """By name."""
    return named(random_arrays(100 + step))


def create_update(case, rate_fn, **kwargs):
    decays = tuple(case.decays().get(name, 0.0) for name in SHAPES)
    return Update(case.create(), rate_fn, decays=decays, **kwargs)


def run(update, dtype=tf.float64, num_steps=NUM_STEPS, on_gpu=False):
    """Params, slots and averages after some steps with random gradients, by name."""
    first = [tf.constant(p, dtype) for p in random_arrays(0)]
    layout = Layout(named(first))
    params = layout.pack(first)
    slots = {s: [tf.zeros_like(p) for p in params] for s in update.optimizer.slots}
    averages = list(params) if update.ema_decay else []
    for step in range(num_steps):
        found = [tf.constant(g, dtype) for g in gradients(step).values()]
        found, number = layout.pack(found), tf.constant(step, tf.int64)
        norm = tf.linalg.global_norm(found)
        arguments = layout, number, params, slots, found, norm
        squares = update.squares(*arguments)
        params, slots = update(*arguments, squares, on_gpu=on_gpu)
        if averages:
            averages = moving_averages(averages, params, number, update.ema_decay)
    assert {x.dtype for x in itertools.chain(params, averages, *slots.values())} == {
        dtype
    }

    def read(vectors):
        return layout.read([x.numpy() for x in vectors]) if vectors else {}

    return read(params), {k: read(v) for k, v in slots.items()}, read(averages)


def run_oracle(case, clip_norm=0.0, ema_decay=0.0):
    """The same in NumPy at the rate 0.5 ** step: params, slots, averages by name."""
    rule, slot_names = case.rule()
    params, averages = named(random_arrays(0)), named(random_arrays(0))
    slots = {s: {n: np.zeros_like(p) for n, p in params.items()} for s in slot_names}
    for step in range(NUM_STEPS):
        clipped = oracle.clip_by_global_norm(gradients(step), clip_norm)
        params, slots = rule(step, params, clipped, slots, 0.5**step)
        averages = oracle.move_averages(averages, params, ema_decay, step)
    return params, slots, averages


def assert_close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **tolerance)


def constant_rate(step):
    return tf.constant(0.125, tf.float64)


def falling_rate(step):
    return tf.constant(0.5, tf.float64) ** tf.cast(step, tf.float64)


def test_every_optimizer_is_tested():
    assert {case.name for case in CASES.values()} == set(OPTIMIZERS)
    assert {case.oracle for case in CASES.values()} == set(oracle.OPTIMIZERS)


@pytest.mark.parametrize(
    "case,on_gpu",
    [*((case, False) for case in CASES.values()), (CASES["muon"], True)],
    ids=[*CASES, "muon_on_gpu"],
)
def test_an_update_clips_then_moves_then_averages(case, on_gpu):
    """Under a schedule, whose rate stays outside of the slots."""
    norms = [oracle.global_norm(gradients(step)) for step in range(NUM_STEPS)]
    clip_norm = float(np.median(norms))  # of some steps, not of all
    update = create_update(case, falling_rate, clip_norm=clip_norm, ema_decay=0.3)
    params, slots, averages = run(update, on_gpu=on_gpu)
    assert set(slots) == set(update.optimizer.slots)
    expected = run_oracle(case, clip_norm, ema_decay=0.3)
    assert_close(params, expected[0], rtol=1e-12, atol=1e-12)
    assert_close(averages, expected[2], rtol=1e-12, atol=1e-12)
    for name, values in slots.items():
        assert_close(values, expected[1][name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (12, 12)])
def test_orthogonalized_has_the_singular_vectors_and_values_near_one(shape):
    """With more steps than Muon takes, whatever the singular values were."""
    matrix = np.random.default_rng(0).normal(size=shape)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    found = orthogonalized(tf.constant(matrix), 6).numpy()
    diagonal = left.T @ found @ right.T
    assert values.max() / values.min() > 1.5
    np.testing.assert_allclose(diagonal, np.diag(np.diag(diagonal)), atol=1e-9)
    assert np.all((np.diag(diagonal) > 0.65) & (np.diag(diagonal) < 1.25))


def test_every_parameter_has_its_own_rate():
    """A third of the rate, and one that ends after two steps."""
    rate_fns = dict.fromkeys(SHAPES, constant_rate) | {
        "kernel": lambda step: constant_rate(step) / 3,
        "scalar": falling_rate,
        "filters": lambda step: tf.where(step < 2, constant_rate(step), 0.0),
    }
    update = create_update(CASES["sgd"], constant_rate)
    own = dataclasses.replace(update, rate_fns=tuple(rate_fns.values()))
    before = named(random_arrays(0))
    moved = {k: v - before[k] for k, v in run(update)[0].items()}
    found = {k: v - before[k] for k, v in run(own)[0].items()}
    np.testing.assert_allclose(found["kernel"], moved["kernel"] / 3, rtol=1e-12)
    np.testing.assert_array_equal(found["bias"], moved["bias"])
    fallen = -sum(0.5**step * gradients(step)["scalar"] for step in range(NUM_STEPS))
    np.testing.assert_allclose(found["scalar"], fallen, rtol=1e-12)
    ended = -0.125 * (gradients(0)["filters"] + gradients(1)["filters"])
    np.testing.assert_allclose(found["filters"], ended, rtol=1e-12)


def test_parameters_of_one_shape_keep_their_rates_on_gpus():
    """Where those with the same rate are updated together."""
    rate_fns = dict.fromkeys(SHAPES, constant_rate)
    rate_fns["more_filters"] = rate_fns["still"] = falling_rate
    update = create_update(CASES["muon"], constant_rate)
    update = dataclasses.replace(update, rate_fns=tuple(rate_fns.values()))
    expected, slots, _ = run(update)
    stacked = run(update, on_gpu=True)
    assert_close(stacked[0], expected, rtol=1e-12, atol=1e-12)
    assert_close(stacked[1]["velocity"], slots["velocity"], rtol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_are_called_ignored_where_they_change_no_step(name):
    def params_of(**hyper):
        update = Update(create_optimizer(name, **hyper), constant_rate)
        params = run(update)[0]
        return np.concatenate([np.ravel(x) for x in params.values()])

    options = "momentum beta1 beta2 rho epsilon trust_coefficient muon_momentum".split()
    default = params_of(momentum=0.9)
    for option in options:
        changed = {"momentum": 0.9, option: 0.5}
        lines = checks.ignored_options(Config(optimizer=name, **changed))
        is_ignored = any(line.startswith(f"{option}=") for line in lines)
        assert np.any(params_of(**changed) != default) == (not is_ignored), option


# In the strategies. The first three are in the tests of the strategies themselves.


@dataclasses.dataclass(frozen=True)
class TakingRecipe(Recipe):
    """One of the other optimizers, as the trainer and the oracle are told of it.

    Attributes:
        hyper: of the optimizer.
        decays: parameter name -> weight decay that the optimizer applies itself.
    """

    hyper: dict = dataclasses.field(default_factory=dict)
    decays: dict | None = None

    def update(self, batch_size):
        return dataclasses.replace(
            super().update(batch_size),
            optimizer=create_optimizer(self.optimizer, **self.hyper),
            decays=tuple((self.decays or {}).values()),
        )

    @property
    def hyperparameters(self):
        taken = {} if self.decays is None else {"decay": self.decays}
        return self.hyper | taken

    def oracle(self, network, batches):
        if self.decays is not None:  # then the loss lacks it
            network = dataclasses.replace(network, decay={})
        return super().oracle(network, batches)


@pytest.mark.parametrize(
    "case,cls,num_towers,options",
    [
        ("lamb", model_parallel, 2, {"group_size": 2}),
        ("muon", replicated, 3, {}),
        slow("adam", model_parallel, 2, {"group_size": 2}),
        slow("rmsprop_momentum", towers, 3, {}),
    ],
)
def test_strategies_equal_the_oracle(case, cls, num_towers, options):
    is_split = cls is model_parallel  # which computes in float32 only
    network = networks.plain_network("float32" if is_split else "float64")
    recipe = taking_recipe(case, network)
    batches = networks.random_batches(3, 13)
    strategy = create_trainer(cls, network, recipe, batches, num_towers, **options)
    metrics = strategy.train(3)
    expected = recipe.oracle(network, batches)
    assert max(r.gradient_norm for r in expected.reports) > 0.5, "nothing is clipped"
    tolerance = 1e-5 if is_split else 1e-9
    assert_equal_to_oracle(strategy.state(), expected, tolerance)
    report = expected.reports[-1]
    assert metrics["total_loss"] == pytest.approx(report.total_loss, rel=1e-5)
    assert (report.total_loss == report.loss) == (recipe.decays is not None)


def taking_recipe(case, network):
    """The recipe of a case; the network's weight decay goes where it belongs."""
    decays = None
    if CASES[case].create().takes_decay:
        taken = pop_weight_decay(network.model.trainable_variables)
        decays = dict(zip(network.params, taken, strict=True))
        assert {k: v for k, v in decays.items() if v} == network.decay
    return TakingRecipe(
        CASES[case].name,
        clip_norm=0.5,
        learning_rate=0.01,
        hyper=CASES[case].hyper,
        decays=decays,
    )
