"""A Keras model and arrays in Python, in place of the names of a network and data."""

import collections
import dataclasses
import gc
import json
import textwrap
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from marks import slow
from processes import ROOT, Program
from small_runs import arrays, assert_equal_states, records

import towers
import towers.models.keras.given
from towers import Config, compare, evaluate, load_run, train
from towers.data.sets import arrays as sets
from towers.data.sources import DataSet
from towers.errors import ConfigError, DataError
from towers.models.create import create_model
from towers.models.keras import given
from towers.parallel.trainer import Trainer
from towers.training.run import Run

CONFIG = Config(
    augment="none",
    optimizer="sgd",
    learning_rate=0.05,
    momentum=0.0,
    weight_decay=0.0,
    schedule="constant",
    ema_decay=0.0,
    batch_size=50,
    num_epochs=2.0,
    device="cpu",
    eval_every_epochs=1.0,
    summary_every_steps=0,
)
TRAIN, TEST = arrays(50, 0), arrays(23, 1)
GRAY = TRAIN[0][..., 0]
WEIGHTS = np.maximum(0, np.random.default_rng(2).normal(1, 1, 50)).astype(np.float32)
FAR = np.where(TRAIN[1] == 3, 2**40, TRAIN[1].astype(np.int64))


def counted(count):
    """A data set that says how many examples it has."""
    dataset = tf.data.Dataset.from_tensor_slices((TRAIN[0], TRAIN[1]))
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


def jpegs():
    """One image, and one that is cut short."""
    whole = tf.io.encode_jpeg(np.zeros((4, 4, 3), np.uint8)).numpy()
    files = tf.data.Dataset.from_tensor_slices(([whole, whole[:-99]], [0, 1]))
    return files.map(lambda x, y: (tf.io.decode_jpeg(x, channels=3), y))


def sequential():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(5),
        ]
    )


def functional():
    """With a network in it, a shared layer and operations."""
    inner = keras.Sequential([layers.Conv2D(4, 3, padding="same"), layers.ReLU()])
    shared = layers.Dense(8, activation="tanh", name="shared")
    images = keras.Input((8, 8, 3))
    x = inner(images)
    x = layers.GlobalAveragePooling2D()(x + keras.ops.square(x))
    return keras.Model(images, layers.Dense(5)(shared(shared(layers.Dense(8)(x)))))


def without_input():
    """As with a pretrained network that gets a new head."""
    base = sequential()
    return keras.Sequential([base, layers.ReLU(), layers.Dense(5)])


def adapted():
    """Its moments are those of other images."""
    normalization = layers.Normalization(name="normalization")
    normalization.adapt(np.random.default_rng(3).normal(3, 2, (9, 8, 8, 3)))
    inner = keras.Sequential([normalization, layers.Conv2D(2, 3)])
    return keras.Sequential(
        [keras.Input((8, 8, 3)), inner, layers.Flatten(), layers.Dense(5)]
    )


def normalized_twice():
    """Its moving averages move twice in a step."""
    norm = layers.BatchNormalization()
    images = keras.Input((8, 8, 3))
    x = layers.ReLU()(norm(layers.Conv2D(4, 3)(images)))
    x = layers.Flatten()(norm(layers.Conv2D(4, 3)(x)))
    return keras.Model(images, layers.Dense(5)(x))


def recurrent():
    """Without dropout it draws nothing, though its cells keep generators."""
    image = [keras.Input((8, 8, 3)), layers.Reshape((8, 24))]
    cells = layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)], return_sequences=True)
    rows = [cells, layers.Bidirectional(layers.GRU(3))]
    return keras.Sequential([*image, *rows, layers.Dense(5)])


@keras.saving.register_keras_serializable("tests")
class Lazy(layers.Layer):
    """Its layers create their variables when it is called; it has no `build`."""

    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.conv, self.filters = layers.Conv2D(filters, 3), filters
        self.norm = layers.BatchNormalization()

    def call(self, x):
        return self.norm(self.conv(x))

    def get_config(self):
        return super().get_config() | {"filters": self.filters}


@keras.saving.register_keras_serializable("tests")
class Patches(layers.Layer):
    """Creates its layer in `build`; its configuration says more than its constructor
    takes, and not all of that."""

    def __init__(self, size, use_bias=True, **kwargs):
        super().__init__(**kwargs)
        self.size, self.use_bias = size, use_bias

    def build(self, shape):
        self.dense = layers.Dense(self.size, use_bias=self.use_bias)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return super().get_config() | {"size": self.size, "num_patches": 36}


