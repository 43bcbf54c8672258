"""Predictions and features for image files."""

import csv
import io
import json
import os
import pathlib
import shutil

import keras
import numpy as np
import pytest
import small_runs
import tensorflow as tf
from marks import slow
from PIL import Image
from scipy import special
from small_runs import CLASS_NAMES, NUM_TEST, arrays, small_config

from towers import load_run
from towers.build.restored import RestoredRun
from towers.data.files.paths import walk
from towers.data.files.unlabeled import Labels
from towers.errors import ConfigError, DataError
from towers.evaluation.evaluate import evaluate
from towers.evaluation.predict import predict, write_predictions
from towers.run.folder import RunFolder
from towers.run.stored_config import evaluation_config, prediction_config

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def workdir(tmp_path_factory):
    """A run of ten steps."""
    path = small_runs.uninterrupted(small_config()).path
    return shutil.copytree(path, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """The test images as PNG files in folders of their classes."""
    root = tmp_path_factory.mktemp("photos")
    for index, (image, label) in enumerate(zip(*arrays(NUM_TEST, 1), strict=True)):
        folder = root / CLASS_NAMES[label]
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{index:02}.png")
    return root


def sorted_files(folder):
    return [str(path) for path in sorted(folder.glob("*/*.png"))]


SPLIT = {"strategy": "model_parallel", "num_towers": 2, "group_size": 2}


@pytest.mark.parametrize(
    "trained,options", [({}, {"num_towers": 3, "batch_size": 7}), slow(SPLIT, {})]
)
def test_probabilities_are_those_of_the_network(photos, capfd, trained, options):
    workdir = small_runs.uninterrupted(small_config(**trained)).path
    config = prediction_config(RunFolder(workdir), **options)
    paths = sorted_files(photos)
    run = load_run(workdir)
    images = np.stack([np.asarray(Image.open(path)) for path in paths])
    logits = run.model_ema(run.preprocess(images)).numpy().astype(np.float64)
    expected = special.softmax(logits, axis=1)
    order = np.argsort(-expected)[:, :3]
    capfd.readouterr()
    predicted = predict(workdir, photos, config)
    assert not capfd.readouterr().out
    np.testing.assert_allclose(predicted.probabilities, expected, atol=1e-6)
    assert predicted.paths == paths
    assert predicted.labels == [pathlib.Path(path).parent.name for path in paths]
    write_predictions(workdir, [str(photos)], config, top=3, form="json")
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["path"] for row in rows] == paths
    for row, top, classes, p in zip(
        rows, predicted.top(3), order, expected, strict=True
    ):
        best = [CLASS_NAMES[x] for x in classes]
        assert [x["class"] for x in row["predictions"]] == best
        assert [name for name, _ in top] == best
        found = [x["probability"] for x in row["predictions"]]
        np.testing.assert_allclose(found, p[classes], atol=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        lambda images: list(images)[:1] + [Image.fromarray(x) for x in images[1:]],
        lambda images: tf.data.Dataset.from_tensor_slices((images, images)).batch(4),
    ],
    ids=["list", "batches"],
)
def test_images_in_memory_are_predicted_as_their_files(workdir, photos, form, tmp_path):
    (tmp_path / CLASS_NAMES[0]).mkdir()
    images = [np.asarray(Image.open(path)) for path in sorted_files(photos)]
    images = [np.asarray(Image.fromarray(x).resize((40, 31))) for x in images]
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(tmp_path / CLASS_NAMES[0] / f"{number:02}.tif")
    found, files = predict(workdir, form(images)), predict(workdir, tmp_path)
    np.testing.assert_array_equal(found.probabilities, files.probabilities)
    assert found.paths == [str(number) for number in range(len(images))]
    assert found.labels == [None] * len(images)
    assert set(files.labels) == {CLASS_NAMES[0]}


