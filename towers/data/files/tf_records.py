"""TFRecord files of `tf.train.Example`, one image each."""

import contextlib
import functools
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from towers.data.files import containers, reading
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import Index, Shard, label_text, read_shards
from towers.data.sources import DataSet, Trained
from towers.data.streams import call_in_readers, without_tuning
from towers.errors import cause
from towers.messages import shown

_KEYS = {
    "image": "image/encoded",
    "label": "image/class/label",
    "text": "image/class/text",
}
# Of a record: before the content its length and the checksum of that, behind it the
# checksum of the content.
_BEFORE, _AFTER = 12, 4
_BATCH = 256


def read(path: str, version: reading.Version, columns: Mapping[str, str]) -> Shard:
    """Return the images of a TFRecord file, which is read once, with its checksums.

    `columns` are "image", "label" and "text" -> key of the feature, by default as in
    TensorFlow's ImageNet. A text names the class, otherwise the label does. ValueError
    if a checksum is wrong, the file breaks off, or a record has no image, no such
    label, or several.
    """
    keys = _KEYS | columns
    kinds = {
        keys["image"]: tf.io.FixedLenFeature([], tf.string, ""),
        keys["label"]: tf.io.VarLenFeature(tf.int64),
        keys["text"]: tf.io.VarLenFeature(tf.string),
    }

    def parse(records):
        examples = tf.io.parse_example(records, kinds)
        label, text = examples[keys["label"]], examples[keys["text"]]
        texts = tf.sparse.to_dense(text, "")[:, :2]
        numbers = tf.strings.as_string(tf.sparse.to_dense(label, -1)[:, :2])
        return records, examples[keys["image"]], texts, numbers

    offsets, lengths, labels, offset, features = [], [], [], 0, {}
    with _file(path, version) as name:
        dataset = tf.data.TFRecordDataset(name, buffer_size=2**20).batch(_BATCH)
        try:
            for record in dataset.take(1).as_numpy_iterator():
                features = _features(record[0])
            dataset = without_tuning(dataset.map(parse))
            for records, images, texts, numbers in dataset.as_numpy_iterator():
                for row, (record, image) in enumerate(
                    zip(records, images, strict=True)
                ):
                    where = f"record {len(offsets)} (counted from 0)"
                    if not image:
                        raise ValueError(
                            f"{where} has no bytes in {keys['image']}; "
                            f"{_hint(features)}"
                        )
                    offsets.append(offset + _BEFORE + record.find(image))
                    lengths.append(len(image))
                    labels.append(_label(texts[row], numbers[row], where))
                    offset += _BEFORE + len(record) + _AFTER
        except tf.errors.OpError as error:
            where = f"record {len(offsets)} or one of the next {_BATCH}"
            text = f"{where} (counted from 0): {cause(error)}"
            if "ata types don't match" in str(error):
                text += f"; {_hint(features)}"
            raise ValueError(text) from error
    used = [keys[x] for x in ("image", "text", "label") if keys[x] in features]
    others = features.keys() - used
    unused = [("features", f"{key} ({features[key]})") for key in sorted(others)]
    spans = np.array(offsets, np.int64), np.array(lengths, np.int64)
    return Shard(*spans, labels, None, [("columns", ", ".join(used))], unused)


def load(
    data_dir: str = "",
    columns: str = "",
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """Load TFRecord files with images; arguments and errors as of `containers.load`."""
    return containers.load(
        "tfrecord",
        _KEYS,
        functools.partial(read_shards, read=read),
        data_dir,
        columns,
        image_options,
        trained,
    )


@contextlib.contextmanager
def _file(path, version):
    """Yield the path of a file, or for a URL of a copy; ValueError if it is packed."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(reading.open_file(path, version))
        if file.read(2) == b"\x1f\x8b":
            raise ValueError("is compressed by gzip; `zcat FILE > NEW` unpacks it")
        if reading.is_url(path):
            file.seek(0)
            copy = stack.enter_context(tempfile.NamedTemporaryFile())
            shutil.copyfileobj(file, copy)
            copy.flush()
            path = copy.name
        yield path


def _features(record):
    """Return key -> kind of the features of a record, bytes, int64 or float."""
    try:
        features = tf.train.Example.FromString(record).features.feature
    except DecodeError:
        return {}
    kinds = {key: features[key].WhichOneof("kind") for key in sorted(features)}
    return {key: (kind or "empty").partition("_")[0] for key, kind in kinds.items()}


def _hint(features):
    """Return the features that there are, and the option that names them."""
    listed = ", ".join(f"{key} ({kind})" for key, kind in features.items())
    return (
        f"it has {shown(listed, 150) or 'no tf.train.Example'}; "
        "--columns=image:KEY,label:KEY names the image and an integer label, text:KEY "
        "the name of a class"
    )


def _label(text, number, where):
    """Return the text, or else the number, as a label; None without both."""
    for values in (text, number):
        values = [x for x in values if x not in (b"", b"-1")]
        if values[1:]:
            raise ValueError(
                f"{where} has several labels; one is read, or several from a table"
            )
        if values:
            try:
                return label_text(values[0].decode())
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    return None


def open_records(paths: Sequence[str]) -> Index:
    """The records of some files, one file after the other, without labels.

    Lengths lead from one record to the next, so 8 bytes of each are read. The checksums
    of the contents are not compared: TensorFlow offers their kind (CRC-32C) to its own
    readers alone. ValueError where one breaks off, or is no TFRecord file.
    """
    spans = [None] * len(paths)
    versions = [reading.current_version(path) for path in paths]

    def read_spans(number):
        spans[number] = _spans(paths[number])

    call_in_readers(read_spans, len(paths))
    offsets, lengths = np.concatenate([np.zeros((2, 0), np.int64), *spans], 1)
    counts = [x.shape[1] for x in spans]
    numbers = np.repeat(np.arange(len(paths), dtype=np.int32), counts)
    labels = np.zeros(len(numbers), np.int32)
    return Index(paths, numbers, labels, (), offsets, lengths, versions=versions)


def _spans(path):
    """int64 [2, n]: the offset and the length of each record."""
    offset, spans = 0, []
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while offset < size:
            header = os.pread(file.fileno(), 8, offset).ljust(8, b"\xff")
            [length] = struct.unpack("<Q", header)
            if offset + _BEFORE + length + _AFTER > size:
                raise ValueError(
                    f"{path}: record {len(spans)} (counted from 0) breaks off, or it "
                    "is no TFRecord file"
                )
            spans.append((offset + _BEFORE, length))
            offset += _BEFORE + length + _AFTER
    return np.array(spans, np.int64).reshape(-1, 2).T