class Backbone(keras.Model):
    """A subclass that is Functional, with a constructor of its own."""

    def __init__(self, filters):
        images = keras.Input((8, 8, 3))
        x = layers.ReLU()(Lazy(filters)(images))
        super().__init__(images, Patches(filters, use_bias=False)(x))


def lazy():
    """As the networks of keras-hub."""
    images = keras.Input((8, 8, 3))
    x = layers.GlobalAveragePooling2D()(Backbone(4)(images))
    return keras.Model(images, layers.Dense(5)(x))


class Changing(layers.Layer):
    """Has another number of variables each time that it is made."""

    num_made = 0

    def build(self, shape):
        type(self).num_made += 1
        self.all = [self.add_weight(shape=[3]) for _ in range(self.num_made)]

    def call(self, x):
        return x * self.all[0]


class Normalizing(layers.Layer):
    """Its constructor takes a class, which no configuration holds."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.norm = kind()

    def call(self, x):
        return self.norm(x)


def ending_in(*some):
    return keras.Sequential([keras.Input((8, 8, 3)), *some, layers.Dense(5)])


def of_two_inputs(name):
    inputs = [keras.Input((8, 8, 3), name=name), keras.Input((2,), name="place")]
    x = layers.Concatenate()([layers.Flatten()(inputs[0]), inputs[1]])
    return keras.Model(inputs, layers.Dense(5)(x))


def test_a_stored_architecture_has_the_arguments_of_the_constructors():
    _, architecture = towers.models.keras.given.give(lazy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = keras.models.model_from_json(architecture)
    assert restored.count_params() == lazy().count_params()


def standardized(images):
    mean, std = TRAIN[0].mean((0, 1, 2)), TRAIN[0].std((0, 1, 2))
    return ((images - mean) / std).astype(np.float32)


@pytest.mark.parametrize(
    "create",
    [
        slow(sequential),
        functional,
        without_input,
        adapted,
        normalized_twice,
        recurrent,
        slow(lazy),
    ],
)
def test_a_step_is_that_of_keras(create, tmp_path):
    """All images are one batch, so that their order does not matter."""
    model = create()
    if create is without_input:  # of the head, which Keras draws when it is called
        model.layers[-1].kernel_initializer = keras.initializers.Ones()
    before = model.get_weights()
    config = dataclasses.replace(CONFIG, max_steps=1, standardize="data")
    result = train(tmp_path, config, model=model, data=(TRAIN, TEST), progress="off")
    for ours, theirs in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)  # it stays as it is

    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = (1 + 0) / (10 + 0)  # the ramp in step 0
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, run_eagerly=True)
    model.train_on_batch(standardized(TRAIN[0]), TRAIN[1])
    ours = {variable.path: variable.numpy() for variable in result.model.weights}
    theirs = [v for v in model.weights if "/normalization/" not in f"/{v.path}"]
    for (name, value), variable in zip(ours.items(), theirs, strict=True):
        np.testing.assert_allclose(value, variable, 2e-4, 2e-6, err_msg=name)
    logits = model(standardized(TEST[0]), training=False)
    accuracy = (np.argmax(logits, 1) == TEST[1]).mean()
    assert result.accuracy == pytest.approx(accuracy)


def test_images_have_any_number_of_channels(tmp_path):
    channels = 5
    data = [(np.repeat(x, 2, 3)[..., :channels], y) for x, y in (TRAIN, TEST)]
    stack = [keras.Input((8, 8, channels)), layers.Flatten(), layers.Dense(5)]
    config = dataclasses.replace(CONFIG, max_steps=1, summary_every_steps=1)
    given = {"model": keras.Sequential(stack), "data": data, "progress": "off"}
    assert train(tmp_path / "run", config, **given).step == 1
    for colors in ({"color_jitter": 0.5}, {"policy": "rand_augment"}):
        config = dataclasses.replace(CONFIG, **colors)
        with pytest.raises(ConfigError, match=f"{channels} channels"):
            train(tmp_path / "refused", config, **given)


@pytest.mark.parametrize(
    "options",
    [
        {"input": "resident"},
        {"num_towers": 2, "batch_norm": "sync"},
        slow({"strategy": "model_parallel", "num_towers": 4, "group_size": 2}),
    ],
    ids=str,
)
def test_a_step_with_sample_weights_is_that_of_keras(options, tmp_path):
    """Also as a data set, and with weights of the classes, which Keras does not take
    together with them."""
    conv, norm, *others = sequential().layers
    norm.momentum = 0.1  # the ramp in step 0
    norms = [norm] if "batch_norm" in options else []  # else per tower
    model = keras.Sequential([keras.Input((8, 8, 3)), conv, *norms, *others])
    dataset = tf.data.Dataset.from_tensor_slices((*TRAIN, WEIGHTS)).shuffle(50)
    options = options | {"batch_size": 50 // options.get("accumulate_steps", 1)}
    config = dataclasses.replace(CONFIG, max_steps=1, class_weights={1: 3}, **options)
    data = {"data": (dataset, TEST), "report": False, "progress": "off"}
    result = train(tmp_path, config, model=model, **data)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, run_eagerly=True)
    both = WEIGHTS * np.where(TRAIN[1] == 1, 3, 1)
    mean = model.train_on_batch(standardized(TRAIN[0]), TRAIN[1], sample_weight=both)
    assert records(tmp_path)[0]["loss"] == pytest.approx(mean, rel=1e-5)
    for ours, theirs in zip(result.model.weights, model.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, 2e-4, 2e-6, err_msg=theirs.path)


def test_a_run_with_sample_weights_continues_with_these_alone(tmp_path):
    """A tenth is held out."""
    model, weighted = ending_in(layers.Flatten()), (*TRAIN, WEIGHTS)
    whole = train(tmp_path / "whole", CONFIG, model=model, data=weighted)
    half = dataclasses.replace(CONFIG, max_steps=1)
    train(tmp_path / "half", half, model=model, data=weighted)
    for other in (*TRAIN, WEIGHTS + 1), TRAIN:
        with pytest.raises(ConfigError, match=r"another run: data has other .*weights"):
            train(tmp_path / "half", CONFIG, model=model, data=other)
    column = [*TRAIN, WEIGHTS[:, None].tolist()]
    result = train(tmp_path / "half", CONFIG, model=model, data=column)
    assert_equal_states(result.state, whole.state)
    assert records(tmp_path / "half") == records(tmp_path / "whole")


def test_shared_moments_are_of_layers_that_train(tmp_path):
    model = sequential()
    norm = model.layers[1]
    norm.trainable = False
    norm.moving_mean.assign([1.0, 2.0, 3.0, 4.0])
    sync = {"batch_norm": "sync", "num_towers": 2, "max_steps": 1}
    config = dataclasses.replace(CONFIG, **sync)
    result = train(tmp_path / "a", config, model=model, data=(TRAIN, TEST))
    ours = dict(zip(map(id, model.weights), result.model.weights, strict=True))
    for theirs in norm.weights:
        np.testing.assert_array_equal(ours[id(theirs)], theirs)
    kernel = model.layers[0].kernel
    assert not np.array_equal(ours[id(kernel)], kernel)

    other = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.BatchNormalization(axis=1, name="rows"),
            layers.Flatten(),
            layers.Dense(5),
        ]
    )
    with pytest.raises(ConfigError, match=r"^batch_norm=sync: layer rows .* axis 1"):
        train(tmp_path / "b", config, model=other, data=(TRAIN, TEST))


@pytest.mark.slow
def test_the_same_call_continues_also_with_models_of_other_automatic_names(tmp_path):
    keras.utils.set_random_seed(1)
    model = functional()
    data = (TRAIN, TEST)
    whole = train(tmp_path / "whole", CONFIG, model=model, data=data)
    half = dataclasses.replace(CONFIG, max_steps=1)
    train(tmp_path / "half", half, model=model, data=data)
    result = train(tmp_path / "half", CONFIG, model=functional(), data=data)
    assert_equal_states(result.state, whole.state)
    assert records(tmp_path / "half") == records(tmp_path / "whole")
    with pytest.raises(ConfigError, match="another run: model has other layers"):
        train(tmp_path / "half", CONFIG, model=sequential(), data=data)
    other = (TRAIN[0], TRAIN[1][::-1]), TEST
    with pytest.raises(ConfigError, match="another run: data has other images"):
        train(tmp_path / "half", CONFIG, model=model, data=other)
    for kwargs, name in ({"model": model}, "data"), ({"data": data}, "model"):
        with pytest.raises(ConfigError, match=f"config, {name}=...") as caught:
            train(tmp_path / "half", CONFIG, **kwargs)
        assert "allow_change" not in str(caught.value)


def test_a_data_set_that_shuffles_is_the_same_one():
    dataset = tf.data.Dataset.from_tensor_slices(TRAIN).shuffle(50, seed=None)
    name = sets.give((dataset, TEST))
    assert name == sets.give((dataset.batch(7), TEST)) == sets.give((dataset, TEST))
    flipped = dataset.map(lambda x, y: (tf.image.random_flip_left_right(x), y))
    assert name != sets.give((flipped, TEST))


@pytest.mark.slow
def test_a_new_process_has_the_network_and_asks_for_the_data(tmp_path):
    data = (TRAIN, TEST)
    result = train(tmp_path / "run", CONFIG, model=functional(), data=data)
    code = """
