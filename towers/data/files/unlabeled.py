"""Images of any size for a trained network, from files or memory."""

import collections
import contextlib
import io
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from unicodedata import normalize

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps

from towers.data import streams
from towers.data.files.class_folders import depth_of, is_split
from towers.data.files.image import inspect, read_image
from towers.data.files.paths import Paths, check_paths, class_name, reason
from towers.data.files.reading import read_image_file
from towers.data.pixel_format import PHOTO, PixelFormat
from towers.errors import DataError, UnavailableDataError, cause
from towers.messages import one_line

# Floats up to this maximum that are not whole are fractions, not values of 0..255.
MAX_FRACTIONS = 4
AHEAD = 4  # number of images that each reader reads ahead


class ImageFile(NamedTuple):
    """An image [height, width, channels]; None with a fault if unusable."""

    path: str
    image: np.ndarray | None
    fault: str = ""
    source: Any = None  # path, array or Pillow image that is resized


def read_files(
    files: Iterable[str | tuple[int, Any]],
    image_shape: tuple[int, int, int],
    max_pixels: int,
    ahead: int = 0,
    **resize_options: Any,
) -> Iterator[ImageFile]:
    """Read images in threads, ahead of their use, and yield them in order.

    Files are paths, or pairs of a number and an array or Pillow image. `image_shape` is
    that of the network; `resize_options` are of `image.read_image`.
    """
    is_whole = resize_options.get("center_crop", 0) in (0, 1)

    def read(file):
        path, source = (file, file) if isinstance(file, str) else file
        try:
            if is_whole and getattr(source, "shape", None) == image_shape:
                return ImageFile(str(path), source, source=source)
            content = _content(source, max_pixels, image_shape[-1])
            options = {"max_pixels": max_pixels, **resize_options}
            image = read_image(content, image_shape, **options)
        except (OSError, ValueError, MemoryError, UnavailableDataError) as error:
            return ImageFile(str(path), None, reason(error))
        return ImageFile(str(path), image, source=source)

    pool = ThreadPoolExecutor(streams.NUM_READERS)
    pending: collections.deque = collections.deque()
    try:
        for file in files:
            pending.append(pool.submit(read, file))
            if len(pending) > max(ahead, AHEAD * streams.NUM_READERS):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_upright(
    source: Any, channels: int, max_pixels: int, pixels: PixelFormat = PHOTO
) -> np.ndarray:
    """Return the `source` of an `ImageFile` in its size, uint8, turned upright."""
    if getattr(source, "shape", (0,))[-1] == channels:
        return pixels.to_bytes(source)
    content = _content(source, max_pixels, channels)
    shape = *inspect(content, max_pixels)[0], channels
    image = read_image(content, shape, max_pixels=max_pixels, pixels=pixels)
    return pixels.to_bytes(image)


def fit_images(images: np.ndarray, **options: Any) -> Iterator[np.ndarray]:
    """Yield images resized as by `read_files`; DataError if one is unusable."""
    for file in read_files(enumerate(images), **options):
        if file.image is None:
            raise DataError(f"data: image {file.path}: {file.fault}")
        yield file.image


def _content(image, max_pixels, channels):
    """Return the content of the file of an image, or of an image in memory."""
    if isinstance(image, str):
        return read_image_file(image, max_pixels)
    file = io.BytesIO()
    if isinstance(image, Image.Image):
        ImageOps.exif_transpose(image).save(file, "TIFF")
    else:
        has_alpha = image.shape[-1] == 4 and channels in (1, 3)
        np.save(file, image[..., :3] if has_alpha else image)
    return file.getvalue()


if TYPE_CHECKING:
    _Image = Image.Image | np.typing.ArrayLike
    Images: TypeAlias = Paths | _Image | Sequence[_Image] | tf.data.Dataset
else:  # other values are a DataError
    Images: TypeAlias = Any


def paths_or_images(
    images: Any, dtype: str
) -> tuple[list[str], Iterable[np.ndarray | Image.Image]]:
    """Return (paths, images of a dtype of `PixelFormat`); one of them is empty.

    Images are an array, a Pillow image, a list of them, or a `tf.data.Dataset`.
    """
    if isinstance(images, tf.data.Dataset):
        return [], _elements(images, dtype)
    is_path = isinstance(images, str | os.PathLike)
    is_list = isinstance(images, Iterable) and not isinstance(images, Mapping)
    if is_path or not is_list or getattr(images, "ndim", 1) != 1:
        images = [images]
    images = list(images)
    if all(isinstance(image, str | os.PathLike) for image in images):
        return check_paths(images), ()
    if isinstance(images[0], list | tuple):  # of numbers
        images = [images]
    return [], [image for x in images for image in _batch(x, dtype)]


def _elements(dataset, dtype):
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise DataError("images: the data set has no end; leave out repeat()")
    with reading("images: the data set"):
        for element in dataset.as_numpy_iterator():
            images = element[0] if isinstance(element, tuple) else element
            yield from _batch(images, dtype)


