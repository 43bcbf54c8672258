"""Networks as people write them with Keras: Sequential, automatic names, dropout, own
layers."""

import fnmatch
import functools
import pathlib

import keras
import networks
import numpy as np
import pytest
import written_networks
from keras import layers
from marks import slow
from recipes import Recipe, assert_close, create_trainer

from towers.errors import ConfigError
from towers.models.create import adapt, create_model, freeze_normalization, noise_shapes
from towers.models.keras.networks import rebuild
from towers.models.variables import build_network
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers

SIDE, NUM_CLASSES = networks.APPLICATION_SIDE, networks.NUM_CLASSES
FILE = pathlib.Path(written_networks.__file__)
WRITTEN = {name: f"{FILE}:{name}" for name in ("sequential", "attention")}
every_network = pytest.mark.parametrize("name", WRITTEN)
one_network = pytest.mark.parametrize("name", ["sequential", slow("attention")])


def create(name, image_shape=(SIDE, SIDE, 3), **options):
    name = WRITTEN.get(name, name)
    return create_model(
        name, image_shape=image_shape, num_classes=NUM_CLASSES, **options
    )


created = functools.cache(create)


def written(folder, text):
    """The name of the function `create` in a file with this text and Keras."""
    file = folder / "mine.py"
    file.write_text("import keras, numpy as np\nfrom keras import layers\n" + text)
    return f"{file}:create"


@one_network
def test_initial_values_depend_on_the_seed_and_names_alone(name):
    first = created(name, seed=1)
    keras.utils.set_random_seed(7)
    layers.Dense(3), layers.MultiHeadAttention(2, 3)  # which Keras numbers
    again, other = (create(name, seed=seed) for seed in (1, 2))
    for ours, same, different in zip(
        first.variables, again.variables, other.variables, strict=True
    ):
        assert ours.path == same.path
        np.testing.assert_array_equal(ours, same, err_msg=ours.path)
        is_constant = not np.std(ours) > 0
        assert is_constant == np.array_equal(ours, different), ours.path
    drawn = [v.numpy().ravel()[:12] for v in first.variables if np.std(v) > 0]
    assert not any(np.array_equal(x, y) for x in drawn for y in drawn if x is not y)


@pytest.mark.parametrize(
    "options",
    [
        {"mean": 0.5, "variance": 0.25},
        {"mean": [1.0, 2.0, 3.0], "variance": [4.0, 0.0, 1.0]},
        {"mean": [1.0, 2.0, 3.0], "variance": [4.0, 9.0, 1.0], "invert": True},
        {"mean": [1.0, 2.0], "variance": [4.0, 9.0], "axis": 1},
    ],
)
def test_normalization_by_given_moments_is_that_of_keras(tmp_path, options):
    text = f"""
def create(image_shape, num_classes):
    return keras.Sequential([keras.Input(image_shape),
                             layers.Normalization(**{options}), layers.Flatten(),
                             layers.Dense(num_classes)])
"""
    model = create(written(tmp_path, text), (2, 5, 3))
    images = np.random.default_rng(0).normal(1, 2, (4, 2, 5, 3)).astype(np.float32)
    ours = keras.Model(model.inputs, model.layers[1].output)([images])
    theirs = layers.Normalization(**options)(images)
    np.testing.assert_allclose(ours, theirs, 1e-5, 1e-5)


def test_what_a_function_has_adapted_stays(tmp_path):
    text = """
def create(image_shape, num_classes):
    normalization = layers.Normalization()
    normalization.adapt(np.arange(12.0).reshape(4, 1, 1, 3))
    return keras.Sequential([keras.Input(image_shape), normalization,
                             layers.Flatten(), layers.Dense(num_classes)])
"""
    model = create(written(tmp_path, text), (1, 1, 3))
    adapt(model, lambda: [np.zeros((4, 1, 1, 3))])
    images = np.full((1, 1, 1, 3), 4.5, np.float32)
    ours = keras.Model(model.inputs, model.layers[1].output)
    expected = np.array([0, -1, -2]) / 11.25**0.5
    np.testing.assert_allclose(ours([images])[0, 0, 0], expected, 1e-5)
    mean, variance, _ = model.layers[1].variables
    mean.assign([1, 2, 3]), variance.assign([4, 1, 0.25])  # as a checkpoint does
    np.testing.assert_allclose(ours([images])[0, 0, 0], [1.75, 2.5, 3], 1e-5)


@every_network
def test_the_logits_are_those_of_keras(name):
    shape = (SIDE, SIDE, 3)
    stock = build_network(
        functools.partial(getattr(written_networks, name), shape, NUM_CLASSES)
    )
    model = create(name)
    values = [v for v in stock.variables if "seed_generator" not in v.path]
    for ours, theirs in zip(model.variables, values, strict=True):
        ours.assign(theirs)
    images = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
    noises = [np.zeros((3, *x), np.float32) for x in noise_shapes(model).values()]
    expected = stock(images, training=False)
    np.testing.assert_allclose(model([images, *noises]), expected, atol=1e-6)