def test_one_image_of_any_kind_is_taken_and_others_are_refused(workdir, photos):
    path = sorted_files(photos)[0]
    image, expected = Image.open(path), predict(workdir, path).probabilities
    pixels = np.asarray(image)
    turned = image.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x112] = 6
    for one in (image, turned, image.convert("RGBA"), [path], pixels.tolist()):
        np.testing.assert_array_equal(predict(workdir, one).probabilities, expected)
    for other in (
        pixels / 255,
        np.where(pixels > 9, pixels, np.nan),
        np.tile(pixels[None], 3),  # 9 channels
        tf.data.Dataset.from_tensors(pixels).repeat(),
        np.zeros((0, 8, 8, 3)),
    ):
        with pytest.raises(DataError):
            predict(workdir, other)


def test_all_probabilities_come_in_the_order_of_the_classes(workdir, photos, capfd):
    paths = sorted_files(photos)[::9]
    expected = predict(workdir, paths).probabilities
    capfd.readouterr()
    write_predictions(workdir, paths, form="csv", top=0)
    header, *rows = csv.reader(capfd.readouterr().out.splitlines())
    assert header == ["path", "label", *CLASS_NAMES]
    np.testing.assert_allclose([np.float64(x[2:]) for x in rows], expected, rtol=1e-5)
    with pytest.raises(ConfigError, match="-1: must be at least"):
        write_predictions(workdir, paths, top=-1)


def test_no_image_is_right_with_nan_logits(
    workdir, photos, capfd, monkeypatch, tmp_path
):
    """Neither an image of the first class nor one without a label."""
    network = RestoredRun.network

    def of_nan(*arguments):
        model = network(*arguments)
        model.weights[0].assign(np.nan * model.weights[0])
        return model

    monkeypatch.setattr(RestoredRun, "network", of_nan)
    shutil.copy(sorted_files(photos)[0], tmp_path)
    write_predictions(workdir, [str(photos), str(tmp_path)], form="csv")
    assert f"0 of {NUM_TEST} labeled images" in capfd.readouterr().err


@pytest.mark.parametrize("use_ema,tta", [(True, "none"), (False, "mirror")])
def test_files_of_the_test_images_give_the_accuracy_of_the_evaluation(
    workdir, photos, capfd, use_ema, tta
):
    config = evaluation_config(RunFolder(workdir), tta=tta)
    result = evaluate(workdir, config, use_ema=use_ema)
    name = "test_accuracy_ema" if use_ema else "test_accuracy_tta"
    correct = round(result[name] * NUM_TEST)
    capfd.readouterr()
    write_predictions(workdir, [str(photos)], config, use_ema=use_ema, form="csv")
    out, err = capfd.readouterr()
    assert f"{correct} of {NUM_TEST} labeled images" in err
    if tta == "none":  # one by one
        rows = {
            int(pathlib.Path(x["path"]).stem): x for x in csv.DictReader(out.split())
        }
        wrong = {n: x["class_1"] for n, x in rows.items() if x["label"] != x["class_1"]}
        mistakes = csv.DictReader((workdir / "mistakes.csv").read_text().split())
        assert wrong == {int(row["index"]): row["prediction"] for row in mistakes}


@pytest.mark.row(50)
def test_files_that_cannot_be_read_are_named_and_the_rest_is_done(
    workdir, photos, capfd, tmp_path
):
    paths = sorted_files(photos)[:2]
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "photo.heic").write_bytes(b"of another format")
    (tmp_path / "notes.txt").write_text("is skipped")
    os.mkfifo(tmp_path / "waiting.jpg")
    (tmp_path / "lost.png").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(DataError, match="5 of 7 files cannot be read; each is named"):
        write_predictions(workdir, [paths[0], str(tmp_path), paths[1]], form="csv")
    out, err = capfd.readouterr()
    assert [row["path"] for row in csv.DictReader(io.StringIO(out))] == paths
    for name in ("broken.png", "photo.heic", "waiting.jpg", "lost.png", "loop"):
        assert sum(str(tmp_path / name) in x for x in err.splitlines()) == 1


