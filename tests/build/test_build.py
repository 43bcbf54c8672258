"""From a Config to its parts."""

import dataclasses
import math

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from small_runs import small_config

from towers.build import builder
from towers.config import Config
from towers.config.choices import OPTIMIZERS
from towers.errors import ConfigError
from towers.models import create
from towers.models.variables import variable_names
from towers.optim import losses, schedules
from towers.optim.phases import image_size
from towers.optim.vector import Layout
from towers.parallel.copies import Initial


@pytest.fixture
def small(monkeypatch):
    small_runs.use(monkeypatch)


@pytest.mark.parametrize(
    "batch_size,num_epochs,steps",
    # In floats 1.1 * 50 is above 55.
    [(12, 2.0, 9), (128, 0.1, 1), (1, 0.5, 25), (5, 1.1, 11)],
)
def test_the_length_in_steps_covers_the_epochs(small, batch_size, num_epochs, steps):
    options = {"batch_size": batch_size, "num_epochs": num_epochs}
    assert builder.build(small_config(**options)).total_steps == steps
    parts = builder.build(small_config(**options, accumulate_steps=2))
    assert parts.total_steps == (steps + 1) // 2


NOISY = {"model": "wide_resnet_16_4", "width": 0.1, "dropout": 0.1}


@pytest.mark.parametrize(
    "options,words",
    [
        ({"augment": "tutorial"}, "augment=tutorial.*24x24.*8x8"),
        ({"cutout_size": 9}, "cutout_size=9 with images of 8x8"),
        ({"validation_fraction": 0.001}, "validation_fraction=0.001 of 50 images"),
        ({"early_sizes": "8:0.5"}, "images of 8x8 cannot be downscaled to 8x8"),
        ({"early_sizes": "4:0.5"}, "other parameters on images of 4x4; .*--model"),
        (NOISY | {"early_sizes": "4:0.5"}, "on images of 4x4; choose no --dropout"),
        ({"param_rates": "logit/bias:2"}, "'logit/bias' matches no .*mean 'logits/b"),
        ({"param_rates": "*:2,*/bias:3"}, "'[*]/bias' matches no .* earlier"),
        (
            {"freeze": "*/bias", "param_rates": "*/bias:2"},
            "'[*]/bias' matches no .* frozen",
        ),
        ({"param_rates": "*:0"}, "^param_rates=[*]:0 leaves no parameter to train"),
        (
            {"freeze": "*/bias", "param_rates": "*:0"},
            "/bias with param_rates=.* leaves",
        ),
    ],
)
def test_options_that_do_not_fit_images_or_network_are_refused(small, options, words):
    with pytest.raises(ConfigError, match=words):
        builder.build(small_config(**options))


def test_the_learning_rate_counts_images_not_steps(small):
    """A stair of half an epoch is 25 images."""
    shape = {"decay_factor": 0.5, "epochs_per_decay": 0.5, "learning_rate": 0.8}
    for batch_size, rates in ((5, [0.8] * 5 + [0.4] * 5), (10, [0.8] * 3 + [0.4] * 2)):
        config = small_config(batch_size=batch_size, **shape)
        rate = builder.build(config).update.learning_rate_fn
        steps = tf.range(len(rates), dtype=tf.int64)
        np.testing.assert_allclose([rate(step) for step in steps], rates)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weight_decay_goes_to_the_loss_or_to_the_optimizer(small, optimizer):
    parts = builder.build(small_config(optimizer=optimizer, weight_decay=0.5))
    decays, params = parts.update.decays, Initial.of(parts.model).params
    layout = Layout(params)
    decay = losses.WeightDecay(parts.model.trainable_variables, layout)
    vectors = layout.pack(list(params.values()))
    penalty, _ = decay(vectors, [tf.zeros_like(x) for x in vectors])
    if optimizer in ("adamw", "lars", "lamb", "lion", "muon"):
        taken = dict(zip(params, decays, strict=True))
        assert taken == {"logits/kernel": 0.5, "logits/bias": 0.0}
        assert penalty == 0
    else:
        kernel = params["logits/kernel"].numpy()
        squares = np.square(kernel, dtype=np.float64).sum()
        assert decays == () and float(penalty) == pytest.approx(0.25 * squares)


