"""Heat maps of predictions, on the images as they are."""

import keras
import numpy as np
import pytest
from keras import layers
from PIL import Image

import towers
from towers import Config
from towers.errors import ConfigError
from towers.models.layers.blocks import Builder
from towers.models.zoo import vit

SIDE = 24
CONFIG = Config(
    augment="none",
    device="cpu",
    batch_size=32,
    num_epochs=5.0,
    eval_every_epochs=5.0,
    optimizer="adamw",
    learning_rate=1e-2,
    weight_decay=0.0,
    warmup_epochs=0.0,
    ema_decay=0.0,
    num_towers=1,
)


def drawn(count, seed=0, size=(SIDE, SIDE), side=6):
    """Gray noise with a red or green square; images, labels and corners."""
    rng = np.random.default_rng(seed)
    images = rng.integers(60, 120, (count, *size, 1)).repeat(3, -1)
    labels, corners = rng.integers(0, 2, count), []
    for image, label in zip(images, labels, strict=True):
        top, left = (rng.integers(0, x - side + 1) for x in size)
        image[top : top + side, left : left + side] = np.eye(3)[label] * 230
        corners.append((top, left))
    return images.astype(np.uint8), labels, corners


def convolutions():
    x = inputs = keras.Input((SIDE, SIDE, 3))
    for channels in (8, 16):
        x = layers.Conv2D(channels, 3, 2, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalMaxPooling2D()(x)))


def transformer():
    return vit.create_model(
        Builder((SIDE, SIDE, 3), num_classes=2),
        **{"name": "vit", "channels": 16, "depth": 1, "heads": 2},
        **{"has_class_token": True, "patch_size": 4},
    )


@pytest.fixture(scope="module", params=[convolutions, transformer])
def run(request, tmp_path_factory):
    """A short run, which tells all squares apart."""
    keras.utils.set_random_seed(0)
    path = tmp_path_factory.mktemp("run")
    data = drawn(512)[:2]
    data, model = (data, drawn(64, 1)[:2]), request.param()
    result = towers.train(path, CONFIG, model=model, data=data, report=False)
    assert result.accuracy == 1
    return path


def files_of_scenes(root):
    """Write photos of one square each; return path -> (label, box of the square)."""
    places = {}
    scenes = zip(*drawn(6, 2, (48, 64), 12), strict=True)
    kinds = ("a/x.jpg", "a/x.png", "a/x.tif", "b/x.png", "b/y.TIFF", "b/c/x.jpeg")
    for name, (scene, label, (top, column)) in zip(kinds, scenes, strict=True):
        left = min(max(column, 8), 44)  # in the middle square
        image = np.full_like(scene, 90)
        image[top : top + 12, left : left + 12] = np.eye(3)[label] * 230
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        exif, stored = Image.Exif(), Image.fromarray(image)
        if name != "a/x.png":  # stored as a phone does
            exif[0x0112] = 6
            stored = stored.transpose(Image.Transpose.ROTATE_90)
        stored.save(path, exif=exif)
        places[str(path)] = label, (top, left)
    return places


def test_the_hottest_part_of_a_photo_is_its_object(run, tmp_path):
    places = files_of_scenes(tmp_path / "photos")
    predicted = towers.predict(run, tmp_path / "photos", heatmaps=True)
    assert predicted.paths == sorted(places)
    hits, inside, outside = 0, [], []
    for path, heat in zip(predicted.paths, predicted.heatmaps, strict=True):
        _, (top, left) = places[path]
        assert heat.shape == (48, 64) and heat.dtype == np.float32
        assert heat.max() > 0.9 and not heat[:, :8].any() and not heat[:, 56:].any()
        row, column = np.unravel_index(heat.argmax(), heat.shape)
        # Cells have 8 pixels.
        hits += -8 <= row - top < 20 and -8 <= column - left < 20
        inside.append(heat[top : top + 12, left : left + 12].mean())
        outside.append(heat[:, 8:56].mean())
    assert hits >= 4 and np.mean(inside) > 2 * np.mean(outside)
    # In memory the same, but for the rounding of turned pixels.
    image = Image.open(predicted.paths[0])
    [same] = towers.predict(run, image, heatmaps=True).heatmaps
    np.testing.assert_allclose(same, predicted.heatmaps[0], atol=0.02)


@pytest.mark.parametrize("run", [convolutions], indirect=True)
def test_pictures_have_the_names_of_their_images(run, tmp_path, capfd):
    photos = tmp_path / "photos"
    places = files_of_scenes(photos)
    (photos / "a" / "x.tif.png").write_bytes((photos / "a" / "x.png").read_bytes())
    output = tmp_path / "maps"
    towers.write_predictions(run, [photos], heatmaps=output)
    names = "a/x.jpg a/x.png a/x.tif.png a/x.tif-2.png b/c/x.jpeg b/x.png b/y.TIFF.png"
    pictures = {str(x.relative_to(output)) for x in output.rglob("*.*")}
    assert pictures == {*names.split()}
    for name in ("a/x.jpg", "a/x.png", "b/y.TIFF.png"):
        _, (top, left) = places[str(photos / name.replace(".TIFF.png", ".TIFF"))]
        picture = np.asarray(Image.open(output / name)).astype(int)
        assert picture.shape == (48, 64, 3)
        redness = picture[..., 0] - picture[..., 2]
        assert redness[top : top + 12, left : left + 12].mean() > redness.mean()
    # Several paths keep the folders below their common one; arrays have numbers.
    files = [photos / "a" / "x.png", photos / "b" / "x.png"]
    towers.write_predictions(run, files, heatmaps=tmp_path / "two")
    assert (tmp_path / "two" / "a" / "x.png").exists()
    towers.write_predictions(run, drawn(2)[0], heatmaps=tmp_path / "arrays")
    assert sorted(x.name for x in (tmp_path / "arrays").iterdir()) == ["0.png", "1.png"]
    before = files[0].read_bytes()
    for folder, why in (
        (photos / "a", "not empty"),
        (photos / "maps", "is in"),
        (files[0], "Not a directory"),
    ):
        with pytest.raises(ConfigError, match=f"heatmaps={folder}: .*{why}"):
            towers.write_predictions(run, [photos], heatmaps=folder)
    assert files[0].read_bytes() == before
