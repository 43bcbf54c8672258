"""--freeze: parameters that stay, and normalization that works as in inference."""

import functools
import math

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from marks import slow
from recipes import Recipe, assert_close, create_trainer
from small_runs import small_config, use

from towers.build import builder
from towers.errors import ConfigError
from towers.models.create import freeze_normalization
from towers.models.layers.normalization import BatchNormalization
from towers.models.variables import build_network
from towers.optim.phases import Phase
from towers.optim.schedules import match_frozen
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers
from towers.training.train import train

DECAY = 0.1
FROZEN = frozenset(
    ["stem_conv/kernel", "stem_norm/gamma", "stem_norm/beta", "conv/kernel"]
)
STAYS = {"state/stem_norm/moving_mean", "state/stem_norm/moving_variance"}
STAYS |= {f"params/{name}" for name in FROZEN}


def create_network(*, image_shape, num_classes, width, regularizer, norm=None):
    norm = norm or BatchNormalization
    images = keras.Input(image_shape, name="images")
    decayed = {"use_bias": False, "kernel_regularizer": regularizer}
    x = layers.Conv2D(6, 3, **decayed, name="stem_conv")(images)
    x = norm(momentum=0.9, name="stem_norm")(x)
    x = layers.ReLU(name="stem_relu")(x)
    x = layers.Conv2D(6, 3, **decayed, name="conv")(x)
    x = norm(momentum=0.9, name="norm")(x)
    x = layers.ReLU(name="relu")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(num_classes, kernel_regularizer=regularizer, name="logits")
    return keras.Model(images, logits(x))


def small_network(norm=None):
    """In float64, with moving averages that are not those of its images."""
    create = functools.partial(
        create_network,
        image_shape=networks.IMAGE_SHAPE,
        num_classes=networks.NUM_CLASSES,
        width=1.0,
        regularizer=keras.regularizers.L2(DECAY / 2),
        norm=norm,
    )
    model = build_network(create, seed=1, policy="float64")
    for variable in model.non_trainable_variables:
        variable.assign(variable + 0.5)
    return networks.Network(model, [], {})


@functools.cache
def batches():
    found = networks.random_batches(3, 12, noise_shapes={})
    return [x | {"images": x["images"].astype(np.float64)} for x in found]


@functools.cache
def trained_by_keras(recipe):
    """By Keras: layers that are not `trainable`, optimizer, TensorFlow's tape."""
    model = small_network(layers.BatchNormalization).model
    for name in ("stem_conv", "stem_norm", "conv"):
        model.get_layer(name).trainable = False
    optimizer = keras.optimizers.SGD(0.1)
    for step, batch in enumerate(batches()):
        optimizer.learning_rate = recipe.rate_fn(step * len(batch["labels"]))
        with tf.GradientTape() as tape:
            logits = model(batch["images"], training=True)
            loss = tf.reduce_mean(recipe.loss_fn(logits, batch["labels"]))
            loss += tf.add_n(model.losses)
        variables = model.trainable_variables
        optimizer.apply_gradients(
            zip(
                tape.gradient(loss, [v.value for v in variables]),
                variables,
                strict=True,
            )
        )
    return {v.path: v.numpy() for v in model.variables}


@pytest.mark.parametrize(
    "cls,num_devices,options",
    [
        (replicated, 3, {"sync_batch_norm": True}),
        slow(towers, 1, {}),
        slow(model_parallel, 2, {"group_size": 2}),
        slow(model_parallel, 4, {"group_size": 2, "sync_batch_norm": True}),
        slow(AsynchronousTrainer, 1, {}),
    ],
)
def test_every_strategy_trains_what_keras_does_with_layers_frozen(
    cls, num_devices, options
):
    network, recipe = small_network(), Recipe("sgd", ema_decay=0.0)
    freeze_normalization(network.model, FROZEN)
    phases = (Phase(math.inf, network.model, FROZEN),)
    trainer = create_trainer(
        cls, network, recipe, batches(), num_devices, phases=phases, **options
    )
    before = trainer.state()
    trainer.train(3)
    state = {k: v for k, v in trainer.state().items() if k != "step"}
    kept = {k for k, v in state.items() if np.array_equal(v, before[k])}
    assert kept == STAYS
    expected = trained_by_keras(recipe)
    variables = {k.partition("/")[2]: v for k, v in state.items()}
    # SGD with float32 rates in Keras.
    assert_close(variables, expected, 1e-8)


