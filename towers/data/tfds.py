"""Data sets of labelled images that tensorflow-datasets (TFDS) has prepared or can.

TFDS is imported inside the functions, since most runs do without it. Finding and
reading a prepared folder needs no network.
"""

import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tensorflow as tf
from absl import logging

from towers.data.sources import ArraySource, DataSet, channel_moments
from towers.errors import DataError

# Without a network the user shall hear so within 2 s; with one that is slow, or with a
# proxy that takes its time, a first answer may take longer.
CONNECT_SECS = 1.2
ANSWER_SECS = 20.0
# How long a download may stand still. TFDS itself would wait for ever.
STALL_SECS = 30.0

DEFAULT_PORTS = {"https": 443, "socks5": 1080, "socks5h": 1080, "socks4": 1080}


def default_dir() -> str:
    """The folder where TFDS keeps data sets unless told otherwise."""
    from tensorflow_datasets.core import constants

    return os.path.abspath(os.path.expanduser(constants.get_default_data_dir()))


def find_prepared(name: str, data_dir: str) -> str | None:
    """The newest prepared version `data_dir/name/1.2.3`, or None."""
    folder = os.path.join(data_dir, name)
    try:
        entries = os.listdir(folder)
    except OSError:
        return None
    versions = [
        tuple(map(int, entry.split(".")))
        for entry in entries
        if re.fullmatch(r"\d+\.\d+\.\d+", entry)
        # TFDS writes it last, so an unfinished folder has none.
        and os.path.exists(os.path.join(folder, entry, "dataset_info.json"))
    ]
    if not versions:
        return None
    return os.path.join(folder, ".".join(map(str, max(versions))))


def read_prepared(folder: str) -> DataSet:
    """Reads the splits `train` and `test` of a prepared folder into memory.

    The examples come in the order of their feature `id` where they have one, which in
    TFDS's CIFAR-10 is the order of the official files, else in that of the folder's
    files.

    Args:
        folder: as `find_prepared` gives it.

    Raises:
        DataError: the folder is damaged, or it does not hold uint8 images of one shape
            under `image` and classes under `label` in both splits.
    """
    import tensorflow_datasets as tfds

    try:
        with _less_chatter():
            builder = tfds.builder_from_directory(folder)
            shape, class_names = _image_and_classes(folder, builder.info)
            train = _read_split(folder, builder, "train", shape, len(class_names))
            test = _read_split(folder, builder, "test", shape, len(class_names))
    except DataError:
        raise
    except Exception as error:  # TFDS lets those of TensorFlow, protobuf, json through.
        raise DataError(
            f"{folder}: tensorflow-datasets cannot read it: {_one_line(error)}; "
            f"delete the folder to have it prepared anew"
        ) from error
    mean, deviation = channel_moments(train[0])
    return DataSet(
        name=builder.name,
        train=ArraySource(*train),
        test=ArraySource(*test),
        class_names=class_names,
        mean=mean,
        deviation=deviation,
        found=f"tensorflow-datasets {builder.info.full_name} in {folder}",
    )


def _image_and_classes(folder: str, info: Any) -> tuple[tuple, tuple[str, ...]]:
    """Shape of the images and names of the classes, or DataError where we cannot."""
    import tensorflow_datasets as tfds

    features = info.features
    image, label = (
        features[key] if key in features else None for key in ("image", "label")
    )
    if not isinstance(image, tfds.features.Image):
        raise DataError(f"{folder}: has no images under 'image'")
    if not isinstance(label, tfds.features.ClassLabel):
        raise DataError(f"{folder}: has no classes under 'label'")
    if image.np_dtype != np.uint8 or None in image.shape:
        raise DataError(
            f"{folder}: only uint8 images of one shape can be read, "
            f"found {np.dtype(image.np_dtype)} {list(image.shape)}"
        )
    for split in ("train", "test"):
        if split not in info.splits:
            raise DataError(
                f"{folder}: has no split '{split}', only {', '.join(info.splits)}"
            )
    return tuple(image.shape), tuple(label.names)