def test_rates_fall_from_the_head_to_the_input_by_block():
    """The weight decay of a step falls with them, as in timm; a frozen parameter
    stays frozen."""
    options = {"schedule": "constant", "learning_rate": 0.5, "optimizer": "adamw"}
    more = {"param_rates": "stage1_block1*:4,stem_norm/gamma:0", "weight_decay": 0.6}
    config = small_config(model="resnet20", layer_decay=0.7, **options, **more)
    parts = builder.build(config)
    names = variable_names(parts.model.trainable_variables)
    step = tf.constant(0, tf.int64)
    rates = [float(rate_fn(step)) for rate_fn in parts.update.rate_fns]
    blocks = [f"stage{1 + i // 3}_block{1 + i % 3}_" for i in range(9)]
    for name, rate, decay in zip(names, rates, parts.update.decays, strict=True):
        [number] = [i for i, x in enumerate(blocks, 1) if name.startswith(x)] or [
            10 if name.startswith("logits") else 0
        ]
        factor = {"stem_norm/gamma": 0}.get(name, 4 if number == 1 else 1)
        assert rate == pytest.approx(0.5 * factor * 0.7 ** (10 - number)), name
        is_kernel = name.endswith("kernel")
        assert decay == pytest.approx(is_kernel * 0.6 / (factor or 1)), name


# The first layer of each group and its power in timm 1.0.31's
# `param_groups_layer_decay`; test_torch.py compares every network with timm itself.
LAYER_GROUPS = {
    "mobilenet_v3_small": {
        "stem": 13,
        **{f"stage{i}_block1_depthwise": power for i, power in ((1, 12), (4, 6))},
        "stage5_block3_project_norm": 2,
        **{"stage6_conv": 1, "stage6_conv_norm": 1, "hidden": 0, "logits": 0},
    },
    "deit_tiny": {"tokens": 13, "block1_query": 12, "last_norm": 1, "logits": 0},
}


@pytest.mark.parametrize("name", LAYER_GROUPS)
def test_rates_fall_as_with_timm(name):
    model = create.create_model(name, image_shape=(224, 224, 3), num_classes=2)
    names = dict.fromkeys(variable_names(model.trainable_variables))
    rates = schedules.decay_by_layer(names, 0.5, create.head_layers(model))
    powers = {x.rpartition("/")[0]: -math.log2(rates[x].factor) for x in rates}
    expected = LAYER_GROUPS[name]
    assert {x: powers[x] for x in expected} == expected


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_factor_on_all_rates_is_one_on_the_learning_rate(small, optimizer):
    """But for weight decay next to the gradient, which follows the schedule alone."""
    made = []
    decay = 0.6 if optimizer in ("lars", "lamb") else 0.0
    for rate, rates in ((0.5, "*:0.01"), (0.005, "")):
        config = small_config(optimizer=optimizer, weight_decay=decay, momentum=0.9)
        config = dataclasses.replace(config, learning_rate=rate, param_rates=rates)
        parts = builder.build(config)
        params = Initial.of(parts.model).params
        layout, step = Layout(params), tf.constant(1, tf.int64)
        vectors = layout.pack(list(params.values()))
        gradients = [tf.sin(1000 * x) for x in vectors]
        slots = dict.fromkeys(parts.update.optimizer.slots, vectors)
        arguments = layout, step, vectors, slots, gradients, tf.constant(1.0)
        moved, _ = parts.update(*arguments, parts.update.squares(*arguments))
        made += [[x - y for x, y in zip(moved, vectors, strict=True)]]
    for ours, theirs in zip(*made, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)