def _batch(images, dtype):
    if isinstance(images, Image.Image):
        return [images]
    return pixels(images, "images", dtype, may_be_one=True)


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Convert errors of a `tf.data.Dataset` to DataErrors that begin with `what`."""
    try:
        yield
    except (ValueError, tf.errors.OpError) as error:
        reason = cause(error)
        differ = isinstance(error, ValueError) or "Cannot batch" in reason
        problem = "has images that differ in shape" if differ else "cannot be read"
        raise DataError(f"{what} {problem}: {reason}") from None


def pixels(
    images: Any, what: str, dtype: str = "", may_be_one: bool = False
) -> np.ndarray:
    """Return images as [n, height, width, channels] of a dtype of `PixelFormat`.

    By default numbers from 0 to 255 become uint8, other whole ones uint16 if they fit,
    and the rest float32. Accepts [n, height, width(, channels)]; with `may_be_one` also
    a single image. DataError if they are not finite or do not fit the dtype.
    """
    first = images[0] if isinstance(images, list | tuple) and len(images) else None
    if isinstance(images, Mapping) or getattr(first, "ndim", 0) >= 4:
        kind, way = type(images).__name__, "give one array"
        raise DataError(f"{what} are a {kind} of inputs; a network has one: {way}")
    try:
        images = np.asarray(images)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"{what} differ in shape: {one_line(error)}") from None
    if images.dtype.name == "bfloat16":  # NumPy has none
        images = images.astype(np.float32)
    if may_be_one and (images.ndim == 2 or (images.ndim == 3 and images.shape[2] < 5)):
        images = images[None]
    shape, hint = images.shape[1:], ""
    if images.size and isinstance(images.flat[0], str | bytes):
        hint = "; files of images are a data set by data_dir"
    elif images.dtype.kind == "O":
        hint = "; of arrays of one shape np.stack makes one"
    elif images.ndim == 4 and shape[0] in (1, 3) and min(shape[1:]) > 4:
        hint = "; np.moveaxis(images, 1, -1) moves their channels to the end"
    elif images.ndim in (3, 4) and images.dtype.kind in "biuf" and np.all(shape):
        images = images if images.ndim == 4 else images[..., None]
        return _with_dtype(images, what, dtype)
    expected = "real numbers [n, height, width, channels], none of them 0"
    actual = f"{images.dtype} {list(images.shape)}"
    raise DataError(f"{what} are {actual}; they should be {expected}{hint}")


def _with_dtype(images, what, dtype):
    if not images.size:
        return images.astype(dtype or np.uint8)
    low, high = float(images.min()), float(images.max())
    is_float, hint = images.dtype.kind == "f", ""
    may_be = is_float and high <= MAX_FRACTIONS
    is_fraction = may_be and (high == 1 or (images % 1).any())
    inferred = "float32"
    if low >= -0.5 and high <= 255.5 and not is_fraction:
        inferred = "uint8"
    elif images.dtype.kind == "u" or (not is_float and low >= 0 and high < 65536):
        inferred = "uint16" if high < 65536 else "float32"
    if not np.isfinite([low, high]).all():
        hint = "some are not finite: replace them, or leave these images out"
    elif high == 1 and not is_float and len(images) > 1 and not dtype:
        hint = "multiply drawings of 0 and 1 by 255"
    elif dtype == "uint8" and inferred != "uint8":
        hint = "the network was trained on numbers from 0 to 255"
    elif dtype and dtype != inferred and images.dtype == np.uint8:
        hint = f"the network was trained on {dtype}, in other units"
    elif dtype == "uint16" and inferred == "float32":
        hint = "the network was trained on uint16"
    if hint:
        raise DataError(f"{what} are {images.dtype} from {low:g} to {high:g}; {hint}")
    dtype = dtype or inferred
    if is_float and dtype != "float32":  # buffered, without a second array of floats
        return np.rint(images, out=np.empty(images.shape, dtype), casting="unsafe")
    return images.astype(dtype, copy=False)


class Labels:
    """Function from the path of a file to the label of its class folder.

    The first class folder below the given path counts, or else that path or its parent.
    """

    def __init__(self, class_names: Sequence[str], paths: Sequence[str] = ()):
        self._labels = {normalize("NFC", x): i for i, x in enumerate(class_names)}
        self._depth = depth_of(class_names)
        self._given = set(map(pathlib.PurePath, paths))

    def __call__(self, path: str) -> int:
        """Return the label, or -1 if no folder has the name of a class."""
        folder, *above = pathlib.PurePath(path).parents
        given = next((x for x in (folder, *above) if x in self._given), folder)
        below, names = folder.relative_to(given).parts, []
        parts = [*os.path.abspath(given).split(os.sep), *below]
        first = len(parts) - len(below)
        for end in (*range(first + 1, len(parts) + 1), first, first - 1):
            for begin in range(max(0, end - self._depth), end):
                name = class_name("/".join(parts[begin:end]))
                if name in self._labels:
                    names.append(name)
                    break
        if names[1:] and names[:2] == [*below[:2]] and is_split(below[0]):
            names = names[1:]  # a class is called train
        return self._labels[names[0]] if names else -1
