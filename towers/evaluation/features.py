"""Activations of a layer in a file of NumPy's, written without holding them in memory.

The number of rows is known at the end only, while the header of an array comes first
and cannot be changed in an archive; so the rows wait in nameless temporary files.
"""

import contextlib
import errno
import os
import shutil
import tempfile
import zipfile
from collections.abc import Sequence

import keras
import numpy as np

from towers.errors import ConfigError, nearest


class FeaturesFile:
    """An `.npz` file with three arrays, a row of each for every image.

    "features": float32 (float64 of a network in float64) [n, ...], the activations;
    "names": the paths, texts [n]; "labels": int64 [n], -1 where there is none. `finish`
    gives it its name; until then nothing is there, or the former file. A context
    manager, which removes the temporary files.

    Args:
        path: of the file; of a link the file that it leads to is written.

    Raises:
        OSError: its folder cannot be written, or it is there and no file, such as
            /dev/null, which a rename would replace.
    """

    def __init__(self, path: str):
        self._path = os.path.realpath(path)
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            raise OSError(errno.EINVAL, "is there and no file")
        folder = os.path.dirname(self._path)
        with contextlib.ExitStack() as stack:
            self._features, self._names, self._labels = (
                stack.enter_context(tempfile.TemporaryFile(dir=folder))
                for _ in range(3)
            )
            self._stack = stack.pop_all()
        self._count, self._longest = 0, 1
        self._shape, self._dtype = None, None

    def write(
        self, paths: Sequence[str], labels: Sequence[int], features: np.ndarray
    ) -> None:
        """The rows of a batch: features [n, ...] of a type that NumPy has."""
        self._shape, self._dtype = features.shape[1:], features.dtype
        self._features.write(features.tobytes())
        self._labels.write(np.array(labels, "<i8").tobytes())
        for path in paths:
            name = path.encode("utf-8", "surrogateescape")
            self._names.write(name + b"\0")
            self._longest = max(self._longest, len(path))
        self._count += len(paths)

    def __enter__(self) -> "FeaturesFile":
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def finish(self) -> None:
        """Writes the file, where there is any row."""
        if not self._count:
            return
        temporary = f"{self._path}.{os.getpid()}.tmp"
        try:
            with zipfile.ZipFile(temporary, "w") as archive:
                shape = (self._count, *self._shape)
                _copy(archive, "features", self._features, self._dtype, shape)
                _copy(archive, "labels", self._labels, "<i8", (self._count,))
                self._copy_names(archive)
            os.replace(temporary, self._path)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise

    def _copy_names(self, archive):
        self._names.seek(0)
        dtype = np.dtype(f"<U{self._longest}")
        with archive.open("names.npy", "w", force_zip64=True) as file:
            _write_header(file, dtype, (self._count,))
            for name in _split(self._names):
                text = name.decode("utf-8", "surrogateescape")
                text = text.encode("utf-32-le", "surrogatepass")
                file.write(text.ljust(dtype.itemsize, b"\0"))


def _copy(archive, name, rows, dtype, shape):
    rows.seek(0)
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        _write_header(file, dtype, shape)
        shutil.copyfileobj(rows, file, 2**20)


def _write_header(file, dtype, shape):
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(file, header)


def _split(file):
    """The texts of a file that each end in a zero byte."""
    rest = b""
    while piece := file.read(2**20):
        *names, rest = (rest + piece).split(b"\0")
        yield from names


def cut_off(model: keras.Model, layer: str) -> keras.Model:
    """The network from its images to the output of a layer.

    Raises:
        ConfigError: there is no such layer.
    """
    outputs = {}

    def call(operation, *args, **kwargs):
        outputs[operation.name] = operation(*args, **kwargs)
        return outputs[operation.name]

    # `layer.output` may be of another network that the layer is part of as well.
    keras.models.clone_model(
        model,
        input_tensors=model.input,
        clone_function=lambda layer: layer,
        call_function=call,
    )
    if layer not in outputs:
        raise ConfigError(
            f"features={layer}: there is no such layer; {nearest(layer, outputs)}"
            f"layers: {', '.join(outputs)}"
        )
    return keras.Model(model.inputs, outputs[layer], name=model.name)