def _read_split(
    folder: str, builder: Any, split: str, shape: tuple, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [n, *shape] and int32 labels [n] of one split."""
    import tensorflow_datasets as tfds

    keys = [key for key in ("image", "label", "id") if key in builder.info.features]
    with tf.device("CPU:0"):
        examples = builder.as_dataset(
            split=split,
            shuffle_files=False,
            decoders=tfds.decode.PartialDecoding(dict.fromkeys(keys, True)),
            read_config=tfds.ReadConfig(try_autocache=False),
        )
        num_examples = builder.info.splits[split].num_examples
        images = np.empty((num_examples, *shape), np.uint8)
        labels = np.empty(num_examples, np.int32)
        ids = np.zeros(num_examples, object)
        done = 0
        for batch in examples.batch(1000).prefetch(2).as_numpy_iterator():
            end = done + len(batch["label"])
            images[done:end] = batch["image"]
            labels[done:end] = batch["label"]
            ids[done:end] = batch.get("id", 0)
            done = end
    # TFDS counts too, but were it ever not to, the rest of the arrays would be noise.
    if done != num_examples:
        raise DataError(
            f"{folder}: split '{split}' should have {num_examples} examples, "
            f"found {done}"
        )
    if num_examples and not 0 <= labels.min() <= labels.max() < num_classes:
        raise DataError(
            f"{folder}: split '{split}' has labels {labels.min()} to {labels.max()}, "
            f"expected 0 to {num_classes - 1}"
        )
    order = np.argsort(ids, kind="stable")
    return images[order], labels[order]


def unreachable(url: str) -> str | None:
    """Why `url` cannot be fetched, in words, or None where it answers.

    It asks as TFDS would, with the same library, through the same proxy. Without a
    network the answer comes within CONNECT_SECS, else within ANSWER_SECS.
    """
    import requests

    host = urlsplit(url).hostname
    try:
        _within(CONNECT_SECS, lambda: _connect(url))
        response = _within(
            ANSWER_SECS, lambda: requests.get(url, stream=True, timeout=ANSWER_SECS)
        )
    except Exception as error:  # Whatever it is, nothing can be fetched.
        return f"{host} cannot be reached ({_one_line(error)})"
    response.close()
    if response.status_code != 200:
        return f"{url} answers {response.status_code} {response.reason}"
    return None


def _connect(url: str) -> None:
    """Opens and closes a connection to the proxy for `url`, or to its host."""
    import requests

    proxies = requests.utils.get_environ_proxies(url)
    proxy = requests.utils.select_proxy(url, proxies)
    first = urlsplit(url if not proxy else proxy if "//" in proxy else f"//{proxy}")
    port = first.port or DEFAULT_PORTS.get(first.scheme, 80)
    try:
        socket.create_connection((first.hostname, port), CONNECT_SECS).close()
    except OSError as error:
        if not proxy:
            raise
        raise OSError(f"proxy {first.hostname}:{port}: {error}") from error


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """`function()`, or TimeoutError; a look-up of a name knows no time limit.

    The thread is left behind if it hangs; being a daemon it does not hold up the exit.
    """
    results = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((function(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result


def download(name: str, data_dir: str) -> str:
    """Has TFDS download `name` and prepare it in `data_dir`, in a process of its own.

    There it can be stopped at any time, touches no GPU, and what it prints can be kept
    back.

    Returns:
        The prepared folder.

    Raises:
        DataError: it failed, for whatever reason.
    """
    print(f"tensorflow-datasets downloads {name} to {data_dir} ...", flush=True)
    # Without a terminal or a GPU, but with the modules that this process sees.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    script = "import sys; from towers.data import tfds; tfds.prepare(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", script, name, data_dir],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    folder = find_prepared(name, data_dir)
    if done.returncode or not folder:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DataError(
            f"tensorflow-datasets could not download {name} to {data_dir}: {said[-1]}"
        )
    return folder


def prepare(name: str, data_dir: str) -> None:
    """The process of `download`: exit 1 and one line on stderr where it fails."""
    import requests
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import downloader

    # TFDS sets no time limit and tries eleven times, for minutes.
    send = requests.adapters.HTTPAdapter.send

    def send_in_time(self, request, **options):
        options["timeout"] = options.get("timeout") or STALL_SECS
        return send(self, request, **options)

    requests.adapters.HTTPAdapter.send = send_in_time
    downloader.MAX_RETRIES = 2
    tfds.disable_progress_bar()
    try:
        builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(
                force_checksums_validation=True, try_download_gcs=False
            )
        )
    except Exception as error:
        sys.exit(_one_line(error))


@contextlib.contextmanager
def _less_chatter() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if len(text) > 800:
        text = text[:797] + "..."
    return text or type(error).__name__
