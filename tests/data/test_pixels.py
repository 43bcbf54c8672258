"""Pixels of 16 bits, floats and bands are the numbers that other libraries wrote."""

import dataclasses
import glob
import io
import os
import pathlib

import imagecodecs
import numpy as np
import pytest
import tensorflow as tf
import tifffile
from containers import file_of_others
from pictures import png, random_pixels
from PIL import Image

from towers import Config, data
from towers.build.builder import create_augmentation
from towers.data.files.image import inspect, read_image
from towers.data.pixel_format import PixelFormat
from towers.data.randomness import Draw
from towers.data.sources import DataSet
from towers.errors import ConfigError, DataError

DEEP = random_pixels(1, 9, 7, 3, np.uint16)
BANDS = np.random.default_rng(0).normal(0, 50, (9, 7, 13))


def read(content: bytes, shape=None, **options) -> np.ndarray:
    """The image as it is stored, or in another shape."""
    size, (dtype, bands), _ = inspect(content)
    return read_image(
        content, shape or (*size, bands), pixels=PixelFormat(dtype, bands), **options
    )


def of_numpy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def in_tiff(array: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "dtype", ["uint8", "uint16", "int8", "int16", "int32", "f2", "f4"]
)
@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_bands_are_those_that_tifffile_wrote(dtype, planar):
    bands = np.abs(BANDS).astype(dtype) if dtype[0] == "u" else BANDS.astype(dtype)
    stored = (
        bands if planar == "contig" else np.ascontiguousarray(np.moveaxis(bands, -1, 0))
    )
    options = {"photometric": "minisblack", "planarconfig": planar}
    for compression in (None, "zlib", "lzw"):
        content = in_tiff(stored, **options, compression=compression)
        np.testing.assert_array_equal(read(content), bands)
    np.testing.assert_array_equal(read(of_numpy(bands)), bands)


def test_tiff_tags_are_followed():
    colors = {"photometric": "rgb"}
    rgba = random_pixels(2, 9, 7, 4, np.uint16)
    for stored, options, expected in (
        (DEEP, colors | {"compression": "zlib", "predictor": True}, DEEP),
        (DEEP[..., 0], {"photometric": "miniswhite"}, 65535 - DEEP[..., :1]),
        (rgba, colors | {"extrasamples": ["unassalpha"]}, rgba[..., :3]),
        (rgba, colors | {"extrasamples": ["unspecified"]}, rgba),
        (DEEP[..., 0], {"byteorder": ">"}, DEEP[..., :1]),
        (DEEP, colors | {"extratags": [(274, "H", 1, 6, True)]}, np.rot90(DEEP, -1)),
        (
            np.ascontiguousarray(np.moveaxis(rgba, -1, 0)),
            {"metadata": {"axes": "CYX"}, "photometric": "minisblack"},
            rgba,
        ),
    ):
        actual = read(in_tiff(stored, **options))
        np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))
    with pytest.raises(ValueError, match=r"13 pages.*axes QYX"):
        read(in_tiff(np.zeros((13, 30, 30), np.uint16)))


def test_bands_of_gdal_are_those_that_it_wrote():
    """`files_of_others.json` has what rasterio 1.4.4 wrote, LZW with a predictor."""
    expected = 1000 + np.arange(13 * 4 * 5).reshape(13, 4, 5)
    actual = read(file_of_others("bands.tif"))
    np.testing.assert_array_equal(actual, np.moveaxis(expected, 0, -1))


def test_other_files_of_16_bits_have_their_values():
    twelve = DEEP >> 4
    for content, expected in (
        (png(DEEP), DEEP),
        (b"P6 # colors\n7 9 65535\n" + DEEP.astype(">u2").tobytes(), DEEP),
        (b"P5 7 9\n4095\n" + twelve[..., 0].astype(">u2").tobytes(), twelve[..., :1]),
        (imagecodecs.jpeg2k_encode(DEEP, reversible=True), DEEP),
        (imagecodecs.jpeg2k_encode(twelve, reversible=True, bitspersample=12), twelve),
        (of_numpy(DEEP.astype(">u2")), DEEP),
    ):
        actual = read(content)
        assert actual.dtype == np.uint16
        np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


def test_dicom_files_have_the_values_of_pydicom():
    pydicom = pytest.importorskip("pydicom")
    from pydicom import pixels

    folder = os.path.join(os.path.dirname(pydicom.data.__file__), "test_files")
    for name in (
        "CT_small",
        "MR_small_RLE",
        "693_J2KI",
        "examples_palette",
        "SC_rgb_rle",
    ):
        [path] = glob.glob(f"{folder}/{name}.dcm")
        file = pydicom.dcmread(path)
        expected = pixels.pixel_array(file, index=0)
        if file.PhotometricInterpretation == "PALETTE COLOR":
            expected = pixels.apply_color_lut(expected, file)
        elif file.SamplesPerPixel == 1:
            expected = pixels.apply_modality_lut(expected, file)
            plain = read_image(
                pathlib.Path(path).read_bytes(),
                (*expected.shape, 1),
                pixels=PixelFormat("float32", windows=False),
            )
            np.testing.assert_array_equal(plain[..., 0], expected)
            expected = pixels.apply_voi_lut(expected, file)[..., None]
        actual = read(pathlib.Path(path).read_bytes())
        expected = expected.astype(actual.dtype)
        np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))
    file = pydicom.dcmread(f"{folder}/CT_small.dcm")
    expected = read(saved(file))
    file.PhotometricInterpretation = "MONOCHROME1"  # white is the lowest value
    low, high = -(2**15) - 1024, 2**15 - 1 - 1024
    np.testing.assert_array_equal(read(saved(file)), low + high - expected)


def saved(file) -> bytes:
    content = io.BytesIO()
    file.save_as(content)
    return content.getvalue()