@pytest.mark.parametrize("features", ["", "logits"])
@pytest.mark.row(48, 50)
def test_an_output_that_cannot_be_written_is_named(workdir, photos, tmp_path, features):
    def refuses(output, words):
        with pytest.raises(ConfigError, match=f"{output}: {words}"):
            write_predictions(workdir, [str(photos)], output=output, features=features)

    refuses(tmp_path / "nowhere" / "x", "cannot be written: No such")
    if not features:
        refuses("/dev/full", "cannot be written: No space")
    # Such as `--output a.png b.png`, where --output lacks its value.
    refuses(sorted_files(photos)[0], "is the name of an image")
    refuses(workdir / "config.json", "is a file of the run")


# Features.


def test_features_are_the_activations_of_a_layer(photos, tmp_path, monkeypatch):
    small_runs.use(monkeypatch, small_runs.full_network)
    config = small_config(max_steps=2)
    workdir = small_runs.uninterrupted(config, small_runs.full_network).path
    paths = sorted_files(photos)
    Image.fromarray(arrays(1, 5)[0][0]).save(tmp_path / "\u00e9.png")
    paths.append(str(tmp_path / "\u00e9.png"))
    config = prediction_config(RunFolder(workdir), batch_size=7, num_towers=2)
    output = tmp_path / "features.npz"
    write_predictions(workdir, paths, config, features="pool1", output=str(output))
    run = load_run(workdir)
    pool1 = run.model_ema.get_layer("pool1").output
    images = np.stack([np.asarray(Image.open(path)) for path in paths])
    expected = keras.Model(run.model_ema.inputs, pool1)(run.preprocess(images))
    with np.load(output) as file:
        assert sorted(file) == ["features", "labels", "names"]
        np.testing.assert_allclose(file["features"], expected, rtol=1e-4, atol=1e-5)
        assert file["names"].tolist() == paths
        labels = [CLASS_NAMES.index(pathlib.Path(x).parent.name) for x in paths[:-1]]
        assert file["labels"].tolist() == [*labels, -1]
    assert len(os.listdir(tmp_path)) == 2  # the image and the file


# Files.


def test_folders_are_walked_in_order(tmp_path):
    names = "b/2.png b/10.JPG b/a/x.webp a.gif .hid/x.png b/.x.png".split()
    for name in [*names, "/".join("z" * 60) + "/deep.png"]:
        path = tmp_path / "first" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "first" / "c").symlink_to(tmp_path / "first" / "b")
    (tmp_path / "second").mkdir()
    (tmp_path / "odd").touch()
    (tmp_path / "second" / "new.bmp").touch()
    found = walk([str(tmp_path / x) for x in ("first", "second", "odd")], pytest.fail)
    expected = "a.gif b/10.JPG b/2.png b/a/x.webp c/10.JPG c/2.png c/a/x.webp".split()
    expected += ["/".join("z" * 60) + "/deep.png"]
    expected = [f"first/{name}" for name in expected] + ["second/new.bmp", "odd"]
    assert [*found] == [str(tmp_path / name) for name in expected]


def test_the_label_is_the_class_whose_name_the_folder_has():
    labels, paths = Labels(["cat", "dog"]), ("dog/1.png", "/x/cat/y.jpg", "x.png")
    assert [labels(path) for path in (*paths, "dogs/dog")] == [1, 0, -1, -1]
    # Images in subfolders of a class folder, relative to the folder that was given.
    labels = Labels(["cat", "train", "wild"], ["p", "q/cat"])
    paths = "p/train/cat/wild/1.png", "p/train/train/1.png", "q/cat/wild/1.png"
    assert [labels(path) for path in paths] == [0, 1, 2]
    paths = "q/cat/1.png", "x/cat/new/1.png", "x/cat/new/more/1.png"
    assert [labels(path) for path in paths] == [0, 0, -1]
    labels = Labels(["pets/cat", "wild/cat"], ["p", "q/wild", "r/pets/cat"])
    paths = "p/pets/cat/x/1.png", "p/cat/1.png", "q/wild/cat/1.png", "r/pets/cat/1.png"
    assert [labels(path) for path in paths] == [0, -1, 1, 0]