def test_nothing_is_computed_for_frozen_parameters():
    counts = []
    for frozen in (frozenset(), FROZEN):
        network = small_network()
        phases = (Phase(math.inf, network.model, frozen),)
        trainer = create_trainer(towers, network, Recipe(), batches(), 1, phases=phases)
        batches_of_towers = trainer.feed.batches_of(0)
        call = trainer._inspect.get_concrete_function(0, batches_of_towers)
        wanted = [x.op.name for x in call.graph.outputs]
        graph = tf.compat.v1.graph_util.extract_sub_graph(
            call.graph.as_graph_def(), wanted
        )
        kinds = [node.op for node in graph.node]
        counts.append([kinds.count(f"Conv2DBackprop{x}") for x in ("Filter", "Input")])
    assert counts == [[2, 1], [0, 0]]


def test_what_a_run_freezes_stays_as_it_was_drawn(tmp_path, monkeypatch, capfd):
    """Under weight decay, and after a restart."""
    use(monkeypatch, create_network)
    config = functools.partial(
        small_config, freeze="stem*,conv/*", num_towers=2, weight_decay=0.5
    )
    train(tmp_path, config(max_steps=2))
    after = train(tmp_path, config(max_steps=4)).state
    for variable in builder.build(config()).model.variables:
        kind = "params" if variable.trainable else "state"
        name = f"{kind}/{variable.path}"
        assert np.array_equal(after[name], variable) == (name in STAYS), name
    sizes = {k: v.size for k, v in after.items() if k.startswith("params/")}
    frozen = sum(sizes[name] for name in STAYS & sizes.keys())
    words = f"{sum(sizes.values()) - frozen} trained and {frozen} frozen parameters"
    assert " ".join(capfd.readouterr().out.split()).count(words) == 2


NAMES = ["stem/kernel", "stem/bias", "inner/stem2/kernel", "head/bias"]


@pytest.mark.parametrize(
    "patterns,expected",
    [
        (["stem*"], NAMES[:2]),
        (["*/stem*"], NAMES[:3]),
        (["*/bias", "stem/*"], [*NAMES[:2], "head/bias"]),
        (["stm*"], r"'stm\*' matches no .* did you mean 'stem'"),
        (["*"], "leaves no parameter to train"),
        (["stem/moving_mean"], "'stem/moving_mean' matches no .* did you mean 'stem'"),
    ],
)
def test_patterns_fit_names_or_are_refused(patterns, expected):
    if isinstance(expected, list):
        assert match_frozen(patterns, NAMES) == set(expected)
        return
    with pytest.raises(ConfigError, match=f"^freeze.*{expected}"):
        match_frozen(patterns, NAMES)


def test_normalization_that_would_go_on_moving_is_refused():
    model = small_network(layers.BatchNormalization).model
    with pytest.raises(ConfigError, match="layer 'stem_norm' cannot be frozen"):
        freeze_normalization(model, FROZEN)
    freeze_normalization(model, frozenset(["conv/kernel"]))
    with pytest.raises(ConfigError, match=r"^batch_norm=frozen: .*'stem_norm' cannot"):
        freeze_normalization(model, FROZEN, everywhere=True)


def test_all_normalization_is_frozen_also_without_parameters(monkeypatch):
    norm = functools.partial(BatchNormalization, scale=False, center=False)
    use(monkeypatch, functools.partial(create_network, norm=norm))
    for batch_norm in ("local", "frozen"):
        model = builder.build(small_config(batch_norm=batch_norm)).model
        norms = [x for x in model.layers if isinstance(x, BatchNormalization)]
        assert [x.is_frozen for x in norms] == [batch_norm == "frozen"] * 2