import numpy, towers
run = towers.load_run("run")
numpy.save("logits.npy", run.model(run.preprocess(numpy.load("images.npy"))))
towers.evaluate("run")
"""
    np.save(tmp_path / "images.npy", TEST[0])
    with Program(["-c", code], tmp_path) as program:
        assert program.wait() == 1
        assert "evaluate(workdir, data=...)" in program.output.splitlines()[-1]
    expected = result.model(standardized(TEST[0]))
    logits = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_an_evaluation_on_other_images_leaves_the_run_alone(tmp_path):
    config = dataclasses.replace(CONFIG, dataset="synthetic", model="cnn", width=0.05)
    config = dataclasses.replace(config, max_steps=1)
    result = train(tmp_path, config, report=False)
    images = np.random.default_rng(0).integers(
        0, 256, (9, *result.dataset_info.image_shape)
    )
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    labels = np.arange(9)
    accuracy = evaluate(tmp_path, data=(images, labels))["test_accuracy"]
    run = load_run(tmp_path)
    logits = run.model(run.preprocess(images.astype(np.uint8)))
    assert accuracy == pytest.approx((np.argmax(logits, 1) == labels).mean())
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before == after


def test_the_same_images_in_another_form_are_the_same_data_set():
    images, labels = TRAIN
    names = list("abcde")
    for same in (
        (images.astype(np.float32), labels[:, None]),
        (images.astype(np.int64), np.eye(5)[labels]),
        (images.tolist(), labels.tolist()),
        (images.astype(np.float16), labels),
        (images, labels.astype(np.float64)),
    ):
        assert sets.give((same, TEST), names) == sets.give((TRAIN, TEST), names)


def test_labels_of_two_classes_may_be_bool_or_float():
    """As comparisons and Keras' `label_mode="binary"` give them."""
    integers = TRAIN[1] % 2
    expected = sets.give((TRAIN[0], integers), ["cat", "dog"])
    for labels in (
        integers == 1,
        (integers == 1)[:, None],
        integers.astype(np.float32)[:, None],
        np.float16(integers),
        (integers == 1).astype(object),
    ):
        assert sets.give((TRAIN[0], labels), ["cat", "dog"]) == expected
        batched = SLICES((TRAIN[0], np.array(labels.tolist()))).batch(8)
        data = sets.give(batched, ["cat", "dog"])
        assert data == sets.give(SLICES((TRAIN[0], integers)), ["cat", "dog"])