def test_parameters_have_the_rates_of_the_first_pattern_that_fits(small):
    """A constant rate of 0.5; the bias' falls to zero over two epochs of 50 images."""
    rates = "*/bias:4:2,logits/*:3"
    options = {"schedule": "constant", "learning_rate": 0.5, "param_rates": rates}
    config = small_config(optimizer="muon", weight_decay=0.6, **options)
    parts = builder.build(config)
    names = [v.path for v in parts.model.trainable_variables]
    assert names == ["logits/kernel", "logits/bias"]
    for step, expected in ((0, (1.5, 2.0)), (5, (1.5, 1.0)), (10, (1.5, 0.0))):
        number = tf.constant(step, tf.int64)
        found = tuple(float(rate_fn(number)) for rate_fn in parts.update.rate_fns)
        assert found == pytest.approx(expected)
        assert float(parts.update.learning_rate_fn(number)) == 0.5
    # The decay of a step, rate times coefficient, is that of the rate itself.
    assert parts.update.decays == pytest.approx((0.2, 0.0))


PHASED = {
    "dataset": "synthetic",  # 10,000 images of 32x32
    "model": "resnet20",
    "width": 0.25,
    "augment": "none",
    "batch_size": 100,
    "num_epochs": 2.0,
}


def phases_of(**options):
    parts = builder.build(Config(**PHASED | options))
    num_steps = parts.total_steps
    return parts, [
        (min(p.end_step, num_steps), *image_size(p.model), sorted(p.frozen))
        for p in parts.phases
    ]


def test_images_are_small_in_the_first_parts_of_the_run():
    """In floats 0.55 * 100 is above 55, and 0.29 * 100 below 29."""
    parts, found = phases_of(early_sizes="16:0.29,24:0.55", num_epochs=1.0)
    assert found == [(29, 16, 16, []), (55, 24, 24, []), (100, 32, 32, [])]
    assert parts.phases[-1].model is parts.model
    first = [v.path for v in parts.phases[0].model.variables]
    assert first == [v.path for v in parts.model.variables]


def test_early_sizes_keep_the_proportions_of_rectangles():
    _, found = phases_of(early_sizes="16:0.25,24:0.5", image_size="32x50")
    assert [size for _, *size, _ in found] == [[16, 25], [24, 38], [32, 50]]
    with pytest.raises(ConfigError, match="of 32x50 cannot be downscaled to 32x50"):
        phases_of(early_sizes="32:0.5", image_size="32x50")


def test_parameters_whose_rate_has_ended_are_frozen():
    rates = "logits/bias:2:0.5,logits/kernel:3,*/beta:1:1.5"
    parts, found = phases_of(param_rates=rates, early_sizes="24:0.5")
    per_epoch = parts.num_examples / 100
    betas = [v.path for v in parts.model.trainable_variables if "/beta" in v.path]
    bias = ["logits/bias"]
    assert found == [
        (math.ceil(0.5 * per_epoch), 24, 24, []),
        (per_epoch, 24, 24, bias),
        (math.ceil(1.5 * per_epoch), 32, 32, bias),
        (2 * per_epoch, 32, 32, sorted(betas + bias)),
    ]


def test_a_run_without_early_sizes_and_an_evaluation_have_no_phases():
    assert phases_of(model="lenet")[0].phases == ()
    config = Config(**PHASED, early_sizes="24:0.5")
    assert builder.build(config, for_training=False).phases == ()


def test_layers_that_adapt_see_images_as_the_network_gets_them():
    """Whitened, the patches of the training images have second moments of 1."""
    options = {"model": "speedrun", "width": 0.1, "augment": "none", "batch_size": 50}
    parts = builder.build(Config(dataset="synthetic", **options))
    whitening = parts.model.get_layer("whitening")
    images = parts.train_batches(tf.constant(0, tf.int64))["images"]
    moments = np.mean(np.square(whitening(images)), axis=(0, 1, 2))
    np.testing.assert_allclose(moments, 1, atol=0.05)