def test_noise_is_an_input_wherever_keras_draws():
    assert noise_shapes(created("sequential", seed=1)) == {
        "spatial_dropout2d_noise": (1, 1, 6),
        "gaussian_noise_noise": (7, 7, 6),
        "dropout_noise": (12,),
    }
    assert noise_shapes(created("attention", seed=1)) == {
        "multi_head_attention_noise": (2, 16, 16),
        "block_noise": (2, 16, 16),
        "block_noise_1": (16, 4),
        "block_noise_2": (16, 4),
    }


@pytest.mark.parametrize(
    "layer,stddev", [(layers.GaussianNoise(0.3), 0.3), (layers.GaussianDropout(0.2), 1)]
)
def test_gaussian_noise_is_normal(layer, stddev):
    shape = (100, 100, 3)

    def rebuilt():
        stack = [keras.Input(shape), layer, layers.Flatten(), layers.Dense(3)]
        return rebuild("model=mine", keras.Sequential(stack), shape, 3)

    noise = np.random.default_rng(0).random((1, *shape), np.float32)
    noise[0, 0, 0] = 0
    inputs = [np.full((1, *shape), 2.0, np.float32), noise]
    changed = np.ravel(build_network(rebuilt).layers[2](inputs, training=True))
    assert np.mean(changed) == pytest.approx(2, abs=0.02)
    assert np.std(changed) == pytest.approx(stddev, rel=0.02)
    assert np.all(np.diff(changed[np.argsort(noise.ravel())]) >= 0)


def test_normalization_in_a_layer_of_the_user_is_frozen(tmp_path):
    name = written(
        tmp_path,
        """
class Normal(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, x, training=False):
        return self.norm(x, training=training)

def create(image_shape, num_classes):
    return keras.Sequential([keras.Input(image_shape), Normal(), layers.Flatten(),
                             layers.Dense(num_classes)])
""",
    )
    model = create(name, (2, 2, 3))
    [images] = networks.random_batches(1, 4, image_shape=(2, 2, 3), noise_shapes={})
    state = [v.value for v in model.non_trainable_variables]
    for frozen, is_still in (("none", False), ("normal/batch_normalization/*", True)):
        names = fnmatch.filter([v.path for v in model.trainable_variables], frozen)
        freeze_normalization(model, frozenset(names))
        _, after = model.stateless_call(
            model.trainable_variables, state, images["images"], training=True
        )
        same = [np.array_equal(x, y) for x, y in zip(state, after, strict=True)]
        assert same == 2 * [is_still]


# Training, in float64, where sums over other parts of a batch are as good as equal.


def trained(name, strategy, num_devices, **options):
    network = networks.application(WRITTEN[name])
    batches = networks.application_batches(network, 12)
    options["sync_batch_norm"] = name == "sequential"
    trainer = create_trainer(
        strategy, network, Recipe(), batches, num_devices, **options
    )
    before = trainer.state()
    trainer.train(2)
    after = trainer.state()
    moved = {k for k in before if not np.array_equal(before[k], after[k])}
    assert {k for k in before if k.startswith("params/")} <= moved
    return after


@one_network
def test_any_number_of_towers_trains_it_to_the_same_state(name):
    one = trained(name, towers, 1)
    assert_close(trained(name, replicated, 2), one, 1e-9)


# Refusals.

NETWORK = """
def create(image_shape, num_classes):
    return keras.Sequential([{}])
"""


def refusal(folder, stack):
    name = written(folder, NETWORK.format(stack))
    with pytest.raises(ConfigError) as caught:
        create(name, (4, 4, 3))
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"model={name}: ") for line in lines)
    return [line.partition("create: ")[2] for line in lines]


@pytest.mark.parametrize(
    "head,line",
    [
        ("layers.Dense(num_classes, activation='softmax')", "'dense' (Dense)"),
        ("layers.Dense(num_classes), layers.Softmax()", "'softmax' (Softmax)"),
        ("layers.Dense(num_classes), layers.Activation('softmax', name='end')",
         "'end' (Activation)"),
        ("layers.Dense(num_classes, activation=__import__('tensorflow').nn.softmax)",
         "'dense' (Dense)"),
        ("keras.Sequential([layers.Dense(num_classes, activation='softmax')])",
         "'dense' (Dense)"),
    ],
)  # fmt: skip
@pytest.mark.row(47)
def test_probabilities_in_place_of_logits_are_refused(tmp_path, head, line):
    assert refusal(tmp_path, f"layers.Flatten(), {head}") == [
        f"layer {line} gives probabilities; the loss takes logits: leave its softmax "
        "out"
    ]
