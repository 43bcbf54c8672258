"""Photos are turned as Pillow turns them, by EXIF or XMP."""

import io

import numpy as np
import pytest
import tensorflow as tf
from pictures import png, random_pixels
from PIL import Image, ImageOps

from towers.data.decoding import Decoding, Survey
from towers.data.encoded import EncodedSource, settle_size
from towers.data.headers import read_header
from towers.data.orientation import orientation, upright
from towers.data.pixels import decode, read_image

TAG = 0x0112
SAVED = {
    "JPEG": {"quality": 95},
    "PNG": {},
    "WEBP": {"lossless": True},
}

each_orientation = pytest.mark.parametrize("turned", range(1, 9))
each_format = pytest.mark.parametrize("kind", SAVED)


def smooth(height, width):
    """Pixels of which JPEG loses little, and no two corners are alike."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack(
        [200 * rows // height, 200 * columns // width, 0 * rows + 50], -1
    ).astype(np.uint8)


def photo(pixels, kind, turned, **options):
    exif = Image.Exif()
    exif[TAG] = turned
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, exif=exif, **SAVED[kind], **options)
    return file.getvalue()


@each_format
@each_orientation
def test_a_photo_is_turned_as_pillow_turns_it(kind, turned):
    content = photo(smooth(16, 40), kind, turned)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    assert expected.shape[0] == (40 if turned > 4 else 16)
    survey = Survey()
    for actual in (
        decode(content, 3),
        read_image(content, expected.shape, Decoding(survey=survey)),
    ):
        assert actual.shape == expected.shape
        # The decoders of TensorFlow and of Pillow round differently.
        most = 4 if kind == "JPEG" else 0
        assert np.abs(actual.astype(int) - expected).max() <= most
    assert survey.sizes == {expected.shape[:2]: 1}


@each_orientation
def test_a_reduced_photo_is_turned_as_pillow_turns_it(turned):
    content = photo(smooth(150, 260), "JPEG", turned)
    upright_image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    expected = ImageOps.fit(upright_image, (16, 16), Image.Resampling.BILINEAR)
    for decoding in (Decoding(image_size=16), Decoding(image_size=16, survey=Survey())):
        actual = read_image(content, (16, 16, 3), decoding)
        assert np.abs(actual.astype(int) - np.asarray(expected)).max() <= 4


def test_photos_that_are_upright_in_one_size_are_read_in_it():
    class Photos:
        contents = [photo(smooth(12, 20), "JPEG", 1), photo(smooth(20, 12), "PNG", 6)]

        def __len__(self):
            return 2

        def read(self, index):
            return self.contents[index], index

        def place(self, index):
            return str(index)

    decoding, shape, note = settle_size(Photos(), 3, Decoding())
    assert (shape, note) == ((12, 20, 3), "")
    images, _ = EncodedSource(Photos(), shape, decoding).read(
        tf.range(2, dtype=tf.int64)
    )
    np.testing.assert_array_equal(images[1], smooth(20, 12).swapaxes(0, 1)[:, ::-1])


@each_orientation
def test_arrays_are_turned_as_pillow_turns_them(turned):
    pixels = random_pixels(0, 5, 9)
    image = Image.fromarray(pixels)
    image.getexif()[TAG] = turned
    np.testing.assert_array_equal(
        upright(pixels, turned), ImageOps.exif_transpose(image)
    )


def test_the_orientation_in_xmp_is_read_where_there_is_no_exif():
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    file = io.BytesIO()
    Image.fromarray(smooth(8, 16)).save(file, "JPEG", xmp=xmp)
    content = file.getvalue()
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(content))).size == (8, 16)
    assert orientation(content, read_header(content)) == 8


@each_format
@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_is_none_leaves_the_photo(kind, value):
    content = photo(smooth(8, 16), kind, value)
    assert decode(content, 3).shape == (8, 16, 3)


def test_damaged_metadata_leaves_the_photo():
    content = photo(smooth(8, 16), "JPEG", 6)
    assert decode(content, 3).shape == (16, 8, 3)
    place = content.index(b"Exif\0\0") + 6
    for damaged in (b"XX", b"MM\0\x2b", b"II\x2a\0\xff\xff\xff\xff", bytes(10)):
        changed = content[:place] + damaged + content[place + len(damaged) :]
        assert decode(changed, 3).shape in ((8, 16, 3), (16, 8, 3))


def test_a_file_without_metadata_is_not_opened_by_pillow(monkeypatch):
    monkeypatch.setattr("towers.data.orientation._IMAGES", None)
    for content in (
        png(random_pixels(0)),
        tf.io.encode_jpeg(random_pixels(0)).numpy(),
    ):
        assert orientation(content, read_header(content)) == 1
