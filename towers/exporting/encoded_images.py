"""Decoding of image files in a graph, with the pixels of the training."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.data.files.image import OVERSAMPLING, RATIOS

SOI, ADOBE = b"\xff\xd8", b"\xff\xee\0\x0eAdobe\0d\0\0\0\0\0"
# Orientation in the first directory of EXIF, whose tags are sorted, or in XMP.
ORIENTATION = (
    r"^\C*?(?:(?:Exif\x00\x00|eXIf)(?:"
    r"II\x2a\x00\x08\x00\x00\x00\C\C(?:(?:\C\x00|[\x00-\x11]\x01)\C{10})*?"
    r"\x12\x01\x03\x00\x01\x00\x00\x00([\x01-\x08])|"
    r"MM\x00\x2a\x00\x00\x00\x08\C\C(?:(?:\x00\C|\x01[\x00-\x11])\C{10})*?"
    r"\x01\x12\x00\x03\x00\x00\x00\x01\x00([\x01-\x08]))|"
    r"tiff:Orientation(?:=\"|>)([1-8]))\C*$"
)


def decode_image(
    content: tf.Tensor,
    image_shape: Sequence[int],
    center_crop: float = 0.0,
    interpolation: str = "auto",
    fit: str = "auto",
) -> tf.Tensor:
    """Return the pixels that `read_image` makes of a JPEG, PNG, GIF, BMP or WebP file.

    A few differ by 1, and those of some files by more, see docs/export.md.
    """
    *shape, channels = image_shape
    turn = _turn(content)
    # Ratios of JPEGs are chosen in float64, as in `read_image`.
    size = tf.cast(tf.where(turn > 3, shape[::-1], shape), tf.float64)

    def part_and_size(stored):
        """Return the part of the stored image that is resized, and to which size."""
        scales = size / stored
        if fit == "pad":
            inside = tf.round(1e6 * stored * tf.reduce_min(scales)) / 1e6
            return stored, tf.maximum(tf.round(inside), 1)
        if fit == "stretch":
            return stored, size
        part = tf.minimum(stored, size / tf.reduce_max(scales))
        return part * (center_crop or 1), size

    def decode_jpeg():
        shape = tf.io.extract_jpeg_shape(content)
        stored = tf.cast(shape[:2], tf.float64)
        part, inside = part_and_size(stored)
        times = tf.reduce_min(part / inside) / OVERSAMPLING
        index = tf.math.count_nonzero(times < RATIOS[:-1], dtype=tf.int32)
        # Pillow takes four colors as inverted, TensorFlow only after Adobe's marker.
        marked = tf.strings.join([SOI + ADOBE, tf.strings.substr(content, 2, -1)])
        jpeg = tf.where(shape[2] == 4, marked, content)
        options = {"channels": 3, "dct_method": "INTEGER_ACCURATE"}
        decoders = [
            functools.partial(tf.io.decode_jpeg, jpeg, ratio=ratio, **options)
            for ratio in RATIOS
        ]
        ratio = tf.gather(tf.constant(RATIOS, tf.float64), index)
        return tf.switch_case(index, decoders), stored, ratio

    def decode_other():
        image = tf.io.decode_image(content, channels=3, expand_animations=False)
        return image, tf.cast(tf.shape(image)[:2], tf.float64), tf.ones([], tf.float64)

    image, stored, ratio = tf.cond(tf.io.is_jpeg(content), decode_jpeg, decode_other)
    if channels == 1:  # ITU-R 601-2, rounded as by Pillow's `convert("L")`
        weighted = tf.cast(image, tf.int32) * [19595, 38470, 7471]
        image = (tf.reduce_sum(weighted, -1, keepdims=True) + 2**15) // 2**16
    part, inside = part_and_size(stored)
    scales = tf.cast(inside / part * ratio, tf.float32)
    begins = tf.cast((part - stored) / 2 * inside / part, tf.float32)
    inside = tf.cast(inside, tf.int32)
    # Pillow 13 begins with the height if it loses twice as many pixels as the width.
    lost = tf.shape(image)[:2] - inside
    first = tf.cast(lost[0] <= tf.maximum(2 * lost[1], 0), tf.int32)
    for axis in (first, 1 - first):
        is_axis = tf.one_hot(axis, 2)
        resized = tf.raw_ops.ScaleAndTranslate(
            images=image[tf.newaxis],
            size=tf.where(is_axis > 0, inside, tf.shape(image)[:2]),
            scale=1 + is_axis * (scales - 1),
            translation=is_axis * begins,
            kernel_type="keyscubic" if interpolation == "bicubic" else "triangle",
            antialias=True,
        )
        # Halves are rounded up, also if float32 makes them slightly too small.
        image = tf.saturate_cast(tf.floor(resized[0] + 0.5001), tf.uint8)
    upright = tf.transpose(image, tf.where(turn > 3, [1, 0, 2], [0, 1, 2]))
    upright = upright[:: 1 - (turn & 2), :: 1 - (turn + 1 & 2)]
    borders = tf.cast(tf.round((shape - tf.shape(upright)[:2]) / 2), tf.int32)
    upright = tf.image.pad_to_bounding_box(upright, *tf.unstack(borders), *shape)
    return tf.ensure_shape(upright, image_shape)


def _turn(content):
    """Return the orientation of an image file, minus 1; 0 if it has none."""
    start = tf.strings.substr(content, 0, 2**16)
    code = tf.strings.regex_replace(start, ORIENTATION, r"\1\2\3")
    codes = tf.constant([[bytes([i]), b"%d" % i] for i in range(1, 9)])
    is_code = tf.cast(tf.reduce_any(code == codes, 1), tf.int32)
    return tf.argmax(is_code, output_type=tf.int32)