def test_two_pairs_are_for_testing_three_for_validation_too(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, model="cnn", width=0.05, max_steps=1)
    three = (TRAIN, arrays(10, 2), TEST)
    result = train(tmp_path / "three", config, data=three)
    assert "validation_accuracy" in result.history
    printed = capsys.readouterr().out
    assert "arrays: 50 training, 10 validation, 23 test images" in printed
    assert "2 steps, 2 epochs of 50 images" in printed
    assert "test_accuracy" in train(tmp_path / "two", config, data=three[::2]).history
    result = train(tmp_path / "one", config, data=TRAIN)
    assert result.dataset_info.num_train == 45  # a tenth of each class is held out


SLICES = tf.data.Dataset.from_tensor_slices


@pytest.mark.row(56)
@pytest.mark.parametrize(
    "data,words",
    [
        (((TRAIN[0] / 255, TRAIN[1]), TEST), "images differ: .*float32.*uint8"),
        (((TRAIN[0] / 80, TRAIN[1]), TEST), "images differ: .*float32.*uint8"),
        (((TRAIN[0] > 99) * 1, TRAIN[1]), "multiply drawings"),
        ((TRAIN[0] + 1j, TRAIN[1]), "complex128"),
        ((np.where(GRAY > 9, GRAY, np.nan), TRAIN[1]), "not finite"),
        ((["a.png"] * 50, TRAIN[1]), "files of images"),
        (({"a": TRAIN[0]}, TRAIN[1]), "dict of inputs"),
        ((np.moveaxis(TRAIN[0], 3, 1), TRAIN[1]), "moveaxis"),
        ((TRAIN[0][:, :0], TRAIN[1]), "uint8 .50, 0, .*none of them 0"),
        ((TRAIN[0], TRAIN[1] / 2), "labels are float64"),
        ((TRAIN[0], TRAIN[1] + np.nan), "labels are float64"),
        ((TRAIN[0], TRAIN[1] * 1e30), "labels are float64"),
        ((TRAIN[0], ["cat"] * 50), "labels are <U3 .*np.unique"),
        ((TRAIN[0], TRAIN[1] + 1), "from 1 to 5, .* subtract 1"),
        ((TRAIN[0], FAR), "from 0 to 1099511627776, of 50 images"),
        ((TRAIN[0], TRAIN[1][1:]), "50 training images with 49 labels"),
        ((*TRAIN, WEIGHTS[1:]), "float32 .49.; .*numbers .50."),
        ((*TRAIN, -WEIGHTS), "at least 0"),
        ((*TRAIN, WEIGHTS * np.nan), "from nan to nan"),
        (((*TRAIN, WEIGHTS * 0), TEST), "not all 0"),
        ((TRAIN, (*TEST, TEST[1])), "test part has sample weights"),
        ((TRAIN,) * 4, "4 parts"),
        ((TRAIN, (TEST[0][:, :4], TEST[1])), "parts differ in shape"),
        (SLICES(TRAIN).take(0), "is empty"),
        (SLICES(TRAIN).repeat(), "repeat"),
        (SLICES(TRAIN).filter(lambda *_: True), "assert_cardinality"),
        (counted(7), "contain 7 elements"),
        (jpegs(), "Invalid JPEG"),
    ],
    ids=lambda x: x[:20] if isinstance(x, str) else "",
)
def test_data_that_cannot_be_trained_on_is_refused(data, words):
    with pytest.raises((ConfigError, DataError), match=words):
        sets.give(data)
    with pytest.raises(DataError, match="subtract 1"):
        sets.give((TRAIN[0], TRAIN[1] + 1), list("abcde"))


