"""Activations of a layer in an `.npz` file."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np


@contextlib.contextmanager
def create_features_file(
    path: str,
) -> Iterator[Callable[[Sequence[str], Sequence[int], np.ndarray], None]]:
    """The function that adds a row for each of the n images of a batch, from their
    paths, labels [n], -1 where there is none, and activations [n, ...].

    The file has "features", "labels" (int64) and "names" (texts). It is written at the
    end; until then a nameless temporary file has the activations.

    Args:
        path: of the file; of a link the file that it leads to is written.

    Raises:
        OSError: the file cannot be written, or something else stands there, such as
            /dev/null, which a rename would replace.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "is there and no file")
    names, all_labels, shape, dtype = [], [], (), None
    with tempfile.TemporaryFile(dir=os.path.dirname(path)) as rows:

        def write(paths, labels, features):
            nonlocal shape, dtype
            shape, dtype = features.shape[1:], features.dtype
            names.extend(paths)
            all_labels.extend(labels)
            rows.write(features.tobytes())

        yield write
        if not names:
            return
        rows.flush()
        features = np.memmap(rows, dtype, "r", shape=(len(names), *shape))
        labels = np.array(all_labels, np.int64)
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                np.savez(file, features=features, labels=labels, names=names)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