@pytest.mark.parametrize("shape", [(5, 4), (12, 16)])
def test_bands_are_resized_as_pillow_resizes_floats(shape):
    expected = [
        np.asarray(Image.fromarray(x).resize(shape[::-1], Image.Resampling.BILINEAR))
        for x in np.moveaxis(BANDS.astype(np.float32), -1, 0)
    ]
    actual = read(of_numpy(BANDS), (*shape, 13), fit="stretch")
    np.testing.assert_array_equal(actual, np.stack(expected, -1))


# Data sets.


def folder_of(root: pathlib.Path, images, ending="npy") -> str:
    """Alternating classes of arrays, or of the contents of files."""
    for number, image in enumerate(images):
        path = root / "ab"[number % 2] / f"{number}.{ending}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image if isinstance(image, bytes) else of_numpy(image))
    return str(root)


def loaded(root, **options) -> DataSet:
    return data.load("image_folder", str(root), **options)


def test_the_range_is_that_of_the_percentiles_of_training_images(tmp_path, capfd):
    images = np.random.default_rng(0).normal(1000, 9, (20, 30, 30)).astype(np.uint16)
    data_set = loaded(folder_of(tmp_path, images))
    training = images[
        np.sort(
            [int(data_set.train.location(i).split("/")[-1][:-4]) for i in range(18)]
        )
    ]
    low, high = np.percentile(training, [0.1, 99.9])
    pixels = data_set.pixels
    assert (pixels.dtype, pixels.low, pixels.high) == ("uint16", (low,), (high,))
    scaled = np.clip((training - low) / (high - low), 0, 1) * 255
    np.testing.assert_allclose(data_set.mean, [scaled.mean()] * 3, rtol=1e-5)
    np.testing.assert_allclose(data_set.std, [scaled.std()] * 3, rtol=1e-5)
    assert (
        f"scaled from {low:g} to {high:g}"
        in dict(data_set.inventory.lines(data_set))["pixels"]
    )
    stored, _ = data_set.train.read(tf.constant([0], tf.int64))
    assert stored.dtype == tf.uint16 and "warning" not in "".join(capfd.readouterr())
    given = loaded(tmp_path, value_range="900:1100").pixels
    assert (given.low, given.high) == ((900,), (1100,))
    assert loaded(tmp_path, value_range="dtype").pixels.high == (65535,)
    with pytest.raises(ConfigError, match="2 ranges for images of 3 channels"):
        loaded(tmp_path, value_range="0,0:1,1")


def test_other_bands_have_a_range_each(tmp_path):
    images = np.random.default_rng(0).normal([0, 500], [1, 9], (20, 30, 30, 2))
    low, high = np.array(
        [*map(vars(loaded(folder_of(tmp_path, images)).pixels).get, ("low", "high"))]
    )
    np.testing.assert_allclose((low + high) / 2, [0, 500], atol=1)
    np.testing.assert_allclose((high - low) / 6.18, [1, 9], rtol=0.1)


def test_8_bits_among_16_are_read_as_8_and_other_kinds_refused(tmp_path):
    images = [
        png((DEEP >> 8).astype(np.uint8)) if i % 4 > 1 else png(DEEP) for i in range(8)
    ]
    data_set = loaded(folder_of(tmp_path, images, "png"))
    assert data_set.pixels.is_photo
    assert "of 4 of 8 images" in data_set.inventory.inferred["pixels"]
    stored, _ = data_set.train.read(
        tf.range(data_set.train.num_examples, dtype=tf.int64)
    )
    assert (stored == DEEP >> 8).numpy().all()
    (tmp_path / "a" / "x.npy").write_bytes(of_numpy(BANDS))
    with pytest.raises(DataError, match=r"several kinds.* 1 of 13 band.*a/x\.npy"):
        loaded(tmp_path)


def test_the_cache_counts_the_bytes_of_the_pixels(tmp_path):
    images = random_pixels(0, 100 * 10, 10, 5, np.uint16).reshape(100, 10, 10, 5)
    data_set = loaded(folder_of(tmp_path, images), image_cache_mb=0.01)
    source = data_set.train._source
    source.read(tf.range(100, dtype=tf.int64))
    assert (source._kept[0] >= 0).sum() == 10  # 10,000 / (10 * 10 * 5 * 2)


# Augmentation.


@pytest.mark.parametrize("name", ["pad_crop_flip", "random_resized_crop", "tutorial"])
def test_augmentation_of_scaled_pixels_is_that_of_bytes(name, tmp_path):
    images = random_pixels(3, 4 * 32, 32, 3).reshape(4, 32, 32, 3)
    photos = loaded(folder_of(tmp_path, images))
    config = Config(augment=name, random_erasing=0.5, cutout_size=4)
    numbers = tf.range(4, dtype=tf.int64)
    draw = Draw(0, tf.constant(0, tf.int64), numbers, tf.zeros_like(numbers))
    expected = create_augmentation(config, photos)
    pixels = PixelFormat("uint16", 3, (100.0,), (100 + 257 * 255.0,))
    actual = create_augmentation(config, dataclasses.replace(photos, pixels=pixels))
    images //= 2  # 257 * 255 + 100 would not fit
    deep = images.astype(np.uint16) * 257 + 100
    for part, more in (("train", (draw,)), ("evaluate", ())):
        np.testing.assert_allclose(
            getattr(actual, part)(deep, *more),
            getattr(expected, part)(images, *more),
            atol=1e-3,
        )
    for options in ({"color_jitter": 0.3}, {"policy": "augmix"}):
        with pytest.raises(
            ConfigError, match=f"{next(iter(options))}.*changes of colors"
        ):
            create_augmentation(
                Config(**options), dataclasses.replace(photos, pixels=pixels)
            )