@pytest.mark.parametrize(
    "model,words",
    [
        (lambda: ending_in(Normalizing(layers.LayerNormalization)), "get_config"),
        (lambda: ending_in(Changing(), layers.Flatten()), "same arguments"),
        (
            lambda: ending_in(
                layers.SpectralNormalization(layers.Conv2D(2, 8)), layers.Flatten()
            ),
            "changes parameters",
        ),
        (
            lambda: ending_in(layers.Reshape((8, 24)), layers.LSTM(3, dropout=0.1)),
            "recurrent_dropout to 0",
        ),
        (lambda: of_two_inputs("photo"), "photo, place, and .* one input"),
        (lambda: of_two_inputs("images"), "images, place, and .* one input"),
        (lambda: print, "give a Functional"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(model, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, CONFIG, model=model(), data=(TRAIN, TEST))


def test_the_lines_of_the_page_train(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)

    def load_data():
        return [
            (
                rng.integers(0, 256, (n, 32, 32, 3), np.uint8),
                rng.integers(0, 10, (n, 1)),
            )
            for n in (256, 20)
        ]

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", load_data)
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "docs" / "python.md").read_text().partition("## A Keras model")[2]
    lines = section.partition("\n\n")[2].partition("\n- ")[0]
    names = {}
    exec(textwrap.dedent(lines), names)
    assert names["result"].step == 10
    assert json.loads((tmp_path / "runs/mine/result.json").read_text())["step"] == 10


def test_nothing_of_a_finished_run_stays_in_memory(tmp_path, request):
    """Reference cycles, which Python finds late, keep its arrays and its network."""
    gc.disable()
    request.addfinalizer(gc.enable)
    kinds = keras.Model, Trainer, DataSet, Run, tf.Graph

    def alive():
        load_run(tmp_path / "first")  # a call frees what the program has dropped
        types = [type(x) for x in gc.get_objects()]
        return collections.Counter(x for x in types if issubclass(x, kinds))

    def use(name, data):
        run = tmp_path / name
        result = train(run, CONFIG, model=sequential(), data=data)
        assert result.model.count_params()
        evaluate(run, data=TEST, report=True)
        load_run(run).model.count_params()
        return run

    images, counts = [], []
    for name in ("first", "second"):
        data = arrays(50, len(images))
        images.append(weakref.ref(data[0]))
        use(name, (data, TEST))
        counts.append(alive())
    del data
    compare([tmp_path / "first", tmp_path / "second"])
    assert alive() == counts[0] == counts[1]
    assert [x() is None for x in images] == [True, False]


def test_a_stored_network_executes_nothing(tmp_path):
    """Keras' own refusal of code in a file."""
    network = keras.Sequential([keras.Input((8, 8, 3)), layers.Lambda(lambda x: x)])
    (tmp_path / "network.json").write_text(network.to_json())
    given.give_stored("given:00000000", tmp_path / "network.json")
    with pytest.raises(ConfigError, match=r"network\.json: .*Lambda"):
        create_model("given:00000000", image_shape=(8, 8, 3), num_classes=5)
