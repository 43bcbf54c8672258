"""TensorBoard event files."""

import contextlib
import errno
import math
import os
import pathlib
import struct
import time
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf


class Board:
    """TensorBoard event files of one kind, "train" or "eval".

    TensorFlow's writer reports no error: on a full disk it leaves a part of an event,
    after which no reader finds any other. So each event is looked for in the file.
    Where one is missing, an OSError is raised, the file is cut after its last whole
    event, and the next event begins another file.

    Numbers go to TensorFlow as arrays: of each Python number that it is given it keeps
    a tensor until the process ends.

    Args:
        folder: TensorBoard's `--logdir`, in a run's folder.
        kind: the name of the curves there.
    """

    def __init__(self, folder: pathlib.Path, kind: str):
        self._folder = folder / kind
        self._writer: tf.summary.SummaryWriter | None = None
        self._suffix = ""
        self._end = self._num_events = 0  # of the whole events in the file
        self._num_expected = 0

    def scalars(self, step: int, values: Mapping[str, float | np.ndarray]) -> None:
        """A curve per value; a vector gives one per element, "loss/tower_2"."""
        curves = {}
        for name, value in values.items():
            if np.ndim(value) == 0:
                curves[name] = value
            else:
                curves |= {f"{name}/tower_{i}": x for i, x in enumerate(value)}
        with self._writing(len(curves)):
            for name, value in curves.items():
                tf.summary.scalar(name, np.asarray(value), np.asarray(step))

    def histograms(
        self, step: int, values: Mapping[str, np.ndarray | tf.Tensor], group: str
    ) -> None:
        with self._writing(len(values)):
            for name, value in values.items():
                tf.summary.histogram(f"{group}/{name}", value, np.asarray(step))

    def images(self, step: int, images: tf.Tensor, name: str) -> None:
        """The first 64 images of a batch, float [n, h, w, 1 or 3], side by side."""
        with self._writing(1):
            grid = image_grid(images.numpy())[None]
            tf.summary.image(name, grid, np.asarray(step))

    @contextlib.contextmanager
    def _writing(self, num_events: int) -> Iterator[None]:
        """So many events that are written inside are in the file afterwards."""
        try:
            if self._writer is None:
                self._open()
            with self._writer.as_default():
                yield
            self._writer.flush()
            self._check(num_events)
        except OSError:
            self._close()
            raise
        except tf.errors.OpError as error:
            self._close()
            raise self._error() from error

    def _open(self):
        # Not with all folders above: a run's folder that was removed stays so.
        for folder in (self._folder.parent, self._folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
        if not os.statvfs(self._folder).f_bavail:
            raise self._error()  # rather than to leave a file without events each time
        self._suffix = f".{os.getpid()}.{time.monotonic_ns()}"
        self._end, self._num_events = 0, 0
        self._num_expected = 1  # the first event is the file's version
        self._writer = tf.summary.create_file_writer(
            str(self._folder), filename_suffix=self._suffix
        )

    def _path(self):
        for name in os.listdir(self._folder):
            if name.endswith(self._suffix):
                return self._folder / name
        raise _os_error(errno.ENOENT, self._folder)

    def _check(self, num_events):
        """Finds the events that were written, or raises an OSError."""
        self._num_expected += num_events
        with open(self._path(), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while header := os.pread(file.fileno(), 8, self._end):
                # Length, checksum of the length, event, checksum of the event.
                (length,) = struct.unpack("<Q", header.ljust(8, b"\0"))
                if self._end + length + 16 > size:
                    break
                self._end += length + 16
                self._num_events += 1
        if self._num_events != self._num_expected or self._end != size:
            raise self._error()

    def _error(self):
        free = os.statvfs(self._folder).f_bavail
        return _os_error(errno.EIO if free else errno.ENOSPC, self._folder)

    def _close(self):
        """Ends the file after its last whole event."""
        if self._writer is None:
            return
        with contextlib.suppress(OSError, tf.errors.OpError):
            self._writer.close()
        self._writer = None
        with contextlib.suppress(OSError):
            os.truncate(self._path(), self._end)


def _os_error(code, path):
    return OSError(code, os.strerror(code), str(path))


def image_grid(images: np.ndarray, most: int = 64) -> np.ndarray:
    """Images next to each other, each stretched to the range [0, 1].

    Args:
        images: floats [n, height, width, channels].
        most: images beyond this number are left out.

    Returns:
        float32 [rows * height, columns * width, channels] in [0, 1].
    """
    images = images[:most].astype(np.float32)
    n, height, width, channels = images.shape
    low = images.min(axis=(1, 2, 3), keepdims=True)
    high = images.max(axis=(1, 2, 3), keepdims=True)
    images = (images - low) / np.maximum(high - low, 1e-6)
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    grid = np.zeros((rows * columns, height, width, channels), np.float32)
    grid[:n] = images
    grid = grid.reshape(rows, columns, height, width, channels)
    return grid.swapaxes(1, 2).reshape(rows * height, columns * width, channels)
